"""Dynamic scales of attention: kernels against their reference, that against torch in float64."""

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.backends import Backend, use
from quantkit.device.ops import call as execute
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.attention_factors import (
    HeadFactors,
    head_factors,
    measured_scales,
    padded,
    score_factor,
)
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.head_partials import chunk_count
from tests.support.kernel_cases import DTYPES, need

PICTURES, HEADS = 2, 3
#: head size, queries, keys: tails of lanes, of turns and of chunks, more queries than keys
SIZES = (
    (8, 1, 1), (40, 17, 17), (64, 33, 17), (64, 1000, 1000), (72, 17, 100), (128, 65, 1030),
    (160, 1, 77),
)  # fmt: skip
KINDS = {"e4m3fn": "fp8", "int8": "int8"}


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


def draw(size, dtype=torch.float16):
    """Return q, k and v of (B, T, H * D), whose columns have means and sizes of their own."""
    d, queries, keys = size
    generator = torch.Generator().manual_seed(0)

    def normal(tokens):
        x = torch.randn(PICTURES, tokens, HEADS * d, generator=generator)
        spread, mean = torch.randn(2, HEADS * d, generator=generator).exp()
        return (x * spread + 4 * mean).to(dtype)

    return normal(queries), normal(keys), normal(keys)


def measure(operands, columns, heads, d, *, tau=None, fmt="e4m3fn"):
    """Return factors by the operations."""
    parts = execute.call(OPS["head_partials"], *operands, columns, heads, d)
    tau = score_factor(d) if tau is None else tau
    keys = operands[1].shape[1]
    return HeadFactors(*execute.call(OPS[f"head_factors_{KINDS[fmt]}"], *parts, keys, tau))


def rows_of(x, heads):
    """Return (B * H, T, D) of (B, T, H * D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)


def exact(operands, heads, fmt="e4m3fn"):
    """Return factors by torch's mean, amin and amax in float64, and the formulas of static ones."""
    q, k, v = (rows_of(x, heads).double() for x in operands)

    def spread(t):
        mean = t.mean(1)
        return mean, torch.maximum(t.amax(1) - mean, mean - t.amin(1))

    def positive(t):
        return torch.where(t > 0, t, torch.ones_like(t))

    (k_mean, k_range), (v_mean, v_range) = spread(k), spread(v)
    tau, d = score_factor(q.shape[-1]), q.shape[-1]
    q_range, k_range = positive(q.abs().amax((1, 2))), positive(k_range.amax(1))
    a = torch.minimum((tau * k_range / q_range).sqrt(), 448 / q_range)
    b = torch.minimum(tau / a, 448 / k_range)
    if fmt == "int8":
        a, b = torch.full_like(a, tau), torch.ones_like(b)
    wide = torch.nn.functional.pad
    more = (0, padded(d) - d)
    scale = wide(positive(v_range / 448), more, value=1)
    return HeadFactors(wide(k_mean, more), a, b, wide(v_mean, more), scale)


def assert_near(found, wanted, *, rtol=3e-6, atol=3e-6):
    for name, mine, right in zip(HeadFactors._fields, found, wanted, strict=True):
        assert mine.dtype is torch.float32
        near = torch.isclose(mine.double(), right, rtol=rtol, atol=atol, equal_nan=True)
        assert near.all(), (name, mine[~near], right[~near])


@pytest.mark.parametrize("fmt", KINDS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_factors_are_those_of_float64(size, dtype, fmt):
    operands = draw(size, dtype)
    found = measure(operands, (0, 0, 0), HEADS, size[0], fmt=fmt)
    assert_near(found, exact(operands, HEADS, fmt), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_reference_has_the_kernels_order_of_sums(size):
    operands = draw(size, torch.float32)
    found = execute.call(OPS["head_partials"], *operands, (0, 0, 0), HEADS, size[0])
    with use(Backend.REFERENCE):
        wanted = execute.call(OPS["head_partials"], *operands, (0, 0, 0), HEADS, size[0])
    for mine, right in zip(found, wanted, strict=True):
        assert torch.equal(mine, right)
    assert found[0].shape[1] == chunk_count(max(size[1:])) <= 32


def test_chunks_without_tokens_change_nothing():
    """2000 queries make chunks of 64 tokens: 7 keys lie in the first of 32."""
    operands = draw((16, 2000, 7))
    _, parts = execute.call(OPS["head_partials"], *operands, (0, 0, 0), HEADS, 16)
    empty = parts[:, :, 1:]
    assert (empty[..., 0, :] == 0).all()
    assert (empty[..., 1, :] == torch.inf).all()
    assert (empty[..., 2, :] == -torch.inf).all()
    assert_near(measure(operands, (0, 0, 0), HEADS, 16), exact(operands, HEADS))


@pytest.mark.parametrize("d", [40, 64])
def test_heads_lie_where_their_columns_say(d):
    """In a joined projection, whose other columns are not read, and as pictures of one head."""
    operands = draw((d, 50, 50))
    wanted = measure(operands, (0, 0, 0), HEADS, d)
    nothing = torch.full((PICTURES, 50, 16), torch.nan).half()
    joined = torch.cat([nothing, *operands, nothing], dim=2)
    width = HEADS * d
    columns = tuple(16 + i * width for i in range(3))
    by_head = [rows_of(x, HEADS).contiguous() for x in operands]
    # Views are copied where they are no rows of plain memory.
    views = [joined[..., at : at + width] for at in columns]
    for case in (
        measure([joined] * 3, columns, HEADS, d),
        measure(by_head, (0, 0, 0), 1, d),
        measure(views, (0, 0, 0), HEADS, d),
    ):
        assert all(torch.equal(mine, right) for mine, right in zip(case, wanted, strict=True))


def test_ranges_of_zero_are_one():
    q, k, v = torch.zeros(1, 33, 16), torch.full((1, 33, 16), 0.5), torch.full((1, 33, 16), -2.0)
    found = measure((q, k, v), (0, 0, 0), 1, 16, tau=0.25)
    assert (found.key_mean == 0.5).all()
    assert (found.value_mean == -2).all()
    assert (found.value_scale == 1).all()
    # Both ranges 1: a b = tau.
    assert found.query.tolist() == found.key.tolist() == [0.5]


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", range(3))
def test_what_is_not_finite_gives_what_torch_gives(place, value):
    operands = draw((24, 40, 300), torch.float32)
    operands[place][1, 39, 30] = value
    found = measure(operands, (0, 0, 0), HEADS, 24)
    rows = [rows_of(x, HEADS) for x in operands]
    wanted = head_factors(measured_scales(*rows), 24, E4M3FN.name)
    assert_near(found, [t.double() for t in wanted])
    touched = found.key_mean, found.value_mean
    assert [int((~t.isfinite()).sum()) for t in touched] == [int(place == 1), int(place == 2)]


def test_infinities_of_both_signs_are_no_number():
    operands = draw((16, 40, 40), torch.float32)
    for x in operands:
        x[0, 3, 5], x[0, 30, 5] = torch.inf, -torch.inf
    rows = [rows_of(x, HEADS) for x in operands]
    wanted = head_factors(measured_scales(*rows), 16, E4M3FN.name)
    assert_near(measure(operands, (0, 0, 0), HEADS, 16), [t.double() for t in wanted])


def test_a_range_of_keys_that_overflows_gives_what_torch_gives():
    """Its quotient by that of infinite queries is no number, and so are both factors."""
    operands = draw((16, 3, 3), torch.float32)
    operands[0][0, 0, 5] = torch.inf
    operands[1][0, :, 5] = torch.tensor([-3.4e38, 3.4e38, -3.4e38])
    rows = [rows_of(x, HEADS) for x in operands]
    scales = measured_scales(*rows)
    assert scales.key_range.isinf().sum() == scales.key_mean.isfinite().all() == 1
    wanted = head_factors(scales, 16, E4M3FN.name)
    assert wanted.query.isnan().sum() == wanted.key.isnan().sum() == 1
    assert_near(measure(operands, (0, 0, 0), HEADS, 16), [t.double() for t in wanted])


@pytest.mark.parametrize("token", [0, 999])
def test_the_largest_query_is_found_wherever_it_is(token):
    """32 chunks of 20 runs are more than a block has threads."""
    operands = draw((160, 1000, 3))
    operands[0][0, token, 159] = 60000
    assert_near(measure(operands, (0, 0, 0), HEADS, 160), exact(operands, HEADS))


def test_the_largest_float16_overflows_no_sum():
    operands = [torch.full((1, 3000, 16), 65504.0).half() for _ in range(3)]
    operands[2][:, ::2] *= -1
    found = measure(operands, (0, 0, 0), 1, 16)
    assert_near(found, exact(operands, 1), atol=0)


X = torch.zeros(2, 5, 48).half()


@pytest.mark.parametrize(
    ("operands", "options", "text"),
    [
        ((X[0], X, X), ((0, 0, 0), 3, 16), r"x_q is torch.float16 of shape \(5, 48\)"),
        ((X, X.float(), X), ((0, 0, 0), 3, 16), "x_k is torch.float32"),
        ((X, X[:1], X), ((0, 0, 0), 3, 16), r"x_k is .* expected torch.float16 \(2, tokens"),
        ((X, X, X[:, :4]), ((0, 0, 0), 3, 16), "5 keys and 4 values, expected one or more"),
        ((X, X[:, :0], X[:, :0]), ((0, 0, 0), 3, 16), "0 keys and 0 values"),
        ((X, X, X), ((0, 8, 0), 3, 16), "columns 8 to 56 of the 48 of x_k"),
        ((X, X, X), ((0, 0, 4), 2, 16), "columns 4 to 36 of the 48 of x_v"),
        ((X, X, X), ((0, 0), 3, 16), "from 3 columns on"),
        ((X, X, X), ((0, 0, 0), 4, 12), "heads of a multiple of 8 up to 160"),
        ((X, X, X), ((0, 0, 0), 0, 16), "0 heads of 16"),
    ],
)
def test_other_projections_are_refused(operands, options, text):
    with pytest.raises(ShapeError, match=f"head_partials: .*{text}"):
        execute.call(OPS["head_partials"], *operands, *options)


@pytest.mark.parametrize("tau", [0.0, -0.5, torch.nan, torch.inf])
def test_other_factors_of_scores_are_refused(tau):
    with pytest.raises(KernelError, match=r"head_factors_fp8: tau .* expected a positive number"):
        measure((X, X, X), (0, 0, 0), 3, 16, tau=tau)


@pytest.mark.parametrize(
    ("amax", "partials", "keys", "text"),
    [
        ((2, 3), (2, 2, 3, 3, 8), 9, "q_amax is"),
        ((2, 33, 1), (2, 2, 33, 3, 8), 9, "in 33 chunks of 8 columns"),
        ((2, 3, 21), (2, 2, 3, 3, 168), 9, "chunks of 168 columns"),
        ((2, 3, 1), (2, 2, 3, 3, 8), 0, "0 keys"),
        ((2, 3, 1), (2, 2, 4, 3, 8), 9, "partials has shape"),
    ],
)
def test_other_measures_are_refused(amax, partials, keys, text):
    with pytest.raises(ShapeError, match=f"head_factors_int8: .*{text}"):
        execute.call(OPS["head_factors_int8"], torch.ones(amax), torch.ones(partials), keys, 1.0)
