"""Models of .gguf files: what is read, what is kept bit for bit, what is refused."""

import shutil
from collections import Counter

import gguf
import numpy as np
import pytest
import torch
from diffusers import GGUFQuantizationConfig
from safetensors.torch import load_file

import quantkit
from quantkit.checkpoint.reader import open_packed
from quantkit.errors import InputError, ModelError, NonFiniteError
from quantkit.inference.layers.layer_summary import packed_layers
from quantkit.interchange import gguf_file
from quantkit.interchange.denoiser import packed_denoiser
from quantkit.interchange.gguf_file import READABLE
from quantkit.models.component_layers import list_layers
from quantkit.models.source import SingleFile
from quantkit.storage.digest import sha256_of
from quantkit.workflow.arguments import as_model
from quantkit.workflow.single_file import single_file
from tests.support.denoisers import DENOISERS, original_state, tiny_denoiser
from tests.support.sampling import turned

WEIGHTS = "diffusion_pytorch_model.safetensors"
KINDS = ("Q8_0", "Q4_0")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantkit" / "single-files"


@pytest.fixture
def config(saved, tmp_path):
    """Return a component's directory without weights."""

    def directory(name):
        (folder := tmp_path / "config").mkdir()
        shutil.copy(saved(name) / "config.json", folder)
        return folder

    return directory


def raw(path, tensors, architecture="sd3", **fields):
    """Write a .gguf file of arrays, or of (bytes, type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        writer.add_array(key, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain(name):
    return {key: value.numpy() for key, value in original_state(tiny_denoiser(name)).items()}


def unpacked(source):
    model = as_model(source)
    return model.components[0], load_file(model.components[0].shards[0])


@pytest.mark.parametrize("case", turned(DENOISERS, [*KINDS, "Q8_0 convolutions"]))
def test_weights_are_those_that_gguf_dequantizes(case, saved, config, tmp_path):
    name, kind = case
    path, kind, convolutions = tmp_path / "m.gguf", kind[:4], kind not in KINDS
    quantkit.export(saved(name), to=f"gguf:{kind}", output=path, convolutions=convolutions)
    component, found = unpacked(SingleFile(path, config(name)))
    model, values = tiny_denoiser(name), {}
    # Put the numbers of the file into the model, in the original layout, and compare there.
    for tensor in gguf.GGUFReader(path).tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        kept = value.copy() if tensor.tensor_type.name == "F32" else value.astype("f2")
        values[tensor.name.removeprefix("model.diffusion_model.")] = torch.from_numpy(kept)
    assert found.keys() == model.state_dict().keys()
    model.load_state_dict({key: value.float() for key, value in found.items()})
    for key, value in original_state(model).items():
        assert torch.equal(value, values[key].float().reshape(value.shape)), key
    kinds = Counter(blocks.format for blocks in component.blocks.values())
    assert set(kinds) == {kind.lower()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fixture", ["transformer_pipeline_dir", "pipeline_dir"])
def test_a_pipeline_keeps_its_blocks_bit_for_bit(fixture, kind, request, tmp_path):
    folder = request.getfixturevalue(fixture)
    path, again = tmp_path / "m.gguf", tmp_path / "again.gguf"
    first = quantkit.export(folder, to=f"gguf:{kind}", output=path)
    source = SingleFile(path, folder)
    summary = quantkit.pack(source, output=tmp_path / "packed", recipe="gguf")
    assert quantkit.verify(tmp_path / "packed").layers == len(
        [layer for layer in summary.layers if layer.scheme is not None]
    )
    second = quantkit.export(tmp_path / "packed", to=f"gguf:{kind}", output=again)
    assert second.types == first.types
    mine, theirs = ({t.name: t for t in gguf.GGUFReader(p).tensors} for p in (again, path))
    copied = [name for name, tensor in theirs.items() if tensor.tensor_type.name == kind]
    assert set(second.copied) == set(copied)
    assert len(copied) > 10
    for name in copied:
        assert np.array_equal(mine[name].data, theirs[name].data), name
    if fixture == "transformer_pipeline_dir":  # which has no 1x1 layers in 16 bit
        assert again.read_bytes() == path.read_bytes()
    pipe = quantkit.load_pipeline(tmp_path / "packed", torch_dtype=torch.float32)
    name = summary.components[0].name
    # Few rows meet blocks as they are; 1x1 convolutions are dequantized.
    assert {layer.backend for layer in packed_layers(pipe)} <= {"host", "dequantized"}
    reference = type(getattr(pipe, name)).from_single_file(
        str(path),
        config=str(folder / name),
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
    )
    layer = next(iter(as_model(source).components[0].blocks))
    module = getattr(pipe, name).get_submodule(layer)
    x = torch.randn(3, module.k, generator=torch.Generator().manual_seed(1))
    # diffusers multiplies d and codes in float16.
    torch.testing.assert_close(module(x), reference.get_submodule(layer)(x), atol=3e-3, rtol=0)
    # By which a calibration knows its model.
    (rows,) = (row for row in list_layers(as_model(source).components[0]) if row.name == layer)
    records = open_packed(tmp_path / "packed").components[0].records
    assert records[layer].source_sha256 == sha256_of(rows.shard, rows.weight)


def test_quantized_convolutions_are_packed_from_their_numbers(saved, tmp_path):
    """ComfyUI-GGUF's blocks run over C, kh and kw: they are none of a packed layer's."""
    path = tmp_path / "m.gguf"
    quantkit.export(saved("sd15"), to="gguf:Q8_0", output=path, convolutions=True)
    source = SingleFile(path, saved("sd15"))
    quantkit.pack(source, output=tmp_path / "packed", recipe="gguf")
    packed = packed_denoiser(open_packed(tmp_path / "packed").components[0])
    numbers = unpacked(source)[1]
    name = "down_blocks.0.resnets.0.conv1.weight"
    original = "model.diffusion_model.input_blocks.1.0.in_layers.2.weight"
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == original)
    wanted = gguf.dequantize(stored.data, stored.tensor_type).reshape(packed.shapes[name])
    assert np.array_equal(packed.read(name).float().numpy(), wanted.astype("f2").astype("f4"))
    assert numbers.keys() == packed.shapes.keys()
    for key, value in numbers.items():
        assert torch.equal(packed.read(key).to(value.dtype), value), key


def test_other_recipes_pack_from_the_dequantized_weights(transformer_pipeline_dir, tmp_path):
    path = tmp_path / "m.gguf"
    quantkit.export(transformer_pipeline_dir, to="gguf:Q8_0", output=path)
    summary = quantkit.pack(SingleFile(path, transformer_pipeline_dir), output=tmp_path / "packed")
    assert {s.weight.name for s in summary.by_scheme()} == {"e4m3fn"}
    assert not quantkit.verify(tmp_path / "packed").breaches


def test_the_folder_of_the_cache_is_made_once_and_again_after_a_change(saved, tmp_path, cache):
    path = tmp_path / "m.gguf"
    quantkit.export(saved("sd3"), to="gguf:Q8_0", output=path)
    source = SingleFile(path, saved("sd3"))
    folder = as_model(source).path
    before = (folder / WEIGHTS).stat().st_mtime_ns
    assert as_model(source).path == folder
    assert (folder / WEIGHTS).stat().st_mtime_ns == before
    quantkit.export(saved("sd3"), to="gguf:Q4_0", output=path, force=True)
    assert as_model(source).path != folder
    assert len(list(cache.iterdir())) == 2


def wide_sd3():
    """One block whose rows are as long as a block of K quants."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=1,
            attention_head_dim=32, num_attention_heads=8, joint_attention_dim=256,
            caption_projection_dim=256, pooled_projection_dim=256, pos_embed_max_size=8,
        )  # fmt: skip


#: where d, and m, stand in a block: random ones are not finite
SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALES)
def test_other_quantized_types_are_dequantized(kind, tmp_path):
    model = wide_sd3()
    model.save_config(tmp_path / "config")
    random, length = np.random.default_rng(0), gguf.GGML_QUANT_SIZES
    tensors, values = {}, {}
    for key, value in original_state(model).items():
        values[key] = value.numpy()
        tensors[key] = values[key]
        if value.ndim == 2:
            block, size = length[gguf.GGMLQuantizationType[kind]]
            rows = random.integers(0, 256, (value.shape[0], value.shape[1] // block, size), "u1")
            for place in SCALES[kind]:
                scale = random.normal(0, 1e-3, rows.shape[:2]).astype("f2")
                rows[:, :, place : place + 2] = scale[..., None].view("u1")
            rows = rows.reshape(value.shape[0], -1)
            tensors[key] = rows, gguf.GGMLQuantizationType[kind]
            values[key] = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    path = raw(tmp_path / "m.gguf", tensors)
    component, found = unpacked(SingleFile(path, tmp_path / "config"))
    assert component.blocks == {}
    model.load_state_dict({key: value.float() for key, value in found.items()})
    for key, value in original_state(model).items():
        wanted = values[key].astype("f2") if value.ndim == 2 else values[key]
        assert np.array_equal(value.numpy(), wanted.astype("f4")), key


def test_16_and_32_bits_stay_as_they_are(config, tmp_path):
    state, tensors = original_state(tiny_denoiser("sd3")), {}
    for index, (key, value) in enumerate(state.items()):
        bfloat = value.bfloat16().view(torch.uint8).numpy()
        kinds = (value.numpy(), value.half().numpy(), (bfloat, gguf.GGMLQuantizationType.BF16))
        tensors[key] = kinds[index % 3]
    path = raw(tmp_path / "m.gguf", tensors)
    _, found = unpacked(SingleFile(path, config("sd3")))
    dtypes = Counter(value.dtype for value in found.values())
    assert set(dtypes) == {torch.float32, torch.float16, torch.bfloat16}
    model = tiny_denoiser("sd3")
    model.load_state_dict({key: value.float() for key, value in found.items()})
    steps = (lambda v: v, lambda v: v.half().float(), lambda v: v.bfloat16().float())
    again = original_state(model)
    for index, (key, value) in enumerate(state.items()):
        assert torch.equal(again[key], steps[index % 3](value)), key


@pytest.mark.parametrize(("name", "drop"), [("sd3", "leading"), ("sd3", "all"), ("sd15", "all")])
def test_sizes_of_one_may_be_missing(name, drop, config, tmp_path):
    """ggml keeps no sizes of one that torch has first: [1, N, D] of SD 3's positions is [N, D]."""
    tensors, lost = {}, 0
    for key, value in plain(name).items():
        shape = list(value.shape)
        while drop == "leading" and len(shape) > 1 and shape[0] == 1:
            shape.pop(0)
        if drop == "all":
            shape = [size for size in shape if size > 1]
        lost += len(shape) < value.ndim
        tensors[key] = value.reshape(shape)
    assert lost
    _, found = unpacked(SingleFile(raw(tmp_path / "m.gguf", tensors), config(name)))
    wanted = tiny_denoiser(name).state_dict()
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


# What is refused.


@pytest.fixture
def sound(saved, tmp_path):
    path = tmp_path / "m.gguf"
    quantkit.export(saved("sd3"), to="gguf:Q8_0", output=path)
    return path


def refused(path, folder, match, error=ModelError):
    with pytest.raises(error, match=match) as caught:
        as_model(SingleFile(path, folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.05, 0.5, 0.9999])
def test_truncated_files_are_refused(share, sound, config, cache):
    data = sound.read_bytes()
    sound.write_bytes(data[: int(len(data) * share)])
    refused(sound, config("sd3"), "not a GGUF file|truncated or damaged GGUF file")
    assert not cache.exists()


def test_a_header_that_lies_about_sizes_ends_at_once(sound, config):
    data = bytearray(sound.read_bytes())
    data[8:16] = (1 << 60).to_bytes(8, "little")  # the number of tensors
    sound.write_bytes(data)
    refused(sound, config("sd3"), "truncated or damaged")
    data[16:24] = (1 << 60).to_bytes(8, "little")  # of fields
    sound.write_bytes(data)
    refused(sound, sound.parent / "config", "truncated or damaged")


def test_types_that_are_not_read_are_named(config, tmp_path):
    tensors = plain("sd3")
    name = "context_embedder.weight"
    tensors[name] = np.zeros((64, 64), "i1"), gguf.GGMLQuantizationType.I8
    path = raw(tmp_path / "m.gguf", tensors)
    refused(path, config("sd3"), r"'context_embedder.weight': type I8 is not read, expected one")
    data = path.read_bytes()
    at = data.index(name.encode()) + len(name) + 4 + 16
    path.write_bytes(data[:at] + (99).to_bytes(4, "little") + data[at + 4 :])
    refused(path, tmp_path / "config", "type number 99 is not read")


def test_files_of_another_model_are_refused(sound, saved, config, tmp_path, transformer_dir):
    tensors = plain("sd3")
    less = {key: value for key, value in tensors.items() if "mlp.fc2" not in key}
    refused(raw(tmp_path / "a.gguf", less), config("sd3"), r"lacks joint_blocks.*give the pipeline")
    folder = tmp_path / "config"
    more = {**tensors, "joint_blocks.9.x_block.mlp.fc1.weight": np.zeros((4, 4), "f4")}
    refused(raw(tmp_path / "b.gguf", more), folder, "has besides joint_blocks.9")
    wide = {**tensors, "context_embedder.bias": np.zeros(65, "f4")}
    refused(raw(tmp_path / "c.gguf", wide), folder, r"shape \[65\], the model .* has \[64\]")
    turned = {**tensors, "pos_embed": np.zeros((64, 256), "f4")}
    refused(raw(tmp_path / "e.gguf", turned), folder, r"shape \[64, 256\], .* has \[1, 256, 64\]")
    refused(sound, saved("flux"), r"holds sd3 .*, but .* is a FluxTransformer2DModel")
    refused(sound, transformer_dir, "is a PixArtTransformer2DModel")
    llama = raw(tmp_path / "d.gguf", {"blk.0.attn_q.weight": np.zeros((4, 4), "f4")}, "llama")
    refused(llama, folder, "a language model, expected a denoiser")
    other = raw(tmp_path / "f.gguf", {"blocks.0.weight": np.zeros((4, 4), "f4")}, "rwkv")
    refused(other, folder, "architecture rwkv, whose layout is not known; expected one of sdxl")
    refused(sound, tmp_path / "nowhere", "not a diffusers directory")
    (tmp_path / "text.gguf").write_text("hello, world")
    refused(tmp_path / "text.gguf", folder, "not a GGUF file")


def test_an_original_shape_of_another_size_is_refused(config, tmp_path):
    tensors = plain("sd3")
    key = "comfy.gguf.orig_shape.context_embedder.weight"
    path = raw(tmp_path / "m.gguf", tensors, **{key: [64, 65]})
    refused(path, config("sd3"), r"says \[64, 65\], which is not its size")


#: NaN, Inf and -Inf of a type's first two or four bytes, which are a scale where it has blocks
BROKEN = {
    "F32": (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff"),
    "BF16": (b"\xc0\x7f", b"\x80\x7f", b"\x80\xff"),
    "F16": (b"\0\x7e", b"\0\x7c", b"\0\xfc"),
    "Q8_0": (b"\0\x7e", b"\0\x7c", b"\0\xfc"),
    "Q4_1": (b"\0\x7e", b"\0\x7c", b"\0\xfc"),
}


@pytest.mark.parametrize("number", range(3), ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_number_is_refused(kind, number, config, tmp_path, cache):
    name, tensors = "joint_blocks.0.x_block.attn.proj.weight", plain("sd3")
    data = gguf.quantize(tensors[name], gguf.GGMLQuantizationType[kind])
    # The codes beside a scale are not all zero: zero times infinity would be NaN.
    raw_bytes = data.view("u1").copy()
    raw_bytes[1, : len(BROKEN[kind][number])] = np.frombuffer(BROKEN[kind][number], "u1")
    if READABLE[kind][0] > 1:
        raw_bytes[1, 4:34] = 0x11
    tensors[name] = raw_bytes, gguf.GGMLQuantizationType[kind]
    path = raw(tmp_path / "m.gguf", tensors)
    refused(path, config("sd3"), f"{name}: NaN or infinity", NonFiniteError)
    assert not [path for path in cache.iterdir() if "stage" not in path.name]


@pytest.mark.parametrize("value", [1e6, -1e6])
def test_numbers_beyond_float16_are_refused(value, config, tmp_path):
    """Of blocks, which become float16: 127 times the largest scale is 8 million."""
    name, tensors = "joint_blocks.0.x_block.attn.proj.weight", plain("sd3")
    tensors[name][3, 5] = value
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors[name] = gguf.quantize(tensors[name], kind), kind
    path = raw(tmp_path / "m.gguf", tensors)
    refused(path, config("sd3"), f"{name}: a number beyond F16", NonFiniteError)


def test_a_gguf_file_alone_says_what_is_missing(sound):
    with pytest.raises(ModelError, match="give the pipeline that the file belongs to") as caught:
        as_model(sound)
    assert caught.value.fields == ("config",)
    with pytest.raises(ModelError, match="no file, and config goes with one"):
        single_file("somewhere/else", "config")


def test_without_the_package_the_cure_is_named(sound, config, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(InputError, match=r"pip install 'quantkit\[gguf\]'"):
        gguf_file.require_gguf()
