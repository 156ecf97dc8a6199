"""Choosing a treatment per layer within a budget, with the reasons.

Errors add in power: the predicted NMSE of the final latents is the sum over layers of gain times
local error. That is right for small errors that are independent of each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from quantkit.errors import RecipeError
from quantkit.recipe.fields import matches
from quantkit.recipe.goals import BudgetRecipe
from quantkit.recipe.schema import Recipe
from quantkit.sensitivity.error_propagation import Gain, find_gains
from quantkit.sensitivity.knapsack import Option, solve
from quantkit.sensitivity.sensitivity_file import ATTENTION, LayerSensitivity, Sensitivity
from quantkit.sensitivity.treatments import ATTENTION_BY_NAME, BY_NAME, SIXTEEN_BIT, TREATMENTS


@dataclass(frozen=True)
class Candidate:
    """One treatment that a layer may have."""

    treatment: str
    #: predicted share in the NMSE of the final latents
    loss: float
    bytes: int
    seconds: float


@dataclass(frozen=True)
class AssignmentProblem:
    """Candidates per layer, in the order of the model; all masks by one method."""

    layers: tuple[LayerSensitivity, ...]
    candidates: tuple[tuple[Candidate, ...], ...]
    gains: Mapping[str, Gain]
    fixed_bytes: int
    #: None: no masks
    method: str | None

    @property
    def bytes_before(self) -> int:
        """Size as the source has it."""
        return self.fixed_bytes + sum(layer.outcomes["16-bit"].bytes for layer in self.layers)

    @property
    def seconds_before(self) -> float:
        """Modelled time of the layers in 16 bit."""
        return fsum(layer.outcomes["16-bit"].seconds for layer in self.layers)


@dataclass(frozen=True)
class Assignment:
    """One candidate per layer of a problem."""

    problem: AssignmentProblem
    picked: tuple[int, ...]

    @property
    def chosen(self) -> tuple[Candidate, ...]:
        """The chosen treatment of each layer."""
        pairs = zip(self.problem.candidates, self.picked, strict=True)
        return tuple(options[index] for options, index in pairs)

    @property
    def error(self) -> float:
        """Predicted NMSE of the final latents."""
        return fsum(candidate.loss for candidate in self.chosen)

    @property
    def size(self) -> float:
        """Packed size as a share of the source's, without file headers."""
        packed = self.problem.fixed_bytes + sum(candidate.bytes for candidate in self.chosen)
        return packed / self.problem.bytes_before

    @property
    def speed(self) -> float:
        """Modelled speed-up of the layers that can be packed."""
        return self.problem.seconds_before / fsum(c.seconds for c in self.chosen)


def make_problems(
    sensitivity: Sensitivity, recipe: Recipe, allowed: Sequence[str]
) -> tuple[AssignmentProblem, ...]:
    """Return one problem per mask method, since a recipe has one.

    Those without masks come first.

    Args:
        sensitivity: errors, sizes and times.
        recipe: what it keeps stays in 16 bit.
        allowed: globs on the names of treatments; 16-bit is always allowed.

    Raises:
        RecipeError: the globs match no treatment, or one of them none that was measured.
    """
    names = allowed_names(allowed)
    _refuse_unmeasured(sensitivity, allowed)
    gains = find_gains(sensitivity.layers)
    found = (BY_NAME[name].method for name in names if name in BY_NAME)
    methods = dict.fromkeys(method for method in found if method)
    return tuple(
        _make_problem(sensitivity, recipe, gains, names, method) for method in (None, *methods)
    )


def allowed_names(globs: Sequence[str]) -> tuple[str, ...]:
    """Return the treatments that pack and match, in the order of the tables.

    Raises:
        RecipeError: none does.
    """
    known = (*(t.name for t in TREATMENTS if t.packs), *ATTENTION_BY_NAME)
    names = tuple(name for name in known if matches(name, globs))
    if not names:
        raise RecipeError(f"treatments {', '.join(globs)}: match none of {', '.join(known)}")
    return names


def _refuse_unmeasured(sensitivity: Sensitivity, globs: Sequence[str]) -> None:
    """Refuse a glob that asks only for treatments that need second moments where there are none."""
    measured = {name for layer in sensitivity.layers for name in layer.outcomes}
    for glob in globs:
        found = [t for t in TREATMENTS if t.packs and matches(t.name, (glob,))]
        if found and all(t.updates and t.name not in measured for t in found):
            raise RecipeError(
                f"treatments {glob}: not measured, because there were no second moments; give "
                "them to 'quantkit calibrate sensitivity'",
                fields=("hessians",),
            )
        of_attention = [name for name in ATTENTION_BY_NAME if matches(name, (glob,))]
        if of_attention and not found and not measured & set(of_attention):
            raise RecipeError(
                f"treatments {glob}: not measured; 'quantkit calibrate sensitivity' does that in "
                "the pipeline (measure 1 or more), with a calibration that has attention, where it "
                "has the recipe's min_keys keys",
                fields=("measure",),
            )


def _make_problem(
    sensitivity: Sensitivity,
    recipe: Recipe,
    gains: Mapping[str, Gain],
    names: Sequence[str],
    method: str | None,
) -> AssignmentProblem:
    def allowed(layer: LayerSensitivity, name: str) -> bool:
        if name == SIXTEEN_BIT.name:
            return True
        if name not in names or is_kept(layer, recipe):
            return False
        return layer.kind == ATTENTION or BY_NAME[name].method in {None, method}

    candidates = tuple(
        tuple(
            Candidate(name, gains[layer.name].value * o.error, o.bytes, o.seconds)
            for name, o in layer.outcomes.items()
            if allowed(layer, name)
        )
        for layer in sensitivity.layers
    )
    return AssignmentProblem(sensitivity.layers, candidates, gains, sensitivity.fixed_bytes, method)


def is_kept(layer: LayerSensitivity, recipe: Recipe) -> bool:
    """Tell whether a recipe keeps a layer in 16 bit, or decides of an attention module itself."""
    if layer.kind == ATTENTION:
        section = recipe.attention
        return section is not None and (
            section.chooses_formats
            or matches(layer.name, section.exclude)
            or not matches(layer.name, section.layers)
        )
    return recipe.settings(layer.name).keep is True


@dataclass(frozen=True)
class Goal:
    """A budget as a knapsack: the limited quantity, and the one to minimise."""

    cost: Callable[[Candidate], float]
    loss: Callable[[Candidate], float]
    limit: float


def goal_of(problem: AssignmentProblem, budget: BudgetRecipe) -> Goal:
    """Return the knapsack of a budget of bytes, error or speed.

    Without any of them the limit is halfway between the smallest and the source's size, which is
    where sensitivity looks for edges when nobody says where they will be.
    """
    if budget.error is not None:
        return Goal(_loss, _bytes, budget.error)
    if budget.speed is not None:
        return Goal(_seconds, _loss, problem.seconds_before / budget.speed)
    share = budget.bytes
    if share is None:
        smallest = sum(min(c.bytes for c in options) for options in problem.candidates)
        share = (1 + (problem.fixed_bytes + smallest) / problem.bytes_before) / 2
    return Goal(_bytes, _loss, share * problem.bytes_before - problem.fixed_bytes)


def optimize(problems: Sequence[AssignmentProblem], budget: BudgetRecipe) -> Assignment:
    """Return the best choice over all problems: the least of the quantity without a limit.

    Raises:
        RecipeError: no choice meets the budget; the text says how near one comes.
    """
    found: list[tuple[float, float, int, Assignment]] = []
    for index, problem in enumerate(problems):
        goal = goal_of(problem, budget)
        picked = solve(options_of(problem, goal), goal.limit)
        if picked is not None:
            assignment = Assignment(problem, picked)
            sums = [fsum(map(figure, assignment.chosen)) for figure in (goal.loss, goal.cost)]
            found.append((sums[0], sums[1], index, assignment))
    if not found:
        raise RecipeError(_out_of_reach(problems, budget))
    return min(found, key=lambda entry: entry[:3])[3]


def options_of(problem: AssignmentProblem, goal: Goal) -> list[list[Option]]:
    """Return the knapsack's items."""
    return [[Option(goal.cost(c), goal.loss(c)) for c in options] for options in problem.candidates]


def _out_of_reach(problems: Sequence[AssignmentProblem], budget: BudgetRecipe) -> str:
    def least(problem: AssignmentProblem, figure: Callable[[Candidate], float]) -> Assignment:
        picked = [
            min(range(len(options)), key=lambda i: figure(options[i]))
            for options in problem.candidates
        ]
        return Assignment(problem, tuple(picked))

    if budget.speed is not None:
        most = max(least(problem, _seconds).speed for problem in problems)
        return f"budget speed {budget.speed:g}: at most {most:.3g} is modelled; ask for less"
    size = min(least(problem, _bytes).size for problem in problems)
    return (
        f"budget bytes {budget.bytes:g}: the smallest that the treatments allow is {size:.4g} of "
        "the source's size; allow more bytes, or more treatments"
    )


def reasons(assignment: Assignment, goal: Goal) -> tuple[str, ...]:
    """Return the reason of each layer's treatment: error and cost of the next ones."""
    return tuple(
        _reason(layer, options, options[index], assignment.problem.gains[layer.name], goal)
        for layer, options, index in zip(
            assignment.problem.layers, assignment.problem.candidates, assignment.picked, strict=True
        )
    )


def _reason(
    layer: LayerSensitivity,
    options: Sequence[Candidate],
    chosen: Candidate,
    gain: Gain,
    goal: Goal,
) -> str:
    if len(options) == 1:
        return "kept by the recipe"
    local = layer.outcomes[chosen.treatment].error
    words = [f"loses {chosen.loss:.2g} (local {local:.2g} x gain {gain.value:.2g}, {gain.source})"]
    size = goal.loss if goal.cost is _loss else goal.cost
    smaller = [c for c in options if size(c) < size(chosen)]
    larger = [c for c in options if size(c) > size(chosen) and c.loss < chosen.loss]
    if smaller:
        words.append(_alternative(min(smaller, key=_loss), chosen))
    if larger:
        words.append(_alternative(min(larger, key=lambda c: (size(c), c.loss)), chosen))
    return "; ".join(words)


def _alternative(other: Candidate, chosen: Candidate) -> str:
    return f"{other.treatment} {other.loss:.2g} for {other.bytes - chosen.bytes:+,} bytes"


def _bytes(candidate: Candidate) -> float:
    return float(candidate.bytes)


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds


def _loss(candidate: Candidate) -> float:
    return candidate.loss
