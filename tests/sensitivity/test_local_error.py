"""Errors of single layers, against the packed layers that inference runs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from quantkit.calibration.moments.moments import Moments
from quantkit.errors import ArtefactError
from quantkit.models.layer_plan import dense_reason
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.least_error import choose_scale
from quantkit.numerics.masks import METHODS, TWO_OF_FOUR
from quantkit.numerics.scales import dequantize, quantize
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.recipe.layer_recipes import ActivationRecipe
from quantkit.recipe.load import load_recipe
from quantkit.sensitivity.local_error import StoredInputs, local_errors, read_weight
from quantkit.sensitivity.treated_layer import PrunedWeight, treat_input
from quantkit.sensitivity.treatments import BY_NAME, TREATMENTS, activation_recipe
from tests.support.observed import statistics_of
from tests.support.packed import packed_module
from tests.support.sensitivities import CPU, SHAPES, layer_in, settings_of


def stored_inputs(rows, buckets=1, channels=None):
    """Return rows (R, K) as stored inputs, split over buckets whose edges are 10, 20, ...

    A convolution's rows have their taps one after the other, ``channels`` each.
    """
    parts = rows.to(torch.bfloat16).chunk(buckets)
    stats = [statistics_of(part.float().reshape(-1, channels or rows.shape[1])) for part in parts]
    joined = replace(
        stats[0],
        **{
            name: torch.cat([getattr(s, name) for s in stats])
            for name in (
                "amax",
                "histogram",
                "second_moment",
                "channel_amax",
                "count",
                "moving_amax",
                "updates",
                "mean",
            )
        },
        samples=torch.stack(parts),
        sample_priority=torch.rand(buckets, len(parts[0])).sort(dim=1, descending=True).values,
        sample_count=torch.tensor([len(part) for part in parts]),
    )
    return StoredInputs(joined, tuple(10.0 * (i + 1) for i in range(buckets - 1)))


def random_rows(count, k, seed=4):
    rows = torch.randn(count, k, generator=torch.Generator().manual_seed(seed))
    rows[0] = 0
    return (rows * torch.linspace(0.1, 3, k)).to(torch.bfloat16).float()


def errors_of(*given):
    return {name: found.error for name, found in local_errors(*given).items()}


@pytest.mark.parametrize("name", ["e4m3fn-token", "e5m2-token", "2:4-magnitude-e4m3fn-token"])
def test_local_error_is_that_of_the_packed_layer(tmp_path, name):
    layer, treatment = layer_in(tmp_path, SHAPES["linear"]), BY_NAME[name]
    rows = random_rows(40, layer.k)
    found = errors_of(layer, settings_of(), stored_inputs(rows), CPU)[name]
    dense = nn.Linear(layer.k, layer.n, bias=False).requires_grad_(requires_grad=False)
    dense.weight.data = read_weight(layer, CPU)
    mask = TWO_OF_FOUR if treatment.method else None
    scheme = Scheme(treatment.format, PerChannel(), mask, Activation.TOKEN)
    wanted = dense(rows)
    lost = (packed_module(dense, scheme)(rows) - wanted).square().sum() / wanted.square().sum()
    assert found == pytest.approx(float(lost), rel=1e-4)


def test_static_scales_are_those_of_their_buckets(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    rows = random_rows(40, layer.k)
    # e5m2 has so few codes that a scale of the wrong bucket shows.
    rows[20:] *= 2.0**-18
    settings = load_recipe("fp8-buckets").settings("layer")
    settings = replace(settings, activation=settings.activation.model_copy(update={"buckets": 2}))
    apart = errors_of(layer, settings, stored_inputs(rows, 2), CPU)
    alone = errors_of(layer, settings, stored_inputs(rows[:20].repeat(2, 1), 2), CPU)
    assert apart["e4m3fn-static"] == pytest.approx(alone["e4m3fn-static"], rel=1e-3)
    pooled = replace(settings, activation=settings.activation.model_copy(update={"buckets": 1}))
    cast = treat_input(
        BY_NAME["e4m3fn-static"], pooled.activation, stored_inputs(rows, 2).statistics, (10.0,)
    )
    assert cast.at(-1.0) == cast.at(99.0)
    largest = ActivationRecipe(mode="static", observer="amax")
    statistics = stored_inputs(rows, 2).statistics
    cast = treat_input(BY_NAME["int8-static"], largest, statistics, (10.0,))
    assert float(cast.scale) == pytest.approx(1.15 * float(rows.abs().max()) / 127, rel=1e-3)


def test_wanda_counts_inputs_where_magnitude_does_not(tmp_path):
    layer = layer_in(tmp_path, SHAPES["conv"])
    channels = torch.cat((torch.ones(16), torch.full((16,), 0.05)))
    rows = random_rows(64, layer.k) * channels.repeat(9)
    errors = errors_of(layer, settings_of(), stored_inputs(rows, channels=32), CPU)
    assert errors["2:4-wanda-16-bit"] < errors["2:4-magnitude-16-bit"]


def test_errors_rank_as_their_formats_do(tmp_path):
    layer = layer_in(tmp_path, SHAPES["conv"])
    inputs = stored_inputs(random_rows(64, layer.k), channels=32)
    errors = errors_of(layer, settings_of(), inputs, CPU)
    assert list(errors) == [t.name for t in TREATMENTS if not t.updates]
    assert errors["16-bit"] == 0
    assert 0 < errors["e4m3fn-token"] < errors["e5m2-token"] < errors["2:4-magnitude-16-bit"] < 1
    assert errors["2:4-magnitude-16-bit"] < errors["2:4-magnitude-e4m3fn-token"]


def test_all_zero_output_has_no_error(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    errors = errors_of(layer, settings_of(), stored_inputs(torch.zeros(8, layer.k)), CPU)
    assert set(errors.values()) == {0.0}


def test_rows_stand_for_what_their_bucket_saw(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    inputs = stored_inputs(random_rows(40, layer.k), 2)
    counts = torch.tensor([20, 20_000_000])
    heavy = replace(inputs, statistics=replace(inputs.statistics, count=counts))
    only = StoredInputs(stored_inputs(random_rows(40, layer.k)[20:]).statistics, ())
    settings = settings_of()
    found = errors_of(layer, settings, heavy, CPU)["e4m3fn-token"]
    assert found == pytest.approx(errors_of(layer, settings, only, CPU)["e4m3fn-token"], 1e-4)


def test_layer_that_cannot_be_sparse_has_no_masks(tmp_path):
    layer = layer_in(tmp_path, (8, 48))
    assert dense_reason(layer, TWO_OF_FOUR)
    errors = errors_of(layer, settings_of(), stored_inputs(random_rows(8, 48)), CPU)
    assert not [name for name in errors if name.startswith("2:4")]


def test_calibration_of_other_inputs_is_refused(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    with pytest.raises(ArtefactError, match="stored inputs have 32 columns, expected 64"):
        local_errors(layer, settings_of(), stored_inputs(random_rows(8, 32)), CPU)


def test_a_treatment_per_token_leaves_what_static_scales_have():
    base = ActivationRecipe(mode="static", buckets=2, scale="pow2", token_below=50)
    token = activation_recipe(BY_NAME["int8-token"], base, 4)
    assert token == ActivationRecipe(mode="token", buckets=1)
    assert activation_recipe(BY_NAME["int8-static"], base, 4) == base


def test_table_names_are_distinct_and_methods_exist():
    assert len(BY_NAME) == len(TREATMENTS)
    assert {t.method for t in TREATMENTS if t.method} == set(METHODS)
    assert [t.name for t in TREATMENTS if not t.packs] == [
        f"2:4-{method}-16-bit" for method in METHODS
    ]


def moments_of(rows):
    return Moments(rows.T @ rows / len(rows), rows.mean(dim=0), len(rows))


def correlated_rows(count, k, seed):
    """Return rows of correlated columns; the seed draws rows, the correlation is one."""
    mixing = torch.randn(k // 4, k, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    noise = 0.1 * torch.randn(count, k, generator=g)
    rows = torch.randn(count, k // 4, generator=g) @ mixing + noise
    return rows.to(torch.bfloat16).float()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sparsegpt_beats_wanda_on_rows_that_its_moments_never_saw(tmp_path, shape):
    layer = layer_in(tmp_path, shape)
    moments = moments_of(correlated_rows(4000, layer.k, 1))
    inputs = stored_inputs(correlated_rows(64, layer.k, 2), channels=shape[1])
    found = errors_of(layer, settings_of(), inputs, CPU, moments)
    assert list(found) == [t.name for t in TREATMENTS]
    for end in ("16-bit", "e4m3fn-token"):
        assert found[f"2:4-sparsegpt-{end}"] < 0.7 * found[f"2:4-wanda-{end}"]
    assert found["2:4-sparsegpt-16-bit"] < found["2:4-sparsegpt-e4m3fn-token"]


def test_a_weight_after_surgery_has_its_mask_and_lands_on_the_grid(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    moments = moments_of(correlated_rows(400, layer.k, 1))
    operated = PrunedWeight.of(read_weight(layer, CPU), moments, bias=True)
    assert bool((operated.mask.reshape(layer.n, -1, 4).sum(2) == 2).all())
    treatment, settings = BY_NAME["2:4-sparsegpt-e4m3fn-token"], settings_of()
    packed = operated.packed(treatment, settings)
    assert not packed[~operated.mask].any()
    fmt, channel = treatment.format, PerChannel()
    scale = choose_scale(operated.rows, fmt, channel, settings.weight.observer)
    assert torch.equal(dequantize(quantize(packed, scale, fmt, channel), scale, channel), packed)
