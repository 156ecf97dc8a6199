"""The compiled core against PyTorch: the same bytes, for everything that it takes."""

from collections import defaultdict
from dataclasses import replace
from hashlib import sha256
from itertools import product
from math import prod

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint import weight_reader
from quantkit.checkpoint.weight_reader import SourceTensor
from quantkit.device import compilers
from quantkit.device.host import encoder
from quantkit.device.host.hashing import new_digest
from quantkit.errors import NonFiniteError
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.granularity import parse_granularity
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.packed_2to4 import to_rows
from quantkit.numerics.scale_rules import WEIGHT_SCALES
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.packing import native
from quantkit.packing.encode import encode_weight
from quantkit.packing.mask_source import ChosenMask
from quantkit.packing.weight_plan import WeightPlan
from quantkit.storage.system import open_to_read
from quantkit.storage.tensorfile import read_header
from tests.support.kernel_cases import need
from tests.support.packing import finish
from tests.support.sampling import paired

HALVES = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
#: Linear and Conv2d; rows that are no multiple of a vector's block, and shorter than one.
SHAPES = [
    (3, 32), (7, 64, 1, 1), (4, 32, 3, 3), (2, 40, 3, 1), (1, 8), (33, 264), (2, 20),
    (3, 19, 3, 3), (2, 24, 5, 5), (2, 9, 1, 8), (5, 16, 2, 5),
]  # fmt: skip
METHODS = ["", "magnitude", "wanda"]


def fits(fmt, granularity, method, shape):
    """Return whether there is such a treatment of such a weight."""
    k = prod(shape[1:])
    grouped = fmt == "int4" or granularity == "group:32"
    return not (
        (fmt == "int4" and granularity != "channel") or (grouped and k % 32) or (method and k % 8)
    )


CASES = [
    case
    for case in product(encoder.FORMATS, ["channel", "tensor", "group:32"], METHODS, SHAPES)
    if fits(*case)
]


@pytest.fixture(autouse=True)
def _compiler():
    need(compilers.host_compiler)
    assert not encoder.why_unavailable()


class Bytes:
    def __init__(self):
        self.data = bytearray()
        self.digest = new_digest()

    def append(self, data):
        self.digest.update(data.cast("B"))
        self.write(data.cast("B"))

    def write(self, data):
        self.data += bytes(data)


def source_of(folder, weight):
    path = folder / "w.safetensors"
    save_file({"fc.weight": weight}, path)
    return SourceTensor(path, open_to_read(path), read_header(path).tensors["fc.weight"])


def packed(plan, source):
    sinks = defaultdict(Bytes)
    record = finish(encode_weight(plan, source, sinks)).record
    for sink in sinks.values():
        assert sink.digest.hexdigest() == sha256(sink.data).hexdigest()
    return record, {part: bytes(sink.data) for part, sink in sinks.items()}


def compare(plan, source, monkeypatch, *, taken=True):
    assert native.takes(plan, source.info) == taken
    found = packed(plan, source)
    monkeypatch.setattr(native, "takes", lambda plan, info: False)
    assert found == packed(plan, source)
    monkeypatch.undo()


def plan_of(fmt, granularity="channel", method="", moment=None, scale=None):
    sparsity = TWO_OF_FOUR if method else None
    scheme = Scheme(FORMATS[fmt], parse_granularity(granularity), sparsity, Activation.TOKEN)
    mask = ChosenMask(method, moment) if method else None
    return WeightPlan("fc", scheme, "amax", mask=mask, scale=scale)


def numbers(shape, dtype):
    """Normal and subnormal, zeros of both signs, equal ones, whole groups and rows of zeros."""
    generator = torch.Generator().manual_seed(1)
    weight = (
        torch.randn(shape, generator=generator)
        * torch.logspace(-7, 2, shape[0])[(...,) + (None,) * (len(shape) - 1)]
    )
    flat = weight.view(-1)
    flat[::7] = 0.0
    flat[3::11] = -0.0
    flat[1::5] = flat[0::5][: len(flat[1::5])].neg()
    flat[:: max(1, len(flat) // 50)] = 65504.0 if dtype != torch.float32 else 3e38
    if shape[0] > 2:
        weight[1] = 0
    return weight.to(dtype)


@pytest.mark.parametrize("case", paired((*c, size) for c in CASES for size in (1, 1 << 20)))
def test_bytes_are_those_of_torch(tmp_path, monkeypatch, case):
    fmt, granularity, method, shape, chunk = case
    monkeypatch.setattr(native, "CHUNK_BYTES", chunk)
    moment = torch.rand(prod(shape[1:]), generator=torch.Generator().manual_seed(2))
    plan = plan_of(fmt, granularity, method, moment)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        source = source_of(tmp_path, numbers(shape, dtype))
        with monkeypatch.context() as patch:
            compare(plan, source, patch)


def smoothing(shape):
    """Return factors of channels, and note the amax of columns that they were asked with."""
    asked = []
    factor = torch.logspace(-2, 2, shape[1])[torch.randperm(shape[1])]
    return lambda amax: asked.append(amax.clone()) or factor, asked


#: The rules that try several scales, or powers of two, which int4 has none of.
SEARCHED = [
    (*case, rule, smooth)
    for case, rule, smooth in product(CASES, WEIGHT_SCALES, (False, True))
    if rule == "mse" or (rule != "amax" and case[0] != "int4" and case[3] in SHAPES[1:6:2])
]


@pytest.mark.parametrize("case", paired(SEARCHED))
def test_searched_and_smoothed_bytes_are_those_of_torch(tmp_path, monkeypatch, case):
    fmt, granularity, method, shape, rule, smooth = case
    monkeypatch.setattr(native, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(weight_reader, "BLOCK_ELEMENTS", 500)
    moment = torch.rand(prod(shape[1:]), generator=torch.Generator().manual_seed(2))
    plan = replace(plan_of(fmt, granularity, method, moment), observer=rule)
    # Products of random numbers, and few values, of which many are equally far off.
    generator = torch.Generator().manual_seed(3)
    for weight in (
        torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator),
        torch.randint(-3, 4, shape, generator=generator).float(),
        numbers(shape, torch.bfloat16),
    ):
        if smooth:
            factor, asked = smoothing(shape)
            plan = replace(plan, smooth=factor, input_scale=lambda factor: factor.amax())
        source = source_of(tmp_path, weight)
        with monkeypatch.context() as patch:
            compare(plan, source, patch)
        if smooth:
            columns = to_rows(weight.float()).abs().amax(dim=0)
            assert all(torch.equal(amax, columns) for amax in asked)
            assert len(asked) == 2


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_smoothing_that_overflows_is_refused_by_both(tmp_path, either_core, sparse):
    weight = torch.ones(3, 64)
    # Of the sparse one, what overflows is not even kept.
    weight[2, :2], weight[2, 2:4] = 1e30, 2e30
    plan = plan_of("int8", method="magnitude" if sparse else "")
    plan = replace(plan, smooth=lambda amax: torch.tensor([1e-10] * 2 + [1.0] * 62))
    with pytest.raises(NonFiniteError, match="fc: smoothing overflows the weight; lower smooth"):
        packed(plan, source_of(tmp_path, weight))


@pytest.mark.parametrize("fmt", encoder.FORMATS)
@pytest.mark.parametrize("method", ["", "magnitude"], ids=["dense", "sparse"])
def test_every_half_precision_number(tmp_path, monkeypatch, fmt, method):
    weight = HALVES[HALVES.isfinite()].reshape(-1, 64)
    shuffled = weight.flatten()[torch.randperm(weight.numel())].reshape(-1, 64)
    for rows in (weight, shuffled.contiguous()):
        with monkeypatch.context() as patch:
            compare(plan_of(fmt, method=method), source_of(tmp_path, rows), patch)


@pytest.mark.parametrize("scale", [1.0, 3e-8, 2.0**-140, 1e30])
@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "int8"])
def test_a_given_scale_saturates_as_torch_does(tmp_path, monkeypatch, fmt, scale):
    plan = plan_of(fmt, "tensor", scale=torch.tensor(scale))
    compare(plan, source_of(tmp_path, numbers((9, 64), torch.float32)), monkeypatch)


@pytest.mark.parametrize("amax", [2.0**-149, 223 * 2.0**-149, 672 * 2.0**-149, 1e-38, 3.4e38])
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "int8"])
def test_the_ends_of_float32(tmp_path, monkeypatch, fmt, granularity, amax):
    weight = torch.linspace(-1, 1, 64).mul(amax).reshape(1, 64)
    compare(plan_of(fmt, granularity), source_of(tmp_path, weight), monkeypatch)
    with monkeypatch.context() as patch:
        compare(plan_of("int4"), source_of(tmp_path, weight), patch)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_what_is_no_number_is_named_as_torch_names_it(
    tmp_path, monkeypatch, value, dtype, granularity
):
    monkeypatch.setattr(native, "CHUNK_BYTES", 1000)
    weight = numbers((40, 32, 3, 3), dtype)
    weight[17, 5, 2, 1] = value
    weight[18] = value
    source, plan = source_of(tmp_path, weight), plan_of("e4m3fn", granularity)
    texts = []
    for takes in (native.takes, lambda plan, info: False):
        monkeypatch.setattr(native, "takes", takes)
        with pytest.raises(NonFiniteError, match=r"fc\.weight\[17, 5, 2, 1\]: found") as info:
            packed(plan, source)
        texts.append(str(info.value))
    assert texts[0] == texts[1]


def test_what_the_core_does_not_take_is_left_to_torch(tmp_path, monkeypatch):
    source = source_of(tmp_path, numbers((4, 48), torch.float16))
    double = source_of(tmp_path, numbers((4, 48), torch.float64))
    assert native.takes(plan_of("e4m3fn"), source.info)
    assert not native.takes(plan_of("e4m3fn"), double.info)
    assert not native.takes(plan_of("e4m3fn", "group:16"), source.info)
    for columns, taken in ((0, False), (1, True)):
        narrow = source_of(tmp_path, numbers((4, columns), torch.float16))
        assert native.takes(plan_of("e4m3fn"), narrow.info) is taken
    wide = source_of(tmp_path, numbers((2, 192), torch.float16))
    assert all(native.takes(plan_of("int8", f"group:{n}"), wide.info) for n in (32, 64, 96, 192))
    infinite = torch.full((48,), float("inf"))
    assert not native.takes(plan_of("e4m3fn", method="wanda", moment=infinite), source.info)
    corrected = replace(plan_of("e4m3fn"), mean=torch.zeros(48))
    assert not native.takes(corrected, source.info)
    monkeypatch.setattr(encoder, "why_unavailable", lambda: "no compiler")
    assert not native.takes(plan_of("e4m3fn"), source.info)
