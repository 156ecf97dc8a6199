"""Attention on Hopper: its tiles and launches, its machine code, and on a GPU its results."""

import struct
from dataclasses import replace
from itertools import product

import pytest
import torch

from quantkit.device import log
from quantkit.device.aot.codeobject import read_nvidia_kernels
from quantkit.device.aot.elf import read_sections
from quantkit.device.backends import Backend, use
from quantkit.device.gpu import nvrtc
from quantkit.device.hopper.hopper_attention import HopperAttention, has_maps, plan_attention
from quantkit.device.hopper.hopper_gemm import SHARED_LIMIT
from quantkit.device.ops import call as execute
from quantkit.device.ops.table import OPS, name_for
from quantkit.errors import KernelError
from quantkit.numerics.attention_factors import COLUMNS
from quantkit.numerics.attention_limits import LARGEST_HEAD
from tests.support.attention_cases import SIZES, Heads
from tests.support.hopper_cases import compile_kernel, symbol
from tests.support.kernel_cases import need
from tests.support.sampling import one_of_each

FORMATS = ("e4m3fn", "int8")
HEADS = range(COLUMNS, LARGEST_HEAD + 1, COLUMNS)
#: Low bits of the matrix instruction of scores, whose operands lie in shared memory, and of that of
#: values, whose probabilities lie in registers; agreed with nvdisasm of CUDA 13 (QGMMA, IGMMA).
SCORES, VALUES = {"e4m3fn": 0x9F3, "int8": 0x9F1}, 0xDF3
#: Largest rms of a difference from the reference, of the rms of the outputs about their mean over
#: the queries. A sum of another order moves single probabilities to the next code: up to 0.0089 was
#: seen on an H100 and an H200 with e4m3fn, 0.0023 with int8.
ERRORS = {"e4m3fn": 0.015, "int8": 0.005}


def kernel_of(head, fmt="e4m3fn", *, io="f16", maps=False):
    return HopperAttention(OPS[name_for("attention", fmt)], io, fmt, head, maps)


def sizes_of(m, n, keys):
    return {"m": m, "n": n, "keys": keys, "pitch": -(-keys // 16) * 16}


EVERY = tuple(kernel_of(d, fmt) for d in HEADS for fmt in FORMATS)
COMPILED = (
    *(kernel_of(d) for d in (144, 128, 112, 96, 80, 64, 48, 16)),
    *(kernel_of(d, "int8") for d in (128, 64)),
    *(kernel_of(d, maps=True) for d in (128, 96, 64, 48)),
    kernel_of(64, io="bf16"),
    kernel_of(64, io="f32", maps=True),
    kernel_of(128, "int8", io="f32"),
)


@pytest.mark.parametrize("kernel", EVERY, ids=symbol)
def test_blocks_fit_a_multiprocessor(kernel):
    assert kernel.shared_bytes <= SHARED_LIMIT
    assert kernel.keys % 32 == 0
    assert len({symbol(k) for k in EVERY}) == len(EVERY)


@pytest.mark.parametrize(
    ("m", "n", "blocks"), [(1, 1, 1), (128, 7, 7), (129, 7, 14), (4096, 20, 132)]
)
def test_blocks_take_pieces_of_128_queries(m, n, blocks):
    launch = plan_attention(kernel_of(64), sizes_of(m, n, 77), 132)
    assert (launch.grid, launch.block, launch.maps) == ((blocks, 1, 1), 384, ())
    assert launch.shared_bytes == kernel_of(64).shared_bytes


def test_the_copy_engine_fetches_whole_groups_of_keys_of_fp8():
    assert has_maps("e4m3fn", 4096)
    assert not has_maps("e4m3fn", 77)
    assert not has_maps("int8", 4096)


@pytest.mark.parametrize("kernel", [k for k in EVERY if k.qk_format == "e4m3fn"], ids=symbol)
def test_tensor_maps_keep_the_limits_of_the_copy_engine(kernel):
    m, n, keys = 300, 7, 208
    launch = plan_attention(replace(kernel, maps=True), sizes_of(m, n, keys))
    for spec in launch.maps:
        assert all(pitch % 16 == 0 for pitch in spec.pitches)
        assert max(spec.box) <= 256
        assert spec.box[0] == spec.swizzle
    q, k, v = launch.maps
    # What they describe ends where the operand does.
    for spec, rows in ((q, n * m), (k, n * keys)):
        last = sum(
            (size - 1) * pitch for size, pitch in zip(spec.sizes[1:], spec.pitches, strict=True)
        )
        assert last == (rows - 1) * kernel.head
    assert v.sizes == (keys, n * kernel.head)
    # A tile's rows are its keys, each once.
    places = [
        sum(i * pitch for i, pitch in zip(at, k.pitches, strict=True)) // kernel.head
        for at in product(*map(range, k.box[1:]))
    ]
    assert sorted(places) == list(range(kernel.keys))


@pytest.mark.parametrize(
    "kernel", one_of_each(COMPILED, lambda k: (k.qk_format, k.maps)), ids=symbol
)
def test_kernels_compile_without_spills_to_matrix_instructions(kernel):
    content = compile_kernel(kernel)
    (resources,) = read_nvidia_kernels(content)
    assert resources.symbol == kernel.symbol
    assert resources.spills == 0
    text = next(s for s in read_sections(content) if s.name == f".text.{kernel.symbol}")
    opcodes = {first & 0xFFF for first, *_ in struct.iter_unpack("<IIII", text.content)}
    assert opcodes >= {SCORES[kernel.qk_format], VALUES}


def test_other_shared_memory_than_planned_does_not_compile(monkeypatch):
    need(nvrtc.load_nvrtc)
    monkeypatch.setattr(HopperAttention, "shared_bytes", 1024)
    with pytest.raises(KernelError, match=r"hopper/attention\.py counts the shared memory"):
        compile_kernel(kernel_of(64))


def on_gpu(call):
    op, arguments = call
    return op, tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments)


def both(call):
    """Return what the kernel and, in float64, the reference make of the same codes."""
    op, arguments = on_gpu(call)
    with log.record() as seen:
        found = execute.call(op, *arguments)
    assert [where for _, _, where in seen.calls] == [Backend.GPU]
    with use(Backend.REFERENCE):
        return found, op.reference(*arguments, precision=torch.float64)


def check_close(call, fmt):
    """The kernel gives what the reference does, but for single probabilities' next codes."""
    found, wanted = both(call)
    assert torch.equal(found.isnan(), wanted.isnan())
    found, wanted = found.double().nan_to_num(), wanted.double().nan_to_num()
    spread = wanted - wanted.mean(1, keepdim=True) if wanted.shape[1] > 1 else wanted
    limit = ERRORS[fmt] * spread.square().mean().sqrt() + 1e-3 * wanted.square().mean().sqrt()
    assert (found - wanted).square().mean().sqrt() <= limit


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("columns", [8, 16, 32, 40, 64, 72, 96, 112, 128, 144, 160])
def test_the_kernel_rounds_as_the_reference_does(columns, fmt):
    for sizes in (*SIZES, (128, 1024), (40, 4096), (70, 4090)):
        heads = Heads.draw(sizes, columns, pictures=2, seed=sum(sizes))
        check_close(heads.call(fmt), fmt)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_of_every_dtype(dtype):
    for m, keys in ((300, 200), (1, 129)):
        heads = Heads.draw((m, keys), 64, pictures=3, heads=5)
        found, wanted = both(heads.call("e4m3fn", dtype=dtype))
        assert found.dtype == dtype
        assert not found.isnan().any()
        error = (found.double() - wanted.double()).square().mean().sqrt()
        assert (
            error
            < (0.015 if dtype == torch.bfloat16 else 5e-3) * wanted.double().square().mean().sqrt()
        )


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("columns", [64, 128])
def test_many_keys_with_an_offset_of_the_values(columns):
    """Hopper's FP8 unit cuts what is 2^-13 of the largest: sums must leave it with every tile."""
    heads = Heads.draw((40, 4096), columns, heads=1, offset=4.0)
    found, _ = both(heads.call("e4m3fn", dtype=torch.float32))
    exact = heads.exact().cuda()
    assert (found - exact).square().mean().sqrt() < 0.004 * exact.square().mean().sqrt()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_maximum_that_grows_in_every_tile(fmt):
    heads = Heads.draw((20, 900), 64, heads=1)
    ramp = torch.linspace(6, 0, 900)[:, None] * torch.ones(64)
    heads = replace(heads, q=heads.q.abs(), k=heads.k + ramp)
    check_close(heads.call(fmt), fmt)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("size", "limit"), [(16.0, 0.1), (32.0, 0.5), (100.0, 2.0)])
def test_scores_far_below_zero_lose_what_the_unit_cuts(size, limit):
    """Of a sum whose largest product is 1e4, FP8's unit keeps multiples of 1: no NaN, no zeros."""
    heads = Heads.draw((19, 300), 64, heads=1, offset=0.0)
    codes = heads.codes("e4m3fn")
    codes.q[:, :, 0] = torch.tensor(size).to(torch.float8_e4m3fn).view(torch.uint8)
    codes.k[:, :, 0] = torch.tensor(-size).to(torch.float8_e4m3fn).view(torch.uint8)
    found, wanted = both(heads.call("e4m3fn", codes, dtype=torch.float32))
    assert (found - wanted).square().mean().sqrt() < limit * wanted.double().square().mean().sqrt()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("keys", [101, 500])
def test_nan_goes_where_it_came_from(keys):
    heads = Heads.draw((37, keys), 64)
    for part, (head, row) in (("q", (0, 5)), ("k", (1, 100)), ("v", (1, 7))):
        codes = heads.codes("e4m3fn")
        getattr(codes, part)[head, row, 3] = 0x7F
        found, wanted = both(heads.call("e4m3fn", codes))
        assert torch.equal(found.isnan(), wanted.isnan())
        assert found.isnan().any()


@pytest.mark.usefixtures("hopper")
def test_more_work_than_multiprocessors_gives_what_a_head_alone_gives():
    heads = Heads.draw((300, 200), 64, pictures=20, heads=10)
    op, arguments = on_gpu(heads.call("e4m3fn"))
    whole = execute.call(op, *arguments)
    again = execute.call(op, *arguments)
    assert torch.equal(whole, again)
    alone = tuple(a[10:20].contiguous() if torch.is_tensor(a) else a for a in arguments)
    assert torch.equal(execute.call(op, *alone)[0], whole[1])


@pytest.mark.usefixtures("hopper")
def test_a_graph_captures_it():
    heads = Heads.draw((128, 256), 64)
    op, arguments = on_gpu(heads.call("e4m3fn"))
    wanted = execute.call(op, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = execute.call(op, *arguments)
    found.zero_()
    graph.replay()
    assert torch.equal(found, wanted)
