"""Waves inside of a matrix take another way than those at its edges: to the same bytes."""

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.geometry import tiles
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS
from tests.support.kernel_cases import launch, need

FP8, INT8 = ("e4m3fn", "e4m3fn"), ("int8", "int8")
CASES = [
    ("gfx12", "gemm_int8", (*INT8, "token", "channel", "bf16", "t1")),
    ("gfx12", "gemm_fp8", (*FP8, "token", "channel", "bf16", "t1")),
    ("gfx11", "gemm_int8", (*INT8, "token", "tensor", "f16", "t1")),
    ("gfx12", "gemm_fp8", (*FP8, "tensor", "channel", "f32", "t1")),
    ("gfx12", "geglu_int8", (*INT8, "token", "channel", "f16", "int8", "t1")),
    ("gfx12", "geglu_fp8", (*FP8, "token", "channel", "f16", "e4m3fn", "t1")),
    ("gfx12", "project_gelu_int8", (*INT8, "f16", "int8", "t1")),
    ("sm89", "project_gelu_fp8", (*FP8, "bf16", "e4m3fn", "t1")),
]
#: As bits of float32: NaN whose payload a sum would carry over, infinities, a signalling NaN, the
#: largest number, and NaN that rounds up.
NUMBERS = (0x7FFFFFFF, -0x800000, 0x7F800001, 0x7F7FFFFF, 0x7FC08001, 0x7F800000)
#: Rows of y that are no whole vectors have edges everywhere.
LESS = 3


@pytest.fixture
def _host_compiler():
    need(compilers.host_compiler)


def operands_of(variant, *, special):
    """Return tensors by name and options, of a whole tile."""
    tile = tiles()[int(variant.word("QK_TILE")[1:])]
    gated, activated = (variant.op.name.startswith(f) for f in ("geglu", "project_gelu"))
    # Its sample has columns up to the next multiple of 16, with something before them.
    n = tile.n // 2 if gated else tile.n - 2 * activated
    generator = torch.Generator().manual_seed(3)
    operands, options = variant.op.sample(variant, (tile.m, n, 96), generator)
    names = [a.name for a in variant.op.args if a.is_pointer and not a.written]
    tensors = dict(zip(names, operands, strict=True))
    tensors |= {name: None for name in ("prefix", "smooth") if name in tensors}
    for name in ("x_scale", "w_scale", "bias") if special else ():
        tensors[name] = with_specials(tensors[name])
    return tensors, options


def with_specials(values):
    """Return a copy with NaN, infinities and the largest number among its values."""
    copy = values.clone().flatten()
    bits = torch.tensor(NUMBERS, dtype=torch.int32)
    for at, number in enumerate(bits.view(torch.float32)[: len(copy) // 8]):
        if copy.dtype == torch.float32:
            copy.view(torch.int32)[5 * at + 1] = bits[at]
        else:
            copy[5 * at + 1] = number
    return copy.reshape(values.shape)


def without_last(op, tensors, less):
    """Return the tensors of a product with fewer outputs."""
    rows = {"w", "w_scale", "bias"}
    halves = 2 if op.name.startswith("geglu") else 1

    def cut(value):
        if value is None or value.shape[0] == 1:
            return value
        kept = value.unflatten(0, (halves, -1))[:, :-less]
        return kept.flatten(0, 1).contiguous()

    return {name: cut(value) if name in rows else value for name, value in tensors.items()}


def run(variant, layout, tensors, options):
    operands = tuple(tensors.values())
    numbers = variant.op.integers(variant.op.check(variant.op, operands, options).sizes)
    ((shape, dtype),) = variant.op.outputs(operands, options)
    (written,) = [a.name for a in variant.op.args if a.written]
    made = {**tensors, written: torch.empty(shape, dtype=dtype)}
    return launch(variant, layout, made, numbers)[written]


@pytest.mark.usefixtures("_host_compiler")
@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize(("layout", "name", "words"), CASES, ids=str)
def test_edges_have_the_bytes_of_the_inside(layout, name, words, special):
    variant = Variant(OPS[name], words)
    tensors, options = operands_of(variant, special=special)
    inside = run(variant, layout, tensors, options)
    edge = run(variant, layout, without_last(variant.op, tensors, LESS), options)
    kept = inside[:, :-LESS].contiguous()
    assert torch.equal(kept.view(torch.uint8), edge.contiguous().view(torch.uint8))
    if special and inside.is_floating_point():
        assert kept.isnan().any()
        assert not kept.isnan().all()
