"""Norms in the order of the kernels: against float64 and exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from quantkit.numerics.norms import (
    CHUNKS,
    MAX_CHANNELS,
    SLAB_THREADS,
    chunk_pixels,
    fused,
    group_lanes,
    group_moments,
    partial_moments,
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


@pytest.mark.parametrize("pixels", [1, 15, 16, 17, 2047, 2048, 2049, 4096, 4097, 65536])
def test_chunks_are_the_least_multiples_of_sixteen_pixels(pixels):
    assert chunk_pixels(pixels) == next(
        size for size in range(16, 2 * pixels + 16, 16) if size * CHUNKS >= pixels
    )


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
