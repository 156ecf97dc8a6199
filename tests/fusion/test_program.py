"""Steps as programs: what is recorded, what is left out, and that answers stay bit for bit."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from quantkit.fusion.simplify import simplify
from quantkit.fusion.trace import Recorder, UntraceableError, trace
from quantkit.pipelines.recorded_step import take_apart
from tests.support.denoisers import INPUTS, tiny_denoiser

WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
INPUT = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))


def traced(step, *inputs):
    """The program of a step, and that which is left of it; both answer as the step does."""
    program, answer = trace(lambda: step(*inputs), inputs)
    short = simplify(program)
    with torch.no_grad():
        for given in (inputs, tuple(3 * x for x in inputs)):
            wanted = step(*given)
            for found in (program.run(given), short.run(given)):
                assert torch.equal(found, wanted)
                assert found.stride() == wanted.stride()
    assert torch.equal(answer, step(*inputs))
    return program, short


def names(program):
    return [call.operator.overloadpacket.__name__ for call in program.calls]


@pytest.mark.parametrize("name", INPUTS)
def test_a_denoisers_step_is_shorter_and_answers_the_same(name):
    model = tiny_denoiser(name).eval()
    inputs = take_apart((), INPUTS[name](), torch.device("cpu"))
    args, kwargs = inputs.rebuild(inputs.tensors)
    with torch.no_grad():
        program, _ = trace(lambda: model(*args, **kwargs), inputs.tensors)
        short = simplify(program)
        assert len(short.calls) < len(program.calls)
        for change in (0, 1):
            given = [x + change if x.is_floating_point() else x for x in inputs.tensors]
            args, kwargs = inputs.rebuild(given)
            assert torch.equal(short.run(given).sample, model(*args, **kwargs).sample)
    # No residual is divided by one, and no position is counted.
    assert not {"arange"} & {*names(short)}
    assert str(short).count("\n") + 1 == len(short.calls)


def test_what_follows_from_no_input_is_computed_once():
    def step(x):
        angles = torch.arange(8.0).mul(0.5).cos()
        return x * angles + torch.tensor([1.0, 2.0] * 4).exp()

    program, short = traced(step, INPUT)
    assert len(program.calls) > 4
    assert names(short) == ["mul", "add"]
    assert len(short.constants) == 2


def test_weights_are_read_where_they_lie():
    weight = WEIGHT.clone()
    program, _ = trace(lambda: INPUT @ (2 * weight), ())
    short = simplify(program)
    assert names(short) == ["mul", "mm"]
    weight.zero_()
    assert not short.run(()).any()


def test_copies_and_ones_are_left_out():
    def step(x):
        same = (x / 1.0).to(torch.float32).clone() * 1
        return functional.dropout(same, 0.5, training=False) @ WEIGHT

    assert names(traced(step, INPUT)[1]) == ["mm"]


@pytest.mark.parametrize(
    ("kept", "step"),
    [
        ("_to_copy", lambda x: (x.double() / 1) @ WEIGHT.double()),
        ("clone", lambda x: x.t().clone(memory_format=torch.contiguous_format).t() @ WEIGHT),
        ("mul", lambda x: (x * torch.tensor(1.0, dtype=torch.float64)) @ WEIGHT),
        ("div", lambda x: (x[:1] / torch.ones(4, 1)) @ WEIGHT),
        ("div", lambda x: torch.ones(8, dtype=torch.int64) / 1 * (x / 2)),
    ],
    ids=["dtype", "layout", "tensor", "broadcast", "half"],
)
def test_what_looks_like_a_copy_and_is_none_is_kept(kept, step):
    assert kept in names(traced(step, INPUT)[1])


def test_parts_of_what_is_known_are_known():
    """A view of a result that follows from no input does so too, as in a device's first copy."""

    def step(x):
        return x + torch.tensor([0, 1])[:, None].to(torch.float32).repeat(2, 8)

    assert names(traced(step, INPUT)[1]) == ["add"]


def test_equal_calls_are_made_once():
    def step(x):
        return functional.silu(x) + functional.silu(x) * functional.silu(2 * x)

    program, short = traced(step, INPUT)
    assert names(program).count("silu") == 3
    assert names(short).count("silu") == 2


def test_numbers_of_other_types_are_other_calls():
    def step(x):
        return torch.full_like(x, 1).sum() + torch.full_like(x, 1, dtype=torch.int64).sum() + x

    traced(step, INPUT)


def test_what_is_written_to_is_kept_in_its_order():
    def step(x):
        first = x.clone()
        second = x.clone()
        first.add_(1)
        view = second[1:]
        view.mul_(2)
        out = torch.empty_like(x)
        torch.add(first, second, out=out)
        return out / 1

    program, short = traced(step, INPUT)
    assert (names(program).count("clone"), names(short).count("clone")) == (2, 1)
    assert "add_" not in names(short)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_parts_that_are_joined_again_are_the_whole(axis):
    def step(x):
        y = x * 2
        first, second = y.narrow(axis, 0, 1), y.narrow(axis, 1, y.shape[axis] - 1)
        return torch.cat([first, second], axis) + 1, torch.cat([second, first], axis)

    program, _ = trace(lambda: step(INPUT), [INPUT])
    short = simplify(program)
    assert (names(program).count("cat"), names(short).count("cat")) == (2, 1)
    assert all(map(torch.equal, short.run([INPUT]), step(INPUT)))


def test_other_parts_are_joined():
    """Some of a tensor, parts of another layout, and parts of what is written to."""

    def step(x):
        y, z = x * 2, x.t() * 3
        some = torch.cat([y[:1], y[2:]])
        turned = torch.cat([z[:, :1], z[:, 1:]], 1)
        w = x.clone()
        joined = torch.cat([w[:1], w[1:]])
        w[0].add_(1)
        return some.sum() + turned.sum() + joined.sum() + w

    _, short = traced(step, INPUT)
    assert names(short).count("cat") == 3


def test_lists_of_tensors_and_parts_are_arguments():
    def step(x):
        first, second = x.chunk(2, dim=1)
        return torch.cat([second, first, x[:, ::2]], dim=1)

    traced(step, INPUT)


def test_an_input_may_be_the_answer():
    assert names(traced(lambda x: x / 1, INPUT)[1]) == []


def test_memory_is_given_back_when_it_is_read_for_the_last_time():
    alive = []

    class Watched(nn.Module):
        def forward(self, x):
            for _ in range(5):
                x = functional.silu(x) + 1
                alive.append(weakref.ref(x))
            return x

    model = Watched()
    program, answer = trace(lambda: model(INPUT), (INPUT,))
    del answer
    gc.collect()
    assert not any(found() is not None for found in alive)
    held = []
    last: Any = program.calls[-1].operator

    def count(*arguments, **keywords):
        gc.collect()
        held.append(sum(type(found) is torch.Tensor for found in gc.get_objects()))
        return last(*arguments, **keywords)

    before = sum(type(found) is torch.Tensor for found in gc.get_objects())
    object.__setattr__(program.calls[-1], "operator", count)
    program.run((INPUT,))
    # What the last call reads, and the answer of the call before it.
    assert held[0] - before <= 2


class _Counting(nn.Module):
    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return x + self.calls


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x: functional.dropout(x, 0.5), "draws random numbers"),
        (lambda x: x + torch.rand(8), "draws random numbers"),
        (lambda x: x * x.sum().item(), "reads a number off"),
        (lambda x: x if bool((x > 0).all()) else -x, "reads a number off"),
        (_Counting(), "writes to a tensor that outlives"),
        (lambda x: x.add_(1), "writes to a tensor that outlives"),
        (lambda x: torch.empty_like(x) + x, "reads what no operator of torch wrote"),
    ],
    ids=["dropout", "rand", "item", "bool", "buffer", "input", "empty"],
)
def test_what_is_more_than_its_operators_is_refused(step, words):
    counting = INPUT.clone()
    with pytest.raises(UntraceableError, match=words):
        trace(lambda: step(counting), (counting,))


def test_asking_where_an_empty_tensor_is_reads_nothing():
    with FakeTensorMode():
        x = torch.empty(2, 8)

        def step():
            made = torch.empty_like(x)
            made[:, ::2] = x[:, ::2].to(made.device)
            return made

        program, _ = trace(step, (x,))
    assert names(program) == ["empty_like", "slice", "slice", "copy_"]


def test_a_number_of_what_python_made_is_known():
    def step(x):
        return x * torch.tensor([2.0, 3.0]).sum().item()

    assert names(traced(step, INPUT)[1]) == ["mul"]


@pytest.mark.parametrize(("device", "left"), [("cpu", 3), ("meta", 2)])
def test_constants_of_one_element_count_as_equal_where_they_have_no_numbers(device, left):
    x = INPUT.to(device)
    ones = [torch.tensor(number).to(device) for number in (2.0, 3.0)]
    program, _ = trace(lambda: x * ones[0] + x * ones[1], (x,))
    assert len(simplify(program).calls) == left


def test_what_is_made_while_recording_pauses_is_there_before_the_step():
    recorder = Recorder((INPUT,))
    with torch.no_grad(), recorder:
        with recorder.paused():
            kept = INPUT @ WEIGHT
        answer = INPUT + kept
    program = recorder.program(answer)
    assert names(program) == ["add"]
    assert any(constant is kept for constant in program.constants.values())
    assert torch.equal(program.run((INPUT,)), answer)
