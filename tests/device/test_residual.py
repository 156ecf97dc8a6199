"""Products that are added to something: the product alone in float32, added and rounded once."""

from dataclasses import replace

import pytest
import torch

from quantkit.device import compilers, log
from quantkit.device.archs import HOST_LAYOUTS
from quantkit.device.backends import Backend, use
from quantkit.device.geometry import tiles
from quantkit.device.gpu import nvrtc
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.hopper.hopper_choice import COSTS, choose_sums
from quantkit.device.hopper.hopper_conv import conv_tiles
from quantkit.device.hopper.hopper_gemm import (
    TILES,
    Family,
    HopperKernel,
    Residual,
    Sums,
    plan_launch,
)
from quantkit.device.ops.op import Variant
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
from tests.support.kernel_cases import DTYPES, launch, need, operate
from tests.support.residual_cases import alone, gate_for, named, product_of, same_bits, summed

FP8 = ("e4m3fn", "e4m3fn")
#: Layout of fragments -> operation, and words of its variant.
VARIANTS = [
    *((layout, "gemm_fp8", (*FP8, "token", "channel", "gated", "f16", "t1"))
      for layout in HOST_LAYOUTS),
    *((layout, "conv_fp8", (*FP8, "tensor", "channel", "", "bf16", "t1"))
      for layout in HOST_LAYOUTS),
    ("gfx12", "gemm_fp8", (*FP8, "tensor", "channel", "", "f16", "t0")),
    ("gfx12", "gemm_fp8_sparse", (*FP8, "token", "tensor", "gated", "bf16", "t3")),
    ("gfx12", "gemm_int8", ("int8", "int8", "token", "channel", "gated", "f32", "t2")),
    ("sm89", "gemm_fp8", (*FP8, "token", "channel", "", "f32", "t2")),
    ("sm89", "gemm_fp8", (*FP8, "token", "channel", "gated", "f16", "t2")),
    ("gfx12", "gemm_fp8", (*FP8, "token", "channel", "gated", "f16", "t4")),
    ("gfx11", "gemm_w4a8", ("int8", "int4", "token", "channel", "gated", "f16", "t0")),
    ("gfx12", "conv_fp8_sparse", (*FP8, "tensor", "channel", "", "f16", "t0")),
]  # fmt: skip


@pytest.fixture
def _host_compiler():
    need(compilers.host_compiler)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(50)


def sizes_of(variant):
    """Return m, n, k and pictures: tails of tiles, rows of whole vectors and others."""
    tile, step = tiles()[int(variant.word("QK_TILE")[1:])], variant.op.k_multiple
    m, n = tile.m, tile.n
    return ((1, 1, step, 1), (m - 1, n - 1, 3 * step, 1), (m + 2, 8, 128, 2),
            (3 * (m // 2 + 1), n + 8, 5 * step, 3), (2 * m + 4, n + 3, 2 * step, 4))  # fmt: skip


@pytest.mark.usefixtures("_host_compiler")
@pytest.mark.parametrize(("layout", "name", "words"), VARIANTS, ids=str)
def test_sums_are_those_of_the_product_in_float32(layout, name, words, generator):
    variant = Variant(OPS[f"{name}_residual"], words)
    for m, n, k, pictures in sizes_of(variant):
        operands, options = variant.op.sample(variant, (m, n, k), generator)
        tensors = named(variant.op, operands)
        if tensors.get("gate") is not None:
            tensors["gate"] = gate_for(tensors["residual"], pictures, generator)
        problem = variant.op.check(variant.op, tuple(tensors.values()), options)
        sizes = variant.op.integers(problem.sizes)
        y = torch.empty_like(tensors["residual"])
        found = launch(variant, layout, {**tensors, "y": y}, sizes)["y"]
        plain = {**tensors, "bias": tensors["bias"].float(), "y": y.float()}
        product = launch(product_of(variant), layout, plain, sizes)["y"]
        assert torch.equal(found, summed(product, tensors["residual"], tensors.get("gate")))


@pytest.mark.usefixtures("_host_compiler")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_product_of_zeros_leaves_every_value_as_it_is(dtype):
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)
    x, w = torch.zeros(2, 256, 16, dtype=torch.uint8)
    one, gate = torch.ones(1), torch.ones(1, 256, dtype=dtype)
    for given in (None, gate):
        y = operate("gemm_fp8_residual", x, one, w, one, None, values, given, *FP8, dtype)
        # -0 + 0 is 0.
        assert same_bits(y, values + 0)


@pytest.mark.usefixtures("_host_compiler")
def test_views_are_read_where_they_lie_and_stay_as_they_are(generator):
    op = OPS["gemm_fp8_residual"]
    variant = Variant(op, (*FP8, "token", "channel", "gated", "f16", "t1"))
    operands, options = op.sample(variant, (6, 40, 32), generator)
    tensors = named(op, operands)
    room = torch.randn(6, 3, 40).half()
    before = room.clone()
    tensors |= {"residual": room[:, 1], "gate": torch.randn(3, 80).half()[:, ::2]}
    y = operate(op.name, *tensors.values(), *options)
    assert torch.equal(room, before)
    with use(Backend.REFERENCE):
        tensors |= {"residual": room[:, 1].contiguous(), "gate": tensors["gate"].contiguous()}
        wanted = operate(op.name, *tensors.values(), *options)
    assert torch.allclose(y, wanted, rtol=2e-3)


@pytest.mark.usefixtures("_host_compiler")
@pytest.mark.parametrize(
    "windows", [Windows((1, 1)), SAME, STRIDED], ids=["1x1", "same", "strided"]
)
@pytest.mark.parametrize("channels", [32, 64])
def test_convolutions_that_are_unfolded_add_up_too(channels, windows):
    torch.manual_seed(3)
    x = torch.randint(0, 60, (2, 6, 8, channels), dtype=torch.uint8)
    w = torch.randint(0, 60, (24, windows.taps * channels), dtype=torch.uint8)
    tall, wide = windows.outputs(6, 8)
    residual, scale = torch.randn(2, tall, wide, 24).half(), torch.tensor([0.1])
    how = (windows.numbers, *FP8)
    product = operate("conv_fp8", x, scale, w, scale, None, *how, torch.float32)
    with log.record() as seen:
        y = operate("conv_fp8_residual", x, scale, w, scale, None, residual, *how, torch.float16)
    assert torch.equal(y, summed(product, residual, None))
    unfolded = channels < 64 or windows.are_pixels
    (name,) = {name for name, *_ in seen.calls}
    assert name == ("gemm_fp8_residual" if unfolded else "conv_fp8_residual")


@pytest.mark.parametrize(
    ("place", "value", "error", "text"),
    [
        (
            5,
            torch.zeros(5, 8).half(),
            ShapeError,
            r"residual has shape \(5, 8\), expected \(6, 8\)",
        ),
        (5, torch.zeros(6, 8), KernelError, "residual is torch.float32, expected torch.float16"),
        (6, torch.zeros(2, 9).half(), ShapeError, r"gate has shape \(2, 9\), expected \(2, 8\)"),
        (6, torch.zeros(8).half(), ShapeError, r"gate has shape \(8,\), expected \(8, 8\)"),
        (6, torch.zeros(4, 8).half(), ShapeError, "gate of 4 pictures, expected a divisor of 6"),
        (6, torch.zeros(2, 8), KernelError, "gate is torch.float32, expected torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused(place, value, error, text):
    x, w, one = torch.zeros(6, 16).byte(), torch.zeros(8, 16).byte(), torch.ones(1)
    operands = [x, one, w, one, None, torch.zeros(6, 8).half(), torch.zeros(2, 8).half()]
    operands[place] = value
    with pytest.raises(error, match=f"gemm_fp8_residual: {text}"):
        operate("gemm_fp8_residual", *operands, *FP8, torch.float16)


# ----------------------------------------------------------------------------------------- Hopper

KERNELS = [
    replace(kernel_of(TILES[name], sums, sparse=sparse), residual=how)
    for (sparse, sums), costs in COSTS.items()
    for name in costs
    for how in (Residual.ADDED, Residual.GATED)
]
CONVS = [
    replace(kernel_of(tile, sums, sparse=sparse, family=Family.CONV), residual=Residual.ADDED)
    for sparse, sums in COSTS
    for tile in conv_tiles(sparse=sparse, sums=sums)
]
VARIED = [
    HopperKernel(TILES["c128x160"], io="bf16", x_scale="tensor", residual=Residual.GATED),
    HopperKernel(TILES["c128x192"], io="f32", w_scale="tensor", residual=Residual.GATED),
    HopperKernel(TILES["c256x128"], io="f32", residual=Residual.ADDED),
]


# In turns, sums of two blocks leave too few registers: up to five wait in memory while one adds.
WHOLE = [kernel for kernel in (*KERNELS[1::9], *CONVS[::11]) if not kernel.tile.ping_pong]


@pytest.mark.parametrize("kernel", compiled(WHOLE), ids=symbol)
def test_hoppers_kernels_compile_without_spills(kernel):
    need(nvrtc.load_nvrtc)
    check_machine_code(kernel)


def test_rows_that_the_copy_engine_cannot_bring_are_refused():
    kernel = HopperKernel(TILES["c128x128"], residual=Residual.ADDED)
    assert plan_launch(kernel, 4, 72, 64, rows=2).numbers[-1] == 2
    with pytest.raises(KernelError, match="rows of 75 outputs are no multiple of 16 bytes"):
        plan_launch(kernel, 4, 75, 64)


@pytest.mark.parametrize("rows", [64, 77, 150, 1024, None])
def test_a_tile_has_tokens_of_two_rows_of_a_gate_at_most(rows):
    modes = (Sums.FAST, Sums.ACCURATE)
    tile, _ = choose_sums(8192, 640, 640, sparse=False, sums=modes, multiprocessors=132, most=rows)
    assert tile.m <= (rows or tile.m)


def matrices(kernel, sizes, pictures, generator):
    """Return operands by name, in the order of the operation."""
    (m, n, k), dtype = sizes, DTYPES[kernel.io]
    residual = torch.randn(m, n, generator=generator).to(dtype)
    gated = kernel.residual is Residual.GATED
    return {
        "x": codes((m, k), kernel.x_format, generator),
        "x_scale": torch.rand(m if kernel.x_scale == "token" else 1, generator=generator) + 0.5,
        **weights(kernel, n, k, generator),
        "w_scale": torch.rand(n if kernel.w_scale == "channel" else 1, generator=generator) * 1e-3,
        "bias": torch.randn(n, generator=generator).to(dtype),
        "residual": residual,
        "gate": gate_for(residual, pictures, generator) if gated else None,
    }


def run(hopper, kernel, sizes, tensors, shape):
    """Return what a kernel writes, on the GPU; nothing around it may change."""
    op, dtype = OPS[kernel.operation], DTYPES[kernel.io]
    names = [a.name for a in op.args if a.is_pointer and not a.written]
    inputs = [tensors[name] for name in names]
    inputs[names.index("bias")] = tensors["bias"].to(dtype)
    nulls = [i for i, tensor in enumerate(inputs) if tensor is None]
    count = torch.Size(shape).numel()
    room = torch.full((count + 256,), torch.nan, dtype=dtype, device="cuda")
    y = room[128 : 128 + count].view(shape)
    call = Call(hopper, kernel, sizes, [(shape, dtype)], nulls)
    call.launch(*(None if t is None else t.cuda() for t in inputs), y)
    assert bool(room[:128].isnan().all())
    assert bool(room[128 + count :].isnan().all())
    return y


#: With pictures whose rows end within tiles, and more tiles than multiprocessors.
SIZES = ((1, 8, 32, 1), (300, 200, 640, 3), (77, 72, 2048, 7), (4100, 2056, 640, 4),
         (2100, 4104, 1152, 7))  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [*KERNELS, *VARIED], ids=symbol)
def test_hoppers_sums_are_those_of_the_product_in_float32(hopper, kernel, generator):
    for m, n, k, most in SIZES:
        if k <= 128 * (kernel.tile.team - 1):
            continue
        # A tile has tokens of two rows of a gate at most.
        pictures = most if m // most >= kernel.tile.m else 1
        tensors = matrices(kernel, (m, n, k), pictures, generator)
        sizes = {"m": m, "n": n, "k": k, "rows": m // pictures}
        found = run(hopper, kernel, sizes, tensors, (m, n))
        product = run(hopper, alone(kernel), sizes, tensors, (m, n))
        added = [None if t is None else t.cuda() for t in (tensors["residual"], tensors["gate"])]
        assert same_bits(found, summed(product, *added)), (m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CONVS, ids=symbol)
def test_hoppers_convolutions_add_up(hopper, kernel, generator):
    for shape in (
        ConvShape(1, 1, 1, 32, 8, SAME),
        ConvShape(3, 33, 31, 160, 136, SAME),
        ConvShape(2, 64, 66, 320, 320, SAME),
        ConvShape(2, 33, 30, 96, 64, STRIDED),
    ):
        dtype = DTYPES[kernel.io]
        result = (shape.batch, *shape.outputs, shape.n)
        tensors = matrices(kernel, (1, shape.n, shape.k), 1, generator)
        pictures = (shape.batch, shape.height, shape.width, shape.channels)
        tensors["x"] = codes(pictures, kernel.x_format, generator)
        tensors["residual"] = torch.randn(result, generator=generator).to(dtype)
        found = run(hopper, kernel, shape, tensors, result)
        product = run(hopper, alone(kernel), shape, tensors, result)
        assert same_bits(found, summed(product, tensors["residual"].cuda(), None)), shape


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", [name for name in OPS if name.endswith("_residual")])
def test_a_gpu_agrees_with_the_reference(name, generator):
    op = OPS[name]
    first = {axis.macro: axis.words[-1 if axis.macro == "QK_RESIDUAL" else 0] for axis in op.axes}
    variant = Variant(op, tuple(first.values()))
    # 70 outputs are rows that Hopper's copy engine does not bring.
    for sizes in ((130, 70, 1152), (66, 136, 1152), (1, 8, 576)):
        operands, options = op.sample(variant, sizes, generator)
        with use(Backend.GPU):
            found = operate(name, *(None if t is None else t.cuda() for t in operands), *options)
        wanted = op.reference(*operands, *options)
        error = (found.cpu().float() - wanted.float()).norm() / wanted.float().norm()
        assert float(error) < 1e-3, sizes
