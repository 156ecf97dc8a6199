"""Weights for ComfyUI whose inputs are rotated, multiplied by comfy-kitchen."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.calibration.moments.held_out_rows import HeldRows
from quantkit.calibration.moments.moment_files import load_hessians
from quantkit.calibration.moments.moments import Moments
from quantkit.errors import ArtefactError, CheckpointError
from quantkit.interchange.layout_names import OriginalTensor
from quantkit.interchange.reference import Reference
from quantkit.interchange.rotated import choose_rotation, rotated_codes
from quantkit.models.source import open_model
from quantkit.numerics.formats import INT4
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import Recipe
from quantkit.workflow.export import export
from quantkit.workflow.hessians import calibrate_hessians
from quantkit.workflow.pack import pack
from tests.support import comfyui
from tests.support.denoisers import output_of

#: in the file, and in diffusers: the weight of K 64 whose second half of columns is the larger
PROJ = "joint_blocks.0.x_block.attn.proj"
OUT = "transformer_blocks.0.attn.to_out.0"
PROMPTS = ("a red cube", "two blue balls", "a green cone", "a dog", "a cat", "snow")


def dense_model(pipeline):
    import diffusers

    folder = pipeline / "transformer"
    return diffusers.SD3Transformer2DModel.from_pretrained(folder, torch_dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def pipeline(calibrated):
    return calibrated("sd3")[0]


@pytest.fixture(scope="module")
def hessians(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("hessians") / "h"
    recipe = load_recipe("comfyui-w4a8", {"calibration.steps": 2})
    calibrate_hessians(pipeline, recipe=recipe, output=path, prompts=PROMPTS, device="cpu")
    return path


@pytest.fixture(scope="module")
def written(pipeline, hessians, tmp_path_factory):
    """Return a file by target, with or without second moments, and what the export says."""
    made = {}

    def of(to, *, moments):
        if (to, moments) not in made:
            path = tmp_path_factory.mktemp("rotated") / "m.safetensors"
            given = {"hessians": hessians} if moments else {}
            made[to, moments] = path, export(pipeline, to=to, output=path, **given)
        return made[to, moments]

    return of


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize(("to", "most"), [("comfyui-int8", 0.002), ("comfyui-w4a8", 0.02)])
def test_a_rotated_model_answers_nearly_as_the_16_bit_one(to, most, moments, written, pipeline):
    path, result = written(to, moments=moments)
    model = dense_model(pipeline)
    read = comfyui.load(path, model, pipeline / "transformer", prefix="")
    expected, found = output_of("sd3", model), output_of("sd3", read)
    assert float((found - expected).norm() / expected.norm()) < most
    _, layers = comfyui.read(path)
    assert len(layers) > 8
    assert result.copied == () or moments
    rotated = [layer for layer in layers.values() if "convrot_groupsize" in layer.told]
    assert f"{len(rotated)} weights are rotated" in " ".join(result.notes)
    # Nearest: a step of 7 % for groups of 16.
    assert moments or result.mean < (0.008 if to == "comfyui-int8" else 0.075)


def weights(pipeline, path):
    """Return (name, the 16-bit weight, comfy-kitchen's) of layers that are joined with no other."""
    _, layers = comfyui.read(path)
    model = dense_model(pipeline)
    yield PROJ, model.get_submodule(OUT).weight.detach(), layers[PROJ].values()
    for name, theirs in (("mlp.fc1", "ff.net.0.proj"), ("mlp.fc2", "ff.net.2")):
        module = model.get_submodule(f"transformer_blocks.0.{theirs}")
        yield name, module.weight.detach(), layers[f"joint_blocks.0.x_block.{name}"].values()


def moments_of(pipeline, hessians, recipe="comfyui-w4a8"):
    component = open_model(pipeline).components[0]
    return Reference(component, load_recipe(recipe), load_hessians(hessians))


LAYERS = (OUT, "transformer_blocks.0.ff.net.0.proj", "transformer_blocks.0.ff.net.2")


def test_gptq_takes_error_from_outputs_at_equal_bytes(pipeline, hessians, written):
    """On inputs that the weights were not fitted to."""
    known = moments_of(pipeline, hessians)
    by_moments, nearest = (written("comfyui-w4a8", moments=x)[0] for x in (True, False))
    assert by_moments.stat().st_size == nearest.stat().st_size
    for layer, (_, weight, settled), (_, _, rounded) in zip(
        LAYERS, weights(pipeline, by_moments), weights(pipeline, nearest), strict=True
    ):
        inputs = known.moments(f"{layer}.weight").held.rows.float()
        lost = [(inputs @ (values - weight).T).norm() for values in (settled, rounded)]
        assert lost[0] < 0.8 * lost[1], layer


def test_nearest_codes_stay_where_moments_say_nothing_of_other_inputs(
    pipeline, hessians, monkeypatch
):
    """No input that was held out has a share of what all observed ones were."""
    known, name = moments_of(pipeline, hessians), f"{LAYERS[0]}.weight"
    weight, (columns,) = known.rows(name), known.rows(name).shape[1:]
    first = torch.linspace(1.0, 2.0, columns)
    second = torch.outer(first, first) + 1e-3 * torch.eye(columns)
    others = torch.randn(64, columns, generator=torch.Generator().manual_seed(0))
    others -= torch.outer(others @ first, first) / first.square().sum()
    held = HeldRows(others.bfloat16(), torch.ones(64))
    original = OriginalTensor(name, (name,), swapped=False)
    nearest = rotated_codes(known.rows, None, original, INT4, 16)
    for rows, is_nearest in ((held, True), (None, False)):
        moments = Moments(second, first, 64, rows)
        monkeypatch.setattr(Reference, "moments", lambda *_, moments=moments: moments)
        found = rotated_codes(known.rows, known, original, INT4, 16)
        assert torch.equal(found.codes, nearest.codes) == is_nearest
        lost = [float((others @ (c.values() - weight).T).norm()) for c in (found, nearest)]
        assert (lost[0] > lost[1]) == (not is_nearest)


def test_nearest_codes_lose_no_more_than_those_of_comfy_kitchen(pipeline, written):
    from comfy_kitchen.tensor import AsymW4A8Int8Layout

    for name, weight, found in weights(pipeline, written("comfyui-w4a8", moments=False)[0]):
        codes, params = AsymW4A8Int8Layout.quantize(weight, convrot_groupsize=64)
        theirs = AsymW4A8Int8Layout.dequantize(codes, params)
        assert (found - weight).norm() < (theirs - weight).norm(), name


@pytest.mark.parametrize("layer", LAYERS)
def test_the_rotation_of_least_error_on_held_out_inputs_is_chosen(layer, pipeline, hessians):
    """The errors are those of comfy-kitchen's quantizers and product."""
    from comfy_kitchen.tensor import QuantizedTensor

    known = moments_of(pipeline, hessians, "comfyui-int8")
    held = known.moments(f"{layer}.weight").held
    weight, inputs = known.rows(f"{layer}.weight"), held.rows.float()
    errors = {}
    for size in (0, *(size for size in (256, 64, 16) if not weight.shape[1] % size)):
        how = {"convrot": size > 0, "convrot_groupsize": size}
        tensor = QuantizedTensor.from_float(weight, "TensorWiseINT8Layout", per_channel=True, **how)
        lost = torch.nn.functional.linear(inputs, tensor) - inputs @ weight.T
        errors[size] = float(lost.square().sum(1) @ held.weights)
    assert choose_rotation(known, [f"{layer}.weight"]) == min(errors, key=errors.get)


def test_a_channel_that_is_far_larger_leaves_steps_to_the_others(pipeline, written, tmp_path):
    inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    inputs[:, 5] *= 100
    weight = dense_model(pipeline).get_submodule(OUT).weight.detach()
    pack(pipeline, output=tmp_path / "p", recipe="comfyui-int8")
    export(tmp_path / "p", to="comfyui-int8", output=tmp_path / "m.safetensors")
    errors = {}
    for path in (tmp_path / "m.safetensors", written("comfyui-int8", moments=False)[0]):
        layer = comfyui.read(path)[1][PROJ]
        found = torch.nn.functional.linear(inputs, layer.tensor())
        # What the other channels say.
        lost = found - inputs @ weight.T
        errors[layer.told.get("convrot_groupsize", 0)] = float(lost.norm())
    assert errors.keys() == {0, 64}
    assert errors[64] < errors[0] / 2


@pytest.mark.parametrize(
    "change",
    [{"bias_correction": True}, {"sparsity": {}, "keep": ["*norm*", "*context*", "*proj_out"]}],
    ids=["corrected", "sparse"],
)
def test_layers_that_a_rotation_would_spoil_are_not_rotated(change, calibrated, tmp_path):
    pipeline, calibration = calibrated("sd3")
    how = {"weight": {"format": "int8"}, "data_free": True, **change}
    recipe = Recipe.model_validate({"name": "t", **how})
    path = tmp_path / "m.safetensors"
    export(pipeline, to="comfyui-int8", recipe=recipe, output=path, calibration=calibration)
    told = [layer.told for layer in comfyui.read(path)[1].values()]
    assert len(told) > 8
    assert not [x for x in told if "convrot" in x]
    with pytest.raises(CheckpointError, match="which ComfyUI's w4a8 does not hold; export the 16"):
        export(pipeline, to="comfyui-w4a8", output=tmp_path / "w.safetensors",
               recipe=recipe.model_copy(update={"weight": load_recipe("comfyui-w4a8").weight}),
               calibration=calibration)  # fmt: skip


def test_packed_int4_is_refused_or_rounded_again(pipeline, tmp_path):
    pack(pipeline, output=tmp_path / "p", recipe="comfyui-w4a8")
    output = tmp_path / "m.safetensors"
    with pytest.raises(CheckpointError, match="int4 codes of a weight that is not rotated, which"):
        export(tmp_path / "p", to="comfyui-w4a8", output=output)
    result = export(tmp_path / "p", to="comfyui-w4a8", output=output, requantize=True)
    assert 0.05 < result.mean < 0.09
    assert {layer.format for layer in comfyui.read(output)[1].values()} == {"asym_w4a8_int8"}


def test_layers_of_a_recipe_may_be_in_8_bits(pipeline, tmp_path):
    recipe = load_recipe("comfyui-w4a8").model_dump() | {
        "overrides": [
            {"layers": ["*.to_out.0"], "weight": {"format": "int8"}},
            # Its halves are swapped in the file.
            {"layers": ["norm_out.linear"], "keep": False},
        ]
    }
    path = tmp_path / "m.safetensors"
    export(pipeline, to="comfyui-w4a8", recipe=Recipe.model_validate(recipe), output=path)
    _, layers = comfyui.read(path)
    assert layers[PROJ].format == "int8_tensorwise"
    assert layers["final_layer.adaLN_modulation.1"].format == "asym_w4a8_int8"
    # Import undoes rotations, joins and swaps.
    quantkit.import_file(path, config=pipeline / "transformer", output=tmp_path / "imported")
    found = load_file(tmp_path / "imported" / "diffusion_pytorch_model.safetensors")
    expected = dense_model(pipeline).state_dict()
    for name, value in expected.items():
        assert (found[name].float() - value).norm() <= 0.08 * value.norm(), name


def test_a_dry_run_says_what_is_written(pipeline, hessians, written, tmp_path):
    for to in ("comfyui-int8", "comfyui-w4a8"):
        said = export(pipeline, to=to, hessians=hessians, output=tmp_path / "m", dry_run=True)
        _, result = written(to, moments=True)
        assert (said.types, said.nbytes, said.notes) == (result.types, result.nbytes, result.notes)
    assert not list(tmp_path.iterdir())


def without_the_denoiser(folder, index):
    index["digests"] = {"text_encoder": index["digests"]["transformer"]}
    shutil.move(folder / "transformer", folder / "text_encoder")


def without_a_layer(folder, index):
    del index["digests"]["transformer"][OUT]


def of_other_weights(folder, index):
    index["digests"]["transformer"][OUT] = "0" * 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_the_denoiser, "has no component 'transformer'"),
        (without_a_layer, f"no layer {OUT}; collect the hessians with the same recipe"),
        (of_other_weights, f"{OUT}.*000000000000"),
    ],
)
def test_moments_of_another_model_are_refused(change, said, pipeline, hessians, tmp_path):
    other = shutil.copytree(hessians, tmp_path / "h")
    index = json.loads((other / "index.json").read_text())
    change(other, index)
    (other / "index.json").write_text(json.dumps(index))
    for to in ("comfyui-int8", "comfyui-w4a8"):
        with pytest.raises(ArtefactError, match=said):
            export(pipeline, to=to, hessians=other, output=tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == [other]
