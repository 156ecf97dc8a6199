"""Norms in the order of the kernels: against float64, exact fractions, and sums as loops."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.nn import functional

from quantkit.numerics.norms import (
    CHUNKS,
    MAX_CHANNELS,
    SLAB_THREADS,
    chunk_pixels,
    fused,
    group_lanes,
    group_moments,
    layer_norm,
    partial_moments,
    row_lanes,
    scaled,
)

ONE = np.float32(1)
SMALLEST, LARGEST = 2.0**-149, float(np.finfo(np.float32).max)


def nearest(exact):
    """The float32 nearest to a fraction, the even one of two."""
    first = np.float32(float(exact))
    near = [
        first,
        np.nextafter(first, np.float32(-np.inf)),
        np.nextafter(first, np.float32(np.inf)),
    ]
    return min(near, key=lambda n: (abs(Fraction(float(n)) - exact), int(n.view(np.int32)) & 1))


#: a, b and c whose sum in float64 lies between two float32, and is not that
TIES = [
    (1.0 + 2.0**-12, 1.0 + 2.0**-12, sign * 2.0**-at) for sign in (1, -1) for at in (60, 80, 120)
] + [(1.0 + 2.0**-23, 1.0 + 2.0**-1, sign * 2.0**-100) for sign in (1, -1)]
#: and two whose sum in float64 is odd, a last place beside the tie, and nearer to it
TIES += [
    (2.0**-12 * (1 + m * 2.0**-23), 2.0**-12 * (1 - n * 2.0**-23), c)
    for m, n, c in ((500, 500, 1.0 + 2.0**-23), (2852, 2851, 1.0))
]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_fused_sum_is_rounded_once(sign):
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(3, 300)) * 2.0 ** rng.integers(-30, 30, (3, 300))
    # Sums that cancel, ties, and numbers that nothing is lost of.
    drawn[2, :100] = -drawn[0, :100] * drawn[1, :100]
    drawn[:, 100:200] = rng.integers(-3, 4, (3, 100))
    a, b, c = np.concatenate([drawn, np.array(TIES).T], axis=1).astype(np.float32)
    found = fused(*(torch.from_numpy(t) for t in (np.float32(sign) * a, b, np.float32(sign) * c)))
    wanted = [
        nearest(int(sign) * (Fraction(x) * Fraction(y) + Fraction(z)))
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert found.tolist() == [float(w) for w in wanted]


@pytest.mark.parametrize(
    ("a", "b", "c", "wanted"),
    [
        (torch.inf, 1.0, 2.0, torch.inf),
        (torch.inf, 1.0, -torch.inf, torch.nan),
        (torch.nan, 0.0, 0.0, torch.nan),
        (1.0, 1.0, -torch.inf, -torch.inf),
        (LARGEST, 2.0, -LARGEST, LARGEST),
        (LARGEST, LARGEST, 1.0, torch.inf),
        (SMALLEST, 0.5, SMALLEST, 2 * SMALLEST),
        (-1.0, 0.0, -0.0, -0.0),
    ],
)
def test_a_fused_sum_at_the_ends_of_the_format(a, b, c, wanted):
    found = fused(*(torch.tensor([value]) for value in (a, b, c)))
    wanted = torch.tensor([wanted])
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(found.signbit(), wanted.signbit()) or bool(found.isnan())


def test_factor_and_bias_are_rounded_once_and_nothing_is_added_to_zeros():
    y = torch.tensor([1.0 + 2.0**-12, -0.0])
    factor, bias = torch.tensor([1.0 + 2.0**-12, 1.0]), torch.tensor([2.0**-60, 0.0])
    assert scaled(y, None, None) is y
    assert torch.equal(scaled(y, None, bias), y + bias)
    assert torch.equal(scaled(y, factor, bias), fused(y, factor, bias))
    assert not torch.equal(scaled(y, factor, bias), y * factor + bias)
    alone = scaled(y, factor, None)
    assert torch.equal(alone, y * factor)
    assert not alone.signbit().any()


@pytest.mark.parametrize("groups", [1, 2, 15, 16, 17, 32, 33, 255, 256, 257, 511, 512, 4096])
def test_lanes_of_a_group_fill_the_block(groups):
    fitting = [lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes * groups <= SLAB_THREADS]
    assert group_lanes(groups) == max(fitting, default=1)


@pytest.mark.parametrize(
    "columns", [1, 384, 385, 768, 769, 1536, 1537, 3072, 3073, 6144, 6145, 9000]
)
def test_lanes_of_a_row_have_few_runs(columns):
    enough = [lanes for lanes in (16, 32, 64, 128, 256) if columns <= lanes * 8 * 3]
    assert row_lanes(columns) == min(enough, default=256)


@pytest.mark.parametrize("pixels", [1, 15, 16, 17, 2047, 2048, 2049, 4096, 4097, 65536])
def test_chunks_are_the_least_multiples_of_sixteen_pixels(pixels):
    assert chunk_pixels(pixels) == next(
        size for size in range(16, 2 * pixels + 16, 16) if size * CHUNKS >= pixels
    )


def tree(values):
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]


def over_row(runs, lanes):
    """The runs of a lane in order, the lanes of a wave as a tree, waves in order."""
    runs = np.concatenate([runs, np.zeros(-len(runs) % lanes, np.float32)]).reshape(-1, lanes)
    own = np.zeros(lanes, np.float32)
    for step in runs:
        own = own + step
    waves = [tree(wave) for wave in own.reshape(-1, min(lanes, 32))]
    total = waves[0]
    for wave in waves[1:]:
        total = total + wave
    return total


def by_hand(row, centred, eps):
    columns, lanes = np.float32(len(row)), row_lanes(len(row))

    def runs(values):
        return np.concatenate([values, np.zeros(-len(values) % 8, np.float32)]).reshape(-1, 8)

    mean = over_row(np.array([tree(run) for run in runs(row)]), lanes) / columns if centred else 0
    apart = row - np.float32(mean)
    squares = np.array([
        tree(np.array([
            nearest(Fraction(float(high)) ** 2 + Fraction(float(low * low)))
            for low, high in zip(run[:4], run[4:], strict=True)
        ]))
        for run in runs(apart)
    ])  # fmt: skip
    return apart * (ONE / np.sqrt(over_row(squares, lanes) / columns + np.float32(eps)))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("columns", [1, 8, 13, 200, 500, 1700])
def test_a_rows_sums_are_in_the_order_that_is_documented(columns, centred):
    x = np.random.default_rng(columns).normal(3.0, 1.0, columns).astype(np.float32)
    found = layer_norm(torch.from_numpy(x)[None], centred=centred, eps=1e-5)[0]
    assert found.tolist() == by_hand(x, centred, 1e-5).tolist()


@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("columns", [1, 7, 385, 3073, 7000])
def test_rows_are_normed_as_torch_norms_them(columns, mean):
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1)) + mean
    found = layer_norm(x, centred=True, eps=1e-5)
    wanted = functional.layer_norm(x.double(), (columns,), eps=1e-5)
    # A sum and a mean of float32, each rounded to 6e-8 of it.
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 + 3e-7 * mean)
    root = (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
    plain = layer_norm(x, centred=False, eps=1e-5)
    torch.testing.assert_close(plain.double(), x.double() / root, rtol=1e-6, atol=1e-6)


PICTURES = [
    (1, 1, 1, 1),
    (2, 5, 12, 3),
    (1, 300, 64, 32),
    (2, 77, 64, 1),
    (1, 2065, 48, 16),
    (1, 40, MAX_CHANNELS, 512),
    (1, 33, 600, 600),
]


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("size", PICTURES, ids=str)
def test_moments_of_pictures_are_those_of_float64(size, mean):
    batch, pixels, channels, groups = size
    x = torch.randn(size[:3], generator=torch.Generator().manual_seed(2)) + mean
    x = x * torch.arange(1, channels + 1).sqrt()
    partials = partial_moments(x, groups)
    wide = x.double().unflatten(2, (groups, -1))
    parts = wide.split(chunk_pixels(pixels), dim=1)
    assert partials.shape == (batch, groups, len(parts), 2)
    for chunk, part in enumerate(parts):
        own = part.mean((1, 3))
        squares = (part - own[:, None, :, None]).square().sum((1, 3))
        torch.testing.assert_close(partials[..., chunk, 0].double(), own, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(partials[..., chunk, 1].double(), squares, rtol=1e-3, atol=1e-4)
    found = group_moments(partials, pixels, channels, 1e-5).double()
    torch.testing.assert_close(found[..., 0], wide.mean((1, 3)), rtol=1e-6, atol=1e-5)
    root = (wide.var((1, 3), correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(found[..., 1], root, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
def test_inverse_roots_are_two_right_roundings(eps):
    """numpy's square root of float32 is the nearest, and so is its quotient."""
    variance = torch.rand(4000, generator=torch.Generator().manual_seed(3)) * 5 + 1e-3
    partials = torch.stack([torch.zeros(4000), variance], dim=-1).reshape(4000, 1, 1, 2)
    found = group_moments(partials, 1, 1, eps)[:, 0, 1].numpy()
    assert (found == ONE / np.sqrt(variance.numpy() + np.float32(eps))).all()
