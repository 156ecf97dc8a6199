"""From a sensitivity and a budget to the chosen recipe, its figures and its reasons."""

from dataclasses import dataclass
from typing import Any

from quantkit.recipe.goals import BudgetRecipe
from quantkit.recipe.schema import Recipe
from quantkit.sensitivity.budget import Choice, goal_of, make_problems, optimize, reasons
from quantkit.sensitivity.result import Sensitivity
from quantkit.sensitivity.writing import chosen_recipe


@dataclass(frozen=True)
class Chosen:
    """A treatment per layer, as a recipe and in words."""

    choice: Choice
    recipe: Recipe
    #: what was asked for and what came of it
    summary: str
    #: why each layer has its treatment, by module path
    remarks: dict[str, str]


def choose(sensitivity: Sensitivity, recipe: Recipe, budget: BudgetRecipe) -> Chosen:
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
    choice: Choice,
    *,
    remark: str = "",
) -> Chosen:
    """Return a choice with its recipe and its reasons.

    Args:
        sensitivity: what was measured.
        recipe: what the chosen one starts from.
        budget: what was asked for.
        choice: the answer.
        remark: said of it besides.
    """
    goal = budget.goals[0]
    summary = (
        f"{goal} {getattr(budget, goal):g}: {choice.size:.1%} of the bytes, predicted NMSE of the "
        f"final latents {choice.error:.3g}, modelled speed-up {choice.speed:.2f}{remark}"
    )
    words = reasons(choice, goal_of(choice.problem, budget))
    remarks = dict(zip((layer.name for layer in sensitivity.layers), words, strict=True))
    return Chosen(choice, chosen_recipe(sensitivity, recipe, choice, summary), summary, remarks)


def to_json(chosen: Chosen) -> dict[str, Any]:
    """Return the choice as JSON values."""
    choice = chosen.choice
    layers = zip(choice.problem.layers, choice.chosen, strict=True)
    return {
        "summary": chosen.summary,
        "size": choice.size,
        "error": choice.error,
        "speed": choice.speed,
        "method": choice.problem.method,
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
