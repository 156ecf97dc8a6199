"""Sums before a norm that ends in codes: torch's bits, at every tail."""

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.backends import Backend, use
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError, ShapeError
from tests.support.kernel_cases import DTYPES, need, operate

OPERATIONS = ("sum_norm_codes_fp8", "sum_norm_codes_int8")
FORMATS = {"sum_norm_codes_fp8": "e4m3fn", "sum_norm_codes_int8": "int8"}


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


def operands(dtype, m=6, k=264, *, pictures=2, gated=True, device="cpu"):
    """Return x, added, gate, and what follows them."""
    x, added = torch.randn(2, m, k, device=device).to(dtype).unbind()
    gate, gain, shift = torch.randn(3, pictures, k, device=device).to(dtype).unbind()
    weight, bias = torch.randn(2, k, device=device).to(dtype).unbind()
    smooth = torch.rand(k, device=device) + 0.5
    scale = torch.tensor([0.02], device=device)
    return [x, added, gate if gated else None, weight, bias, gain, shift, smooth, scale]


def summed(x, added, gate):
    """Return what diffusers' blocks add up: rows of a picture have its gate."""
    if gate is None:
        return x + added
    rows = added.reshape(gate.shape[0], -1, added.shape[1])
    return x + (gate.unsqueeze(1) * rows).reshape(added.shape)


def run(name, given):
    return operate(name, *given, 1e-6, True, FORMATS[name])


def norm_of(name, total, given):
    """Return the codes of the operation that has no sum."""
    return operate(name.replace("sum", "layer"), total, *given[3:], 1e-6, True, FORMATS[name])


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    "sizes",
    # Up to 4096 values of 16 bit, or 2048 of 32, are held; rows before a block of 8 and behind it.
    [(1, 8, 1), (7, 264, 1), (9, 520, 3), (16, 96, 2), (3, 2056, 3), (2, 4104, 1), (1, 8456, 1)],
)
def test_sums_are_torchs_and_codes_are_those_of_their_norm(name, dtype, gated, sizes):
    m, k, pictures = sizes
    torch.manual_seed(m + k)
    given = operands(dtype, m, k, pictures=pictures, gated=gated)
    total, codes = run(name, given)
    assert torch.equal(total, summed(*given[:3]))
    assert torch.equal(codes, norm_of(name, total, given))


@pytest.mark.parametrize("io", ["f16", "bf16"])
def test_every_value_is_added_as_torch_adds_it(io):
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[io])
    x = values.reshape(-1, 256)
    for seed in range(3):
        given = operands(DTYPES[io], *x.shape)
        order = torch.randperm(65536, generator=torch.Generator().manual_seed(seed))
        given[:2] = x, values[order].reshape(x.shape)
        total, _ = run(OPERATIONS[0], given)
        wanted = summed(*given[:3])
        assert torch.equal(total.isnan(), wanted.isnan())
        assert torch.equal(total.nan_to_num(0), wanted.nan_to_num(0))


def test_nan_stays_in_its_row():
    torch.manual_seed(0)
    given = operands(torch.float16)
    given[1][4, 7] = torch.nan
    total, codes = run(OPERATIONS[0], given)
    assert total.isnan().nonzero().tolist() == [[4, 7]]
    missing = codes.view(torch.float8_e4m3fn).float().isnan()
    assert missing.all(dim=1).tolist() == missing.any(dim=1).tolist() == [r == 4 for r in range(6)]


@pytest.mark.parametrize(
    ("place", "value", "error", "text"),
    [
        (1, torch.zeros(5, 264).half(), ShapeError, r"added has shape \(5, 264\)"),
        (1, torch.zeros(6, 264), KernelError, "added is torch.float32, expected torch.float16"),
        (2, torch.zeros(2, 256).half(), ShapeError, r"gate has shape \(2, 256\)"),
        (2, torch.zeros(3, 264).half(), ShapeError, "modulation of 3 pictures"),
        (2, torch.zeros(2, 264), KernelError, "gate is torch.float32, expected torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused(place, value, error, text):
    given = operands(torch.float16)
    given[place] = value
    with pytest.raises(error, match=f"sum_norm_codes_fp8: {text}"):
        run(OPERATIONS[0], given)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("m", "k"), [(1, 8), (9, 520), (64, 3072), (3, 8456), (4608, 3072)])
def test_a_gpu_gives_the_references_bits(name, dtype, m, k):
    torch.manual_seed(m)
    for gated in (True, False):
        given = operands(dtype, m, k, pictures=1, gated=gated, device="cuda")
        with use(Backend.GPU):
            total, codes = run(name, given)
        right = OPS[name].reference(*(t if t is None else t.cpu() for t in given), 1e-6, True,
                                    FORMATS[name])  # fmt: skip
        assert torch.equal(total.cpu(), right[0])
        assert torch.equal(codes.cpu(), right[1])
