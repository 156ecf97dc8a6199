"""What a treatment asks of weights and inputs."""

import pytest

from quantkit.recipe.layer_recipes import ActivationRecipe
from quantkit.sensitivity.treatments import BY_NAME, activation_recipe

_TWO_TERMS = ActivationRecipe(mode="token", terms=2)


@pytest.mark.parametrize(
    ("name", "terms"),
    [("e4m3fn-token", 2), ("int8-token", 1), ("int4-token", 1)],
)
def test_a_sum_of_two_values_is_for_fp8_alone(name: str, terms: int) -> None:
    assert activation_recipe(BY_NAME[name], _TWO_TERMS, stored=1).terms == terms
