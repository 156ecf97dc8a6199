"""A denoiser in one file without --config: its config follows from its tensors."""

import diffusers
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.cli import quantkit as command
from quantkit.errors import ModelError
from quantkit.workflow.arguments import as_model
from tests.support.denoisers import original_state


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    """A tiny Wan with the class's own config but for what tensors show, and its single file."""
    folder = tmp_path_factory.mktemp("wan")
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(num_layers=2, num_attention_heads=1, ffn_dim=256).half()
    model.save_pretrained(folder / "diffusers")
    state = {name: value.contiguous() for name, value in original_state(model).items()}
    other = {"first_stage_model.decoder.conv_in.weight": torch.zeros(1).half()}
    prefixed = {f"model.diffusion_model.{name}": value for name, value in state.items()}
    save_file(prefixed | other, folder / "wan.safetensors")
    return folder


def test_packing_gives_the_codes_of_the_directory(wan, tmp_path):
    quantkit.pack(wan / "wan.safetensors", recipe="fp8", output=tmp_path / "file")
    quantkit.pack(wan / "diffusers", recipe="fp8", output=tmp_path / "folder")
    found, expected = (
        {k: v for p in (tmp_path / name).glob("*.safetensors") for k, v in load_file(p).items()}
        for name in ("file", "folder")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))
               for name, value in expected.items() if value.ndim)  # fmt: skip
    # What a pipeline takes as transformer=...
    loaded = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "file")
    assert loaded.config.ffn_dim == 256


def test_a_file_is_imported_and_exported_without_config(wan, tmp_path):
    quantkit.import_file(wan / "wan.safetensors", output=tmp_path / "out")
    expected = load_file(wan / "diffusers" / "diffusion_pytorch_model.safetensors")
    found = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    line = ["export", str(wan / "wan.safetensors"), "--to", "comfyui-int8", "-q"]
    result = CliRunner().invoke(command, [*line, "-o", str(tmp_path / "x.safetensors")])
    assert result.exit_code == 0, result.exception


def test_what_was_taken_for_granted_is_said(wan, caplog):
    opened = as_model(wan / "wan.safetensors")
    assert [c.name for c in opened.components] == [""]
    assert "the denoiser alone, WanTransformer3DModel, its config from its tensors" in caplog.text


def test_a_denoiser_that_its_class_does_not_describe_needs_a_config(wan, tmp_path):
    state = load_file(wan / "wan.safetensors")
    state["model.diffusion_model.blocks.1.extra.weight"] = torch.zeros(2, 2).half()
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match=r"has besides .*extra\.weight") as caught:
        as_model(tmp_path / "x.safetensors")
    assert caught.value.fields == ("config",)


def test_calibration_asks_for_the_pipeline(wan, tmp_path):
    line = ["calibrate", "model", str(wan / "wan.safetensors"), "-r", "int8"]
    result = CliRunner().invoke(command, [*line, "-o", str(tmp_path / "c.safetensors")])
    assert "a component alone, and calibration runs the whole pipeline" in str(result.exception)
