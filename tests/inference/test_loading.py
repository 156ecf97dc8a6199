"""Packed directories in diffusers: bit-exact, counted, one dtype, saved as they were."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import quantkit
from quantkit.checkpoint.spec import PACKED_PARTS
from quantkit.device.backends import Backend, use
from quantkit.errors import CheckpointError, InputError, ModelError
from quantkit.inference.deviation import watch
from quantkit.inference.layers import iterate_packed, packed_layers
from quantkit.inference.packed_layer import PackedLayer
from quantkit.numerics.formats import E4M3FN, E5M2
from quantkit.numerics.granularity import PerChannel, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.storage.tensorfile import read_header
from tests.support.packed import digest, pack_component

TOKEN = Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN)
#: One of each, spread over the layers in turn; e5m2 and float32 scales are what loaders destroy.
MIXED = (
    TOKEN,
    Scheme(E5M2, PerChannel(), None, Activation.TOKEN, smooth=True),
    Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, Activation.TOKEN),
    Scheme(E4M3FN, PerTensor(), None, Activation.STATIC),
    Scheme(E5M2, PerTensor(), TWO_OF_FOUR, Activation.STATIC, (300.5, 600.5), smooth=True),
    Scheme(E4M3FN, PerChannel(), None, Activation.NONE),
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def packable(folder):
    """Layers inside blocks, with rows that both kernels divide."""
    with safe_open(folder / "diffusion_pytorch_model.safetensors", framework="pt") as file:
        for name in sorted(file.keys()):
            shape = file.get_slice(name).get_shape()
            layer, _, part = name.rpartition(".")
            inside = "block" in layer and "norm" not in layer and "emb" not in layer
            if part == "weight" and len(shape) in (2, 4) and shape[1] % 32 == 0 and inside:
                yield layer


def mixed(folder):
    return {layer: MIXED[i % len(MIXED)] for i, layer in enumerate(packable(folder))}


@pytest.fixture(scope="session")
def packed_dir(pipeline_dir, tmp_path_factory):
    """A packed pipeline with every kind of scheme."""
    path = tmp_path_factory.mktemp("loading") / "packed"
    shutil.copytree(pipeline_dir, path)
    pack_component(path / "unet", mixed(path / "unet"))
    return path


@pytest.fixture(scope="session")
def sharded_dir(pipeline_dir, tmp_path_factory):
    """The same UNet in three shards."""
    path = tmp_path_factory.mktemp("loading") / "sharded"
    shutil.copytree(pipeline_dir, path)
    pack_component(path / "unet", mixed(path / "unet"), shards=3)
    return path


@pytest.fixture
def broken(packed_dir, tmp_path):
    """A copy to break."""
    shutil.copytree(packed_dir, tmp_path / "broken")
    return tmp_path / "broken"


def unet_class():
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel


def tensors_on_disk(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: t for file in files for name, t in load_file(file).items()}


def same_bytes(a, b):
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def assert_bit_exact(model, folder):
    disk = tensors_on_disk(folder)
    state = model.state_dict()
    packed = [
        n
        for n in state
        if n.rpartition(".")[2] in PACKED_PARTS
        and isinstance(model.get_submodule(n.rpartition(".")[0]), PackedLayer)
    ]
    assert len(packed) > 40
    assert {disk[n].dtype for n in packed} == {
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint8,
        torch.float32,
    }
    for name in packed:
        assert state[name].dtype == disk[name].dtype, name
        assert state[name].shape == disk[name].shape, name
        assert same_bytes(state[name], disk[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["packed_dir", "sharded_dir"])
def test_codes_and_scales_are_bit_exact(where, dtype, request):
    folder = request.getfixturevalue(where) / "unet"
    model = unet_class().from_pretrained(folder, torch_dtype=dtype)
    assert_bit_exact(model, folder)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.dtype == dtype


@pytest.mark.parametrize(
    "options",
    [
        {"low_cpu_mem_usage": True},
        {"device_map": "cpu"},
        {"device_map": {"": "cpu"}},
        {"disable_mmap": True},
        {"use_safetensors": True},
    ],
    ids=str,
)
def test_every_way_of_loading_is_bit_exact(packed_dir, options):
    model = unet_class().from_pretrained(packed_dir, subfolder="unet", **options)
    assert_bit_exact(model, packed_dir / "unet")


def test_parallel_loading_is_bit_exact(sharded_dir, monkeypatch):
    from diffusers.models import modeling_utils

    monkeypatch.setattr(modeling_utils, "HF_ENABLE_PARALLEL_LOADING", True)
    model = unet_class().from_pretrained(sharded_dir / "unet", low_cpu_mem_usage=True)
    assert_bit_exact(model, sharded_dir / "unet")


def test_ways_that_would_cast_are_refused(packed_dir, tmp_path):
    load = unet_class().from_pretrained
    with pytest.raises(ValueError, match="low_cpu_mem_usage` cannot be False"):
        load(packed_dir / "unet", low_cpu_mem_usage=False)
    with pytest.raises(InputError, match="device_map: packed layers cannot be offloaded to 'disk'"):
        load(packed_dir / "unet", device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    with pytest.raises(InputError, match=r"torch_dtype torch.float64, wanted float16"):
        load(packed_dir / "unet", torch_dtype=torch.float64)


def test_loaded_layers_are_those_of_the_schemes(packed_dir):
    config = json.loads((packed_dir / "unet" / "config.json").read_text())
    wanted = {n for s in config["quantization_config"]["schemes"] for n in s["layers"]}
    pipe = quantkit.load_pipeline(packed_dir)
    infos = packed_layers(pipe)
    assert {info.name for info in infos} == wanted
    assert {info.component for info in infos} == {"unet"}
    assert {info.kind for info in infos} == {"linear", "conv2d"}


def edit_config(folder, change):
    path = folder / "unet" / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def edit_tensors(folder, change):
    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    change(tensors)
    record = json.loads(metadata["quantkit"])
    record["tensors"] = {name: digest(tensor) for name, tensor in tensors.items()}
    save_file(tensors, path, metadata=metadata | {"quantkit": json.dumps(record)})


def first(tensors, part):
    return next(n for n in sorted(tensors) if n.endswith(part))


def drop(part):
    return lambda tensors: tensors.pop(first(tensors, part))


def put(part, value):
    def change(tensors):
        tensors[first(tensors, part)].reshape(-1)[0] = value

    return change


def retype(tensors):
    name = first(tensors, ".weight_scale")
    tensors[name] = tensors[name].half()


def reshape(tensors):
    name = first(tensors, ".weight_meta")
    tensors[name] = tensors[name][:, :-1].contiguous()


TENSOR_FAULTS = {
    "scale-missing": (drop(".weight_scale"), r"\.weight_scale: missing"),
    "codes-missing": (drop("to_q.weight"), r"\.to_q\.weight: missing"),
    "meta-missing": (drop(".weight_meta"), r"\.weight_meta: missing"),
    "dense-missing": (drop("conv_in.weight"), r"lacks conv_in\.weight"),
    "bias-missing": (drop("conv1.bias"), r"conv1: no bias, the model has one"),
    "bias-added": (
        lambda t: t.update({first(t, "to_q.weight")[:-6] + "bias": torch.zeros(64)}),
        r"to_q.*bias",
    ),
    "scale-dtype": (retype, r"\.weight_scale: found F16 \[.*\], wanted F32"),
    "meta-shape": (reshape, r"\.weight_meta: found U8 \[.*\], wanted U8 \["),
    "scale-zero": (put(".weight_scale", 0.0), r"\.weight_scale: .*finite and positive"),
    "scale-nan": (put(".input_scale", torch.nan), r"\.input_scale: .*finite and positive"),
    "smooth-inf": (put(".input_smooth", torch.inf), r"\.input_smooth: .*finite and positive"),
    "extra": (
        lambda t: t.update({"conv_in.weight_scale": torch.ones(())}),
        r"conv_in\.weight_scale: packed, but no scheme",
    ),
    "raw-codes": (
        lambda t: t.update({"conv_in.weight": t["conv_in.weight"].to(torch.float8_e4m3fn)}),
        r"conv_in\.weight: packed, but no scheme",
    ),
}


@pytest.mark.parametrize(("change", "text"), TENSOR_FAULTS.values(), ids=TENSOR_FAULTS.keys())
def test_damaged_tensors_are_named(broken, change, text):
    edit_tensors(broken, change)
    with pytest.raises(CheckpointError, match=text) as caught:
        unet_class().from_pretrained(broken / "unet")
    assert "\n" not in str(caught.value)
    assert str(broken) in str(caught.value)


CONFIG_FAULTS = {
    "newer": (lambda c: c.update(format_version=9), "format_version 9 is newer than 2"),
    "unknown-key": (lambda c: c.update(extra=1), "extra"),
    "unknown-layer": (
        lambda c: c["schemes"][0]["layers"].append("mid_block.nothing"),
        r"layer mid_block\.nothing: has a scheme, but no description",
    ),
    "scheme-dropped": (lambda c: c["schemes"].pop(), "no scheme has"),
    "not-a-layer": (
        lambda c: c["schemes"][0]["layers"].append("conv_norm_out"),
        "layer conv_norm_out: has a scheme, but no description",
    ),
}


@pytest.mark.parametrize(("change", "text"), CONFIG_FAULTS.values(), ids=CONFIG_FAULTS.keys())
def test_damaged_configurations_are_named(broken, change, text):
    edit_config(broken, change)
    with pytest.raises(CheckpointError, match=text):
        unet_class().from_pretrained(broken / "unet")


def test_a_model_of_other_shapes_is_refused(broken):
    path = broken / "unet" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"cross_attention_dim": 64}))
    with pytest.raises(
        CheckpointError, match=r"to_[kv]: packed from \[64, 32\], the model has \[64"
    ):
        unet_class().from_pretrained(broken / "unet")


def test_quantizing_while_loading_is_refused(pipeline_dir, packed_dir):
    from quantkit.inference.diffusers_loading import QuantkitConfig

    config = json.loads((packed_dir / "unet" / "config.json").read_text())["quantization_config"]
    with pytest.raises(InputError, match="run 'quantkit pack'"):
        unet_class().from_pretrained(
            pipeline_dir / "unet", quantization_config=QuantkitConfig(**config)
        )


def test_packed_text_encoders_are_refused(broken):
    from transformers import CLIPTextModel

    path = broken / "text_encoder" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "quantkit", "format_version": 1}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="use the 16-bit text encoder") as caught:
        CLIPTextModel.from_pretrained(broken / "text_encoder")
    assert "\n" not in str(caught.value)
    from diffusers import DiffusionPipeline

    with pytest.raises(CheckpointError, match="use the 16-bit text encoder"):
        DiffusionPipeline.from_pretrained(broken)


def compute_dtypes(pipe):
    """dtype of every float parameter outside packed layers' own buffers."""
    modules = [m for m in pipe.components.values() if isinstance(m, nn.Module)]
    return {p.dtype for m in modules for p in m.parameters() if p.is_floating_point()}


def draw(pipe):
    images = pipe(
        "a red square",
        num_inference_steps=1,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).images
    assert torch.isfinite(images).all()
    return images


def plain(folder, **options):
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(folder, **options)


DICT = {"unet": torch.bfloat16, "vae": torch.float32, "default": torch.float16}


@pytest.mark.parametrize(
    ("load", "dtype"),
    [
        (quantkit.load_pipeline, torch.float32),
        (lambda d: quantkit.load_pipeline(str(d), torch_dtype=torch.bfloat16), torch.bfloat16),
        (lambda d: quantkit.load_pipeline(d, checksums=True, device="cpu"), torch.float32),
        (plain, torch.float32),
        (lambda d: plain(d, torch_dtype=torch.float16), torch.float16),
        (lambda d: plain(d, torch_dtype=torch.bfloat16), torch.bfloat16),
        (lambda d: plain(d, torch_dtype=DICT), torch.bfloat16),
        (lambda d: plain(d, torch_dtype={"default": torch.float16}), torch.float16),
        (lambda d: plain(d, torch_dtype={"vae": torch.float16}), torch.float32),
        (lambda d: plain(d, torch_dtype=torch.float16).to(torch.float32), torch.float32),
        (lambda d: quantkit.load_pipeline(d).to(torch.bfloat16), torch.bfloat16),
        (lambda d: plain(d).to("cpu", torch.float16), torch.float16),
    ],
    ids=range(12),
)
def test_all_components_compute_in_one_dtype(packed_dir, load, dtype):
    pipe = load(packed_dir)
    assert compute_dtypes(pipe) == {dtype}
    assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {dtype}
    assert_bit_exact(pipe.unet, packed_dir / "unet")
    with use(Backend.REFERENCE):  # kernels in every dtype are tested, and built, elsewhere
        draw(pipe)


def test_a_mixed_request_is_overruled_aloud(packed_dir, caplog):
    plain(packed_dir, torch_dtype=DICT)
    loud = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [m for m in loud if m.startswith("vae: cast from torch.float32 to torch.bfloat16")]


def test_components_that_were_handed_in_stay_as_they_are(packed_dir):
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(packed_dir / "vae", torch_dtype=torch.float32)
    pipe = plain(packed_dir, vae=vae, torch_dtype=torch.float16)
    assert pipe.vae is vae
    assert vae.dtype == torch.float32
    assert pipe.text_encoder.dtype == torch.float16


def test_unpacked_pipelines_are_left_alone(pipeline_dir):
    pipe = plain(pipeline_dir)
    assert pipe.text_encoder.dtype == torch.float16
    assert pipe.unet.dtype == torch.float32


def test_parts_kept_in_float32_stay_so():
    from quantkit.inference.dtypes import _cast

    class Kept(nn.Module):
        _keep_in_fp32_modules = ("wo",)

        def __init__(self):
            super().__init__()
            self.wi, self.wo = nn.Linear(2, 2), nn.Linear(2, 2)
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    model = Kept()
    _cast(model, torch.float16)
    assert (model.wi.weight.dtype, model.wo.weight.dtype) == (torch.float16, torch.float32)
    assert model.count.dtype == torch.int64


def test_layers_are_near_reference_and_near_the_original(pipeline_dir, packed_dir):
    dense = plain(pipeline_dir, torch_dtype=torch.float32)
    pipe = quantkit.load_pipeline(packed_dir)
    with watch(pipe, dense=dense) as seen:
        draw(pipe)
    assert len(seen.layers) == len(packed_layers(pipe))
    for info in packed_layers(pipe):
        layer = seen.layers["unet", info.name]
        assert layer.calls == layer.watched == 1
        assert layer.kernel < 1e-4, info.name  # float32 sums in another order
        # e4m3fn and e5m2 round to 3 and 2 bits, 2:4 drops half; the static scales are made up.
        if info.scheme.activation is not Activation.STATIC:
            assert 1e-3 < layer.dense < (0.6 if info.scheme.sparsity else 0.15), info.name


def test_load_pipeline_refuses_what_is_no_packed_pipeline(pipeline_dir, packed_dir, tmp_path):
    with pytest.raises(ModelError, match="nothing in it is packed; run 'quantkit pack'"):
        quantkit.load_pipeline(pipeline_dir)
    with pytest.raises(ModelError, match=r"no model_index.json, wanted a pipeline directory"):
        quantkit.load_pipeline(packed_dir / "unet")
    with pytest.raises(ModelError, match=r"no model_index.json"):
        quantkit.load_pipeline(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"torch_dtype torch.float8_e4m3fn, wanted float16"):
        quantkit.load_pipeline(packed_dir, torch_dtype=torch.float8_e4m3fn)


def test_load_pipeline_finds_flipped_bits(broken):
    path = broken / "unet" / "diffusion_pytorch_model.safetensors"
    header = read_header(path)
    info = header.tensors[first(header.tensors, "to_q.weight")]
    data = bytearray(path.read_bytes())
    data[info.start] ^= 0x80
    path.write_bytes(data)
    quantkit.load_pipeline(broken, checksums=False)
    with pytest.raises(CheckpointError, match=r"to_q\.weight: damaged: SHA-256"):
        quantkit.load_pipeline(broken)


def test_load_pipeline_finds_a_truncated_file(broken):
    path = broken / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises((CheckpointError, ModelError), match="truncated"):
        quantkit.load_pipeline(broken)


def weight_files(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.name.endswith((".safetensors", ".safetensors.index.json"))
    }


def quantization(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["packed_dir", "sharded_dir"])
def test_pipelines_save_the_same_bytes(where, dtype, request, tmp_path):
    folder = request.getfixturevalue(where)
    pipe = plain(folder, torch_dtype=dtype)
    pipe.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(folder)
    assert quantization(tmp_path / "copy" / "unet") == quantization(folder / "unet")
    again = quantkit.load_pipeline(tmp_path / "copy", torch_dtype=dtype, checksums=True)
    assert_bit_exact(again.unet, folder / "unet")


@pytest.mark.parametrize(
    "casts",
    [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16, torch.float32)],
    ids=str,
)
def test_casts_after_loading_do_not_change_what_is_saved(packed_dir, tmp_path, casts):
    pipe = quantkit.load_pipeline(packed_dir)
    for dtype in casts:
        pipe.to(dtype)
    pipe.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(packed_dir)


def test_models_save_over_themselves_and_over_older_cuts(packed_dir, sharded_dir, tmp_path):
    folder = tmp_path / "unet"
    shutil.copytree(sharded_dir / "unet", folder)
    unet_class().from_pretrained(packed_dir / "unet").save_pretrained(folder)
    assert weight_files(folder) == weight_files(packed_dir / "unet")
    unet_class().from_pretrained(folder).save_pretrained(folder)
    assert weight_files(folder) == weight_files(packed_dir / "unet")


def test_variants_load_and_save_under_their_names(broken, tmp_path):
    unet = broken / "unet"
    (unet / "diffusion_pytorch_model.safetensors").rename(
        unet / "diffusion_pytorch_model.fp16.safetensors"
    )
    pipe = quantkit.load_pipeline(broken)
    with pytest.raises(InputError, match="pass variant='fp16'"):
        pipe.unet.save_pretrained(tmp_path / "copy")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "diffusion_pytorch_model.safetensors").write_bytes(b"another variant")
    pipe.unet.save_pretrained(tmp_path / "copy", variant="fp16")
    files = weight_files(tmp_path / "copy")
    assert files.pop("diffusion_pytorch_model.safetensors")
    assert files == weight_files(unet)


def test_saving_refuses_what_would_need_other_bytes(packed_dir, tmp_path):
    model = unet_class().from_pretrained(packed_dir / "unet")
    for options, text in (
        ({"safe_serialization": False}, "packed files are safetensors"),
        ({"variant": "fp16"}, "files keep their names; pass variant=None"),
        ({"max_shard_size": "1GB"}, "shards stay as they were cut"),
        ({"push_to_hub": True}, "upload the directory"),
        ({"use_flashpack": True}, "use_flashpack: unknown"),
    ):
        with pytest.raises(InputError, match=text):
            model.save_pretrained(tmp_path / "copy", **options)
    assert not (tmp_path / "copy").exists()
    with pytest.raises(InputError, match=r"model\.save_pretrained"):
        type(model).save_pretrained(model, tmp_path / "copy")
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other").exists()


def test_a_pipeline_saves_over_itself(broken):
    before = weight_files(broken)
    plain(broken).save_pretrained(broken)
    assert weight_files(broken) == before
    pipe = plain(broken)
    with torch.no_grad():
        pipe.vae.quant_conv.bias += 0.5
    pipe.save_pretrained(broken)
    after = weight_files(broken)
    assert {name for name in after if after[name] != before[name]} == {
        "vae/diffusion_pytorch_model.safetensors"
    }
    assert not [p for p in broken.iterdir() if p.name.startswith(".")]


def test_saving_refuses_a_changed_model(packed_dir, tmp_path):
    model = unet_class().from_pretrained(packed_dir / "unet")
    with torch.no_grad():
        model.conv_in.bias[0] += 0.25
    with pytest.raises(CheckpointError, match=r"changed since it was loaded .*conv_in\.bias"):
        model.save_pretrained(tmp_path / "copy")
    model = unet_class().from_pretrained(packed_dir / "unet")
    model.conv_in.add_module("lora_A", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"lacks: conv_in\.lora_A.*unload adapters"):
        model.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_saving_needs_the_files_it_was_loaded_from(broken, tmp_path):
    model = unet_class().from_pretrained(broken / "unet")
    shutil.rmtree(broken)
    with pytest.raises(CheckpointError, match="are gone"):
        model.save_pretrained(tmp_path / "copy")


def test_changed_16_bit_components_save_their_change(packed_dir, tmp_path):
    pipe = plain(packed_dir)
    with torch.no_grad():
        pipe.vae.quant_conv.bias += 0.5
    pipe.save_pretrained(tmp_path / "copy")
    saved = tensors_on_disk(tmp_path / "copy" / "vae")["quant_conv.bias"]
    assert torch.equal(saved, pipe.vae.quant_conv.bias)
    assert saved.dtype == torch.float32


def test_deep_copies_save_too(packed_dir, tmp_path):
    import copy

    model = copy.deepcopy(unet_class().from_pretrained(packed_dir / "unet"))
    model.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(packed_dir / "unet")


def test_a_packed_unet_compiles_without_a_graph_break(packed_dir):
    model = unet_class().from_pretrained(packed_dir / "unet")
    x, text = torch.randn(1, 4, 8, 8), torch.randn(1, 16, 32)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad(), use(Backend.REFERENCE):
        for t in (100, 900):
            wanted = model(x, torch.tensor(t), text).sample
            assert torch.equal(compiled(x, torch.tensor(t), text).sample, wanted)
    assert packed_layers(compiled) == packed_layers(model)


def test_transformers_load_alike(transformer_dir, tmp_path):
    from diffusers import PixArtTransformer2DModel

    shutil.copytree(transformer_dir, tmp_path / "pixart")
    pack_component(tmp_path / "pixart", mixed(tmp_path / "pixart"))
    model = PixArtTransformer2DModel.from_pretrained(
        tmp_path / "pixart", torch_dtype=torch.bfloat16
    )
    count = sum(1 for _ in iterate_packed(model))
    assert count == len(mixed(transformer_dir))
    y = model(
        torch.randn(1, 4, 8, 8, dtype=torch.bfloat16),
        encoder_hidden_states=torch.randn(1, 5, 32, dtype=torch.bfloat16),
        timestep=torch.tensor([500]),
    ).sample
    assert y.dtype == torch.bfloat16
    assert torch.isfinite(y).all()
    assert model.quantkit_buckets[0].index.tolist() == [1]


def test_sd3_keeps_its_dtype_its_t5_and_its_bytes(transformer_pipeline_dir, tmp_path):
    folder = tmp_path / "sd3"
    shutil.copytree(transformer_pipeline_dir, folder)
    pack_component(folder / "transformer", mixed(folder / "transformer"))
    pipe = plain(folder, torch_dtype=torch.float16)
    kept = {n for n, p in pipe.text_encoder_3.named_parameters() if p.dtype == torch.float32}
    assert kept
    assert all("wo" in name.split(".") for name in kept)
    assert plain(folder).text_encoder.dtype == torch.float32
    with use(Backend.REFERENCE):
        latents = pipe("a b", num_inference_steps=1, output_type="latent").images
    assert latents.dtype == torch.float16
    assert torch.isfinite(latents).all()
    pipe.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(folder)


def test_what_pack_writes_loads_and_saves(pipeline_dir, tmp_path):
    from quantkit.models.source import open_model
    from quantkit.packing.pack import pack
    from quantkit.progress import silent
    from quantkit.recipe.load import load_recipe

    folder = tmp_path / "packed"
    pack(
        open_model(str(pipeline_dir)),
        load_recipe("fp8"),
        folder,
        calibration=None,
        masks=None,
        threads=1,
        force=False,
        progress=silent,
    )
    pipe = plain(folder)
    assert {info.component for info in packed_layers(pipe)} == {"unet"}
    state, disk = pipe.unet.state_dict(), tensors_on_disk(folder / "unet")
    assert state.keys() == disk.keys()
    assert all(same_bytes(state[n], disk[n]) for n in state if state[n].dtype == disk[n].dtype)
    pipe.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(folder)
    quantkit.load_pipeline(tmp_path / "copy", checksums=True)


def test_the_pipeline_loads_from_the_hub_cache(packed_dir, monkeypatch):
    import diffusers

    monkeypatch.setattr(
        diffusers.DiffusionPipeline, "download", classmethod(lambda _, name: str(packed_dir))
    )
    assert packed_layers(quantkit.load_pipeline("someone/packed"))
