"""GEGLU in a product's end: every tile and layout on the host, against float64."""

import pytest
import torch
from torch import Tensor

from quantkit.device import compilers, log
from quantkit.device.backends import Backend
from quantkit.device.ops.axes import FP8
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS, name_for
from quantkit.numerics.packed_2to4 import pack_two_of_four
from quantkit.numerics.scales import decode
from tests.support.gated_cases import GatedCase, check_nearest, gate, gated_case
from tests.support.kernel_cases import (
    DTYPES,
    every_value,
    formats_of,
    need,
    of_family,
    operate,
    shapes_of,
    variants_of,
)
from tests.support.sampling import turned

GEGLU = of_family("geglu")


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(21)


def telling(op=GEGLU[0], tile="t1", io="f16", y_format=None):
    formats = formats_of(op)
    return Variant(op, (*formats, "token", "channel", io, y_format or formats[0], tile))


@pytest.mark.parametrize(("variant", "layout"), variants_of(GEGLU))
def test_codes_are_the_nearest_at_every_tail(variant, layout, generator):
    for index, (m, n, k) in enumerate(shapes_of(variant)):
        case = gated_case(variant, m, n, k, generator, bias=index % 2 == 0)
        case.check(case.run(layout))


def of_bias(variant, h, g, scale):
    """Return a case without products: outputs and gates are the bias."""
    n = len(h)
    case = gated_case(variant, 1, n, 16, torch.Generator().manual_seed(0))
    nothing = {name: torch.zeros_like(case.tensors[name]) for name in ("x", "w")}
    product = case.product.changed(**nothing, bias=torch.cat((h, g)))
    return GatedCase(variant, product, torch.tensor([scale]))


@pytest.mark.parametrize("how", turned(DTYPES, [*FP8, "int8"], ["gfx12", "sm89"], times=2))
def test_the_gate_is_as_near_as_its_formula_for_every_value(how):
    io, y_format, layout = how
    values = every_value(io, "e4m3fn")
    # What a gate at minus infinity is, torch's CPU code does not agree on with itself.
    values = values[(values.float() > -1e30) & (values.float() < 1e30) | values.isnan()]
    for h, scale in ((1.0, 0.01), (-3.0, 0.5), (0.25, 1e-4)):
        op = OPS[name_for("geglu", y_format, y_format)]
        case = of_bias(
            telling(op, io=io, y_format=y_format), torch.full_like(values, h), values, scale
        )
        outputs, gates = case.tensors["bias"].double().chunk(2)
        nothing = torch.zeros_like(outputs)
        value, moved = gate(outputs, gates, nothing, nothing, scale)
        # The division, and what float32 keeps of h * gelu(g).
        check_nearest(case.run(layout)[0], value, moved + 2e-7 * value.abs(), y_format)


# int8 has no NaN.
@pytest.mark.parametrize("op", GEGLU[:2], ids=lambda op: op.name)
@pytest.mark.parametrize("tile", ["t1", "t4"])
def test_nan_stays_in_its_row_and_column(op, tile, generator):
    case = gated_case(telling(op, tile), 37, 45, 64, generator)
    x, w = case.tensors["x"].clone(), case.tensors["w"].clone()
    x[5, 9] = w[7, 3] = w[45 + 11, 3] = 0x7F
    spoiled = GatedCase(case.variant, case.product.changed(x=x, w=w), case.y_scale)
    codes = spoiled.run("gfx12")
    nan = decode(codes, "e4m3fn").isnan()
    expected = torch.zeros_like(nan)
    expected[5] = expected[:, [7, 11]] = True
    assert torch.equal(nan, expected)
    assert torch.equal(codes[~nan], case.run("gfx12")[~nan])


def swapped(case):
    return {"w": case.tensors["w"].roll(case.shape[1], 0)}


def neighbours_gate(case):
    w = case.tensors["w"].clone()
    w[case.shape[1] :] = w[case.shape[1] :].roll(1, 0)
    return {"w": w}


def another_bias(case):
    return {"bias": case.tensors["bias"].roll(1)}


def another_scale(case):
    factor = torch.where(torch.arange(2 * case.shape[1]) == 3, 1.02, 1.0)
    return {"w_scale": factor * case.tensors["w_scale"]}


@pytest.mark.parametrize("mistake", [swapped, neighbours_gate, another_bias, another_scale])
@pytest.mark.parametrize("op", GEGLU, ids=lambda op: op.name)
def test_the_judge_sees_a_mistake(op, mistake, generator):
    case = gated_case(telling(op), 70, 50, 96, generator)
    wrong = GatedCase(case.variant, case.product.changed(**mistake(case)), case.y_scale)
    with pytest.raises(AssertionError):
        case.check(wrong.run("gfx12"))


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_the_judge_sees_a_wrong_unit(factor, generator):
    case = gated_case(telling(), 70, 50, 96, generator)
    wrong = GatedCase(case.variant, case.product, case.y_scale * factor)
    with pytest.raises(AssertionError):
        case.check(wrong.run("gfx12"))


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("op", GEGLU, ids=lambda op: op.name)
def test_codes_do_not_depend_on_threads(op, threads, generator):
    case = gated_case(telling(op), 200, 150, 96, generator)
    assert torch.equal(case.run("gfx12", threads), case.run("gfx12"))


# ------------------------------------------------------------------------------------ the operation


def operands():
    case = gated_case(telling(io="f32"), 5, 48, 64, torch.Generator().manual_seed(3))
    names = ("x", "x_scale", "w", "w_scale", "bias", "y_scale")
    return case, [case.tensors[name] for name in names]


def test_the_cpu_runs_the_kernel():
    case, given = operands()
    with log.record() as seen:
        codes = operate("geglu_fp8", *given, *("e4m3fn",) * 3, torch.float32)
    assert [(op, where) for op, _, where in seen.calls] == [("geglu_fp8", Backend.HOST)]
    case.check(codes)
    assert torch.equal(operate("geglu_fp8", *given, *("e4m3fn",) * 3, torch.float32), codes)


def test_sparse_weights_are_the_dense_ones_without_zeros():
    _, (x, x_scale, w, *rest) = operands()
    mask = torch.zeros(w.shape, dtype=torch.bool)
    mask[:, 1::4] = mask[:, 2::4] = True
    formats = ("e4m3fn", "e4m3fn", "e5m2")
    found = operate(
        "geglu_fp8_sparse", x, x_scale, *pack_two_of_four(w, mask), *rest, *formats, torch.float32
    )
    dense = operate("geglu_fp8", x, x_scale, w * mask, *rest, *formats, torch.float32)
    assert float((found != dense).float().mean()) < 0.01


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_scales_per_group_are_the_references(sparse):
    case, (x, x_scale, w, w_scale, *rest) = operands()
    groups = torch.stack((w_scale, w_scale), dim=1)
    weights: tuple[Tensor, ...] = (w,)
    name = "geglu_fp8"
    if sparse:
        mask = torch.zeros(w.shape, dtype=torch.bool)
        mask[:, ::2] = True
        weights, name = pack_two_of_four(w, mask), "geglu_fp8_sparse"
    with log.record() as seen:
        found = operate(name, x, x_scale, *weights, groups, *rest, *("e4m3fn",) * 3, torch.float32)
    assert [where for *_, where in seen.calls] == [Backend.REFERENCE]
    whole = operate(name, x, x_scale, *weights, w_scale, *rest, *("e4m3fn",) * 3, torch.float32)
    assert found.shape == case.shape
    assert float((found != whole).float().mean()) < 0.03
