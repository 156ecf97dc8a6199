"""Gates: their limits, and what they say of values at the limit."""

from dataclasses import replace

import pytest
from quantkit.eval.backbones import Backbones
from quantkit.eval.comparison import compare
from quantkit.eval.gates import Compression, Limits, find_compression, judge, passed

from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.pictures import fake_clip, made_pairs, small_lpips


def scheme(*, sparse):
    return Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR if sparse else None, Activation.TOKEN)


@pytest.mark.parametrize(
    ("sparse", "compression", "limit"),
    [
        ((False,), Compression.QUANTIZED, 1.0),
        ((True,), Compression.BOTH, 3.0),
        ((False, True), Compression.BOTH, 3.0),
    ],
)
def test_the_clip_gate_follows_from_the_schemes(sparse, compression, limit):
    found = find_compression([scheme(sparse=s) for s in sparse])
    assert found is compression
    assert Limits().clip_loss(found) == limit
    assert Limits().clip_loss(Compression.SPARSE) == 2.0


def test_gates_compare_the_mean_strictly():
    comparison = compare(made_pairs(prompts=("a",) * 4), Backbones(small_lpips(), fake_clip()))
    ssim = comparison.scores["ssim"].summary.mean
    at = judge(comparison, Limits(ssim=ssim, lpips=9.0, clip_fp8=50.0), Compression.QUANTIZED)
    below = judge(
        comparison, Limits(ssim=ssim - 1e-9, lpips=9.0, clip_fp8=50.0), Compression.QUANTIZED
    )
    assert [gate.passed for gate in at] == [False, True, True]
    assert not passed(at)
    assert passed(below)
    assert below[1].title == "LPIPS [two stages]"
    assert below[2].wanted == "< 50 %"
    assert below[0].settled is False
    assert below[1].settled is True


def test_a_gate_that_was_not_measured_neither_passes_nor_fails():
    gates = judge(compare(made_pairs(), Backbones()), Limits(ssim=0.0), Compression.QUANTIZED)
    assert [gate.passed for gate in gates] == [True, None, None]
    assert gates[1].note == "not measured"
    assert passed(gates)
    assert not passed(gates[1:])
    assert (
        judge(compare(made_pairs(), Backbones()), Limits(None, None, None), Compression.QUANTIZED)
        == ()
    )


def test_a_clip_score_that_is_not_positive_is_not_judged():
    pairs = made_pairs(prompts=("a",) * 4)
    comparison = compare(pairs, Backbones(clip=fake_clip()))
    worthless = replace(
        comparison, clip=replace(comparison.clip, loss=replace(comparison.clip.loss, mean=None))
    )
    gate = judge(worthless, Limits(), Compression.QUANTIZED)[2]
    assert (gate.passed, gate.note) == (None, "the original's score is not positive")
