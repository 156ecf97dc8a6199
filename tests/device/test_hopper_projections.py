"""Projections to codes of heads on Hopper: launches, tiles, and on a GPU their codes."""

import json
from pathlib import Path

import pytest
import torch

from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.hopper.hopper_gemm import SHARED_LIMIT, Family, HopperKernel, Sums, arguments
from quantkit.device.hopper.hopper_projections import (
    COSTS,
    TILES,
    choose_projection_tile,
    plan_projection,
    tiles_of,
)
from quantkit.errors import KernelError
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.packed_2to4 import LEGAL_NIBBLES, unpack_two_of_four
from tests.support.hopper_cases import check_machine_code, compiled, kernel_of, mode_of, symbol
from tests.support.kernel_cases import operate

GOLDEN = Path(__file__).parents[1] / "golden"
TIMES = json.loads((GOLDEN / "hopper_projection_times.json").read_text())["times"]


def every(family, **options):
    return [
        kernel_of(TILES[name], sums, sparse=sparse, family=family, io="f32", **options)
        for (sparse, sums), costs in COSTS.items()
        for name in costs
    ]


#: Every kernel of three projections, and some of one: their tiles are the same.
KERNELS = every(Family.HEADS, x_scale="token")
VARIED = [
    *(
        kernel_of(TILES[name], sums, family=family, io="f32")
        for family in (Family.CODES, Family.VALUES)
        for name, sums in (
            ("c128x128", Sums.ACCURATE),
            ("c128x192", Sums.ACCURATE),
            ("c128x128", Sums.FAST),
        )
    ),
    HopperKernel(TILES["c128x128"], family=Family.HEADS, io="f32", x_scale="tensor"),
    HopperKernel(TILES["c128x160"], sparse=True, family=Family.HEADS, io="f32", x_scale="tensor"),
    HopperKernel(TILES["c256x128"], family=Family.CODES, io="f32", x_format="e5m2"),
    HopperKernel(TILES["c128x128"], family=Family.VALUES, io="f32", w_format="e5m2"),
    kernel_of(TILES["p128x160"], Sums.INT8, family=Family.VALUES, io="f32"),
    kernel_of(TILES["p128x160"], Sums.FAST, family=Family.CODES, io="f32", x_scale="token"),
]
#: pictures, tokens, heads, columns of a head
SIZES = (
    (1, 1, 1, 8),
    (1, 37, 3, 40),
    (2, 101, 3, 64),
    (3, 20, 5, 72),
    (2, 208, 2, 128),
    (7, 5, 9, 16),
    (1, 4096, 4, 40),
)


# ---------------------------------------------------------------------- the launch and the choice


@pytest.mark.parametrize("kernel", compiled(KERNELS + VARIED), ids=symbol)
def test_kernels_compile_without_spills_to_matrix_instructions(kernel):
    assert kernel.shared_bytes <= SHARED_LIMIT
    assert kernel.stages >= 2
    check_machine_code(kernel)


@pytest.mark.parametrize("shape", TIMES)
@pytest.mark.parametrize(("sparse", "sums"), COSTS, ids=[mode_of(*key) for key in COSTS])
def test_the_chosen_tile_is_nearly_the_fastest_measured(shape, sparse, sums):
    measured = TIMES[shape][mode_of(sparse, sums)]
    assert set(measured) == set(COSTS[sparse, sums])
    m, n, k = map(int, shape.split("x"))
    tile, _ = choose_projection_tile(
        m, n, k, parts=3, sparse=sparse, sums=(sums,), multiprocessors=132
    )
    assert measured[tile.name] <= 1.15 * min(measured.values())


def test_a_launch_has_a_map_and_tiles_for_each_weight():
    kernel = kernel_of(TILES["c128x160"], Sums.ACCURATE, family=Family.HEADS, io="f32")
    sizes = {"m": 300, "n": 200, "k": 640, "tokens": 100, "d": 40}
    launch = plan_projection(kernel, sizes)
    assert launch.grid == (12, 1, 1)
    assert tiles_of(kernel.tile, 300, 200, 3) == 12
    x, *weights = launch.maps
    assert (x.sizes, x.box) == ((640, 300), (128, 160))
    assert [(w.sizes, w.box) for w in weights] == [((640, 200), (128, 128))] * 3
    assert launch.numbers[:5] == (300, 200, 640, 100, 40)
    assert arguments(kernel)[:5] == ("x_map", "x_scale", "wq_map", "wk_map", "wv_map")


def test_a_row_that_cannot_be_copied_is_refused():
    kernel = kernel_of(TILES["c128x128"], Sums.ACCURATE, family=Family.CODES, io="f32")
    with pytest.raises(KernelError, match="K in 16s"):
        plan_projection(kernel, {"m": 8, "n": 8, "k": 24, "tokens": 8, "d": 8})


@pytest.mark.parametrize("parts", [1, 3])
def test_few_tokens_take_small_tiles_and_many_large_ones(parts):
    options = {"parts": parts, "sums": (Sums.ACCURATE,), "multiprocessors": 132}
    few, _ = choose_projection_tile(512, 640, 640, **options)
    many, _ = choose_projection_tile(16384, 1280, 1280, **options)
    assert few.n * few.m < many.n * many.m


# -------------------------------------------------------------------------------- on a GPU, codes


def draw(kernel, sizes, k, generator):
    """Return operands whose sums are exact: small integers as codes, scales of powers of two."""
    pictures, tokens, heads, d = sizes
    parts = 3 if kernel.family is Family.HEADS else 1

    def integers(*shape):
        return torch.randint(-4, 5, shape, generator=generator).float()

    def codes(fmt, *shape):
        return integers(*shape).to(FORMATS[fmt].torch_dtype).view(torch.uint8).cuda()

    m, n = pictures * tokens, heads * d
    x = codes(kernel.x_format, m, k)
    x_scale = torch.exp2(integers(m if kernel.x_scale == "token" else 1).sign() - 3).cuda()
    weights = [codes(kernel.w_format, n, k) for _ in range(parts)]
    if kernel.sparse:
        legal = torch.tensor(LEGAL_NIBBLES, dtype=torch.uint8)
        drawn = legal[torch.randint(len(legal), (parts, n, k // 4), generator=generator)]
        meta = (drawn[..., ::2] | drawn[..., 1::2] << 4).cuda()
        each = zip(weights, meta, strict=True)
        weights = [part for w, own in each for part in (w[:, ::2].contiguous(), own)]
    w_scale, bias = torch.exp2(integers(parts, n).sign()).cuda(), (integers(parts, n) / 4).cuda()
    if parts == 1:
        return x, x_scale, *weights, w_scale[0], bias[0]
    return x, x_scale, *weights, w_scale, bias


def project(hopper, kernel, operands, sizes):
    """Return what the kernel writes, between bytes that it must not change."""
    _, tokens, heads, d = sizes
    op, (m, k), n = kernel.op, operands[0].shape, heads * d
    options = (tokens, heads, kernel.x_format, kernel.w_format)
    outputs = op.outputs(operands, options)
    nulls = [i for i, operand in enumerate(operands) if operand is None]
    call = Call(hopper, kernel, {"m": m, "n": n, "k": k, "tokens": tokens, "d": d}, outputs, nulls)
    rooms = [
        torch.full((torch.Size(shape).numel() + 512,), 0x55, dtype=torch.uint8, device="cuda")
        for shape, _ in outputs
    ]
    call.launch(*operands, *(r[256:-256].view(s) for r, (s, _) in zip(rooms, outputs, strict=True)))
    for room in rooms:
        assert bool((room[:256] == 0x55).all())
        assert bool((room[-256:] == 0x55).all())
    found = tuple(r[256:-256].view(s) for r, (s, _) in zip(rooms, outputs, strict=True))
    wanted = op.reference(*operands, *options)
    return found, wanted if isinstance(wanted, tuple) else (wanted,)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS + VARIED, ids=symbol)
def test_codes_are_where_attention_reads_them_at_every_tail(hopper, kernel):
    generator = torch.Generator().manual_seed(3)
    for index, sizes in enumerate(SIZES):
        operands = draw(kernel, sizes, (96, 640, 32 if kernel.sparse else 16)[index % 3], generator)
        if kernel.family is not Family.HEADS and index % 2:
            operands = (*operands[:-1], None)
        for mine, right in zip(*project(hopper, kernel, operands, sizes), strict=True):
            assert torch.equal(mine, right), sizes


@pytest.mark.gpu
def test_large_values_saturate_and_nan_stays(hopper):
    kernel, sizes = KERNELS[0], (1, 40, 2, 40)
    *operands, w_scale, bias = draw(kernel, sizes, 64, torch.Generator().manual_seed(4))
    w_scale[:, 3], w_scale[:, 45] = torch.inf, torch.nan
    found, wanted = project(hopper, kernel, (*operands, w_scale, bias + 1e6), sizes)
    for codes in zip(found, wanted, strict=True):
        mine, right = (t.view(torch.float8_e4m3fn).float() for t in codes)
        assert torch.equal(mine.isnan(), right.isnan())
        assert torch.equal(mine.nan_to_num(), right.nan_to_num())
        assert bool(mine.isnan().any())


@pytest.mark.gpu
def test_kept_weights_give_what_the_whole_ones_give(hopper):
    """Sums of integers are exact: order and zeros change nothing."""
    (kernel,) = (k for k in VARIED if k.sparse)
    x, x_scale, *stored, scale, bias = draw(
        kernel, (2, 208, 3, 64), 640, torch.Generator().manual_seed(6)
    )
    whole = list(map(unpack_two_of_four, stored[::2], stored[1::2]))
    options = (208, 3, "e4m3fn", "e4m3fn")
    sparse = operate("project_heads_fp8_sparse", x, x_scale, *stored, scale, bias, *options)
    dense = operate("project_heads_fp8", x, x_scale, *whole, scale, bias, *options)
    assert all(map(torch.equal, sparse, dense))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_one_launch_writes_what_three_write(hopper, kind):
    """Also where sums are no integers: tiles do not change their order."""
    fmt = "int8" if kind == "int8" else "e4m3fn"
    generator = torch.Generator(device="cuda").manual_seed(5)
    m, n, k, heads = 2 * 256, 3 * 64, 640, 3
    scale = torch.rand(3, n, device="cuda", generator=generator) / 1e3
    bias = torch.randn(3, n, device="cuda", generator=generator)
    x, *weights = (
        torch.randint(0, 120, (rows, k), device="cuda", generator=generator).to(torch.uint8)
        for rows in (m, n, n, n)
    )
    x_scale = torch.ones(1, device="cuda") / 64
    found = operate(
        f"project_heads_{kind}", x, x_scale, *weights, scale, bias, 256, heads, fmt, fmt
    )
    names = ("project_codes", "project_codes", "project_values")
    for name, w, s, b, mine in zip(names, weights, scale, bias, found, strict=True):
        alone = operate(f"{name}_{kind}", x, x_scale, w, s, b, 256, heads, fmt, fmt)
        assert torch.equal(mine, alone)
