"""Buckets of timesteps: an edge belongs to one bucket wherever it is looked up."""

import copy
from bisect import bisect_right
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.checkpoint.schemes import parse_scheme, scheme_to_json
from quantkit.errors import CheckpointError
from quantkit.inference.layers import timestep_buckets
from quantkit.inference.layers.timestep_buckets import TimestepBuckets
from quantkit.models.timestep import bucket_of
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Schedule, Scheme
from quantkit.pipelines.replayed_step import Step
from quantkit.pipelines.step_stage import find_stage
from tests.inference.test_inference import Denoiser
from tests.support.comparisons import is_near
from tests.support.packed import packed_module
from tests.support.recording import record_on_cpu

EDGES = (0.0, 250.5, 500.0, 999.0)


@pytest.mark.parametrize("edge", range(len(EDGES)))
def test_a_bucket_begins_at_its_edge_wherever_it_is_found(edge):
    buckets = TimestepBuckets(Schedule(EDGES))
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


def per_token(layer):
    """Return a layer of the same weights whose rows always have scales of their own."""
    scheme = replace(layer.scheme, activation=Activation.TOKEN, buckets=(), token_below=None)
    twin = packed_module(nn.Linear(32, 8), scheme)
    state = layer.state_dict()
    twin.load_state_dict({name: state[name] for name in twin.state_dict()})
    return twin


@pytest.mark.parametrize("edges", [(), (250.0, 500.5)], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_have_scales_of_their_own_below_a_timestep(edges, compiled):
    model: Any = Denoiser(edges, token_below=50.0)
    x = torch.randn(4, 32) * torch.tensor([[1e-2], [1.0], [3.0], [0.1]])
    expected = per_token(model.layers[0])(x)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for timestep in (999.0, 0.0, 50.0, 49.9, -1.0, 600.0):
        for given in (timestep, torch.tensor(timestep), torch.tensor([timestep, 999.0])):
            found = run(x, given)[0]
            assert torch.equal(found, expected) == (timestep < 50), timestep


def test_steps_below_a_timestep_are_recorded_by_themselves(monkeypatch):
    record_on_cpu(monkeypatch)
    model: Any = Denoiser((250.0,), token_below=50.0).eval()
    x, times = torch.randn(4, 32), [torch.tensor(t) for t in (900.0, 20.0, 100.0, 49.0, 300.0)]
    with torch.no_grad():
        expected = [model(x, t)[0] for t in times]
        model.forward = step = Step(model)
        found = [model(x, t)[0] for t in times]
    assert all(map(is_near, found, expected))
    assert (step.replayed.recorded, step.replayed.replayed) == (2, 3)
    assert not step.replayed.eager


def test_a_copy_and_a_dequantized_model_know_their_own_stages():
    model: Any = Denoiser((250.0,), token_below=50.0)
    x, twin = torch.randn(4, 32), copy.deepcopy(model)
    assert torch.equal(twin(x, 20.0)[0], model(x, torch.tensor(20.0))[0])
    assert find_stage(model, (x, 20.0), {}) == float("-inf")
    assert find_stage(model, (x,), {"timestep": torch.tensor(60)}) == 50.0
    timestep_buckets.uninstall(model)
    assert find_stage(model, (x, 20.0), {}) is None
    assert find_stage(twin, (x, 20.0), {}) is not None


@pytest.mark.parametrize("value", ["50", True, float("inf"), [1.0]], ids=str)
def test_the_timestep_of_a_file_is_a_number(value):
    item = scheme_with([250.0]) | {"token_below": value}
    with pytest.raises(CheckpointError, match="token_below"):
        parse_scheme(item, "config.json")


def test_the_timestep_is_of_static_inputs():
    scheme = Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN)
    item = {**scheme_to_json(scheme), "token_below": 50, "layers": ["a"]}
    with pytest.raises(CheckpointError, match="expected 'static'"):
        parse_scheme(item, "config.json")
    item["activation"] = "static"
    assert parse_scheme(item, "config.json")[0].token_below == 50.0
