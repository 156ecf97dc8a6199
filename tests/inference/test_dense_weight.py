"""``layer.weight`` of a packed layer: dense to who reads it, closed to who writes to it."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from quantkit.errors import InputError
from quantkit.inference.layers.codes import Codes
from quantkit.inference.loading.dequantizing import as_dense
from tests.inference.test_inference import SCHEMES
from tests.support.packed import packed_module


def make(scheme, kind="linear"):
    torch.manual_seed(0)
    dense = nn.Linear(64, 24) if kind == "linear" else nn.Conv2d(32, 24, 3)
    return packed_module(dense, SCHEMES[scheme], name="a.b")


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_readers_get_the_dequantized_weight(scheme, kind):
    layer = make(scheme, kind)
    dense: Any = as_dense(layer).weight.data
    weight = layer.weight
    assert (weight.shape, weight.dtype, weight.device) == (dense.shape, dense.dtype, dense.device)
    assert isinstance(weight, nn.Parameter)
    assert torch.equal(weight, dense)
    assert torch.equal(weight.data.flatten(1)[2:], dense.flatten(1)[2:])
    assert torch.equal(torch.cat([weight, weight.detach()]), torch.cat([dense, dense]))
    x = torch.randn(3, 64) if kind == "linear" else torch.randn(1, 32, 5, 5)
    multiply: Any = nn.functional.linear if kind == "linear" else nn.functional.conv2d
    assert torch.equal(multiply(x, layer.weight, layer.bias), multiply(x, dense, layer.bias))
    assert layer.to(torch.bfloat16).weight.dtype is torch.bfloat16
    assert torch.equal(layer.weight, dense.bfloat16())


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.numpy(), lambda w: torch.tensor(w.tolist()), copy.deepcopy, lambda w: w.clone(),
        lambda w: pickle.loads(pickle.dumps(w)), nn.Parameter, lambda w: w.cpu().float().numpy(),
    ],
)  # fmt: skip
def test_a_weight_leaves_torch_with_its_values(read):
    layer = make("int4-none")
    with torch.no_grad():
        assert torch.equal(torch.as_tensor(read(layer.weight)), layer.dense_weight())
    assert repr(layer.weight) == repr(layer.dense_weight())


def test_nothing_keeps_what_was_dequantized():
    layer = make("token")
    before = {id(t) for t in (*layer.parameters(), *layer.buffers())}
    weight = layer.weight
    assert layer.weight is not weight
    assert weight.sum() == layer.dense_weight().sum()
    assert {id(t) for t in (*layer.parameters(), *layer.buffers())} == before
    layer.weight_scale.mul_(2)
    # It was made anew: nobody has the old values.
    assert torch.equal(weight, layer.dense_weight())


def test_gradients_pass_a_weight_that_has_none():
    layer, x = make("static"), torch.randn(3, 64, requires_grad=True)
    nn.functional.linear(x, layer.weight).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[0], layer.dense_weight().sum(0))


def assign(layer, values):
    layer.weight = nn.Parameter(values)


def assign_data(layer, values):
    layer.weight.data = values


def add_to_data(layer, values):
    layer.weight.data += values


def set_item(layer, values):
    layer.weight[0] = values[0]


def delete(layer, values):
    del layer.weight


WRITERS = {
    "assign": assign,
    "data": assign_data,
    "+=": add_to_data,
    "[]": set_item,
    "del": delete,
    "view": lambda layer, _: layer.weight.view(-1)[:3].zero_(),
    "copy_": lambda layer, values: layer.weight.data.copy_(values),
    "detached": lambda layer, values: layer.weight.detach().mul_(values),
    "out": lambda layer, values: torch.add(values, 1, out=layer.weight),
    "foreach": lambda layer, _: torch._foreach_mul_([layer.weight], 2.0),
    "init": lambda layer, _: nn.init.normal_(layer.weight),
    "reset": lambda layer, _: layer.reset_parameters(),
    "parametrize": lambda layer, _: parametrize.register_parametrization(
        layer, "weight", nn.Identity()
    ),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_writing_is_refused_in_one_line(write):
    layer = make("int8-token")
    before = layer.codes.clone()
    with torch.no_grad(), pytest.raises(InputError, match=r"^a\.b\.weight: is packed"):
        write(layer, layer.dense_weight())
    assert torch.equal(layer.codes, before)
    assert type(layer.codes) is Codes


def test_requires_grad_of_nothing_is_taken_and_of_something_refused():
    layer = make("token")
    layer.weight.requires_grad = False
    layer.requires_grad_(False)
    with pytest.raises(InputError, match=r"^requires_grad: codes"):
        layer.requires_grad_()


@pytest.mark.parametrize("options", [{}, {"assign": True}], ids=["copied", "assigned"])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_states_of_codes_load_and_dense_ones_do_not(kind, options):
    layer, other = make("token", kind), make("token", kind)
    dense = layer.dense_weight()
    other.codes.view(torch.uint8).zero_()
    other.load_state_dict(layer.state_dict(), **options)
    assert torch.equal(other.weight, dense)
    assert type(other.codes) is Codes
    state = as_dense(layer).state_dict()
    with pytest.raises((InputError, RuntimeError), match=r"codes|size mismatch"):
        other.load_state_dict(state, strict=False, **options)
    assert torch.equal(other.weight, dense)


def test_compiled_code_reads_the_weight_in_one_graph():
    layer, x = make("int4-static"), torch.randn(3, 64)

    def read(x):
        return nn.functional.linear(x.to(layer.weight.dtype), layer.weight) + layer(x)

    torch._dynamo.reset()
    compiled = torch.compile(read, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(x), read(x), rtol=1e-5, atol=1e-5)
