"""What is summed up of an input: by the compiled core, and by torch."""

from itertools import product

import pytest
import torch

from quantkit.calibration.observing import shared_input
from quantkit.calibration.observing.hooks import Collector
from quantkit.calibration.observing.shared_input import MeasuredInput
from quantkit.calibration.statistics.input_measure import _chunks, measure
from quantkit.device.backends import Backend, use
from quantkit.numerics.histogram import BINS, bin_edges
from tests.support.observed import Scheduler, layer_of

pytestmark = pytest.mark.usefixtures("two_threads")

#: shape and axis of the channels
INPUTS = {
    "rows": ((3, 50, 40), -1),
    "one number": ((1, 1), -1),
    "few channels": ((100, 3), -1),
    "a tail of channels": ((33, 77), -1),
    "many rows": ((1000, 8), -1),
    "wide": ((2, 5000), -1),
    "threads": ((700, 1000), -1),
    "picture": ((2, 5, 7, 9), 1),
    "large picture": ((1, 70, 80, 90), 1),
    "one pixel": ((4, 6, 1, 1), 1),
}


@pytest.mark.parametrize("last", [False, True], ids=["as it is", "channels last"])
@pytest.mark.parametrize("name", INPUTS)
def test_sums_are_those_of_float64(either_core, name, last):
    shape, axis = INPUTS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 3 + 0.5
    x.view(-1)[::7] *= 1e-6
    x.view(-1)[::11] = 0.0
    if last and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    found = measure(x, axis)
    rows = x.movedim(axis, -1).reshape(-1, shape[axis]).double()
    assert torch.equal(found.amax, rows.abs().amax(0).float())
    torch.testing.assert_close(found.sums[1], rows.square().sum(0), rtol=1e-6, atol=0)
    room = 1e-6 * float(rows.abs().sum(0).max())
    torch.testing.assert_close(found.sums[0], rows.sum(0), rtol=0, atol=room)
    assert found.count == len(rows)
    places = torch.bucketize(rows.abs().flatten(), bin_edges()[1:-1], right=True)
    wanted = torch.bincount(places, minlength=BINS).double()
    assert torch.equal(found.histogram, wanted)
    assert found.peaks is None
    again = measure(x, axis, peaks=True)
    assert torch.equal(again.peaks, x.reshape(len(x), -1).abs().amax(1))
    assert torch.equal(again.sums, found.sums)


def test_numbers_beyond_the_bins_are_in_the_ends(either_core):
    x = torch.tensor([[0.0, -0.0, 2.0**-24, 2.0**-25, 1e-45, 65504.0, 2.0**17, 3e38]])
    counts = measure(x, -1).histogram
    assert counts.sum() == 8
    assert (counts[0], counts[-1]) == (4, 2)


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 33, 76])
def test_what_is_not_finite_is_the_largest(either_core, value, place):
    x = torch.ones(50, 77)
    x[31, place] = value
    found = measure(x, -1)
    assert found.amax.isfinite().tolist() == [c != place for c in range(77)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_peaks_are_those_of_their_image(either_core, value):
    x = torch.ones(3, 4, 8)
    x[1, 2, 5] = value
    assert measure(x, -1, peaks=True).peaks.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("images", [1, 2, 7, 128, 5000])
def test_parts_of_a_launch_end_where_images_do(images):
    """As ``observe_columns`` cuts them: of ceil(rows / parts) rows."""
    for own, channels in product([1, 2, 77, 4096, 4097], [8, 320, 10240]):
        rows = images * own
        parts = _chunks(rows, channels, images)
        assert 1 <= parts <= max(512, images)
        if images > 1:
            assert parts % images == 0
            assert own % -(-rows // parts) == 0
            assert -(-rows // parts) * parts == rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_is_that_of_its_float32(dtype):
    x = torch.randn(64, 48).to(dtype)
    found, wanted = measure(x, -1), measure(x.float(), -1)
    for field in ("amax", "histogram"):
        assert torch.equal(getattr(found, field), getattr(wanted, field))
    torch.testing.assert_close(found.sums[1], wanted.sums[1], rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", INPUTS)
def test_a_gpu_measures_what_torch_does(name, dtype):
    shape, axis = INPUTS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    for layout in (x, x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x):
        found = measure(layout, axis)
        apart = measure(layout, axis, peaks=True)
        assert torch.equal(apart.peaks, layout.flatten(1).abs().amax(1).float())
        assert torch.equal(apart.histogram, found.histogram)
        torch.testing.assert_close(apart.sums, found.sums, rtol=1e-5, atol=1e-3)
        with use(Backend.REFERENCE):
            wanted = measure(layout, axis)
        assert torch.equal(found.amax, wanted.amax)
        assert torch.equal(found.histogram, wanted.histogram)
        assert found.count == wanted.count
        torch.testing.assert_close(found.sums[1], wanted.sums[1], rtol=1e-6, atol=0)
        room = 1e-6 * float(x.double().abs().sum())
        torch.testing.assert_close(found.sums[0], wanted.sums[0], rtol=0, atol=room)


def test_odd_layouts_are_torchs(either_core):
    x = torch.randn(6, 50, 8).transpose(0, 1)[::2]
    rows = x.reshape(-1, 8).double()
    found = measure(x, -1)
    torch.testing.assert_close(found.sums[1], rows.square().sum(0), rtol=1e-6, atol=0)


def test_layers_of_one_input_share_what_is_known():
    x = torch.randn(4, 6)
    seen = MeasuredInput.of(x, -1)
    assert seen.is_of(x, -1)
    assert seen.is_of(x.detach(), -1)
    assert not seen.is_of(x, 0)
    assert not seen.is_of(x.clone(), -1)
    assert not seen.is_of(x[:2], -1)
    x[0, 0] = 7
    assert not seen.is_of(x, -1)
    with torch.inference_mode():
        unknown = torch.randn(4, 6)
        assert not MeasuredInput.of(unknown, -1).is_of(unknown, -1)


class Heads(torch.nn.Module):
    """Three layers, of which two read one input."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(6, 4) for _ in range(3))

    def forward(self, sample, timestep):
        return self.q(sample) + self.k(sample) + self.v(sample * 2)


def test_an_input_that_layers_share_is_measured_once(monkeypatch):
    counted = []
    monkeypatch.setattr(
        shared_input,
        "measure",
        lambda x, axis, **more: counted.append(x.shape) or measure(x, axis, **more),
    )
    denoiser, layers = Heads(), [layer_of(name, "linear", (4, 6)) for name in "qkv"]
    collector = Collector("unet", denoiser, layers, 1)
    inputs = [torch.randn(2, 40, 6) for _ in range(3)]
    with torch.no_grad(), collector.attached(Scheduler(5.0), lambda calls: None):
        for x in inputs:
            denoiser(x, 5.0)
    assert len(counted) == 2 * len(inputs)
    found = collector.statistics()
    rows = torch.cat(inputs).reshape(-1, 6).double()
    for name, scale in (("q", 1), ("k", 1), ("v", 2)):
        wanted = (rows * scale).square().mean(0, keepdim=True).float()
        torch.testing.assert_close(found[name].second_moment, wanted, rtol=1e-5, atol=0)
        assert torch.equal(found[name].amax[0], rows.abs().amax().float() * scale)
    assert torch.equal(found["q"].samples, found["k"].samples)
    assert torch.equal(found["q"].samples * 2, found["v"].samples)
