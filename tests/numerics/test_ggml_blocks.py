import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.numerics.block_scales import choose_block_scales
from quantkit.numerics.formats import Q4_0, Q8_0
from quantkit.numerics.ggml_blocks import block_bytes, join_blocks, split_blocks
from quantkit.numerics.granularity import PerGroup
from quantkit.numerics.nibbles import pack_nibbles, unpack_nibbles
from quantkit.numerics.scales import dequantize
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.numerics.weight_grid import WeightGrid

KINDS = {Q4_0: gguf.GGMLQuantizationType.Q4_0, Q8_0: gguf.GGMLQuantizationType.Q8_0}
both = pytest.mark.parametrize("fmt", KINDS, ids=lambda fmt: fmt.name)
#: d of every class: zeros, denormals, ordinary, the largest, infinities, NaNs, either sign
POSITIVE = (0x0000, 0x0001, 0x03FF, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF)
SCALES = (*POSITIVE, *(bits | 0x8000 for bits in POSITIVE))


def values_of(codes, scale, fmt):
    whole = codes if fmt.codes_per_byte == 1 else unpack_nibbles(codes)
    return dequantize(whole, scale, PerGroup(fmt.block))


@both
def test_a_block_is_of_ggmls_size(fmt):
    assert (fmt.block, block_bytes(fmt)) == gguf.GGML_QUANT_SIZES[KINDS[fmt]]


@both
@given(data=st.data())
def test_blocks_of_any_bytes_come_back(fmt, data):
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    size = block_bytes(fmt)
    content = bytearray(data.draw(st.binary(min_size=(n := rows * columns * size), max_size=n)))
    for start in range(0, n, size):
        d = data.draw(st.one_of(st.sampled_from(SCALES), st.integers(0, 0xFFFF)))
        content[start : start + 2] = d.to_bytes(2, "little")
    blocks = torch.frombuffer(content, dtype=torch.uint8).reshape(rows, -1)
    codes, scale = split_blocks(blocks, fmt)
    assert scale.shape == (rows, columns)
    assert join_blocks(codes, scale, fmt).numpy().tobytes() == bytes(content)
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(blocks.numpy(), KINDS[fmt])
    assert np.array_equal(values_of(codes, scale, fmt).numpy(), wanted, equal_nan=True)


@both
def test_every_d_comes_back(fmt):
    blocks = torch.randint(256, (1 << 16, block_bytes(fmt)), dtype=torch.uint8)
    blocks[:, :2] = torch.arange(1 << 16).to(torch.uint16).view(torch.uint8).reshape(-1, 2)
    assert torch.equal(join_blocks(*split_blocks(blocks, fmt), fmt), blocks)


@both
@pytest.mark.parametrize("observer", ["amax", "mse"])
def test_weights_are_no_further_off_than_ggmls(fmt, observer):
    rows = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) * 0.05
    theirs = gguf.dequantize(gguf.quantize(rows.numpy(), KINDS[fmt]), KINDS[fmt])
    grid = WeightGrid.choose(rows, Scheme(fmt, PerGroup(32), None, Activation.NONE), observer)
    mine = grid.round(rows)
    assert torch.equal(grid.scale, grid.scale.half().float())
    # Of 255 codes the largest value loses nothing; of 16 a smaller scale is worth some clipping.
    bound = 0.97 if observer == "mse" and fmt is Q4_0 else 1.01
    assert (mine - rows).square().sum() <= bound * (torch.tensor(theirs) - rows).square().sum()


@both
@pytest.mark.parametrize("observer", ["amax", "mse"])
def test_scales_are_never_zero_nor_infinite(fmt, observer):
    rows = torch.zeros(4, 32)
    rows[1] = 1e-30
    rows[2, 5], rows[3, 7] = -3e38, 3e38
    scale = choose_block_scales(rows, fmt, observer)
    assert scale.isfinite().all()
    assert (scale != 0).all()
    assert scale[:2].tolist() == [[1.0], [1.0]]


def test_columns_that_cost_more_are_met_better():
    rows = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    power = torch.ones(32)
    power[3] = 1000.0
    errors = []
    for cost in (None, power):
        scale = choose_block_scales(rows, Q4_0, "mse", cost)
        grid = WeightGrid(Q4_0, PerGroup(32), scale)
        errors.append(float((grid.round(rows) - rows)[:, 3].square().sum()))
    assert errors[1] < errors[0]


def test_nibbles_lie_as_ggml_has_them():
    codes = torch.arange(32, dtype=torch.int8).remainder(16) - 8
    blocks = gguf.quantize(codes.float().reshape(1, 32).numpy(), KINDS[Q4_0])
    stored, scale = split_blocks(torch.from_numpy(blocks), Q4_0)
    assert scale.item() == 1.0
    assert torch.equal(stored, pack_nibbles(codes.reshape(1, 32)))
