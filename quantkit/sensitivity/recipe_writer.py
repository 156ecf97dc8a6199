"""The chosen recipe: an ordinary one, with an override per treatment and a remark per layer."""

from collections import Counter
from collections.abc import Sequence
from math import fsum
from pathlib import Path

from quantkit.numerics.attention_formats import ATTENTION_FORMATS
from quantkit.recipe.attention_recipe import AttentionRecipe
from quantkit.recipe.dump import recipe_text
from quantkit.recipe.schema import LayerSettings, Override, Recipe, SparsityRecipe
from quantkit.sensitivity.budget import Assignment
from quantkit.sensitivity.sensitivity_file import ATTENTION, Sensitivity
from quantkit.sensitivity.treatments import (
    ATTENTION_BY_NAME,
    BY_NAME,
    SIXTEEN_BIT,
    TREATMENTS,
    activation_recipe,
    weight_recipe,
)
from quantkit.storage.files import staged_file
from quantkit.storage.written import YAML_MARK


def chosen_recipe(
    sensitivity: Sensitivity, recipe: Recipe, assignment: Assignment, why: str
) -> Recipe:
    """Return the recipe with every layer's treatment.

    Scales are chosen as they were for the measurement; of ``recipe`` stay what it keeps, its own
    overrides, and its calibration and gates. It has no budget any more.

    Args:
        sensitivity: what was measured.
        recipe: what to start from.
        assignment: a treatment per layer.
        why: what the choice meets, for the description.
    """
    groups: dict[tuple[str, LayerSettings], list[str]] = {}
    for layer, candidate in zip(assignment.problem.layers, assignment.chosen, strict=True):
        if layer.kind == ATTENTION:
            continue
        settings = sensitivity.recipe.settings(layer.name)
        alike = LayerSettings(None, settings.weight, settings.activation, sparse=False)
        groups.setdefault((candidate.treatment, alike), []).append(layer.name)
    order = [treatment.name for treatment in TREATMENTS]
    overrides = [
        _override(name, settings, layers, assignment, len(sensitivity.edges) + 1)
        for (name, settings), layers in sorted(groups.items(), key=lambda g: order.index(g[0][0]))
    ]
    sparse = any(override.sparse for override in overrides)
    method = assignment.problem.method
    # What sparsify and pack look at to know that masks may count on updates.
    updates = any(BY_NAME[name].updates for name, _ in groups)
    rounding = "gptq" if updates else recipe.weight.rounding
    values = {
        **recipe.model_dump(),
        "name": f"{recipe.name}-chosen",
        "description": why,
        "weight": recipe.weight.model_copy(update={"rounding": rounding}),
        "sparsity": SparsityRecipe.model_validate({"method": method, "layers": ()})
        if sparse
        else None,
        "attention": _attention(sensitivity, recipe, assignment),
        "overrides": (*recipe.overrides, *overrides),
        "budget": None,
    }
    return Recipe.model_validate(values)


def _attention(
    sensitivity: Sensitivity, recipe: Recipe, assignment: Assignment
) -> AttentionRecipe | None:
    """Return the section that puts the chosen modules on codes, and no other measured one."""
    section = recipe.attention
    if not sensitivity.attention or (section is not None and section.chooses_formats):
        return section
    pairs = zip(assignment.problem.layers, assignment.chosen, strict=True)
    chosen = {layer.name: c.treatment for layer, c in pairs if layer.kind == ATTENTION}
    formats = {n: ATTENTION_BY_NAME[t].format for n, t in chosen.items() if t in ATTENTION_BY_NAME}
    if not formats:
        return None
    counts = Counter(formats.values())
    most = max(ATTENTION_FORMATS, key=lambda row: counts[row])
    measured = sensitivity.recipe.attention or AttentionRecipe()
    base = section or AttentionRecipe()
    left = (name for name, treatment in chosen.items() if treatment == SIXTEEN_BIT.name)
    values = {
        **base.model_dump(),
        "strategy": None,
        "qk": most.qk,
        "pv": most.pv_word,
        "min_keys": measured.min_keys,
        "exclude": tuple(dict.fromkeys((*base.exclude, *measured.exclude, *left))),
        "overrides": tuple(
            {"layers": names, "qk": row.qk, "pv": row.pv_word}
            for row in ATTENTION_FORMATS
            if row != most and (names := tuple(n for n, f in formats.items() if f == row))
        ),
    }
    return AttentionRecipe.model_validate(values)


def _override(
    name: str, settings: LayerSettings, layers: Sequence[str], assignment: Assignment, stored: int
) -> Override:
    inside = set(layers)
    pairs = zip(assignment.problem.layers, assignment.chosen, strict=True)
    loss = fsum(candidate.loss for layer, candidate in pairs if layer.name in inside)
    share = loss / assignment.error if assignment.error else 0.0
    reason = f"{name}: {share:.1%} of the predicted error {assignment.error:.3g}"
    treatment = BY_NAME[name]
    if treatment == SIXTEEN_BIT:
        return Override(layers=tuple(layers), keep=True, reason=reason)
    return Override(
        layers=tuple(layers),
        weight=weight_recipe(treatment, settings.weight),
        activation=activation_recipe(treatment, settings.activation, stored),
        sparse=treatment.method is not None,
        reason=reason,
    )


def save_recipe(recipe: Recipe, remarks: dict[str, str], path: Path, *, force: bool) -> None:
    """Write the recipe as YAML.

    Raises:
        OutputError: the file exists without ``force``, or cannot be written.
    """
    with staged_file(path, force=force) as stage:
        stage.write_text(YAML_MARK + recipe_text(recipe, remarks), encoding="utf-8")
