"""The verdict in words: every branch, from values that are made to lead there."""

import re
from dataclasses import replace

import pytest
from quantkit.eval.judging.gates import Compression, Gate, Limits, judge
from quantkit.eval.judging.noise_floor import Floor, FloorGap, GapTest, measure_gaps
from quantkit.eval.judging.verdict import (
    Standing,
    describe_clip,
    describe_floor,
    describe_pictures,
    describe_worst,
    headline,
    judge_gates,
    standing,
    standing_to,
    write_verdict,
)
from quantkit.eval.measuring.composition import Kind, PictureKinds, find_bounds, sort_pictures
from quantkit.eval.measuring.equivalence import ALPHA, Equivalence
from quantkit.eval.measuring.metrics import Better
from quantkit.eval.measuring.sample_statistics import summarize

from tests.support.comparisons import clip_scores, comparison

BF16 = "BF16 instead of FP16"
NOISE = (0.001, -0.002, 0.003, -0.001, 0.002, -0.003, 0.0005, -0.0005)


def kinds(packed):
    return sort_pictures(packed, find_bounds([]))


def gap(packed, floor, title=BF16, note=""):
    return measure_gaps(packed, (Floor("dtype", title, floor, None, note),))[0]


NO_FLOOR = Floor("dtype", BF16, None, None)
BASE = [0.98 + n for n in NOISE]
ONLY_SSIM = Limits(lpips=None, clip=None)
SOFT = [0.010 + n for n in NOISE]


@pytest.mark.parametrize(
    ("metric", "shift", "expected"),
    [
        ("ssim", -0.1, Standing.WORSE),
        ("ssim", +0.1, Standing.BETTER),
        ("ssim", 0.0, Standing.OPEN),
        ("lpips", +0.1, Standing.WORSE),
        ("lpips", -0.1, Standing.BETTER),
        ("clip", -0.1, Standing.WORSE),
    ],
)
def test_standing_follows_the_metric_and_the_interval(metric, shift, expected):
    assert standing(metric, summarize([n + shift for n in NOISE])) is expected


def test_one_pair_has_no_standing():
    assert standing("ssim", summarize([0.1])) is Standing.UNKNOWN


@pytest.mark.parametrize(
    ("shift", "p", "equal", "count", "expected"),
    [
        (-0.1, 2.0 * ALPHA, True, 8, Standing.WORSE),
        (-0.1, 0.051, True, 8, Standing.EQUIVALENT),
        (-0.1, 0.051, False, 8, Standing.OPEN),
        (0.1, 0.05, False, 8, Standing.BETTER),
        (0.1, 0.051, None, 8, Standing.OPEN),
        (0.0, 0.01, False, 8, Standing.OPEN),
        (0.0, 0.9, True, 8, Standing.EQUIVALENT),
        (0.0, 0.9, True, 7, Standing.OPEN),
        (0.0, 0.9, True, 1, Standing.UNKNOWN),
        (-0.1, None, None, 8, Standing.WORSE),
    ],
)
def test_interval_and_tests_must_agree_on_the_standing(shift, p, equal, count, expected):
    equivalence = None if equal is None else Equivalence(0.05, 0.02 if equal else 0.03)
    tests = {} if p is None else {"ssim": GapTest(p, equivalence)}
    differences = {"ssim": summarize([n + shift for n in NOISE[:count]])}
    assert standing_to(FloorGap(NO_FLOOR, differences, tests), "ssim") is expected


def test_a_packed_pipeline_worse_than_the_floor_is_told_apart():
    packed = comparison([v - 0.05 for v in BASE], lpips=SOFT)
    found = describe_floor(packed, gap(packed, comparison(BASE, lpips=SOFT)), ("ssim", "lpips"))
    assert found == (
        "Packing moves the pictures more than the noise floor (BF16 instead of FP16): SSIM 0.93 "
        "against 0.98, a difference of -0.05 [-0.05, -0.05]."
    )


def test_a_packed_pipeline_inside_the_floor_is_not_told_apart():
    packed = comparison(BASE, lpips=SOFT)
    floor = comparison(BASE[::-1], lpips=SOFT[::-1])
    found = describe_floor(packed, gap(packed, floor), ("ssim", "lpips"))
    assert found.startswith(
        "8 prompts do not tell packing from the noise floor (BF16 instead of FP16), nor show that "
        "it is no more: SSIM 0.98 against 0.98, a difference of "
    )
    assert "; LPIPS 0.01 against 0.01" in found


def test_one_worse_metric_is_enough_to_be_told_apart():
    packed = comparison(BASE, lpips=[v + 0.5 for v in SOFT])
    floor = comparison(BASE[::-1], lpips=SOFT)
    found = describe_floor(packed, gap(packed, floor), ("ssim", "lpips"))
    assert found.startswith("Packing moves the pictures more than")
    assert "SSIM" not in found
    assert "LPIPS 0.51 against 0.01" in found


def test_closer_than_the_floor_is_said():
    packed = comparison([v + 0.01 for v in BASE])
    found = describe_floor(packed, gap(packed, comparison(BASE)), ("ssim", "lpips"))
    assert found.startswith(
        "Packing moves the pictures less than the noise floor (BF16 instead of FP16): SSIM 0.99"
    )


def test_one_better_metric_is_not_enough_to_be_closer():
    packed = comparison([v + 0.01 for v in BASE], lpips=SOFT)
    floor = comparison(BASE, lpips=SOFT[::-1])
    found = describe_floor(packed, gap(packed, floor), ("ssim", "lpips"))
    assert found.startswith("8 prompts do not tell packing from the noise floor")


def test_one_prompt_is_too_few():
    packed = comparison([0.9])
    found = describe_floor(packed, gap(packed, comparison([0.95])), ("ssim",))
    assert found.startswith("Too few prompts for a comparison with the noise floor")


def test_a_floor_that_overflows_or_moves_nothing_is_said():
    packed = comparison(BASE)
    broken = gap(packed, None, note="the original overflows: prompt 0")
    assert describe_floor(packed, broken, ("ssim",)) == (
        "The noise floor (BF16 instead of FP16) was not measured: the original overflows: prompt 0."
    )
    still = gap(packed, comparison([1.0] * 8, mse=0.0), title="batches of 2 instead of 4")
    assert describe_floor(packed, still, ("ssim",)) == (
        "The noise floor (batches of 2 instead of 4) is zero: all 8-bit pictures stay the same."
    )


SCORES = [27.0, 28.0, 26.5, 30.0, 29.0, 27.5, 28.5, 31.0]


WORSE_WITHIN = (
    "; the pictures match their prompts worse, but within 1 % (two one-sided tests, p = 3.2e-10)."
)


@pytest.mark.parametrize(
    ("shift", "noise", "limit", "expected"),
    [
        (0.0, 500, 1.0, "; 8 prompts show neither a change nor that there is none."),
        (0.0, 100, 3.0, ": equivalent within 3 % (two one-sided tests, p = 3.7e-06)."),
        (-2.0, 100, 1.0, "; the pictures match their prompts worse."),
        (-0.1, 1, 1.0, WORSE_WITHIN),
        (+2.0, 100, 1.0, "; the pictures match their prompts better."),
    ],
)  # fmt: skip
def test_clip_sentence_says_what_is_shown(shift, noise, limit, expected):
    after = [v + shift + noise * n for v, n in zip(SCORES, NOISE, strict=True)]
    scores = clip_scores(SCORES, after)
    gate = Gate("clip_loss", "CLIP score loss", Better.LOWER, limit, "%", None)
    found = describe_clip(scores, gate)
    assert found.startswith("CLIP score [tiny CLIP] goes from 28.44 to ")
    assert re.sub("p = [^)]*", "p", found).endswith(re.sub("p = [^)]*", "p", expected))


@pytest.mark.parametrize("count", [4, 7, 8, 16])
def test_fewer_than_eight_prompts_are_never_called_equivalent(count):
    before = [*SCORES, *SCORES][:count]
    gate = Gate("clip_loss", "CLIP score loss", Better.LOWER, 1.0, "%", None)
    told = describe_clip(clip_scores(before, before), gate)
    few = f"; {count} prompts show neither a change nor that there is none."
    assert told.endswith(
        few if count < 8 else ": equivalent within 1 % (two one-sided tests, p = 0)."
    )


@pytest.mark.parametrize("offset", [-40.0, -28.3])
def test_clip_scores_that_are_not_positive_have_no_limit_to_be_within(offset):
    before = [score + offset for score in SCORES]
    scores = clip_scores(before, before)
    gate = Gate("clip_loss", "CLIP score loss", Better.LOWER, 1.0, "%", None)
    within = " within 1 %" in describe_clip(scores, gate)
    assert within == (sum(before) > 0)


def test_clip_sentence_of_one_prompt_and_of_none():
    assert describe_clip(None, None) == ""
    found = describe_clip(clip_scores([30.0], [29.0]), None)
    assert found == (
        "CLIP score [tiny CLIP] goes from 30 to 29: -1 points (-3.33 %); one prompt is too "
        "few for an interval."
    )


def test_clip_sentence_without_a_positive_score_has_no_percentage():
    scores = clip_scores(SCORES, SCORES)
    negative = replace(scores, loss=replace(scores.loss, mean=None))
    assert "%" not in describe_clip(negative, None)


def test_worst_picture_is_named_with_prompt_and_floor():
    packed = comparison([0.9, 0.7, 0.8])
    floors = (gap(packed, comparison([0.99, 0.95, 0.98])), gap(packed, None, note="none"))
    assert describe_worst(packed, floors) == (
        "The worst picture is 001 ('a ball and 1 cats'): SSIM 0.7, and the noise floor there "
        "0.95 (BF16 instead of FP16)."
    )
    still = gap(packed, comparison([1.0] * 3, mse=0.0))
    assert describe_worst(packed, (floors[0], still)) == describe_worst(packed, floors)
    plain = replace(packed, prompts=None)
    assert describe_worst(plain, ()) == "The worst picture is 001: SSIM 0.7."


def test_identical_pictures_have_no_worst():
    assert describe_worst(comparison([1.0] * 3, mse=0.0), ()) == (
        "Every picture is identical to the original's."
    )


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_one_changed_picture_is_enough_to_call_none_the_same(changed):
    ssim, mse = [1.0] * 3, [0.0] * 3
    ssim[changed], mse[changed] = 0.99, 1e-9
    found = comparison(ssim, mse=mse)
    assert describe_worst(found, ()).startswith(f"The worst picture is 00{changed} (")
    told = describe_floor(comparison([0.9] * 3), gap(comparison([0.9] * 3), found), ("ssim",))
    assert "stay the same" not in told


def test_changed_pictures_are_counted_and_named_the_worst_first():
    names, kind = tuple("abcdefgh"), Kind
    order = (7, 6, 5, 4, 3, 2, 1, 0)

    def told(*kinds):
        bounds = find_bounds([])
        return describe_pictures(names, PictureKinds(kinds, bounds, order, matched=8))

    assert told(*[kind.SAME] * 8) == ""
    assert told(*[kind.SAME] * 7, kind.BROKEN) == "Of 8 pictures 1 is broken (h)."
    assert told(kind.VARIANT, *[kind.SAME] * 7) == (
        "Of 8 pictures 1 is changed in composition (a)."
    )
    assert told(*[kind.VARIANT] * 3, *[kind.BROKEN] * 5) == (
        "Of 8 pictures 5 are broken (h, g, f, e, 1 more) and 3 are changed in composition "
        "(c, b, a)."
    )
    assert told(*[kind.VARIANT] * 4, *[kind.SAME] * 4).endswith("(d, c, b, a).")


def test_gates_say_by_how_much_they_fail_and_which_could_turn():
    found = judge(comparison([0.5, 0.6, 0.4, 0.55]), Limits(), Compression.BOTH)
    assert judge_gates(found, Compression.BOTH) == (
        "Quantized and 2:4 weights fail: SSIM is 0.5125, expected > 0.95 (0.4375 off). "
        "Not measured: LPIPS, CLIP score loss."
    )
    close = judge(comparison([0.93, 0.99, 0.94, 0.98] * 2), ONLY_SSIM, Compression.QUANTIZED)
    assert re.fullmatch(
        r"Quantized weights are undecided. SSIM 0.96 \(> 0.95\): the interval \[0.94\d+, "
        r"0.97\d+\] holds the limit; about \d\d prompts would decide.",
        judge_gates(close, Compression.QUANTIZED),
    )
    few = judge(comparison([0.98, 0.99, 0.985]), ONLY_SSIM, Compression.QUANTIZED)
    assert judge_gates(few, Compression.QUANTIZED) == (
        "Quantized weights are undecided. SSIM 0.985 (> 0.95): 3 prompts are too few to "
        "pass; about 8 prompts would decide."
    )
    one = judge(comparison([0.98]), ONLY_SSIM, Compression.QUANTIZED)
    assert "one prompt has no interval; about 8 prompts" in judge_gates(one, Compression.QUANTIZED)
    tested = replace(few[0], p_passes=ALPHA)
    assert "3 prompts are too few" in judge_gates((tested,), Compression.QUANTIZED)
    tested = replace(few[0], p_passes=ALPHA + 1e-9)
    assert "the tests decide nothing" in judge_gates((tested,), Compression.QUANTIZED)
    at = judge(comparison([0.94, 0.96] * 4), ONLY_SSIM, Compression.QUANTIZED)
    assert "more than 10,000 prompts" in judge_gates(at, Compression.QUANTIZED)


@pytest.mark.parametrize(
    ("ssim", "lpips", "expected"),
    [(0.9, 0.05, (False, True)), (0.99, 0.2, (True, False)), (0.95, 0.1, (None, None))],
)
def test_gates_hold_on_the_better_side_of_their_limits_alone(ssim, lpips, expected):
    limits = Limits(ssim=0.95, lpips=0.1, clip=None)
    gates = judge(comparison([ssim] * 8, lpips=[lpips] * 8), limits, Compression.QUANTIZED)
    assert tuple(gate.passed for gate in gates) == expected


def test_the_paragraph_takes_the_percentage_of_the_clip_gate():
    clip = clip_scores(SCORES, [v + n / 100 for v, n in zip(SCORES, NOISE, strict=True)])
    packed = comparison(BASE, lpips=SOFT, clip=clip)
    gates = judge(packed, Limits(), Compression.QUANTIZED)
    text = write_verdict(gates, Compression.QUANTIZED, packed, (), kinds(packed))
    assert " within 1 % (two one-sided tests" in text


def test_the_paragraph_has_gates_floor_clip_and_worst_in_this_order():
    clip = clip_scores(SCORES, [v - 2.0 + n for v, n in zip(SCORES, NOISE, strict=True)])
    packed = comparison([v - 0.05 for v in BASE], lpips=SOFT, clip=clip)
    floors = measure_gaps(
        packed,
        (
            Floor("dtype", BF16, comparison(BASE, lpips=SOFT, clip=clip), None),
            Floor("batch", "batches of 1 instead of 2", comparison(BASE, lpips=SOFT), None),
        ),
    )
    assert floors[0].differences["clip"].mean == 0.0
    assert "clip" not in floors[1].differences
    gates = judge(packed, Limits(), Compression.QUANTIZED)
    text = write_verdict(gates, Compression.QUANTIZED, packed, floors, kinds(packed))
    parts = (
        "Quantized weights fail: SSIM is 0.93",
        BF16,
        "batches of 1",
        "CLIP score [",
        "The worst",
    )
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert write_verdict((), Compression.QUANTIZED, packed, (), kinds(packed)).startswith(
        "Quantized weights were not judged. CLIP"
    )
    broken = (Gate("broken", "broken pictures", Better.LOWER, 50.0, "%", None),)
    told = write_verdict(broken, Compression.QUANTIZED, packed, (), kinds(packed))
    assert "the pictures match their prompts worse. The worst picture" in told


@pytest.mark.parametrize(
    ("ssim", "limits", "expected"),
    [
        (BASE, Limits(0.95, None, None), "PASS: SSIM 0.98 (expected > 0.95)"),
        (BASE, Limits(0.99, None, None), "FAIL: SSIM 0.98 (expected > 0.99)"),
        (BASE, Limits(None, 0.1, None), "NOT JUDGED: no gate was measured"),
    ],
)
def test_headline_is_one_line(ssim, limits, expected):
    found = headline(judge(comparison(ssim), limits, Compression.QUANTIZED))
    assert re.sub(r"0\.98\d*", "0.98", found) == expected
