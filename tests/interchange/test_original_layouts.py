"""The original layouts against diffusers' own converters, and against published models' names."""

import pytest
import torch

from quantkit.errors import ModelError
from quantkit.interchange.layout_names import (
    layout_of_model,
    layout_of_names,
    original_tensors,
)
from tests.support.denoisers import (
    DENOISERS,
    RENAMED,
    let_diffusers_read_narrow_flux,
    original_state,
    tiny_denoiser,
    tiny_renamed,
)
from tests.support.headers import golden_keys

PUBLISHED = {
    "sd15": "sd1",
    "sdxl": "sdxl",
    "sd3_medium": "sd3",
    "sd35_medium": "sd3",
    "sd35_large": "sd3",
    "flux1_dev": "flux",
    "wan21_i2v_14b": "wan",
    "wan22_t2v_14b": "wan",
    "qwen_image": "qwen_image",
    "ltx_video": "ltxv",
}


@pytest.mark.parametrize("name", DENOISERS)
def test_diffusers_reads_the_same_model_from_the_original_layout(name, tmp_path, monkeypatch):
    let_diffusers_read_narrow_flux(monkeypatch)
    read_again(tiny_denoiser(name), name, tmp_path)


@pytest.mark.parametrize("name", RENAMED)
def test_diffusers_reads_the_same_model_from_other_names(name, tmp_path):
    read_again(tiny_renamed(name), name, tmp_path)


def read_again(model, name, tmp_path):
    model.save_config(tmp_path)
    state = {key: value.clone() for key, value in original_state(model).items()}
    if name.startswith("sd") and name not in {"sd3", "sd35"}:
        state = {f"model.diffusion_model.{key}": value for key, value in state.items()}
    again = type(model).from_single_file(state, config=str(tmp_path)).state_dict()
    wanted = model.state_dict()
    assert again.keys() == wanted.keys()
    assert not [key for key in wanted if not torch.equal(again[key], wanted[key])]


@pytest.mark.parametrize(("published", "architecture"), PUBLISHED.items())
def test_published_models_have_a_layout_and_are_told_by_it(published, architecture):
    keys = golden_keys(published)
    layout = layout_of_model(keys["class_name"], keys["tensors"])
    found = original_tensors(layout, keys["tensors"])
    names = [tensor.name for tensor in found]
    assert layout.architecture == architecture
    assert len(set(names)) == len(names)
    assert sorted(p for tensor in found for p in tensor.parts) == sorted(keys["tensors"])
    for prefix in ("", "model.diffusion_model."):
        assert layout_of_names(prefix + name for name in names) == (layout, prefix)


def test_blocks_of_sdxl_have_the_numbers_of_the_published_file():
    """Some keys of sd_xl_base_1.0.safetensors, as diffusers' key names of its checkpoints say."""
    keys = golden_keys("sdxl")["tensors"]
    layout = layout_of_model("UNet2DConditionModel", keys)
    names = {tensor.name for tensor in original_tensors(layout, keys)}
    assert {
        "input_blocks.3.0.op.weight",
        "input_blocks.8.1.transformer_blocks.9.attn2.to_k.weight",
        "output_blocks.2.2.conv.bias",
        "output_blocks.5.2.conv.weight",
        "output_blocks.8.0.skip_connection.weight",
        "middle_block.1.proj_in.weight",
    } <= names


def test_only_the_last_prompt_block_of_sd3_is_swapped():
    keys = golden_keys("sd3_medium")["tensors"]
    found = original_tensors(layout_of_model("SD3Transformer2DModel", keys), keys)
    swapped = {tensor.name for tensor in found if tensor.swapped}
    assert swapped == {
        f"{module}.{part}"
        for module in (
            "joint_blocks.23.context_block.adaLN_modulation.1",
            "final_layer.adaLN_modulation.1",
        )
        for part in ("weight", "bias")
    }


def test_other_architectures_are_refused():
    keys = golden_keys("pixart_sigma")
    with pytest.raises(ModelError, match="PixArtTransformer2DModel: its original layout is not"):
        layout_of_model(keys["class_name"], keys["tensors"])
    unet = {**golden_keys("sd15")["tensors"], "encoder_hid_proj.weight": [4, 4]}
    with pytest.raises(ModelError, match=r"encoder_hid_proj.*: not in the original layout"):
        layout_of_model("UNet2DConditionModel", unet)
    assert layout_of_names(keys["tensors"]) is None


def test_a_part_without_the_others_is_refused():
    keys = dict(golden_keys("flux1_dev")["tensors"])
    del keys["single_transformer_blocks.3.attn.to_k.bias"]
    with pytest.raises(ModelError, match=r"single_blocks.3.linear1.bias .*to_k, which the model"):
        layout_of_model("FluxTransformer2DModel", keys)
