"""The verdict in words, every sentence computed from the numbers beside it."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from enum import Enum

from quantkit.eval.judging.gates import LEAST_PROMPTS, Compression, Gate, State, state_of
from quantkit.eval.judging.noise_floor import FloorGap
from quantkit.eval.measuring.comparison import ClipScores, Comparison
from quantkit.eval.measuring.composition import Kind, PictureKinds
from quantkit.eval.measuring.equivalence import ALPHA, MOST_PROMPTS, show_equivalence
from quantkit.eval.measuring.metrics import METRICS, Better
from quantkit.eval.measuring.number_format import show, show_difference, show_interval, show_signed
from quantkit.eval.measuring.sample_statistics import Summary

#: The metrics that decide whether packed pictures can be told from the floor's, of the first floor
#: and of the second: one paragraph must stay readable, and the table has them all.
DECIDING = (("ssim", "lpips"), ("ssim",))


class Standing(Enum):
    """The standing of a packed pipeline to a noise floor in one metric."""

    WORSE = "worse"
    BETTER = "better"
    #: the interval of the difference holds zero
    OPEN = "undecided"
    #: two one-sided tests show the difference to be smaller than the gate allows
    EQUIVALENT = "equivalent"
    #: fewer than two pairs, or no finite value
    UNKNOWN = "no interval"


def standing(metric: str, difference: Summary) -> Standing:
    """Return what the interval of packed - floor says about the metric."""
    interval = difference.interval
    if interval is None:
        return Standing.UNKNOWN
    if interval.holds(0.0):
        return Standing.OPEN
    higher = interval.low > 0.0
    return (
        Standing.BETTER if higher == (METRICS[metric].better is Better.HIGHER) else Standing.WORSE
    )


def standing_to(gap: FloorGap, metric: str) -> Standing:
    """Return what interval and tests of packed - floor say together about the metric."""
    found, test = standing(metric, gap.differences[metric]), gap.tests.get(metric)
    if test is None or found is Standing.UNKNOWN:
        return found
    if found in (Standing.WORSE, Standing.BETTER) and test.p_differs <= 2.0 * ALPHA:
        return found
    equal = test.equivalence is not None and test.equivalence.shown
    enough = gap.differences[metric].count >= LEAST_PROMPTS
    return Standing.EQUIVALENT if equal and enough else Standing.OPEN


def write_verdict(
    gates: tuple[Gate, ...],
    compression: Compression,
    comparison: Comparison,
    gaps: tuple[FloorGap, ...],
    pictures: PictureKinds,
) -> str:
    """Return the verdict: gates, kinds of pictures, noise floor, CLIP score, worst picture."""
    clip = next((gate for gate in gates if gate.metric == "clip_loss"), None)
    sentences = [
        judge_gates(gates, compression),
        describe_pictures(comparison.names, pictures),
        *(
            describe_floor(comparison, gap, metrics)
            for gap, metrics in zip(gaps, DECIDING, strict=False)
        ),
        describe_clip(comparison.clip, clip),
        describe_worst(comparison, gaps),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


#: Pictures that a sentence names.
MOST_NAMED = 4
#: The word that a headline begins with.
WORDS = {
    State.PASSED: "PASS",
    State.FAILED: "FAIL",
    State.UNDECIDED: "UNDECIDED",
    State.NOT_JUDGED: "NOT JUDGED",
}


def headline(gates: tuple[Gate, ...]) -> str:
    """Return on one line what the gates show, and what each found that decides it."""
    state = state_of(gates)
    if state is State.NOT_JUDGED:
        return "NOT JUDGED: no gate was measured"
    told = ", ".join(
        f"{gate.title} {show(gate.found, gate.unit)} (expected {gate.expected})"
        for gate in gates
        if gate.state is state
    )
    more = "; more prompts decide" if state is State.UNDECIDED else ""
    return f"{WORDS[state]}: {told}{more}"


def judge_gates(gates: tuple[Gate, ...], compression: Compression) -> str:
    """Return which gates hold, fail (and by how much), are open, or were not measured."""
    by_state = {state: [gate for gate in gates if gate.state is state] for state in State}
    failed, open_ = by_state[State.FAILED], by_state[State.UNDECIDED]
    what = f"{compression.value.capitalize()} weights"
    parts = {
        State.FAILED: f"{what} fail: {'; '.join(map(_failure, failed))}.",
        State.UNDECIDED: f"{what} are undecided.",
        State.PASSED: f"{what} pass: {_held(by_state[State.PASSED])}.",
        State.NOT_JUDGED: f"{what} were not judged.",
    }
    sentences = [parts[state_of(gates)], *map(_question, open_)]
    if by_state[State.NOT_JUDGED]:
        missing = ", ".join(gate.title for gate in by_state[State.NOT_JUDGED])
        sentences.append(f"Not measured: {missing}.")
    return " ".join(sentences)


def _held(gates: Sequence[Gate]) -> str:
    return ", ".join(
        f"{gate.title} {show(gate.found, gate.unit)} ({gate.expected})" for gate in gates
    )


def _failure(gate: Gate) -> str:
    assert gate.found is not None
    off = show(abs(gate.found - gate.limit), gate.unit)
    return f"{gate.title} is {show(gate.found, gate.unit)}, expected {gate.expected} ({off} off)"


def _question(gate: Gate) -> str:
    """Return why a gate is open, and how many prompts would decide it."""
    found = f"{gate.title} {show(gate.found, gate.unit)} ({gate.expected})"
    if gate.interval is None:
        why = "one prompt has no interval"
    elif gate.interval.holds(gate.limit):
        why = f"the interval {show_interval(gate.interval)} holds the limit"
    elif gate.p_passes is not None and gate.p_passes <= ALPHA:
        why = f"{gate.count} prompts are too few to pass"
    else:
        why = "the tests decide nothing"
    more = f"about {gate.prompts_needed}" if gate.prompts_needed else f"more than {MOST_PROMPTS:,}"
    return f"{found}: {why}; {more} prompts would decide."


def describe_pictures(names: Sequence[str], pictures: PictureKinds) -> str:
    """Return how many pictures are the same, and which are not; empty if all are."""
    counts = pictures.counts
    if counts[Kind.SAME] == len(names):
        return ""
    changed = [
        f"{counts[kind]} {'are' if counts[kind] > 1 else 'is'} {words} "
        f"({_listed([names[i] for i in pictures.order if pictures.kinds[i] is kind])})"
        for kind, words in ((Kind.BROKEN, "broken"), (Kind.VARIANT, "changed in composition"))
        if counts[kind]
    ]
    return f"Of {len(names)} pictures {' and '.join(changed)}."


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join([*names[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])])


def describe_clip(clip: ClipScores | None, gate: Gate | None) -> str:
    """Return how the CLIP score moves, whether that is chance, and whether it stays small.

    Args:
        clip: None: not measured.
        gate: its limit is the margin that equivalence is tested with; None: none is.
    """
    if clip is None or clip.change.mean is None:
        return ""
    share = "" if clip.loss.mean is None else f" ({show_signed(0.0 - clip.loss.mean, '%')})"
    start = (
        f"CLIP score [{clip.backbone}] goes from {show(clip.original.summary.mean)} to "
        f"{show(clip.packed.summary.mean)}: {show_difference(clip.change)} points{share}"
    )
    interval = clip.change.interval
    if interval is None:
        return f"{start}; one prompt is too few for an interval."
    within = _equivalent_within(clip, gate)
    if interval.holds(0.0):
        if within:
            return f"{start}: equivalent{within}."
        count = len(clip.original.values)
        return f"{start}; {count} prompts show neither a change nor that there is none."
    direction = "worse" if clip.change.mean < 0 else "better"
    return f"{start}; the pictures match their prompts {direction}{within and f', but{within}'}."


def _equivalent_within(clip: ClipScores, gate: Gate | None) -> str:
    """Return within what the scores are shown to be equivalent; empty if they are not."""
    mean = clip.original.summary.mean
    pairs = zip(clip.packed.values, clip.original.values, strict=True)
    if gate is None or mean is None or mean <= 0.0 or len(clip.original.values) < LEAST_PROMPTS:
        return ""
    found = show_equivalence([after - before for after, before in pairs], gate.limit / 100 * mean)
    if found is None or not found.shown:
        return ""
    return f" within {gate.limit:g} % (two one-sided tests, p = {found.p:.2g})"


def describe_worst(comparison: Comparison, gaps: tuple[FloorGap, ...]) -> str:
    """Return which picture has the lowest SSIM, and what the floor has there."""
    worst, ssim = comparison.worst_first()[0], comparison.scores["ssim"]
    if _identical(comparison):
        return "Every picture is identical to the original's."
    floors = [
        f"{show(gap.floor.comparison.scores['ssim'].values[worst])} ({gap.floor.title})"
        for gap in gaps
        if gap.floor.comparison is not None and not _identical(gap.floor.comparison)
    ]
    beside = f", and the noise floor there {' and '.join(floors)}" if floors else ""
    prompt = f" ({comparison.prompts[worst]!r})" if comparison.prompts else ""
    return (
        f"The worst picture is {comparison.names[worst]}{prompt}: "
        f"SSIM {show(ssim.values[worst])}{beside}."
    )


def describe_floor(comparison: Comparison, gap: FloorGap, metrics: Sequence[str]) -> str:
    """Return whether packing moves the pictures more than one noise floor does.

    Args:
        comparison: of the packed pipeline.
        gap: against which floor.
        metrics: those that decide; the ones that were not measured are passed over.
    """
    floor, count = gap.floor, len(comparison.names)
    if floor.comparison is None:
        return f"The noise floor ({floor.title}) was not measured: {floor.note}."
    if _identical(floor.comparison):
        return f"The noise floor ({floor.title}) is zero: all 8-bit pictures stay the same."
    found = {name: standing_to(gap, name) for name in metrics if name in gap.differences}
    worse = [name for name, place in found.items() if place is Standing.WORSE]
    numbers = _numbers(comparison, gap, worse or list(found))
    return f"{_place(set(found.values()), floor.title, count)}: {numbers}."


def _place(found: AbstractSet[Standing], title: str, count: int) -> str:
    """Return where the pictures stand to a floor, all deciding metrics together."""
    if Standing.WORSE in found:
        return f"Packing moves the pictures more than the noise floor ({title})"
    if Standing.UNKNOWN in found:
        return f"Too few prompts for a comparison with the noise floor ({title})"
    if found == {Standing.BETTER}:
        return f"Packing moves the pictures less than the noise floor ({title})"
    if Standing.OPEN not in found:
        return f"Packing moves the pictures as the noise floor does, within the gates ({title})"
    return (
        f"{count} prompts do not tell packing from the noise floor ({title}), nor show that it is "
        "no more"
    )


def _numbers(comparison: Comparison, gap: FloorGap, metrics: Sequence[str]) -> str:
    assert gap.floor.comparison is not None
    return "; ".join(
        f"{METRICS[name].title} {show(comparison.scores[name].summary.mean)} against "
        f"{show(gap.floor.comparison.scores[name].summary.mean)}, a difference of "
        f"{show_difference(gap.differences[name])}"
        for name in metrics
    )


def _identical(comparison: Comparison) -> bool:
    return all(value == 0.0 for value in comparison.scores["mse"].values)
