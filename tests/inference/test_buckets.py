"""Buckets of timesteps: an edge belongs to one bucket wherever it is looked up."""

from bisect import bisect_right

import pytest
import torch

from quantkit.checkpoint.schemes import parse_scheme, scheme_to_json
from quantkit.errors import CheckpointError
from quantkit.inference.layers.timestep_buckets import TimestepBuckets
from quantkit.models.timestep import bucket_of
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme

EDGES = (0.0, 250.5, 500.0, 999.0)


@pytest.mark.parametrize("edge", range(len(EDGES)))
def test_a_bucket_begins_at_its_edge_wherever_it_is_found(edge):
    buckets = TimestepBuckets(EDGES)
    at = torch.tensor(EDGES[edge], dtype=torch.float64)
    below = at.nextafter(torch.tensor(-1e9, dtype=torch.float64))
    above = at.nextafter(torch.tensor(1e9, dtype=torch.float64))
    for value, wanted in ((below, edge), (at, edge + 1), (above, edge + 1)):
        assert bucket_of(float(value), EDGES) == wanted
        for given in (value, value.reshape(1), value.expand(3), float(value)):
            if isinstance(given, float) and given != float(torch.tensor(given).float()):
                continue  # a number becomes float32, as the denoisers' own timesteps are
            buckets.update(given)
            assert int(buckets.index) == wanted


def scheme_with(buckets):
    scheme = Scheme(E4M3FN, PerChannel(), None, Activation.STATIC, (250.0, 500.0))
    return {**scheme_to_json(scheme), "buckets": buckets, "layers": ["a"]}


@pytest.mark.parametrize(
    "buckets",
    [[500.0, 500.0], [1, 1.0], [0.0, -0.0], [2.0, 1.0], [], [True], ["1"], [None], [1e999], 5],
    ids=str,
)
def test_buckets_of_a_file_are_ascending_and_distinct(buckets):
    with pytest.raises(CheckpointError, match="buckets"):
        parse_scheme(scheme_with(buckets), "config.json")


@pytest.mark.parametrize("buckets", [[0], [1, 2.5, 1000], [-1.0, 0.0]], ids=str)
def test_buckets_of_a_file_are_read_as_they_are(buckets):
    scheme, _ = parse_scheme(scheme_with(buckets), "config.json")
    assert scheme.buckets == tuple(map(float, buckets))
    for value in (-2.0, 0.0, 1.0, 2.5, 1e4):
        assert bucket_of(value, scheme.buckets) == bisect_right(buckets, value)
