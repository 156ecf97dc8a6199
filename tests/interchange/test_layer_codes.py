"""Codes under one scale instead of many."""

import pytest
import torch

from quantkit.interchange.layer_codes import (
    LayerCodes,
    are_powers_of_two,
    joined_codes,
    nearest_codes,
    under_one_scale,
)
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.granularity import PerChannel
from tests.support.near_ties import near_ties


def layer(values, scale):
    rows = torch.tensor(values)
    return LayerCodes(E4M3FN, rows.to(torch.float8_e4m3fn), torch.tensor(scale))


def test_values_are_the_same_under_the_largest_scale():
    before = layer([[448.0, 1.75], [-416.0, 0.5]], [0.25, 8.0])
    after = under_one_scale(before)
    assert after.one_scale == 8.0
    assert torch.equal(after.values(), before.values())


def test_codes_that_become_subnormal_are_rounded_to_the_nearest():
    # 1.125 * 2**-6 is 9/8 of the smallest normal; an eighth of it has steps of 2**-9.
    before = layer([[1.125 * 2**-6], [448.0]], [1.0, 8.0])
    after = under_one_scale(before)
    assert after.codes[0].float().item() == 2**-9
    assert torch.equal(after.values()[1], before.values()[1])


def test_a_channel_of_zeros_does_not_decide_the_scale():
    # Its scale is 1, whatever the others are; 2**-12 is less than all steps of e4m3 under that.
    before = layer([[0.0, -0.0], [448.0, 1.0]], [1.0, 2.0**-12])
    after = under_one_scale(before)
    assert after.one_scale == 2.0**-12
    assert torch.equal(after.values(), before.values())
    nothing = under_one_scale(layer([[0.0], [0.0]], [1.0, 2.0]))
    assert torch.equal(nothing.values(), torch.zeros(2, 1))
    assert nothing.one_scale == 1.0


def test_joined_layers_keep_their_scales():
    joined = joined_codes([layer([[1.0]], [1.0]), layer([[-2.0]], [2.0])])
    assert joined.values().tolist() == [[1.0], [-4.0]]


@pytest.mark.parametrize("fmt", [INT8, E4M3FN], ids=str)
def test_codes_are_those_nearest_to_a_quotient(fmt):
    """Near ties a product with the reciprocal has another one. Quotients are numpy's, float32."""
    amax = torch.tensor([3.3, 0.7, 1.9])
    rows = torch.stack([near_ties(value / fmt.max, fmt)[:24] for value in amax])
    rows[:, 0] = amax
    found = nearest_codes(rows, fmt, PerChannel(), rule="amax")
    assert torch.equal(found.scale, amax / fmt.max)
    quotients = torch.from_numpy(rows.numpy() / found.scale.numpy()[:, None])
    wanted = quotients.round().to(torch.int8) if fmt is INT8 else quotients.to(fmt.torch_dtype)
    assert torch.equal(found.codes.float(), wanted.float())


def test_powers_of_two_are_told():
    assert are_powers_of_two(torch.tensor([1.0, 0.5, 2.0**-149, 2.0**127]))
    assert not are_powers_of_two(torch.tensor([1.0, 0.75]))
    assert not are_powers_of_two(torch.tensor([1.0 + 2**-23]))
