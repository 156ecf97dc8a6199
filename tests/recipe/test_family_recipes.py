"""Tuned recipes: dry on published models of their families, and for real on narrow ones."""

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import quantkit
from quantkit.cli import quantkit as command
from quantkit.models.families import find_family
from quantkit.models.recommended import tuned
from quantkit.models.source import open_model
from quantkit.pipelines.batches import split_batches
from quantkit.pipelines.running import load_pipeline, run_batch
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.load import load_recipe, recipe_names
from quantkit.workflow.build import MASKS, PACKED
from tests.support import pipelines
from tests.support.headers import golden_keys, write_pipeline
from tests.support.sampling import one_of_each, turned

pytestmark = pytest.mark.usefixtures("one_thread")

#: family -> (published model, its pipeline, narrow pipeline, layers, of them packed by its recipes,
#: and with those that the family keeps)
FAMILIES = {
    "sd15": ("sd15", "StableDiffusionPipeline", pipelines.tiny_sd15_pipeline, 282, 256, 280),
    "sdxl": ("sdxl", "StableDiffusionXLPipeline", pipelines.tiny_sdxl_pipeline, 794, 771, 792),
    "sd3": (
        "sd3_medium",
        "StableDiffusion3Pipeline",
        pipelines.tiny_transformer_pipeline,
        341,
        333,
        339,
    ),
    "flux": ("flux1_dev", "FluxPipeline", pipelines.tiny_flux_pipeline, 504, 494, 502),
}
TUNED = [name for name in recipe_names() if load_recipe(name).tuned]
CASES = [(family, name) for family in FAMILIES for name in TUNED]
CALIBRATED = [(family, name) for family, name in CASES if load_recipe(name).needs_calibration]
#: Bytes of the result, as shares of those of 16 bit: codes, and scales and 16-bit layers.
SHARES = {"int4": (0.25, 0.29)}


def recipe_of(family, name):
    """Return a recipe as models of the family take it."""
    row = {"sd15": "unet", "sdxl": "unet"}.get(family, family)
    return tuned(load_recipe(name), find_family("", row))


def needs(recipe):
    """Return what packing by the recipe needs."""
    wanted = [("calibration", recipe.needs_calibration), ("hessians", recipe.needs_hessians)]
    return [what for what, needed in wanted if needed]


def layers_of(family, recipe):
    """Return how many layers the family's model has, and how many the recipe packs."""
    *_, layers, packed, with_kept = FAMILIES[family]
    return layers, packed if recipe.kept is None else with_kept


PROMPTS = ("a cat", "a red dog")
#: Random weights say little: what is wrong, is of the order of 1.
LATENTS_NMSE = 0.1


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Published models: whole headers, no weights."""
    root = tmp_path_factory.mktemp("published")
    return {
        family: write_pipeline(root / family, name, pipeline)
        for family, (name, pipeline, *_) in FAMILIES.items()
    }


def called(*arguments):
    """Return the JSON that a command prints."""
    words = [*map(str, arguments), "--json", "-q"]
    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def weight_bytes(family):
    """Return the bytes that half the weights of the packed layers would take, and all of them."""
    keys = golden_keys(FAMILIES[family][0])
    return sum(2 * torch.Size(shape).numel() for shape in keys["tensors"].values())


def test_published_models_take_no_disk(published):
    for family, path in published.items():
        (file,) = path.rglob("*.safetensors")
        assert file.stat().st_size > weight_bytes(family)
        assert file.stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(("family", "name"), CASES)
def test_pack_runs_dry_on_the_published_model(published, tmp_path, family, name):
    recipe = recipe_of(family, name)
    layers, packed = layers_of(family, recipe)
    plan = called("pack", published[family], "-r", name, "-o", tmp_path / "o", "-n")
    assert plan["written"] is False
    assert len(plan["layers"]) == layers
    assert sum(layer["scheme"] is not None for layer in plan["layers"]) == packed
    assert weight_bytes(family) < plan["bytes_before"] < 1.01 * weight_bytes(family)
    least, largest = SHARES.get(name, (0.5, 0.53))
    assert least < plan["bytes_after"] / plan["bytes_before"] < largest
    most = plan.get("sparsest")
    assert (most is not None) == name.endswith("-budget")
    if most is not None:
        # 2:4 takes half the codes and an eighth of a byte for each: 3/8 of 16 bits in all.
        assert 0.3 < most["bytes_after"] / plan["bytes_before"] < 0.4
    assert plan.get("missing", []) == needs(recipe)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("family", "name"), CALIBRATED)
def test_calibrations_run_dry_on_the_published_model(published, tmp_path, family, name):
    recipe = recipe_of(family, name)
    layers, packed = layers_of(family, recipe)
    arguments = (published[family], "-r", name, "-o", tmp_path / "o", "-n")
    plan = called("calibrate", "model", *arguments)
    (entry,) = plan["components"].values()
    # All layers but those of a length that no kernel reads.
    assert plan["written"] is None
    assert packed < len(entry["layers"]) <= layers
    assert plan["buckets"] == recipe.calibration.buckets
    plan = called("calibrate", "hessian", *arguments)
    (entry,) = plan["components"].values()
    assert (plan["written"], len(entry["layers"])) == (None, packed)
    assert entry["groups"] * 4 * 2**30 >= entry["bytes"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", turned(FAMILIES, TUNED, times=2))
def test_run_runs_dry_on_the_published_model(published, tmp_path, case):
    family, name = case
    plan = called("run", name, published[family], "-o", tmp_path / "o", "-n")
    assert ("hessians/" in plan["files"]) == load_recipe(name).needs_hessians
    assert ("masks.safetensors" in plan["files"]) == name.endswith("-budget")
    dry = called("pack", published[family], "-r", name, "-o", tmp_path / "o", "-n")
    assert plan["packed"]["bytes_after"] == dry["bytes_after"]
    assert not list(tmp_path.iterdir())


def test_dry_runs_are_told_in_words(published, tmp_path):
    name, path, output = "fp8-sparse-budget", published["flux"], tmp_path / "o"
    text = CliRunner().invoke(command, ["run", name, str(path), "-o", str(output), "-n"]).output
    assert "494 layers packed, 0 of them sparse, 10 kept in 16 bit: 23.8 GB" in text
    assert "with all 418 layers masked that may be: " in text
    assert "79.4 GB, 21 runs of the prompts" in text
    text = CliRunner().invoke(command, ["pack", str(path), "-r", name, "-o", "o", "-n"]).output
    assert "missing, planned as if given: --calibration, --hessians" in text


def test_modulation_is_weights_alone_and_never_sparse(published, tmp_path):
    for family, name in (("flux", "fp8-sparse-budget"), ("sd3", "fp8-gptq")):
        plan = called("pack", published[family], "-r", name, "-o", tmp_path / "o", "-n")
        schemes = {
            layer["name"]: layer["scheme"]
            for layer in plan["layers"]
            if ".norm1" in layer["name"] and layer["scheme"]
        }
        assert schemes
        assert {(s["activation"], s["smooth"]) for s in schemes.values()} == {("none", False)}


def test_projections_of_up_blocks_are_int8_among_int4(published, tmp_path):
    plan = called("pack", published["sdxl"], "-r", "int4", "-o", tmp_path / "o", "-n")
    schemes = {layer["name"]: layer["scheme"] for layer in plan["layers"] if layer["scheme"]}
    found = {name for name, scheme in schemes.items() if scheme["weight"] == "int8"}
    assert {name.split(".")[0] for name in found} == {"up_blocks"}
    assert {name.split(".")[-1] for name in found} == {"conv_shortcut", "proj_in", "proj_out"}
    assert {scheme["weight"] for scheme in schemes.values()} == {"int4", "int8"}


# For real, on the same blocks, narrow


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """The narrow pipelines, made when asked for."""
    root, made = tmp_path_factory.mktemp("narrow"), {}

    def get(family):
        if family not in made:
            made[family] = FAMILIES[family][2](root / family)
        return made[family]

    with pipelines.small_pictures("FluxPipeline"):
        yield get


@pytest.fixture(scope="module")
def taken(narrow, tmp_path_factory):
    """Statistics and second moments, which the recipes of a family share."""
    root, made = tmp_path_factory.mktemp("taken"), {}
    prompts = root / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))

    def get(family):
        if family not in made:
            # The recipe that packs most layers, and so observes them.
            run: tuple[Any, ...] = (narrow(family), "-r", "int4", "--prompts", prompts)
            steps = recipe_of(family, "int4").calibration.buckets
            run += ("--set", "calibration.batch=2", "--set", f"calibration.steps={steps}")
            run += ("--device", "cpu", "-o")
            statistics, moments = root / f"{family}.safetensors", root / family
            called("calibrate", "model", *run, statistics)
            called("calibrate", "hessian", *run, moments)
            made[family] = ("-c", statistics, "--hessians", moments)
        return made[family]

    return get


def latents(pipe):
    """Return what two steps make of the prompts."""
    pipe.set_progress_bar_config(disable=True)
    settings = CalibrationRecipe(prompts=2, steps=2, buckets=1, batch=2)
    (batch,) = split_batches(PROMPTS, settings)
    return run_batch(pipe, batch, settings).float()


@pytest.mark.parametrize("case", one_of_each(CALIBRATED, lambda c: c[0][:2]), ids="-".join)
def test_whole_path_on_a_narrow_model(narrow, taken, tmp_path, case):
    """Calibrate, take moments, choose masks, pack, verify, load, run."""
    family, name = case
    recipe = recipe_of(family, name)
    model, given, masked = narrow(family), taken(family), []
    dry = called("pack", model, "-r", name, "-o", tmp_path / PACKED, "-n")
    if recipe.sparsity is not None:
        masks = called("sparsify", model, "-r", name, *given, "-o", tmp_path / MASKS)
        masked = [entry["layer"] for entry in masks["layers"] if entry["chosen"]]
        given += ("--masks", tmp_path / MASKS)
    done = called("pack", model, "-r", name, *given, "--threads", 1, "-o", tmp_path / PACKED)
    sparse = [x["name"] for x in done["layers"] if x["scheme"] and x["scheme"]["sparsity"]]
    assert sorted(sparse) == sorted(masked)
    assert bool(sparse) == bool(dry["sparsest"]) == (recipe.sparsity is not None)
    # 'smooth: auto' leaves layers without a factor, and the header lists what it chose.
    room = 8192 if recipe.smooth == "auto" else 0
    least = (dry["sparsest"] or dry)["bytes_after"]
    assert least - room <= done["bytes_after"] <= dry["bytes_after"] + room
    called("verify", tmp_path / PACKED)
    before = latents(load_pipeline(open_model(str(model)), torch.device("cpu")))
    after = latents(quantkit.load_pipeline(tmp_path / PACKED))
    error = float((after - before).square().sum() / before.square().sum())
    assert 0 < error < LATENTS_NMSE, error
