"""Factors and codes of queries, keys and values, against numpy, ml_dtypes and torch's attention."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from quantkit.errors import RecipeError
from quantkit.numerics.attention_factors import (
    attention_codes,
    cut_to_float16,
    head_factors,
    int8_codes,
    score_factor,
    unit_factors,
    value_codes,
)
from quantkit.numerics.attention_formats import ATTENTION_FORMATS, attention_format
from quantkit.numerics.attention_limits import takes_heads
from quantkit.numerics.attention_scales import AttentionScales, scales_of_ranges

LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


@pytest.mark.parametrize("tau", [1e-3, 0.18, 1.0, 4.0])
@pytest.mark.parametrize("keys", [1e-3, 1.0, 300.0, 1e4, 1e6])
@pytest.mark.parametrize("queries", [1e-3, 1.0, 300.0, 1e4, 1e6])
def test_factors_stay_within_the_format(queries, keys, tau):
    a, b = (float(f) for f in unit_factors(torch.tensor(queries), torch.tensor(keys), tau))
    room = 1 + 1e-5
    assert a * queries <= LARGEST * room
    assert b * keys <= LARGEST * room
    if tau * queries * keys <= LARGEST**2:
        assert a * b == pytest.approx(tau, rel=1e-5)
    else:
        # Scores beyond 448 * 448 are held to it: both sides spend all of their range.
        assert (a * queries, b * keys) == pytest.approx((LARGEST, LARGEST), rel=1e-5)


def test_keys_of_scores_beyond_the_format_keep_their_order():
    """448 * 448 is 2e5; the largest score here is 4e5, in powers of two."""
    keys = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.25, -0.25]).repeat(16, 1).T[None] * 600.0
    queries = torch.full((1, 2, 16), 600.0)
    assert 600 * 600 * score_factor(16, 0.8) > 2 * LARGEST**2
    codes = attention_codes(queries, keys, keys, scale=0.8)
    found = codes.k.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)[0, :, 0]
    assert found.tolist() == [448, -448, 224, -224, 112, -112]
    assert (codes.q.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32) == 448).all()


@pytest.mark.parametrize(
    ("columns", "taken"),
    [(-8, False), (0, False), (4, False), (8, True), (12, False), (160, True), (161, False),
     (168, False)],
)  # fmt: skip
def test_heads_are_taken_up_to_160_columns_in_steps_of_eight(columns, taken):
    assert takes_heads(columns) is taken


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("columns", [24, 64])
def test_powers_of_two_of_scores_are_torchs_softmax(columns, scale):
    q, k = torch.randn(2, 7, columns, generator=torch.Generator().manual_seed(0))
    powers = torch.exp2(score_factor(columns, scale) * (q @ k.T))
    wanted = torch.softmax(q @ k.T * (columns**-0.5 if scale is None else scale), 1)
    torch.testing.assert_close(powers / powers.sum(1, keepdim=True), wanted)


HEADS = 2


def heads(seed=0, rows=35, columns=24):
    """Return (N, R, D) of two pictures, a mean and a factor of their heads, float32."""
    rng = np.random.default_rng(seed)
    t = rng.normal(1.0, 2.0, (2 * HEADS, rows, columns)).astype(np.float32)
    mean = rng.normal(size=(HEADS, columns)).astype(np.float32)
    return t, mean, np.array([0.7, 5.0], np.float32)


def tensor(array):
    return None if array is None else torch.from_numpy(array)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("group", [1, 16])
def test_int8_codes_are_those_of_numpy(group, centred):
    """A row beyond the last whole group, a group of zeros, and one with NaN."""
    t, mean, factor = heads()
    mean = mean if centred else None
    t[0, :16] = 0 if mean is None else mean[0]
    t[1, 20, 3] = np.nan
    codes, scale = int8_codes(tensor(t), tensor(mean), tensor(factor), group)
    by_picture = t.reshape(2, HEADS, *t.shape[1:])
    values = (by_picture if mean is None else by_picture - mean[:, None]) * factor[:, None, None]
    values = values.reshape(t.shape)
    for n, head in enumerate(values):
        for place, first in enumerate(range(0, len(head), group)):
            rows = slice(first, first + group)
            own = np.abs(head[rows]).max() / np.float32(127)
            own = np.float32(1) if own == 0 else own
            assert scale[n, place] == own or np.isnan([scale[n, place], own]).all()
            if not np.isnan(own):
                wanted = np.round(head[rows] / own).astype(np.int8)
                assert codes[n, rows].view(torch.int8).tolist() == wanted.tolist()
    assert scale.shape == (len(t), -(-t.shape[1] // group))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("pv", ["e4m3fn", None])
def test_codes_of_values_are_those_of_numpy(pv, centred):
    """Saturated, transposed, with zeros up to a multiple of 16; the least scale has no inverse."""
    t, mean, _ = heads()
    mean = mean if centred else None
    scale = np.random.default_rng(1).uniform(1e-3, 2.0, (HEADS, t.shape[2])).astype(np.float32)
    scale[0, :2] = np.finfo(np.float32).smallest_subnormal, 1e-5
    t[0, 1, 2] = np.nan
    found = value_codes(tensor(t), tensor(mean), tensor(scale), pv)
    inverse = np.minimum(1 / scale.astype(np.float64), np.finfo(np.float32).max).astype(np.float32)
    by_picture = t.reshape(2, HEADS, *t.shape[1:])
    with np.errstate(over="ignore"):
        values = (by_picture if mean is None else by_picture - mean[:, None]) * inverse[:, None]
    largest = LARGEST if pv else 65504.0
    values = values.reshape(t.shape).clip(-largest, largest).swapaxes(1, 2)
    wanted = values.astype(ml_dtypes.float8_e4m3fn if pv else np.float16)
    assert found.shape == (len(t), t.shape[2], 48)
    assert not found[..., t.shape[1] :].any()
    ours = found[..., : t.shape[1]].numpy()
    ours = ours.view(ml_dtypes.float8_e4m3fn) if pv else ours
    np.testing.assert_array_equal(ours.astype(np.float32), wanted.astype(np.float32))


def test_float32_is_cut_to_the_next_float16_towards_zero():
    every = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (every[1:] + every[:-1]) / 2
    values = np.concatenate(
        [every, between, np.nextafter(every, np.float32(0)), [1e-9, 65519, 1e6]]
    )
    values = values.astype(np.float32)
    wanted = every[np.searchsorted(every, values, side="right") - 1]
    found = cut_to_float16(torch.from_numpy(values))
    assert found.float().tolist() == wanted.tolist()
    ends = cut_to_float16(torch.tensor([torch.inf, torch.nan]))
    assert (ends[0], bool(ends[1].isnan())) == (torch.inf, True)


@pytest.mark.parametrize("margin", [1.0, 2.0])
def test_scales_are_those_of_ranges_and_one_for_none(margin):
    q, k, v = torch.tensor([0.0, 1e-3]), torch.tensor([0.5, 0.0]), torch.tensor([[0.0, 1e-3, 3.0]])
    k_mean, v_mean = torch.full((2, 3), 4.0), torch.full((2, 3), 5.0)
    found = scales_of_ranges(q=q, k=k, k_mean=k_mean, v=v, v_mean=v_mean, margin=margin)
    assert torch.equal(found.query_range, torch.tensor([1.0, 1e-3 * margin]))
    assert torch.equal(found.key_range, torch.tensor([0.5 * margin, 1.0]))
    steps = torch.tensor([[1.0, 1e-3 * margin / LARGEST, 3.0 * margin / LARGEST]])
    torch.testing.assert_close(found.value_scale, steps, rtol=1e-6, atol=0)
    assert (found.key_mean is k_mean, found.value_mean is v_mean) == (True, True)


def test_every_pair_of_formats_has_its_row():
    assert [attention_format(row.qk, row.pv) for row in ATTENTION_FORMATS] == [*ATTENTION_FORMATS]
    names = {"e4m3fn", "int8", "e4m3fn-pv16", "int8-pv16"}
    assert {row.name for row in ATTENTION_FORMATS} == names
    with pytest.raises(RecipeError, match="qk 'int8' with pv 'int8', expected one of e4m3fn, int8"):
        attention_format("int8", "int8")


def scales_of_heads(columns):
    ones = torch.ones(HEADS, columns)
    return AttentionScales(
        torch.tensor([1.0, 40.0]), torch.tensor([2.0, 900.0]), 3 * ones, 5 * ones, 7 * ones
    )


@pytest.mark.parametrize("columns", [24, 32])
@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("fmt", ["e4m3fn", "int8"])
def test_factors_of_heads_are_those_of_each_head(fmt, scale, columns):
    given, tau = scales_of_heads(columns), score_factor(columns, scale)
    found = head_factors(given, columns, fmt, scale)
    if fmt == "int8":
        wanted = torch.full((HEADS,), tau), torch.ones(HEADS)
    else:
        wanted = unit_factors(given.query_range, given.key_range, tau)
    assert torch.equal(found.query, wanted[0])
    assert torch.equal(found.key, wanted[1])
    wide = [found.key_mean, found.value_scale, found.value_mean]
    for part, value, rest in zip(wide, (3, 5, 7), (0, 1, 0), strict=True):
        row = [value] * columns + [rest] * (32 - columns)
        assert part.tolist() == [row] * HEADS


@pytest.mark.parametrize("fmt", ["e4m3fn", "int8"])
@pytest.mark.parametrize("pv", ["e4m3fn", None])
def test_attention_of_codes_is_torchs_within_their_steps(fmt, pv):
    """Keys and values far from zero, 24 columns and 35 keys, which no tile divides."""
    q, k, v = (torch.from_numpy(heads(seed)[0]) for seed in range(3))
    k, v = k + 20, v - 30
    codes = attention_codes(q, k, v, qk_format=fmt, pv=pv)

    def numbers(t):
        if t.dtype == torch.float16:
            return t.float()
        kind = torch.int8 if fmt == "int8" and t is not codes.v else torch.float8_e4m3fn
        return t.view(kind).float()

    scores = numbers(codes.q) @ numbers(codes.k).mT
    if fmt == "int8":
        by_key = codes.k_scale.repeat_interleave(16, dim=1)[:, None, : k.shape[1]]
        scores = scores * codes.q_scale[..., None] * by_key
    shares = torch.softmax(scores * math.log(2), dim=2)
    values = numbers(codes.v)[..., : k.shape[1]] * codes.v_scale[..., None]
    found = (shares @ values.mT + codes.v_mean[:, None])[..., : v.shape[2]]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    error = (found - wanted).norm() / (wanted - v.mean(1, keepdim=True)).norm()
    # Steps of e4m3fn are an eighth to a sixteenth of a number, of int8 a 127th of the largest.
    assert error < (0.12 if fmt == "e4m3fn" else 0.03 if pv is None else 0.05)
