"""Second moments of 3x3 windows, from products of pixels: those of the windows, unfolded."""

import pytest
import torch
from torch import nn
from torch.nn.functional import unfold

from quantkit.calibration.neighbours import NeighbourSums, reads_neighbours

ON_A_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
)
#: pictures, channels, height and width: single pixels and lines, and on a GPU parts of 512 pixels,
#: several at once, with and without tails
SIZES = [(2, 5, 6, 7), (1, 3, 1, 1), (3, 4, 1, 5), (2, 4, 5, 1), (2, 4, 2, 2), (3, 24, 40, 37)]
LARGE = [(2, 24, 64, 63), (1, 320, 96, 96), (2, 136, 30, 30)]


def windows_of(x):
    """Return all windows, (rows, 9 C), channels last, float64."""
    rows = unfold(x.double(), 3, padding=1).movedim(1, -1).reshape(-1, x.shape[1], 9)
    return rows.transpose(1, 2).flatten(1)


def summed(pictures, weights):
    total = NeighbourSums(pictures[0].shape[1], pictures[0].device)
    rows = sum(map(total.add, pictures, weights))
    return rows, *total.totals()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES + [pytest.param(s, marks=ON_A_GPU) for s in LARGE], ids=str)
def test_sums_are_those_of_the_windows(size, dtype, device):
    generator = torch.Generator().manual_seed(0)
    pictures = [(torch.randn(size, generator=generator) + 0.5).to(device, dtype) for _ in range(2)]
    weights = (0.5, 2.0)
    rows, second, mean = summed(pictures, weights)
    windows = [windows_of(x) for x in pictures]
    wanted = sum(w * (x.t() @ x) for x, w in zip(windows, weights, strict=True))
    assert rows == sum(map(len, windows))
    assert torch.equal(second, second.t())
    assert bool((second.diagonal() >= 0).all())
    # Taps that read nothing but zeros are differences of equal sums, up to rounding.
    scale = wanted.diagonal().sqrt().clamp(min=float(wanted.diagonal().max().sqrt()) / 2)
    assert float(((second - wanted).abs() / (scale.unsqueeze(1) * scale)).max()) < 4e-6
    sums = sum(w * x.sum(dim=0) for x, w in zip(windows, weights, strict=True))
    torch.testing.assert_close(mean, sums, rtol=1e-9, atol=1e-9)


def test_pictures_that_lie_channels_last_are_the_same():
    x = torch.randn(2, 8, 5, 6)
    one, other = (summed([t], [1.0]) for t in (x, x.to(memory_format=torch.channels_last)))
    assert torch.equal(one[1], other[1])
    assert torch.equal(one[2], other[2])


def test_nan_is_not_lost():
    x = torch.zeros(1, 2, 4, 4)
    x[0, 1, 3, 0] = torch.nan
    assert summed([x], [1.0])[1].isnan().any()


@pytest.mark.parametrize(
    "changed",
    [
        {"kernel_size": 1, "padding": 0},
        {"kernel_size": 5},
        {"stride": 2},
        {"padding": 0},
        {"padding": "same"},
        {"dilation": 2},
        {"groups": 2},
        {"padding_mode": "reflect"},
    ],
    ids=str,
)
def test_other_convolutions_are_unfolded(changed):
    assert reads_neighbours(nn.Conv2d(4, 4, 3, padding=1))
    assert not reads_neighbours(nn.Conv2d(4, 4, **{"kernel_size": 3, "padding": 1, **changed}))
    assert not reads_neighbours(nn.Linear(4, 4))
