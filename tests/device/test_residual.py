"""Products that are added to something: the product in float32, added and rounded once."""

from dataclasses import replace

import pytest
import torch

from quantkit.device import compilers, log
from quantkit.device.backends import Backend, use
from quantkit.device.geometry import tiles
from quantkit.device.gpu import nvrtc
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.hopper.hopper_choice import COSTS
from quantkit.device.hopper.hopper_conv import conv_tiles
from quantkit.device.hopper.hopper_gemm import TILES, Family, HopperKernel, plan_launch
from quantkit.device.ops.op import Variant
from quantkit.device.ops.products.residual import SUFFIX
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.conv_windows import ConvShape, Windows
from tests.support.conv_cases import SAME, STRIDED
from tests.support.hopper_cases import (
    check_machine_code,
    codes,
    compiled,
    kernel_of,
    symbol,
    weights,
)
from tests.support.kernel_cases import DTYPES, launch, layouts_of, need, operate

FP8 = ("e4m3fn", "e4m3fn")
#: Layout of fragments -> operation, and words of its variant.
VARIANTS = [
    *((layout, "gemm_fp8", (*FP8, "token", "channel", "", "f16", "t1"))
      for layout in layouts_of("gemm_fp8")),
    ("gfx11", "conv_fp8", (*FP8, "tensor", "channel", "", "bf16", "t1")),
    ("gfx10", "gemm_int8", ("int8", "int8", "token", "channel", "", "f16", "t0")),
    ("gfx10", "conv_w4a8", ("int8", "int4", "tensor", "channel", "", "bf16", "t1")),
    ("gfx12", "gemm_fp8", (*FP8, "tensor", "channel", "", "f16", "t0")),
    ("gfx12", "gemm_fp8_sparse", (*FP8, "token", "tensor", "", "bf16", "t3")),
    ("gfx12", "gemm_int8", ("int8", "int8", "token", "channel", "", "f32", "t2")),
    ("gfx12", "gemm_fp8", (*FP8, "token", "channel", "", "f16", "t4")),
    ("gfx11", "gemm_w4a8", ("int8", "int4", "token", "channel", "", "f16", "t0")),
    ("gfx12", "conv_fp8_sparse", (*FP8, "tensor", "channel", "", "f16", "t0")),
]  # fmt: skip


@pytest.fixture
def _host_compiler():
    need(compilers.host_compiler)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(50)


def product_of(variant):
    """Return the variant of the product alone, in float32."""
    pairs = zip(variant.op.axes, variant.words, strict=True)
    words = {axis.macro: word for axis, word in pairs if axis.macro != "QK_RESIDUAL"}
    words["QK_IO"] = "f32"
    return Variant(OPS[variant.op.name.removesuffix(SUFFIX)], tuple(words.values()))


def named(op, operands):
    """Return operands by the names of their arguments."""
    names = [a.name for a in op.args if a.is_pointer and not a.written]
    return dict(zip(names, operands, strict=True))


def summed(product, residual):
    """Return what a product in float32 becomes, rounded once."""
    return (product + residual.float()).to(residual.dtype)


def same_bits(found, wanted):
    """Tell whether two results are the same, NaN in the same places."""
    here = torch.equal(found.isnan(), wanted.isnan())
    return here and torch.equal(found.nan_to_num(0), wanted.nan_to_num(0))


def sizes_of(variant):
    """Return m, n and k: tails of tiles, rows of whole vectors and others."""
    tile = tiles()[int(variant.word("QK_TILE")[1:])]
    m, n = tile.m, tile.n
    return (1, 1, 576), (m - 1, n - 1, 864), (m + 2, 8, 576), (2 * m + 4, n + 3, 1152)


@pytest.mark.usefixtures("_host_compiler")
@pytest.mark.parametrize(("layout", "name", "words"), VARIANTS, ids=str)
def test_sums_are_those_of_the_product_in_float32(layout, name, words, generator):
    variant = Variant(OPS[f"{name}_residual"], words)
    for sizes in sizes_of(variant):
        operands, options = variant.op.sample(variant, sizes, generator)
        tensors = named(variant.op, operands)
        numbers = variant.op.integers(variant.op.check(variant.op, operands, options).sizes)
        y = torch.empty_like(tensors["residual"])
        found = launch(variant, layout, {**tensors, "y": y}, numbers)["y"]
        plain = {**tensors, "bias": tensors["bias"].float(), "y": y.float()}
        product = launch(product_of(variant), layout, plain, numbers)["y"]
        assert torch.equal(found, summed(product, tensors["residual"]))


@pytest.mark.usefixtures("_host_compiler")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_product_of_zeros_leaves_every_value_as_it_is(dtype):
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    residual = values.reshape(256, 256)
    (x, w), one = torch.zeros(2, 256, 16).byte(), torch.ones(1)
    y = operate("gemm_fp8_residual", x, one, w, one, None, residual, *FP8, dtype)
    # -0 + 0 is 0.
    assert same_bits(y, residual + 0)


@pytest.mark.usefixtures("_host_compiler")
def test_views_are_read_where_they_lie_and_stay_as_they_are(generator):
    op = OPS["conv_fp8_residual"]
    variant = Variant(op, (*FP8, "tensor", "channel", "", "f16", "t1"))
    operands, options = op.sample(variant, (6, 40, 576), generator)
    room = torch.randn(*operands[-1].shape[:3], 2, 40).half()
    before, view = room.clone(), room[..., 1, :]
    y = operate(op.name, *operands[:-1], view, *options)
    assert torch.equal(room, before)
    with use(Backend.REFERENCE):
        wanted = operate(op.name, *operands[:-1], view.contiguous(), *options)
    assert torch.allclose(y, wanted, rtol=2e-3)


@pytest.mark.usefixtures("_host_compiler")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "windows", [Windows((1, 1)), SAME, STRIDED], ids=["1x1", "same", "strided"]
)
@pytest.mark.parametrize("channels", [32, 64])
def test_convolutions_that_are_unfolded_add_up_too(channels, windows, biased):
    torch.manual_seed(3)
    x = torch.randint(0, 60, (2, 6, 8, channels), dtype=torch.uint8)
    w = torch.randint(0, 60, (24, windows.taps * channels), dtype=torch.uint8)
    tall, wide = windows.outputs(6, 8)
    residual, scale = torch.randn(2, tall, wide, 24).half(), torch.tensor([0.1])
    bias = torch.randn(24).half() if biased else None
    how, float32 = (windows.numbers, *FP8), None if bias is None else bias.float()
    product = operate("conv_fp8", x, scale, w, scale, float32, *how, torch.float32)
    with log.record() as seen:
        y = operate("conv_fp8_residual", x, scale, w, scale, bias, residual, *how, torch.float16)
    assert y.dtype is torch.float16
    assert torch.equal(y, summed(product, residual))
    unfolded = channels < 64 or windows.are_pixels
    (name,) = {name for name, *_ in seen.calls}
    assert name == ("gemm_fp8_residual" if unfolded else "conv_fp8_residual")


@pytest.mark.parametrize(
    ("residual", "error", "text"),
    [
        (
            torch.zeros(1, 3, 2, 7).half(),
            ShapeError,
            r"residual has shape \(1, 3, 2, 7\), expected \(1, 3, 2, 8\)",
        ),
        (torch.zeros(6, 8).half(), ShapeError, r"residual has shape \(6, 8\), expected"),
        (
            torch.zeros(1, 3, 2, 8),
            KernelError,
            "residual is torch.float32, expected torch.float16",
        ),
    ],
)
def test_what_does_not_fit_is_refused(residual, error, text):
    x, w, one = torch.zeros(1, 3, 2, 64).byte(), torch.zeros(8, 576).byte(), torch.ones(1)
    how = (SAME.numbers, *FP8, torch.float16)
    with pytest.raises(error, match=f"conv_fp8_residual: {text}"):
        operate("conv_fp8_residual", x, one, w, one, None, residual, *how)


# ----------------------------------------------------------------------------------------- Hopper

KERNELS = [
    replace(kernel_of(TILES[name], sums, sparse=sparse), adds=True)
    for (sparse, sums), costs in COSTS.items()
    for name in costs
]
CONVS = [
    replace(kernel_of(tile, sums, sparse=sparse, family=Family.CONV), adds=True)
    for sparse, sums in COSTS
    for tile in conv_tiles(sparse=sparse, sums=sums)
]
VARIED = [
    HopperKernel(TILES["c128x160"], io="bf16", x_scale="tensor", adds=True),
    HopperKernel(TILES["c256x128"], io="f32", w_scale="tensor", adds=True),
]


# In turns, sums of two blocks leave too few registers: up to five wait in memory while one adds.
WHOLE = [kernel for kernel in (*KERNELS[1::9], *CONVS[::11]) if not kernel.tile.ping_pong]


@pytest.mark.parametrize("kernel", compiled(WHOLE), ids=symbol)
def test_hoppers_kernels_compile_without_spills(kernel):
    need(nvrtc.load_nvrtc)
    check_machine_code(kernel)


def test_rows_that_the_copy_engine_cannot_bring_are_refused():
    kernel = HopperKernel(TILES["c128x128"], adds=True)
    assert [spec.operand for spec in plan_launch(kernel, 4, 72, 64).maps][2:] == ["y", "residual"]
    with pytest.raises(KernelError, match="rows of 75 outputs are no multiple of 16 bytes"):
        plan_launch(kernel, 4, 75, 64)


def matrices(kernel, x, n, result, generator):
    """Return operands by name, in the order of the operation.

    Args:
        kernel: of the product.
        x: shape of the codes that are read.
        n: outputs.
        result: shape of what is added.
    """
    dtype, taps = DTYPES[kernel.io], 9 if kernel.family is Family.CONV else 1
    return {
        "x": codes(x, kernel.x_format, generator),
        "x_scale": torch.rand(x[0] if kernel.x_scale == "token" else 1, generator=generator) + 0.5,
        **weights(kernel, n, taps * x[-1], generator),
        "w_scale": torch.rand(n if kernel.w_scale == "channel" else 1, generator=generator) * 1e-3,
        "bias": torch.randn(n, generator=generator).to(dtype),
        "residual": torch.randn(result, generator=generator).to(dtype),
    }


def run(hopper, kernel, sizes, tensors):
    """Return what a kernel writes, on the GPU; nothing around it may change."""
    op, dtype = OPS[kernel.operation], DTYPES[kernel.io]
    names = [a.name for a in op.args if a.is_pointer and not a.written]
    inputs = [tensors[name] for name in names]
    inputs[names.index("bias")] = tensors["bias"].to(dtype)
    result = tuple(tensors["residual"].shape)
    count = torch.Size(result).numel()
    room = torch.full((count + 256,), torch.nan, dtype=dtype, device="cuda")
    y = room[128 : 128 + count].view(result)
    call = Call(hopper, kernel, sizes, [(result, dtype)], [])
    call.launch(*(t.cuda() for t in inputs), y)
    assert bool(room[:128].isnan().all())
    assert bool(room[128 + count :].isnan().all())
    return y


def check_sums(hopper, kernel, sizes, tensors):
    found = run(hopper, kernel, sizes, tensors)
    product = run(hopper, replace(kernel, adds=False, io="f32"), sizes, tensors)
    assert same_bits(found, summed(product, tensors["residual"].cuda())), sizes


#: With tails, and more tiles than multiprocessors.
SIZES = ((1, 8, 32), (300, 200, 640), (77, 72, 2048), (4100, 2056, 640), (2100, 4104, 1152))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [*KERNELS, *VARIED], ids=symbol)
def test_hoppers_sums_are_those_of_the_product_in_float32(hopper, kernel, generator):
    for m, n, k in SIZES:
        if k > 128 * (kernel.tile.team - 1):
            tensors = matrices(kernel, (m, k), n, (m, n), generator)
            check_sums(hopper, kernel, {"m": m, "n": n, "k": k}, tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CONVS, ids=symbol)
def test_hoppers_convolutions_add_up(hopper, kernel, generator):
    for shape in (
        ConvShape(1, 1, 1, 32, 8, SAME),
        ConvShape(3, 33, 31, 160, 136, SAME),
        ConvShape(2, 64, 66, 320, 320, SAME),
        ConvShape(2, 33, 30, 96, 64, STRIDED),
    ):
        pictures = (shape.batch, shape.height, shape.width, shape.channels)
        result = (shape.batch, *shape.outputs, shape.n)
        check_sums(hopper, kernel, shape, matrices(kernel, pictures, shape.n, result, generator))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", [name for name in OPS if name.endswith("_residual")])
def test_a_gpu_agrees_with_the_reference(name, generator):
    op = OPS[name]
    variant = Variant(op, tuple(axis.words[0] for axis in op.axes))
    # 70 outputs are rows that Hopper's copy engine does not bring.
    for sizes in ((130, 70, 1152), (66, 136, 1152), (1, 8, 576)):
        operands, options = op.sample(variant, sizes, generator)
        with use(Backend.GPU):
            found = operate(name, *(None if t is None else t.cuda() for t in operands), *options)
        wanted = op.reference(*operands, *options)
        error = (found.cpu().float() - wanted.float()).norm() / wanted.float().norm()
        assert float(error) < 1e-3, sizes
