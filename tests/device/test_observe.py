"""Sums and histograms of what a layer reads, by kernels: tails, empty chunks, values not finite."""

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.ops import call as execute
from quantkit.device.ops.table import OPS
from quantkit.errors import ShapeError
from quantkit.numerics.histogram import BINS, bin_edges
from tests.support.kernel_cases import need

#: rows and columns, chunks of rows
COLUMNS = {
    "one row": ((1, 8), 1),
    "a tail of rows": ((37, 264), 4),
    "chunks without rows": ((5, 16), 4),
    "a tail of lanes": ((130, 320), 2),
}
#: pictures, channels, pixels
PICTURES = {
    "one pixel": (3, 5, 1),
    "rows off 16 bytes": (2, 9, 63),
    "whole runs": (1, 8, 512),
    "several turns": (1, 3, 1300),
}


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


def numbers(*shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    x.view(-1)[::5] *= 1e-6
    x.view(-1)[::7] = 0
    return x.to(dtype)


def bins_of(x):
    places = torch.bucketize(x.double().abs().flatten(), bin_edges()[1:-1], right=True)
    return torch.bincount(places, minlength=BINS)


def assert_sums(found, x, axis):
    """Hold amax, sum and squares (3, C) against float64."""
    x = x.double()
    assert torch.equal(found[0], x.abs().amax(axis).float())
    size = x.abs().sum(axis)
    assert ((found[1] - x.sum(axis)).abs() <= 1e-6 * size).all()
    torch.testing.assert_close(found[2].double(), x.square().sum(axis), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_those_of_float64(name, dtype):
    (rows, columns), chunks = COLUMNS[name]
    x = numbers(rows, columns, dtype=dtype)
    sums, counts = execute.call(OPS["observe_columns"], x, chunks)
    parts = x.split(-(-rows // chunks))
    for found, part in zip(sums, parts, strict=False):
        assert_sums(found, part, 0)
    assert not sums[len(parts) :].any()
    slabs = [slab for part in parts for slab in part.split(256, dim=1)]
    assert torch.equal(counts[: len(slabs)], torch.stack([bins_of(s) for s in slabs]).int())
    assert not counts[len(slabs) :].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_of_float64(name, dtype):
    x = numbers(*PICTURES[name], dtype=dtype)
    sums, counts = execute.call(OPS["observe_pictures"], x)
    for found, picture in zip(sums, x, strict=True):
        assert_sums(found, picture, 1)
    blocks = [block for picture in x for block in picture.split(8)]
    assert torch.equal(counts, torch.stack([bins_of(block) for block in blocks]).int())


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layout", ["columns", "pictures"])
def test_what_is_not_finite_stands_above_all_others(layout, value):
    x = torch.ones(40, 24, dtype=torch.float16)
    x[31, 17] = value
    if layout == "columns":
        sums, counts = execute.call(OPS["observe_columns"], x, 1)
    else:
        sums, counts = execute.call(OPS["observe_pictures"], x.t().unsqueeze(0))
    assert sums[0, 0].isfinite().tolist() == [c != 17 for c in range(24)]
    assert counts.sum(0)[-1] == 1
    assert counts.sum() == x.numel()


@pytest.mark.parametrize(
    ("op", "shape", "options"),
    [("columns", (4,), (1,)), ("columns", (4, 8), (0,)), ("pictures", (4, 8), ())],
)
def test_other_shapes_are_refused(op, shape, options):
    with pytest.raises(ShapeError, match=f"observe_{op}: x is "):
        execute.call(OPS[f"observe_{op}"], torch.zeros(shape), *options)
