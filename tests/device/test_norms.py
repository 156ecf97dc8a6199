"""Norms that write codes, on the host and on a GPU: against float64, at every tail."""

import pytest
import torch
from torch.nn import functional

from quantkit.device import compilers
from quantkit.device.backends import Backend, use
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.conv_windows import Windows
from tests.support.kernel_cases import DTYPES, need, operate

FORMATS = {"fp8": "e4m3fn", "int8": "int8"}
SCALE = {"fp8": 0.02, "int8": 0.05}
#: pictures, pixels, channels, groups: less than a turn, a short last chunk, slots without pixels,
#: groups that cut a run, one group, as many as channels, all threads
PICTURES = (
    (1, 1, 96, 32), (2, 63, 8, 1), (1, 65, 320, 32), (2, 130, 40, 4), (1, 200, 1920, 32),
    (1, 70, 24, 24), (1, 5, 4096, 2), (1, 129, 2560, 32),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


def places(codes, kind):
    """Return codes as numbers that count from one number of the format to the next."""
    signed = codes.view(torch.int8).int()
    return torch.where(signed < 0, -(signed & 0x7F), signed) if kind == "fp8" else signed


def codes_of(y, kind):
    """Return the codes of float64, rounded once."""
    quotients = y / SCALE[kind]
    if kind == "int8":
        return quotients.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    return quotients.clamp(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)


def normed_pictures(kind, *given, activation="silu"):
    """Return codes of x with what is added, weight, bias and the number of groups."""
    x, added, w, b, groups = given
    partials = operate("group_partials", x, added, groups)
    operands = (x, added, partials, w, b, None, torch.tensor([SCALE[kind]], device=x.device))
    return operate(f"group_norm_codes_{kind}", *operands, 1e-5, activation, FORMATS[kind])


def wide_pictures(*given, activation="silu"):
    """Return the norm in 16 bit of what ``normed_pictures`` takes."""
    x, added, w, b, groups = given
    partials = operate("group_partials", x, added, groups)
    return operate("group_norm", x, added, partials, w, b, 1e-5, activation)


def exact_pictures(given, groups):
    x, added, w, b = given
    total = (x + added[:, None]).double().transpose(1, 2)
    return functional.group_norm(total, groups, w.double(), b.double(), 1e-5).transpose(1, 2)


def picture_operands(dtype, n, m, k, mean=3.0):
    x, added = torch.randn(n, m, k) + mean, torch.randn(n, k)
    return [t.to(dtype) for t in (x, added, *torch.randn(2, k))]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", PICTURES, ids=str)
def test_a_pictures_codes_are_those_of_its_norm(size, kind):
    *shape, groups = size
    torch.manual_seed(sum(size))
    given = picture_operands(torch.float32, *shape)
    found = places(normed_pictures(kind, *given, groups), kind)
    y = functional.silu(exact_pictures(given, groups))
    wanted = places(codes_of(y, kind), kind)
    assert int((found - wanted).abs().max()) <= 1
    assert float((found != wanted).float().mean()) < 2e-3


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("size", PICTURES, ids=str)
def test_a_picture_is_normed_as_torch_norms_it(size, dtype, activation):
    *shape, groups = size
    torch.manual_seed(sum(size))
    given = picture_operands(dtype, *shape)
    found = wide_pictures(*given, groups, activation=activation)
    # What is normed is rounded to the dtype before, and what is activated.
    rounded = [(given[0] + given[1][:, None]), torch.zeros_like(given[1]), *given[2:]]
    wanted = exact_pictures(rounded, groups)
    wanted = functional.silu(wanted.to(dtype).double()) if activation else wanted
    assert found.dtype is dtype
    # A rounding of the norm and one of silu; both move a value by half of its last place.
    near = 2 * torch.finfo(dtype).eps * wanted.abs() + (1e-3 if dtype != torch.float32 else 1e-4)
    assert bool(((found.double() - wanted).abs() <= near).all())


@pytest.mark.parametrize("scale", [1e-45, 1e-39, 1e-30, 1e30])
def test_zeros_have_codes_of_zeros_whatever_the_scale(scale):
    x = torch.zeros(1, 2, 16).half()
    partials = operate("group_partials", x, None, 2)
    operands = (x, None, partials, None, None, None, torch.tensor([scale]))
    assert not operate("group_norm_codes_fp8", *operands, 1e-6, "", "e4m3fn").any()


@pytest.mark.parametrize("backend", [Backend.HOST, Backend.REFERENCE])
def test_zeros_have_no_sign(backend):
    x, w = torch.zeros(1, 3, 1544).half(), torch.full((1544,), -0.5).half()
    with use(backend):
        assert not normed_pictures("fp8", x, None, w, None, 8, activation="").any()


def test_nan_stays_in_its_group_in_16_bit():
    x, added, w, b = picture_operands(torch.float16, 2, 70, 40)
    x[1, 69, 10] = torch.nan
    missing = wide_pictures(x, added, w, b, 4).isnan()
    assert missing[1, :, 10:20].all()
    assert int(missing.sum()) == 70 * 10


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda o: o[2][:, :3], ShapeError, "3 groups of 40"),
        (lambda o: torch.cat([o[2], o[2]], dim=2), ShapeError, "partials"),
        (lambda o: o[2].double(), KernelError, "partials"),
        (lambda o: o[2].flatten(), ShapeError, "0 groups"),
    ],
    ids=["groups", "chunks", "dtype", "flat"],
)
def test_moments_of_another_picture_are_refused(change, error, text):
    x, added, w, b = picture_operands(torch.float32, 1, 70, 40)
    operands = [x, added, operate("group_partials", x, added, 4), w, b]
    operands[2] = change(operands)
    with pytest.raises(error, match=f"group_norm: .*{text}"):
        operate("group_norm", *operands, 1e-5, "")


def test_a_large_mean_costs_no_digits():
    torch.manual_seed(0)
    given = picture_operands(torch.float32, 1, 300, 64, mean=3000.0)
    found = places(normed_pictures("int8", *given, 8, activation=""), "int8")
    wanted = places(codes_of(exact_pictures(given, 8), "int8"), "int8")
    assert int((found - wanted).abs().max()) <= 1


@pytest.mark.parametrize("at", [0, 150, 319])
def test_one_far_number_costs_no_digits(at):
    torch.manual_seed(0)
    given = picture_operands(torch.float32, 1, 320, 64)
    given[0][0, at, 0] = 20000.0
    found = operate("group_partials", *given[:2], 8)[..., 1]
    total = (given[0] + given[1][:, None]).double().reshape(-1, 16, 8, 8)  # chunk, pixel, group
    wanted = total.var((1, 3), correction=0) * 128
    assert torch.allclose(found[0].T.double(), wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("size", PICTURES, ids=str)
def test_pictures_of_one_number_are_their_bias(size, dtype):
    n, m, k, groups = size
    x, added = torch.full((n, m, k), 1000.0).to(dtype), torch.zeros(n, k).to(dtype)
    w, b = torch.randn(2, k, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = normed_pictures("fp8", x, added, w, b, groups, activation="")
    assert torch.equal(found, codes_of(b.double(), "fp8").expand(n, m, k))


def test_nan_stays_in_its_group():
    x, added, w, b = picture_operands(torch.float16, 2, 70, 40)
    x[1, 69, 10] = torch.nan
    codes = normed_pictures("fp8", x, added, w, b, 4)
    missing = codes.view(torch.float8_e4m3fn).float().isnan()
    assert missing[1, :, 10:20].all()
    assert int(missing.sum()) == 70 * 10


@pytest.mark.parametrize(
    ("shape", "groups", "text"),
    [
        ((1, 4, 12), 4, "C a multiple of 8"),
        ((1, 4, 4104), 4, "at most 4096"),
        ((1, 0, 8), 4, "expected .B, T, C."),
        ((1, 4, 64), 5, "5 groups of 64 channels"),
        ((1, 4, 64), 0, "0 groups"),
    ],
)
def test_what_does_not_fit_is_refused(shape, groups, text):
    with pytest.raises(ShapeError, match=f"group_partials: .*{text}"):
        operate("group_partials", torch.zeros(shape), None, groups)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("size", [*PICTURES, (2, 1024, 1280, 32), (1, 16384, 320, 32)], ids=str)
def test_a_gpu_gives_the_references_bits_of_pictures(size, dtype):
    *shape, groups = size
    torch.manual_seed(0)
    given = picture_operands(dtype, *shape)
    for x in (given, [given[0].flip(1), *given[1:]]):
        with use(Backend.GPU):
            found = normed_pictures("fp8", *(t.cuda() for t in x), groups, activation="")
            wide = wide_pictures(*(t.cuda() for t in x), groups, activation="")
        with use(Backend.REFERENCE):
            assert torch.equal(found.cpu(), normed_pictures("fp8", *x, groups, activation=""))
            assert torch.equal(wide.cpu(), wide_pictures(*x, groups, activation=""))


#: Windows of every kind: padded, skipped, apart, wider than a lane's held runs, single pixels.
WINDOWS = (
    ((9, 7), 16, Windows((3, 3), padding=(1, 1, 1, 1))),
    ((9, 7), 8, Windows((3, 3), (2, 2), padding=(0, 1, 0, 1))),
    ((12, 6), 24, Windows((5, 1), (1, 2), (2, 1), (3, 0, 2, 4))),
    ((3, 4), 520, Windows((3, 3), padding=(1, 1, 1, 1))),
    ((4, 3), 40, Windows((1, 1))),
)


@pytest.mark.parametrize(("size", "channels", "windows"), WINDOWS, ids=str)
@pytest.mark.parametrize("io", DTYPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_codes_of_windows_are_those_of_unfolded_rows(size, channels, windows, io, kind):
    """The unfolded rows are torch's own, taps in the order of a weight with channels last."""
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(2, *size, channels, generator=generator).to(DTYPES[io])
    smooth = torch.rand(channels, generator=generator) + 0.5 if kind == "int8" else None
    x[1, 1, 1, channels - 1] = torch.nan
    x[0] = 0 if windows.are_pixels else x[0]
    left, right, top, bottom = windows.padding
    padded = functional.pad(x.float().permute(0, 3, 1, 2), (left, right, top, bottom))
    rows = functional.unfold(padded, windows.kernel, windows.dilation, 0, windows.stride)
    rows = rows.unflatten(1, (channels, windows.taps)).permute(0, 3, 2, 1).to(x.dtype).flatten(2)
    rows = rows.flatten(0, 1).contiguous()
    factors = None if smooth is None else smooth.repeat(windows.taps)
    wanted = operate(f"quantize_{kind}_token", rows, factors, FORMATS[kind])
    found = operate(f"quantize_{kind}_windows", x, smooth, windows.numbers, FORMATS[kind])
    assert torch.equal(found[0].nan_to_num(-1), wanted[0].nan_to_num(-1))
    seen = ~wanted[0].isnan()
    assert torch.equal(found[1][seen], wanted[1][seen])
    assert 0 < seen.sum() < len(seen)


@pytest.mark.parametrize(
    ("x", "smooth", "match"),
    [
        (torch.randn(1, 4, 4, 12), None, "C a multiple of 8"),
        (torch.randn(4, 4, 16), None, r"expected \(B, H, W, C\)"),
        (torch.randn(1, 2, 4, 16), None, "no window fits"),
        (torch.randn(1, 4, 4, 16), torch.ones(144), "smooth"),
    ],
    ids=["channels", "axes", "window", "smooth"],
)
def test_windows_that_no_kernel_reads_are_refused(x, smooth, match):
    windows = Windows((3, 3), padding=(1, 1, 0, 0))
    with pytest.raises(ShapeError, match=match):
        operate("quantize_int8_windows", x, smooth, windows.numbers, "int8")
