"""Codes of a table, against comfy-kitchen's reading of them and a search by hand."""

import pytest
import torch

from quantkit.numerics.codebook_int4 import (
    GROUP,
    TABLE,
    CodebookGrid,
    pack_pairs,
    table_values,
    unpack_pairs,
)


def drawn(kind):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(24, 96, generator=generator)
    return {
        "normal": normal,
        "heavy": normal / torch.rand(24, 96, generator=generator).clamp(min=1e-3),
        "zero": torch.zeros(24, 96),
        "a row of zeros": normal * (torch.arange(24) != 3).unsqueeze(1),
        "a group of zeros": normal * (torch.arange(96) >= GROUP),
        "tiny": normal * 1e-30,
        "large": normal * 1e30,
        "equal": torch.ones(24, 96),
    }[kind]


KINDS = (
    "normal", "heavy", "zero", "a row of zeros", "a group of zeros", "tiny", "large", "equal",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_that_comfy_kitchen_reads(kind):
    from comfy_kitchen.backends.eager.w4a8_int8 import _dequant_int4_grouped_to_int8
    from comfy_kitchen.tensor import AsymW4A8Int8Layout

    assert torch.equal(TABLE, AsymW4A8Int8Layout.quantize(torch.ones(16, 256))[1].codebook)
    rows = drawn(kind)
    grid = CodebookGrid.choose(rows)
    packed = pack_pairs(grid.codes(rows))
    theirs = _dequant_int4_grouped_to_int8(packed, grid.groups, TABLE, GROUP).float()
    assert torch.equal(table_values(packed, grid.groups), theirs)
    found = theirs * grid.channels.unsqueeze(1)
    assert bool(found.isfinite().all())
    assert bool((grid.channels > 0).all())
    # Heavy tails are for a rotation to take. Zeros are zeros.
    most = 0.2 if kind == "heavy" else 0.12
    assert (found - rows).double().norm() <= most * rows.double().norm()
    assert bool((found[rows == 0] == 0).all()) or kind in {"normal", "heavy"}


def test_codes_are_the_nearest_of_the_grid():
    rows = drawn("normal")
    grid = CodebookGrid.choose(rows)
    all_codes = torch.arange(16, dtype=torch.uint8).reshape(16, 1, 1).expand(16, *rows.shape)
    levels = torch.stack([table_values(pack_pairs(codes), grid.groups) for codes in all_codes])
    values = levels * grid.channels.unsqueeze(1)
    least = (values - rows).abs().amin(dim=0)
    found = table_values(pack_pairs(grid.codes(rows)), grid.groups) * grid.channels.unsqueeze(1)
    assert torch.equal((found - rows).abs(), least)
    # Column by column, as GPTQ asks for them.
    columns = [grid.round(rows[:, k], grid.scale[:, k]) for k in range(rows.shape[1])]
    assert torch.equal(torch.stack(columns, dim=1), found)
    assert torch.equal(grid.codes(found), grid.codes(rows))


def test_pairs_come_back():
    codes = torch.arange(256, dtype=torch.uint8).reshape(4, 64) % 16
    assert torch.equal(unpack_pairs(pack_pairs(codes)), codes)
    # The even column in the low half.
    assert pack_pairs(torch.tensor([[1, 2]], dtype=torch.uint8)).item() == 0x21
