"""Shifts of inputs: chosen from statistics, packed, and taken back in the output."""

import pytest
import torch
from safetensors.torch import load_file

from quantkit.calibration.observers import static_scale
from quantkit.calibration.sampling import SAMPLE_ROWS
from quantkit.calibration.shifting import input_shift, shifted
from quantkit.calibration.statistics import LayerStatistics
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import verify
from quantkit.errors import ArtefactError, CheckpointError, RecipeError
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.histogram import count_bins
from quantkit.numerics.packing import to_rows
from quantkit.progress import silent
from quantkit.recipe.layer_recipes import ActivationRecipe
from quantkit.recipe.schema import Recipe
from tests.support.packing import calibration_of, component, run, small_tensors, with_samples

pytestmark = pytest.mark.usefixtures("any_model")


STATIC = {"mode": "static", "observer": "mse", "shift": True}


def statistics_of(values):
    """Statistics of (B, rows, C) inputs of a Linear, all of them stored as samples."""
    buckets, rows, channels = values.shape
    samples = torch.zeros(buckets, SAMPLE_ROWS, channels, dtype=torch.bfloat16)
    samples[:, :rows] = values.bfloat16()
    priority = torch.zeros(buckets, SAMPLE_ROWS, dtype=torch.float64)
    priority[:, :rows] = torch.linspace(1, 0.5, rows)
    return LayerStatistics(
        amax=values.abs().amax(dim=(1, 2)),
        histogram=torch.stack([count_bins(v) for v in values]).double(),
        second_moment=values.square().mean(dim=1),
        channel_amax=values.abs().amax(dim=1),
        count=torch.full((buckets,), rows),
        mean=values.mean(dim=1),
        samples=samples,
        sample_priority=priority,
        sample_count=torch.full((buckets,), rows),
    )


def offset_inputs():
    """Channels far from zero, the second bucket elsewhere than the first."""
    torch.manual_seed(0)
    values = 0.1 * torch.randn(2, 20, 8) + torch.linspace(-3, 3, 8)
    values[1] -= 1
    return values.bfloat16().float()


def test_the_shift_is_the_mean_per_bucket_or_of_all():
    values = offset_inputs()
    statistics = statistics_of(values)
    assert torch.allclose(input_shift(statistics, (5.0,), (5.0,)), values.mean(dim=1))
    assert torch.allclose(input_shift(statistics, (5.0,), ()), values.mean(dim=(0, 1)))


def test_statistics_of_shifted_inputs_are_those_of_the_rows():
    values = offset_inputs()
    shift, smooth = values.mean(dim=1), torch.linspace(0.5, 2, 8)
    found = shifted(statistics_of(values), shift, smooth)
    wanted = (values - shift.unsqueeze(1)) * smooth
    assert torch.equal(found.histogram, torch.stack([count_bins(v) for v in wanted]).double())
    # A bound: what was seen at one end may have stood at the other.
    assert bool((found.channel_amax >= wanted.abs().amax(dim=1) * (1 - 1e-6)).all())


@pytest.mark.parametrize("observer", ["mse", "kl", "percentile", "amax"])
def test_static_scales_fit_the_shifted_range(observer):
    values = offset_inputs()
    activation = ActivationRecipe(mode="static", observer=observer, buckets=2, shift=True)
    shift = values.mean(dim=1)
    scale = static_scale(statistics_of(values), activation, E4M3FN, edges=(5.0,), shift=shift)
    left = (values - shift.unsqueeze(1)).abs().amax(dim=(1, 2))
    assert bool((scale * E4M3FN.max >= left / 4).all())
    assert bool((scale * E4M3FN.max <= values.abs().amax(dim=(1, 2)) * 2).all())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"mode": "none"}, RecipeError, "mode none"),
        ({"observer": "moving_average"}, RecipeError, "moving_average"),
        ({"buckets": "auto"}, RecipeError, "auto: cannot be used with shift"),
    ],
)
def test_recipes_refuse_what_a_shift_cannot_have(change, error, match):
    with pytest.raises(error, match=match):
        Recipe.model_validate({"name": "t", "activation": STATIC | change})


@pytest.mark.parametrize("mode", ["static", "token"])
@pytest.mark.parametrize("buckets", [1, 2])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_packed_shifts_are_the_mean_and_what_the_dense_weight_makes_of_it(
    tmp_path, mode, buckets, sparse
):
    folder = component(tmp_path / "source", small_tensors())
    calibration = with_samples(calibration_of(folder), folder)
    recipe = {
        "activation": STATIC | {"mode": mode, "buckets": buckets},
        "sparsity": {} if sparse else None,
    }
    run(folder, tmp_path / "packed", recipe, calibration=calibration)
    verify(tmp_path / "packed", progress=silent)
    packed = open_packed(tmp_path / "packed").components[0]
    assert packed.config.format_version == 2
    dense = load_file(next(folder.glob("*.safetensors")))
    for layer, scheme in packed.config.layers.items():
        parts = packed.parts(layer)
        assert scheme.shift
        assert len(scheme.buckets) == buckets - 1
        mean = calibration.layers[""][layer].mean
        wanted = mean if buckets == 2 else (mean * torch.tensor([[0.25], [0.75]])).sum(0)
        assert torch.allclose(parts["input_shift"], wanted, atol=1e-6)
        rows = to_rows(dense[f"{layer}.weight"].float()).double()
        columns = wanted.double().repeat(*[1] * (wanted.ndim - 1), rows.shape[1] // mean.shape[1])
        assert torch.allclose(parts["output_shift"].double(), columns @ rows.T, atol=1e-5)


def test_a_shift_needs_statistics_that_hold_means(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    with pytest.raises(RecipeError, match="shift needs statistics"):
        run(folder, tmp_path / "packed", {"activation": STATIC})
    with pytest.raises(ArtefactError, match=r"no means \(format_version 2 or older\)"):
        run(folder, tmp_path / "packed", {"activation": STATIC}, calibration=calibration_of(folder))
    assert not (tmp_path / "packed").exists()


def test_version_one_has_no_shift(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    calibration = with_samples(calibration_of(folder), folder)
    run(folder, tmp_path / "packed", {"activation": STATIC}, calibration=calibration)
    config = tmp_path / "packed" / "config.json"
    config.write_text(config.read_text().replace('"format_version": 2', '"format_version": 1'))
    with pytest.raises(CheckpointError, match="format_version 1 with a shift"):
        open_packed(tmp_path / "packed")
