"""GEGLU on Hopper: launches, tiles, the formula of its header, and on a GPU its codes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import ndtr

from quantkit.device import log
from quantkit.device.backends import Backend
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.hopper.hopper_geglu import (
    COSTS,
    TILES,
    choose_gated_tile,
    plan_gated,
    tiles_of,
)
from quantkit.device.hopper.hopper_gemm import SHARED_LIMIT, Family, HopperKernel, Sums, arguments
from quantkit.errors import KernelError
from quantkit.numerics.formats import FORMATS
from quantkit.resources import kernel_sources
from tests.device.test_hopper import exact, gemm_tensors
from tests.support.gated_cases import check_nearest, gate
from tests.support.hopper_cases import (
    UNITS,
    check_machine_code,
    compiled,
    kernel_of,
    mode_of,
    symbol,
)
from tests.support.kernel_cases import operate

#: Every kernel that a shape may take.
KERNELS = [
    kernel_of(TILES[name], sums, sparse=sparse, family=Family.GEGLU)
    for (sparse, sums), costs in COSTS.items()
    for name in costs
]
VARIED = [
    HopperKernel(TILES["c256x128"], family=Family.GEGLU, io="bf16", w_scale="tensor"),
    HopperKernel(TILES["p128x128"], family=Family.GEGLU, io="f32", y_format="e5m2"),
    HopperKernel(TILES["c256x96"], True, Family.GEGLU, io="f32", x_format="e5m2"),
    HopperKernel(TILES["c256x96"], True, Family.GEGLU, io="bf16", w_format="e5m2"),
    kernel_of(TILES["c256x96"], Sums.INT8, family=Family.GEGLU, io="bf16", x_scale="token"),
    kernel_of(TILES["c256x96"], Sums.INT4, family=Family.GEGLU, io="f32", w_scale="tensor"),
]
GOLDEN = Path(__file__).parents[1] / "golden"
TIMES = json.loads((GOLDEN / "hopper_gated_times.json").read_text())["times"]


# ---------------------------------------------------------------------- the launch and the choice


@pytest.mark.parametrize("kernel", compiled(KERNELS + VARIED), ids=symbol)
def test_kernels_compile_without_spills_to_matrix_instructions(kernel):
    assert kernel.shared_bytes <= SHARED_LIMIT
    assert kernel.stages >= 2
    check_machine_code(kernel)


@pytest.mark.parametrize("kernel", KERNELS, ids=symbol)
def test_a_box_of_weights_is_a_tile_of_rows_and_their_gates(kernel):
    launch = plan_gated(kernel, 300, 208, 640)
    x, w = launch.maps
    row = kernel.weight_row
    assert (x.sizes, x.box) == ((640, 300), (128, kernel.tile.m))
    assert w.sizes == (640 * row // 128, 208, 2)
    assert w.box == (row, kernel.tile.n // 2, 2)
    assert max(w.box) <= 256
    assert all(pitch % 16 == 0 for pitch in w.pitches)
    assert launch.grid == (min(132, tiles_of(kernel.tile, 300, 208)), 1, 1)
    assert launch.numbers[:3] == (300, 208, 640)


def test_arguments_end_in_the_scale_and_the_codes():
    names = arguments(KERNELS[0])
    assert names == (
        *("x_map", "x_scale", "w_map", "w_scale", "bias", "y_scale", "y"),
        *("m", "n", "k", "group"),
    )


@pytest.mark.parametrize(("n", "k", "sparse"), [(24, 64, False), (32, 24, False), (32, 48, True)])
def test_sizes_that_cannot_be_copied_are_refused(n, k, sparse):
    kernel = HopperKernel(TILES["c256x96"], sparse=sparse, family=Family.GEGLU)
    with pytest.raises(KernelError, match=r"N in 16s and K in (16|32)s"):
        plan_gated(kernel, 8, n, k)


@pytest.mark.parametrize("shape", TIMES)
@pytest.mark.parametrize(("sparse", "sums"), COSTS, ids=[mode_of(*key) for key in COSTS])
def test_the_chosen_tile_is_nearly_the_fastest_measured(shape, sparse, sums):
    times = TIMES[shape][mode_of(sparse, sums)]
    measured = {name: us for name, us in times.items() if name in COSTS[sparse, sums]}
    m, n, k = map(int, shape.split("x"))
    tile, _ = choose_gated_tile(m, n, k, sparse=sparse, sums=(sums,), multiprocessors=132)
    assert measured[tile.name] <= 1.15 * min(measured.values())


# ------------------------------------------------------------------------------------ the formula


def test_the_logits_polynomial_is_as_near_as_its_header_says():
    """Against scipy: 1.8e-4 of the value for g > -3.5, 1.2e-7 before."""
    text = (kernel_sources() / "include/gelu.h").read_text()
    coefficients = re.search(r"kP\[\] = \{([^}]*)\}", text).group(1)
    powers = [np.float32(number.strip().rstrip("f")) for number in coefficients.split(",")]
    assert len(powers) == 7
    g = np.linspace(-30, 30, 2_000_001).astype(np.float32)
    square = np.minimum(g * g, np.float32(36))
    p = np.zeros_like(g)
    for power in reversed(powers):
        p = p * square + power
    with np.errstate(over="ignore"):
        found = g / (1 + np.exp2(g * p))
    wanted = g.astype(np.float64) * ndtr(g.astype(np.float64))
    error, near = np.abs(found - wanted), g > -3.5
    assert np.all(error[near] <= 1.8e-4 * np.abs(wanted[near]) + 1e-30)
    assert np.all(error[~near] <= 1.25e-7)


# -------------------------------------------------------------------------------- on a GPU, codes

SHAPES = [(300, 208, 640), (1, 16, 32), (77, 80, 2048), (130, 272, 1312), (4100, 1040, 640)]


def gated_tensors(kernel, m, n, k, generator):
    """Return operands by name whose outputs and gates are of size 1 or so, and the dtype."""
    tensors, dtype = gemm_tensors(kernel, m, 2 * n, k, generator)
    # int8's codes have an rms of 73 where FP8's have 40 here, int4's as int8 38.
    larger = {"e4m3fn": 1, "e5m2": 1, "int8": 73**2, "int4": 73 * 38}[kernel.w_format]
    size = 4 / k**0.5 * (40**2 / larger if larger > 1 else 1)
    tensors["w_scale"] = tensors["w_scale"] * size
    tensors["y_scale"] = torch.tensor([0.05])
    return tensors, dtype


def run(hopper, kernel, tensors, y):
    inputs = [None if t is None else t.cuda() for t in in_order(tensors)]
    (m, k), n = tensors["x"].shape, tensors["w"].shape[0] // 2
    nulls = [i for i, tensor in enumerate(inputs) if tensor is None]
    call = Call(hopper, kernel, {"m": m, "n": n, "k": k}, [((m, n), torch.uint8)], nulls)
    call.launch(*inputs, y)


def in_order(tensors):
    names = ("x", "x_scale", "w", "w_meta", "w_group", "w_scale", "bias", "y_scale")
    return [tensors[name] for name in names if name in tensors]


def gated_exactly(kernel, tensors, unit):
    """Return h * gelu(g) / y_scale in float64, and how far sums off by ``unit`` may move it."""
    (h, g), (h_size, g_size) = (t.chunk(2, dim=1) for t in exact(kernel, tensors))
    return gate(h, g, 2 * unit * h_size, 2 * unit * g_size, tensors["y_scale"].double())


def decoded(codes, fmt):
    return codes.cpu().view(FORMATS[fmt].torch_dtype).double()


def share_of_others(kernel):
    """Return the share of codes that need not be the nearest of the exact number."""
    return 0.08 if kernel.sums is Sums.FAST else 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS + VARIED, ids=symbol)
def test_codes_are_the_nearest_at_every_tail(hopper, kernel):
    generator = torch.Generator().manual_seed(5)
    for index, (m, n, k) in enumerate(SHAPES):
        tensors, _ = gated_tensors(kernel, m, n, k, generator)
        tensors["bias"] = tensors["bias"] if index % 2 else None
        room = torch.full((m * n + 512,), 0x77, dtype=torch.uint8, device="cuda")
        y = room[256 : 256 + m * n].view(m, n)
        run(hopper, kernel, tensors, y)
        value, moved = gated_exactly(kernel, tensors, UNITS[kernel.sums])
        check_nearest(y.cpu(), value, moved, kernel.y_format, others=share_of_others(kernel))
        assert bool((room[:256] == 0x77).all())
        assert bool((room[256 + m * n :] == 0x77).all())


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.y_format == "e4m3fn"], ids=symbol)
def test_small_integers_hit_every_code(hopper, kernel):
    """Sums that every format holds: codes differ only where gelu's last places decide."""
    generator = torch.Generator().manual_seed(6)
    tensors, _ = gated_tensors(kernel, 200, 272, 160, generator)
    integers = torch.arange(-1, 2).float().to(torch.float8_e4m3fn).view(torch.uint8)
    for name in ("x", "w"):
        tensors[name] = integers[torch.randint(3, tensors[name].shape, generator=generator)]
    for name in ("x_scale", "w_scale"):
        tensors[name] = torch.full_like(tensors[name], 0.5)
    tensors["bias"], tensors["y_scale"] = None, torch.tensor([0.125])
    y = torch.empty(200, 272, dtype=torch.uint8, device="cuda")
    run(hopper, kernel, tensors, y)
    value, _ = gated_exactly(kernel, tensors, 0.0)
    nearest = value.clamp(-448, 448).float().to(torch.float8_e4m3fn).double()
    found = decoded(y, "e4m3fn")
    assert float((found != nearest).double().mean()) < 0.01
    assert bool(((found - value.clamp(-448, 448)).abs() <= value.abs().clamp(min=2**-6) / 15).all())
    assert len(found.unique()) > 50


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sparse", "sums"), [key for key in COSTS if key[1] is not Sums.FAST], ids=str
)
@pytest.mark.parametrize("shape", [(1, 16, 32), (77, 80, 96), (300, 640, 640)])
def test_operations_take_the_kernel(hopper, shape, sparse, sums):
    m, n, k = shape
    tile, _ = choose_gated_tile(m, n, k, sparse=sparse, sums=(sums,), multiprocessors=hopper.units)
    x_scale = "tensor" if m == 1 else "token"
    kernel = kernel_of(tile, sums, sparse=sparse, family=Family.GEGLU, x_scale=x_scale)
    tensors, dtype = gated_tensors(kernel, m, n, k, torch.Generator().manual_seed(7))
    given = [t.cuda() for t in in_order(tensors)]
    with log.record() as seen:
        formats = (kernel.x_format, kernel.w_format, kernel.y_format)
        y = operate(kernel.operation, *given, *formats, dtype)
        again = operate(kernel.operation, *given, *formats, dtype)
    assert dict(seen.calls) == {(kernel.operation, kernel.name, Backend.GPU): 2}
    assert torch.equal(y, again)
    value, moved = gated_exactly(kernel, tensors, UNITS[kernel.sums])
    check_nearest(y.cpu(), value, moved, kernel.y_format)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_what_is_not_finite_or_too_large_is_coded_as_quantizing_does():
    """Rows: NaN, saturated on both sides, a gate far below zero."""
    one = torch.tensor([1.0]).to(torch.float8_e4m3fn).view(torch.uint8)
    x = torch.zeros(4, 32, dtype=torch.uint8)
    x[:, 0] = one
    x[0, 0] = 0x7F
    w = torch.zeros(32, 32, dtype=torch.uint8)
    w[:, 0] = one
    x_scale, w_scale = torch.tensor([1.0, 1e4, 1e4, -1e4]), torch.ones(32)
    bias = torch.zeros(32, dtype=torch.float32)
    bias[:16] = torch.linspace(-2e4, 2e4, 16)
    given = [t.cuda() for t in (x, x_scale, w, w_scale, bias, torch.tensor([0.5]))]
    y = decoded(operate("geglu_fp8", *given, *("e4m3fn",) * 3, torch.float32), "e4m3fn")
    assert bool(y[0].isnan().all())
    signs = torch.sign(1e4 + bias[:16].double())
    assert torch.equal(y[1], 448 * signs)
    assert bool((y[3] == 0).all())
