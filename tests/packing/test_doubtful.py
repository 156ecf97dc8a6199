"""Layers of no role that a name or a shape tells: their error on real inputs decides."""

from dataclasses import replace

import pytest

from quantkit.calibration.observing.collect import layers_to_pack
from quantkit.checkpoint.reader import open_packed
from quantkit.models.source import of_family, open_model
from quantkit.packing.pack_model import pack
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from tests.packing.test_formats import outlying

pytestmark = pytest.mark.usefixtures("any_model")
INT8 = {"weight": {"format": "int8"}}


def packed(folder, output, recipe, calibration):
    """Pack as a model of the general family: the names of layers, and why others were kept."""
    model, recipe = of_family(open_model(folder), "general"), Recipe(name="t", **recipe)
    summary = pack(
        model, recipe, output, calibration=calibration, masks=None, threads=1, force=False,
        progress=silent,
    )  # fmt: skip
    return set(open_packed(output).components[0].config.layers), summary.kept()


def test_statistics_decide_of_layers_outside_of_the_blocks(tmp_path):
    source, calibration = outlying(tmp_path / "model", "a.fc", 100)
    layers, kept = packed(source, tmp_path / "packed", INT8, calibration)
    assert {"a.conv", "a.point"} <= layers
    assert "a.fc" not in layers
    (reason,) = [reason for reason, names in kept.items() if names == ["a.fc"]]
    assert reason.startswith("the output loses ")
    assert reason.endswith(" in int8: of a layer outside of the blocks 0.005 may be lost")
    # FP8 holds what is far above the rest.
    layers, _ = packed(source, tmp_path / "fp8", {}, calibration)
    assert "a.fc" in layers


def test_the_plan_packs_them(tmp_path):
    source, _ = outlying(tmp_path / "model", "a.fc", 1)
    component = of_family(open_model(source), "general").components[0]
    observed = {layer.name for layer in layers_to_pack(component, Recipe(name="t"))}
    assert observed == {"a.conv", "a.point", "a.fc"}
    tuned = replace(component, family=open_model(source).components[0].family)
    assert observed == {layer.name for layer in layers_to_pack(tuned, Recipe(name="t"))}
