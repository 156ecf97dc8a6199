"""Rows of weights joined as the original layout has them."""

import pytest
import torch

from quantkit.interchange.joining import join
from quantkit.interchange.layout_names import OriginalTensor


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_rows_stand_in_the_order_of_their_parts(count, swapped):
    rows = torch.arange(24, dtype=torch.uint8).reshape(12, 2)
    original = OriginalTensor("a.weight", tuple("bcde"[:count]), swapped)
    found = join(original, rows.chunk(count))
    assert torch.equal(found, rows.roll(6, 0) if swapped else rows)


def test_a_part_alone_is_not_copied():
    rows = torch.zeros(4, 2)
    assert join(OriginalTensor("a.weight", ("b",), swapped=False), [rows]) is rows
