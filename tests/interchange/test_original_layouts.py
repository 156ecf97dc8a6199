"""The original layouts against diffusers' own converters, and against published models' names."""

import pytest
import torch

from quantkit.checkpoint.reader import open_packed
from quantkit.errors import ModelError
from quantkit.interchange.layout_names import (
    layout_of_model,
    layout_of_names,
    original_tensors,
)
from quantkit.recipe.schema import Recipe
from quantkit.workflow.export import export
from quantkit.workflow.pack import pack
from tests.support import comfyui
from tests.support.denoisers import (
    DENOISERS,
    RENAMED,
    let_diffusers_read_narrow,
    original_state,
    pixart_of_original,
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
    "chroma1_hd": "flux",
    "flux2_dev": "flux",
    "pixart_sigma": "pixart",
    "z_image": "lumina2",
}


@pytest.mark.parametrize("name", DENOISERS)
def test_diffusers_reads_the_same_model_from_the_original_layout(name, tmp_path, monkeypatch):
    let_diffusers_read_narrow(monkeypatch, "FluxTransformer2DModel")
    model = tiny_denoiser(name)
    state = {key: value.clone() for key, value in original_state(model).items()}
    if name.startswith("sd") and name not in {"sd3", "sd35"}:
        state = {f"model.diffusion_model.{key}": value for key, value in state.items()}
    equal(read_by_diffusers(model, state, tmp_path), model.state_dict())


@pytest.mark.parametrize("name", RENAMED)
def test_diffusers_reads_the_same_model_from_other_names(name, tmp_path, monkeypatch):
    let_diffusers_read_narrow(monkeypatch, name)
    model = tiny_renamed(name)
    wanted = model.state_dict()
    state = {key: value.clone() for key, value in original_state(model).items()}
    # diffusers leaves out what the table says that no program reads.
    for key in layout_of_model(name, wanted).unused:
        state[key] = torch.ones(32)
    equal(read_by_diffusers(model, state, tmp_path), wanted)


@pytest.mark.parametrize("name", RENAMED)
def test_packed_codes_are_joined_as_diffusers_splits_them(name, tmp_path, monkeypatch):
    let_diffusers_read_narrow(monkeypatch, name)
    model = tiny_renamed(name)
    model.save_pretrained(tmp_path / "m")
    how = {"name": "t", "weight": {"format": "int8"}, "data_free": True, "convolutions": False}
    pack(tmp_path / "m", output=tmp_path / "p", recipe=Recipe.model_validate(how))
    path = tmp_path / "m.safetensors"
    result = export(tmp_path / "p", to="comfyui-int8", output=path)
    assert result.worst[0] == 0
    state, layers = comfyui.read(path)
    assert len(result.copied) == len(layers) > 3
    state |= {f"{layer}.weight": marked.values() for layer, marked in layers.items()}
    (component,) = open_packed(tmp_path / "p").components
    wanted = {f"{layer}.weight": component.dequantized(layer) for layer in component.config.layers}
    equal(read_by_diffusers(model, state, tmp_path), {**model.state_dict(), **wanted})


def read_by_diffusers(model, state, folder):
    if type(model).__name__ == "PixArtTransformer2DModel":
        return pixart_of_original(state)
    model.save_config(folder)
    return type(model).from_single_file(state, config=str(folder)).state_dict()


def equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert not [key for key in wanted if not torch.equal(found[key], wanted[key])]


@pytest.mark.parametrize(("published", "architecture"), PUBLISHED.items())
def test_published_models_have_a_layout_and_are_told_by_it(published, architecture):
    keys = golden_keys(published)
    layout = layout_of_model(keys["class_name"], keys["tensors"])
    found = original_tensors(layout, keys["tensors"])
    names = [tensor.name for tensor in found]
    assert layout.architecture == architecture
    assert len(set(names)) == len(names)
    assert sorted(p for tensor in found for p in tensor.parts) == sorted(keys["tensors"])
    for prefix in ("", "model.diffusion_model.", "model."):
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
    keys = golden_keys("sana_1600m")
    with pytest.raises(ModelError, match="SanaTransformer2DModel: its original layout is not"):
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
