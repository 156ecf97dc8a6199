"""Observers: the scales they choose from statistics, and buckets that share one."""

import ml_dtypes
import numpy as np
import pytest
import scipy.signal
import scipy.stats
import torch

from quantkit.calibration.statistics.observers import (
    OBSERVERS,
    agreeing_edges,
    clip_grid,
    static_scale,
)
from quantkit.errors import RecipeError
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.histogram import bin_edges
from quantkit.numerics.scales import cast
from quantkit.recipe.layer_recipes import ActivationRecipe
from tests.support.observed import SAMPLES, sample, statistics_of


def quantization_error(x, clip, fmt):
    scale = clip / fmt.max
    return float((cast(x / scale, fmt).float() * scale - x).double().square().mean())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", SAMPLES)
def test_mse_clip_is_as_good_as_a_search_of_the_values(name, fmt):
    x = sample(name)
    clip = float(OBSERVERS["mse"](statistics_of(x), fmt, 0.0))
    amax = float(x.abs().amax())
    best = min(quantization_error(x, amax * i / 200, fmt) for i in range(20, 201))
    # A heavy tail's error is that of its few largest values, finer than a bin tells.
    assert quantization_error(x, clip, fmt) <= (1.3 if name == "heavy" else 1.05) * best


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("observer", OBSERVERS)
def test_scales_are_positive_and_reach_no_further_than_amax(observer, fmt):
    statistics = statistics_of(*map(sample, SAMPLES), torch.zeros(3, 8))
    edges = tuple(map(float, range(len(SAMPLES))))
    recipe = ActivationRecipe(mode="static", observer=observer, buckets=edges)
    scale = static_scale(statistics, recipe, fmt, edges=edges)
    assert (scale.dtype, scale.shape) == (torch.float32, (len(SAMPLES) + 1,))
    assert bool((scale > 0).all())
    assert bool((scale[:-1] <= statistics.amax[:-1] / fmt.max * (1 + 1e-6)).all())
    # Nothing was seen but zeros: nothing to scale.
    assert scale[-1] == 1.0


def test_one_bucket_has_a_scale_without_axes():
    x = sample("gaussian")
    recipe = ActivationRecipe(mode="static", observer="amax")
    scale = static_scale(statistics_of(x, 2 * x), recipe, FORMATS["e4m3fn"], edges=(5.0,))
    assert scale.shape == ()
    assert float(scale) == pytest.approx(2 * float(x.abs().amax()) / 448)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_scales_that_are_powers_of_two_are_rounded_up(observer):
    statistics, fmt = statistics_of(*map(sample, SAMPLES)), FORMATS["e4m3fn"]
    edges = tuple(map(float, range(len(SAMPLES) - 1)))
    recipe = ActivationRecipe(mode="static", observer=observer, buckets=edges)
    plain = static_scale(statistics, recipe, fmt, edges=edges)
    rounded = recipe.model_copy(update={"scale": "pow2"})
    scale = static_scale(statistics, rounded, fmt, edges=edges)
    assert (torch.frexp(scale)[0] == 0.5).all()
    assert ((scale >= plain) & (scale < 2 * plain)).all()


def oracle_dtype(fmt):
    return getattr(ml_dtypes, f"float8_{fmt.name}")


def divergence(x, clip, fmt):
    """Return the divergence that the docs describe, from bins cut in four, by scipy."""
    edges = np.append(bin_edges().numpy()[1:-1], 2.0**18)
    counts = np.histogram(x.abs().double(), edges)[0]
    seen, amax = counts > 0, float(x.abs().amax())
    low, high = edges[:-1][seen], edges[1:][seen]
    place = (np.arange(4) + 0.5) / 4
    values = low[:, None] + (np.minimum(high, amax) - low)[:, None] * place
    scaled = (values / (clip / fmt.max)).ravel()
    observed, width = np.repeat(counts[seen] / 4, 4), np.repeat((high - low) / 4, 4)
    kept = values.ravel() <= clip
    lost, observed, width = observed[~kept].sum(), observed[kept], width[kept]
    codes = scaled[kept].astype(np.float32)
    codes = np.rint(codes) if fmt.is_integer else codes.astype(oracle_dtype(fmt))
    if lost and not (codes == fmt.max).any():
        # Nothing below the clip has the largest code: a place for what lies beyond.
        codes, observed, width = (
            np.append(a, b) for a, b in ((codes, fmt.max), (observed, 0), (width, 1))
        )
    spread = np.zeros(len(observed))
    for code in np.unique(codes):
        of_code = codes == code
        even, clipped = width[of_code] / width[of_code].sum(), lost * float(code == fmt.max)
        spread[of_code] = (observed[of_code].sum() + min(clipped, 1)) * even
        observed[of_code] += clipped * even
    return scipy.stats.entropy(observed, spread)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", SAMPLES)
def test_kl_clip_is_that_of_least_entropy(name, fmt):
    x = sample(name)
    clip, amax = float(OBSERVERS["kl"](statistics_of(x), fmt, 0.0)), float(x.abs().amax())
    table = {amax * fraction: divergence(x, amax * fraction, fmt) for fraction in clip_grid(fmt)}
    best = min(table.values())
    assert np.isfinite(list(table.values())).all()
    assert max(table.values()) > best + 1e-6
    assert table[min(table, key=lambda c: abs(c - clip))] <= best + 1e-7


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_kl_gives_up_a_lone_outlier_but_not_a_filled_range(fmt):
    lone = float(OBSERVERS["kl"](statistics_of(sample("outlier")), fmt, 0.0))
    assert lone < 0.7 * 300
    # As many values near the top as anywhere: a clip would cut many off.
    flat = torch.rand(4000, 8, generator=torch.Generator().manual_seed(0))
    assert float(OBSERVERS["kl"](statistics_of(flat), fmt, 0.0)) == float(flat.amax())


@pytest.mark.parametrize("power", [-6, 5])
def test_kl_clip_moves_with_its_input(power):
    fmt, x = FORMATS["e4m3fn"], sample("gaussian")
    # None of them falls below the first bin, where nothing counts.
    x = x[x.abs().amin(dim=1) > 2.0**-10]
    clip = OBSERVERS["kl"](statistics_of(x), fmt, 0.0)
    moved = OBSERVERS["kl"](statistics_of(x * 2.0**power), fmt, 0.0)
    assert float(moved) == float(clip) * 2.0**power


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("value", [0.0, 1e-9, 1.0, 1.03, 2.0**17, 1e9])
def test_kl_leaves_one_value_alone(value, fmt):
    assert float(OBSERVERS["kl"](statistics_of(torch.full((5, 2), value)), fmt, 0.0)) == (
        pytest.approx(value)
    )


def test_percentile_clips_the_outlier():
    statistics = statistics_of(sample("outlier"))
    recipe = ActivationRecipe(mode="static", observer="percentile", percentile=99.9)
    scale = static_scale(statistics, recipe, FORMATS["e4m3fn"])
    assert float(scale) * 448 < 5


def test_smoothed_input_has_the_scale_of_its_channels():
    x, factor = sample("gaussian"), torch.linspace(0.1, 2, 8)
    recipe = ActivationRecipe(mode="static", observer="amax")
    scale = static_scale(statistics_of(x), recipe, FORMATS["e5m2"], factor)
    assert float(scale) == pytest.approx(float((x * factor).abs().amax()) / 57344, rel=1e-6)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_headroom_widens_the_scale_of_amax_alone(observer):
    statistics = statistics_of(sample("gaussian"))
    recipe = ActivationRecipe(mode="static", observer=observer)
    plain = static_scale(statistics, recipe, FORMATS["int8"])
    wide = static_scale(statistics, recipe, FORMATS["int8"], headroom=1.25)
    assert float(wide) == pytest.approx(float(plain) * (1.25 if observer == "amax" else 1.0))


def test_a_scale_with_headroom_is_a_power_of_two_where_asked():
    recipe = ActivationRecipe(mode="static", observer="amax", scale="pow2")
    statistics = statistics_of(torch.full((3, 8), 127 / 64))
    scales = [static_scale(statistics, recipe, FORMATS["int8"], headroom=h) for h in (1.0, 1.15)]
    assert [float(scale) for scale in scales] == [1 / 64, 1 / 32]


def test_buckets_that_are_not_there_are_refused():
    recipe = ActivationRecipe(mode="static", buckets=2)
    with pytest.raises(RecipeError, match="has 1 buckets, which cannot be merged into 2"):
        static_scale(statistics_of(sample("gaussian")), recipe, FORMATS["e4m3fn"])


# Automatic buckets


@pytest.mark.parametrize(
    ("loud", "wanted"),
    [
        ((1.0, 1.0, 1.0, 1.0), ()),
        ((1.0, 1.1, 1.18, 1.05), ()),
        # Each is close to its neighbour, the ends are not.
        ((1.0, 1.15, 1.3, 1.5), (20.0,)),
        ((1.0, 2.0, 4.0, 8.0), (10.0, 20.0, 30.0)),
        ((4.0, 1.0, 1.1, 4.0), (10.0, 30.0)),
        ((0.0, 1.0, 0.0, 1.0), ()),
        ((1.0, 0.0, 3.0, 0.0), (20.0,)),
        ((0.0, 0.0, 0.0, 0.0), ()),
    ],
    ids=str,
)
def test_neighbours_that_agree_share_a_bucket(loud, wanted):
    edges, fmt = (10.0, 20.0, 30.0), FORMATS["e4m3fn"]
    statistics = statistics_of(*(torch.full((3, 8), amax) for amax in loud))
    recipe = ActivationRecipe(mode="static", observer="amax", buckets="auto")
    assert agreeing_edges(statistics, recipe, fmt, edges) == wanted


@pytest.mark.parametrize(("second", "wanted"), [(8.75, ()), (8.8, (10.0,))])
def test_scales_at_the_tolerance_agree(monkeypatch, second, wanted):
    """The scales of 7 and 8.75 are 1 / 64 and 1.25 / 64, without rounding."""
    monkeypatch.setattr("quantkit.calibration.statistics.observers.AUTO_TOLERANCE", 1.25)
    statistics = statistics_of(torch.full((3, 8), 7.0), torch.full((3, 8), second))
    recipe = ActivationRecipe(mode="static", observer="amax", buckets="auto")
    assert agreeing_edges(statistics, recipe, FORMATS["e4m3fn"], (10.0,)) == wanted


@pytest.mark.parametrize("observer", OBSERVERS)
def test_one_distribution_needs_one_bucket_and_another_scale_its_own(observer):
    same = [torch.randn(4000, 8, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    # The largest of 32,000 values moves from draw to draw; its clip is not what is tested here.
    same = [x.clamp(-3.5, 3.5) for x in same]
    edges, fmt = (1.0, 2.0, 3.0, 4.0), FORMATS["e4m3fn"]
    recipe = ActivationRecipe(mode="static", observer=observer, buckets="auto")
    assert agreeing_edges(statistics_of(*same), recipe, fmt, edges) == ()
    louder = statistics_of(*same[:2], *(3 * x for x in same[2:]))
    assert agreeing_edges(louder, recipe, fmt, edges) == (2.0,)


def test_one_stored_bucket_stays_one():
    recipe = ActivationRecipe(mode="static", buckets="auto")
    assert agreeing_edges(statistics_of(sample("relu")), recipe, FORMATS["e5m2"], ()) == ()
