"""Exports to GGUF: read by diffusers, byte for byte what the gguf package quantizes to."""

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
from quantkit.packing.pack import pack
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from quantkit.workflow.export import export
from tests.support.denoisers import (
    DENOISERS,
    INPUTS,
    let_diffusers_read_narrow_flux,
    original_state,
    output_of,
    tiny_denoiser,
    tiny_sd15,
)

KINDS = ("Q8_0", "Q4_0")


def prefix_of(name):
    return "" if DENOISERS[name][1] in {"sd3", "flux"} else "model.diffusion_model."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INPUTS)
def test_diffusers_reads_the_file_and_computes_nearly_the_same(
    name, kind, saved, tmp_path, monkeypatch
):
    let_diffusers_read_narrow_flux(monkeypatch)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DENOISERS)
def test_tensors_are_those_of_the_gguf_package(name, kind, saved, tmp_path):
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
        elif value.ndim == 2 and value.shape[1] % 32 == 0:
            assert tensor.tensor_type.name == kind
        else:
            assert tensor.tensor_type.name == "F16"
        expected = gguf.quantize(values, tensor.tensor_type)
        assert np.array_equal(tensor.data, expected), key
    assert result.types == Counter(t.tensor_type.name for t in reader.tensors)
    assert result.nbytes == sum(t.n_bytes for t in reader.tensors)


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
    # 72 weights a row, 2304 in all: 9 rows of 256.
    unet = tiny_sd15(in_channels=8)
    unet.save_pretrained(tmp_path / "m")
    export(tmp_path / "m", to="gguf:Q8_0", output=tmp_path / "m.gguf", convolutions=True)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    found = tensors["model.diffusion_model.input_blocks.0.0.weight"]
    value = unet.conv_in.weight.detach().reshape(-1, 256).numpy()
    assert np.array_equal(found.data, gguf.quantize(value, found.tensor_type))


def packed(source, output, fmt):
    recipe = {
        "name": "t",
        "weight": {"format": fmt, "granularity": "group:32", "observer": "mse"},
        "activation": {"mode": "none"},
    }
    model = open_model(str(source))
    pack(model, Recipe.model_validate(recipe), output, calibration=None, masks=None, threads=1,
         force=False, progress=silent)  # fmt: skip
    return output


@pytest.mark.parametrize("fmt", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_packed_blocks_are_written_as_they_are(name, fmt, saved, tmp_path):
    folder = packed(saved(name), tmp_path / "packed", fmt)
    # The other type, for what is not packed.
    other = "Q4_0" if fmt == "q8_0" else "Q8_0"
    result = export(folder, to=f"gguf:{other}", output=tmp_path / "m.gguf")
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
        assert np.array_equal(value, wanted[key.removeprefix(prefix_of(name))].numpy())
    assert other in result.types


def test_a_dry_run_says_the_same_and_writes_nothing(saved, tmp_path):
    planned = export(saved("sd3"), to="gguf:Q4_0", output=tmp_path / "m.gguf", dry_run=True)
    assert not list(tmp_path.iterdir())
    written = export(saved("sd3"), to="gguf:Q4_0", output=tmp_path / "m.gguf")
    assert (planned.types, planned.nbytes) == (written.types, written.nbytes)
    assert written.nbytes < (tmp_path / "m.gguf").stat().st_size < written.nbytes + 10_000


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    saved, transformer_dir, tmp_path, monkeypatch
):
    output = tmp_path / "m.gguf"
    with pytest.raises(InputError, match=r"to 'gguf:Q5_K': unknown, wanted one of .*gguf:Q8_0"):
        export(saved("sd3"), to="gguf:Q5_K", output=output)
    with pytest.raises(ModelError, match="original layout is not known"):
        export(transformer_dir, to="gguf:Q8_0", output=output)
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


def test_numbers_beyond_float16_are_refused(tmp_path):
    model = tiny_denoiser("sd3")
    model.pos_embed.proj.weight.data[0, 0, 0, 0] = 1e6
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(NonFiniteError, match=r"pos_embed.proj.weight: beyond float16"):
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
