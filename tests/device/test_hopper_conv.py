"""The convolutions of Hopper: geometry, choice, the operation on every back end, and their sums."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from quantkit.device import log
from quantkit.device.backends import Backend, use
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.hopper.hopper_choice import COSTS
from quantkit.device.hopper.hopper_conv import (
    choose_conv_tile,
    conv_numbers,
    conv_tiles,
    pixel_tiles,
    plan_conv,
    why_not,
)
from quantkit.device.hopper.hopper_gemm import (
    CONV_NUMBERS,
    TILES,
    Family,
    HopperKernel,
    Sums,
    arguments,
)
from quantkit.device.hopper.tensormap import ITEM_BYTES
from quantkit.device.ops.products.conv import why_not as why_not_on_the_host
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.conv_windows import ConvShape, Windows
from quantkit.numerics.formats import E4M3FN, E5M2
from quantkit.numerics.granularity import PerChannel, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scales import decode
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.hopper_cases import (
    UNITS,
    check_machine_code,
    codes,
    compiled,
    dense_weights,
    kernel_of,
    symbol,
    weights,
)
from tests.support.kernel_cases import DTYPES, operate
from tests.support.packed import packed_module

#: Every kernel that a convolution may take.
KERNELS = [
    kernel_of(tile, sums, sparse=sparse, family=Family.CONV)
    for sparse, sums in COSTS
    for tile in conv_tiles(sparse=sparse, sums=sums)
]
VARIED = [
    HopperKernel(
        TILES["c128x160"], family=Family.CONV, io="bf16", x_scale="tensor", w_scale="tensor"
    ),
    HopperKernel(
        TILES["c128x192"], family=Family.CONV, io="f32", x_scale="tensor", x_format="e5m2"
    ),
    HopperKernel(TILES["c128x96"], True, Family.CONV, io="f32", x_scale="tensor", w_format="e5m2"),
    HopperKernel(TILES["c128x176"], True, Family.CONV, io="bf16", x_scale="tensor"),
    kernel_of(TILES["c128x160"], Sums.INT8, family=Family.CONV, io="bf16", w_scale="tensor"),
    kernel_of(TILES["c128x128"], Sums.INT4, family=Family.CONV, io="f32"),
]
SAME = Windows((3, 3), padding=(1, 1, 1, 1))
#: A window for every edge: sizes 1, tails of tiles, taps and channels, padding that is not even,
#: nor less than the window.
SHAPES = {
    "1x1-picture": ConvShape(1, 1, 1, 32, 8, SAME),
    "7x9": ConvShape(2, 7, 9, 96, 24, SAME),
    "33x31": ConvShape(3, 33, 31, 160, 136, SAME),
    "64x64": ConvShape(1, 64, 64, 320, 320, SAME),
    "long": ConvShape(2, 16, 18, 2560, 72, SAME),
    "row": ConvShape(2, 9, 70, 64, 40, Windows((1, 3), padding=(1, 1, 0, 0))),
    "column": ConvShape(1, 40, 5, 128, 264, Windows((3, 1))),
    "5x5": ConvShape(3, 20, 37, 64, 48, Windows((5, 5), padding=(2, 2, 2, 2))),
    "uneven": ConvShape(2, 6, 5, 32, 16, Windows((3, 2), padding=(4, 0, 1, 3))),
    "1x1-padded": ConvShape(2, 6, 5, 32, 16, Windows((1, 1), padding=(1, 0, 0, 2))),
    "strided": ConvShape(2, 33, 30, 96, 64, Windows((3, 3), (2, 2), padding=(0, 1, 0, 1))),
    "strides": ConvShape(2, 40, 70, 32, 16, Windows((3, 3), (3, 2), (2, 1), (1, 1, 2, 2))),
    "dilated": ConvShape(1, 19, 40, 64, 32, Windows((3, 3), (1, 1), (2, 3), (3, 3, 2, 2))),
}
#: Channels that only dense weights may have.
DENSE_SHAPES = {
    "16-channels": ConvShape(2, 12, 34, 16, 16, SAME),
    "144-channels": ConvShape(1, 9, 33, 144, 24, SAME),
}


# ------------------------------------------------------------------------------------ the launch


@pytest.mark.parametrize("kernel", compiled(KERNELS[::3] + VARIED), ids=symbol)
def test_kernels_compile_without_spills_to_matrix_instructions(kernel):
    check_machine_code(kernel)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_launches_keep_the_limits_of_grid_and_copy_engine(shape):
    for kernel in KERNELS[::4] + VARIED:
        launch, tile = plan_conv(kernel, shape), kernel.tile
        assert launch.grid[0] <= 132
        assert arguments(kernel)[-len(CONV_NUMBERS) :] == CONV_NUMBERS
        assert len(launch.numbers) == len(CONV_NUMBERS)
        x, w, y = launch.maps
        for spec in (x, w, y):
            assert all(pitch % 16 == 0 for pitch in spec.pitches)
            assert spec.box[0] * ITEM_BYTES[spec.element] == spec.swizzle
            assert all(
                size * step <= 256 for size, step in zip(spec.box, steps_of(spec), strict=True)
            )
        # What the boxes of one stage bring is what the kernel waits for.
        assert x.box[1] * x.box[2] == tile.m
        assert w.box[2] == tile.n
        assert y.box[1] * y.box[2] == tile.chunk
        assert x.box[1] * x.box[2] % y.box[1] == 0


def steps_of(spec):
    return spec.steps or (1,) * len(spec.sizes)


def box_of(tensor, spec, place):
    """What the copy engine brings: ``tensor`` has its dimensions in the order of the map."""
    grids = []
    for size, count, step, start in zip(spec.sizes, spec.box, steps_of(spec), place, strict=True):
        at = start + torch.arange(count) * step
        grids.append((at.clamp(0, size - 1), (at >= 0) & (at < size)))
    values = tensor[torch.meshgrid(*(at for at, _ in grids), indexing="ij")]
    inside = torch.stack(torch.meshgrid(*(ok for _, ok in grids), indexing="ij")).all(0)
    return torch.where(inside, values, 0)


def by_boxes(kernel, shape, x, w):
    """The convolution as the kernel walks it (view_sm90.h), from the plan alone; x scales apart."""
    launch, numbers = plan_conv(kernel, shape), conv_numbers(kernel, shape)
    x_map, w_map, y_map = launch.maps
    n, m = kernel.tile.n, kernel.tile.m
    y = torch.full((shape.batch, *shape.outputs, shape.n), torch.nan)
    steps = -(-shape.channels // 128)
    wide = 1 << numbers["wide_bits"]
    for tile in range(numbers["m"] // m):
        column, row = tile % numbers["across"], tile // numbers["across"]
        left, top = column * wide, row % numbers["down"] * (m // wide)
        picture = row // numbers["down"]
        for first in range(0, shape.n, n):
            total = torch.zeros(m, n)
            for step in range(numbers["taps"] * steps):
                tap, channel = step // steps, step % steps * 128
                u = left * numbers["stride_x"] + tap % numbers["taps_wide"] * numbers["dilation_x"]
                v = top * numbers["stride_y"] + tap // numbers["taps_wide"] * numbers["dilation_y"]
                place = (channel, u - numbers["left"], v - numbers["top"], picture)
                tokens = box_of(x.permute(3, 2, 1, 0), x_map, place).permute(3, 2, 1, 0)
                weights = box_of(w.permute(2, 1, 0), w_map, (channel, tap, first)).permute(2, 1, 0)
                total += tokens.reshape(m, 128) @ weights.reshape(n, 128).T
            write(y, total, y_map, (left, top, picture, first), wide)
    return y


def write(y, total, spec, corner, wide):
    """Write chunks of tokens as the copy engine does, each output once."""
    left, top, picture, first = corner
    count = spec.box[1] * spec.box[2]
    for chunk in range(0, len(total), count):
        u, v = left + chunk % wide, top + chunk // wide
        box = total[chunk : chunk + count].reshape(spec.box[2], spec.box[1], -1)
        inside = y[picture, v : v + spec.box[2], u : u + spec.box[1], first : first + box.shape[2]]
        assert bool(inside.isnan().all())
        inside.copy_(box[: inside.shape[0], : inside.shape[1], : inside.shape[2]])


@pytest.mark.parametrize("name", ["1x1-picture", "7x9", "33x31", "uneven", "strides", "dilated"])
@pytest.mark.parametrize("tile", ["c128x96", "c128x160", "c192x144", "c128x256"])
def test_boxes_add_up_to_the_convolution(name, tile):
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(3)
    pictures = (shape.batch, shape.height, shape.width, shape.channels)
    x = torch.randint(-4, 5, pictures, generator=generator).float()
    w = torch.randint(-4, 5, (shape.n, shape.windows.taps, shape.channels), generator=generator)
    kernel = HopperKernel(TILES[tile], family=Family.CONV, x_scale="tensor")
    y = by_boxes(kernel, shape, x, w.float())
    dense = w.float().reshape(shape.n, *shape.windows.kernel, -1).permute(0, 3, 1, 2)
    assert torch.equal(y, convolved(x, dense, shape.windows))


def convolved(x, weight, windows):
    """torch's convolution, channels last."""
    padded = functional.pad(x.permute(0, 3, 1, 2), windows.padding)
    y = functional.conv2d(padded, weight, None, windows.stride, 0, windows.dilation)
    return y.permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("tile", "outputs", "wide"),
    [
        ("c128x192", (64, 64), 32),
        ("c128x192", (24, 8), 8),
        ("c128x96", (1, 256), 32),
        ("c192x144", (64, 64), 16),
        ("c128x256", (1, 256), 256),
    ],
)
def test_tiles_are_as_wide_as_the_picture_needs(tile, outputs, wide):
    height, width = outputs
    shape = ConvShape(1, height, width, 64, 64, SAME)
    tiles = pixel_tiles(TILES[tile], shape)
    assert tiles.wide == wide
    assert tiles.across * tiles.wide >= outputs[1]
    assert tiles.down * tiles.high >= outputs[0]


def test_what_the_kernels_cannot_compute_is_refused():
    kernel = KERNELS[0]
    for change, text in (
        ({"channels": 24}, "24 channels are not a multiple of 16"),
        ({"n": 20}, "20 outputs in f16 are rows of 40 bytes, not a multiple of 16"),
        ({"windows": Windows((1, 1))}, "its windows are the pixels"),
        ({"windows": Windows((3, 3), (9, 1))}, r"stride \(9, 1\) is over 8"),
    ):
        shape = ConvShape(**{**vars(SHAPES["33x31"]), **change})
        with pytest.raises(KernelError, match=text):
            plan_conv(kernel, shape)
    assert "not a multiple of 32" in why_not(DENSE_SHAPES["16-channels"], "f16", 32)
    assert not why_not(ConvShape(1, 8, 8, 16, 20, SAME), "f32", 16)


@pytest.mark.parametrize(
    "shape", (SHAPES | DENSE_SHAPES).values(), ids=(SHAPES | DENSE_SHAPES).keys()
)
def test_windows_are_those_of_torch(shape):
    x = torch.randn(shape.batch, shape.height, shape.width, 2)
    weight = torch.randn(3, 2, *shape.windows.kernel)
    y = convolved(x, weight, shape.windows)
    assert shape.outputs == tuple(y.shape[1:3])
    rows = shape.windows.unfold(x).flatten(3)
    assert torch.allclose(rows @ weight.permute(0, 2, 3, 1).flatten(1).T, y, atol=1e-4)
    assert Windows.of(shape.windows.numbers) == shape.windows


def test_the_tile_with_the_lowest_estimate_is_taken():
    small = ConvShape(2, 32, 32, 1280, 1280, SAME)
    wanted = (Sums.ACCURATE,)
    tile, sums = choose_conv_tile(small, sparse=False, sums=wanted, multiprocessors=132)
    assert sums is Sums.ACCURATE
    # 120 tiles, one round; of 128 tokens there would be 160.
    assert tile.name == "c128x192"


# ------------------------------------------------------------------------------- the operation


def conv_tensors(kernel, shape, generator, dtype):
    """Return operands by name, in the order of the operation."""
    n, k = shape.n, shape.k
    pictures = (shape.batch, shape.height, shape.width, shape.channels)
    scales = n if kernel.w_scale == "channel" else 1
    return {
        "x": codes(pictures, kernel.x_format, generator),
        "x_scale": torch.rand(1, generator=generator) + 0.5,
        **weights(kernel, n, k, generator),
        "w_scale": torch.rand(scales, generator=generator) * 1e-3,
        "bias": torch.randn(n, generator=generator).to(dtype),
    }


def exact(kernel, shape, tensors):
    """Return the float64 result and the sum of sizes, before rounding, where the tensors are."""
    w, fmt = dense_weights(kernel, tensors)
    w = decode(w, fmt, torch.float64)
    w = w.reshape(shape.n, *shape.windows.kernel, -1).permute(0, 3, 1, 2)
    x = decode(tensors["x"], kernel.x_format, torch.float64)
    scale = tensors["x_scale"].double() * tensors["w_scale"].double()
    bias = 0 if tensors["bias"] is None else tensors["bias"].double()
    y = convolved(x, w, shape.windows) * scale + bias
    return y, convolved(x.abs(), w.abs(), shape.windows) * scale


def near(y, exactly, dtype, unit):
    wanted, size = exactly
    spacing = wanted.abs().clamp(min=torch.finfo(dtype).tiny) * torch.finfo(dtype).eps
    error = (y.double() - wanted).abs()
    assert bool((error <= spacing + 2 * unit * size).all())
    assert float(error.norm()) <= float(wanted.norm()) * (torch.finfo(dtype).eps + unit)


def names_and_shapes(kernel):
    return (SHAPES if kernel.weights_meta else SHAPES | DENSE_SHAPES).items()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ["1x1-picture", "7x9", "uneven", "1x1-padded", "strides"])
def test_the_host_computes_what_torch_does(name, sparse):
    shape, kernel = SHAPES[name], HopperKernel(TILES["c64x64"], sparse=sparse, family=Family.CONV)
    tensors = conv_tensors(kernel, shape, torch.Generator().manual_seed(4), torch.float32)
    with log.record() as seen:
        y = operate(
            kernel.operation,
            *tensors.values(),
            shape.windows.numbers,
            "e4m3fn",
            "e4m3fn",
            torch.float32,
        )
    unfolded = bool(why_not_on_the_host(OPS[kernel.operation], shape))
    name = kernel.operation.replace("conv", "gemm") if unfolded else kernel.operation
    assert {op for op, *_ in seen.calls} <= {name}
    near(y, exact(kernel, shape, tensors), torch.float32, 2.0**-22)


def test_operands_that_do_not_fit_are_refused():
    x, one = torch.zeros(1, 4, 4, 16, dtype=torch.uint8), torch.ones(1)
    w = torch.zeros(8, 144, dtype=torch.uint8)
    for operands, windows, text in (
        ((x[0], one, w), SAME, r"expected uint8 codes of shape \(B, H, W, C\)"),
        ((x, torch.ones(2), w), SAME, r"x_scale has shape \(2,\), expected one element"),
        ((x, one, w[:, :16]), SAME, r"w has shape \(8, 16\), expected \(8, 144\)"),
        ((x, one, w), Windows((5, 5)), r"no window fits into x of shape \(1, 4, 4, 16\)"),
    ):
        with pytest.raises(ShapeError, match=text):
            operate(
                "conv_fp8", *operands, one, None, windows.numbers, "e4m3fn", "e4m3fn", torch.float32
            )


# --------------------------------------------------------------------------------- on a GPU, sums


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS + VARIED, ids=symbol)
def test_sums_are_exact_up_to_rounding_at_every_tail(hopper, kernel):
    generator, dtype = torch.Generator().manual_seed(5), DTYPES[kernel.io]
    for index, (_, shape) in enumerate(names_and_shapes(kernel)):
        made = conv_tensors(kernel, shape, generator, dtype)
        made["bias"] = made["bias"] if index % 2 else None
        tensors = {name: t if t is None else t.cuda() for name, t in made.items()}
        result = (shape.batch, *shape.outputs, shape.n)
        room = torch.full((shape.n * 64 + torch.Size(result).numel(),), torch.nan, dtype=dtype)
        room = room.cuda()
        y = room[shape.n * 32 : -shape.n * 32].view(result)
        nulls = [i for i, tensor in enumerate(tensors.values()) if tensor is None]
        call = Call(hopper, kernel, shape, [(result, dtype)], nulls)
        call.launch(*tensors.values(), y)
        # Fast errors grow with K: 2.5e-3 seen at 23040, 8.7e-4 at 2048.
        longer = max(1, shape.k / 2048) ** 0.5 if kernel.sums is Sums.FAST else 1
        unit = UNITS[kernel.sums] * longer
        near(y, exact(kernel, shape, tensors), dtype, unit)
        assert bool(room[: shape.n * 32].isnan().all())
        assert bool(room[-shape.n * 32 :].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sparse", "sums"), [key for key in COSTS if key[1] is not Sums.FAST], ids=str
)
@pytest.mark.parametrize("name", ["7x9", "33x31", "strided"])
def test_operations_take_the_direct_kernel(hopper, name, sparse, sums):
    shape = SHAPES[name]
    tile, _ = choose_conv_tile(shape, sparse=sparse, sums=(sums,), multiprocessors=hopper.units)
    kernel = kernel_of(tile, sums, sparse=sparse, family=Family.CONV)
    made = conv_tensors(kernel, shape, torch.Generator().manual_seed(7), torch.float16)
    tensors = {name: tensor.cuda() for name, tensor in made.items()}
    kinds = (kernel.x_format, kernel.w_format)
    arguments_ = (*tensors.values(), shape.windows.numbers, *kinds, torch.float16)
    with log.record() as seen:
        y = operate(kernel.operation, *arguments_)
        again = operate(kernel.operation, *arguments_)
        with use(Backend.REFERENCE):
            right = operate(kernel.operation, *arguments_)
    calls = {key: count for key, count in seen.calls.items() if key[2] is Backend.GPU}
    assert calls == {(kernel.operation, kernel.name, Backend.GPU): 2}
    assert torch.equal(y, again)
    near(y, exact(kernel, shape, tensors), torch.float16, UNITS[sums])
    assert torch.allclose(y.float(), right.float(), rtol=1e-2, atol=1e-2 * float(right.std()))


LAYERS: dict[str, tuple[Scheme, dict[str, Any]]] = {
    "plain": (Scheme(E4M3FN, PerChannel(), None, Activation.STATIC), {"padding": 1}),
    "sparse": (Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, Activation.STATIC), {"padding": 1}),
    "uneven": (
        Scheme(E5M2, PerChannel(), None, Activation.STATIC, smooth=True),
        {"padding": "same", "kernel_size": (2, 4)},
    ),
    "strided": (Scheme(E4M3FN, PerTensor(), None, Activation.STATIC), {"padding": 1, "stride": 2}),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_packed_layers_run_the_direct_kernel(name, dtype):
    torch.manual_seed(9)
    scheme, options = LAYERS[name]
    dense = torch.nn.Conv2d(64, 40, **{"kernel_size": 3, **options})
    layer = packed_module(dense, scheme).cuda().to(dtype)
    x = torch.randn(2, 64, 18, 35, device="cuda").to(dtype)
    with log.record() as seen, torch.no_grad():
        found = layer(x)
        with use(Backend.REFERENCE):
            right = layer(x).double()
    ran = [op for op, _, backend in seen.calls.elements() if backend is Backend.GPU]
    products = [op for op in ran if not op.startswith("quantize")]
    op = "conv_fp8_sparse" if scheme.sparsity else "conv_fp8"
    assert products == [op]
    # The unit's own error is 2.0**-12 of the sizes, as above.
    error = float((found.double() - right).norm() / right.norm())
    assert error < 2 * torch.finfo(dtype).eps + 2.0**-12


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_windows_that_the_kernels_cannot_read_are_unfolded():
    shape = ConvShape(2, 8, 8, 16, 12, SAME)
    kernel = HopperKernel(TILES["c64x64"], family=Family.CONV)
    made = conv_tensors(kernel, shape, torch.Generator().manual_seed(8), torch.float16)
    tensors = {name: tensor.cuda() for name, tensor in made.items()}
    with log.record() as seen:
        y = operate("conv_fp8", *tensors.values(), SAME.numbers, "e4m3fn", "e4m3fn", torch.float16)
    assert [op for op, *_ in seen.calls] == ["gemm_fp8"]
    near(y, exact(kernel, shape, tensors), torch.float16, 2.0**-12)
