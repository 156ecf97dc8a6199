"""Packed numbers by the core and by PyTorch: near ties, the smallest weights, means of outputs."""

from collections import defaultdict
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from quantkit.interchange.layer_codes import nearest_codes
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor, parse_granularity
from quantkit.numerics.scales import quantize
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.numerics.weight_grid import WeightGrid
from quantkit.packing.encode import encode_weight
from quantkit.packing.weight_plan import WeightPlan
from tests.packing.test_native import Bytes, packed, plan_of, source_of
from tests.support.brute_force import (
    LIMITS,
    RULES,
    codes_of,
    factor_loss,
    least_loss,
    loss_of,
    tried_scales,
)
from tests.support.packing import finish

OF_A_BYTE = ["e4m3fn", "e5m2", "int8"]


def near_ties(scale, fmt, count):
    """Return numbers whose codes would be others by the reciprocal of the scale: found by search.

    float32 division and float64 division agree on them.
    """
    generator = np.random.default_rng(5)
    largest = LIMITS[fmt][0]
    codes = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
    if fmt.startswith("e"):
        codes = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, f"float8_{fmt}"))
        codes = codes.astype(np.float32)
    values = np.unique(codes[np.isfinite(codes) & (np.abs(codes) <= largest)])
    middle = ((values[1:] + values[:-1]) / 2)[generator.integers(0, len(values) - 1, 200_000)]
    near = middle * (1 + generator.integers(-3, 4, len(middle)) * np.float32(2.0**-24)) * scale
    near = near.astype(np.float32)
    exact = codes_of_quotient(near.astype(np.float64) / np.float64(scale), fmt)
    divided = codes_of_quotient(near / scale, fmt)
    multiplied = codes_of_quotient(near * (np.float32(1) / scale), fmt)
    found = near[(divided == exact) & (multiplied != exact)]
    return np.resize(found, count) if len(found) else None


def codes_of_quotient(quotient, fmt):
    if fmt.startswith("e"):
        kind = getattr(ml_dtypes, f"float8_{fmt}")
        return np.clip(quotient, *LIMITS[fmt][::-1]).astype(kind).astype(np.float64)
    return np.rint(np.clip(quotient, *LIMITS[fmt][::-1])).astype(np.float64)


def tied_rows(fmt):
    """Return rows (8, 64) of near ties, of which the first number sets the scale."""
    rows = []
    for start in np.linspace(0.71, 1.93, 400, dtype=np.float32):
        if (near := near_ties(np.float32(start / np.float32(LIMITS[fmt][0])), fmt, 63)) is not None:
            rows.append(np.concatenate(([start], near)))
        if len(rows) == 8:
            return np.stack(rows).astype(np.float32)
    raise AssertionError(f"{fmt}: too few near ties")


@pytest.fixture(scope="module", params=OF_A_BYTE)
def tied(request):
    return request.param, tied_rows(request.param)


def numbers_of(codes, fmt):
    return torch.frombuffer(bytearray(codes), dtype=FORMATS[fmt].torch_dtype).double().numpy()


def test_near_ties_are_divided(tied, tmp_path, either_core):
    fmt, rows = tied
    scale = rows[:, :1] / np.float32(LIMITS[fmt][0])
    wanted = codes_of(rows, scale, fmt)
    assert (codes_of_quotient(rows * (1 / scale), fmt) != wanted)[:, 1:].all()
    _, parts = packed(plan_of(fmt), source_of(tmp_path, torch.from_numpy(rows)))
    np.testing.assert_array_equal(np.frombuffer(parts["weight_scale"], "<f4"), scale[:, 0])
    np.testing.assert_array_equal(numbers_of(parts["weight"], fmt).reshape(8, 64), wanted)


def test_near_ties_are_divided_wherever_weights_are_quantized(tied):
    fmt, rows = tied
    weight, step = torch.from_numpy(rows), rows[:, :1] / np.float32(LIMITS[fmt][0])
    wanted, scale = torch.from_numpy(codes_of(rows, step, fmt)), torch.from_numpy(step[:, 0])
    kind = FORMATS[fmt]
    assert torch.equal(quantize(weight, scale, kind, PerChannel()).double(), wanted)
    grid = WeightGrid(kind, PerChannel(), scale)
    assert torch.equal(grid.codes(weight).double(), wanted)
    # As exports do.
    made = nearest_codes(weight, kind, PerChannel(), rule="amax")
    assert torch.equal(made.codes.double(), wanted)


#: Units of the smallest subnormal: amax / 448 is zero below 224, amax / 127 below 64, and so on.
UNITS = [1, 7, 63, 64, 100, 223, 224, 300, 700, 28_671, 28_673, 90_000, 1 << 23]


@pytest.mark.parametrize("rule", ["amax", "mse"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group:32"])
@pytest.mark.parametrize("fmt", [*OF_A_BYTE, "int4"])
def test_the_smallest_weights_have_codes_and_scales(tmp_path, either_core, rule, granularity, fmt):
    if fmt == "int4" and granularity != "channel":
        return
    unit, drawn = np.float32(2.0**-149), np.random.default_rng(1)
    for units in UNITS:
        rows = np.rint(drawn.uniform(-units, units, (3, 64))).astype(np.float32) * unit
        rows[0, 5], rows[1] = units * unit, 0
        plan = replace(plan_of(fmt, granularity), observer=rule)
        _, parts = packed(plan, source_of(tmp_path, torch.from_numpy(rows)))
        scale = np.frombuffer(parts["weight_scale"], "<f4")
        assert (scale > 0).all()
        assert np.isfinite(scale).all()
        if fmt == "int4":
            check_factors(rows, scale, parts)
            continue
        codes = numbers_of(parts["weight"], fmt)
        assert np.isfinite(codes).all()
        assert (np.abs(codes) <= LIMITS[fmt][0]).all()
        groups = rows.reshape(len(scale), -1)
        for group, step, mine in zip(groups, scale, codes.reshape(groups.shape), strict=True):
            assert step in tried_scales(group, fmt, rule)
            np.testing.assert_array_equal(mine, codes_of(group, step, fmt))


def check_factors(rows, scale, parts):
    factors = np.frombuffer(parts["weight_group"], np.int8).reshape(3, 2)
    assert (np.abs(factors.astype(int)) >= 1).all()
    for row, step, own in zip(rows, scale, factors.tolist(), strict=True):
        for group, factor in zip(row.reshape(2, 32), own, strict=True):
            # No more than what zeros would lose.
            assert factor_loss(group, step, factor) <= np.square(group.astype(float)).sum()


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group:32"])
@pytest.mark.parametrize("fmt", OF_A_BYTE)
def test_scales_are_the_next_power_of_two(tmp_path, either_core, granularity, fmt):
    for exponent in (-30, 0, 3):
        exact = np.float32(LIMITS[fmt][0]) * np.float32(2.0**exponent)
        for amax in (exact, np.nextafter(exact, np.float32(0)), exact * np.float32(1.001)):
            rows = np.full((2, 64), amax, dtype=np.float32)
            plan = replace(plan_of(fmt, granularity), observer="amax_pow2")
            _, parts = packed(plan, source_of(tmp_path, torch.from_numpy(rows)))
            wanted = tried_scales(rows, fmt, "amax_pow2")
            assert set(np.frombuffer(parts["weight_scale"], "<f4")) == set(wanted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", OF_A_BYTE)
def test_the_one_scale_of_a_weight_loses_least(tmp_path, either_core, fmt, rule):
    chosen = set()
    for amax in (1.01, 1.2, 1.5, 1.9):
        rows = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
        rows *= np.float32(amax * LIMITS[fmt][0]) / np.abs(rows).max()
        plan = replace(plan_of(fmt, "tensor"), observer=rule)
        _, parts = packed(plan, source_of(tmp_path, torch.from_numpy(rows)))
        (scale,) = np.frombuffer(parts["weight_scale"], "<f4")
        chosen.add(tried_scales(rows, fmt, rule).index(scale))
        assert loss_of(rows, scale, fmt) == pytest.approx(least_loss(rows, fmt, rule), rel=1e-6)
    # A float loses by clipping what it wins among its subnormals.
    assert (fmt, rule) != ("int8", "mse_pow2") or chosen == {0, 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", [*OF_A_BYTE, "int4"])
def test_the_ends_of_a_dtype_have_codes_and_scales(tmp_path, either_core, dtype, fmt):
    info = torch.finfo(dtype)
    weight = torch.tensor([[info.max, -info.max], [info.tiny, -info.smallest_normal]], dtype=dtype)
    weight = weight.repeat(1, 16)
    weight[:, 3] = info.smallest_normal * info.eps
    for rule in ("amax", "mse"):
        plan = replace(plan_of(fmt), observer=rule)
        _, parts = packed(plan, source_of(tmp_path, weight))
        scale = np.frombuffer(parts["weight_scale"], "<f4")
        assert np.isfinite(scale).all()
        assert (scale > 0).all()
        if fmt != "int4":
            codes = numbers_of(parts["weight"], fmt).reshape(2, 32)
            near = codes * scale[:, None].astype(float)
            rows = weight.double().numpy()
            assert (np.abs(near - rows) <= np.abs(rows).max(axis=1, keepdims=True) / 16).all()


@pytest.mark.parametrize("fmt", OF_A_BYTE)
@pytest.mark.parametrize("value", [0.0, 1.5, -3e-44])
def test_a_single_weight_is_one_code(tmp_path, either_core, fmt, value):
    weight = torch.tensor([[value]])
    _, parts = packed(plan_of(fmt), source_of(tmp_path, weight))
    (scale,) = np.frombuffer(parts["weight_scale"], "<f4")
    (code,) = numbers_of(parts["weight"], fmt)
    assert code * scale == pytest.approx(value, rel=1e-6, abs=1e-43)


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(), PerGroup(32)], ids=str)
@pytest.mark.parametrize("fmt", [*OF_A_BYTE, "int4"])
def test_the_mean_that_packing_takes_is_that_of_smoothed_inputs(tmp_path, fmt, granularity):
    if fmt == "int4" and granularity != PerChannel():
        return
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    mean, factor = torch.linspace(-2, 3, 64), torch.logspace(-1, 1, 64)
    scheme = Scheme(FORMATS[fmt], parse_granularity(str(granularity)), None, Activation.TOKEN)
    plan = WeightPlan("fc", scheme, "amax", smooth=lambda amax: factor, mean=mean)
    sinks = defaultdict(Bytes)
    made = finish(encode_weight(plan, source_of(tmp_path, weight), sinks))
    smoothed = (weight.numpy() / factor.numpy()).astype(np.float32)
    held = dequantized(smoothed, sinks, fmt)
    dense = weight.double().numpy() @ mean.double().numpy()
    lost = dense - held @ (mean.double() * factor.double()).numpy()
    np.testing.assert_allclose(made.correction.numpy(), lost, rtol=1e-4, atol=1e-4)
    assert np.abs(lost).max() > 0.01


def dequantized(rows, sinks, fmt):
    scale = np.frombuffer(bytes(sinks["weight_scale"].data), "<f4").astype(float)
    if fmt != "int4":
        codes = numbers_of(sinks["weight"].data, fmt).reshape(len(scale), -1)
        return (codes * scale[:, None]).reshape(rows.shape)
    factors = np.frombuffer(bytes(sinks["weight_group"].data), np.int8).reshape(6, 2)
    bytes_ = np.frombuffer(bytes(sinks["weight"].data), np.uint8).reshape(6, 2, 16)
    codes = np.concatenate((bytes_ & 15, bytes_ >> 4), axis=2).astype(float) - 8
    return (codes * factors[:, :, None]).reshape(6, 64) * scale[:, None]
