"""Attention by mma.sync (sm_89 and later): its machine code, and its results.

The host runs the sources with the instruction emulated, lane by lane; an NVIDIA card of capability
8.9 or more runs the variants themselves, beside what else it may have, as Hopper's own kernels.
"""

from dataclasses import replace

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.aot.codeobject import count_matrix_instructions, read_nvidia_kernels
from quantkit.device.archs import ARCHS
from quantkit.device.gpu import nvrtc
from quantkit.device.gpu.devices import find_device
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.ops.attention.coded_attention import OPS
from quantkit.device.ops.op import Variant, all_variants
from quantkit.device.tile_choice import variants_for
from quantkit.errors import KernelError
from quantkit.resources import kernel_sources
from tests.support.attention_cases import SIZES, Heads
from tests.support.kernel_cases import launch, need
from tests.support.sampling import one_of_each, turned

FORMATS = ("e4m3fn", "int8")
ADA = ARCHS["sm_89"]
FP8, INT8, *WIDE = OPS
#: Largest rms of a difference from the reference, of the rms of the outputs about their mean over
#: the queries: test_hopper_attention.py says why there is one.
ERRORS = {"e4m3fn": 0.015, "int8": 0.005}
COMPILED = (
    *(Variant(FP8, ("f16", "e4m3fn", f"d{d}", "")) for d in (144, 128, 112, 96, 64, 48, 16)),
    *(Variant(INT8, ("f16", "int8", f"d{d}", "")) for d in (128, 112, 96, 80, 64)),
    Variant(FP8, ("bf16", "e4m3fn", "d64", "")),
    Variant(INT8, ("f32", "int8", "d128", "")),
)


def test_every_variant_on_codes_is_one_of_sm_89():
    for op in OPS:
        every = list(all_variants(op))
        assert list(variants_for(ADA, every)) == ([] if op in WIDE else every)
        assert not variants_for(ARCHS["sm_90a"], every), "it has kernels of its own"


@pytest.mark.parametrize("variant", one_of_each(COMPILED, lambda v: v.op), ids=lambda v: v.symbol)
def test_kernels_compile_without_spills_to_matrix_instructions(variant):
    need(nvrtc.load_nvrtc)
    sources = kernel_sources()
    options = [*nvrtc.nvrtc_options("sm_89"), f"-I{sources / 'include'}", *variant.defines]
    text = (sources / variant.op.source).read_text(encoding="utf-8")
    content, _ = nvrtc.load_nvrtc().compile(text, variant.op.source, options)
    (found,) = read_nvidia_kernels(content)
    assert found.spills == 0
    assert found.lds <= ADA.lds_limit
    # Products with the values are FP8's in both.
    instructions = count_matrix_instructions(content, variant.symbol)
    assert set(instructions) == ({"QMMA"} if variant.op is FP8 else {"QMMA", "IMMA"})


def prepare(call):
    """Return a call's variant, sizes, operands, options, and shape and dtype of its result."""
    op, arguments = call
    operands, options = arguments[:7], arguments[7:]
    problem = op.check(op, operands, options)
    (output,) = op.outputs(operands, options)
    return Variant(op, problem.words), problem.sizes, operands, options, output


def rms(t):
    return float(t.double().square().mean().sqrt())


# ---------------------------------------------------------------------------------- on the host


def both(call):
    """Return what the emulated kernel makes of codes, and what the reference does."""
    variant, sizes, operands, options, (shape, dtype) = prepare(call)
    pointers = [a.name for a in variant.op.args if a.is_pointer]
    tensors = dict(zip(pointers, (*operands, torch.empty(shape, dtype=dtype)), strict=True))
    found = launch(variant, "sm89", tensors, sizes)["y"]
    return found, variant.op.reference(*operands, *options)


def check_same(call):
    """Equal, but for single probabilities that another order of sums moves to the next code."""
    found, wanted = both(call)
    assert torch.equal(found.isnan(), wanted.isnan())
    difference = (found.double() - wanted.double()).nan_to_num()
    assert float(difference.abs().max()) < 2e-2 * rms(wanted.nan_to_num())
    assert float((difference != 0).double().mean()) < 2e-3
    return found


@pytest.fixture
def host():
    need(compilers.host_compiler)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("case", turned([16, 40, 64, 72, 112, 128, 160], FORMATS))
def test_the_emulated_kernel_rounds_as_the_reference_does(case):
    columns, fmt = case
    for sizes in ((1, 1), (37, 101), (33, 64), (130, 65)):
        check_same(Heads.draw(sizes, columns, pictures=2, seed=sum(sizes)).call(fmt))


def growing(sizes, columns):
    """Heads whose last tile, which comes first, has the least scores: all others outgrow it."""
    heads = Heads.draw(sizes, columns, heads=1)
    ramp = torch.linspace(6, 0, sizes[1])[:, None] * torch.ones(columns)
    return replace(heads, q=heads.q.abs(), k=heads.k + ramp)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("fmt", FORMATS)
def test_an_emulated_maximum_that_grows_in_every_tile(fmt, columns):
    check_same(growing((20, 300), columns).call(fmt))


@pytest.mark.usefixtures("host")
def test_emulated_nan_goes_where_it_came_from():
    heads = Heads.draw((37, 101), 64)
    for part, (head, row) in (("q", (0, 5)), ("k", (1, 100)), ("v", (1, 7))):
        codes = heads.codes("e4m3fn")
        getattr(codes, part)[head, row, 3] = 0x7F
        assert check_same(heads.call("e4m3fn", codes)).isnan().any()


@pytest.mark.usefixtures("host")
def test_emulated_results_of_every_dtype():
    for dtype in (torch.bfloat16, torch.float32):
        heads = Heads.draw((9, 40), 24, pictures=3)
        found, wanted = both(heads.call("e4m3fn", dtype=dtype))
        assert found.dtype == dtype
        assert rms(found - wanted) < 1e-5 * rms(wanted)


# ----------------------------------------------------------------------------------- on a GPU

on_gpu = pytest.mark.gpu


@pytest.fixture
def device():
    """An NVIDIA card that executes these instructions, in hardware or emulated."""
    if not torch.cuda.is_available() or torch.version.hip:
        pytest.skip("torch sees no NVIDIA GPU")
    try:
        found = find_device(torch.cuda.current_device())
    except KernelError as error:
        pytest.skip(str(error))
    return found


def run(device, call):
    """Return what the variant makes of codes on the card, and what the reference does, exactly."""
    variant, sizes, operands, options, output = prepare(call)
    operands = tuple(t if t is None else t.cuda() for t in operands)
    nulls = [i for i, t in enumerate(operands) if t is None]
    (found,) = Call(device, variant, sizes, [output], nulls)(*operands)
    return found, variant.op.reference(*operands, *options, precision=torch.float64)


def check_close(device, call, fmt):
    """The kernel gives what the reference does, but for single probabilities' next codes."""
    found, wanted = run(device, call)
    assert torch.equal(found.isnan(), wanted.isnan())
    found, wanted = found.double().nan_to_num(), wanted.double().nan_to_num()
    spread = wanted - wanted.mean(1, keepdim=True) if wanted.shape[1] > 1 else wanted
    assert rms(found - wanted) <= ERRORS[fmt] * rms(spread) + 1e-3 * rms(wanted)


@on_gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("columns", [8, 16, 32, 40, 64, 72, 96, 112, 128, 144, 160])
def test_the_kernel_rounds_as_the_reference_does(device, columns, fmt):
    for sizes in (*SIZES, (128, 1024), (40, 4096), (70, 4090)):
        heads = Heads.draw(sizes, columns, pictures=2, seed=sum(sizes))
        check_close(device, heads.call(fmt), fmt)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_of_every_dtype(device, dtype):
    for m, keys in ((300, 200), (1, 129)):
        heads = Heads.draw((m, keys), 64, pictures=3, heads=5)
        found, wanted = run(device, heads.call("e4m3fn", dtype=dtype))
        assert found.dtype == dtype
        assert not found.isnan().any()
        limit = 0.015 if dtype == torch.bfloat16 else 5e-3
        assert rms(found.double() - wanted.double()) < limit * rms(wanted)


@on_gpu
@pytest.mark.parametrize("columns", [64, 128])
def test_many_keys_with_an_offset_of_the_values(device, columns):
    """Where the FP8 unit cuts what is 2^-13 of the largest, sums must leave it with every tile."""
    heads = Heads.draw((40, 4096), columns, heads=1, offset=4.0)
    found, _ = run(device, heads.call("e4m3fn", dtype=torch.float32))
    exact = heads.exact().cuda()
    assert rms(found - exact) < 0.004 * rms(exact)


@on_gpu
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_maximum_that_grows_in_every_tile(device, fmt, columns):
    check_close(device, growing((20, 900), columns).call(fmt), fmt)


@on_gpu
def test_scores_far_below_zero_keep_their_order(device):
    heads = Heads.draw((19, 300), 64, heads=1, offset=0.0)
    codes = heads.codes("e4m3fn")
    codes.q[:, :, 0] = torch.tensor(100.0).to(torch.float8_e4m3fn).view(torch.uint8)
    codes.k[:, :, 0] = torch.tensor(-104.0).to(torch.float8_e4m3fn).view(torch.uint8)
    found, wanted = run(device, heads.call("e4m3fn", codes, dtype=torch.float32))
    assert not found.isnan().any()
    # A unit that keeps 13 bits loses all but 1 of 1e4.
    assert rms(found - wanted) < 0.5 * rms(wanted)


@on_gpu
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("keys", [101, 500])
def test_nan_goes_where_it_came_from(device, keys, columns):
    heads = Heads.draw((37, keys), columns)
    for part, (head, row) in (("q", (0, 5)), ("k", (1, 100)), ("v", (1, 7))):
        codes = heads.codes("e4m3fn")
        getattr(codes, part)[head, row, 3] = 0x7F
        found, wanted = run(device, heads.call("e4m3fn", codes))
        assert torch.equal(found.isnan(), wanted.isnan())
        assert found.isnan().any()


@on_gpu
def test_blocks_beside_each_other_do_not_meet(device):
    """A head alone gives what it gives among others, and the same twice."""
    heads = Heads.draw((300, 200), 64, pictures=20, heads=10)
    op, arguments = heads.call("e4m3fn")
    whole, again = (run(device, (op, arguments))[0] for _ in range(2))
    assert torch.equal(whole, again)
    alone = tuple(a[10:20].contiguous() if torch.is_tensor(a) else a for a in arguments)
    assert torch.equal(run(device, (op, alone))[0][0], whole[1])
