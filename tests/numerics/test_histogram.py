"""Histograms of inputs, and the percentiles read from them."""

import numpy as np
import pytest
import torch

from quantkit.numerics.histogram import (
    BINS,
    bin_edges,
    bin_index,
    count_bins,
    count_without_waiting,
    quantiles,
)
from tests.support.observed import SAMPLES, sample, statistics_of


def test_bins_agree_with_a_search_of_the_edges():
    edges = bin_edges()
    assert len(edges) == BINS + 1
    inner = edges[1:-1].float()
    values = torch.cat(
        (
            inner,
            torch.nextafter(inner, torch.tensor(0.0)),
            -inner,
            torch.tensor([0.0, -0.0, 1e-45, 65504.0, -1e30, torch.finfo(torch.float32).max]),
            torch.randn(5000) * 10,
        )
    )
    wanted = np.searchsorted(edges.numpy(), values.abs().double().numpy(), side="right") - 1
    assert bin_index(values).tolist() == wanted.tolist()


def test_bins_cover_float16_and_are_no_wider_than_a_sixteenth():
    edges = bin_edges()
    assert (edges[1], edges[-2]) == (2.0**-24, 2.0**17)
    assert float((edges[2:-1] / edges[1:-2]).max()) <= 1 + 1 / 16


def test_every_value_is_counted_once():
    x = torch.randn(33, 7)
    counts = count_bins(x)
    assert counts.sum() == x.numel()
    assert counts.tolist() == np.histogram(x.abs().double(), bin_edges().numpy())[0].tolist()
    assert count_bins(torch.empty(0)).sum() == 0


def test_both_ways_to_count_agree():
    index = torch.cat((torch.arange(BINS), torch.arange(0, BINS, 7))).int()
    assert count_without_waiting(index).tolist() == torch.bincount(index, minlength=BINS).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_gpu_counts_as_the_cpu_does():
    x = torch.randn(1 << 20) * 3
    assert torch.equal(count_bins(x.cuda()).cpu(), count_bins(x))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("percent", [0.1, 50.0, 99.0, 99.99, 100.0])
def test_percentile_is_torchs_within_a_bin(name, percent):
    x = sample(name)
    found = float(statistics_of(x).percentile(percent))
    low, high = (
        float(torch.quantile(x.abs().double(), percent / 100, interpolation=side))
        for side in ("lower", "higher")
    )
    assert low / (1 + 1 / 16) - 2.0**-24 <= found <= high * (1 + 1 / 16) + 2.0**-24
    if percent == 100:
        assert found == float(x.abs().amax())


@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_ranks_of_few_values_are_torchs(count):
    x = 2.0 ** torch.arange(count).double()
    for rank in range(count):
        share = rank / (count - 1)
        found = float(quantiles(count_bins(x.float())[None], x[-1:].float(), share))
        assert found == pytest.approx(float(torch.quantile(x, share)), rel=1 / 16)


def test_values_of_a_bin_are_spread_over_it():
    edges, place = bin_edges(), 200
    counts = torch.zeros(1, BINS, dtype=torch.int64)
    counts[0, place] = 10
    low, high = edges[place], edges[place + 1]
    for rank in range(10):
        found = quantiles(counts, edges[-1:], rank / 9)
        assert found.item() == pytest.approx(float(low + (high - low) * (rank + 1) / 10), rel=1e-12)


def test_percentiles_of_several_inputs_are_those_of_each():
    counts = torch.stack([count_bins(sample(name)) for name in SAMPLES])
    amax = torch.stack([sample(name).abs().amax() for name in SAMPLES])
    together = quantiles(counts, amax, 0.9)
    alone = [quantiles(counts[i : i + 1], amax[i : i + 1], 0.9) for i in range(len(SAMPLES))]
    assert len(SAMPLES) > 1
    assert torch.equal(together, torch.cat(alone))


def test_percentile_of_zeros_and_of_overflow():
    assert float(statistics_of(torch.zeros(5, 2)).percentile(99)) == 0.0
    assert float(statistics_of(torch.full((5, 2), 1e9)).percentile(100)) == 1e9
