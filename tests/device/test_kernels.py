"""Conformance: every operation on every target that runs here, against exact arithmetic.

The host runs the very sources of the GPU targets, with the fragments of each: a layout that is
wrong for gfx12, gfx11 or sm_89 shows here. Compiled objects pass their gates below.
"""

from itertools import product

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.aot.check import check_folder
from quantkit.device.aot.object_build import build
from quantkit.device.archs import ARCHS, Toolchain
from quantkit.device.gpu import nvrtc
from quantkit.device.ops.axes import FP8
from quantkit.device.ops.norms.quantize import quantize_static, quantize_token
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS, default_variants, name_for
from quantkit.device.tile_choice import variants_for
from tests.support.kernel_cases import (
    DTYPES,
    deviation,
    encode,
    every_value,
    formats_of,
    gemm_case,
    launch,
    layouts_of,
    need,
    of_family,
    paired_variants,
    same_codes,
    shapes_of,
    variants_of,
)

QUANTIZE = [op for op in OPS.values() if op.family in ("quantize_static", "quantize_token")]
GEMMS = of_family("gemm")


def paired_gemms():
    # The axes meet in the layout-free epilogue: all pairs on one layout are enough.
    return [param for op in GEMMS for param in paired_variants(op) if param.marks]


def quantize_variants():
    return [param for op in QUANTIZE for param in paired_variants(op)]


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20)


def telling(op, layout="gfx12", tile="t1"):
    words = (*formats_of(op), "token", "channel", "f16", tile)
    return pytest.param(Variant(op, words), layout, id=f"{op.name}-{layout}-{tile}")


EVERYWHERE = [telling(op, layout) for op in GEMMS for layout in layouts_of(op.name)]
# The one tile that does not take its operands through LDS.
EVERYWHERE += [telling(op, tile="t4") for op in GEMMS]


@pytest.mark.parametrize("variant", paired_gemms())
def test_gemm_is_exact_with_every_pair_of_words(variant, generator):
    test_gemm_is_exact_up_to_one_rounding_at_every_tail(variant, "gfx12", generator)


@pytest.mark.parametrize(("variant", "layout"), variants_of(GEMMS))
def test_gemm_is_exact_up_to_one_rounding_at_every_tail(variant, layout, generator):
    for index, (m, n, k) in enumerate(shapes_of(variant)):
        case = gemm_case(variant, m, n, k, generator, bias=index % 2 == 0)
        found = deviation(case, case.run(layout))
        assert found.within(variant.op.budget), f"{(m, n, k)}: {found}"


def int8_variants():
    return [param for param in variants_of(GEMMS) if param.values[0].word("QK_X_FORMAT") == "int8"]


@pytest.mark.parametrize(("variant", "layout"), int8_variants())
def test_int8_sums_are_exact(variant, layout, generator):
    # Beyond 2^24, where float32 has no odd numbers; the epilogue's float32 is the oracle's too.
    case = gemm_case(variant, 21, 37, 4128, generator)
    case.tensors["x"][:7] = case.tensors["w"][:9] = 0x7F
    case.tensors["x"][7:9] = 0x81
    ones = {name: torch.ones_like(case.tensors[name]) for name in ("x_scale", "w_scale")}
    sums = case.changed(**ones, bias=None).exact()
    assert sums.abs().max() > 2**24
    y = sums.float() * case.tensors["x_scale"].reshape(-1, 1) * case.tensors["w_scale"]
    assert torch.equal(case.run(layout), (y + case.tensors["bias"].float()).to(case.dtype))


@pytest.mark.parametrize(("variant", "layout"), EVERYWHERE)
def test_gemm_with_small_integers_is_bit_exact(variant, layout, generator):
    # 0 to 4 and their negatives: every sum is an integer that float16 holds, so any slot of any
    # fragment that is swapped, doubled or lost changes the result.
    case = gemm_case(variant, 70, 75, 160, generator, bias=False)
    integers = encode(torch.arange(-4, 5).float(), variant.word("QK_X_FORMAT"))

    def draw(like):
        return integers[torch.randint(9, like.shape, generator=generator)]

    ones = {name: torch.ones_like(case.tensors[name]) for name in ("x_scale", "w_scale")}
    case = case.changed(x=draw(case.tensors["x"]), w=draw(case.tensors["w"]), **ones)
    assert torch.equal(case.run(layout), case.exact().half())


@pytest.mark.parametrize(("variant", "layout"), EVERYWHERE)
def test_gemm_finds_every_single_product(variant, layout):
    # One non-zero in x and one in w, at the same k: exactly one output, whatever the slot.
    case = gemm_case(variant, 3, 5, 128, torch.Generator().manual_seed(1), bias=False)
    ones = {name: torch.ones_like(case.tensors[name]) for name in ("x_scale", "w_scale")}
    one = encode(torch.tensor(1.0), variant.word("QK_X_FORMAT"))
    for k in range(128):
        x = torch.zeros(3, 128, dtype=torch.uint8)
        x[1, k] = one
        tensors = {"x": x, "w": torch.zeros_like(case.tensors["w"]), **ones}
        if variant.op.sparse:
            # Keep position k % 4 and one other, the wanted one first or second in order.
            group, position = divmod(k, 4)
            other = (position + 1) % 4
            low, high = sorted((position, other))
            tensors["w_meta"] = torch.full_like(case.tensors["w_meta"], 0x44)
            shift = 4 * (group % 2)
            byte = 0x44 & (0xF0 if shift == 0 else 0x0F) | (low | high << 2) << shift
            tensors["w_meta"][4, group // 2] = byte
            tensors["w"][4, 2 * group + (position == high)] = one
        else:
            tensors["w"][4, k] = one
        expected = torch.zeros(3, 5, dtype=torch.float16)
        expected[1, 4] = 1
        assert torch.equal(case.changed(**tensors).run(layout), expected), f"k = {k}"


@pytest.mark.parametrize(("variant", "layout"), EVERYWHERE)
def test_gemm_passes_nan_and_overflow_on_as_the_cast_does(variant, layout, generator):
    case = gemm_case(variant, 20, 30, 96, generator)
    if variant.word("QK_X_FORMAT") == "int8":
        # It has no NaN: the row's scale says that there is one.
        case.tensors["x_scale"][3] = torch.nan
    else:
        case.tensors["x"][3, 17] = 0x7F
    case.tensors["x_scale"][5] = 1e30
    case.tensors["x_scale"][6] = 1e-30
    case.tensors["w_scale"][7] = 1e30
    case.tensors["w_scale"][8] = 1e-30
    y = case.run(layout)
    assert bool(y[3].isnan().all())
    assert bool(y[5, :7].isinf().all())
    assert deviation(case, y).within(variant.op.budget)


@pytest.mark.parametrize(("variant", "layout"), EVERYWHERE)
def test_gemm_scales_left_to_right_in_float32(variant, layout, generator):
    # sum * 1e30 * 1e-30 is the sum again, but * 1e38 overflows before 1e-38 can bring it back.
    case = gemm_case(variant, 4, 16, 64, generator, bias=False)
    case.tensors["x_scale"][:] = torch.tensor([1e30, 1e-30, 3e38, 1.0])
    case.tensors["w_scale"][:] = 1e-35
    t = case.tensors
    ones = case.changed(x_scale=torch.ones(4), w_scale=torch.ones(16)).exact().float()
    expected = (ones * t["x_scale"].reshape(-1, 1) * t["w_scale"]).half()
    y = case.run(layout)
    assert bool(expected[2].isinf().any())
    assert torch.equal(y.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert torch.allclose(y[finite].float(), expected[finite].float(), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("op", GEMMS, ids=lambda op: op.name)
def test_results_do_not_depend_on_threads(op, threads, generator):
    words = (*formats_of(op), "token", "channel", "f16", "t1")
    case = gemm_case(Variant(op, words), 200, 150, 96, generator)
    sizes = {"m": 200, "n": 150, "k": 96}
    y = {"y": torch.empty(200, 150, dtype=torch.float16)}
    found = launch(case.variant, "gfx12", {**case.tensors, **y}, sizes, threads=threads)
    assert torch.equal(found["y"], case.run("gfx12"))


def wrong_scale(case):
    return {"w_scale": torch.where(torch.arange(case.n) == 7, 1.02, 1.0) * case.tensors["w_scale"]}


def wrong_global_scale(case):
    return {"x_scale": case.tensors["x_scale"] * 1.02}


def wrong_row_order(case):
    return {"x_scale": case.tensors["x_scale"].roll(1)}


def wrong_code(case):
    w = case.tensors["w"].clone()
    w[11, 5] ^= 0x80
    return {"w": w}


def wrong_nibble(case):
    meta = case.tensors["w_meta"].clone()
    meta[11, 2] = torch.where(meta[11, 2] & 0xF == 0x4, 0xE, 0x4) | meta[11, 2] & 0xF0
    w = case.tensors["w"].clone()
    w[11, 8:10] = 0x7E
    return {"w_meta": meta, "w": w}


def no_bias(case):
    del case
    return {"bias": None}


DENSE_MISTAKES = [wrong_scale, wrong_global_scale, wrong_row_order, wrong_code, no_bias]
MISTAKES = [
    pytest.param(op, mistake, id=f"{op.name}-{mistake.__name__}")
    for op in GEMMS
    # Dense weights have no nibbles to get wrong.
    for mistake in DENSE_MISTAKES + [wrong_nibble] * op.sparse
]


@pytest.mark.parametrize(("op", "mistake"), MISTAKES)
def test_the_measure_sees_a_mistake(op, mistake, generator):
    """The kernel is given other operands than the oracle: the suite must fail."""
    words = (*formats_of(op), "token", "channel", "f16", "t1")
    case = gemm_case(Variant(op, words), 40, 50, 64, generator)
    if mistake is wrong_nibble:
        # Both have the largest codes in that group, so that only its positions differ.
        case = case.changed(w=wrong_nibble(case)["w"])
    case.tensors["w"][11, 5] = 0x70
    found = deviation(case, case.changed(**mistake(case)).run("gfx12"))
    assert not found.within(op.budget)
    assert deviation(case, case.run("gfx12")).within(op.budget)


def smooth_of(variant, k):
    """Return factors of columns, None where the variant has none."""
    drawn = torch.rand(k, generator=torch.Generator().manual_seed(k)) * 2 + 0.01
    return drawn if variant.word("QK_SMOOTH") else None


@pytest.mark.parametrize("layout", ["gfx12", "sm89"])
@pytest.mark.parametrize("variant", quantize_variants())
def test_quantize_gives_torchs_bytes_for_every_value(variant, layout):
    if layout == "sm89" and variant.op.family == "quantize_static":
        pytest.skip("encodes one by one on every target")
    io, fmt = variant.word("QK_IO"), variant.word("QK_X_FORMAT")
    values = every_value(io, fmt)
    for k, scale in ((64, 1.0), (250, 0.37), (33, 1e-30), (16, 1e30), (1, 2.0**-130)):
        x = values[: values.numel() // k * k].reshape(-1, k)
        check_quantize(variant, x, scale, fmt, layout)


@pytest.mark.parametrize("variant", quantize_variants())
@pytest.mark.parametrize(
    ("m", "k"),
    [
        (1, 1),
        (1, 513),
        (7, 17),
        (8, 512),
        (9, 1025),
        (1, 8191),
        (3, 2731),
        (65, 128),
        (9, 2056),
        (2, 16400),
    ],
)
def test_quantize_at_every_tail(variant, m, k):
    generator = torch.Generator().manual_seed(m * k)
    x = (torch.randn(m, k, generator=generator) * 3).to(DTYPES[variant.word("QK_IO")])
    x[m // 2] = 0
    x[0, k - 1] = torch.nan if m > 2 else 1
    check_quantize(variant, x, 0.013, variant.word("QK_X_FORMAT"))


@pytest.mark.parametrize("fmt", FP8)
def test_a_row_too_small_for_a_scale_keeps_the_scale_one(fmt):
    # amax / max underflows to 0; divided by that, zeros would become NaN and the rest the maximum.
    variant = Variant(OPS[name_for("quantize_token", fmt)], ("f32", fmt, ""))
    check_quantize(variant, torch.tensor([[1e-45, 0.0, -1e-44]]), 1.0, fmt)


def check_quantize(variant, x, scale, fmt, layout="gfx12"):
    m, k = x.shape
    smooth = smooth_of(variant, k)
    given = torch.tensor([scale])
    static = variant.op.family == "quantize_static"
    tensors = {
        "x": x,
        "smooth": smooth,
        "scale": given if static else torch.empty(m),
        "q": torch.empty(m, k, dtype=torch.uint8),
    }
    out = launch(variant, layout, tensors, {"m": m, "k": k})
    if static:
        same_codes(out["q"], quantize_static(x, smooth, given, fmt), fmt)
    else:
        scales, q = quantize_token(x, smooth, fmt)
        assert torch.equal(out["scale"].nan_to_num(-1), scales.nan_to_num(-1))
        same_codes(out["q"], q, fmt)


def telling_objects(op, arch):
    """Return per tile the variant with everything switched on, in float16."""
    return [
        v
        for v in variants_for(arch, default_variants())
        if v.op is op
        and v.word("QK_IO") == "f16"
        and v.word("QK_X_SCALE") in ("", "tensor" if op.name.startswith("conv") else "token")
        and v.word("QK_W_SCALE") in ("", "channel")
    ]


COMPILED = [arch for arch in ARCHS.values() if arch.register_file]
LOOKED_AT = {"gfx1201", "gfx1100", "gfx11-generic", "sm_89"}


def gated():
    """Yield every target with every operation: a product of some is always looked at, the first
    operation of a family on gfx1201 by the slow tests. Objects of gfx11-generic are gfx1102's; of
    all attention in 16 bit test_wide_values looks at those, attention's codes end its loop."""
    first = {op.family: op for op in reversed(OPS.values())}
    for arch, op in product(COMPILED, OPS.values()):
        slow = arch.name == "gfx1201" and op is first[op.family]
        slow &= op.family not in ("attention_f16", "attention_codes")
        marks = [pytest.mark.slow if slow else pytest.mark.exhaustive]
        marks = [] if op is first["conv"] and arch.name in LOOKED_AT else marks
        yield pytest.param(arch, op, marks=marks, id=f"{arch.name}-{op.name}")


@pytest.mark.parametrize(("arch", "op"), gated())
def test_objects_pass_the_gates(arch, op, tmp_path):
    variants = telling_objects(op, arch)
    if arch.toolchain is Toolchain.CLANG:
        need(compilers.clang)
        need(compilers.objdump)
    else:
        need(nvrtc.load_nvrtc)
    build(arch.name, tmp_path / "objects", variants)
    report = check_folder(tmp_path / "objects")
    assert [finding.kernel.symbol for finding in report.findings] == [v.symbol for v in variants]
    assert not [problem for finding in report.findings for problem in finding.problems]
