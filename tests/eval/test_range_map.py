"""Layers by timestep: what of a static scale's range is unused, from what calibration stored."""

from dataclasses import replace

import pytest
import torch
from quantkit.eval.measuring.range_map import map_ranges

from quantkit.calibration.statistics.layer_statistics import Calibration
from tests.support.artefacts import statistics as layer_statistics


def statistics(*amax):
    buckets = len(amax)
    return replace(layer_statistics(2, buckets), amax=torch.tensor(amax, dtype=torch.float32))


def calibration(edges, **layers):
    return Calibration({"unet": {n: statistics(*v) for n, v in layers.items()}}, edges, None)


def test_bits_are_of_the_largest_bucket_and_run_from_noise_to_picture():
    found = map_ranges(calibration((250.0, 500.5), a=(1.0, 4.0, 8.0), b=(2.0, 2.0, 0.0)))
    assert found.timesteps == ("from 500.5", "250 to 500.5", "below 250")
    assert [(row.name, row.bits) for row in found.rows] == [
        ("a", (0.0, 1.0, 3.0)),
        ("b", (None, 0.0, 0.0)),
    ]
    assert found.most == 3.0


def test_one_bucket_tells_nothing_of_timesteps():
    assert map_ranges(calibration((), a=(1.0,))) is None


def test_a_layer_that_saw_nothing_has_no_bits():
    found = map_ranges(calibration((1.0,), a=(0.0, 0.0)))
    assert found.rows[0].bits == (None, None)
    assert found.most == 0


@pytest.mark.parametrize("component", ["unet", ""])
def test_rows_are_those_of_the_report_in_its_order(component):
    whole = map_ranges(calibration((1.0,), a=(1.0, 2.0), b=(1.0, 1.0), c=(1.0, 1.0)))
    whole = replace(whole, rows=tuple(replace(row, component=component) for row in whole.rows))
    places = [("unet", "c"), ("unet", "not packed"), ("unet", "a")]
    assert [row.name for row in whole.of(places).rows] == ["c", "a"]
