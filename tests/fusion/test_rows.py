"""Row kernels on the host, against the operators that they replace, and float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from quantkit.device import compilers
from quantkit.device.torch_operators import OVERLOADS
from quantkit.fusion.checking import WrongKernelError
from quantkit.fusion.fuse import fuse
from quantkit.fusion.rows import expressions, row_operators
from quantkit.fusion.rows.row_kernel import RowKernel
from quantkit.fusion.rows.row_nodes import Codes, Map
from quantkit.fusion.simplify import simplify
from quantkit.fusion.trace import trace
from tests.support.kernel_cases import need

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    need(compilers.host_compiler)


def normal(*shape, dtype=torch.float16, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused(step, *inputs):
    """The program of a step with row kernels, which have passed the check of replay."""
    program, _ = trace(lambda: step(*inputs), inputs)
    found = fuse(simplify(program))
    found.check(inputs)
    return found.program


def kernels(program):
    return [call for call in program.calls if isinstance(call.operator, RowKernel)]


def left(program):
    """Operators that no row kernel computes; views take no time."""
    others = (c for c in program.calls if c.fresh and not isinstance(c.operator, RowKernel))
    return [call.operator.overloadpacket.__name__ for call in others]


def compared(step, *inputs, count=1, rest=()):
    """Compare all that a step returns, fused, with the step in float64; return what was found."""
    program = fused(step, *inputs)
    assert (len(kernels(program)), left(program)) == (count, [*rest])
    answer = program.run(inputs)
    exact = step(*(x.double() if x.is_floating_point() else x for x in inputs))
    for found, expected, eager in zip(*map(as_tuple, (answer, exact, step(*inputs))), strict=True):
        assert found.dtype == eager.dtype
        assert found.stride() == eager.stride()
        near(found, expected)
    return answer


def as_tuple(answer):
    return answer if isinstance(answer, tuple) else (answer,)


def near(found, expected):
    """One rounding to the dtype from float32, whose own errors are far smaller."""
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    eps = max(torch.finfo(found.dtype).eps, 1e-5)
    size = expected.abs().amax() if expected.numel() else 1.0
    torch.testing.assert_close(found.double(), expected.double(), rtol=eps, atol=float(size) * 1e-5)


def rms(x, weight, eps=1e-6):
    y = x.float() if x.dtype in HALVES else x
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight).to(x.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 8), (3, 72), (2, 9, 640), (7, 1), (9, 2056), (2, 9, 4104)])
def test_a_norm_with_its_modulation_is_one_kernel(dtype, shape):
    x, weight, scale, shift = (
        normal(*shape, dtype=dtype),
        normal(shape[-1], dtype=dtype),
        normal(shape[0], *(1,) * (len(shape) - 2), shape[-1], dtype=dtype),
        normal(shape[-1], dtype=dtype),
    )

    def step(x, weight, scale, shift):
        y = rms(x, weight)
        return torch.tanh(y * (1 + scale) + shift) * 2

    if shape[-1] < 8:
        assert "mean" in left(fused(step, x, weight, scale, shift))
    else:
        compared(step, x, weight, scale, shift)


@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("columns", [16, 1280, 1284, 9000])
def test_layer_norms_are_torchs(columns, affine):
    x = normal(5, columns) + 3
    weight, bias = (normal(columns) if has else None for has in affine)
    given = [t for t in (weight, bias) if t is not None]

    def step(x, *given):
        left = list(given)
        weight, bias = (left.pop(0) if has else None for has in affine)
        return functional.silu(functional.layer_norm(x, (columns,), weight, bias, 1e-5))

    compared(step, x, *given)


def test_residuals_norms_and_codes_of_several_readers_are_one_kernel():
    x, y, gate, weight = normal(2, 9, 96), normal(2, 9, 96), normal(2, 1, 96), normal(96)
    scale, smooth = torch.tensor([0.02]), torch.rand(96) + 0.5
    static = OVERLOADS["quantize_int8_static"]

    def step(x, y, gate, weight, smooth, scale):  # noqa: PLR0917  the step's inputs
        h = x + gate * y
        z = rms(h, weight).view(-1, 96)
        return h, static(z, None, scale, "int8"), static(z, smooth, scale * 1, "int8")

    program = fused(step, x, y, gate, weight, smooth, scale)
    assert len(kernels(program)) == 1
    h, first, second = program.run((x, y, gate, weight, smooth, scale))
    exact = [t.double() for t in (x, y, gate, weight, smooth, scale)]
    sums = exact[0] + exact[2] * exact[1]
    near(h, sums)
    z = rms(sums, exact[3]).view(-1, 96)
    for codes, values in ((first, z), (second, z * exact[4])):
        quotient = values / exact[5]
        off = codes.view(torch.int8).double() - quotient.clamp(-127, 127)
        assert off.abs().max() <= 0.5 + 1e-4


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "int8"])
@pytest.mark.parametrize("columns", [64, 72, 100, 6000])
def test_scales_of_each_row_are_those_of_its_numbers(fmt, columns):
    x = normal(5, columns)
    x[1] = 0
    name = "quantize_int8_token" if fmt == "int8" else "quantize_fp8_token"

    def step(x):
        return OVERLOADS[name](functional.gelu(x, approximate="tanh") + 1 - 1, None, fmt)

    program = fused(step, x)
    assert len(kernels(program)) == 1
    assert not left(program)
    scale, codes = program.run((x,))
    values = functional.gelu(x.double(), approximate="tanh").float()
    expected, _ = OVERLOADS[name](values, None, fmt)
    torch.testing.assert_close(scale, expected, rtol=1e-4, atol=0)
    assert scale[1] == 1
    dtype = torch.int8 if fmt == "int8" else getattr(torch, f"float8_{fmt}")
    restored = codes.view(dtype).float() * scale.unsqueeze(1)
    step_size = {"int8": scale.unsqueeze(1), "e4m3fn": 2**-3, "e5m2": 2**-2}[fmt]
    room = step_size if fmt == "int8" else values.abs() * step_size + scale.unsqueeze(1) * 2**-6
    assert ((restored - values).abs() <= 0.51 * room + 1e-5).all()


def interleaved(x, cos, sin):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-second, first], dim=-1).flatten(-2)
    return x * cos + turned * sin


def as_complex(x, turns):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns.unsqueeze(2)).flatten(3).to(x.dtype)


def test_rotations_of_pairs_are_part_of_a_norms_kernel():
    x, weight = normal(2, 5, 3 * 32), normal(32)
    cos, sin = normal(5, 1, 32, dtype=torch.float32), normal(5, 1, 32, dtype=torch.float32)

    def step(x, weight, cos, sin):
        heads = rms(x.unflatten(-1, (3, 32)), weight)
        return interleaved(heads, cos, sin).to(x.dtype)

    compared(step, x, weight, cos, sin)


def test_rotations_by_complex_numbers_are_part_of_a_norms_kernel():
    x, weight = normal(2, 5, 3, 32), normal(32)
    turns = torch.polar(torch.ones(2, 5, 16), normal(2, 5, 16, dtype=torch.float32))

    def step(x, weight, turns):
        return as_complex(rms(x, weight), turns).transpose(1, 2)

    program = fused(step, x, weight, turns)
    assert len(kernels(program)) == 1
    assert not left(program)
    exact = as_complex(rms(x.double(), weight.double()), turns)
    found = program.run((x, weight, turns))
    torch.testing.assert_close(found.float(), exact.transpose(1, 2).float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("shape", [(13,), (7, 13), (3, 5, 6), (1, 4096)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_has_no_rows_takes_any_number_of_elements(shape, dtype):
    def step(x, y):
        z = functional.silu(x) * y
        return z, z - x

    compared(step, normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=2))


@pytest.mark.parametrize("layout", ["last", "heads", "slice", "row", "column", "one"])
def test_operands_are_read_where_they_lie(layout):
    x = normal(2, 8, 6, 16)
    other = {
        "last": normal(2, 8, 6, 16).contiguous(memory_format=torch.channels_last),
        "heads": normal(2, 6, 8, 16).transpose(1, 2),
        "slice": normal(2, 8, 6, 40)[..., 8:24],
        "row": normal(2, 8, 6, 1),
        "column": normal(8, 1, 16),
        "one": normal(1),
    }[layout]

    def step(x, other):
        return functional.silu(x * 2) * other

    compared(step, x, other)


def test_results_lie_as_the_operators_lay_them():
    def step(x, y):
        return functional.silu(x) * y

    x, y = (
        normal(2, 8, 3, 5, seed=n).contiguous(memory_format=torch.channels_last) for n in (1, 2)
    )
    assert compared(step, x, y).is_contiguous(memory_format=torch.channels_last)
    x, y = (normal(2, 6, 4, 8, seed=n).transpose(1, 2) for n in (1, 2))
    assert compared(step, x, y).stride() == x.stride()


def test_axes_of_one_element_lie_anywhere():
    """Attention's heads, transposed: their batch of one has a stride of no meaning."""

    def step(x):
        heads = x.unflatten(-1, (4, 8)).permute(0, 2, 3, 1)
        return torch.relu(heads).float() * 2

    compared(step, normal(1, 6, 32))


def test_small_results_are_computed_again_where_they_are_read():
    def step(x, scale, shift):
        factor = 1 + scale
        return (functional.silu(x) * factor + shift) - factor

    compared(step, normal(3, 64, 48), normal(3, 1, 48), normal(48))


def test_a_copy_in_another_order_is_written_at_once():
    """What linear attention multiplies: heads of tokens, in float32, batch by batch."""

    def step(x):
        heads = x.unflatten(-1, (4, 8)).permute(0, 2, 3, 1)
        return torch.relu(heads).float().transpose(-1, -2).contiguous()

    assert compared(step, normal(2, 6, 32)).is_contiguous()


def test_what_reads_another_place_reads_memory():
    """A sum with the previous token, and one with a transposed matrix."""

    def step(x):
        y = functional.silu(x * 2)
        moved = torch.tanh(y[1:] * 3)
        turned = (y[:, :8].t() + 1) * 2
        return y, moved, turned

    compared(step, normal(8, 24), count=3)


def test_what_waits_for_a_product_is_not_computed_before_it():
    def step(x, weight):
        y = functional.silu(x) * 2
        return torch.tanh(y + y @ weight) * y

    x, weight = normal(4, 16, dtype=torch.float32), normal(16, 16, dtype=torch.float32)
    compared(step, x, weight, count=2, rest=["mm"])


def test_rows_of_other_lengths_are_other_kernels():
    def step(x, weight, heads):
        return rms(rms(x, weight).unflatten(-1, (4, 16)), heads)

    compared(step, normal(6, 64), normal(64), normal(16), count=2)


def test_memory_that_is_written_to_is_read_after_that():
    def step(x):
        pad = torch.zeros(6, 16, dtype=x.dtype)
        pad[:4].copy_(x)
        y = functional.silu(pad) * 2
        pad[4:].add_(1)
        return y, torch.tanh(pad + 1) * pad

    x = normal(4, 16)
    program = fused(step, x)
    for found, expected in zip(program.run((x,)), step(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("turned", [False, True])
def test_joined_rows_have_what_was_written_to_them(turned):
    def step(x, others):
        y = torch.relu(x)
        y[..., :4].add_(1)
        return torch.cat([y.transpose(0, 1) if turned else y, others], -1) * 2

    x, others = normal(5, 3, 16), normal(3, 5, 8) if turned else normal(5, 3, 8)
    torch.testing.assert_close(fused(step, x, others).run((x, others)), step(x, others))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_other_dtypes_stay_torchs(dtype):
    def step(x):
        return (x + x) * 3 + x

    x = torch.arange(24).reshape(4, 6).to(dtype)
    program = fused(step, x)
    assert not kernels(program)
    assert torch.equal(program.run((x,)), step(x))


def test_numbers_that_are_none_stay_so():
    def step(x):
        return functional.silu(x) * 2, OVERLOADS["quantize_fp8_token"](x * 1.5, None, "e4m3fn")

    x = normal(3, 32)
    x[0, 3], x[1, 4] = math.nan, math.inf
    program = fused(step, x)
    y, (scale, codes) = program.run((x,))
    assert y[0].isnan().tolist() == [column == 3 for column in range(32)]
    assert y[1, 4] == math.inf
    assert scale[0].isnan()
    assert codes[0].view(torch.float8_e4m3fn).float().isnan().all()


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row(rows):
    def step(x):
        return rms(x * 2, torch.ones(16, dtype=x.dtype))

    x = normal(rows, 16)
    program = fused(step, x)
    torch.testing.assert_close(program.run((x,)), step(x), rtol=2e-3, atol=2e-3)


def test_one_text_serves_equal_blocks():
    weights = [normal(32, seed=n) for n in range(4)]

    def step(x):
        for weight in weights:
            x = (rms(x, weight) @ torch.eye(32, dtype=x.dtype)) + x
        return x

    program = fused(step, normal(3, 32))
    # The first norm has no residual, and the last residual no norm.
    assert len({str(call.operator) for call in kernels(program)}) == 2
    assert len(kernels(program)) == 4
    assert left(program) == ["mm"] * 4 + ["add"]


def test_infinite_numbers_computed_scales_and_scalars_stay_torchs():
    static = OVERLOADS["quantize_int8_static"]

    def step(x, mask, scale):
        y = functional.silu(x) * 2 + mask * -math.inf
        return y, static(x + 1, None, scale * 2, "int8"), (mask.sum() * 2).mean(-1)

    given = (normal(4, 64), torch.ones(64).half(), torch.tensor([0.1]))
    program = fused(step, *given)
    y, codes, total = program.run(given)
    exact, expected, whole = step(*given)
    torch.testing.assert_close((y, total), (exact, whole), rtol=2e-3, atol=2e-3)
    assert (codes.view(torch.int8).int() - expected.view(torch.int8).int()).abs().max() <= 1


def test_a_wrong_kernel_is_found(monkeypatch):
    wrong = {**expressions.EXPRESSIONS, torch.ops.aten.silu.default: "qk::rows::sigmoid({})".format}
    monkeypatch.setattr(expressions, "EXPRESSIONS", wrong)
    with pytest.raises(WrongKernelError, match=r"rows_[0-9a-f]{16}: %\d+ is another"):
        fused(lambda x: functional.silu(x) * 2, normal(4, 16))


def test_wrong_codes_are_found(monkeypatch):
    quantize = row_operators.OPERATORS[OVERLOADS["quantize_fp8_static"]]

    def doubled(rows, call):
        given, nodes = quantize(rows, call)
        ((value, codes),) = nodes.items()
        assert isinstance(codes, Codes)
        of = Map(codes.of.level, "(2.0f * {0})", (codes.of,))
        return given, {value: replace(codes, of=of)}

    overload = OVERLOADS["quantize_fp8_static"]
    table = {**row_operators.OPERATORS, overload: doubled}
    monkeypatch.setattr(row_operators, "OPERATORS", table)
    with pytest.raises(WrongKernelError):
        fused(lambda x: overload(x + 1, None, torch.tensor([0.1]), "e4m3fn"), normal(4, 16))


@pytest.mark.parametrize("widths", [(16, 32), (8, 24, 16), (4, 12), (5, 6)])
def test_joined_rows_are_read_where_they_lie(widths):
    """FLUX's single blocks: attention's result, and an activation, as one input of a layer."""
    given = [normal(3, 5, width, seed=width) for width in widths]

    def step(first, *others):
        parts = [first.transpose(0, 1), *(functional.silu(x * 2).transpose(0, 1) for x in others)]
        rows = torch.cat(parts, dim=-1)
        return rows * 2 + 1

    compared(step, *given)

    def activated(first, *others):
        rows = torch.cat([first, *map(functional.silu, others)], dim=-1)
        return functional.layer_norm(rows, (sum(widths),)) if sum(widths) % 8 == 0 else rows * 2 + 1

    compared(activated, *given)
