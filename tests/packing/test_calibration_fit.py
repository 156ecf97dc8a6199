"""A calibration serves every recipe, and what it cannot serve is refused before any work."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

import quantkit
from quantkit.calibration.observing.collect import observed_layers
from quantkit.errors import ArtefactError, RecipeError
from quantkit.models.recommended import tuned
from quantkit.models.source import open_model
from quantkit.packing import plan
from quantkit.packing.calibration_fit import refuse_unfit
from quantkit.packing.pack_model import plan_pack
from quantkit.progress import silent
from quantkit.recipe.load import load_recipe, recipe_names
from quantkit.recipe.schema import Recipe


@pytest.fixture(scope="module")
def model(pipeline_dir):
    return open_model(str(pipeline_dir))


@pytest.fixture(scope="module")
def calibration(model):
    """One that the recipe which packs least was given for."""
    few = load_recipe("conservative", {"calibration.steps": 5})
    return quantkit.calibrate(model, recipe=few, count=1, device="cpu").calibration


def unfit_for(recipe):
    """Return what packing by a recipe needs besides any calibration, as a message or nothing."""
    if recipe.needs_hessians:
        return pytest.raises(RecipeError, match="needs second moments; run 'quantkit calibrate he")
    if recipe.attention is not None and recipe.attention.chooses_formats:
        return pytest.raises(RecipeError, match=r"no errors of formats .*'quantkit calibrate model")
    return nullcontext()


@pytest.mark.parametrize("name", recipe_names())
def test_a_calibration_by_any_recipe_serves_all(model, calibration, name):
    (component,) = model.components
    recipe = tuned(load_recipe(name), component.family)
    if recipe.attention is not None:
        attention = recipe.attention.model_copy(update={"min_keys": 1})
        recipe = recipe.model_copy(update={"attention": attention})
    assert set(calibration.of(component)) == {x.name for x in observed_layers(component, recipe)}
    with unfit_for(recipe):
        refuse_unfit(component, recipe, calibration=calibration, masks=None, hessians=None)


UNFIT = {
    "buckets": (
        {"activation": {"mode": "static", "buckets": 4}},
        "5 buckets, .* merged into 4; set",
    ),
    "moments": ({"weight": {"rounding": "gptq"}}, "gptq needs second moments; run 'quantkit"),
    "errors": ({"attention": {"qk": "auto", "min_keys": 1}}, "no errors of formats for"),
}


def _never(step: str, done: int, total: int) -> None:
    pytest.fail(f"{step}: {done} of {total}")


@pytest.mark.parametrize(("keys", "message"), UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    model, calibration, monkeypatch, keys, message
):
    monkeypatch.setattr(plan, "choose_formats", pytest.fail)
    recipe = Recipe.model_validate({"name": "t", "smooth": "auto", **keys})
    with pytest.raises(RecipeError, match=message) as caught:
        plan_pack(model, recipe, calibration=calibration, masks=None, progress=_never)
    assert "\n" not in str(caught.value)


def test_missing_layers_are_counted_and_the_command_named(model, calibration):
    few = dict(list(calibration.layers["unet"].items())[:2])
    digests = {"unet": {name: calibration.metadata.digests["unet"][name] for name in few}}
    cut = replace(
        calibration,
        layers={"unet": few},
        metadata=replace(calibration.metadata, digests=digests),
    )
    words = (
        rf"no statistics of \d+ layers, the first is .*quantkit calibrate model {model.path} -r fp8"
    )
    with pytest.raises(ArtefactError, match=words):
        plan_pack(model, load_recipe("fp8-static"), calibration=cut, masks=None, progress=silent)
