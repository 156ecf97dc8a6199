"""Selecting the next layer to run in the pipeline: one whose uncertain gain matters most."""

from dataclasses import dataclass
from math import exp, log

from quantkit.recipe.goals import BudgetRecipe
from quantkit.sensitivity.budget import Assignment, goal_of, options_of
from quantkit.sensitivity.knapsack import HullStep, steps_of

#: How far a gain may be from the median of its role and still count as known.
UNCERTAINTY = 2.0


@dataclass(frozen=True)
class Probe:
    """A layer to run, and its treatment."""

    layer: str
    treatment: str
    why: str


def next_probe(assignment: Assignment, budget: BudgetRecipe) -> Probe | None:
    """Return the next measurement; None when no choice would change.

    A step from one treatment of a layer to the next is taken while it gains more per cost than the
    last step that the budget allows. A layer is near the edge if one of its steps is within
    ``UNCERTAINTY`` of that. Where nothing of a role is measured, its gain is not known to any
    factor: a layer of it goes first, the one with most at stake.

    Args:
        assignment: what the budget would choose today.
        budget: its goal.
    """
    problem = assignment.problem
    steps = steps_of(options_of(problem, goal_of(problem, budget)))
    edge = _edge(assignment, steps)
    known = {layer.role for layer in problem.layers if problem.gains[layer.name].measured}
    nearest: dict[int, HullStep] = {}
    for step in steps:
        if step.item not in nearest or _distance(step, edge) < _distance(nearest[step.item], edge):
            nearest[step.item] = step
    open_ = {
        item: step
        for item, step in nearest.items()
        if not problem.gains[problem.layers[item].name].measured
    }
    new = {i: s for i, s in open_.items() if problem.layers[i].role not in known}
    if new:
        item = min(new, key=lambda i: (-_stake(assignment, new[i]), i))
        return _probe(assignment, new[item], f"first of {problem.layers[item].role}")
    near = {i: s for i, s in open_.items() if _distance(s, edge) <= log(UNCERTAINTY)}
    if not near:
        return None
    item = min(near, key=lambda i: (_distance(near[i], edge), i))
    factor = exp(_distance(near[item], edge))
    return _probe(assignment, near[item], f"would flip at {factor:.2f} times its gain")


def _edge(assignment: Assignment, steps: tuple[HullStep, ...]) -> float:
    """Return the gain per cost where the budget ends: of the first step that was not taken."""
    for step in steps:
        if assignment.picked[step.item] == step.before:
            return step.gain / step.cost
    return min((step.gain / step.cost for step in steps), default=1.0)


def _distance(step: HullStep, edge: float) -> float:
    """Return |log| of a step's gain per cost over the edge's."""
    return abs(log(step.gain / step.cost) - log(edge))


def _stake(assignment: Assignment, step: HullStep) -> float:
    options = assignment.problem.candidates[step.item]
    return max(options[step.before].loss, options[step.after].loss)


def _probe(assignment: Assignment, step: HullStep, why: str) -> Probe:
    options = assignment.problem.candidates[step.item]
    lossier = max((options[step.before], options[step.after]), key=lambda c: c.loss)
    return Probe(assignment.problem.layers[step.item].name, lossier.treatment, why)
