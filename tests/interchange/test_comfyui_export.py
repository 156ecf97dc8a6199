"""Exports to ComfyUI, which comfy-kitchen dequantizes and multiplies as it does there."""

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from quantkit.checkpoint.reader import open_packed
from quantkit.device.host import encoder
from quantkit.errors import CheckpointError, ModelError, RecipeError
from quantkit.inference.layers.layer_summary import packed_layers
from quantkit.interchange.comfyui_export import COMFYUI, plan_comfyui
from quantkit.interchange.denoiser import packed_denoiser
from quantkit.interchange.tensor_export import OneFile
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.progress import silent
from quantkit.recipe.layer_recipes import ActivationRecipe
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import Recipe
from quantkit.workflow.export import export
from quantkit.workflow.pack import pack
from tests.support import comfyui
from tests.support.denoisers import (
    INPUTS,
    let_diffusers_read_narrow,
    output_of,
)
from tests.support.near_ties import near_ties
from tests.support.sampling import turned

FOLDERS = {"sd15": "unet", "sdxl": "unet", "sd3": "transformer", "flux": "transformer"}


def prefix_of(name):
    return "model.diffusion_model." if FOLDERS[name] == "unet" else ""


def dense_model(name, pipeline):
    import diffusers

    config = json.loads((pipeline / FOLDERS[name] / "config.json").read_text())
    model = getattr(diffusers, config["_class_name"])
    return model.from_pretrained(pipeline / FOLDERS[name], torch_dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def written(calibrated, tmp_path_factory):
    """Return the pipeline, an export of it from 16 bit, and what it says."""
    made = {}

    def of(name, to):
        if (name, to) not in made:
            pipeline, calibration = calibrated(name)
            path = tmp_path_factory.mktemp("comfyui") / f"{name}.safetensors"
            given = {"calibration": calibration} if to == "comfyui" else {}
            made[name, to] = pipeline, path, export(pipeline, to=to, output=path, **given)
        return made[name, to]

    return of


@pytest.mark.parametrize("case", turned(INPUTS, ("comfyui", "comfyui-int8")))
def test_comfyui_answers_nearly_as_the_16_bit_model(case, written, monkeypatch):
    name, to = case
    let_diffusers_read_narrow(monkeypatch, "FluxTransformer2DModel")
    pipeline, path, result = written(name, to)
    model = dense_model(name, pipeline)
    read = comfyui.load(path, model, pipeline / FOLDERS[name], prefix=prefix_of(name))
    _, layers = comfyui.read(path)
    products = [m for m in read.modules() if isinstance(m, comfyui._Product)]
    assert len(layers) > 8
    assert len(products) >= len(layers)
    wanted, found = output_of(name, model), output_of(name, read)
    error = float((found - wanted).norm() / wanted.norm())
    assert error < (0.0085 if to == "comfyui-int8" else 0.05)
    assert result.mean < (0.008 if to == "comfyui-int8" else 0.028)


@pytest.mark.parametrize("name", INPUTS)
def test_fp8_layers_have_scales_that_are_powers_of_two(name, written):
    _, path, result = written(name, "comfyui")
    _, layers = comfyui.read(path)
    native = [layer for layer in layers.values() if not layer.full_precision]
    assert len(native) > 5
    for layer in native:
        for scale in (layer.weight_scale, layer.input_scale):
            assert torch.frexp(scale)[0] == 0.5
    assert set(result.copied) == {f"{layer}.weight" for layer in layers}


@pytest.mark.parametrize(("name", "to"), [("sd15", "comfyui"), ("sd3", "comfyui-int8")])
def test_a_packed_model_answers_as_its_export(name, to, calibrated, tmp_path):
    """comfy-kitchen multiplies the codes as quantkit does, products of joined rows included."""
    pipeline, calibration = calibrated(name)
    given = {"calibration": calibration} if to == "comfyui" else {}
    pack(pipeline, output=tmp_path / "p", recipe=to, **given)
    export(tmp_path / "p", to=to, output=tmp_path / "m.safetensors")
    model = dense_model(name, pipeline)
    read = comfyui.load(tmp_path / "m.safetensors", model, pipeline / FOLDERS[name],
                        prefix=prefix_of(name))  # fmt: skip
    loaded = type(model).from_pretrained(tmp_path / "p" / FOLDERS[name], torch_dtype=torch.float32)
    assert len(packed_layers(loaded)) > 8
    wanted, found = output_of(name, loaded), output_of(name, read)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("largest", "qkv")
def test_joined_rows_share_their_scales_decided_at_once(largest, calibrated, tmp_path):
    """From 16 bit, the codes of q, k and v are those nearest under the largest of their scales."""
    import diffusers

    source, _ = calibrated("sd3")
    pipeline = tmp_path / "pipeline"
    shutil.copytree(source, pipeline)
    model = diffusers.SD3Transformer2DModel.from_pretrained(pipeline / "transformer")
    attention = model.transformer_blocks[0].attn
    # Most codes of the others are subnormal under its scale.
    getattr(attention, f"to_{largest}").weight.data.mul_(2.0**9)
    model.save_pretrained(pipeline / "transformer")
    how = load_recipe("comfyui").model_copy(update={"activation": ActivationRecipe(mode="none")})
    export(pipeline, to="comfyui", recipe=how, output=tmp_path / "m.safetensors")
    _, layers = comfyui.read(tmp_path / "m.safetensors")
    rows = torch.cat([getattr(attention, f"to_{x}").weight.detach() for x in "qkv"]).float()
    layer = layers["joint_blocks.0.x_block.attn.qkv"]
    nearest = (rows / layer.weight_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(nearest.float(), layer.weight.float())
    # The rule takes the least power of two that clips nothing, or half.
    assert 448 / 4 < float(rows.abs().max() / layer.weight_scale) <= 2 * 448


@pytest.fixture(params=["native", "torch"])
def packer(request, monkeypatch):
    """Pack by the compiled core, and as without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(encoder, "why_unavailable", lambda: "no compiler")


@pytest.mark.usefixtures("packer")
@pytest.mark.parametrize(("to", "fmt"), [("comfyui-int8", INT8), ("fp8r", E4M3FN)])
def test_codes_are_those_nearest_to_a_quotient(to, fmt, calibrated, tmp_path):
    """Near ties a product with the reciprocal has another one. Quotients are numpy's, float32."""
    import diffusers

    folder = calibrated("sd3")[0] / "transformer"
    model = diffusers.SD3Transformer2DModel.from_pretrained(folder)
    rows = model.transformer_blocks[0].attn.to_out[0].weight.data
    rows.zero_()
    amax = torch.linspace(0.7, 3.3, len(rows))
    rows[:, 0] = amax
    for row, value in zip(rows, amax, strict=True):
        ties = near_ties(value / fmt.max, fmt)[: len(row) - 1]
        row[1 : 1 + len(ties)] = ties
    assert int((rows[:, 1:] != 0).sum()) > 1000
    model.save_pretrained(tmp_path / "m")
    weight = {"format": fmt.name, "granularity": "channel", "observer": "amax"}
    how = {"name": "t", "weight": weight, "activation": {"mode": "none"}}
    output = tmp_path / "m.safetensors"
    # Of a packed model, whose codes are taken over: none is rotated.
    pack(tmp_path / "m", output=tmp_path / "p", recipe=Recipe.model_validate(how))
    export(tmp_path / "p", to=to, output=output)
    name = (
        "transformer_blocks.0.attn.to_out.0" if to == "fp8r" else "joint_blocks.0.x_block.attn.proj"
    )
    with safe_open(output, framework="pt") as file:
        codes, scale = (file.get_tensor(f"{name}.{part}") for part in ("weight", "weight_scale"))
    assert torch.equal(scale.flatten(), amax / fmt.max)
    quotients = torch.from_numpy(rows.numpy() / scale.reshape(-1, 1).numpy())
    wanted = quotients.round().to(torch.int8) if fmt is INT8 else quotients.to(fmt.torch_dtype)
    assert torch.equal(codes.float(), wanted.float())


def test_one_input_scale_serves_all_timesteps_and_joined_layers(calibrated, tmp_path):
    """The largest, which clips nothing: of q, k and v, each at its own timestep."""
    pipeline, calibration = calibrated("sd3")
    activation = {"mode": "static", "scale": "pow2", "buckets": 2}
    how = {"name": "t", "weight": {"granularity": "tensor"}, "activation": activation}
    pack(pipeline, output=tmp_path / "p", calibration=calibration,
         recipe=Recipe.model_validate(how))  # fmt: skip
    source = packed_denoiser(open_packed(tmp_path / "p").components[0])
    for number, largest in enumerate(((8.0, 1.0), (1.0, 8.0), (1.0, 1.0))):
        block = "transformer_blocks.0.attn"
        scales = {f"{block}.to_{x}.input_scale": torch.tensor([0.5, 0.25]) for x in "qkv"}
        scales[f"{block}.to_{'qkv'[number]}.input_scale"] = torch.tensor(largest)
        scales[f"{block}.to_out.0.input_scale"] = torch.tensor(largest) / 2
        plan = plan_comfyui(
            replace(source, _stand_ins=scales), COMFYUI, requantize=True, scheduler={}
        )
        output = tmp_path / f"{number}.safetensors"
        OneFile(plan).write(output, force=False, progress=silent)
        _, layers = comfyui.read(output)
        assert layers["joint_blocks.0.x_block.attn.qkv"].input_scale == max(largest)
        assert layers["joint_blocks.0.x_block.attn.proj"].input_scale == max(largest) / 2


def test_joined_rows_share_the_scale_of_their_input(written):
    """Statistics of q, k and v are those of one tensor, so that their own scales are one."""
    _, path, _ = written("sd3", "comfyui")
    _, layers = comfyui.read(path)
    joined = [layer for name, layer in layers.items() if name.endswith(".qkv")]
    assert joined
    assert all(layer.input_scale is not None for layer in joined)


def test_scales_by_channel_that_are_powers_of_two_become_one(calibrated, tmp_path):
    import diffusers

    pipeline = tmp_path / "pipeline"
    shutil.copytree(calibrated("sd3")[0], pipeline)
    model = diffusers.SD3Transformer2DModel.from_pretrained(pipeline / "transformer")
    # Most codes of the other rows are subnormal under the scale of this.
    model.transformer_blocks[0].attn.to_out[0].weight.data[0].mul_(2.0**9)
    model.save_pretrained(pipeline / "transformer")
    how = {
        "name": "t",
        "weight": {"granularity": "channel", "scale": "pow2"},
        "activation": {"mode": "none"},
    }
    pack(pipeline, output=tmp_path / "p", recipe=Recipe.model_validate(how))
    result = export(tmp_path / "p", to="comfyui", output=tmp_path / "m.safetensors")
    # Only codes that become subnormal are rounded.
    assert 0 < result.errors["joint_blocks.0.x_block.attn.proj.weight"] < 0.002
    assert sum(error > 0 for error in result.errors.values()) < 4
    assert all(
        layer.full_precision for layer in comfyui.read(tmp_path / "m.safetensors")[1].values()
    )


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "channel": ("sd3", {}, "scales by channel that are no powers of two"),
    "convolutions": (
        "sd15",
        {"weight": {"granularity": "tensor"}},
        "a quantized convolution",
    ),
    "joined": (
        "sd3",
        {"weight": {"granularity": "tensor"}},
        "joined under one scale, and its own is no power of two",
    ),
    "static": (
        "sd15",
        {
            "weight": {"granularity": "tensor"},
            "activation": {"mode": "static"},
            "convolutions": False,
        },
        "a static input scale that is no power of two",
    ),
    "buckets": (
        "sd15",
        {
            "weight": {"granularity": "tensor"},
            "activation": {"mode": "static", "scale": "pow2", "buckets": 2},
            "convolutions": False,
        },
        "input scales by timestep",
    ),
    "smooth": (
        "sd15",
        {"weight": {"granularity": "tensor"}, "smooth": 0.5, "convolutions": False},
        "a smoothed input",
    ),
    "int8": (
        "sd3",
        {"weight": {"format": "int8"}, "data_free": True},
        "format int8",
    ),
    "partly": (
        "sd3",
        {"weight": {"granularity": "tensor", "scale": "pow2"}, "keep": ["*.to_k"]},
        "joined with .*to_k.weight, which is not packed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_comfyui_does_not_hold_is_refused_or_converted(case, calibrated, tmp_path):
    name, how, said = REFUSED[case]
    pipeline, calibration = calibrated(name)
    pack(pipeline, output=tmp_path / "p", calibration=calibration,
         recipe=Recipe.model_validate({"name": "t", **how}))  # fmt: skip
    output = tmp_path / "m.safetensors"
    with pytest.raises(
        CheckpointError, match=f"{said}.* which ComfyUI's FP8 does not hold"
    ) as caught:
        export(tmp_path / "p", to="comfyui", output=output)
    assert caught.value.fields == ("requantize",)
    assert not output.exists()
    result = export(tmp_path / "p", to="comfyui", output=output, requantize=True)
    assert result.worst[0] < 0.05
    _, layers = comfyui.read(output)
    assert layers
    for layer in layers.values():
        assert layer.full_precision == (layer.input_scale is None)


def test_int4_is_int8_to_comfyui(calibrated, tmp_path):
    pipeline, _ = calibrated("sd3")
    how = {"name": "t", "weight": {"format": "int4"}, "data_free": True}
    pack(pipeline, output=tmp_path / "p", recipe=Recipe.model_validate(how))
    result = export(tmp_path / "p", to="comfyui-int8", output=tmp_path / "m.safetensors")
    assert result.worst[0] == 0
    _, layers = comfyui.read(tmp_path / "m.safetensors")
    component = open_packed(tmp_path / "p").components[0]
    assert torch.equal(
        layers["joint_blocks.0.x_block.attn.proj"].values(),
        component.dequantized("transformer_blocks.0.attn.to_out.0"),
    )


def test_statistics_that_the_recipe_needs_are_asked_for(calibrated, tmp_path):
    with pytest.raises(RecipeError, match="needs statistics"):
        export(calibrated("sd3")[0], to="comfyui", output=tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def scheduled(pipeline, folder, **changed):
    shutil.copytree(pipeline, folder)
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return folder


@pytest.mark.parametrize(
    ("changed", "marks"),
    [
        ({}, set()),
        ({"prediction_type": "v_prediction"}, {"v_pred"}),
        ({"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}, {"v_pred", "ztsnr"}),
        ({"rescale_betas_zero_snr": True}, set()),
    ],
)
def test_sdxl_says_what_it_predicts(changed, marks, calibrated, tmp_path):
    folder = scheduled(calibrated("sdxl")[0], tmp_path / "pipeline", **changed)
    export(folder, to="comfyui-int8", output=tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        found = {name for name in file.keys() if "." not in name}  # noqa: SIM118
        assert found == marks
        assert all(file.get_tensor(name).numel() == 0 for name in marks)


def test_other_models_that_predict_v_are_told_what_to_set(calibrated, tmp_path):
    folder = scheduled(calibrated("sd15")[0], tmp_path / "p", prediction_type="v_prediction")
    result = export(folder, to="comfyui-int8", output=tmp_path / "m.safetensors", dry_run=True)
    assert any("ModelSamplingDiscrete" in note for note in result.notes)


def test_widths_that_comfyui_does_not_recognize_are_refused(tmp_path):
    import diffusers

    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(96, 128, 160),
        down_block_types=("DownBlock2D",) * 3,
        up_block_types=("UpBlock2D",) * 3,
        layers_per_block=1,
        cross_attention_dim=32,
    )
    unet.save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="widths of blocks 96, 128, 160: ComfyUI recognizes only"):
        export(tmp_path / "m", to="comfyui-int8", output=tmp_path / "m.safetensors")


def test_the_bundled_recipe_packs_no_convolution(calibrated, tmp_path):
    pipeline, calibration = calibrated("sd15")
    pack(pipeline, output=tmp_path / "p", recipe="comfyui", calibration=calibration)
    component = open_packed(tmp_path / "p").components[0]
    assert {len(component.records[layer].shape) for layer in component.config.layers} == {2}
    assert not load_recipe("comfyui").convolutions
