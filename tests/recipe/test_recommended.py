"""The recipe for a model: chosen and named without --recipe, another family's refused."""

import json

import pytest
from click.testing import CliRunner

from quantkit.cli import quantkit as command
from quantkit.errors import ModelError, RecipeError
from quantkit.models.families import FAMILIES
from quantkit.models.recommended import recipes_for
from quantkit.models.source import open_model
from quantkit.recipe.load import load_recipe, recipe_names
from quantkit.workflow.inputs import of_any_family, opened
from tests.golden.make_keys import MODELS
from tests.support.headers import golden_keys, write_component

#: published model -> what the names of its recipes begin with
WANTED = {
    "sd15": "sd15",
    "sdxl": "sdxl",
    "sd3_medium": "sd3",
    "sd35_medium": "sd3",
    "sd35_large": "sd3",
    "flux1_dev": "flux",
    "pixart_sigma": "pixart",
    "sana_1600m": "sana",
    "flux2_dev": "flux2",
    "chroma1_hd": "chroma",
    "qwen_image": "qwenimage",
    "z_image": "zimage",
    "wan22_t2v_14b": "wan",
    "wan21_i2v_14b": "wan",
    "ltx_video": "ltx",
}


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


@pytest.mark.parametrize("name", MODELS)
def test_every_published_model_has_its_recipes(published, name):
    found = recipes_for(open_model(published / name))
    kinds = ("fp8", "int8", "int4")
    assert [choice.recipe.name for choice in found] == [f"{WANTED[name]}-{k}" for k in kinds]
    assert all(choice.why for choice in found)


def test_every_family_has_a_recipe_and_every_recipe_its_family():
    known = {family.name for family in FAMILIES}
    made = {name: load_recipe(name).family for name in recipe_names()}
    assert set(made.values()) - {None} == known
    for name, family in made.items():
        start = name.partition("-")[0]
        named = {"sd15": "unet", "sdxl": "unet"}.get(start, start)
        assert family == (named if named in known else None), name


def test_recipes_of_a_model_are_told_with_their_sizes(published):
    rows = json.loads(invoke("recipes", published / "qwen_image", "--json").stdout)
    assert [row["name"] for row in rows] == ["qwenimage-fp8", "qwenimage-int8", "qwenimage-int4"]
    assert [row["needs"] for row in rows] == [[], ["calibration"], ["calibration", "hessians"]]
    shares = [row["bytes_after"] / row["bytes_before"] for row in rows]
    assert shares == pytest.approx([0.5, 0.5, 0.27], abs=0.02)
    text = invoke("recipes", published / "qwen_image").output
    assert "recommended: qwenimage-fp8: Qwen-Image in FP8" in text
    assert "40.9 -> 20.5" in text


def test_all_recipes_are_listed():
    rows = json.loads(invoke("recipes", "--json").stdout)
    assert [row["name"] for row in rows] == list(recipe_names())
    assert all("why" not in row for row in rows)
    lines = invoke("recipes").output.splitlines()
    assert sum(line.split()[:1] == ["flux-fp8-sparse-budget"] for line in lines) == 1


def test_recipes_of_what_is_no_model_are_refused(tmp_path):
    assert isinstance(invoke("recipes", tmp_path).exception, ModelError)


def test_without_a_recipe_the_one_of_the_model_is_taken_and_named(published, tmp_path):
    model, plan = published / "flux1_dev", ("-o", tmp_path / "o", "-n", "--json")
    found = invoke("pack", model, *plan)
    named = invoke("pack", model, *plan, "-r", "flux-fp8")
    assert found.stdout == named.stdout
    assert "recipe: flux-fp8, chosen for FluxTransformer2DModel, of the flux family" in found.stderr
    assert "recipe:" not in named.stderr
    assert "recipe:" not in invoke("pack", model, *plan, "-q").stderr
    assert opened(str(model), None)[1].name == "flux-fp8"


def test_a_recipe_for_another_family_is_refused_unless_forced(published, tmp_path):
    model, plan = published / "flux1_dev", ("-o", tmp_path / "o", "-n", "-q", "--json")
    refused = invoke("pack", model, *plan, "-r", "sdxl-fp8").exception
    assert isinstance(refused, RecipeError)
    assert str(refused) == (
        "sdxl-fp8: made for the unet family, but FluxTransformer2DModel is of the flux family; "
        "take flux-fp8, or force it"
    )
    assert refused.fields == ("force_recipe",)
    forced = invoke("pack", model, *plan, "-r", "sdxl-fp8", "--force-recipe")
    assert json.loads(forced.stdout)["written"] is False
    assert opened(str(model), of_any_family("sdxl-fp8"))[1].name == "sdxl-fp8"


def test_the_family_that_the_user_names_counts(published, tmp_path):
    model, plan = published / "flux1_dev", ("-o", tmp_path / "o", "-n", "-q", "--json")
    assert isinstance(
        invoke("pack", model, *plan, "--family", "sd3", "-r", "flux-fp8").exception, RecipeError
    )


def test_a_recipe_of_an_unknown_family_is_named(published, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("{name: mine, family: fulx}")
    with pytest.raises(RecipeError, match=r"mine\.yaml: made for the fulx family, but Flux"):
        opened(str(published / "flux1_dev"), path)
