"""int4: bytes in GGML's order, factors within reach, and values that are int8 ones."""

import numpy as np
import pytest
import torch

from quantkit.numerics.formats import INT4
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.nibbles import (
    amax_factors,
    factors_are_legal,
    integer_codes,
    pack_nibbles,
    unpack_nibbles,
)
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.numerics.weight_grid import WeightGrid

SCHEME = Scheme(INT4, PerChannel(), None, Activation.TOKEN)


def test_a_block_is_ggmls():
    codes = torch.arange(-8, 24).clamp(max=7).reshape(1, 32).to(torch.int8)
    codes[0, 16:] = torch.arange(7, -9, -1)
    packed = pack_nibbles(codes)
    # Byte i: code i below, code i + 16 above, each plus 8.
    assert packed.tolist() == [[i | (15 - i) << 4 for i in range(16)]]
    assert torch.equal(unpack_nibbles(packed), codes)


def test_a_block_of_kept_codes_is_half_as_long():
    codes = torch.arange(-8, 8).reshape(1, 16).to(torch.int8)
    packed = pack_nibbles(codes, 16)
    assert packed.tolist() == [[i | (i + 8) << 4 for i in range(8)]]
    assert torch.equal(unpack_nibbles(packed, 16), codes)
    factor = torch.tensor([[-15]], dtype=torch.int8)
    assert torch.equal(integer_codes(packed, factor), codes * -15)


def test_every_byte_comes_back_and_every_product_is_an_int8():
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)
    for factor in (*range(-15, 0), *range(1, 16)):
        group = torch.full((16, 1), factor, dtype=torch.int8)
        wide = unpack_nibbles(packed).int() * factor
        assert torch.equal(integer_codes(packed, group).int(), wide)
        assert int(wide.abs().max()) <= 120


def rows_of(kind):
    generator = torch.Generator().manual_seed(8)
    rows = torch.randn(5, 128, generator=generator)
    if kind == "outliers":
        rows[:, ::37] *= 30
    if kind == "zeros":
        rows[1] = 0
        rows[2, 32:64] = 0
    if kind == "tiny":
        rows *= 1e-30
    if kind == "one sign":
        rows = rows.abs()
    return rows


KINDS = ["normal", "outliers", "zeros", "tiny", "one sign"]


@pytest.mark.parametrize("kind", KINDS)
def test_factors_clip_nothing_and_are_the_least(kind):
    rows = rows_of(kind)
    scale, factors = amax_factors(rows)
    assert factors_are_legal(factors)
    assert bool((scale > 0).all())
    reach = factors.float().abs() * scale.unsqueeze(1) * 8
    largest = rows.reshape(5, -1, 32).abs().amax(dim=2)
    assert bool((reach >= largest * (1 - 1e-6)).all())
    less = (factors.float().abs() - 1) * scale.unsqueeze(1) * 8
    assert bool((less < largest * (1 + 1e-6)).logical_or(factors.abs() == 1).all())
    if kind == "zeros":
        assert scale[1] == 1
        assert bool((factors[1] == 1).all())


def test_error_is_that_of_four_bits():
    rows = torch.randn(64, 512, generator=torch.Generator().manual_seed(2))
    grid = WeightGrid.choose(rows, SCHEME, "mse")
    share = float((grid.round(rows) - rows).square().mean() / rows.square().mean())
    # Of normal numbers in groups of 32: 4 bits lose 0.6 to 0.9 %, 5 bits a quarter of that.
    assert 0.004 < share < 0.009


def test_factors_of_zero_and_beyond_15_are_no_factors():
    for factor in (0, 16, -16, -128):
        assert not factors_are_legal(torch.tensor([[1, factor]], dtype=torch.int8))
    assert factors_are_legal(torch.from_numpy(np.array([[1, -1, 15, -15]], np.int8)))
