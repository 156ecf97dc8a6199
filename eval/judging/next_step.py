"""Advice after a verdict, with its command: more prompts, other formats for layers, training."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, log

from quantkit.eval.judging.evaluation_result import NextStep, Report
from quantkit.eval.judging.gates import State
from quantkit.eval.measuring.step_errors import StepErrors

from quantkit.errors import RecipeError
from quantkit.numerics.scheme import Scheme
from quantkit.recipe.goals import BudgetRecipe
from quantkit.recipe.load import recipe_names
from quantkit.sensitivity.budget import Assignment
from quantkit.sensitivity.error_propagation import find_gains
from quantkit.sensitivity.selection import choose
from quantkit.sensitivity.sensitivity_file import LayerSensitivity, Sensitivity
from quantkit.sensitivity.treatments import BY_NAME, SIXTEEN_BIT

#: Layers that are named; the command changes all of them.
NAMED = 6
#: The prediction must be so much better than the limit, as a share of the limit of 1 - SSIM.
MARGIN = 0.8
#: Between 1 - SSIM and the error of the latents, where the noise floor does not tell: both are
#: squares for small errors.
LINEAR = 1.0
#: Treatments that a layer may be kept in, besides those that the pipeline has already.
ALTERNATIVES = ("int8-token", "e4m3fn-token")
#: A fit of two points is not trusted beyond these.
STEEPEST, FLATTEST = 1.0, 0.25


@dataclass(frozen=True)
class Treated:
    """The treatments of a component's layers, and the file of errors of all treatments."""

    sensitivity: Sensitivity
    #: as it was given, for the command
    path: str
    #: by module path; layers that are not in it stay in 16 bit
    schemes: Mapping[str, Scheme]


def find_next_steps(
    report: Report, packed: Treated | None, *, prompts: int | None = None
) -> tuple[NextStep, ...]:
    """Return what would help, the cheapest first; empty when the gates pass.

    Args:
        report: with its gates.
        packed: None where there is no sensitivity.
        prompts: that there are to compare; None: not known.
    """
    steps = []
    if report.state is State.UNDECIDED:
        steps.append(more_prompts(report, prompts))
    if packed is not None and report.state in (State.FAILED, State.UNDECIDED):
        steps.append(_better_layers(report, packed))
    if report.state is State.FAILED and report.packing.packed and not report.quantized_by:
        steps.append(_training(report))
    return tuple(step for step in steps if step is not None)


def more_prompts(report: Report, prompts: int | None = None) -> NextStep | None:
    """Return the run that would decide the open gates; None if no number of prompts would."""
    numbers = [gate.prompts_needed for gate in report.gates if gate.state is State.UNDECIDED]
    if not numbers or None in numbers:
        return None
    count = max(number for number in numbers if number is not None)
    words = f"run about {count} prompts instead of {len(report.run.prompts)} to decide"
    if prompts is not None and prompts < count:
        return NextStep(f"{words}; there are {prompts}: give a file of {count} as --prompts", "")
    return NextStep(words, with_count(report.commands[-1], count) if report.commands else "")


def with_count(command: str, count: int) -> str:
    """Return a command line with another --count, over its own output.

    A run keeps what it has measured and packed; a report is made anew.
    """
    words, kept = shlex.split(command), list[str]()
    skip = False
    for word in words:
        over = word in ("--count", "--force", "--resume") or word.startswith("--count=")
        if not skip and not over:
            kept.append(word)
        skip = word == "--count" and not skip
    again = "--resume" if kept[:2] == ["quantkit", "run"] else "--force"
    return shlex.join([*kept, "--count", str(count), again])


def _training(report: Report) -> NextStep:
    """Return the training of the packed codes, which needs no other bytes."""
    packed = report.packed.path
    words = ("quantkit", "recover", report.original.path, "--packed", packed)
    return NextStep(
        "train the codes on the original's answers, at the same bytes: minutes on a GPU",
        shlex.join((*words, "-o", f"{packed.rstrip('/')}-trained")),
    )


def _better_layers(report: Report, packed: Treated) -> NextStep | None:
    """Return the least bytes that bring the SSIM beyond its limit, by the sensitivity."""
    gate = next((gate for gate in report.gates if gate.metric == "ssim"), None)
    now = _treatments(packed)
    if gate is None or gate.found is None or gate.passed or not now:
        return None
    gains = find_gains(packed.sensitivity.layers)
    error = fsum(
        gains[layer.name].value * layer.outcomes[now[layer.name]].error
        for layer in packed.sensitivity.layers
    )
    curve = _Curve(1.0 - gate.found, error, fit_power(report))
    target = curve.error_of(MARGIN * (1.0 - gate.limit))
    if target is None:
        return None
    names = tuple(dict.fromkeys((*now.values(), *ALTERNATIVES)))
    chosen = _choose(packed.sensitivity, target, names)
    return None if chosen is None else _told(packed, chosen, now, curve)


@dataclass(frozen=True)
class _Curve:
    """1 - SSIM as a power of the predicted error of the latents, through what was measured."""

    lost: float
    error: float
    power: float

    def error_of(self, lost: float) -> float | None:
        """Return the error that loses so much; None where it is no less than now's."""
        if lost <= 0.0 or self.error <= 0.0 or self.lost <= lost:
            return None
        return self.error * float((lost / self.lost) ** (1.0 / self.power))

    def ssim_of(self, error: float) -> float:
        """Return the SSIM that an error leaves."""
        return 1.0 - self.lost * float((error / self.error) ** self.power)


def _choose(sensitivity: Sensitivity, error: float, treatments: Sequence[str]) -> Assignment | None:
    budget = BudgetRecipe(error=error, treatments=tuple(treatments))
    try:
        return choose(sensitivity, sensitivity.recipe, budget).assignment
    except RecipeError:
        # No treatment of any layer is good enough: another model, or recovery, is what helps.
        return None


def _told(packed: Treated, chosen: Assignment, now: Mapping[str, str], curve: _Curve) -> NextStep:
    pairs = list(zip(packed.sensitivity.layers, chosen.chosen, strict=True))
    more = sum(new.bytes - layer.outcomes[now[layer.name]].bytes for layer, new in pairs)
    groups: dict[str, list[str]] = {}
    for layer, new in pairs:
        if new.treatment != now[layer.name]:
            groups.setdefault(new.treatment, []).append(layer.name)
    words = " and ".join(
        f"{len(names)} layer{'s' * (len(names) > 1)} in {treatment} ({_listed(names)})"
        for treatment, names in groups.items()
    )
    reached = curve.ssim_of(chosen.error)
    return NextStep(
        f"keep {words}: {more / 1e6:+.2f} MB, SSIM {1.0 - curve.lost:.3g} -> about {reached:.3g}",
        _command(packed, chosen, now),
        tuple(name for names in groups.values() for name in names),
    )


def _command(packed: Treated, chosen: Assignment, now: Mapping[str, str]) -> str:
    """Return what writes the recipe: the smallest that has the chosen error."""
    names = dict.fromkeys((*now.values(), *ALTERNATIVES))
    treatments = ",".join(name for name in names if name != SIXTEEN_BIT.name)
    # Rounded up, so that what was chosen is within it.
    error = f"{chosen.error * (1.0 + 1e-4):.5g}"
    name = packed.sensitivity.recipe.name
    recipe = name if name in recipe_names() else "RECIPE.yaml"
    goal = ("--set", f"budget.error={error}", "--set", f"budget.treatments=[{treatments}]")
    start = ("quantkit", "calibrate", "optimize", packed.path, "-r", recipe)
    return shlex.join((*start, *goal, "-o", "better.yaml"))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join([*names[:NAMED], *([f"{more} more"] if more > 0 else [])])


def _treatments(packed: Treated) -> dict[str, str]:
    """Return the treatment of every layer; empty if one has none that was measured."""
    found = {}
    for layer in packed.sensitivity.layers:
        name = _treatment(layer, packed.schemes.get(layer.name))
        if name is None:
            return {}
        found[layer.name] = name
    return found


def _treatment(layer: LayerSensitivity, scheme: Scheme | None) -> str | None:
    """Return the measured treatment that a scheme is; of several mask methods the first."""
    if scheme is None:
        return SIXTEEN_BIT.name
    for name in layer.outcomes:
        row = BY_NAME[name]
        same = (row.format, row.activation) == (scheme.weight, scheme.activation)
        if same and (row.method is not None) == (scheme.sparsity is not None):
            return name
    return None


def fit_power(report: Report) -> float:
    """Return p in 1 - SSIM ~ error^p, through the packed pipeline and a noise floor."""
    here = _point(report.timesteps.divergence, report.comparison.scores["ssim"].summary.mean)
    for floor in (gap.floor for gap in report.noise_floor):
        if floor.comparison is None:
            continue
        there = _point(floor.divergence, floor.comparison.scores["ssim"].summary.mean)
        if here and there and here[0] > 2.0 * there[0] and here[1] > there[1]:
            power = log(here[1] / there[1]) / log(here[0] / there[0])
            return min(STEEPEST, max(FLATTEST, power))
    return LINEAR


def _point(divergence: StepErrors | None, ssim: float | None) -> tuple[float, float] | None:
    """Return the error of the final latents and 1 - SSIM; None where one is zero or unknown."""
    if divergence is None or ssim is None or divergence.mean[-1] <= 0.0 or ssim >= 1.0:
        return None
    return divergence.mean[-1], 1.0 - ssim
