"""Layers in ComfyUI's block and rotated formats, as comfy-kitchen quantizes and reads them."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import ModelError, NonFiniteError
from quantkit.interchange import safetensors_import
from tests.support.denoisers import original_state, tiny_denoiser

WEIGHTS = "diffusion_pytorch_model.safetensors"
LAYER = "joint_blocks.0.x_block.mlp.fc1"
INT8, W4A8 = "TensorWiseINT8Layout", "AsymW4A8Int8Layout"


@pytest.fixture
def config(tmp_path):
    tiny_denoiser("sd3").save_config(tmp_path / "config")
    return tmp_path / "config"


def as_bytes(tensors):
    """As files have scales that were written before torch had their types."""
    return {
        name: value.view(torch.uint8) if name.endswith(("_scale", "_rel")) else value
        for name, value in tensors.items()
    }


#: layout, how it quantizes, the marker, what is done to the tensors
FORMATS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "nvfp4": ("TensorCoreNVFP4Layout", {}, {"format": "nvfp4"}, dict),
    "nvfp4 in bytes": ("TensorCoreNVFP4Layout", {}, {"format": "nvfp4"}, as_bytes),
    "mxfp8": ("TensorCoreMXFP8Layout", {}, {"format": "mxfp8"}, dict),
    "mxfp8 in bytes": ("TensorCoreMXFP8Layout", {}, {"format": "mxfp8"}, as_bytes),
    **{
        f"int8 rotated by {size}": (
            INT8,
            {"per_channel": True, "convrot": True, "convrot_groupsize": size},
            {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": size},
            dict,
        )
        for size in (16, 64)
    },
    **{
        f"w4a8 {name}": (W4A8, how, {"format": "asym_w4a8_int8", **how}, dict)
        for name, how in {
            "64": {"convrot_groupsize": 64},
            "16, groups of 32": {"convrot_groupsize": 16, "group_size": 32},
        }.items()
    },
    "w4a8 without a table, float32": (
        W4A8,
        {"convrot_groupsize": 64, "codebook": False, "scale_dtype": torch.float32},
        {"format": "asym_w4a8_int8", "convrot_groupsize": 64, "group_size": 16},
        dict,
    ),
    "w4a8 in bytes": (
        W4A8, {"convrot_groupsize": 64}, {"format": "asym_w4a8_int8", "convrot_groupsize": 64},
        as_bytes,
    ),
}  # fmt: skip


def marker(**told):
    return torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)


def quantized(name, weight):
    """Return what comfy-kitchen makes of a weight, and its values."""
    from comfy_kitchen.tensor import get_layout_class

    layout_name, how, told, change = FORMATS[name]
    layout = get_layout_class(layout_name)
    codes, params = layout.quantize(weight, **how)
    tensors = change({f"weight{k}": v for k, v in layout.state_dict_tensors(codes, params).items()})
    values = layout.dequantize(codes, replace(params, orig_dtype=torch.float32))
    return {**tensors, "comfy_quant": marker(**told)}, values


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_and_rotations_are_read_as_comfy_kitchen_reads_them(
    name, config, tmp_path, monkeypatch
):
    # Chunks of whole blocks that end within a row.
    monkeypatch.setattr(safetensors_import, "CHUNK_VALUES", 96)
    state = original_state(tiny_denoiser("sd3"))
    tensors, expected = {}, {}
    for key, value in state.items():
        # Those of which nothing is padded.
        if value.ndim == 2 and not (value.shape[0] % 32 or value.shape[1] % 64):
            made, values = quantized(name, value)
            tensors |= {f"{key.removesuffix('weight')}{part}": t for part, t in made.items()}
            expected[key] = values.half()
        else:
            tensors[key] = expected[key] = value.half()
    assert len(tensors) > len(expected) + 20
    save_file(tensors, tmp_path / "m.safetensors")
    result = quantkit.import_file(
        tmp_path / "m.safetensors", config=config, output=tmp_path / "imported"
    )
    assert result.format.startswith("ComfyUI's ")
    model = tiny_denoiser("sd3")
    found = load_file(tmp_path / "imported" / WEIGHTS)
    model.load_state_dict({key: value.float() for key, value in found.items()})
    # Rotations have sums, of another order there: where a sum lies between two of 16 bit.
    ulp = 0.0 if "fp" in name else 2.0**-10
    for key, value in original_state(model).items():
        assert torch.allclose(value, expected[key].float(), rtol=ulp, atol=ulp * 2.0**-14), key


def changed(**tensors):
    def change(made):
        found = {**made, **tensors}
        return {name: value for name, value in found.items() if value is not None}

    return change


def told(**keys):
    return changed(comfy_quant=marker(**keys))


NAN = torch.tensor(0xFF, dtype=torch.uint8)
#: format -> change of its tensors, what the error says
REFUSED = {
    "no block scales": ("nvfp4", changed(weight_scale=None), "weight_scale'?: missing, though"),
    "no scale": ("nvfp4", changed(weight_scale_2=None), "weight_scale_2'?: missing, though"),
    "scales that are not in tiles": (
        "nvfp4", changed(weight_scale=torch.ones(256, 5).to(torch.float8_e4m3fn)),
        r"shape \[256, 5\], expected \[256, 4\]",
    ),
    "fewer scales": (
        "mxfp8", changed(weight_scale=torch.zeros(128, 4, dtype=torch.uint8)),
        r"shape \[128, 4\], expected \[256, 4\]",
    ),
    "scales of another type": (
        "mxfp8", changed(weight_scale=torch.ones(256, 4)),
        "a scale in F32, expected F8_E8M0 or U8",
    ),
    "cut blocks": (
        "nvfp4", changed(weight=torch.zeros(256, 28, dtype=torch.uint8)), "whole blocks of 16",
    ),
    "padded rows": (
        "mxfp8",
        changed(
            weight=torch.zeros(288, 64).to(torch.float8_e4m3fn),
            weight_scale=torch.zeros(384, 4, dtype=torch.uint8),
        ),
        r"shape \[288, 64\], the model of .* has \[256, 64\]",
    ),
    "AWQ": ("nvfp4", changed(pre_quant_scale=torch.ones(64)), "has besides .*pre_quant_scale"),
    "a width that is not there": (
        "int8 rotated by 64", told(format="int8_tensorwise", convrot=True), "whole blocks of 256",
    ),
    "an unknown rotation": (
        "int8 rotated by 64",
        told(format="int8_tensorwise", convrot=True, convrot_groupsize=48),
        "its marker says convrot_groupsize 48, expected one of 256, 64, 16",
    ),
    "a rotation that is text": (
        "int8 rotated by 64", told(format="int8_tensorwise", convrot="yes"),
        "its marker says convrot 'yes', expected one of True, False",
    ),
    "true is no size": (
        "w4a8 64", told(format="asym_w4a8_int8", convrot_groupsize=True), "convrot_groupsize True",
    ),
    "6 bits": (
        "w4a8 64", changed(weight=torch.zeros(256, 48, dtype=torch.int8)), "whole blocks of 64",
    ),
    "a table of 15": (
        "w4a8 64", changed(weight_codebook=torch.ones(15)), r"shape \[15\], expected \[16\]",
    ),
    "a negative scale": ("w4a8 64", changed(weight_s_channel=-torch.ones(256)), "is negative"),
    "a table of NaN": (
        "w4a8 64", changed(weight_codebook=torch.full((16,), torch.nan)), "NaN or infinity",
    ),
    "an exponent that is NaN": ("mxfp8", changed(weight_scale=NAN.expand(256, 4)), "NaN or inf"),
    "a block scale that is NaN": ("nvfp4", changed(weight_scale=NAN.expand(256, 4)), "NaN or inf"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_layers_are_refused(case, config, tmp_path):
    name, change, said = REFUSED[case]
    state = {key: value.half() for key, value in original_state(tiny_denoiser("sd3")).items()}
    made, _ = quantized(name, state.pop(f"{LAYER}.weight").float())
    state |= {f"{LAYER}.{part}": value.contiguous() for part, value in change(made).items()}
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises((ModelError, NonFiniteError), match=said) as caught:
        quantkit.import_file(
            tmp_path / "m.safetensors", config=config, output=tmp_path / "imported"
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "imported").exists()
