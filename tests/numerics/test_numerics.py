"""Formats, scales, masks and packing against ml_dtypes, torch and brute force."""

from itertools import combinations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import CheckpointError, RecipeError, ShapeError
from quantkit.numerics.formats import E4M3FN, FORMATS, find_format
from quantkit.numerics.granularity import (
    PerChannel,
    PerGroup,
    PerTensor,
    parse_granularity,
    scale_shape,
)
from quantkit.numerics.least_error import choose_scale
from quantkit.numerics.masks import (
    MASKS,
    TWO_OF_FOUR,
    Pattern,
    choose_first_axis,
    choose_mask,
    parse_pattern,
)
from quantkit.numerics.packed_2to4 import (
    LEGAL_NIBBLES,
    from_rows,
    metadata_is_legal,
    pack_two_of_four,
    to_rows,
    unpack_two_of_four,
)
from quantkit.numerics.scale_rules import WEIGHT_SCALES
from quantkit.numerics.scales import (
    amax_scale,
    cast,
    decode,
    dequantize,
    power_of_two,
    quantize,
)

GRANULARITIES = [PerTensor(), PerChannel(), PerGroup(8)]
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
FLOATS = [fmt for fmt in FORMATS.values() if not fmt.is_integer]
every_float = pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)


def oracle_dtype(fmt):
    return getattr(ml_dtypes, f"float8_{fmt.name}")


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@every_float
def test_format_limits_agree_with_ml_dtypes(fmt):
    info = ml_dtypes.finfo(oracle_dtype(fmt))
    assert fmt.max == float(info.max)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.bits == info.bits
    assert torch.finfo(fmt.torch_dtype).max == fmt.max


@every_float
def test_every_code_decodes_as_in_ml_dtypes(fmt):
    codes = np.arange(256, dtype=np.uint8)
    ours = torch.from_numpy(codes.copy()).view(fmt.torch_dtype).float().numpy()
    theirs = codes.view(oracle_dtype(fmt)).astype(np.float32)
    np.testing.assert_array_equal(ours, theirs)


@every_float
def test_cast_rounds_half_to_even_at_every_midpoint(fmt):
    values = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype).float()
    values = values[values.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2
    near = torch.cat([middle, middle.nextafter(values[1:]), middle.nextafter(values[:-1])])
    ours = cast(near, fmt).view(torch.uint8).numpy()
    theirs = near.numpy().astype(oracle_dtype(fmt)).view(np.uint8)
    np.testing.assert_array_equal(ours, theirs)


@every_float
def test_cast_saturates_and_keeps_nan(fmt):
    values = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, fmt.max * 1.04, torch.nan, -0.0])
    out = cast(values, fmt).float()
    assert out[:5].tolist() == [fmt.max, -fmt.max, fmt.max, -fmt.max, fmt.max]
    assert out[5].isnan()
    assert out[6].signbit()


def test_int8_is_symmetric_and_rounds_half_to_even():
    fmt = FORMATS["int8"]
    assert (fmt.max, fmt.bits, fmt.codes_per_byte, fmt.safetensors_dtype) == (127, 8, 1, "I8")
    halves = np.arange(-260, 261, dtype=np.float32) / 2
    wanted = np.clip(np.rint(halves), -127, 127).astype(np.int8)
    np.testing.assert_array_equal(cast(torch.from_numpy(halves), fmt).numpy(), wanted)
    wild = torch.tensor([1e30, -torch.inf, torch.nan, -0.0])
    assert cast(wild, fmt).tolist() == [127, -127, -128, 0]
    assert decode(torch.tensor([0x81], dtype=torch.uint8), "int8").tolist() == [-127]


def test_fnuz_is_refused_and_typos_are_named():
    with pytest.raises(CheckpointError, match="FNUZ is the FP8 of MI300"):
        find_format("e4m3fnuz")
    with pytest.raises(RecipeError, match="'e4m3': unknown, expected one of e4m3fn, e5m2"):
        find_format("e4m3")


@pytest.mark.parametrize("text", ["tensor", "channel", "group:128"])
def test_granularity_round_trips_through_text(text):
    assert str(parse_granularity(text)) == text


@pytest.mark.parametrize("text", ["", "group", "group:0", "group:-4", "tensor:4", "row", "group:²"])
def test_bad_granularity_is_refused(text):
    with pytest.raises(RecipeError, match="expected tensor, channel or group:SIZE"):
        parse_granularity(text)


def test_group_size_must_divide_k():
    assert scale_shape(PerGroup(32), 5, 96) == (5, 3)
    with pytest.raises(ShapeError, match="K 100 is not a multiple of group size 32"):
        scale_shape(PerGroup(32), 5, 100)


@every_format
@every_granularity
def test_amax_scale_maps_each_amax_onto_the_largest_code(fmt, granularity):
    rows = seeded(6, 32) * torch.logspace(-3, 3, 6).unsqueeze(1)
    scale = amax_scale(rows, fmt, granularity)
    assert scale.shape == scale_shape(granularity, 6, 32)
    assert scale.dtype == torch.float32
    codes = quantize(rows, scale, fmt, granularity)
    largest = codes.float().abs().reshape(*scale.shape, -1).amax(-1)
    assert (largest == fmt.max).all()


@every_format
@every_granularity
@pytest.mark.parametrize("observer", WEIGHT_SCALES)
def test_quantization_error_is_within_half_a_step(fmt, granularity, observer):
    rows = seeded(6, 32, seed=1)
    scale = choose_scale(rows, fmt, granularity, observer)
    back = dequantize(quantize(rows, scale, fmt, granularity), scale, granularity)
    # Relative half step of a normal number; the subnormal floor; and what the MSE search may clip.
    bound = rows.abs() * 2.0 ** -(fmt.mantissa_bits + 1) + fmt.smallest_subnormal * scale.max()
    if observer == "amax":
        assert ((back - rows).abs() <= bound).all()
    allowed = 0.01 if fmt.bits == 8 else 0.05
    assert (back - rows).square().mean() < allowed * rows.square().mean()


@pytest.mark.parametrize(
    ("scale", "power"),
    [(1.0, 1.0), (1.0 + 2**-23, 2.0), (0.75, 1.0), (2.0**-149, 2.0**-149), (3e-45, 2.0**-148)],
)
def test_the_least_power_of_two_that_is_not_below(scale, power):
    assert power_of_two(torch.tensor(scale)).item() == power


@every_granularity
@pytest.mark.parametrize("observer", WEIGHT_SCALES)
def test_all_zero_weights_have_scale_one(granularity, observer):
    assert (choose_scale(torch.zeros(4, 16), E4M3FN, granularity, observer) == 1).all()


@pytest.mark.parametrize(
    ("text", "n", "m"), [("2:4", 2, 4), ("4:2", 2, 4), ("1:4", 1, 4), ("8:4", 4, 8)]
)
def test_pattern_accepts_both_spellings(text, n, m):
    assert parse_pattern(text) == Pattern(n, m)


@pytest.mark.parametrize("text", ["", "2", "2:2", "0:4", "2:4:8", "a:b", "-2:4"])
def test_bad_pattern_is_refused(text):
    with pytest.raises(RecipeError, match="expected n:m with 0 < n < m"):
        parse_pattern(text)


@given(
    st.integers(1, 4),
    st.integers(5, 8),
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=8, max_size=8),
)
def test_mask_equals_a_stable_sort(n, m, values):
    scores = torch.tensor((values * m)[: m * 8]).reshape(8, m)
    mask = choose_mask(scores, Pattern(n, m))
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :n]
    wanted = torch.zeros_like(mask).scatter_(1, order, value=True)
    assert torch.equal(mask, wanted)


def test_mask_maximises_the_kept_score_over_all_pairs():
    scores = seeded(40, 4, seed=3).abs()
    kept = (scores * choose_mask(scores, TWO_OF_FOUR)).sum(1)
    best = torch.stack([scores[:, list(p)].sum(1) for p in combinations(range(4), 2)]).amax(0)
    torch.testing.assert_close(kept, best)


def test_mask_refuses_k_that_does_not_divide():
    with pytest.raises(ShapeError, match="K 6 is not a multiple of 4"):
        choose_mask(torch.zeros(2, 6), TWO_OF_FOUR)


@pytest.mark.parametrize("method", MASKS)
def test_scores_are_not_negative_and_order_by_weight(method):
    moment = torch.ones(8)
    scores = MASKS[method](torch.tensor([[-3.0, 1, 0, 2, -0.5, 0, 4, -4]]), moment)
    assert (scores >= 0).all()
    assert scores.argmax().item() == 6


def test_wanda_prefers_the_louder_input():
    weight = torch.tensor([[1.0, 1.1, 0.0, 0.0]])
    mask = choose_mask(MASKS["wanda"](weight, torch.tensor([4.0, 1.0, 1.0, 1.0])), Pattern(1, 4))
    assert mask.tolist() == [[True, False, False, False]]
    with pytest.raises(RecipeError, match="needs input statistics"):
        MASKS["wanda"](weight, None)


@pytest.mark.parametrize("shape", [(5, 24), (3, 8, 3, 3), (4, 16, 1, 1)], ids=str)
def test_rows_round_trip(shape):
    weight = seeded(*shape)
    rows = to_rows(weight)
    assert rows.shape == (shape[0], weight[0].numel())
    assert torch.equal(from_rows(rows, shape), weight)
    if len(shape) == 4:
        assert torch.equal(rows[0, : shape[1]], weight[0, :, 0, 0])


@pytest.mark.parametrize("nonzeros", [0, 1, 2])
def test_packing_round_trips_with_few_nonzeros(nonzeros):
    rng = torch.Generator().manual_seed(nonzeros)
    groups = torch.zeros(64, 16, 4, dtype=torch.uint8)
    where = torch.rand(64, 16, 4, generator=rng).argsort(-1)[..., :nonzeros]
    groups.scatter_(2, where, torch.randint(1, 255, where.shape, generator=rng).to(torch.uint8))
    codes = groups.reshape(64, 64)
    values, meta = pack_two_of_four(codes, choose_mask(codes.float(), TWO_OF_FOUR))
    assert values.shape == (64, 32)
    assert meta.shape == (64, 8)
    assert metadata_is_legal(meta)
    assert torch.equal(unpack_two_of_four(values, meta), codes)


def test_packing_keeps_the_low_nibble_for_the_lower_group():
    codes = torch.tensor([[0, 7, 0, 9, 5, 0, 6, 0]], dtype=torch.uint8)
    values, meta = pack_two_of_four(codes, codes > 0)
    assert values.tolist() == [[7, 9, 5, 6]]
    assert meta.tolist() == [[0xD | 0x8 << 4]]


def test_packing_refuses_masks_that_keep_another_number():
    with pytest.raises(ShapeError, match="does not keep exactly two of every four"):
        pack_two_of_four(torch.zeros(1, 8, dtype=torch.uint8), torch.ones(1, 8, dtype=torch.bool))
    with pytest.raises(ShapeError, match="K 4 is not a multiple of 8"):
        pack_two_of_four(torch.zeros(1, 4, dtype=torch.uint8), torch.ones(1, 4, dtype=torch.bool))


def test_exactly_six_nibbles_are_legal():
    assert sorted(LEGAL_NIBBLES) == sorted(a | b << 2 for a, b in combinations(range(4), 2))


@pytest.mark.parametrize("place", [0, 5, 11])
def test_both_nibbles_of_every_byte_are_judged(place):
    for byte in range(256):
        meta = torch.full((3, 4), 0xE4, dtype=torch.uint8)
        meta.view(-1)[place] = byte
        low, high = byte & 0xF, byte >> 4
        legal = all(n & 3 < n >> 2 for n in (low, high))
        assert metadata_is_legal(meta) == legal, hex(byte)


@pytest.mark.parametrize("m", [1, 2, 4, 8])
@pytest.mark.parametrize("columns", [0, 1, 50])
def test_one_group_on_the_first_axis_is_chosen_as_groups_are(m, columns):
    # Few values, so that there are ties.
    scores = torch.randint(0, 3, (m, columns), generator=torch.Generator().manual_seed(m)).float()
    for n in range(1, m):
        wanted = choose_mask(scores.t(), Pattern(n, m)).t()
        assert torch.equal(choose_first_axis(scores, n), wanted)
