"""Recipes tuned for a model's family, and those that are recommended for it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.cli import quantkit as command
from quantkit.errors import ModelError, RecipeError
from quantkit.models.families import FAMILIES
from quantkit.models.general_family import GENERAL
from quantkit.models.layer_plan import choose_edges
from quantkit.models.recommended import tuned
from quantkit.recipe.load import change_recipe, load_recipe, parse_recipe, recipe_names
from quantkit.recipe.recommended import DEFAULT, RECOMMENDED
from quantkit.recipe.schema import Recipe
from quantkit.workflow.arguments import opened
from tests.golden.make_keys import MODELS
from tests.support.headers import golden_keys, write_component

RECIPES = "docs/guides/recipes.md"
#: What a row may set for a tuned recipe: not what makes it another recipe.
SET = {"activation", "kept", "overrides", "smooth", "unmatched"}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    for name in MODELS:
        keys = golden_keys(name)
        path = write_component(root / name, keys["class_name"], keys["tensors"])
        config = {"_class_name": keys["class_name"], **keys["config"]}
        (path / "config.json").write_text(json.dumps(config))
    return root


def invoke(*words):
    return CliRunner().invoke(command, [str(word) for word in words])


@pytest.mark.parametrize("family", [*FAMILIES, GENERAL], ids=lambda family: family.name)
def test_every_family_makes_recipes_of_all_tuned_ones(family):
    recipes = {name: load_recipe(name) for name in recipe_names()}
    bundled = {name: recipe for name, recipe in recipes.items() if recipe.tuned}
    assert all(recipe.tuned == name for name, recipe in bundled.items())
    assert family.recipes.keys() <= bundled.keys()
    for name, own in bundled.items():
        recipe = tuned(own, family)
        assert (recipe.tuned, recipe.name, recipe.weight) == (None, name, own.weight)
        for key, value in family.calibration.items():
            assert getattr(recipe.calibration, key) == value
        changed = {k for k in Recipe.model_fields if getattr(recipe, k) != getattr(own, k)}
        assert changed <= SET | {"tuned", "calibration"}
        # A scale for each stretch needs statistics of each.
        inputs = (recipe.activation, *(o.activation for o in recipe.overrides))
        for given in (a for a in inputs if a is not None and a.mode == "static"):
            assert isinstance(given.buckets, int)
            assert recipe.calibration.buckets % given.buckets == 0


def test_what_a_recipe_sets_itself_wins():
    family = replace(
        GENERAL,
        calibration={"prompts": 9, "steps": 7},
        recipes={
            "int8": {
                "activation": {"mode": "static", "observer": "amax", "buckets": 5},
                "smooth": 0.25,
                "overrides": [{"layers": ["a"], "keep": True}, {"layers": ["b"], "keep": True}],
            }
        },
    )
    text = """
        {name: t, tuned: int8, smooth: 0.5, activation: {observer: kl}, calibration: {steps: 11},
         overrides: [{layers: [b], keep: false}]}
    """
    recipe = tuned(parse_recipe(text, where="t"), family)
    assert recipe.smooth == 0.5
    activation = recipe.activation.model_dump(exclude_defaults=True)
    assert activation == {"mode": "static", "observer": "kl", "buckets": 5}
    assert (recipe.calibration.prompts, recipe.calibration.steps) == (9, 11)
    assert [recipe.settings(layer).keep for layer in "abc"] == [True, False, None]
    steps = change_recipe(parse_recipe(text, where="t"), {"calibration.seed": 3})
    assert tuned(steps, family).calibration.prompts == 9


def test_of_a_recipe_that_is_not_tuned_the_family_sets_buckets_alone():
    recipe = load_recipe("fp8-static")
    for family in FAMILIES:
        found = tuned(recipe, family)
        assert found.calibration.buckets == family.calibration["buckets"]
        four = {"calibration.buckets": 4}
        assert change_recipe(found, four) == change_recipe(recipe, four)
    own = change_recipe(recipe, {"calibration.buckets": 3})
    assert all(tuned(own, family) == own for family in FAMILIES)


@pytest.mark.parametrize("family", [*FAMILIES, GENERAL], ids=lambda family: family.name)
def test_one_calibration_has_the_buckets_of_every_bundled_recipe(family):
    stored = {tuned(load_recipe(n), family).calibration.buckets for n in recipe_names()}
    (count,) = stored
    edges = tuple(map(float, range(1, count)))
    for name in recipe_names():
        recipe = tuned(load_recipe(name), family)
        for own in (recipe.activation, *(o.activation for o in recipe.overrides if o.activation)):
            if own.mode == "static":
                choose_edges(own, edges)


def test_recipes_of_a_model_are_told_with_their_sizes(published):
    rows = json.loads(invoke("recipes", published / "qwen_image", "--json").stdout)
    assert [row["name"] for row in rows] == ["fp8", "int8", "int4"]
    assert [row["needs"] for row in rows] == [[], ["calibration"], ["calibration", "hessians"]]
    shares = [row["bytes_after"] / row["bytes_before"] for row in rows]
    assert shares == pytest.approx([0.5, 0.5, 0.27], abs=0.02)
    text = invoke("recipes", published / "qwen_image").output
    assert "40.9 -> 20.5" in text
    assert all(row.wish in text and row.cards in text for row in RECOMMENDED)


def test_the_recommended_recipes_are_told_alike_everywhere():
    pages = [Path(page).read_text(encoding="utf-8") for page in ("README.md", RECIPES)]
    for row in RECOMMENDED:
        recipe = load_recipe(row.recipe)
        needs = {"calibration": recipe.needs_calibration, "second moments": recipe.needs_hessians}
        told = ", ".join(name for name, needed in needs.items() if needed) or "nothing"
        for page in pages:
            assert f"| {row.wish} | `{row.recipe}` | {told} | {row.cards} |" in page
    assert "default: fp8" in invoke("pack", "--help").output
    assert not load_recipe(DEFAULT).needs_calibration


def test_all_recipes_are_listed():
    rows = json.loads(invoke("recipes", "--json").stdout)
    assert [row["name"] for row in rows] == list(recipe_names())
    assert all("wish" not in row for row in rows)
    lines = invoke("recipes").output.splitlines()
    assert sum(line.split()[:1] == ["fp8-sparse-budget"] for line in lines) == 1
    (gptq,) = (row for row in rows if row["name"] == "fp8-gptq")
    assert gptq["needs"] == ["calibration", "hessians"]


def test_recipes_of_what_is_no_model_are_refused(tmp_path):
    assert isinstance(invoke("recipes", tmp_path).exception, ModelError)


def test_without_a_recipe_fp8_is_taken_tuned(published, tmp_path):
    model, plan = published / "flux1_dev", ("-o", tmp_path / "o", "-n", "--json")
    found = invoke("pack", model, *plan)
    assert found.stdout == invoke("pack", model, *plan, "-r", "fp8").stdout
    schemes = {layer["name"]: layer["scheme"] for layer in json.loads(found.stdout)["layers"]}
    assert schemes["transformer_blocks.0.norm1.linear"]["activation"] == "none"


@pytest.mark.parametrize("name", ["fp8", "int8", "fp8-static"])
@pytest.mark.parametrize("model", ["sdxl", "flux1_dev", "qwen_image"])
def test_a_recipe_is_printed_as_the_model_takes_it(published, tmp_path, model, name):
    text = invoke("recipes", published / model, "-r", name).stdout
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert load_recipe(path) == opened(str(published / model), name)[1]
    values = json.loads(invoke("recipes", published / model, "-r", name, "--json").stdout)
    assert Recipe.model_validate(values) == load_recipe(path)
    plan = ("-o", tmp_path / "o", "-n", "--json", "-r")
    mine, bundled = (invoke("pack", published / model, *plan, r).stdout for r in (path, name))
    assert mine == bundled


def test_a_recipe_is_printed_without_a_model(tmp_path):
    text = invoke("recipes", "-r", "int8").stdout
    assert parse_recipe(text, where="t") == load_recipe("int8")
    assert isinstance(invoke("recipes", "-r", "int9").exception, RecipeError)


def test_a_glob_of_a_tuned_file_is_checked(published, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text('{name: mine, tuned: fp8, keep: ["*.to_quu"]}')
    with pytest.raises(RecipeError, match="matches none of the model's"):
        opened(str(published / "sdxl"), path)


def test_an_unknown_tuning_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="tuned: Input should be 'fp8', 'int8'"):
        parse_recipe("{name: mine, tuned: sdxl-fp8}", where="t")
