"""Operations as torch's operators: their contract, and calls that leave the dispatcher out."""

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.device.ops.table import OPS
from quantkit.device.torch_operators import OPERATORS, OVERLOADS, callable_of


def operator_samples():
    x = torch.randn(5, 32)
    codes = torch.randint(0, 120, (5, 32), dtype=torch.uint8)
    w = torch.randint(0, 120, (8, 32), dtype=torch.uint8)
    meta = torch.full((8, 4), 0x4E, dtype=torch.uint8)
    one, rows, bias = torch.ones(1), torch.rand(5), torch.randn(8)
    smooth = torch.rand(32) + 0.5
    half = torch.float16
    # A window of 2 x 2 pixels has as many codes as a row.
    image = torch.randint(0, 120, (2, 5, 4, 8), dtype=torch.uint8)
    pad_one = [2, 2, 1, 1, 1, 1, 0, 1, 1, 0]
    by_two = [2, 2, 2, 1, 1, 2, 0, 0, 0, 0]
    e4m3, e5m2, kept = ("e4m3fn",) * 2, ("e5m2",) * 2, w[:, :16].contiguous()
    return {
        "quantize_fp8_static": (x, None, one, "e4m3fn"),
        "quantize_fp8_static-smooth": (x.half(), smooth, one, "e5m2"),
        "quantize_fp8_static-empty": (x[:0], None, one, "e4m3fn"),
        "quantize_fp8_token": (x, smooth, "e4m3fn"),
        "quantize_fp8_token-empty": (x[:0], None, "e4m3fn"),
        "gemm_fp8": (codes, rows, w, one.reshape(()), None, *e4m3, torch.float32),
        "gemm_fp8-bias": (codes, one, w, bias.abs(), bias.half(), *e4m3, half),
        "gemm_fp8-empty": (codes[:0], rows[:0], w, one.reshape(()), None, *e4m3, half),
        "geglu_fp8": (codes, rows, w, bias.abs(), bias, one, *e4m3, "e5m2", torch.float32),
        "geglu_fp8-empty": (codes[:0], one, w, one, None, one, *e4m3, "e4m3fn", half),
        "geglu_fp8_sparse": (codes, one, kept, meta, one, None, one, *e4m3, "e4m3fn", half),
        "conv_fp8": (image, one, w, bias.abs(), bias, pad_one, *e4m3, torch.float32),
        "conv_fp8-strided": (image, one, w, one, None, by_two, *e5m2, half),
        "conv_fp8-empty": (image[:0], one, w, one, bias, pad_one, *e4m3, torch.float32),
        "conv_fp8_sparse": (image, one, kept, meta, one, bias, pad_one, *e4m3, torch.float32),
        "gemm_fp8_sparse": (codes, rows, kept, meta, bias.abs(), bias, *e5m2, torch.float32),
    }


@pytest.mark.parametrize("name", operator_samples().keys())
def test_operator_keeps_its_contract(name):
    operator: Any = OVERLOADS[name.split("-")[0]]
    torch.library.opcheck(operator, operator_samples()[name])


class Dispatched(TorchDispatchMode):
    """Keeps the names of the operators that are dispatched."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def outputs(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", operator_samples().keys())
def test_calls_leave_out_the_dispatcher_where_nothing_looks(name):
    kind, arguments = name.split("-")[0], operator_samples()[name]
    wanted, dispatched = OVERLOADS[kind](*arguments), []

    def overload(*given):
        dispatched.append(kind)
        return OVERLOADS[kind](*given)

    operator: Any = callable_of(OPS[kind], overload)
    with torch.no_grad():
        assert all(map(torch.equal, outputs(operator(*arguments)), outputs(wanted)))
        assert dispatched == []
        with Dispatched() as calls:
            operator(*arguments)
        assert f"quantkit::{kind}" in calls.names
        with FakeTensorMode() as fakes:
            moved = [fakes.from_tensor(a) if torch.is_tensor(a) else a for a in arguments]
            fake = operator(*moved)
        assert len(dispatched) == 2
    for one, other in zip(outputs(fake), outputs(wanted), strict=True):
        assert isinstance(one, FakeTensor)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    operator(*arguments)
    assert len(dispatched) == 3


def test_gradients_are_refused_as_by_the_dispatcher():
    x = torch.ones(4, 32, requires_grad=True)
    arguments = (x, None, torch.ones(()), "e4m3fn")
    found = OPERATORS["quantize_fp8_static"](*arguments)
    assert found.requires_grad == OVERLOADS["quantize_fp8_static"](*arguments).requires_grad
