"""The Hopper kernels: their launches, the tile that a shape takes, and on a GPU their sums."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.device import log
from quantkit.device.backends import Backend
from quantkit.device.gpu import nvrtc
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.hopper.hopper_choice import COSTS, choose_tile, estimate
from quantkit.device.hopper.hopper_gemm import (
    SHARED_LIMIT,
    TILES,
    HopperKernel,
    Sums,
    arguments,
    plan_launch,
)
from quantkit.device.hopper.tensormap import ITEM_BYTES
from quantkit.errors import KernelError
from quantkit.numerics.scales import decode
from tests.support.hopper_cases import (
    UNITS,
    check_machine_code,
    codes,
    compile_kernel,
    compiled,
    dense_weights,
    kernel_of,
    mode_of,
    symbol,
    weights,
)
from tests.support.kernel_cases import need, operate

TIMES = json.loads((Path(__file__).parents[1] / "golden/hopper_times.json").read_text())["times"]
MODES = {mode_of(*key): key for key in COSTS}
#: Every kernel that a shape may take.
KERNELS = [
    kernel_of(TILES[name], sums, sparse=sparse)
    for (sparse, sums), costs in COSTS.items()
    for name in costs
]
#: Every tile of FP8 and of integers once, sparse and dense in turns, and all of int4 weights.
COMPILED = {
    (kernel.tile.name, kernel.x_format, kernel.w_format): kernel
    for kernel in (KERNELS[::2] + KERNELS[1::2])
}.values()


# ------------------------------------------------------------------------------------ the launch


@pytest.mark.parametrize("io", ["f16", "bf16", "f32"])
def test_a_block_fits_a_multiprocessor(io):
    for kernel in (replace(kernel, io=io) for kernel in KERNELS):
        assert kernel.stages >= 2, kernel
        assert kernel.shared_bytes <= SHARED_LIMIT, kernel
        assert kernel.tile.threads <= 512, kernel


@pytest.mark.parametrize("kernel", compiled(COMPILED), ids=symbol)
def test_kernels_compile_without_spills_to_matrix_instructions(kernel):
    check_machine_code(kernel)


def test_other_shared_memory_than_planned_does_not_compile(monkeypatch):
    need(nvrtc.load_nvrtc)
    monkeypatch.setattr(HopperKernel, "shared_bytes", 1024)
    with pytest.raises(KernelError, match=r"hopper/gemm\.py counts the shared memory"):
        compile_kernel(HopperKernel(TILES["c64x16"]))


@pytest.mark.parametrize("shape", [(1, 1, 32), (130, 257, 1312), (8192, 640, 640), (77, 72, 2048)])
def test_grids_are_no_larger_than_the_work(shape):
    m, n, k = shape
    for kernel in KERNELS:
        tile = kernel.tile
        if k <= 128 * (tile.team - 1):
            with pytest.raises(KernelError, match=r"expected 4; take a tile that does not split K"):
                plan_launch(kernel, *shape)
            continue
        launch = plan_launch(kernel, *shape)
        (blocks, *ones), tiles = launch.grid, tile.tiles(m, n)
        assert ones == [1, 1], kernel
        assert tiles * tile.m * tile.n >= m * n, kernel
        assert blocks == (tile.team * tiles if tile.team > 1 else min(tiles, 132)), kernel
        assert launch.numbers[:3] == shape, kernel


@pytest.mark.parametrize("kernel", KERNELS, ids=symbol)
def test_tensor_maps_keep_the_limits_of_the_copy_engine(kernel):
    launch = plan_launch(kernel, 300, 200, 640)
    x, w, y = launch.maps
    for spec in (x, w, y):
        assert spec.pitches[0] % 16 == 0
        assert max(spec.box) <= 256
        assert spec.box[0] * ITEM_BYTES[spec.element] == spec.swizzle
        assert spec.box[1] % 8 == 0
    assert (x.sizes, y.sizes) == ((640, 300), (200, 300))
    assert w.sizes == (640 if kernel.weight_row == 128 else 320, 200)
    # What the boxes of one stage bring is what the kernel waits for.
    tile = kernel.tile
    assert (w.box[1], x.box[1]) == (tile.n, tile.m)


def test_rows_that_the_copy_engine_cannot_write_have_no_map():
    kernel = HopperKernel(TILES["c128x128"])
    assert plan_launch(kernel, 4, 72, 64).maps[2] is not None
    assert plan_launch(kernel, 4, 75, 64).maps[2] is None


@pytest.mark.parametrize(
    ("sparse", "sums", "k"),
    [
        (False, Sums.ACCURATE, 24),
        (True, Sums.ACCURATE, 48),
        (False, Sums.INT8, 0),
        (False, Sums.INT4, 48),
    ],
)
def test_a_k_that_cannot_be_read_is_refused(sparse, sums, k):
    with pytest.raises(KernelError, match=r"K in (16|32)s"):
        plan_launch(kernel_of(TILES["c128x128"], sums, sparse=sparse), 8, 8, k)


def test_arguments_follow_the_portable_kernels():
    dense = arguments(HopperKernel(TILES["c128x128"]))
    assert dense[:6] == ("x_map", "x_scale", "w_map", "w_scale", "bias", "y")
    assert dense[6:] == ("y_map", "m", "n", "k", "group")
    sparse = arguments(HopperKernel(TILES["c128x128"], sparse=True))
    assert [name for name in sparse if name not in dense] == ["w_meta"]
    int4 = arguments(kernel_of(TILES["c128x128"], Sums.INT4))
    assert [name.replace("w_group", "w_meta") for name in int4] == list(sparse)


# ------------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", TIMES)
def test_the_chosen_tile_is_nearly_the_fastest_measured(shape, mode):
    measured = TIMES[shape][mode]
    m, n, k = (int(size) for size in shape.split("x"))
    sparse, sums = MODES[mode]
    tile = choose_tile(m, n, k, sparse=sparse, sums=sums)
    if tile.name not in measured:
        pytest.skip(f"{tile.name} was not measured")
    assert measured[tile.name] <= 1.10 * min(measured.values())


@pytest.mark.parametrize("mode", MODES)
def test_estimates_are_near_what_was_measured(mode):
    sparse, sums = MODES[mode]
    errors = [
        estimate(TILES[name], *map(int, shape.split("x")), sparse=sparse, sums=sums) / time
        for shape, times in TIMES.items()
        for name, time in times[mode].items()
    ]
    assert len(errors) > 50
    assert all(0.7 < error < 1.3 for error in errors)


def test_short_k_is_not_split_and_many_tokens_take_no_narrow_tile():
    assert choose_tile(16, 1280, 5120).team > 1
    assert choose_tile(16, 64, 384).team == 1
    assert choose_tile(65, 640, 640).m >= 64


# --------------------------------------------------------------------------------- on a GPU, sums


def gemm_tensors(kernel, m, n, k, generator):
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[kernel.io]
    tensors = {
        "x": codes((m, k), kernel.x_format, generator),
        "x_scale": torch.rand(m if kernel.x_scale == "token" else 1, generator=generator) + 0.5,
        **weights(kernel, n, k, generator),
        "w_scale": torch.rand(n if kernel.w_scale == "channel" else 1, generator=generator) * 1e-3,
        "bias": torch.randn(n, generator=generator).to(dtype),
    }
    return tensors, dtype


def exact(kernel, tensors):
    """Return the float64 result and the sum of sizes, before rounding."""
    w = decode(*dense_weights(kernel, tensors)).double()
    x = decode(tensors["x"], kernel.x_format).double()
    scale = tensors["x_scale"].double().reshape(-1, 1) * tensors["w_scale"].double()
    bias = 0 if tensors["bias"] is None else tensors["bias"].double()
    return x @ w.T * scale + bias, x.abs() @ w.abs().T * scale


def spacing(values, dtype):
    return values.abs().clamp(min=torch.finfo(dtype).tiny) * torch.finfo(dtype).eps


SHAPES = [(300, 200, 640), (1, 8, 32), (77, 75, 2048), (130, 257, 1312)]
#: More tiles than multiprocessors; sparse metadata end in either of the two sets of registers.
SHAPES += [(4100, 2056, 640), (2100, 4104, 1152)]
VARIED = [
    HopperKernel(TILES["c128x160"], io="bf16", x_scale="tensor"),
    HopperKernel(TILES["c128x192"], io="f32", w_scale="tensor"),
    HopperKernel(TILES["c128x192"], sparse=True, io="f32", x_format="e5m2"),
    HopperKernel(TILES["c128x160"], sparse=True, io="bf16", w_format="e5m2"),
    HopperKernel(TILES["p128x192"], accurate=False, x_format="e5m2", w_format="e5m2"),
    kernel_of(TILES["c128x160"], Sums.INT8, io="bf16", x_scale="tensor"),
    kernel_of(TILES["c128x160"], Sums.INT8, sparse=True, io="f32", w_scale="tensor"),
    kernel_of(TILES["c128x128"], Sums.INT4, io="f32", x_scale="tensor", w_scale="tensor"),
]


def run(hopper, kernel, tensors, y):
    """Run a kernel through the loader; ``tensors`` by argument name, in order, bias may be None."""
    names = ["x", "x_scale", "w", "w_meta", "w_group", "w_scale", "bias"]
    inputs = [tensors[name] for name in names if name in tensors]
    (m, k), n = tensors["x"].shape, tensors["w"].shape[0]
    nulls = [i for i, tensor in enumerate(inputs) if tensor is None]
    call = Call(hopper, kernel, {"m": m, "n": n, "k": k}, [((m, n), y.dtype)], nulls)
    call.launch(*(None if t is None else t.cuda() for t in inputs), y)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS + VARIED, ids=symbol)
def test_sums_are_exact_up_to_rounding_at_every_tail(hopper, kernel):
    generator = torch.Generator().manual_seed(5)
    for index, (m, n, k) in enumerate(SHAPES):
        if k <= 128 * (kernel.tile.team - 1):
            continue
        tensors, dtype = gemm_tensors(kernel, m, n, k, generator)
        tensors["bias"] = tensors["bias"] if index % 2 else None
        room = torch.full((m * n + 256,), torch.nan, dtype=dtype, device="cuda")
        y = room[128 : 128 + m * n].view(m, n)
        run(hopper, kernel, tensors, y)
        result, size = exact(kernel, tensors)
        unit = UNITS[kernel.sums]
        error = (y.cpu().double() - result).abs()
        assert bool((error <= spacing(result, dtype) + 2 * unit * size).all()), (m, n, k)
        assert float(error.norm() / result.norm()) < torch.finfo(dtype).eps + unit
        assert bool(room[:128].isnan().all())
        assert bool(room[128 + m * n :].isnan().all())


#: Their sums are exact whatever the tile, and float32 holds what is left after the first rounding.
INTEGERS = [kernel for kernel in KERNELS if kernel.sums in {Sums.INT8, Sums.INT4}]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", INTEGERS, ids=symbol)
def test_sums_of_integers_give_the_bits_that_numbers_say(hopper, kernel):
    """Every output, to the bit: the int32 sum, rounded to float32 before it is scaled."""
    generator = torch.Generator().manual_seed(8)
    for m, n, k in SHAPES:
        if k <= 128 * (kernel.tile.team - 1):
            continue
        tensors, dtype = gemm_tensors(kernel, m, n, k, generator)
        y = torch.empty(m, n, dtype=dtype, device="cuda")
        run(hopper, kernel, tensors, y)
        assert torch.equal(y.cpu(), by_epilogue(kernel, tensors, dtype)), (m, n, k)


def by_epilogue(kernel, tensors, dtype):
    """Return what exact sums become, step by step as epilogue.h has it."""
    x, w = tensors["x"].view(torch.int8), dense_weights(kernel, tensors)[0].view(torch.int8)
    sums = (x.double() @ w.double().T).float()
    scaled = sums * tensors["x_scale"].reshape(-1, 1) * tensors["w_scale"]
    return (scaled + tensors["bias"].float()).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [mode for mode, (_, sums) in MODES.items() if "int" not in mode])
def test_small_integers_are_bit_exact(hopper, mode):
    """Sums of integers that every format holds: any slot that is swapped or lost shows."""
    sparse, sums = MODES[mode]
    generator = torch.Generator().manual_seed(6)
    kernel = kernel_of(TILES["c128x192"], sums, sparse=sparse)
    tensors, dtype = gemm_tensors(kernel, 200, 264, 160, generator)
    integers = torch.arange(-4, 5).float().to(torch.float8_e4m3fn).view(torch.uint8)
    for name in ("x", "w"):
        tensors[name] = integers[torch.randint(9, tensors[name].shape, generator=generator)]
    for name in ("x_scale", "w_scale"):
        tensors[name] = torch.ones_like(tensors[name])
    tensors["bias"] = None
    y = torch.empty(200, 264, dtype=dtype, device="cuda")
    run(hopper, kernel, tensors, y)
    assert torch.equal(y.cpu().double(), exact(kernel, tensors)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("io", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if "fast" not in mode])
@pytest.mark.parametrize("shape", [(1, 1280, 1280), (16, 320, 1280), (77, 75, 96), (300, 640, 640)])
def test_operations_take_hopper_kernels(hopper, shape, mode, io):
    (m, n, k), (sparse, sums) = shape, MODES[mode]
    tile = choose_tile(m, n, k, sparse=sparse, sums=sums, multiprocessors=hopper.units)
    x_scale = "tensor" if m == 1 else "token"
    kernel = kernel_of(tile, sums, sparse=sparse, io=io, x_scale=x_scale)
    tensors, dtype = gemm_tensors(kernel, m, n, k, torch.Generator().manual_seed(7))
    given = (tensor.cuda() for tensor in tensors.values())
    with log.record() as seen:
        y = operate(kernel.operation, *given, kernel.x_format, kernel.w_format, dtype)
    assert dict(seen.calls) == {(kernel.operation, kernel.name, Backend.GPU): 1}
    result, size = exact(kernel, tensors)
    error = (y.cpu().double() - result).abs()
    assert bool((error <= spacing(result, dtype) + 2.0**-11 * size).all())


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_tensor_maps_follow_operands_to_other_addresses(sparse):
    kernel = HopperKernel(TILES["c64x64"], sparse=sparse)
    kept = []
    for seed in range(6):
        tensors, dtype = gemm_tensors(kernel, 50, 72, 320, torch.Generator().manual_seed(seed))
        on_gpu = [t.cuda() for t in tensors.values()]
        y = operate(kernel.operation, *on_gpu, "e4m3fn", "e4m3fn", dtype)
        kept.append((on_gpu, y, exact(kernel, tensors)[0]))
    assert len({operands[0].data_ptr() for operands, *_ in kept}) == len(kept)
    for _, y, result in kept:
        assert float((y.cpu().double() - result).norm() / result.norm()) < 1e-3
