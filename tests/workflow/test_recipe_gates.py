"""A recipe's gates: what they say counts, and what they leave out is as 'eval report' has it."""

import pytest
from quantkit.eval.judging.gates import Limits

from quantkit.errors import RecipeError
from quantkit.recipe.load import parse_recipe
from quantkit.workflow.run import limits_of


def recipe(gates):
    return parse_recipe(f"name: t\nweight:\n  format: int8\n{gates}", where="t")


@pytest.mark.parametrize(
    ("gates", "wanted"),
    [
        ("", Limits()),
        ("gates: {}", Limits()),
        ("gates: {broken: 12.5}", Limits(broken=12.5)),
        ("gates: {broken: 0}", Limits(broken=0.0)),
        ("gates: {ssim: 0.9, clip_loss: 5}", Limits(0.9, 0.1, 5.0, 0.0)),
    ],
)
def test_gates_of_a_recipe_take_the_place_of_defaults(gates, wanted):
    assert limits_of(recipe(gates)) == wanted


@pytest.mark.parametrize("share", ["-1", "100.5", ".nan", "many"])
def test_a_share_of_broken_pictures_is_a_percentage(share):
    with pytest.raises(RecipeError, match=r"gates\.broken"):
        recipe(f"gates: {{broken: {share}}}")
