"""Packed directories in diffusers: bit-exact, counted, one dtype, saved as they were."""

import hashlib
import json
import shutil

import pytest
import torch
from packed import pack_component
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import quantkit
from quantkit.errors import CheckpointError, InputError, ModelError
from quantkit.inference.layers import iterate_packed, packed_layers
from quantkit.inference.modules import PARTS, PackedLayer
from quantkit.numerics.formats import E4M3FN, E5M2
from quantkit.numerics.granularity import PerChannel, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme

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
        if n.rpartition(".")[2] in PARTS
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
    with pytest.raises(InputError, match="device_map: layers on 'disk'"):
        load(packed_dir / "unet", device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    with pytest.raises(InputError, match="torch_dtype torch.float64, wanted float16"):
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
    save_file(tensors, path, metadata=metadata)


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
    "scale-missing": (drop(".weight_scale"), r"lacks .*\.weight_scale"),
    "codes-missing": (drop("to_q.weight"), r"lacks .*\.to_q\.weight"),
    "meta-missing": (drop(".weight_meta"), r"lacks .*\.weight_meta"),
    "dense-missing": (drop("conv_in.weight"), r"lacks conv_in\.weight"),
    "scale-dtype": (retype, r"\.weight_scale: F16 \[.*\], wanted F32"),
    "meta-shape": (reshape, r"\.weight_meta: U8 \[.*\], wanted U8 \["),
    "scale-zero": (put(".weight_scale", 0.0), r"\.weight_scale: 1 of .* not finite and positive"),
    "scale-nan": (put(".input_scale", torch.nan), r"\.input_scale: 1 of .* not finite"),
    "smooth-inf": (put(".input_smooth", torch.inf), r"\.input_smooth: 1 of .* not finite"),
    "nibble": (put(".weight_meta", 0x00), r"\.weight_meta: a nibble names no two"),
    "extra": (
        lambda t: t.update({"conv_in.weight_scale": torch.ones(())}),
        r"no scheme has conv_in\.weight_scale",
    ),
    "raw-codes": (
        lambda t: t.update({"conv_in.weight": t["conv_in.weight"].to(torch.float8_e4m3fn)}),
        r"no scheme has conv_in\.weight",
    ),
}


@pytest.mark.parametrize(("change", "text"), TENSOR_FAULTS.values(), ids=TENSOR_FAULTS.keys())
def test_damaged_tensors_are_named(broken, change, text):
    edit_tensors(broken, change)
    with pytest.raises(CheckpointError, match=text) as caught:
        unet_class().from_pretrained(broken / "unet")
    assert "\n" not in str(caught.value)
    assert "pack the model again" in str(caught.value)


CONFIG_FAULTS = {
    "newer": (lambda c: c.update(format_version=9), "format_version 9 is newer than 1"),
    "unknown-key": (lambda c: c.update(extra=1), "extra"),
    "unknown-layer": (
        lambda c: c["schemes"][0]["layers"].append("mid_block.nothing"),
        r"layers that UNet2DConditionModel lacks: mid_block\.nothing",
    ),
    "scheme-dropped": (lambda c: c["schemes"].pop(), "no scheme has"),
    "not-a-layer": (
        lambda c: c["schemes"][0]["layers"].append("conv_norm_out"),
        "conv_norm_out: the model has a GroupNorm here",
    ),
}


@pytest.mark.parametrize(("change", "text"), CONFIG_FAULTS.values(), ids=CONFIG_FAULTS.keys())
def test_damaged_configurations_are_named(broken, change, text):
    edit_config(broken, change)
    with pytest.raises(CheckpointError, match=text):
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
