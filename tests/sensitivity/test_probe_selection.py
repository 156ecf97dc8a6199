"""Which layers are measured in the whole pipeline, and in which order."""

from dataclasses import replace

from quantkit.recipe.goals import BudgetRecipe
from quantkit.sensitivity import budget, probe_selection
from quantkit.sensitivity.sensitivity_file import Measured
from tests.support.sensitivities import FP8, layer_with, made, three_layers


def test_roles_that_nobody_knows_go_first_and_then_the_edge():
    sensitivity, goal = three_layers(), BudgetRecipe(bytes=0.52)
    seen = []
    for _ in range(9):
        problems = budget.make_problems(sensitivity, FP8, ("*",))
        probe = probe_selection.next_probe(budget.optimize(problems, goal), goal)
        if probe is None:
            break
        seen.append(probe)
        found = Measured(probe.treatment, 0.5)
        layers = [
            replace(layer, measured=replace(found, error=layer.outcomes[probe.treatment].error))
            if layer.name == probe.layer
            else layer
            for layer in sensitivity.layers
        ]
        sensitivity = replace(sensitivity, layers=tuple(layers))
    assert seen[0].why == "first of linear a.three"
    assert len({probe.layer for probe in seen}) == len(seen)
    assert all(probe.treatment != "16-bit" for probe in seen)


def test_layers_far_from_the_edge_are_not_run():
    token = "e4m3fn-token"
    layers = [layer_with("x.a", measured=Measured(token, 1e-3), **{token: 1e-3})]
    layers += [layer_with(f"{i}.x.a", **{token: e}) for i, e in enumerate((1.1e-3, 1e-8, 1.0))]
    # All of one role, so that the first one's gain is everybody's.
    goal = BudgetRecipe(bytes=(100 + 2 * 500 + 2 * 1000) / 4100)
    sensitivity = made(layers)
    problems = budget.make_problems(sensitivity, FP8, ("*",))
    probe = probe_selection.next_probe(budget.optimize(problems, goal), goal)
    assert probe.layer == "0.x.a"
    known = [replace(layer, measured=Measured(token, layer.outcomes[token].error)) for layer in
             layers[:2]]  # fmt: skip
    problems = budget.make_problems(made([*known, *layers[2:]]), FP8, ("*",))
    assert probe_selection.next_probe(budget.optimize(problems, goal), goal) is None
