"""Loading packed pipelines into ComfyUI's objects, and refusing what is none."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.errors import CheckpointError, InputError, ModelError
from quantkit.interchange.original_layouts import LAYOUTS
from quantkit.numerics.scheme import Schedule
from tests.comfyui.conftest import denoiser_of
from tests.support import fake_comfy, pipelines

pytestmark = pytest.mark.usefixtures("comfy_sd")


def test_a_denoiser_is_loaded_with_operations_of_its_own(packed):
    from quantkit.comfyui.loading import load_model

    whole, alone = (
        load_model(packed("sd3"), replay=False),
        load_model(denoiser_of(packed("sd3")), replay=False),
    )
    operations = whole.options["custom_operations"]
    assert operations is not alone.options["custom_operations"]
    assert whole.state.keys() == alone.state.keys()
    weight = whole.state["joint_blocks.0.x_block.attn.qkv.weight"]
    n, k = weight.shape
    layer = operations.Linear(k, n)
    layer.load_state_dict({"weight": weight}, strict=False)
    assert layer(torch.zeros(2, k)).shape == (2, n)
    assert not whole.model.diffusion_model._forward_pre_hooks


def test_a_step_finds_its_bucket(packed):
    from quantkit.comfyui.loading import load_model

    patcher = load_model(packed("sd3-buckets"), replay=False)
    (buckets,) = patcher.options["custom_operations"].Linear.surroundings.buckets.values()
    found = []
    for timestep in (100.0, 400.0, 900.0):
        patcher.model.diffusion_model(None, torch.tensor([timestep]), context=None)
        found.append(int(buckets.index))
    assert found == [0, 1, 2]


def test_timesteps_are_converted_to_those_of_diffusers():
    from quantkit.comfyui.loading import TIMESTEPS, _find_buckets, _timestep
    from quantkit.inference.layers.timestep_buckets import TimestepBuckets

    schedule, denoiser = Schedule((0.25,)), fake_comfy.Denoiser()
    buckets = TimestepBuckets(schedule)
    convert = TIMESTEPS["ZImageTransformer2DModel"]
    _find_buckets(denoiser, {schedule: buckets}, partial(_timestep, convert))
    denoiser(None, torch.tensor([0.9]))
    assert int(buckets.index) == 0
    denoiser(None, torch.tensor([0.2]))
    assert int(buckets.index) == 1
    assert float(TIMESTEPS["LTXVideoTransformer3DModel"](torch.tensor(0.5))) == 500.0


def test_a_model_that_predicts_v_says_so(copied):
    from quantkit.comfyui.loading import load_model

    pipeline = copied("sd15")
    assert {"v_pred", "ztsnr"}.isdisjoint(load_model(pipeline, replay=False).state)
    file = pipeline / "scheduler/scheduler_config.json"
    told = json.loads(file.read_text())
    told |= {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    file.write_text(json.dumps(told))
    state = load_model(pipeline, replay=False).state
    assert state["v_pred"].numel() == state["ztsnr"].numel() == 0


def test_text_encoders_and_vae_are_loaded(packed, tmp_path):
    from quantkit.comfyui.loading import load_encoders, load_vae

    given = load_encoders(packed("sd3"), ["embeddings"])
    assert given["clip_type"].name == "SD3"
    assert given["embedding_directory"] == ["embeddings"]
    assert len(given["state_dicts"]) == 3
    assert "shared.weight" in given["state_dicts"][2]
    clip = given["state_dicts"][0]
    assert clip["text_model.encoder.layers.0.mlp.fc1.weight"].ndim == 2
    assert "text_projection.weight" in clip
    assert given["model_options"]["custom_operations"].Linear
    assert "decoder.conv_in.weight" in load_vae(packed("sd3")).state


def test_a_packed_vae_is_loaded_dense(pipeline_dir, tmp_path):
    from quantkit.comfyui.loading import load_vae

    quantkit.pack(
        pipeline_dir,
        output=tmp_path / "packed",
        recipe=quantkit.load_recipe("fp8", {"vae": "int8"}),
    )
    state = load_vae(tmp_path / "packed").state
    (file,) = (pipeline_dir / "vae").glob("*.safetensors")
    dense = load_file(file)
    assert {n: (t.shape, t.dtype) for n, t in state.items()} == {
        n: (t.shape, t.dtype) for n, t in dense.items()
    }
    for name, tensor in dense.items():
        torch.testing.assert_close(state[name], tensor, atol=0.02, rtol=0, msg=name)
    assert not torch.equal(state["decoder.mid_block.resnets.0.conv1.weight"],
                           dense["decoder.mid_block.resnets.0.conv1.weight"])  # fmt: skip


def test_encoders_have_the_names_of_published_files(tmp_path):
    from quantkit.comfyui.weights import named_as_published

    for marker, expected in (
        ("text_model.encoder.layers.0.mlp.fc1.weight",) * 2,
        ("encoder.layers.0.mlp.fc1.weight", "text_model.encoder.layers.0.mlp.fc1.weight"),
        ("layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        ("model.layers.0.mlp.down_proj.weight",) * 2,
    ):
        found = named_as_published({marker: 1, "text_projection.weight": 2}, tmp_path)
        assert found == {expected: 1, "text_projection.weight": 2}
    with pytest.raises(ModelError, match="not a text encoder that ComfyUI loads"):
        named_as_published({"vision_model.encoder.layers.0.mlp.fc1.weight": 1}, tmp_path)


def test_every_family_with_a_layout_has_text_encoders():
    from quantkit.comfyui.loading import ENCODERS, TIMESTEPS

    assert set(ENCODERS) == {layout.class_name for layout in LAYOUTS}
    assert set(TIMESTEPS) < set(ENCODERS)


def test_a_model_that_comfyui_does_not_know_is_refused(packed, comfy_sd):
    from quantkit.comfyui.loading import load_model

    comfy_sd.recognizes = False
    with pytest.raises(ModelError, match="ComfyUI does not recognize this SD3Transformer2DModel"):
        load_model(packed("sd3"), replay=False)


def test_wrong_folders_are_refused_in_a_line(packed, copied, tmp_path):
    from quantkit.comfyui.loading import load_encoders, load_model, load_vae

    with pytest.raises(CheckpointError, match="nowhere"):
        load_model(tmp_path / "nowhere", replay=False)
    dense = pipelines.tiny_sd15_pipeline(tmp_path / "dense")
    with pytest.raises(InputError, match="no packed denoiser; pack the 16-bit pipeline"):
        load_model(dense, replay=False)
    with pytest.raises(InputError, match="no text encoder; choose a whole pipeline"):
        load_encoders(denoiser_of(packed("sd3")), [])
    pipeline = copied("sd3")
    shutil.rmtree(pipeline / "vae")
    with pytest.raises(ModelError, match=r"vae: no config\.json"):
        load_vae(pipeline)


def test_damaged_scales_are_refused(copied):
    from quantkit.comfyui.loading import load_model

    pipeline = copied("sd3")
    file = denoiser_of(pipeline) / "config.json"
    told = json.loads(file.read_text())
    told["quantization_config"]["format_version"] = 9
    file.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="format_version 9, expected 1"):
        load_model(pipeline, replay=False)
