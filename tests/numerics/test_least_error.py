"""Scales, factors and blocks are the best of what FORMAT.md says is tried: by brute force."""

import numpy as np
import pytest
import torch

from quantkit.numerics.block_scales import choose_block_scales
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor, scale_shape
from quantkit.numerics.least_error import choose_scale
from quantkit.numerics.nibbles import amax_factors, mse_factors
from quantkit.numerics.scale_rules import WEIGHT_SCALES
from quantkit.numerics.squared_error import add_in_order
from tests.support.brute_force import (
    KINDS,
    RULES,
    factor_loss,
    least_block_loss,
    least_factor_loss,
    least_loss,
    loss_of,
    rows_of,
    tried_scales,
)

every_kind = pytest.mark.parametrize("kind", KINDS)


def close(least):
    """Sums of 768 float64 terms, added in another order."""
    return pytest.approx(least, rel=1e-12, abs=0)


@every_kind
@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "int8"])
@pytest.mark.parametrize("rule", WEIGHT_SCALES)
def test_scales_are_the_best_of_what_the_rule_tries(kind, fmt, rule):
    rows = rows_of(kind)
    for granularity in (PerTensor(), PerChannel(), PerGroup(32), PerGroup(16), PerGroup(3)):
        shape = scale_shape(granularity, *rows.shape)
        groups = rows.reshape(max(1, int(np.prod(shape))), -1)
        found = choose_scale(torch.from_numpy(rows), FORMATS[fmt], granularity, rule)
        assert (found.dtype, found.shape) == (torch.float32, shape)
        for group, scale in zip(groups, found.flatten().numpy(), strict=True):
            assert scale in tried_scales(group, fmt, rule)
            assert loss_of(group, scale, fmt) == close(least_loss(group, fmt, rule))


def test_every_rule_is_tried_by_brute_force():
    assert WEIGHT_SCALES.keys() == RULES.keys()


@every_kind
@pytest.mark.parametrize("costly", [False, True], ids=["plain", "costs"])
def test_factors_of_int4_are_the_best_of_six_of_either_sign(kind, costly):
    rows = rows_of(kind)
    power = np.linspace(0.1, 3, 96) ** 4 if costly else np.ones(96)
    scale, factors = mse_factors(
        torch.from_numpy(rows), torch.from_numpy(power) if costly else None
    )
    wanted, _ = amax_factors(torch.from_numpy(rows))
    assert torch.equal(scale, wanted)
    for row, step, mine in zip(rows, scale.numpy(), factors.tolist(), strict=True):
        for group, factor, costs in zip(
            row.reshape(3, 32), mine, power.reshape(3, 32), strict=True
        ):
            least = least_factor_loss(group, step, costs)
            assert factor_loss(group, step, factor, costs) == close(least)


@every_kind
@pytest.mark.parametrize("costly", [False, True], ids=["plain", "costs"])
@pytest.mark.parametrize("fmt", ["q4_0", "q8_0"])
def test_blocks_have_the_best_scale_of_the_grid(kind, costly, fmt):
    if kind in {"tiny", "huge"}:
        pytest.skip("float16 scales hold neither")
    rows = rows_of(kind)
    power = np.linspace(0.1, 3, 96) ** 4 if costly else np.ones(96)
    costs = torch.from_numpy(power) if costly else None
    found = choose_block_scales(torch.from_numpy(rows), FORMATS[fmt], "mse", costs)
    for row, mine in zip(rows, found.numpy(), strict=True):
        for block, d, own in zip(row.reshape(3, 32), mine, power.reshape(3, 32), strict=True):
            if block.any():
                least = least_block_loss(block, fmt, own)
                assert loss_of(block, d, fmt, costs=own) == close(least)


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "int8"])
@pytest.mark.parametrize("rule", WEIGHT_SCALES)
@pytest.mark.parametrize("units", [1, 7, 224, 300, 500, 40_000, 100_000])
def test_scales_of_subnormal_weights_are_positive(fmt, rule, units):
    rows = np.float32(2.0**-149) * np.array([[units, -units, 0, 1], [0, 0, 0, 0]], np.float32)
    for granularity in (PerTensor(), PerChannel(), PerGroup(2)):
        found = choose_scale(torch.from_numpy(rows), FORMATS[fmt], granularity, rule)
        assert bool((found > 0).all())
        assert bool(found.isfinite().all())


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 100, 320, 1000])
def test_sums_do_not_depend_on_the_neighbours(count):
    terms = torch.rand(count, 3, 2, dtype=torch.float64)
    found = add_in_order(terms.clone())
    torch.testing.assert_close(found, terms.sum(dim=0), rtol=1e-14, atol=0)
    for i in range(3):
        assert torch.equal(add_in_order(terms[:, i].clone()), found[i])
