"""Choosing a recipe from a sensitivity and a budget, with figures and reasons."""

from dataclasses import dataclass
from typing import Any

from quantkit.recipe.goals import BudgetRecipe
from quantkit.recipe.schema import Recipe
from quantkit.sensitivity.budget import Assignment, goal_of, make_problems, optimize, reasons
from quantkit.sensitivity.recipe_writer import chosen_recipe
from quantkit.sensitivity.sensitivity_file import Sensitivity


@dataclass(frozen=True)
class Selection:
    """A treatment per layer, as a recipe and in words."""

    assignment: Assignment
    recipe: Recipe
    #: the goal and the result
    summary: str
    #: why each layer has its treatment, by module path
    remarks: dict[str, str]


def choose(sensitivity: Sensitivity, recipe: Recipe, budget: BudgetRecipe) -> Selection:
    """Return the choice that meets a budget of bytes, error or speed.

    Raises:
        RecipeError: no choice meets it.
    """
    problems = make_problems(sensitivity, recipe, budget.treatments)
    return describe(sensitivity, recipe, budget, optimize(problems, budget))


def describe(
    sensitivity: Sensitivity,
    recipe: Recipe,
    budget: BudgetRecipe,
    assignment: Assignment,
    *,
    remark: str = "",
) -> Selection:
    """Return a choice with its recipe and its reasons.

    Args:
        sensitivity: what was measured.
        recipe: what the chosen one starts from.
        budget: what was asked for.
        assignment: the answer.
        remark: said of it besides.
    """
    goal = budget.goals[0]
    summary = (
        f"{goal} {getattr(budget, goal):g}: {assignment.size:.1%} of the bytes, "
        f"predicted NMSE of the final latents {assignment.error:.3g}, "
        f"modelled speed-up {assignment.speed:.2f}{remark}"
    )
    words = reasons(assignment, goal_of(assignment.problem, budget))
    remarks = dict(zip((layer.name for layer in sensitivity.layers), words, strict=True))
    return Selection(
        assignment, chosen_recipe(sensitivity, recipe, assignment, summary), summary, remarks
    )


def to_json(chosen: Selection) -> dict[str, Any]:
    """Return the choice as JSON values."""
    assignment = chosen.assignment
    layers = zip(assignment.problem.layers, assignment.chosen, strict=True)
    return {
        "summary": chosen.summary,
        "size": assignment.size,
        "error": assignment.error,
        "speed": assignment.speed,
        "method": assignment.problem.method,
        "layers": [
            {
                "name": layer.name,
                "treatment": candidate.treatment,
                "loss": candidate.loss,
                "bytes": candidate.bytes,
                "reason": chosen.remarks[layer.name],
            }
            for layer, candidate in layers
        ],
    }
