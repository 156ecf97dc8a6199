"""Exports hold what the recipe says: over all targets, whatever goes wrong on the way."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file

from quantkit.errors import CheckpointError, RecipeError
from quantkit.recipe.load import load_recipe
from quantkit.workflow import export as exporting
from quantkit.workflow.export import EXPORTERS, export, targets
from quantkit.workflow.pack import pack

#: target -> a recipe whose format it is, and one of another format
RECIPES = {
    "comfyui": ("comfyui", "comfyui-int8"),
    "comfyui-int8": ("comfyui-int8", "comfyui"),
    "comfyui-w4a8": ("comfyui-w4a8", "comfyui"),
    "sdnq": ("fp8", "comfyui-int8"),
    "fp8r": ("fp8", "comfyui-int8"),
    "compressed-tensors": ("fp8", "int8"),
}


def test_all_targets_that_quantize_by_a_recipe_are_here():
    assert RECIPES.keys() == {name for name, row in EXPORTERS.items() if row.recipe}


def without_statistics(name):
    recipe = load_recipe(name)
    inputs = recipe.activation.model_copy(update={"mode": "none"})
    return recipe.model_copy(update={"activation": inputs, "smooth": None})


@pytest.fixture
def part_of(transformer_pipeline_dir):
    """Return the 16-bit component that a target takes."""

    def of(target):
        encoders = EXPORTERS[target.partition(":")[0]].encoders
        return transformer_pipeline_dir / ("text_encoder" if encoders else "transformer")

    return of


@pytest.mark.parametrize("target", RECIPES)
def test_an_output_in_another_format_than_the_recipes_is_refused(
    target, part_of, tmp_path, monkeypatch
):
    asked, other = (without_statistics(name) for name in RECIPES[target])
    assert export(part_of(target), to=target, output=tmp_path / "o", recipe=asked, dry_run=True)
    # As if the recipe were lost on the way.
    quantizing = exporting._quantizing
    monkeypatch.setattr(
        exporting,
        "_quantizing",
        lambda model, to, row, given: quantizing(model, to, row, {**given, "recipe": asked}),
    )
    with pytest.raises(CheckpointError, match=f"would be in .*, but recipe {other.name} has"):
        export(part_of(target), to=target, output=tmp_path / "o", recipe=other)
    assert not (tmp_path / "o").exists()


@pytest.mark.filterwarnings("ignore")  # of compressed-tensors, about itself
@pytest.mark.parametrize(("recipe", "dtype"), [("int8", "I8"), ("fp8", "F8_E4M3")])
def test_a_text_encoder_gets_the_format_of_a_recipe_for_denoisers(recipe, dtype, part_of, tmp_path):
    result = export(
        part_of("compressed-tensors"), to="compressed-tensors", output=tmp_path / "o", recipe=recipe
    )
    assert result.types[dtype] == 12
    assert not {"I8", "F8_E4M3"} - {dtype} & result.types.keys()
    again = transformers.CLIPTextModelWithProjection.from_pretrained(tmp_path / "o")
    dense = load_file(part_of("compressed-tensors") / "model.safetensors")
    stored = load_file(tmp_path / "o" / "model.safetensors")
    name = next(name for name in stored if name.endswith("fc1.weight"))
    scale = stored[name.replace("weight", "weight_scale")]
    lost = (stored[name].float() * scale - dense[name].float()).norm() / dense[name].float().norm()
    assert lost < (0.01 if recipe == "int8" else 0.03)
    assert sum(hasattr(module, "quantization_scheme") for module in again.modules()) == 12


def test_a_recipe_without_a_counterpart_for_text_encoders_is_refused(part_of, tmp_path):
    recipe = load_recipe("fp8").model_copy(
        update={"weight": load_recipe("fp8").weight.model_copy(update={"format": "e5m2"})}
    )
    with pytest.raises(RecipeError, match=r"none have weights in e5m2 .*; add text_encoders: fp8"):
        export(
            part_of("compressed-tensors"),
            to="compressed-tensors",
            output=tmp_path / "o",
            recipe=recipe,
        )


@pytest.fixture(scope="module")
def packed(transformer_pipeline_dir, tmp_path_factory):
    """Return a denoiser and a text encoder that are packed in int8, and in blocks."""
    root = tmp_path_factory.mktemp("packed")
    int8 = load_recipe("comfyui-int8", {"text_encoders": "int8"})
    pack(transformer_pipeline_dir, recipe=int8, output=root / "int8")
    pack(transformer_pipeline_dir, recipe="gguf", output=root / "blocks")
    return root


@dataclass(frozen=True)
class Told:
    """A plan that says other formats than it has."""

    plan: Any
    changed: dict[str, str]

    @property
    def formats(self):
        return ({**self.plan.formats[0], **self.changed},)


CHANGES = {
    "another format": (
        lambda source: {min(source.schemes): "e5m2"}, "would be in e5m2, but the model has ",
    ),
    "a layer in 16 bit": (
        lambda source: {min(source.shapes.keys() - source.schemes): "int8"},
        "would be in int8, but the model has 16 bit there",
    ),
}  # fmt: skip


#: They hold FP8 alone, so that a conversion may change formats, but no layer in 16 bit.
CONVERTED = {"comfyui", "fp8r"}
CASES = [
    (target, change)
    for target in targets()
    for change in CHANGES
    if target != "single-file" and not (target in CONVERTED and change == "another format")
]


@pytest.mark.parametrize(("target", "change"), CASES)
def test_no_target_changes_what_a_packed_model_has(target, change, packed, tmp_path, monkeypatch):
    name = target.partition(":")[0]
    row = EXPORTERS[name]
    part = "text_encoder" if row.encoders else "transformer"
    model = packed / ("blocks" if name == "gguf" else "int8") / part
    requantize = name in CONVERTED
    export(model, to=target, output=tmp_path / "o", requantize=requantize, dry_run=True)
    changed, match = CHANGES[change]
    plan: Any = lambda wish: Told(row.plan(wish), changed(wish.part.source))  # noqa: E731
    monkeypatch.setitem(EXPORTERS, name, replace(row, plan=plan))
    with pytest.raises(CheckpointError, match=match):
        export(model, to=target, output=tmp_path / "o", requantize=requantize)
    assert not (tmp_path / "o").exists()
