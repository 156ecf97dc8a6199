"""Activations and their codes in one pass: every value and tail on the host, against float64."""

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.backends import Backend, use
from quantkit.device.ops.norms.quantize import quantize_static
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS, name_for
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.formats import FORMATS
from tests.support.kernel_cases import (
    DTYPES,
    every_value,
    launch,
    need,
    operate,
    paired_variants,
)

OPERATIONS = [op for op in OPS.values() if op.family == "gelu_codes"]
#: Share of the value, and what is added: how far activation.h and gelu.h say that they are off.
OFF = {"silu": (4e-6, 1e-15), "tanh": (4e-6, 1e-15), "gelu": (1.8e-4, 1.3e-7)}


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


def variants():
    return [param for op in OPERATIONS for param in paired_variants(op)]


def activated(x, word):
    """Return the activation in float64."""
    x = x.double()
    if word == "gelu":
        return x * torch.special.ndtr(x)
    inner = x if word == "silu" else 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    return x * inner.sigmoid()


def numbers_of(codes, fmt):
    """Return what codes stand for; NaN where a NaN was."""
    values = codes.view(FORMATS[fmt].torch_dtype).double()
    return torch.where(values < -FORMATS[fmt].max, torch.nan, values)


def check(found, x, prefix, variant, numbers):
    """Check codes: of a number within what the kernel is off, rounded to x's dtype."""
    word, fmt = variant.word("QK_ACT"), variant.word("QK_X_FORMAT")
    exact, (share, constant) = activated(x, word), OFF[word]
    # torch rounds float64 to 16 bit by way of float32.
    moved = ((share + 2e-7) * exact.abs() + constant).nan_to_num(posinf=0)

    def codes_of(y):
        y = y.float().to(x.dtype)
        y = y if prefix is None else torch.cat([prefix, y], dim=1)
        smooth, scale = numbers
        return quantize_static(y, smooth, scale, fmt)

    # As numbers: zeros have signs.
    found, *right = (
        numbers_of(t, fmt) for t in (found, *(codes_of(exact + d) for d in (-moved, 0, moved)))
    )
    least, nearest, most = right
    there = ~nearest.isnan()
    assert torch.equal(found.isnan(), ~there)
    assert bool(((least <= found) & (found <= most))[there].all())
    prefix_columns = 0 if prefix is None else prefix.shape[1]
    assert torch.equal(
        found[:, :prefix_columns].nan_to_num(), nearest[:, :prefix_columns].nan_to_num()
    )
    assert int((found != nearest)[there].sum()) <= 1 + 0.03 * found.numel()


def drawn(variant, k, scale):
    """Return smooth and scale of a variant."""
    smooth = torch.rand(k, generator=torch.Generator().manual_seed(k)) + 0.1
    return smooth if variant.word("QK_SMOOTH") else None, torch.tensor([scale])


def run(variant, x, prefix, numbers, *, layout="gfx12", threads=2):
    n = 0 if prefix is None else prefix.shape[1]
    m, k = x.shape[0], x.shape[1] + n
    smooth, scale = numbers
    tensors = {"x": x, "prefix": prefix, "smooth": smooth, "scale": scale,
               "q": torch.empty(m, k, dtype=torch.uint8)}  # fmt: skip
    return launch(variant, layout, tensors, {"m": m, "n": n, "k": k}, threads=threads)["q"]


@pytest.mark.parametrize("layout", ["gfx12", "sm89"])
@pytest.mark.parametrize("variant", variants())
def test_every_value_has_the_nearest_code(variant, layout):
    values = every_value(variant.word("QK_IO"), "e4m3fn")
    for k, scale in ((64, 0.02), (33, 1.0), (1, 1e-4)):
        x = values[: values.numel() // k * k].reshape(-1, k)
        numbers = drawn(variant, k, scale)
        check(run(variant, x, None, numbers, layout=layout), x, None, variant, numbers)


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize(
    ("m", "k", "prefix_columns"),
    [
        *((1, 1, 0), (1, 15, 0), (7, 17, 0), (9, 1025, 0), (1, 8193, 0), (3, 2731, 0)),
        *((1, 32, 16), (5, 96, 32), (33, 2560, 512), (2, 16400, 16384), (3, 4112, 16)),
        (700, 48, 16),
    ],
)
def test_codes_are_the_nearest_at_every_tail(variant, m, k, prefix_columns):
    generator = torch.Generator().manual_seed(m * k)
    y = (torch.randn(m, k, generator=generator) * 2).to(DTYPES[variant.word("QK_IO")])
    y[m // 2, k // 2] = torch.nan
    y[0, 0] = torch.inf
    x, prefix = (
        y[:, prefix_columns:].contiguous(),
        y[:, :prefix_columns].contiguous() if prefix_columns else None,
    )
    numbers = drawn(variant, k, 0.013)
    check(run(variant, x, prefix, numbers), x, prefix, variant, numbers)


def telling(word="tanh", fmt="e4m3fn"):
    return Variant(OPS[name_for("gelu_codes", fmt)], ("f16", fmt, word, "smooth"))


def case(word="tanh"):
    x, prefix = torch.randn(9, 80).half(), torch.randn(9, 32).half()
    return telling(word), x, prefix, drawn(telling(), 112, 0.013)


@pytest.mark.parametrize("word", OFF)
@pytest.mark.parametrize(
    "mistake",
    [
        lambda x, prefix, numbers: (x.roll(1, 1), prefix, numbers),
        lambda x, prefix, numbers: (x, prefix.roll(1, 0), numbers),
        lambda x, prefix, numbers: (x, prefix, (numbers[0].roll(1), *numbers[1:])),
        lambda x, prefix, numbers: (x, prefix, (numbers[0], numbers[1] * 1.02)),
    ],
    ids=["x", "prefix", "smooth", "scale"],
)
def test_the_judge_sees_a_mistake(word, mistake):
    torch.manual_seed(1)
    variant, x, prefix, numbers = case(word)
    wrong = run(variant, *mistake(x, prefix, numbers))
    with pytest.raises(AssertionError):
        check(wrong, x, prefix, variant, numbers)


@pytest.mark.parametrize("others", [("gelu", "silu"), ("tanh", "silu"), ("silu", "gelu")])
def test_the_judge_sees_another_activation(others):
    torch.manual_seed(1)
    (variant, x, prefix, numbers), other = case(others[0]), telling(others[1])
    with pytest.raises(AssertionError):
        check(run(other, x, prefix, numbers), x, prefix, variant, numbers)


def test_codes_do_not_depend_on_threads():
    torch.manual_seed(1)
    variant, x, prefix, numbers = case()
    found = run(variant, x, prefix, numbers, threads=5)
    assert torch.equal(found, run(variant, x, prefix, numbers, threads=1))


# ------------------------------------------------------------------------------------ the operation


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({0: torch.zeros(2, 5, 80).half()}, ShapeError, r"x has shape \(2, 5, 80\)"),
        ({1: torch.zeros(8, 32).half()}, ShapeError, r"prefix has shape \(8, 32\)"),
        ({1: torch.zeros(9, 32)}, KernelError, "prefix is torch.float32, expected torch.float16"),
        ({1: torch.zeros(9, 24).half()}, ShapeError, "24 prefix columns before 80, expected"),
        ({2: torch.zeros(80)}, ShapeError, r"smooth has shape \(80,\), expected \(112,\)"),
        ({3: torch.ones(2)}, ShapeError, r"scale has shape \(2,\), expected one element"),
        ({4: "relu"}, KernelError, "activation 'relu', expected one of silu, gelu, tanh"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_refused(change, error, text):
    _, x, prefix, numbers = case()
    arguments = [x, prefix, *numbers, "tanh", "e4m3fn"]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(error, match=f"gelu_codes_fp8: {text}"):
        operate("gelu_codes_fp8", *arguments)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize(
    ("m", "k", "prefix_columns"), [(7, 17, 0), (9, 1025, 0), (33, 2560, 512), (4608, 15360, 3072)]
)
def test_a_gpu_has_the_nearest_codes(variant, m, k, prefix_columns):
    generator = torch.Generator().manual_seed(m * k)
    y = (torch.randn(m, k, generator=generator) * 2).to(DTYPES[variant.word("QK_IO")])
    y[m // 2, k // 2] = torch.nan
    x, prefix = (
        y[:, prefix_columns:].contiguous(),
        y[:, :prefix_columns].contiguous() if prefix_columns else None,
    )
    numbers = drawn(variant, k, 0.013)
    given = (t if t is None else t.cuda() for t in (x, prefix, *numbers))
    options = (variant.word("QK_ACT"), variant.word("QK_X_FORMAT"))
    with use(Backend.GPU):
        found = operate(variant.op.name, *given, *options)
    check(found.cpu(), x, prefix, variant, numbers)
