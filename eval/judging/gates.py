"""Gates: limits that a packed pipeline must keep, each judged by tests over prompts.

A gate passes or fails when a test shows it, and is undecided in between. All gates together pass
when each of them does, which takes no correction (an intersection-union test); that some gate fails
is claimed after Holm's correction over all of them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from quantkit.eval.measuring.comparison import ClipScores, Comparison
from quantkit.eval.measuring.composition import Kind, PictureKinds, find_bounds, sort_pictures
from quantkit.eval.measuring.equivalence import (
    ALPHA,
    OneSided,
    compare_with_zero,
    correct_holm,
    prompts_to_decide,
)
from quantkit.eval.measuring.metrics import METRICS, Better
from quantkit.eval.measuring.sample_statistics import CONFIDENCE, Interval, Summary
from scipy import stats

from quantkit.numerics.scheme import Scheme

#: Fewer prompts than this pass no gate: what is rare does not show, and intervals are a guess.
LEAST_PROMPTS = 8


#: The gates on the share of pictures that are.
BROKEN, CHANGED = "broken", "changed"


class Compression(Enum):
    """Compression of the weights, which sets the limit of lost CLIP score."""

    QUANTIZED = "quantized"
    SPARSE = "2:4"
    BOTH = "quantized and 2:4"
    #: nothing: a 16-bit pipeline whose weights are others, as finetuned to be packed
    NONE = "16-bit"


class State(Enum):
    """The state of a gate, or of all."""

    PASSED = "passed"
    FAILED = "failed"
    #: neither: the interval holds the limit, or the prompts are too few
    UNDECIDED = "undecided"
    NOT_JUDGED = "not judged"


#: CLIP score loss in % of the original's score, by what was done to the weights.
CLIP_LOSS = {
    Compression.QUANTIZED: 1.0,
    Compression.SPARSE: 2.0,
    Compression.BOTH: 3.0,
    Compression.NONE: 1.0,
}


@dataclass(frozen=True)
class Limits:
    """The gates' limits; a mean must lie strictly on the good side. None: no such gate."""

    ssim: float | None = 0.95
    lpips: float | None = 0.1
    #: CLIP score loss in %; usual: that of ``CLIP_LOSS``
    clip: float | Literal["usual"] | None = "usual"
    #: pictures that may be broken, in %
    broken: float | None = 0.0
    #: pictures that may be changed, broken ones among them, beyond the noise floor's own, in %
    changed: float | None = None

    def clip_loss(self, compression: Compression) -> float | None:
        """Return the limit of the CLIP score loss that applies."""
        return CLIP_LOSS[compression] if self.clip == "usual" else self.clip

    @property
    def margins(self) -> dict[str, float]:
        """Distances from identical pictures that the gates allow, by metric."""
        found = {"ssim": 1.0 - (1.0 if self.ssim is None else self.ssim), "lpips": self.lpips}
        return {name: margin for name, margin in found.items() if margin and margin > 0.0}


@dataclass(frozen=True)
class Gate:
    """One limit and what was found."""

    metric: str
    title: str
    #: the mean must lie above (higher) or below (lower) the limit
    better: Better
    limit: float
    unit: str
    found: float | None
    #: of the mean
    interval: Interval | None = None
    #: prompts that it was found on
    count: int = 0
    state: State = State.NOT_JUDGED
    #: of the one-sided tests that it passes, and that it fails, the latter corrected by Holm
    p_passes: float | None = None
    p_fails: float | None = None
    #: in all, that would decide if mean and spread stay; None: decided, or no number would
    prompts_needed: int | None = None
    note: str = ""

    @property
    def expected(self) -> str:
        """The condition in words, as ``> 0.95``."""
        counted = self.metric in (BROKEN, CHANGED)
        sign = ">" if self.better is Better.HIGHER else "<=" if counted else "<"
        return f"{sign} {self.limit:g}{' ' if self.unit else ''}{self.unit}"

    @property
    def passed(self) -> bool | None:
        """True when it passes, False when it fails, None when neither is known."""
        return {State.PASSED: True, State.FAILED: False}.get(self.state)


@dataclass(frozen=True)
class _Finding:
    """A gate before it is judged."""

    gate: Gate
    #: of its metric; None: not measured
    summary: Summary | None
    #: how far each prompt lies on the good side of the limit
    margins: tuple[float, ...] = ()


def find_compression(schemes: Collection[Scheme]) -> Compression:
    """Return what a packed checkpoint's schemes amount to; every scheme quantizes."""
    sparse = any(scheme.sparsity is not None for scheme in schemes)
    return Compression.BOTH if sparse else Compression.QUANTIZED


def judge(
    comparison: Comparison,
    limits: Limits,
    compression: Compression,
    floors: Iterable[Comparison] = (),
) -> tuple[Gate, ...]:
    """Return the gates with what the comparison shows of each.

    Args:
        comparison: of the packed pictures with the original's.
        limits: None for a gate that is not asked for.
        compression: decides which limit of the CLIP score applies.
        floors: the original against itself: what broken pictures are told by.
    """
    clip = limits.clip_loss(compression)
    found = (
        _pair_finding(comparison, "ssim", "SSIM", Better.HIGHER, limits.ssim),
        _pair_finding(comparison, "lpips", "LPIPS", Better.LOWER, limits.lpips),
        _clip_finding(comparison.clip, clip, compression),
    )
    gates = _judge([finding for finding in found if finding is not None])
    known = tuple(floors)
    pictures = sort_pictures(comparison, find_bounds(known))
    if limits.changed is not None:
        gates = (*gates, _count_changed(pictures, limits.changed, known))
    if limits.broken is None or comparison.resemblance is None:
        return gates
    return (*gates, _count_broken(pictures, limits.broken, comparison.resemblance.backbone))


def _count_changed(pictures: PictureKinds, limit: float, floors: Sequence[Comparison]) -> Gate:
    """Return the gate on changed pictures: as many more as the noise floor has are allowed."""
    own = (sort_pictures(floor, pictures.bounds) for floor in floors)
    allowed = max((100.0 * kinds.changed / len(kinds.kinds) for kinds in own), default=0.0)
    gate = Gate(CHANGED, "share of changed pictures", Better.LOWER, limit + allowed, "%", None)
    return _counted(gate, pictures.changed, len(pictures.kinds))


def _count_broken(pictures: PictureKinds, limit: float, backbone: str) -> Gate:
    """Return the gate on broken pictures."""
    gate = Gate(
        BROKEN, _titled("share of broken pictures", backbone), Better.LOWER, limit, "%", None
    )
    if not pictures.matched:
        return replace(gate, note="too few pictures that match their prompts and no others")
    return _counted(gate, pictures.counts[Kind.BROKEN], len(pictures.kinds))


def _counted(gate: Gate, found: int, count: int) -> Gate:
    """Return a gate with a count of pictures, which passes on any number of them."""
    low, high = (
        100.0 * float(end) for end in stats.binomtest(found, count).proportion_ci(CONFIDENCE)
    )
    share, limit = 100.0 * found / count, gate.limit
    state = State.PASSED if share <= limit else State.FAILED if low > limit else State.UNDECIDED
    note = f"{found} of {count}; of all prompts up to {high:.3g} %"
    return replace(
        gate, found=share, interval=Interval(low, high, "Clopper-Pearson"), count=count,
        state=state, note=note,
    )  # fmt: skip


def judge_all(states: Collection[State]) -> State:
    """Return what several come to: passed when each of them, and at least one, passes."""
    for state in (State.FAILED, State.UNDECIDED, State.NOT_JUDGED, State.PASSED):
        if state in states:
            return state
    return State.NOT_JUDGED


def state_of(gates: Collection[Gate]) -> State:
    """Return what the gates that were measured come to."""
    return judge_all([gate.state for gate in gates if gate.state is not State.NOT_JUDGED])


def passed(gates: Collection[Gate]) -> bool:
    """Return True when at least one gate was measured and all that were pass."""
    return state_of(gates) is State.PASSED


def _pair_finding(
    comparison: Comparison, metric: str, title: str, better: Better, limit: float | None
) -> _Finding | None:
    if limit is None:
        return None
    score = comparison.scores.get(metric)
    gate = Gate(metric, _titled(title, score.backbone if score else ""), better, limit, "", None)
    if score is None:
        return _Finding(gate, None)
    higher = better is Better.HIGHER
    margins = tuple(value - limit if higher else limit - value for value in score.values)
    return _Finding(gate, score.summary, margins)


def _clip_finding(
    clip: ClipScores | None, limit: float | None, compression: Compression
) -> _Finding | None:
    if limit is None:
        return None
    title = _titled("CLIP score loss", clip.backbone if clip else "")
    note = f"limit for {compression.value}"
    gate = Gate("clip_loss", title, Better.LOWER, limit, "%", None, note=note)
    if clip is None:
        return _Finding(gate, None)
    if clip.loss.mean is None:
        return _Finding(gate, clip.loss)
    # Mean loss < limit % of the mean score, without the quotient, which has no t-test (Fieller).
    pairs = zip(clip.original.values, clip.packed.values, strict=True)
    margins = tuple(after - (1.0 - limit / 100.0) * before for before, after in pairs)
    return _Finding(gate, clip.loss, margins)


def _judge(findings: Sequence[_Finding]) -> tuple[Gate, ...]:
    tests = [compare_with_zero(finding.margins) for finding in findings]
    failing = iter(correct_holm([test.below for test in tests if test is not None]))
    corrected = [None if test is None else next(failing) for test in tests]
    count = sum(test is not None for test in tests)
    return tuple(
        _decide(finding, test, p_fails, count)
        for finding, test, p_fails in zip(findings, tests, corrected, strict=True)
    )


def _decide(finding: _Finding, test: OneSided | None, p_fails: float | None, tests: int) -> Gate:
    """Return the gate as both tests and the interval show it: none may contradict another."""
    gate, summary = finding.gate, finding.summary
    if summary is None or summary.mean is None:
        reason = "not measured" if summary is None else "the original's score is not positive"
        return replace(gate, note=reason)
    gate = replace(gate, found=summary.mean, interval=summary.interval, count=summary.count)
    if gate.better is Better.HIGHER and gate.limit <= METRICS[gate.metric].minimum:
        return replace(gate, state=State.PASSED, note="no picture can miss it")
    if test is None or p_fails is None:
        return replace(gate, state=State.UNDECIDED, prompts_needed=LEAST_PROMPTS)
    gate = replace(gate, p_passes=test.above, p_fails=p_fails)
    apart = summary.interval is not None and not summary.interval.holds(gate.limit)
    if apart and p_fails <= ALPHA:
        return replace(gate, state=State.FAILED)
    if apart and test.above <= ALPHA and test.count >= LEAST_PROMPTS:
        return replace(gate, state=State.PASSED)
    failing = test.below < test.above
    needed = prompts_to_decide(finding.margins, tests=tests if failing else 1)
    needed = needed and max(needed, test.count + 1, LEAST_PROMPTS)
    return replace(gate, state=State.UNDECIDED, prompts_needed=needed)


def _titled(title: str, backbone: str) -> str:
    return f"{title} [{backbone}]" if backbone else title
