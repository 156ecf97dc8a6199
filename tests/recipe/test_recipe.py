"""Recipes: the bundled ones run dry, strict checking, and what wins for a layer."""

import fnmatch
import time
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import ValidationError

from quantkit import resources
from quantkit.calibration.statistics.observers import OBSERVERS
from quantkit.errors import RecipeError
from quantkit.models.families import FAMILIES
from quantkit.models.general_family import GENERAL
from quantkit.models.layer_plan import plan_layers
from quantkit.models.recommended import tuned
from quantkit.models.source import open_model
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.component_recipes import (
    ComponentOverride,
    EncoderOverride,
    EncoderRecipe,
    VaeRecipe,
)
from quantkit.recipe.fields import matches
from quantkit.recipe.layer_recipes import ActivationRecipe
from quantkit.recipe.load import change_recipe, load_recipe, parse_recipe, recipe_names
from quantkit.recipe.schema import Override, Recipe
from quantkit.storage.yamlfile import MAX_BYTES, parse_yaml
from quantkit.workflow.arguments import opened
from tests.golden.make_keys import MODELS
from tests.support.headers import golden_keys, write_component
from tests.support.sampling import turned


def parse(text):
    return parse_recipe(text, where="test")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    for name in MODELS:
        keys = golden_keys(name)
        write_component(root / name, keys["class_name"], keys["tensors"])
    return {name: open_model(str(root / name)).components[0] for name in MODELS}


@pytest.mark.parametrize("case", turned(recipe_names(), MODELS, times=4))
def test_bundled_recipe_plans_published_models(case, published):
    name, model = case
    own = load_recipe(name)
    assert (own.name, bool(own.description)) == (name, True)
    recipe = tuned(own, published[model].family)
    edges = tuple(map(float, range(1, recipe.calibration.buckets)))
    plan = plan_layers(published[model], recipe, calibrated=True, masked=(), edges=edges)
    assert sum(t.scheme is not None for t in plan) > len(plan) / 2
    names = [t.layer.name for t in plan]
    for glob in (g for o in recipe.overrides for g in o.layers):
        assert any(matches(layer, (glob,)) for layer in names), (model, glob)


def test_strategies_split_attention_as_they_say(published):
    for model, component in published.items():
        plans = {
            name: plan_layers(component, load_recipe(name), calibrated=True, masked=())
            for name in ("conservative", "hybrid", "aggressive", "fp8")
        }
        packed = {n: {t.layer.name for t in plan if t.scheme} for n, plan in plans.items()}
        words = {name.split(".")[-2 if name.endswith(".0") else -1] for name in packed["hybrid"]}
        assert {"to_q", "to_k"} <= words, model
        assert not {"to_v", "add_v_proj", "to_out", "to_add_out"} & words, model
        assert packed["hybrid"] < packed["fp8"] < packed["aggressive"], model
        assert packed["conservative"] < packed["fp8"], model
        kept = {"proj_in", "proj_out", "to_out", "to_add_out", "conv_point"}
        last = {name.split(".")[-2 if name.endswith(".0") else -1] for name in
                packed["conservative"]}  # fmt: skip
        assert not kept & last, model


@pytest.mark.parametrize("name", recipe_names())
def test_bundled_recipe_is_short(name):
    lines = (resources.recipes() / f"{name}.yaml").read_text().splitlines()
    assert len(lines) <= 35


def test_flux_recipe_packs_modulation_as_weights_alone(published):
    flux = published["flux1_dev"]
    recipe = tuned(load_recipe("fp8"), flux.family)
    plan = plan_layers(flux, recipe, calibrated=False, masked=())
    schemes = {t.layer.name: t.scheme for t in plan}
    assert schemes["transformer_blocks.0.norm1.linear"].activation.value == "none"
    assert schemes["single_transformer_blocks.37.norm.linear"].activation.value == "none"
    assert schemes["transformer_blocks.0.attn.to_q"].activation.value == "token"
    assert schemes["norm_out.linear"] is None


def test_empty_recipe_has_the_defaults():
    recipe = parse("name: t")
    assert (recipe.weight.format, recipe.weight.granularity) == ("e4m3fn", "channel")
    assert recipe.activation.mode == "token"
    settings = recipe.settings("a.b")
    assert (settings.keep, settings.sparse) == (None, False)


def test_the_last_override_to_set_a_field_wins():
    recipe = parse("""
name: t
keep: ["a.*"]
sparsity: {layers: ["a.*", "b"], exclude: ["a.c"]}
overrides:
  - {layers: ["a.*"], weight: {format: e5m2}, sparse: false}
  - {layers: ["a.b"], keep: false}
  - {layers: ["*.d", "a.b"], activation: {mode: none}, sparse: true}
""")
    settings = {name: recipe.settings(name) for name in ("a.b", "a.c", "b", "x.d")}
    assert [s.keep for s in settings.values()] == [False, True, None, None]
    assert [s.sparse for s in settings.values()] == [True, False, True, True]
    assert [s.weight.format for s in settings.values()] == ["e5m2", "e5m2", "e4m3fn", "e4m3fn"]
    assert [s.activation.mode for s in settings.values()] == ["none", "token", "token", "none"]


def test_both_spellings_of_a_pattern_mean_the_same():
    patterns = [parse(f"{{name: t, sparsity: {{pattern: '{p}'}}}}") for p in ("4:2", "2:4")]
    assert [r.sparsity.pattern for r in patterns] == ["2:4", "2:4"]


def test_buckets_are_a_number_edges_or_auto():
    assert parse("{name: t, activation: {buckets: auto}}").activation.buckets == "auto"
    assert parse("{name: t, activation: {buckets: 4}}").activation.buckets == 4
    assert parse("{name: t, activation: {buckets: [100, 500.5]}}").activation.buckets == (
        100,
        500.5,
    )


def test_every_observer_can_be_asked_for():
    assert set(get_args(ActivationRecipe.model_fields["observer"].annotation)) == set(OBSERVERS)


def test_recipes_do_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        parse("name: t").name = "u"


BAD = {
    "not yaml": ("a: [", "test: not YAML"),
    "list": ("[1]", "found list, expected a table"),
    "empty": ("", "found NoneType, expected a table"),
    "no name": ("{}", "name: Field required"),
    "unknown key": ("{name: t, wieght: {}}", "unknown key 'wieght'; did you mean 'weight'"),
    "unknown nested key": (
        "{name: t, activation: {bucket: 4}}",
        "unknown key 'activation.bucket'; did you mean 'buckets'",
    ),
    "unknown key in a list": (
        "{name: t, overrides: [{layers: [a], wait: 1}]}",
        "unknown key 'overrides.0.wait'",
    ),
    "unknown key in an override's section": (
        "{name: t, overrides: [{layers: [a], weight: {fromat: e5m2}}]}",
        "unknown key 'overrides.0.weight.fromat'; did you mean 'format'",
    ),
    "format": ("{name: t, weight: {format: e4m3fnuz}}", "FNUZ is the FP8 of MI300"),
    "granularity": ("{name: t, weight: {granularity: row}}", "granularity 'row': unknown"),
    "pattern": ("{name: t, sparsity: {pattern: '4:4'}}", "pattern '4:4': expected n:m"),
    "percentile": ("{name: t, activation: {percentile: 101}}", "activation.percentile: .*100"),
    "buckets": ("{name: t, activation: {buckets: 0}}", "buckets 0: expected at least 1"),
    "edges": ("{name: t, activation: {buckets: [5, 5]}}", "expected ascending timestep edges"),
    "neither edges nor auto": ("{name: t, activation: {buckets: all}}", "buckets.*found 'all'"),
    "no edges": ("{name: t, activation: {buckets: []}}", "expected ascending timestep edges"),
    "buckets over steps": (
        "{name: t, calibration: {steps: 3, buckets: 4}}",
        "buckets 4: more than the 3",
    ),
    "smooth": ("{name: t, smooth: 1.5}", "smooth 1.5: expected 0 to 1, or auto"),
    "smooth and average": (
        "{name: t, smooth: 0.5, activation: {mode: static, observer: moving_average}}",
        "smooth: cannot be used with activation.observer moving_average.* choose another observer",
    ),
    "budget": ("{name: t, sparsity: {error_budget: 0}}", "error_budget: .*greater than 0"),
    "twice": ("name: t\nsmooth: 1\nname: u", "line 3: the key 'name' is there twice"),
    "twice inside": ("{name: t, weight: {format: e5m2, format: e5m2}}", "'format' is there twice"),
    "anchor": ("{name: &a t}", "line 1: found an anchor"),
    "alias": ("name: &a t\nkeep: [*a]", "line 1: found an anchor"),
    "tag": ("name: !!python/name:os.system t", "found the tag 'tag:yaml.org"),
    "known tag": ("name: !!binary aGVsbG8=", "found the tag"),
    "number as key": ("{name: t, 1: 2}", "key of type int, expected a word"),
    "list as key": ("{name: t, [a]: 2}", "key of type seq, expected a word"),
    "merge": ("{name: t, <<: {smooth: 1}}", "key of type merge"),
    "two documents": ("name: t\n---\nname: u", "not YAML"),
    "digits": (f"{{name: t, smooth: {'9' * 5000}}}", "line 1: a number of 5000 letters"),
    "base 60": (f"{{name: t, smooth: 1{':59' * 300_000}}}", "a number of 900001 letters"),
    "infinite": ("{name: t, smooth: .inf}", "smooth.*finite"),
    "not a number": ("{name: t, calibration: {guidance: .nan}}", "guidance.*finite"),
    "infinite edge": ("{name: t, activation: {buckets: [1, .inf]}}", "buckets.*inf"),
    "seed": ("{name: t, calibration: {seed: 99999999999999999999}}", "calibration.seed"),
    "steps": ("{name: t, calibration: {steps: 1000000000}}", "calibration.steps"),
    "prompts": ("{name: t, calibration: {prompts: 10000000000}}", "calibration.prompts"),
    "depth": (f"{{name: t, keep: {'[' * 17 + ']' * 17}}}", "more than 16 levels"),
    "very deep": ("[" * 300_000, "more than 16 levels"),
    "values": (f"{{name: t, keep: [{'a,' * 100_001}]}}", "more than 100,000 values"),
    "globs": (f"{{name: t, keep: [{'a*, ' * 1001}]}}", "1,001 globs, expected at most 1,000"),
    "long key": (f"{{name: t, {'k' * 1000}: 1}}", "unknown key 'kkk"),
    "long value": (f"{{name: t, weight: {{format: {'v' * 500_000}}}}}", "format 'vvv"),
    "long list": (f"{{name: t, smooth: [{'a,' * 50_000}]}}", "found \\['a', "),
    "long edges": (f"{{name: t, activation: {{buckets: [{'1,' * 50_000}]}}}}", "buckets"),
    "control": ('{name: "a\\e[31m"}', "printable"),
    "lines in the name": ('{name: "a\\nb"}', "printable"),
    "date": ("{name: t, smooth: 2001-99-99}", "month must be in"),
    "null byte": ("name: t\0", "not YAML"),
    "surrogate": ("name: \ud800", "surrogate"),
    "power of two of groups": (
        "{name: t, weight: {format: int4, scale: pow2}}",
        "weight.scale pow2 with format int4",
    ),
    "power of two per token": (
        "{name: t, activation: {mode: token, scale: pow2}}",
        "activation.scale pow2 with mode token",
    ),
    "rows below a timestep": (
        "{name: t, activation: {mode: token, token_below: 50}}",
        "activation.token_below 50 with mode token",
    ),
    "no timestep": (
        "{name: t, activation: {mode: static, token_below: .inf}}",
        "activation.token_below",
    ),
    "no layers": ("{name: t, overrides: [{layers: []}]}", "overrides.0.layers"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_bad_recipe_is_one_line(text, message):
    with pytest.raises(RecipeError, match=message) as caught:
        parse(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    assert str(caught.value).startswith("test: ")


def test_recipe_is_found_by_name_or_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine")
    assert load_recipe(str(path)).name == "mine"
    with pytest.raises(RecipeError, match=r"'fp8-statik': neither .*; did you mean 'fp8-static'"):
        load_recipe("fp8-statik")
    with pytest.raises(RecipeError, match=r"none.yaml: missing"):
        load_recipe(str(tmp_path / "none.yaml"))
    path.write_bytes(b"name: \xff")
    with pytest.raises(RecipeError, match=r"not UTF-8 \(byte 6\)"):
        load_recipe(str(path))


def alias_bomb(levels):
    inner = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(["name: t", f"a0: &a0 [{'x, ' * 10}]", *inner, f"keep: *a{levels - 1}"])


@pytest.mark.timeout(5)
def test_aliases_are_never_expanded():
    with pytest.raises(RecipeError, match="anchor or alias"):
        parse(alias_bomb(9))


def test_a_recipe_beyond_the_limit_is_not_parsed(tmp_path):
    path = tmp_path / "x.yaml"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(RecipeError, match="expected at most"):
        load_recipe(str(path))


def test_yaml_agrees_with_the_library():
    for name in recipe_names():
        text = (resources.recipes() / f"{name}.yaml").read_text()
        assert parse_yaml(text) == yaml.safe_load(text)


SECTIONS = {
    "keep": "keep: ['{}']",
    "not_layers": "not_layers: ['{}']",
    "sparsity.layers": "sparsity: {{layers: ['*', '{}']}}",
    "sparsity.exclude": "sparsity: {{exclude: ['{}']}}",
    "overrides.1.layers": (
        "overrides: [{{layers: ['*']}}, {{layers: ['*.to_q', '{}'], keep: true}}]"
    ),
}
TYPOS = {
    "down_block.*": "down_blocks.*",
    "*.attn1.to_qq": "*.attn1.to_q",
    "mid_block.attentions.0.transformer_blocks.0.attn1.tok": (
        "mid_block.attentions.0.transformer_blocks.0.attn1.to_k"
    ),
}


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
def test_a_glob_without_a_layer_is_an_error(published, tmp_path, section, typo, meant):
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: t\n{SECTIONS[section].format(meant)}")
    model = str(published["sd15"].path)
    opened(model, str(path))
    path.write_text(f"name: t\n{SECTIONS[section].format(typo)}")
    with pytest.raises(RecipeError, match="matches none of the model's") as caught:
        opened(model, str(path))
    assert f"{section}: {typo!r}" in str(caught.value)
    assert f"did you mean {meant!r}?" in str(caught.value)


def test_a_glob_that_is_near_nothing_is_to_be_corrected(published, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: t\nkeep: ['', '{'x' * 9000}']")
    with pytest.raises(RecipeError, match=r"'' matches none .*; correct it, or leave it out"):
        opened(str(published["sd15"].path), str(path))


@pytest.mark.parametrize("name", recipe_names())
def test_bundled_recipes_open_with_all_models(name, published):
    for model in MODELS:
        opened(str(published[model].path), name)


def test_a_recipe_may_say_that_it_is_for_other_models_too(published, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: t\nkeep: ['nothing']\nunmatched: ignore")
    _, recipe = opened(str(published["sd15"].path), str(path))
    assert recipe.keep == ("nothing",)


def test_calibration_settings_are_checked_when_replaced():
    recipe = load_recipe("fp8")
    assert change_recipe(recipe, {"calibration.steps": 9}).calibration.steps == 9
    with pytest.raises(RecipeError, match="buckets 3: more than the 2 steps"):
        change_recipe(recipe, {"calibration.steps": 2, "calibration.buckets": 3})


def test_fewer_steps_than_buckets_leave_a_bucket_for_each():
    recipe = change_recipe(load_recipe("fp8"), {"calibration.steps": 2})
    for family in (*FAMILIES, GENERAL):
        buckets = family.calibration["buckets"]
        assert tuned(recipe, family).calibration.buckets == min(2, buckets)
    own = change_recipe(recipe, {"calibration.buckets": 1})
    assert tuned(own, GENERAL).calibration.buckets == 1
    static = parse("{name: t, activation: {mode: static, buckets: 4}, calibration: {buckets: 3}}")
    with pytest.raises(RecipeError, match=r"activation\.buckets 4 do not divide the 3 timestep"):
        static.refuse_unmergeable()


def test_documented_keys_are_all_there_are():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "recipes.md").read_text()
    block = page.split("```yaml\n")[1].split("```")[0]
    documented = yaml.safe_load(block)
    recipe = parse(block)
    assert recipe.activation == ActivationRecipe()
    assert recipe.calibration == CalibrationRecipe()
    assert set(documented) == set(Recipe.model_fields)
    for name in ("weight", "activation", "sparsity", "calibration", "gates", "budget"):
        assert set(documented[name]) == set(type(getattr(recipe, name)).model_fields), name
    assert set(documented["overrides"][0]) == set(Override.model_fields)
    assert set(documented["text_encoders"]) == set(EncoderRecipe.model_fields)
    assert set(documented["text_encoders"]["overrides"][0]) == set(EncoderOverride.model_fields)
    assert set(documented["vae"]) == set(VaeRecipe.model_fields)
    assert set(documented["vae"]["overrides"][0]) == set(ComponentOverride.model_fields)
    assert not [name for name in recipe_names() if f"`{name}`" not in page]


@pytest.mark.parametrize(
    "glob", ["*", "a.*", "*.b", "a?b", "a.b", "[ab].c", "a|b", "", "[", "(", "a.*.c", "A.b"]
)
def test_globs_match_as_the_library_says(glob):
    for name in ("", "a", "a.b", "axb", "b.c", "a|b", "[", "(", "a.x.c", "a.b.c.d", "a\nb"):
        for others in ((), ("z", "z.*"), ("[z", "?z")):
            assert matches(name, (*others, glob)) == fnmatch.fnmatchcase(name, glob), name


def test_many_names_cost_little():
    recipe = parse_recipe(
        f"{{name: t, keep: [{', '.join(f'layer.{i}' for i in range(20_000))}]}}", where="t"
    )
    start = time.process_time()
    kept = [recipe.settings(f"layer.{i}").keep for i in range(19_000, 20_200)]
    assert kept == [True] * 1000 + [None] * 200
    assert time.process_time() - start < 5
