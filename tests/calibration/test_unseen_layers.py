"""Layers that no prompt calls, as GLIGEN's fusers without boxes: they are known, kept and named."""

from dataclasses import replace

import pytest
import torch

import quantkit
from quantkit.calibration.statistics.layer_statistics import (
    Calibration,
    load_calibration,
    save_calibration,
)
from quantkit.calibration.statistics.observers import static_scale
from quantkit.errors import ArtefactError
from quantkit.models.layer_plan import UNSEEN
from quantkit.models.source import open_model
from quantkit.numerics.formats import FORMATS
from quantkit.progress import silent
from quantkit.recipe.layer_recipes import ActivationRecipe
from quantkit.recipe.load import load_recipe
from quantkit.sensitivity.measured_model import MeasuredModel
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.sparsegpt import Surgeon
from quantkit.workflow.calibrate import merge_calibrations
from quantkit.workflow.hessians import calibrate_hessians
from quantkit.workflow.pack import PackSummary, pack
from tests.support.observed import statistics_of
from tests.support.pipelines import tiny_gated_pipeline


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_gated_pipeline(tmp_path_factory.mktemp("gated") / "model")


def five_steps(seed=0):
    return load_recipe("int8", {"calibration.steps": 5, "calibration.seed": seed})


@pytest.fixture(scope="module")
def calibrated(model):
    return quantkit.calibrate(
        model, recipe=five_steps(), output=model.parent / "calibration", count=1
    )


def test_calibrating_names_what_no_prompt_calls(calibrated):
    (component, names) = next(iter(calibrated.unseen.items()))
    assert component == "unet"
    assert names
    assert all(".fuser." in name or "position_net." in name for name in names)
    assert calibrated.to_json()["unseen"] == {"unet": list(names)}
    told = f"never called by these prompts: {len(names)} layers, unet.{names[0]}"
    assert told in repr(calibrated)
    assert load_calibration(calibrated.output).unseen_of(open_of(calibrated)) == set(names)


def open_of(calibrated):
    return open_model(str(calibrated.output.parent / "model")).components[0]


@pytest.mark.parametrize("recipe", ["int8", "fp8-static", "fp8-sparse", "fp8"])
def test_unseen_layers_are_kept_where_statistics_would_decide(model, calibrated, recipe):
    packed = pack(
        model,
        dry_run=True,
        recipe=recipe,
        calibration=calibrated.output,
        output=model.parent / "packed",
    )
    assert isinstance(packed, PackSummary)
    kept = packed.kept().get(UNSEEN, [])
    # FP8 whose inputs are scaled per token needs to know nothing.
    assert set(kept) == (set() if recipe == "fp8" else set(calibrated.unseen["unet"]))


def test_layers_that_nobody_listened_to_are_still_refused(model, calibrated):
    about = calibrated.calibration.metadata
    unknown = calibrated.unseen["unet"][0]
    digests = {"unet": {k: v for k, v in about.digests["unet"].items() if k != unknown}}
    other = replace(calibrated.calibration, metadata=replace(about, digests=digests))
    save_calibration(other, model.parent / "other", force=True)
    with pytest.raises(ArtefactError, match=f"no statistics of {unknown}, which recipe int8 needs"):
        pack(
            model,
            dry_run=True,
            recipe="int8",
            calibration=model.parent / "other",
            output=model.parent / "packed",
        )


def test_merging_takes_what_any_run_saw(model, calibrated, tmp_path):
    quantkit.calibrate(model, recipe=five_steps(seed=7), output=tmp_path / "b", count=1)
    first, second = calibrated.calibration, load_calibration(tmp_path / "b")
    lost = dict(second.layers["unet"])
    name = next(iter(lost))
    del lost[name]
    cut = Calibration({"unet": lost}, second.edges, second.metadata, second.attention)
    save_calibration(cut, tmp_path / "cut", force=False)
    merged = merge_calibrations([tmp_path / "cut", calibrated.output]).calibration
    assert set(merged.layers["unet"]) == set(first.layers["unet"])
    assert torch.equal(merged.layers["unet"][name].amax, first.layers["unet"][name].amax)


def test_a_denoiser_that_is_never_called_is_read_back(calibrated, tmp_path):
    about = calibrated.calibration.metadata
    none = Calibration({"unet": {}}, calibrated.calibration.edges, about)
    save_calibration(none, tmp_path / "none", force=False)
    found = load_calibration(tmp_path / "none")
    assert found.unseen_of(open_of(calibrated)) == set(about.digests["unet"])


def rounded(recipe):
    """Return the recipe with GPTQ."""
    return recipe.model_copy(
        update={"weight": recipe.weight.model_copy(update={"rounding": "gptq"})}
    )


def test_moments_of_unseen_layers_are_no_moments(model, tmp_path):
    taken = calibrate_hessians(
        model, recipe=load_recipe("int4", {"calibration.steps": 10}), output=tmp_path / "hessians",
        count=1,
    )  # fmt: skip
    unseen = taken.hessians.unseen["unet"]
    assert sum(".fuser." in name for name in unseen) > 10
    assert f"{len(unseen)} layers, unet.{unseen[0]}" in repr(taken)
    assert taken.to_json()["unseen"] == {"unet": list(unseen)}
    packed = pack(
        model,
        dry_run=True,
        recipe=rounded(load_recipe("fp8")),
        hessians=taken.output,
        output=tmp_path / "packed",
    )
    assert isinstance(packed, PackSummary)
    assert packed.kept()[UNSEEN] == list(unseen)
    surgeon = Surgeon(taken.hessians, torch.device("cpu"))
    opened = open_model(str(model))
    masks = choose_masks(
        opened, load_recipe("fp8-sparsegpt"), None, progress=silent, surgeon=surgeon
    )
    left = {d.layer for d in masks.decisions if d.reason == UNSEEN}
    assert left == set(unseen)
    assert sum(decision.chosen for decision in masks.decisions) > 10


def test_masks_and_sensitivity_leave_unseen_layers_out(model, calibrated):
    opened, unseen = open_model(str(model)), set(calibrated.unseen["unet"])
    recipe = load_recipe("fp8-sparse")
    masks = choose_masks(opened, recipe, calibrated.calibration, progress=silent)
    assert {d.layer for d in masks.decisions if d.reason == UNSEEN} == unseen
    subject = MeasuredModel.of(opened, load_recipe("fp8"), calibrated.calibration)
    assert not unseen & set(subject.layers)


def test_buckets_without_calls_have_the_largest_scale_of_the_others():
    """A scale of 1 would round the inputs of another prompt, which are below it, to zero."""
    seen = statistics_of(torch.full((2, 8), 0.25), torch.full((2, 8), 0.5), torch.ones(2, 8))
    count = seen.count.clone()
    count[2] = 0
    blank = replace(seen, count=count, amax=torch.tensor([0.25, 0.5, 0.0]))
    activation = ActivationRecipe(mode="static", observer="amax", buckets=3)
    found = static_scale(blank, activation, FORMATS["int8"], edges=(1.0, 2.0))
    assert torch.equal(found, torch.tensor([0.25, 0.5, 0.5]) / 127)
