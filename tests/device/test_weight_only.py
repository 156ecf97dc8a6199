"""Products of 16-bit inputs and packed weights, against float64."""

from dataclasses import dataclass, replace

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.ops.op import Variant, all_variants
from quantkit.device.ops.products.weight_only import BLOCKS, FORMATS, gemm_w16
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError, ShapeError
from tests.support.kernel_cases import deviation, launch, layouts_of, need, operate
from tests.support.sampling import one_of_each

OP = OPS["gemm_w16"]
NAMES = ("x", "w", "w_group", "w_scale", "bias")
LAYOUTS = layouts_of("gemm_w16")
#: Around every edge: of 16 and 64 tokens, of 32 outputs, of a pass of 8 or 16 groups along K.
SHAPES = (
    (1, 1, 32),
    (1, 33, 96),
    (15, 31, 544),
    (16, 32, 512),
    (17, 70, 288),
    (64, 31, 1152),
    (65, 33, 256),
)


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(16)


@dataclass(frozen=True)
class Case:
    """Operands of one call."""

    variant: Variant
    tensors: dict

    @property
    def k(self):
        return self.tensors["x"].shape[1]

    def run(self, layout):
        x, w, scale = (self.tensors[name] for name in ("x", "w", "w_scale"))
        y = torch.empty(len(x), len(w), dtype=x.dtype)
        sizes = {"m": len(x), "n": len(w), "k": self.k, "channels": int(scale.numel() > 1)}
        return launch(self.variant, layout, {**self.tensors, "y": y}, sizes)["y"]

    def exact(self):
        """Return the result in float64, unrounded."""
        return self._with(self.tensors["x"].double(), self.tensors["bias"])

    def sizes(self):
        """Return the sum of the magnitudes of all terms."""
        weight = self._with(torch.eye(self.k, dtype=torch.float64), None).abs()
        y = self.tensors["x"].double().abs() @ weight
        bias = self.tensors["bias"]
        return y if bias is None else y + bias.double().abs()

    def changed(self, **tensors):
        return replace(self, tensors={**self.tensors, **tensors})

    def _with(self, x, bias):
        t, fmt = self.tensors, self.variant.word("QK_W_FORMAT")
        bias = None if bias is None else bias.double()
        double = torch.float64
        return gemm_w16(x, t["w"], t["w_group"], t["w_scale"], bias, fmt, precision=double)


def case_of(fmt, io, shape, generator):
    variant = Variant(OP, (io, fmt, "m16" if shape[0] <= 16 else "m64"))
    operands, _ = OP.sample(variant, shape, generator)
    return Case(variant, dict(zip(NAMES, operands, strict=True)))


EVERY = [(fmt, io, at) for fmt in FORMATS for io in ("f16", "bf16") for at in LAYOUTS]


@pytest.mark.parametrize(
    "how", one_of_each(EVERY, lambda how: how[2] if how[2] != "gfx12" else how), ids="-".join
)
def test_products_are_exact_but_for_the_order_of_sums(how, generator):
    fmt, io, layout = how
    for index, shape in enumerate(SHAPES):
        case = case_of(fmt, io, shape, generator)
        if index % 2:
            case = case.changed(bias=None)
        if index % 3 and fmt not in BLOCKS:
            case = case.changed(w_scale=case.tensors["w_scale"][:1].clone())
        found = deviation(case, case.run(layout))
        assert found.within(OP.budget), (shape, found)


SMALLEST = 2.0**-24
EXTREME = {
    "zero": 0.0,
    "negative": -0.25,
    "subnormal": SMALLEST,
    "largest": 65504.0,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", EXTREME.values(), ids=EXTREME)
@pytest.mark.parametrize("fmt", BLOCKS)
def test_scales_of_groups_are_never_rounded(fmt, scale, layout, generator):
    case = case_of(fmt, "f16", (5, 40, 96), generator)
    x = torch.full((5, 96), 2.0**-10 if scale > 1 else 64.0, dtype=torch.float16)
    lowest = 0x00 if fmt == "q4_0" else 0x81
    w = torch.full_like(case.tensors["w"], lowest)
    w[1::2] = 0xFF if fmt == "q4_0" else 0x7F
    w_scale = torch.full((40, 3), scale).half()
    w_scale[:, 2] = 0.0
    bias = torch.zeros(40, dtype=torch.float16)
    case = case.changed(x=x, w=w, w_scale=w_scale, bias=bias)
    y = case.run(layout)
    assert torch.equal(y, case.exact().half())
    assert bool(y.any()) == (scale != 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("factor", [-15, 0, 1, 15])
def test_every_int4_code_times_every_factor(factor, layout, generator):
    case = case_of("int4", "bf16", (16, 16, 32), generator)
    codes = torch.arange(16, dtype=torch.uint8)
    w = (codes | codes.flip(0) << 4).expand(16, 16).contiguous()
    group = torch.full((16, 1), factor, dtype=torch.int8).view(torch.uint8)
    # A row of x has one 1: what comes out are the weights.
    x = torch.eye(32, dtype=torch.bfloat16)[8:24].contiguous()
    case = case.changed(x=x, w=w, w_group=group, w_scale=torch.ones(1), bias=None)
    wanted = torch.cat((torch.arange(16) - 8, 7 - torch.arange(16)))[8:24] * factor
    assert torch.equal(case.run(layout).float(), wanted.float().reshape(16, 1).expand(16, 16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_of_channels_may_be_anything(layout, generator):
    case = case_of("int8", "f16", (3, 8, 64), generator)
    scale = torch.tensor([0.0, -1.0, 1e-40, -1e-45, 1e-7, 3e38, torch.inf, torch.nan])
    case = case.changed(w_scale=scale, bias=torch.zeros(8, dtype=torch.float16))
    y, wanted = case.run(layout), case.exact().half()
    assert torch.equal(y.isnan(), wanted.isnan())
    assert torch.equal(y[:, :4], wanted[:, :4])
    assert torch.equal(y[:, 5:7], wanted[:, 5:7])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_stays_in_its_row_and_its_column(layout, generator):
    case = case_of("e4m3fn", "bf16", (20, 40, 96), generator)
    case.tensors["w"][7, 95] = 0x7F
    case.tensors["x"][3, 0] = torch.nan
    wrong = case.run(layout).isnan()
    wanted = torch.zeros_like(wrong)
    wanted[3] = wanted[:, 7] = True
    assert torch.equal(wrong, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", ["int4", "q4_0"])
def test_a_wrong_scale_of_one_group_shows(fmt, layout, generator):
    case = case_of(fmt, "f16", (5, 40, 96), generator)
    name = "w_group" if fmt == "int4" else "w_scale"
    wrong = case.tensors[name].clone()
    wrong[7, 2] = 3 if wrong[7, 2] != 3 else 4
    right, other = case.run(layout), case.changed(**{name: wrong}).run(layout)
    assert [c for c in range(40) if not torch.equal(right[:, c], other[:, c])] == [7]


def test_rows_do_not_depend_on_how_many_there_are(generator):
    case = case_of("int4", "f16", (64, 40, 1152), generator)
    few = case_of("int4", "f16", (1, 40, 1152), generator).variant
    alone = replace(case.changed(x=case.tensors["x"][:1].clone()), variant=few)
    # Waves take other groups there, so sums have another order.
    first = case.run("gfx12")[:1].float()
    torch.testing.assert_close(alone.run("gfx12").float(), first, rtol=2e-3, atol=2e-3)
    assert torch.equal(case.run("gfx12"), case.run("gfx12"))


def test_every_variant_names_its_kernel():
    assert len({v.symbol for v in all_variants(OP)}) == 2 * len(FORMATS) * 2


BAD = {
    "float32": ({"x": torch.ones(2, 64)}, KernelError, "expected float16 or bfloat16"),
    "vector": ({"x": torch.ones(64).half()}, ShapeError, "expected \\(M, K\\)"),
    "width": ({"w": torch.zeros(3, 64, dtype=torch.uint8)}, ShapeError, "w has shape"),
    "signed": ({"w": torch.zeros(3, 32, dtype=torch.int8)}, KernelError, "w is torch.int8"),
    "no factors": ({"w_group": None}, KernelError, "belongs to int4"),
    "factors": ({"w_group": torch.ones(3, 1, dtype=torch.uint8)}, ShapeError, "w_group has"),
    "scale": ({"w_scale": torch.ones(2)}, ShapeError, "w_scale has shape"),
    "half scale": ({"w_scale": torch.ones(3).half()}, KernelError, "w_scale is"),
    "bias": ({"bias": torch.ones(3)}, KernelError, "bias is torch.float32"),
}


@pytest.mark.parametrize(("changes", "error", "text"), BAD.values(), ids=BAD)
def test_operands_that_do_not_fit_are_refused(changes, error, text, generator):
    tensors = case_of("int4", "f16", (2, 3, 64), generator).tensors
    with pytest.raises(error, match=text):
        operate("gemm_w16", *{**tensors, **changes}.values(), "int4")


def test_an_unknown_format_is_refused(generator):
    tensors = case_of("int4", "f16", (2, 3, 64), generator).tensors
    with pytest.raises(KernelError, match="q5_1"):
        operate("gemm_w16", *tensors.values(), "q5_1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("io", ["f16", "bf16"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_gpu_gives_the_same(fmt, io, generator):
    for shape in SHAPES:
        case = case_of(fmt, io, shape, generator)
        operands = [None if t is None else t.cuda() for t in case.tensors.values()]
        first, again = (operate("gemm_w16", *operands, fmt) for _ in range(2))
        assert torch.equal(first, again)
        found = deviation(case, first.cpu())
        assert found.within(OP.budget), (shape, found)
