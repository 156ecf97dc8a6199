"""Patterns of products, on the host: the calls that go, and their codes."""

import pytest
import torch
from torch.nn import functional

from quantkit.device import compilers
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS
from quantkit.device.torch_operators import OVERLOADS
from quantkit.fusion.checking import WrongKernelError
from quantkit.fusion.fuse import fuse
from quantkit.fusion.patterns import codes_of_products
from quantkit.fusion.simplify import simplify
from quantkit.fusion.trace import trace
from tests.support.kernel_cases import need

M, N, K = 24, 64, 96


@pytest.fixture(scope="module", autouse=True)
def compiler():
    need(compilers.host_compiler)


def product(name, columns):
    """Operands and options of a product that float16 comes out of."""
    op = OPS[name]
    words = {axis.macro: axis.words[0] for axis in op.axes} | {"QK_W_SCALE": "channel"}
    variant = Variant(op, tuple(words[axis.macro] for axis in op.axes))
    operands, options = op.sample(variant, (M, columns, K), torch.Generator().manual_seed(3))
    assert options[-1] is torch.float16
    return operands, options


def fused(step, *inputs):
    program, answer = trace(lambda: step(*inputs), inputs)
    found = fuse(simplify(program))
    found.check(inputs)
    names = [
        str(c.operator).split(".")[1]
        for c in found.program.calls
        if c.fresh and "." in str(c.operator)
    ]
    return names, found.program.run(inputs), answer


def near(found, expected, fmt):
    """A code is the nearest of what is not rounded to 16 bit in between."""
    dtype = torch.int8 if fmt == "int8" else torch.float8_e4m3fn
    a, b = (codes.view(dtype).float() for codes in (found, expected))
    assert (a != b).float().mean() < 0.02
    assert (a - b).abs().max() <= (1 if fmt == "int8" else 32)


GEMMS = [name for name in OPS if OPS[name].family == "gemm"]


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("activation", ["silu", "none", "tanh"])
def test_an_activation_ends_its_product(name, activation):
    operands, options = product(name, N)
    fmt = "int8" if options[0] == "int8" else "e4m3fn"
    kind = "int8" if fmt == "int8" else "fp8"
    smooth, scale = torch.rand(N) + 0.5, torch.tensor([0.07])

    def step(x):
        y = OVERLOADS[name](x, *operands[1:], *options).view(2, M // 2, N)
        if activation == "silu":
            y = functional.silu(y)
        else:
            y = functional.gelu(y, approximate=activation)
        return OVERLOADS[f"quantize_{kind}_static"](y.view(-1, N), smooth, scale, fmt)

    names, found, expected = fused(step, operands[0])
    assert names == [name.replace("gemm", "project_gelu")]
    near(found, expected, fmt)


@pytest.mark.parametrize("name", GEMMS)
def test_a_gate_ends_its_product(name):
    operands, options = product(name, 2 * N)
    fmt = "int8" if options[0] == "int8" else "e4m3fn"
    kind, scale = "int8" if fmt == "int8" else "fp8", torch.tensor([0.07])

    def step(x):
        h, g = OVERLOADS[name](x, *operands[1:], *options).view(2, -1, 2 * N).chunk(2, dim=-1)
        y = h * functional.gelu(g)
        return OVERLOADS[f"quantize_{kind}_static"](y.reshape(-1, N), None, scale, fmt)

    names, found, expected = fused(step, operands[0])
    assert names == [name.replace("gemm", "geglu")]
    near(found, expected, fmt)


@pytest.mark.parametrize("change", ["other reader", "returned", "tanh", "swapped", "smooth", "fp8"])
def test_other_graphs_keep_their_product(change):
    operands, options = product("gemm_int8", 2 * N)
    scale, smooth = torch.tensor([0.07]), torch.ones(N) if change == "smooth" else None
    approximate = "tanh" if change == "tanh" else "none"

    def step(x):
        y = OVERLOADS["gemm_int8"](x, *operands[1:], *options)
        h, g = y.chunk(2, dim=-1)
        if change == "swapped":
            h, g = g, h
        z = h * functional.gelu(g, approximate=approximate)
        fmt = ("fp8", "e4m3fn") if change == "fp8" else ("int8", "int8")
        codes = OVERLOADS[f"quantize_{fmt[0]}_static"](z, smooth, scale, fmt[1])
        others = {"other reader": y.amax(), "returned": y}
        return codes, others.get(change, codes)

    names, (found, *_), (expected, *_) = fused(step, operands[0])
    assert "gemm_int8" in names
    near(found, expected, "e4m3fn" if change == "fp8" else "int8")


def test_where_it_does_not_pay_the_product_stays(monkeypatch):
    operands, options = product("gemm_int8", N)

    def step(x):
        y = functional.silu(OVERLOADS["gemm_int8"](x, *operands[1:], *options))
        return OVERLOADS["quantize_int8_static"](y, None, torch.tensor([0.07]), "int8")

    monkeypatch.setattr(codes_of_products, "pays", lambda *_, **__: False)
    names, found, expected = fused(step, operands[0])
    assert "project_gelu_int8" not in names
    near(found, expected, "int8")


def test_a_wrong_pattern_is_found(monkeypatch):
    operands, options = product("gemm_int8", N)

    def step(x):
        y = functional.silu(OVERLOADS["gemm_int8"](x, *operands[1:], *options))
        return OVERLOADS["quantize_int8_static"](y, None, torch.tensor([0.07]), "int8")

    monkeypatch.setattr(codes_of_products, "_word", lambda _: "gelu")
    with pytest.raises(WrongKernelError, match=r"quantkit\.project_gelu_int8"):
        fused(step, operands[0])
