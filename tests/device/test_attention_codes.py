"""Attention that ends in codes: those that quantizing its 16 bit gives, to the last bit."""

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.aot.check import check_folder
from quantkit.device.aot.codeobject import read_nvidia_kernels
from quantkit.device.aot.object_build import build
from quantkit.device.backends import Backend, use
from quantkit.device.gpu import nvrtc
from quantkit.device.hopper.hopper_attention import HopperAttention
from quantkit.device.ops import call as execute
from quantkit.device.ops.attention.attention_codes import OPS as CODED
from quantkit.device.ops.attention.attention_codes import SUFFIX
from quantkit.device.ops.op import Variant, all_variants
from quantkit.device.ops.table import OPS, name_for
from quantkit.errors import KernelError, ShapeError
from quantkit.resources import kernel_sources
from tests.support.attention_cases import SIZES, Heads
from tests.support.hopper_cases import compile_kernel, symbol
from tests.support.kernel_cases import DTYPES, launch, need, same_codes
from tests.support.sampling import one_of_each, turned

FORMATS = ("e4m3fn", "int8")
#: Scales: of an ordinary result, of one that saturates, and two that division needs care with.
SCALES = (0.013, 1e-3, 1e-38, 3e30)
CHANGES = ("plain", "smooth")


def numbers_of(heads, columns, changes="smooth", scale=0.013):
    """Return smooth and scale of a layer that reads heads."""
    generator = torch.Generator().manual_seed(heads * columns)
    smooth = torch.rand(heads * columns, generator=generator) + 0.25
    return smooth if changes == "smooth" else None, torch.tensor([scale])


def quantized(y, smooth, scale):
    """Return the codes of (P, M, H, D) by torch alone."""
    x = y.flatten(2).float()
    x = x if smooth is None else x * smooth
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).view(y.shape)


def check_same(plain, numbers):
    """Compare codes that attention ends in with those of what it gives in 16 bit."""
    op, arguments = plain
    coded = OPS[op.name + SUFFIX]
    found = execute.call(coded, *arguments[:7], *numbers, *arguments[7:])
    wanted = quantized(execute.call(op, *arguments), *numbers)
    assert found.shape == wanted.shape
    same_codes(found, wanted, "e4m3fn")
    return found


@pytest.fixture
def host():
    need(compilers.host_compiler)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("case", turned([8, 40, 64, 72, 128, 160], FORMATS))
def test_codes_are_those_of_the_16_bit(case):
    columns, fmt = case
    for index, sizes in enumerate(SIZES):
        heads = Heads.draw(sizes, columns, pictures=2, heads=3, seed=sum(sizes))
        changes = CHANGES[index % len(CHANGES)]
        check_same(heads.call(fmt), numbers_of(3, columns, changes))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_results_are_rounded_to_every_dtype_first(dtype, scale):
    heads = Heads.draw((33, 70), 64, pictures=2)
    for changes in CHANGES:
        found = check_same(heads.call("e4m3fn", dtype=dtype), numbers_of(2, 64, changes, scale))
    # Ordinary codes; with the extreme scales zeros, or the largest, of both signs.
    kinds = len((found & 0x7F).unique())
    assert kinds > 30 if scale in SCALES[:2] else kinds <= 2


@pytest.mark.usefixtures("host")
def test_nan_and_infinity_become_what_quantizing_makes_of_them():
    heads = Heads.draw((37, 101), 64)
    codes = heads.codes("e4m3fn")
    codes.q[0, 5, 3], codes.v[1, 7, 3] = 0x7F, 0x7F
    # Beyond float16.
    codes.v_scale[0, 9] = 1e9
    for scale in SCALES:
        found = check_same(heads.call("e4m3fn", codes), numbers_of(2, 64, "smooth", scale))
        assert (found[0, 5, 0] & 0x7F == 0x7F).all()
        assert (found[0, :, 1, 7] & 0x7F == 0x7F).all()
        assert (found[0, 6, 0, 9] & 0x7F) == 0x7E


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    "case",
    turned([(40, "e4m3fn"), (64, "int8"), (72, "e4m3fn"), (128, "e4m3fn")], ["sm89", "gfx12"]),
)
def test_lanes_of_every_layout_write_their_codes(case):
    """Emulated lane by lane, with sentinels around what is written."""
    (columns, fmt), layout = case
    for sizes in ((1, 1), (37, 101), (130, 65)):
        heads = Heads.draw(sizes, columns, pictures=2, heads=3, seed=sum(sizes))
        op, arguments = heads.call(fmt, dtype=torch.bfloat16)
        numbers = numbers_of(3, columns)
        wide = run_emulated(op, arguments[:7], arguments[7:], layout)
        coded = OPS[op.name + SUFFIX]
        found = run_emulated(coded, (*arguments[:7], *numbers), arguments[7:], layout)
        same_codes(found, quantized(wide, *numbers), "e4m3fn")


def run_emulated(op, operands, options, layout):
    problem = op.check(op, operands, options)
    ((shape, dtype),) = op.outputs(operands, options)
    pointers = [a.name for a in op.args if a.is_pointer]
    tensors = dict(zip(pointers, (*operands, torch.empty(shape, dtype=dtype)), strict=True))
    return launch(Variant(op, problem.words), layout, tensors, problem.sizes)["y"]


@pytest.mark.parametrize(
    ("place", "value", "error", "text"),
    [
        (0, torch.ones(95), ShapeError, "smooth has shape (95,), expected (96,)"),
        (0, torch.ones(2, 48), ShapeError, "smooth has shape (2, 48), expected (96,)"),
        (0, torch.ones(96).half(), KernelError, "smooth is torch.float16, expected torch.float32"),
        (1, torch.ones(2), ShapeError, "y_scale has shape (2,), expected one element"),
        (1, torch.ones(1).double(), KernelError, "y_scale is torch.float64"),
        (0, torch.ones(96, device="meta"), KernelError, "smooth is on meta"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(place, value, error, text):
    op, arguments = Heads.draw((9, 70), 48).call("e4m3fn")
    numbers = list(numbers_of(2, 48))
    numbers[place] = value
    with pytest.raises(error, match="attention_fp8_codes") as caught:
        execute.call(OPS[op.name + SUFFIX], *arguments[:7], *numbers, *arguments[7:])
    assert text in str(caught.value)


def test_what_attention_refuses_is_refused():
    _, arguments = Heads.draw((9, 70), 48).call("e4m3fn")
    with pytest.raises(ShapeError, match="attention_fp8_codes: 0 keys"):
        execute.call(CODED[0], *arguments[:7], *numbers_of(2, 48), 0, *arguments[8:])


# --------------------------------------------------------------------------------- machine code


@pytest.mark.parametrize("heads", one_of_each(("d160", "d16 d64 d80 d128"), type))
def test_gfx12_code_does_not_spill_for_it(heads, tmp_path):
    need(compilers.clang)
    words = heads.split()
    variants = [
        v for op in CODED for v in all_variants(op) if v.words[0] == "f16" and v.words[2] in words
    ]
    build("gfx1201", tmp_path / "objects", variants)
    findings = check_folder(tmp_path / "objects").findings
    assert len(findings) == len(variants)
    for finding in findings:
        assert not finding.problems, finding.kernel.symbol
        assert finding.kernel.spills == 0


def hopper_kernel(head, fmt="e4m3fn", *, io="f16", maps=False):
    op = OPS[name_for("attention_codes", fmt)]
    return HopperAttention(op, io, fmt, head, maps, "e4m3fn")


COMPILED = (
    *(hopper_kernel(d) for d in (112, 96, 80, 48, 16)),
    *(hopper_kernel(d, maps=True) for d in (128, 64)),
    *(hopper_kernel(d, "int8", io="bf16") for d in (128, 64)),
)


@pytest.mark.parametrize(
    "kernel", one_of_each(COMPILED, lambda k: (k.qk_format, k.maps)), ids=symbol
)
def test_hoppers_code_does_not_spill_for_it(kernel):
    need(nvrtc.load_nvrtc)
    (found,) = read_nvidia_kernels(compile_kernel(kernel))
    assert (found.symbol, found.spills) == (kernel.symbol, 0)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("head", one_of_each(("d128", "d64", "d48"), type))
def test_adas_code_does_not_spill_for_it(head, fmt):
    need(nvrtc.load_nvrtc)
    variant = Variant(OPS[name_for("attention_codes", fmt)], ("f16", fmt, head, "", "e4m3fn"))
    sources = kernel_sources()
    options = [*nvrtc.nvrtc_options("sm_89"), f"-I{sources / 'include'}", *variant.defines]
    text = (sources / variant.source).read_text(encoding="utf-8")
    content, _ = nvrtc.load_nvrtc().compile(text, variant.source, options)
    (found,) = read_nvidia_kernels(content)
    assert found.spills == 0


# ------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("columns", [8, 40, 64, 72, 128, 160])
def test_on_a_gpu_codes_are_those_of_the_16_bit(columns, fmt):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    for sizes in (*SIZES, (300, 1024), (70, 4090)):
        for changes in CHANGES:
            heads = Heads.draw(sizes, columns, pictures=2, heads=3, seed=sum(sizes))
            numbers = [t if t is None else t.cuda() for t in numbers_of(3, columns, changes)]
            op, arguments = heads.call(fmt)
            moved = (t.cuda() if torch.is_tensor(t) else t for t in arguments)
            with use(Backend.GPU):
                check_same((op, tuple(moved)), numbers)
