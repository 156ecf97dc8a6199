"""From a pipeline to its sensitivity, to a chosen recipe, to what it packs to."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import quantkit as package
from quantkit.calibration.moments.moment_files import load_hessians
from quantkit.calibration.observing.collect import layers_to_pack
from quantkit.calibration.statistics.layer_statistics import load_calibration
from quantkit.checkpoint.reader import open_packed
from quantkit.cli import quantkit as command
from quantkit.errors import ArtefactError, RecipeError
from quantkit.models.component_layers import list_layers
from quantkit.models.source import open_model
from quantkit.packing.pack_model import plan_pack, summarize
from quantkit.pipelines.running import load_pipeline, quiet_libraries
from quantkit.progress import silent
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.goals import BudgetRecipe
from quantkit.recipe.load import load_recipe, parse_recipe
from quantkit.recipe.schema import Recipe
from quantkit.sensitivity import measured_model
from quantkit.sensitivity.analyse import treated_pipeline
from quantkit.sensitivity.measured_model import MeasuredModel
from quantkit.sensitivity.sensitivity_file import load_sensitivity
from quantkit.sensitivity.simulate import final_latents, relative_error
from quantkit.sensitivity.treatments import BY_NAME, TREATMENTS, refusal
from quantkit.sparsity.sparsegpt import Surgeon
from tests.support.sensitivities import CPU, FP8, made

#: The cheapest observers, and few calls.
QUICK = """
name: quick
activation: {mode: static, observer: amax, buckets: 2}
calibration: {prompts: 1, steps: 2, guidance: 2.0, buckets: 2, batch: 1}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory, pipeline_dir):
    """Calibrate the tiny pipeline and measure it, two layers in the pipeline."""
    folder = tmp_path_factory.mktemp("sensitivity")
    quick = folder / "quick.yaml"
    quick.write_text(QUICK)
    invoke("calibrate", "model", pipeline_dir, "-r", quick, "-o", folder / "c.safetensors", "-q")
    invoke("calibrate", "sensitivity", pipeline_dir, "-c", folder / "c.safetensors", "-r", quick,
           "--measure", 2, "-o", folder / "s.json", "--plot", folder / "s.svg", "-q")  # fmt: skip
    return folder


def invoke(*words, code=0):
    result = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=True)
    if code == 0 and result.exception is not None:
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_every_layer_that_can_be_packed_is_measured(work, pipeline_dir):
    found = load_sensitivity(work / "s.json")
    component = open_model(str(pipeline_dir)).components[0]
    packed = {layer.name for layer in layers_to_pack(component, found.recipe)}
    assert {layer.name for layer in found.layers} == packed
    assert packed < set(load_calibration(work / "c.safetensors").layers["unet"])
    assert sum(layer.measured is not None for layer in found.layers) == 2
    assert len(found.notes) >= 2
    layers = {layer.name: layer for layer in list_layers(component)}
    for layer in found.layers:
        assert set(layer.outcomes) == {
            t.name for t in TREATMENTS if not refusal(t, layers[layer.name]) and not t.updates
        }
    # 16x16 latents are halved by the stride of the downsampler; two halves of guidance.
    rows = {layer.name: layer.rows for layer in found.layers}
    down = "down_blocks.0.downsamplers.0.conv"
    assert rows["down_blocks.0.resnets.0.conv1"] == 4 * rows[down] > 0


def test_measuring_again_gives_the_same_file(work, pipeline_dir):
    invoke("calibrate", "sensitivity", pipeline_dir, "-c", work / "c.safetensors", "-r",
           work / "quick.yaml", "--measure", 2, "-o", work / "again.json", "-q")  # fmt: skip
    assert (work / "again.json").read_bytes() == (work / "s.json").read_bytes()


def test_chosen_recipe_packs_to_its_size_and_its_latents(work, pipeline_dir, tmp_path):
    chosen, calibration = tmp_path / "chosen.yaml", work / "c.safetensors"
    out = invoke("calibrate", "optimize", work / "s.json", "--set", "budget.bytes=0.55", "-o",
                 chosen, "--json")  # fmt: skip
    told = json.loads(out)
    names = {layer["name"]: layer["treatment"] for layer in told["layers"]}
    assert len(set(names.values())) > 1
    assert told["size"] <= 0.55
    invoke("sparsify", pipeline_dir, "-r", chosen, "-c", calibration, "-o", tmp_path / "m", "-q")
    invoke("pack", pipeline_dir, "-r", chosen, "-c", calibration, "--masks", tmp_path / "m", "-o",
           tmp_path / "packed", "-q")  # fmt: skip
    model, recipe = open_model(str(pipeline_dir)), load_recipe(str(chosen))
    stored = load_calibration(calibration)
    plan = plan_pack(model, recipe, calibration=stored, masks=None, progress=silent)
    by_layer = {layer.name: layer for layer in summarize(plan, tmp_path).layers}
    for layer in told["layers"]:
        # Of a layer that stays, pack counts its bias too: this is about those that are packed.
        if layer["treatment"] != "16-bit":
            bias = by_layer[layer["name"]].bytes_after - layer["bytes"]
            assert bias in (0, 2 * by_layer[layer["name"]].shape[0])
    assert_same_codes(model, stored, names, tmp_path / "packed")


def assert_same_codes(model, calibration, names, packed, surgeon=None):
    """Hold what treated layers compute with to the weights and scales of the packed pipeline.

    Latents would not do: sums in another order flip a code once in a while, and in a random UNet
    one flip is an avalanche.
    """
    subject = MeasuredModel.of(model, parse_recipe(QUICK, where="quick"), calibration, surgeon)
    modules = dict(package.load_pipeline(packed, torch_dtype=torch.float32).unet.named_modules())
    for name, treatment in names.items():
        if treatment == "16-bit":
            assert isinstance(modules[name], nn.Linear | nn.Conv2d)
            continue
        found = subject.substitute(name, treatment, CPU)
        assert torch.equal(found.weight, modules[name].dequantized()), name
        assert (found.cast.scale is None) == (modules[name].input_scale is None)
        if found.cast.scale is not None:
            assert torch.equal(found.cast.scale, modules[name].input_scale.reshape(-1)), name
            assert found.cast.edges == modules[name].scheme.buckets


@pytest.fixture(scope="module")
def surgery(work, pipeline_dir):
    """Second moments of the tiny pipeline, and what sensitivity makes of them."""
    quick = work / "quick.yaml"
    invoke("calibrate", "hessian", pipeline_dir, "-r", quick, "-o", work / "h", "-q")
    invoke("calibrate", "sensitivity", pipeline_dir, "-c", work / "c.safetensors", "--hessians",
           work / "h", "-r", quick, "--measure", 0, "-o", work / "sh.json", "-q")  # fmt: skip
    return work


@pytest.mark.slow
def test_sparsegpt_is_chosen_and_packs_to_what_was_measured(surgery, pipeline_dir, tmp_path):
    found = load_sensitivity(surgery / "sh.json")
    can = [layer for layer in found.layers if "2:4-wanda-e4m3fn-token" in layer.outcomes]
    assert can
    assert all("2:4-sparsegpt-e4m3fn-token" in layer.outcomes for layer in can)
    chosen, calibration = tmp_path / "chosen.yaml", surgery / "c.safetensors"
    told = json.loads(
        invoke("calibrate", "optimize", surgery / "sh.json", "--set", "budget.bytes=0.5",
               "-o", chosen, "--json")
    )  # fmt: skip
    names = {layer["name"]: layer["treatment"] for layer in told["layers"]}
    sparse = [name for name, treatment in names.items() if BY_NAME[treatment].updates]
    assert sparse
    recipe = load_recipe(str(chosen))
    assert recipe.needs_hessians
    assert recipe.sparsity.method == "sparsegpt"
    assert {name for name in names if recipe.settings(name).weight.rounding == "gptq"} >= {*sparse}
    moments = ("--hessians", surgery / "h")
    invoke("sparsify", pipeline_dir, "-r", chosen, "-c", calibration, *moments, "-o",
           tmp_path / "m", "-q")  # fmt: skip
    invoke("pack", pipeline_dir, "-r", chosen, "-c", calibration, *moments, "--masks",
           tmp_path / "m", "-o", tmp_path / "packed", "-q")  # fmt: skip
    model = open_model(str(pipeline_dir))
    hessians = Surgeon(load_hessians(surgery / "h"), CPU)
    assert_same_codes(model, load_calibration(calibration), names, tmp_path / "packed", hessians)


def test_sparsegpt_without_second_moments_is_refused(work, surgery, pipeline_dir, tmp_path):
    glob, output = "2:4-sparsegpt-*", tmp_path / "chosen.yaml"
    with pytest.raises(RecipeError, match=r"2:4-sparsegpt-\*: not measured, .* give them to"):
        invoke("calibrate", "optimize", work / "s.json", "--set", "budget.bytes=0.6",
               "--set", f"budget.treatments=['{glob}']", "-o", output)  # fmt: skip
    assert not output.exists()
    subject = MeasuredModel.of(
        open_model(str(pipeline_dir)),
        parse_recipe(QUICK, where="quick"),
        load_calibration(work / "c.safetensors"),
    )
    found = load_sensitivity(surgery / "sh.json").layers
    name = next(x.name for x in found if "2:4-sparsegpt-e4m3fn-token" in x.outcomes)
    with pytest.raises(RecipeError, match="needs second moments; give those of"):
        subject.substitute(name, "2:4-sparsegpt-e4m3fn-token", CPU)


def test_treated_pipeline_changes_and_comes_back(work, pipeline_dir):
    settings = CalibrationRecipe(prompts=1, steps=1, guidance=2.0, batch=1, buckets=1)
    model = open_model(str(pipeline_dir))
    subject = MeasuredModel.of(
        model, parse_recipe(QUICK, where="quick"), load_calibration(work / "c.safetensors")
    )
    with quiet_libraries():
        pipe = load_pipeline(model, CPU)
        untouched = final_latents(pipe, ("a red fox",), settings)
        with treated_pipeline(subject, pipe, dict.fromkeys(subject.layers, "e4m3fn-static")):
            found = final_latents(pipe, ("a red fox",), settings)
        assert torch.equal(final_latents(pipe, ("a red fox",), settings), untouched)
    # FP8 keeps three bits of mantissa: errors of a few percent, far from none and from all.
    assert 1e-5 < relative_error(found, untouched) < 0.1


def test_search_keeps_the_ssim(work, pipeline_dir, tmp_path):
    told = json.loads(
        invoke(
            "calibrate",
            "optimize",
            work / "s.json",
            "-r",
            "fp8",
            "--set",
            "budget.ssim=0.9",
            "--model",
            pipeline_dir,
            "-c",
            work / "c.safetensors",
            "--count",
            1,
            "-o",
            tmp_path / "chosen.yaml",
            "-q",
            "--json",
        )
    )
    passed = [trial for trial in told["trials"] if trial["ssim"] >= 0.9]
    failed = [trial["error"] for trial in told["trials"] if trial["ssim"] < 0.9]
    assert told["error"] == max(trial["error"] for trial in passed)
    assert not failed or told["error"] < min(failed)
    assert "SSIM" in load_recipe(str(tmp_path / "chosen.yaml")).description


REFUSED = {
    "no budget": (["-r", "fp8"], "recipe fp8: no budget; set its bytes"),
    "search without a model": (
        ["--set", "budget.ssim=0.9"],
        "budget ssim: pictures have to be made for it; give a model",
    ),
    "out of reach": (
        ["--set", "budget.bytes=0.01"],
        "budget bytes 0.01: the smallest that the treatments allow is",
    ),
    "two goals": (
        ["--set", "budget.bytes=0.5", "--set", "budget.error=1"],
        "budget: found bytes and error",
    ),
    "no such treatment": (
        ["--set", "budget.bytes=0.9", "--set", "budget.treatments=[int4]"],
        "treatments int4: match none",
    ),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_optimize_refuses(work, tmp_path, words, message):
    output = tmp_path / "chosen.yaml"
    result = CliRunner().invoke(
        command,
        ["calibrate", "optimize", str(work / "s.json"), *map(str, words), "-o", str(output)],
    )
    assert message in str(result.exception)
    assert not output.exists()


def test_calibration_of_other_weights_is_refused(work, tmp_path):
    from tests.support.pipelines import tiny_pipeline

    other = tiny_pipeline(tmp_path / "other", seed=1)
    with pytest.raises(ArtefactError, match="had other weights"):
        invoke("calibrate", "sensitivity", other, "-c", work / "c.safetensors", "--measure", 0,
               "-o", tmp_path / "s.json", "-q")  # fmt: skip
    subject = MeasuredModel.of(
        open_model(str(other)), FP8, load_calibration(work / "c.safetensors")
    )
    with pytest.raises(ArtefactError, match="had other weights or is not in this model"):
        changed = replace(load_sensitivity(work / "s.json").layers[0], digest="0")
        subject.refuse_others(made([changed]))


def test_smoothing_is_refused(work, pipeline_dir):
    smooth = Recipe(name="t", smooth=0.5)
    with pytest.raises(RecipeError, match="smooth: sensitivity cannot measure it"):
        MeasuredModel.of(
            open_model(str(pipeline_dir)), smooth, load_calibration(work / "c.safetensors")
        )


def test_recipe_with_a_budget_is_built_whole(work, pipeline_dir, tmp_path, monkeypatch):
    from quantkit.workflow import build

    monkeypatch.setattr(build, "MEASURED", 1)
    quick = parse_recipe(QUICK, where="quick")
    kept = ("weight", "activation", "calibration")
    recipe = load_recipe("adaptive").model_copy(update={k: getattr(quick, k) for k in kept})
    build.build(open_model(str(pipeline_dir)), recipe, tmp_path, prompts=["a fox"],
                device="cpu", threads=1, force=False, resume=False, progress=silent)  # fmt: skip
    chosen = load_recipe(str(tmp_path / "chosen.yaml"))
    assert (chosen.name, chosen.budget) == ("adaptive-chosen", None)
    assert load_sensitivity(tmp_path / "sensitivity.json").provenance.prompts == 1
    assert open_packed(tmp_path / "packed").components
    searching = recipe.model_copy(update={"budget": BudgetRecipe(ssim=0.9)})
    with pytest.raises(RecipeError, match="recipe adaptive: budget ssim, expected bytes"):
        build.refuse_search(searching)


def test_transformers_are_measured_too(transformer_pipeline_dir, tmp_path):
    invoke("calibrate", "model", transformer_pipeline_dir, "--count", 1,
           "--set", "calibration.steps=4", "-o", tmp_path / "c.safetensors", "-q")  # fmt: skip
    invoke("calibrate", "sensitivity", transformer_pipeline_dir, "-c", tmp_path / "c.safetensors",
           "--count", 1, "--set", "calibration.steps=4", "--measure", 2, "-o",
           tmp_path / "s.json", "-q")  # fmt: skip
    measured = [m for m in (x.measured for x in load_sensitivity(tmp_path / "s.json").layers) if m]
    assert len(measured) == 2
    assert all(m.error > 0 for m in measured)


def test_attention_is_measured_in_the_pipeline(work, pipeline_dir, tmp_path, monkeypatch):
    quick, calibration = tmp_path / "quick.yaml", work / "c.safetensors"
    # The others are measured as ever.
    monkeypatch.setattr(measured_model, "layers_to_pack", lambda *a: layers_to_pack(*a)[:2])
    quick.write_text(f"{QUICK}attention: {{min_keys: 16, scales: static}}\n")
    options = ("-c", calibration, "-r", quick, "--measure", 1, "-o", tmp_path / "s.json")
    table = invoke("calibrate", "sensitivity", pipeline_dir, *options)
    found = load_sensitivity(tmp_path / "s.json")
    stored = load_calibration(calibration).attention["unet"]
    wanted = {name for name, s in stored.items() if int(s.call_keys.max()) >= 16}
    assert {layer.name for layer in found.attention} == wanted
    assert wanted
    for layer in found.attention:
        assert layer.name in table
        assert 0 < layer.outcomes["attention-int8"].error < layer.outcomes["attention-e4m3fn"].error
        # Two halves of guidance.
        assert layer.rows == 2 * int(stored[layer.name].call_queries.max())
    # The layers are what they are without.
    plain = load_sensitivity(work / "s.json").layers[:2]
    assert [replace(layer, measured=None) for layer in found.layers[:2]] == [
        replace(layer, measured=None) for layer in plain
    ]
    names = dict.fromkeys(wanted, "attention-int8")
    model = open_model(str(pipeline_dir))
    subject = MeasuredModel.of(model, load_recipe(str(quick)), load_calibration(calibration))
    subject.refuse_others(found)
    with quiet_libraries():
        pipe = load_pipeline(model, CPU)
        settings = subject.recipe.calibration
        untouched = final_latents(pipe, ["a"], settings)
        with treated_pipeline(subject, pipe, names):
            assert not torch.equal(final_latents(pipe, ["a"], settings), untouched)
        assert torch.equal(final_latents(pipe, ["a"], settings), untouched)
