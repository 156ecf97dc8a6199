"""The recipe section ``attention``: strategies, modules and their formats."""

import json

import pytest

from quantkit.errors import RecipeError
from quantkit.numerics.attention_formats import ATTENTION_FORMATS, attention_format
from quantkit.recipe.attention_recipe import STRATEGIES, AttentionRecipe
from quantkit.recipe.load import parse_recipe


def section(**keys):
    return parse_recipe(json.dumps({"name": "a", "attention": keys}), where="recipe").attention


def names(found, module="a.attn1"):
    return [row.name for row in found.formats_of(module)]


@pytest.mark.parametrize(
    ("strategy", "formats", "calibrated"),
    [
        ("aggressive", ["e4m3fn"], True),
        ("conservative", ["int8"], False),
        ("hybrid", ["int8-pv16"], False),
        ("adaptive", ["e4m3fn", "int8", "e4m3fn-pv16", "int8-pv16"], True),
    ],
)
def test_strategies_set_keys(strategy, formats, calibrated):
    found = section(strategy=strategy)
    assert (names(found), found.needs_calibration) == (formats, calibrated)
    for key, value in STRATEGIES[strategy].items():
        assert getattr(found, key) == value
    assert found.chooses_formats == (strategy == "adaptive")
    assert AttentionRecipe.model_validate(found.model_dump()) == found


def test_every_strategy_is_tested_and_known():
    literal = AttentionRecipe.model_fields["strategy"].annotation
    assert all(name in str(literal) for name in STRATEGIES)
    assert set(STRATEGIES) == {"aggressive", "conservative", "hybrid", "adaptive"}


def test_keys_of_the_recipe_win():
    found = section(strategy="adaptive", pv="none", error_budget=0.1, scales="dynamic")
    assert names(found) == ["e4m3fn-pv16", "int8-pv16"]
    assert (found.error_budget, found.scales) == (0.1, "dynamic")


def test_the_last_override_that_matches_wins():
    found = section(
        layers=["*.attn1", "*.attn2"],
        exclude=["up.*"],
        overrides=[
            {"layers": ["down.*"], "qk": "int8"},
            {"layers": ["down.1.*"], "pv": "none", "reason": "large values"},
            {"layers": ["down.2.*"], "qk": "none"},
        ],
    )
    assert names(found, "mid.attn1") == ["e4m3fn"]
    assert names(found, "down.0.attn1") == ["int8"]
    assert names(found, "down.1.attn1") == ["int8-pv16"]
    assert names(found, "down.2.attn1") == []
    assert names(found, "up.0.attn1") == []
    assert names(found, "mid.attn3") == []
    assert not found.is_uniform


def test_16_bit_everywhere_needs_nothing():
    off = section(qk="none", scales="static", overrides=[{"layers": ["*"], "pv": "none"}])
    assert off.is_off
    assert not off.needs_calibration
    assert not section(qk="none", overrides=[{"layers": ["a"], "qk": "int8"}]).is_off
    assert section(overrides=[{"layers": ["a"], "qk": "auto"}]).errors_from == 512
    assert section(qk="int8").errors_from is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"strategy": "bold"}, "strategy.*'aggressive', 'conservative'"),
        ({"strategy": ["adaptive"]}, "strategy"), ({"qk": "fp8"}, "qk"), ({"pv": "int8"}, "pv"),
        ({"layers": []}, "layers"), ({"overrides": [{"qk": "int8"}]}, "layers"),
        ({"overrides": [{"layers": ["a"], "keep": True}]}, "keep"),
        ({"overrides": 3}, "overrides"),
    ],
)  # fmt: skip
def test_sections_that_cannot_be_are_refused(keys, message):
    with pytest.raises(RecipeError, match=message):
        section(**keys)


def test_formats_are_found_by_both_products():
    for row in ATTENTION_FORMATS:
        assert attention_format(row.qk, row.pv) is row
    assert len({row.name for row in ATTENTION_FORMATS}) == len(ATTENTION_FORMATS)
    with pytest.raises(RecipeError, match="qk 'int8' with pv 'int8', expected one of e4m3fn, int8"):
        attention_format("int8", "int8")
