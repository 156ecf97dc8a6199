"""Products that end in codes of an activation, of the product's rounded output.

That comes from the plain product of the same tile, whose oracle is in test_kernels; activation,
rounding and codes are torch's, in float64.
"""

from dataclasses import dataclass

import pytest
import torch

from quantkit.device import choosing, compilers, log
from quantkit.device.archs import ARCHS
from quantkit.device.backends import Backend, fast_sums
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.hopper.hopper_choice import COSTS
from quantkit.device.hopper.hopper_gemm import (
    SHARED_LIMIT,
    TILES,
    Family,
    HopperKernel,
    Sums,
    arguments,
    plan_launch,
)
from quantkit.device.ops.op import Variant
from quantkit.device.ops.products.project_gelu import ACTIVATIONS
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.formats import FORMATS
from tests.support.hopper_cases import check_machine_code, compiled, kernel_of, symbol
from tests.support.kernel_cases import (
    DTYPES,
    every_value,
    launch,
    need,
    operate,
    shapes_of,
    variants_of,
)
from tests.support.sampling import turned

OPERATIONS = [op for op in OPS.values() if op.family == "project_gelu"]
#: Share of the value, and what is added: how far activation.h and gelu.h say that they are off.
OFF = {"silu": (4e-6, 1e-15), "tanh": (4e-6, 1e-15), "gelu": (1.8e-4, 1.3e-7)}


@dataclass(frozen=True)
class Case:
    """Operands of one call, those of the product and those behind it."""

    product: tuple
    others: tuple
    activation: str
    formats: tuple[str, str, str]
    dtype: torch.dtype

    @property
    def prefix_columns(self):
        prefix = self.others[0]
        return 0 if prefix is None else prefix.shape[1]

    def on(self, device):
        def moved(operands):
            return tuple(None if t is None else t.to(device) for t in operands)

        return Case(moved(self.product), moved(self.others), *self.how)

    @property
    def how(self):
        return self.activation, self.formats, self.dtype

    def together(self, op):
        return operate(op.name, *self.product, *self.others, self.activation, *self.formats,
                       self.dtype)  # fmt: skip

    def product_alone(self, op):
        """Return what is activated, of the plain product, wherever the operands are."""
        name = op.name.replace("project_gelu", "gemm")
        return operate(name, *self.product, *self.formats[:2], self.dtype)


def activated(x, word):
    """Return the activation in float64."""
    x = x.double()
    if word == "gelu":
        return x * torch.special.ndtr(x)
    inner = x if word == "silu" else 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    return x * inner.sigmoid()


def coded(y, smooth, scale, fmt):
    """Return what the codes of float32 stand for: divided, saturated and rounded once."""
    quotients = (y if smooth is None else y * smooth) / scale
    if fmt == "int8":
        return quotients.round().clamp(-127, 127).double()
    return (
        quotients.clamp(-FORMATS[fmt].max, FORMATS[fmt].max).to(FORMATS[fmt].torch_dtype).double()
    )


def numbers_of(codes, fmt):
    """Return what codes stand for; NaN where a NaN was."""
    values = codes.view(FORMATS[fmt].torch_dtype).double()
    return torch.where(values < -FORMATS[fmt].max, torch.nan, values)


def check(found, y, case):
    """Hold codes to those of torch's activation, as far off as the kernels' may be.

    Args:
        found: the codes.
        y: what is activated, as the product rounds it.
        case: what else there is.
    """
    prefix, smooth, scale = case.others
    exact, (share, constant) = activated(y, case.activation), OFF[case.activation]
    # torch rounds float64 to 16 bit by way of float32.
    moved = ((share + 2e-7) * exact.abs() + constant).nan_to_num(posinf=0)

    def codes_of(activation):
        rows = activation.float().to(case.dtype)
        rows = rows if prefix is None else torch.cat([prefix, rows], dim=1)
        return coded(rows.float(), smooth, scale, case.formats[-1])

    # As numbers: zeros have signs.
    found = numbers_of(found, case.formats[-1])
    least, nearest, most = (codes_of(exact + d) for d in (-moved, 0, moved))
    there = ~nearest.isnan()
    assert torch.equal(found.isnan(), ~there)
    assert bool(((least <= found) & (found <= most))[there].all())
    left = slice(case.prefix_columns)
    assert torch.equal(found[:, left].nan_to_num(), nearest[:, left].nan_to_num())
    assert int((found != nearest)[there].sum()) <= 1 + 0.03 * found.numel()


def drawn(variant, sizes, *, seed=0):
    """Return a case of a variant: which operands there are follows from the sizes."""
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    operands, (activation, *formats, dtype) = variant.op.sample(variant, sizes, generator)
    return Case(operands[:-3], operands[-3:], activation, tuple(formats), dtype)


def on_host(case, variant, layout, threads=2):
    """Return the codes of the kernel, and the plain product of the same tile."""
    x_format, w_format, io, _, tile = variant.words
    x, x_scale, *_, w_scale, _ = case.product
    names = [a.name for a in variant.op.args if a.is_pointer and not a.written]
    tensors = dict(zip(names, (*case.product, *case.others), strict=True))
    m, n, k = len(x), len(tensors["w"]), x.shape[1]
    sizes = {"m": m, "n": n, "k": k}
    # One scale for all, and the same for each, are the same product: one compile of it is enough.
    scales = {"x_scale": x_scale.expand(m), "w_scale": w_scale.expand(n)}
    gemm = OPS[variant.op.name.replace("project_gelu", "gemm")]
    plain = Variant(gemm, (x_format, w_format, "token", "channel", io, tile))
    y = torch.empty(m, n, dtype=case.dtype)
    y = launch(plain, layout, {**tensors, **scales, "y": y}, sizes)["y"].clone()
    numbers = {
        "prefix_columns": case.prefix_columns,
        "act": 1 + list(ACTIVATIONS).index(case.activation),
        "per_token": int(len(x_scale) > 1),
        "per_channel": int(len(w_scale) > 1),
    }
    q = torch.empty(m, case.prefix_columns + n, dtype=torch.uint8)
    found = launch(variant, layout, {**tensors, "q": q}, {**sizes, **numbers}, threads=threads)
    return found["q"], y


@pytest.fixture
def host():
    need(compilers.host_compiler)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("variant", "layout"), variants_of(OPERATIONS))
def test_codes_are_the_nearest_at_every_tail(variant, layout):
    for sizes in shapes_of(variant):
        case = drawn(variant, sizes)
        found, y = on_host(case, variant, layout)
        check(found, y, case)


def telling(op=OPERATIONS[0], io="f16", y_format=None):
    formats = [op.words(f"QK_{of}_FORMAT")[0] for of in "XWY"]
    return Variant(op, (*formats[:2], io, y_format or formats[2], "t1"))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("case", turned(("e4m3fn", "e5m2", "int8"), DTYPES))
def test_every_value_has_the_nearest_code(case):
    """A product of zeros is its bias."""
    y_format, io = case
    op = OPS[f"project_gelu_{'int8' if y_format == 'int8' else 'fp8'}"]
    variant, values = telling(op, io, y_format), every_value(io, "e4m3fn")
    n, generator = len(values), torch.Generator().manual_seed(1)
    smooth, one = torch.rand(n, generator=generator) + 0.1, torch.ones(1)
    x, w = torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(n, 16, dtype=torch.uint8)
    for word in ACTIVATIONS:
        # Large values, which activations leave, have quotients by 0.375 that are ties.
        for factors, scale in ((smooth, 0.02), (None, 0.375), (None, 1e-4)):
            product, others = (x, one, w, one, values), (None, factors, torch.tensor([scale]))
            formats = (*variant.words[:2], y_format)
            case = Case(product, others, word, formats, DTYPES[io])
            found, y = on_host(case, variant, "gfx12", threads=5)
            assert torch.equal(y[0].nan_to_num(), (values + 0).nan_to_num())
            check(found, y, case)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("word", ACTIVATIONS)
def test_the_judge_sees_a_mistake(word):
    case = drawn(telling(), (65, 46, 96))
    prefix, smooth, scale = case.others
    case = Case(case.product, case.others, word, case.formats, case.dtype)
    found, y = on_host(case, telling(), "gfx12")
    check(found, y, case)
    assert len(found.unique()) > 100
    others = (w for w in ACTIVATIONS if w != word and {w, word} != {"gelu", "tanh"})
    mistakes = [
        (y.roll(1, 1), case),
        (y, spoiled(case, prefix=prefix.roll(1, 0))),
        (y, spoiled(case, smooth=smooth.roll(1))),
        (y, spoiled(case, scale=scale * 1.02)),
        *((y, Case(case.product, case.others, w, case.formats, case.dtype)) for w in others),
    ]
    for wrong, spoilt in mistakes:
        with pytest.raises(AssertionError):
            check(found, wrong, spoilt)


@pytest.mark.usefixtures("host")
def test_nan_stays_in_its_row_and_column():
    variant = telling()
    case = drawn(variant, (37, 45, 64))
    x, x_scale, w, *others = case.product
    x, w = x.clone(), w.clone()
    x[5, 9] = w[7, 3] = 0x7F
    case = Case((x, x_scale, w, *others), case.others, *case.how)
    codes, y = on_host(case, variant, "gfx12")
    expected = torch.zeros(37, 45, dtype=torch.bool)
    expected[5] = expected[:, 7] = True
    assert torch.equal(codes & 0x7F == 0x7F, expected)
    check(codes, y, case)


def test_the_sample_has_every_kind_of_operand():
    """What the tests above and the conformance rely on."""
    cases = [drawn(telling(), sizes) for sizes in ((1, 2, 64), (5, 3, 96), (6, 4, 64), (4, 7, 32))]
    for place in range(2):
        assert {case.others[place] is None for case in cases} == {True, False}


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_sizes_tell_whether_anything_is_smoothed(op):
    """Hopper has kernels of their own for either."""
    for m in (5, 6):
        operands, options = op.sample(telling(op), (m, 3, 96), torch.Generator().manual_seed(1))
        smooth = operands[[argument.name for argument in op.args].index("smooth")]
        assert op.check(op, operands, options).sizes["changes"] == (smooth is not None) == m % 2


def spoiled(case, **changes):
    names = ("prefix", "smooth", "scale")
    others = {**dict(zip(names, case.others, strict=True)), **changes}
    return Case(case.product, tuple(others.values()), *case.how)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"prefix": torch.zeros(6, 24).half()},
            ShapeError,
            "24 prefix columns before 16, expected",
        ),
        (
            {"prefix": torch.zeros(5, 32).half()},
            ShapeError,
            r"prefix has shape \(5, 32\), expected",
        ),
        ({"prefix": torch.zeros(6, 32)}, KernelError, "prefix is torch.float32, expected"),
        ({"smooth": torch.ones(16)}, ShapeError, r"smooth has shape \(16,\), expected \(48,\)"),
        ({"smooth": torch.ones(48).half()}, KernelError, "smooth is torch.float16, expected"),
        ({"scale": torch.ones(2)}, ShapeError, "scale"),
    ],
    ids=["odd", "rows", "dtype", "smooth", "half", "scale"],
)
def test_operands_that_do_not_fit_are_refused(changes, error, text):
    case = spoiled(drawn(telling(), (6, 4, 64)), **changes)
    with pytest.raises(error, match=f"project_gelu_fp8: {text}"):
        case.together(OPERATIONS[0])


def test_an_unknown_activation_is_refused():
    case = drawn(telling(), (6, 4, 64))
    case = Case(case.product, case.others, "relu", case.formats, case.dtype)
    with pytest.raises(KernelError, match="activation 'relu', expected one of silu, gelu, tanh"):
        case.together(OPERATIONS[0])


# ------------------------------------------------------------------------------------- on Hopper

#: Every kernel that a shape may take.
KERNELS = [
    kernel_of(TILES[name], sums, sparse=sparse, family=Family.GELU, activation="tanh")
    for (sparse, sums), costs in COSTS.items()
    for name in costs
]
VARIED = [
    HopperKernel(TILES["p128x192"], False, Family.GELU, False, activation="gelu", changes=True),
    HopperKernel(TILES["c192x144"], family=Family.GELU, io="bf16", activation="gelu", changes=True),
    HopperKernel(TILES["c128x192"], True, Family.GELU, io="f32", activation="silu", changes=True),
    HopperKernel(TILES["c192x192"], True, Family.GELU, False, y_format="e5m2", activation="silu"),
    kernel_of(TILES["p128x192"], Sums.INT8, family=Family.GELU, y_format="int8", activation="gelu"),
]


@pytest.mark.parametrize("kernel", compiled(KERNELS + VARIED), ids=symbol)
def test_kernels_compile_without_spills_to_matrix_instructions(kernel):
    assert kernel.shared_bytes <= SHARED_LIMIT
    assert kernel.stages >= 2
    check_machine_code(kernel)


def test_arguments_end_in_the_codes_and_the_columns_beside_them():
    launched = plan_launch(KERNELS[0], 300, 208, 640, prefix_columns=48)
    assert arguments(KERNELS[0]) == (
        *("x_map", "x_scale", "w_map", "w_scale", "bias", "prefix", "smooth", "scale"),
        *("q", "m", "n", "k", "prefix_columns", "group"),
    )
    assert launched.numbers[:4] == (300, 208, 640, 48)
    assert [spec.operand for spec in launched.maps] == ["x", "w"]


SHAPES = [(1, 16, 64), (77, 1040, 640), (333, 1001, 1152), (130, 272, 1312), (700, 4614, 384)]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fast", [False, True], ids=["accurate", "fast"])
@pytest.mark.parametrize("io", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_codes_are_the_nearest_on_a_gpu(op, io, fast):
    for m, n, k in (*SHAPES, *((m + 3, n + 1, k) for m, n, k in SHAPES)):
        case = drawn(telling(op, io), (m, n, k)).on("cuda")
        with log.record() as seen, fast_sums() if fast else torch.no_grad():
            found, y = case.together(op), case.product_alone(op)
        check(found, y, case)
        assert {where for *_, where in seen.calls} == {Backend.GPU}


def exact(case):
    """Return the case with codes of small integers for FP8's, whose sums are exact in any order."""

    def small(codes):
        values = torch.randint(-2, 3, codes.shape, device="cuda").float()
        return values.to(torch.float8_e4m3fn).view(torch.uint8)

    x, x_scale, w, *rest = case.product
    if case.formats[0] == "e4m3fn":
        x, w, x_scale = small(x), small(w), x_scale * 1000
    return Case((x, x_scale, w, *rest), case.others, *case.how)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, ids=symbol)
def test_every_tile_writes_all_codes_and_nothing_else(hopper, kernel):
    op, m, n, k = kernel.op, 300, 400, 640
    variant = Variant(op, (kernel.x_format, kernel.w_format, "f16", kernel.x_format, "t1"))
    case = exact(drawn(variant, (m, n, k)).on("cuda"))
    case = Case(case.product, case.others, "tanh", case.formats, case.dtype)
    operands = [*case.product, *case.others]
    nulls = [i for i, tensor in enumerate(operands) if tensor is None]
    n, prefix_columns = len(case.product[2]), case.prefix_columns
    room = torch.full((m * (n + prefix_columns) + 512,), 0x77, dtype=torch.uint8, device="cuda")
    q = room[256:-256].view(m, n + prefix_columns)
    sizes = {"m": m, "n": n, "k": k, "prefix_columns": prefix_columns}
    call = Call(hopper, kernel, sizes, [(tuple(q.shape), torch.uint8)], nulls)
    call.launch(*operands, q)
    check(q, case.product_alone(op), case)
    assert len(q[:, prefix_columns:].unique()) > 100
    assert bool((room[:256] == 0x77).all())
    assert bool((room[-256:] == 0x77).all())


# ------------------------------------------------------------------------------ where it is used


@pytest.mark.parametrize("op", [op.name for op in OPERATIONS])
@pytest.mark.parametrize("arch", ["gfx1201", "gfx1100", "sm_89", "sm_90a"])
def test_accurate_dense_products_on_hopper_are_faster_apart(arch, op):
    device = torch.device("cuda", 0)
    slow = arch == "sm_90a" and op in {"project_gelu_fp8", "project_gelu_int8"}
    with choosing.supposing(ARCHS[arch]):
        assert choosing.pays(op, device, fast=False) is not slow
        assert choosing.pays(op, device, fast=True)
    assert choosing.pays(op, torch.device("cpu"), fast=False)


def test_what_is_faster_apart_are_operations():
    assert {op for arch in ARCHS.values() for op in arch.slow_ends} <= OPS.keys()
