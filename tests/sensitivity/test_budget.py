"""Choosing treatments for a budget."""

from dataclasses import replace

import pytest

from quantkit.errors import RecipeError
from quantkit.recipe.load import parse_recipe
from quantkit.sensitivity.sensitivity_file import Outcome
from quantkit.sensitivity.treatments import BY_NAME
from tests.support.sensitivities import choose, made, three_layers


@pytest.mark.parametrize(
    ("goal", "names"),
    [
        ({"bytes": 1.0}, ["16-bit"] * 3),
        ({"bytes": 0.9}, ["e4m3fn-static", "16-bit", "16-bit"]),
        ({"bytes": 0.52}, ["e4m3fn-static"] * 3),
        ({"bytes": 0.46}, ["2:4-wanda-e4m3fn-token", "e4m3fn-static", "e4m3fn-static"]),
        ({"error": 7.1e-3}, ["e4m3fn-static"] * 3),
        ({"error": 5e-3}, ["e4m3fn-static", "e4m3fn-static", "16-bit"]),
        ({"error": 0.11}, ["2:4-wanda-e4m3fn-token", "e4m3fn-static", "e4m3fn-static"]),
        ({"speed": 2.0}, ["e4m3fn-static"] * 3),
        ({"speed": 2.5, "treatments": ["2:4-*"]}, None),
    ],
    ids=str,
)
def test_budget_is_met(goal, names):
    choice = choose(three_layers(), **goal).assignment
    assert choice.size <= goal.get("bytes", 2)
    assert choice.error <= goal.get("error", 1)
    assert choice.speed >= goal.get("speed", 1)
    if names:
        assert [c.treatment for c in choice.chosen] == names


def test_figures_of_a_choice():
    choice = choose(three_layers(), bytes=0.52).assignment
    assert choice.size == (100 + 3 * 500) / 3100
    assert choice.error == pytest.approx(7e-3)
    assert choice.speed == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (
            {"bytes": 0.2},
            r"budget bytes 0.2: the smallest that the treatments allow is 0.3226 of the source",
        ),
        ({"speed": 9}, "budget speed 9: at most 4 is modelled"),
        (
            {"bytes": 0.5, "treatments": ["int4"]},
            "treatments int4: match none of 16-bit, e4m3fn-st",
        ),
    ],
)
def test_budget_out_of_reach_says_how_near_one_comes(goal, message):
    with pytest.raises(RecipeError, match=message):
        choose(three_layers(), **goal)


def test_masks_of_a_choice_have_one_method():
    layers = list(three_layers().layers)
    swapped = dict(layers[0].outcomes)
    swapped["2:4-magnitude-e4m3fn-token"] = Outcome(1e-9, 300, 0.25)
    choice = choose(
        made([replace(layers[0], outcomes=swapped), *layers[1:]]), bytes=0.36
    ).assignment
    methods = {BY_NAME[c.treatment].method for c in choice.chosen} - {None}
    assert len(methods) == 1


def test_recipe_keeps_its_layers():
    recipe = parse_recipe("{name: t, keep: ['*.one']}", where="t")
    chosen = choose(three_layers(), recipe, error=1.0)
    assert chosen.assignment.chosen[0].treatment == "16-bit"
    assert chosen.remarks["a.one"] == "kept by the recipe"
    assert "local 0.2 x gain 1, nothing measured" in chosen.remarks["a.two"]
    assert "e4m3fn-static 0.002 for +200 bytes" in chosen.remarks["a.two"]
