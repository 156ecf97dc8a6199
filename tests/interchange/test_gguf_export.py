"""Exports to GGUF: read by diffusers, byte for byte what the gguf package quantizes to."""

import re
import resource
from collections import Counter

import gguf
import numpy as np
import pytest
import torch
from diffusers import GGUFQuantizationConfig

from quantkit.checkpoint.reader import open_packed
from quantkit.errors import CheckpointError, InputError, ModelError, NonFiniteError, OutputError
from quantkit.interchange import gguf_export
from quantkit.interchange.gguf_file import read_gguf
from quantkit.models.source import open_model
from quantkit.packing.pack_model import pack
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from quantkit.workflow.export import export
from tests.support.denoisers import (
    DENOISERS,
    INPUTS,
    RENAMED,
    let_diffusers_read_narrow,
    original_state,
    output_of,
    tiny_denoiser,
    tiny_renamed,
    tiny_sd15,
)
from tests.support.sampling import turned

KINDS = ("Q8_0", "Q4_0")


#: What published files hold in 16 bit of these architectures, in their own names, and modulation.
#: Source: the names that ComfyUI-GGUF's quantizer skips.
KEPT = re.compile(
    r"(x|t|y|context)_embedder|(img|txt|time|vector|guidance)_in\.|final_layer|adaLN_modulation"
    r"|_mod\.lin|modulation\.lin|time_embed|label_emb|emb_layers|input_blocks\.0\.0|^out\.2"
)


def is_kept(key):
    return KEPT.search(key) is not None


def prefix_of(name):
    return "" if DENOISERS[name][1] in {"sd3", "flux"} else "model.diffusion_model."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INPUTS)
def test_diffusers_reads_the_file_and_computes_nearly_the_same(
    name, kind, saved, tmp_path, monkeypatch
):
    let_diffusers_read_narrow(monkeypatch, "FluxTransformer2DModel")
    model = tiny_denoiser(name)
    export(saved(name), to=f"gguf:{kind}", output=tmp_path / "m.gguf")
    again = type(model).from_single_file(
        str(tmp_path / "m.gguf"),
        config=str(saved(name)),
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
    )
    layers = Counter(type(module).__name__ for module in again.modules())
    assert layers["GGUFLinear"] > 10
    wanted, found = output_of(name, model), output_of(name, again)
    error = float((found - wanted).norm() / wanted.norm())
    assert error < (0.02 if kind == "Q8_0" else 0.3)


@pytest.mark.parametrize("case", turned(DENOISERS, KINDS))
def test_tensors_are_those_of_the_gguf_package(case, saved, tmp_path):
    name, kind = case
    result = export(saved(name), to=f"gguf:{kind}", output=tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    wanted = {prefix_of(name) + k: v for k, v in original_state(tiny_denoiser(name)).items()}
    assert found.keys() == wanted.keys()
    assert reader.get_field("general.architecture").contents() == DENOISERS[name][1]
    for key, value in wanted.items():
        tensor, values = found[key], value.numpy()
        assert tuple(reversed(tensor.shape.tolist())) == value.shape
        if value.ndim == 1:
            assert tensor.tensor_type.name == "F32"
        elif value.ndim == 2 and value.shape[1] % 32 == 0 and not is_kept(key):
            assert tensor.tensor_type.name == kind
        else:
            assert tensor.tensor_type.name == "F32"
        expected = gguf.quantize(values, tensor.tensor_type)
        assert np.array_equal(tensor.data, expected), key
    assert result.types == Counter(t.tensor_type.name for t in reader.tensors)
    assert result.types[kind] > 5
    assert result.nbytes == sum(t.n_bytes for t in reader.tensors)


@pytest.mark.parametrize("name", sorted(RENAMED.keys() - {"PixArtTransformer2DModel"}))
def test_other_architectures_have_their_names_and_numbers(name, tmp_path):
    model = tiny_renamed(name)
    model.save_pretrained(tmp_path / "m")
    result = export(tmp_path / "m", to="gguf:Q8_0", output=tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.get_field("general.architecture").contents() == RENAMED[name][0]
    wanted = original_state(model)
    assert {tensor.name for tensor in reader.tensors} == wanted.keys()
    for tensor in reader.tensors:
        value = wanted[tensor.name].numpy()
        assert tuple(reversed(tensor.shape.tolist())) == value.shape
        assert np.array_equal(tensor.data, gguf.quantize(value, tensor.tensor_type)), tensor.name
    assert result.types["Q8_0"] > 5


def test_convolutions_are_cut_into_rows_for_comfyui(saved, tmp_path):
    export(saved("sd15"), to="gguf:Q8_0", output=tmp_path / "m.gguf", convolutions=True)
    name = "model.diffusion_model.input_blocks.1.0.in_layers.2.weight"
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensor = next(t for t in reader.tensors if t.name == name)
    assert tensor.shape.tolist() == [256, 32 * 32 * 9 // 256]
    assert reader.get_field(f"comfy.gguf.orig_shape.{name}").contents() == [32, 32, 3, 3]
    value = original_state(tiny_denoiser("sd15"))[name.removeprefix("model.diffusion_model.")]
    expected = gguf.quantize(value.reshape(-1, 256).numpy(), tensor.tensor_type)
    assert np.array_equal(tensor.data, expected)
    assert read_gguf(tmp_path / "m.gguf").tensors[name].shape == (32, 32, 3, 3)


def test_rows_of_a_convolution_need_not_be_whole_blocks(tmp_path):
    # 144 weights a row, 4608 in all: 18 rows of 256.
    unet = tiny_sd15(block_out_channels=[16, 32], norm_num_groups=8)
    unet.save_pretrained(tmp_path / "m")
    export(tmp_path / "m", to="gguf:Q8_0", output=tmp_path / "m.gguf", convolutions=True)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    found = tensors["model.diffusion_model.input_blocks.4.0.in_layers.2.weight"]
    value = unet.down_blocks[1].resnets[0].conv1.weight.detach()
    assert value[0].numel() % 32
    assert np.array_equal(
        found.data, gguf.quantize(value.reshape(-1, 256).numpy(), found.tensor_type)
    )


def read_back(path):
    """The tensors of a file, float32 or in blocks as bytes."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(reversed(tensor.shape.tolist()))
        value = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        found[tensor.name] = tensor.tensor_type.name, torch.from_numpy(value.copy())
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["sd3", "sd15", "flux"])
def test_no_number_changes_that_the_family_keeps(name, dtype, tmp_path):
    """Of the smallest numbers of bfloat16, too, which float16 has not."""
    model = tiny_denoiser(name)
    for parameter in model.parameters():
        parameter.data[..., 0] *= 1e-12
    model.to(dtype).save_pretrained(tmp_path / "m")
    result = export(tmp_path / "m", to="gguf:Q4_0", output=tmp_path / "m.gguf", convolutions=True)
    found, kept = read_back(tmp_path / "m.gguf"), 0
    for key, value in original_state(model).items():
        kind, values = found[prefix_of(name) + key]
        if value.ndim == 1 or is_kept(key) or kind != "Q4_0":
            assert torch.equal(values, value.float()), key
        if value.ndim > 1 and is_kept(key):
            kept += 1
            assert kind in {str(dtype)[6:].replace("float", "F").replace("bF", "BF"), "F32"}
    assert kept > 3
    assert result.notes == (
        f"{kept} weights stay as they are, because the model's family keeps them",
    )


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_diffusers_reads_a_model_of_bfloat16(name, tmp_path):
    model = tiny_denoiser(name).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    export(tmp_path / "m", to="gguf:Q8_0", output=tmp_path / "m.gguf")
    again = type(model).from_single_file(
        str(tmp_path / "m.gguf"),
        config=str(tmp_path / "m"),
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
    )
    wanted, found = output_of(name, model.float()), output_of(name, again)
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


def test_a_disk_that_is_full_is_said_in_one_line(saved, tmp_path):
    """The limit of a file's size stands for it: both cut a write short."""
    source, (soft, hard) = saved("sd3"), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, hard))
        with pytest.raises(OutputError, match=r"m\.gguf: larger than a file may be here") as caught:
            export(source, to="gguf:Q8_0", output=tmp_path / "m.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def packed(source, output, fmt, **more):
    recipe = {
        "name": "t",
        "weight": {"format": fmt, "granularity": "group:32", "observer": "mse"},
        "activation": {"mode": "none"},
        **more,
    }
    model = open_model(str(source))
    pack(model, Recipe.model_validate(recipe), output, calibration=None, masks=None, threads=1,
         force=False, progress=silent)  # fmt: skip
    return output


@pytest.mark.parametrize("fmt", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_packed_blocks_are_written_as_they_are(name, fmt, saved, tmp_path):
    folder = packed(saved(name), tmp_path / "packed", fmt)
    # A type that is not asked of anything: what is not in blocks stays as it is.
    other = "Q4_0" if fmt == "q8_0" else "Q8_0"
    result = export(folder, to=f"gguf:{other}", output=tmp_path / "m.gguf", convolutions=True)
    component = open_packed(folder).components[0]
    values = {layer: component.dequantized(layer) for layer in component.config.layers}
    model = tiny_denoiser(name)
    for layer, value in values.items():
        model.get_submodule(layer).weight.data.copy_(value)
    wanted = original_state(model)
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert len(result.copied) > 5
    for key in result.copied:
        assert found[key].tensor_type.name == fmt.upper()
        value = gguf.dequantize(found[key].data, found[key].tensor_type)
        same = wanted[key.removeprefix(prefix_of(name))].numpy()
        assert np.array_equal(value.reshape(same.shape), same)
    assert other not in result.types
    assert f"{len(result.copied)} weights are {fmt.upper()}, as they were packed, not {other}" in (
        result.notes
    )
    # All others are the model's own numbers, convolutions included.
    own = original_state(tiny_denoiser(name))
    for key, (kind, values) in read_back(tmp_path / "m.gguf").items():
        if key not in result.copied:
            assert kind == "F32"
            assert torch.equal(values, own[key.removeprefix(prefix_of(name))]), key


ATTENTION = "joint_blocks.0.x_block.attn.qkv.weight"


@pytest.mark.parametrize("fmt", ["q8_0", "e4m3fn", "int8"])
def test_a_weight_joined_with_one_that_is_kept_stays_in_16_bit(fmt, saved, tmp_path):
    """K by its own decision in 16 bit: it does not change, whatever becomes of Q and V."""
    keep = {"overrides": [{"layers": ["transformer_blocks.0.attn.to_k"], "keep": True}]}
    weight = {"format": fmt, "granularity": "group:32" if fmt == "q8_0" else "channel"}
    folder = packed(saved("sd3"), tmp_path / "p", fmt, weight=weight, **keep)
    output = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match=r"joined with .*to_k.*requantize|rounded a second"):
        export(folder, to="gguf:Q4_0", output=output)
    export(folder, to="gguf:Q4_0", output=output, requantize=True)
    kind, values = read_back(output)[ATTENTION]
    assert kind == "F32"
    attention = tiny_denoiser("sd3").transformer_blocks[0].attn
    assert torch.equal(values[64:128], attention.to_k.weight)
    whole = open_packed(folder).components[0].dequantized("transformer_blocks.0.attn.to_q")
    assert torch.equal(values[:64], whole)


def test_a_dry_run_says_the_same_and_writes_nothing(saved, tmp_path):
    planned = export(saved("sd3"), to="gguf:Q4_0", output=tmp_path / "m.gguf", dry_run=True)
    assert not list(tmp_path.iterdir())
    written = export(saved("sd3"), to="gguf:Q4_0", output=tmp_path / "m.gguf")
    assert (planned.types, planned.nbytes) == (written.types, written.nbytes)
    assert written.nbytes < (tmp_path / "m.gguf").stat().st_size < written.nbytes + 10_000


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    saved, transformer_dir, sana_dir, tmp_path, monkeypatch
):
    output = tmp_path / "m.gguf"
    with pytest.raises(InputError, match=r"to 'gguf:Q5_K': unknown, expected one of .*gguf:Q8_0"):
        export(saved("sd3"), to="gguf:Q5_K", output=output)
    with pytest.raises(
        ModelError, match="no program reads it from GGUF files; export it to comfyui-w4a8"
    ):
        export(transformer_dir, to="gguf:Q8_0", output=output)
    with pytest.raises(ModelError, match="original layout is not known"):
        export(sana_dir, to="gguf:Q8_0", output=output)
    folder = tmp_path / "fp8"
    pack(open_model(str(saved("sd3"))), Recipe(name="t"), folder, calibration=None, masks=None,
         threads=1, force=False, progress=silent)  # fmt: skip
    with pytest.raises(CheckpointError, match="packed in e4m3fn, which would be rounded a second"):
        export(folder, to="gguf:Q8_0", output=output)
    # A write that does not read back.
    with monkeypatch.context() as patch:
        patch.setattr(gguf_export, "stored_bytes", lambda *_: torch.zeros(1, dtype=torch.uint8))
        with pytest.raises(OutputError, match="other bytes than written"):
            export(saved("sd3"), to="gguf:Q8_0", output=output)
    assert not output.exists()
    output.write_bytes(b"mine")
    with pytest.raises(OutputError, match="exists"):
        export(saved("sd3"), to="gguf:Q8_0", output=output)
    assert output.read_bytes() == b"mine"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layer", ["pos_embed.proj", "transformer_blocks.0.attn.to_q"])
def test_numbers_that_are_none_are_refused(layer, value, tmp_path):
    model = tiny_denoiser("sd3")
    model.get_submodule(layer).weight.data.flatten()[1] = value
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(NonFiniteError, match=rf"{layer}.weight: NaN or infinity"):
        export(tmp_path / "m", to="gguf:Q8_0", output=tmp_path / "m.gguf")


def test_joined_weights_of_different_formats_are_refused(saved, tmp_path):
    recipe = {
        "name": "t",
        "weight": {"format": "q8_0", "granularity": "group:32"},
        "activation": {"mode": "none"},
        "overrides": [
            {"layers": ["*.to_k"], "weight": {"format": "q4_0", "granularity": "group:32"}}
        ],
    }
    pack(open_model(str(saved("sd3"))), Recipe.model_validate(recipe), tmp_path / "p",
         calibration=None, masks=None, threads=1, force=False, progress=silent)  # fmt: skip
    with pytest.raises(ModelError, match=r"to_q.*packed in different formats"):
        export(tmp_path / "p", to="gguf:Q8_0", output=tmp_path / "m.gguf")
