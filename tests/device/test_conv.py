"""Convolutions that read windows where they lie: every tile and layout on the host."""

from dataclasses import replace

import pytest
import torch

from quantkit.device import compilers, log
from quantkit.device.backends import Backend, use
from quantkit.device.ops import call as execute
from quantkit.device.ops.op import Variant
from quantkit.device.ops.products.conv import integers, why_not
from quantkit.device.ops.table import OPS
from quantkit.numerics.conv_windows import ConvShape, Windows
from tests.support.conv_cases import SAME, UNEVEN, conv_case, conv_shapes
from tests.support.kernel_cases import (
    DTYPES,
    deviation,
    formats_of,
    launch,
    need,
    of_family,
    operate,
    variants_of,
)
from tests.support.sampling import one_of_each

CONVS = of_family("conv")


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(22)


def telling(op=CONVS[0], tile="t1", io="f16"):
    return Variant(op, (*formats_of(op), "tensor", "channel", io, tile))


@pytest.mark.parametrize(("variant", "layout"), variants_of(CONVS))
def test_convolutions_are_exact_up_to_one_rounding_at_every_tail(variant, layout, generator):
    for index, shape in enumerate(conv_shapes(variant)):
        case = conv_case(variant, shape, generator, bias=index % 2 == 0)
        found = deviation(case, case.run(layout))
        assert found.within(variant.op.budget), f"{shape}: {found}"


@pytest.mark.parametrize("tile", one_of_each(("t1", "t0", "t2", "t3"), type))
@pytest.mark.parametrize("op", CONVS, ids=lambda op: op.name)
def test_sums_are_those_of_the_unfolded_windows_bit_for_bit(op, tile, generator):
    variant = telling(op, tile, "f32")
    gemm = Variant(OPS[op.name.replace("conv", "gemm")], variant.words)
    for shape in conv_shapes(variant)[1:5]:
        case = conv_case(variant, shape, generator)
        rows = shape.windows.unfold(case.tensors["x"]).reshape(-1, shape.k)
        y = torch.empty(len(rows), shape.n)
        sizes = {"m": len(rows), "n": shape.n, "k": shape.k}
        unfolded = launch(gemm, "gfx12", {**case.tensors, "x": rows, "y": y}, sizes)["y"]
        assert torch.equal(case.run("gfx12").reshape(-1, shape.n), unfolded)


# int8 has no NaN.
@pytest.mark.parametrize("op", CONVS[:2], ids=lambda op: op.name)
def test_a_nan_reaches_the_windows_that_see_it(op, generator):
    case = conv_case(telling(op), ConvShape(2, 6, 7, 64, 9, UNEVEN), generator)
    x = case.tensors["x"].clone()
    x[1, 3, 2, 17] = 0x7F
    y = case.changed(x=x).run("gfx12")
    seen = torch.zeros(x.shape, dtype=torch.uint8)
    seen[1, 3, 2] = 1
    windows = UNEVEN.unfold(seen).flatten(3).any(dim=3)
    assert torch.equal(y.isnan().all(dim=3), windows)
    assert torch.equal(y.isnan().any(dim=3), windows)
    assert 0 < int(windows.sum()) < windows.numel()


MISTAKES = {
    "no padding": {"padding": (0, 0, 0, 0)},
    "left is top": {"padding": (1, 0, 2, 3)},
    "stride": {"stride": (2, 1)},
    "dilation": {"dilation": (1, 2)},
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_the_measure_sees_other_windows(mistake, generator):
    shape = ConvShape(2, 6, 7, 64, 40, UNEVEN)
    case = conv_case(telling(), shape, generator)
    assert deviation(case, case.run("gfx12")).within(case.variant.op.budget)
    # Only what lies in the buffers: as many outputs as the right windows have.
    wrong = {**integers(replace(shape, windows=replace(UNEVEN, **mistake)))}
    kept = integers(shape)
    wrong |= {name: kept[name] for name in ("m", "n", "k", "out_height", "out_width")}
    y = torch.empty(case.result, dtype=case.dtype)
    found = launch(case.variant, "gfx12", {**case.tensors, "y": y}, wrong)["y"]
    assert not deviation(case, found).within(case.variant.op.budget)


# ------------------------------------------------------------------------------------ the operation


def convolved(shape, io="f16", op=CONVS[0]):
    case = conv_case(telling(op, io=io), shape, torch.Generator().manual_seed(4))
    names = ("x", "x_scale", "w", "w_meta", "w_scale", "bias")
    given = [case.tensors[name] for name in names if name in case.tensors]
    with log.record() as seen:
        y = operate(op.name, *given, shape.windows.numbers, *formats_of(op), DTYPES[io])
    return case, y, [(name, where) for name, _, where in seen.calls]


@pytest.mark.parametrize("io", list(DTYPES))
@pytest.mark.parametrize("op", CONVS, ids=lambda op: op.name)
def test_the_cpu_reads_windows_where_they_lie(op, io):
    case, y, ran = convolved(ConvShape(2, 9, 10, 96, 24, SAME), io, op)
    assert ran == [(op.name, Backend.HOST)]
    assert deviation(case, y).within(op.budget)


REFUSED = {
    "pixels": (ConvShape(1, 4, 4, 64, 8, Windows((1, 1))), "a GEMM as it is"),
    "few channels": (ConvShape(1, 4, 4, 32, 8, SAME), "32 channels, expected 64 or more, by 16"),
    "channels": (ConvShape(1, 4, 4, 72, 8, SAME), "72 channels, expected 64 or more, by 16"),
    "taps": (ConvShape(1, 8, 8, 64, 8, Windows((3, 11))), "33 taps, expected 32 at most"),
    "codes": (ConvShape(2, 2**14, 2**14, 64, 8, SAME), "more codes than 32 bits count"),
}


@pytest.mark.parametrize(("shape", "reason"), REFUSED.values(), ids=list(REFUSED))
def test_what_the_kernels_do_not_take_is_said(shape, reason):
    assert reason in why_not(OPS["conv_fp8"], shape)


def test_sparse_weights_want_channels_by_32():
    shape = ConvShape(1, 4, 4, 80, 8, SAME)
    assert not why_not(OPS["conv_fp8"], shape)
    assert why_not(OPS["conv_fp8_sparse"], shape) == "80 channels, expected 64 or more, by 32"


@pytest.mark.parametrize("name", ["pixels", "few channels"])
def test_other_windows_are_unfolded(name, caplog):
    execute._say.cache_clear()
    with caplog.at_level("INFO", logger="quantkit.device.ops.call"):
        case, y, ran = convolved(REFUSED[name][0])
    assert ran == [("gemm_fp8", Backend.HOST)]
    assert REFUSED[name][1] in caplog.text
    assert deviation(case, y).within(case.variant.op.budget)


def test_the_reference_can_be_asked_for():
    with use(Backend.REFERENCE):
        case, y, ran = convolved(ConvShape(2, 5, 5, 64, 8, SAME))
    assert ran == [("gemm_fp8", Backend.REFERENCE)]
    assert deviation(case, y).nmse < 1e-6


def test_pictures_without_pixels_have_no_outputs():
    shape = ConvShape(0, 5, 5, 64, 8, SAME)
    _, y, _ = convolved(shape)
    assert y.shape == (0, 5, 5, 8)
