"""The files of sensitivity: the result, the plot and the recipe."""

import json
from dataclasses import replace

import pytest
import yaml

from quantkit.errors import ArtefactError, OutputError, RecipeError
from quantkit.models.source import open_model
from quantkit.packing.pack_model import plan_pack
from quantkit.progress import silent
from quantkit.recipe.dump import recipe_text
from quantkit.recipe.load import load_recipe, parse_recipe
from quantkit.sensitivity.plot import save_plot
from quantkit.sensitivity.sensitivity_file import (
    Measured,
    load_sensitivity,
    save_sensitivity,
    to_json,
)
from tests.support.sensitivities import PACKING, choose, three_layers


def test_file_holds_what_was_written(tmp_path):
    sensitivity = replace(three_layers(), notes=("a.one: why",))
    measured = replace(sensitivity.layers[0], measured=Measured("e4m3fn-token", 0.1))
    sensitivity = replace(sensitivity, layers=(measured, *sensitivity.layers[1:]))
    path = tmp_path / "s.json"
    save_sensitivity(sensitivity, path, force=False)
    assert load_sensitivity(path) == sensitivity
    with pytest.raises(OutputError, match="exists already"):
        save_sensitivity(sensitivity, path, force=False)


BAD_FILES = {
    "missing": (None, "s.json: missing"),
    "not json": ("{", "not JSON"),
    "list": ("[]", "found list, expected a JSON object"),
    "other": ('{"schema": "x"}', "not a quantkit.sensitivity file"),
    "newer": (
        '{"schema": "quantkit.sensitivity", "schema_version": 3}',
        "schema_version 3, exp",
    ),
    "empty": ('{"schema": "quantkit.sensitivity", "schema_version": 1}', "damaged .*component"),
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "s.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArtefactError, match=message) as caught:
        load_sensitivity(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-1.0, float("nan"), "much"])
def test_figures_that_cannot_be_are_refused(tmp_path, value):
    values = to_json(three_layers())
    values["layers"][1]["outcomes"]["e4m3fn-token"]["error"] = value
    path = tmp_path / "s.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ArtefactError, match="damaged"):
        load_sensitivity(path)


def test_plot_is_drawn_and_other_suffixes_are_refused(tmp_path):
    for name in ("p.svg", "p.png"):
        save_plot(three_layers(), tmp_path / name, force=False)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "p.svg").read_text()
    assert all(name in text for name in PACKING if name in three_layers().layers[0].outcomes
               and name != "16-bit")  # fmt: skip
    with pytest.raises(OutputError, match=r"p.gif: unknown kind of plot; end the name in .svg"):
        save_plot(three_layers(), tmp_path / "p.gif", force=False)


def test_recipe_text_says_what_the_recipe_does():
    chosen = choose(three_layers(), load_recipe("fp8-sparse"), bytes=0.46)
    text = recipe_text(chosen.recipe, chosen.remarks)
    assert parse_recipe(text, where="t") == chosen.recipe
    assert '- "a.one"  # loses 0.1 (local 0.1 x gain 1' in text
    reasons = [override["reason"] for override in yaml.safe_load(text)["overrides"]]
    assert reasons[0].startswith("e4m3fn-static: ")
    assert chosen.recipe.sparsity.error_budget is None
    settings = [chosen.recipe.settings(f"a.{n}") for n in ("one", "two")]
    assert [(s.sparse, s.activation.mode) for s in settings] == [(True, "token"), (False, "static")]


def test_bundled_recipes_survive_being_written():
    from quantkit.recipe.load import recipe_names

    for name in recipe_names():
        recipe = load_recipe(name)
        assert parse_recipe(recipe_text(recipe, {}), where=name) == recipe


def test_an_override_that_says_nothing_survives_being_written():
    recipe = parse_recipe(
        "{name: t, overrides: [{layers: [a]}, {layers: [b], keep: true}]}", where="t"
    )
    assert parse_recipe(recipe_text(recipe, {}), where="t") == recipe


def test_recipe_with_a_budget_is_not_packed(pipeline_dir):
    with pytest.raises(
        RecipeError, match=r"recipe adaptive: its budget section .*calibrate optimize"
    ):
        plan_pack(open_model(str(pipeline_dir)), load_recipe("adaptive"), calibration=None,
                  masks=None, progress=silent)  # fmt: skip


def test_budget_has_one_goal():
    with pytest.raises(RecipeError, match="budget: found bytes and error; set one"):
        parse_recipe("{name: t, budget: {bytes: 0.5, error: 1}}", where="t")
