"""Histograms, hooks on running pipelines, the statistics file, observers and smoothing."""

import functools
import hashlib
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import scipy.signal
import scipy.stats
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit.calibration.collect import calibrate, observed_layers
from quantkit.calibration.histogram import (
    BINS,
    bin_edges,
    bin_index,
    count_bins,
    count_without_waiting,
)
from quantkit.calibration.hooks import Collector, split_schedule
from quantkit.calibration.merge import merge, merge_layer
from quantkit.calibration.moving_average import RATE, continued
from quantkit.calibration.observers import CLIP_GRID, OBSERVERS, agreeing_edges, static_scale
from quantkit.calibration.sampling import (
    SAMPLE_ROWS,
    draw_candidates,
    row_count,
    rows_of_input,
)
from quantkit.calibration.smoothing import smooth_factor
from quantkit.calibration.statistics import (
    LayerStatistics,
    load_calibration,
    per_column,
    save_calibration,
)
from quantkit.cli.calibrate import calibrate as calibrate_command
from quantkit.errors import (
    ArtefactError,
    ModelError,
    NonFiniteError,
    OutputError,
    PromptError,
    RecipeError,
    ShapeError,
)
from quantkit.models.layers import Layer
from quantkit.models.source import open_model
from quantkit.models.timestep import bucket_of
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.packing import to_rows
from quantkit.numerics.scales import cast
from quantkit.pipelines.running import (
    choose_device,
    choose_dtype,
    load_pipeline,
    quiet_libraries,
    read_prompts,
    run_batch,
    split_batches,
)
from quantkit.progress import silent
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import ActivationRecipe
from quantkit.storage.artefact import read_artefact, write_artefact
from quantkit.storage.tensorfile import TensorInfo

PROMPTS = ("a red circle", "two blue squares", "a tree")
RECIPE = load_recipe("fp8").with_calibration(
    {"prompts": 3, "steps": 4, "buckets": 2, "batch": 2, "seed": 7}
)


def statistics_of(*buckets):
    """Return the statistics of raw inputs (rows, C), one tensor per bucket."""
    return LayerStatistics(
        amax=torch.stack([x.abs().amax() for x in buckets]),
        histogram=torch.stack([count_bins(x) for x in buckets]),
        second_moment=torch.stack([x.double().square().mean(0).float() for x in buckets]),
        channel_amax=torch.stack([x.abs().amax(0) for x in buckets]),
        count=torch.tensor([len(x) for x in buckets]),
        moving_amax=torch.stack([x.abs().amax() for x in buckets]).double(),
        updates=torch.ones(len(buckets), dtype=torch.int64),
        **samples_of(buckets),
    )


def samples_of(buckets):
    """Return mean and samples, priorities drawn anew for every call."""
    rows = torch.zeros(len(buckets), SAMPLE_ROWS, buckets[0].shape[1], dtype=torch.bfloat16)
    priority = torch.zeros(len(buckets), SAMPLE_ROWS, dtype=torch.float64)
    for b, x in enumerate(buckets):
        top, order = torch.rand(len(x), dtype=torch.float64).sort(descending=True)
        count = min(len(x), SAMPLE_ROWS)
        rows[b, :count], priority[b, :count] = x[order[:count]].bfloat16(), top[:count]
    return {
        "mean": torch.stack([x.double().mean(0).float() for x in buckets]),
        "samples": rows,
        "sample_priority": priority,
        "sample_count": (priority > 0).sum(dim=1),
    }


def sample(name, rows=4000, channels=8):
    generator = torch.Generator().manual_seed(len(name))
    x = torch.randn(rows, channels, generator=generator)
    match name:
        case "gaussian":
            return x
        case "heavy":
            return x / torch.rand(rows, channels, generator=generator).clamp(min=1e-3)
        case "relu":
            return x.relu()
        case "tiny":
            return x * 1e-6
        case "outlier":
            x[17, 3] = -300.0
            return x
    raise AssertionError(name)


#: Fields that files of an older version do not have.
OLDER = {
    2: ("mean", "samples", "sample_priority", "sample_count"),
    1: ("mean", "samples", "sample_priority", "sample_count", "moving_amax", "updates"),
}
FIELDS = tuple(field.name for field in fields(LayerStatistics))
SAMPLES = ("gaussian", "heavy", "relu", "tiny", "outlier")


# Histograms


def test_bins_agree_with_a_search_of_the_edges():
    edges = bin_edges()
    assert len(edges) == BINS + 1
    inner = edges[1:-1].float()
    values = torch.cat(
        (
            inner,
            torch.nextafter(inner, torch.tensor(0.0)),
            -inner,
            torch.tensor([0.0, -0.0, 1e-45, 65504.0, -1e30, torch.finfo(torch.float32).max]),
            torch.randn(5000) * 10,
        )
    )
    wanted = np.searchsorted(edges.numpy(), values.abs().double().numpy(), side="right") - 1
    assert bin_index(values).tolist() == wanted.tolist()


def test_bins_cover_float16_and_are_no_wider_than_a_sixteenth():
    edges = bin_edges()
    assert (edges[1], edges[-2]) == (2.0**-24, 2.0**17)
    assert float((edges[2:-1] / edges[1:-2]).max()) <= 1 + 1 / 16


def test_every_value_is_counted_once():
    x = torch.randn(33, 7)
    counts = count_bins(x)
    assert counts.sum() == x.numel()
    assert counts.tolist() == np.histogram(x.abs().double(), bin_edges().numpy())[0].tolist()
    assert count_bins(torch.empty(0)).sum() == 0


def test_both_ways_to_count_agree():
    index = torch.cat((torch.arange(BINS), torch.arange(0, BINS, 7))).int()
    assert count_without_waiting(index).tolist() == torch.bincount(index, minlength=BINS).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_gpu_counts_as_the_cpu_does():
    x = torch.randn(1 << 20) * 3
    assert torch.equal(count_bins(x.cuda()).cpu(), count_bins(x))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("percent", [0.1, 50.0, 99.0, 99.99, 100.0])
def test_percentile_is_torchs_within_a_bin(name, percent):
    x = sample(name)
    found = float(statistics_of(x).percentile(percent))
    low, high = (
        float(torch.quantile(x.abs().double(), percent / 100, interpolation=side))
        for side in ("lower", "higher")
    )
    assert low / (1 + 1 / 16) - 2.0**-24 <= found <= high * (1 + 1 / 16) + 2.0**-24
    if percent == 100:
        assert found == float(x.abs().amax())


def test_percentile_of_zeros_and_of_overflow():
    assert float(statistics_of(torch.zeros(5, 2)).percentile(99)) == 0.0
    assert float(statistics_of(torch.full((5, 2), 1e9)).percentile(100)) == 1e9


# Statistics


def test_pooling_is_exact():
    first, second, third = sample("gaussian"), sample("heavy", rows=1000), sample("relu", rows=10)
    buckets = statistics_of(first, second, third)
    pooled, wanted = buckets.pooled(), statistics_of(torch.cat((first, second, third)))
    assert torch.equal(pooled.amax, wanted.amax)
    assert torch.equal(pooled.histogram, wanted.histogram)
    assert torch.equal(pooled.channel_amax, wanted.channel_amax)
    assert torch.equal(pooled.count, wanted.count)
    torch.testing.assert_close(pooled.second_moment, wanted.second_moment, rtol=1e-6, atol=0)
    torch.testing.assert_close(pooled.mean, wanted.mean, rtol=1e-5, atol=1e-7)
    halves = buckets.rebucketed((10.0, 20.0), (20.0,))
    assert halves.amax.tolist() == [float(torch.cat((first, second)).abs().amax()), third.amax()]
    assert torch.equal(buckets.rebucketed((10.0, 20.0), (10.0, 20.0)).histogram, buckets.histogram)


def test_bucket_without_values_does_not_weigh():
    x = sample("gaussian")
    full, empty = statistics_of(x), torch.zeros(1)
    both = LayerStatistics(
        amax=torch.cat((empty, full.amax)),
        histogram=torch.cat((torch.zeros(1, BINS), full.histogram)),
        second_moment=torch.cat((torch.zeros(1, 8), full.second_moment)),
        channel_amax=torch.cat((torch.zeros(1, 8), full.channel_amax)),
        count=torch.tensor([0, len(x)]),
    )
    assert torch.equal(both.pooled().second_moment, full.second_moment)
    assert both.pooled().samples is None


def test_pooled_sample_is_that_of_the_largest_priorities():
    buckets = statistics_of(sample("gaussian"), sample("relu", rows=5), sample("tiny"))
    pooled = buckets.regrouped([0, 0, 1])
    priority = buckets.sample_priority[:2].flatten()
    order = priority.argsort(descending=True)[:SAMPLE_ROWS]
    assert pooled.sample_priority[0].tolist() == priority[order].tolist()
    assert torch.equal(pooled.samples[0], buckets.samples[:2].flatten(0, 1)[order])
    assert torch.equal(pooled.samples[1], buckets.samples[2])
    assert pooled.sample_count.tolist() == [SAMPLE_ROWS, SAMPLE_ROWS]
    few = statistics_of(sample("gaussian", rows=3), sample("relu", rows=5)).pooled()
    assert few.sample_count.tolist() == [8]
    assert bool((few.sample_priority[0, 8:] == 0).all())
    assert not few.samples[0, 8:].any()


def test_columns_are_in_the_order_the_kernels_read():
    values = torch.arange(5.0)
    weight = values.reshape(1, 5, 1, 1).expand(2, 5, 3, 2)
    assert torch.equal(per_column(values, 6), to_rows(weight)[0])
    assert per_column(torch.ones(4, 5), 9).shape == (4, 45)
    assert torch.equal(per_column(values, 1), values)


# Samples


def test_candidates_are_the_largest_of_so_many_uniform_numbers():
    # As many as are kept of 50 rows, and of fewer: the k-th largest has a Beta distribution.
    for rows in (50, 9):
        drawn = [draw_candidates(range(seed, seed + 1), 0, 1, rows) for seed in range(400)]
        assert all((np.diff(d.priority) < 0).all() and len({*d.row.tolist()}) for d in drawn)
        count = min(rows, SAMPLE_ROWS)
        assert {len(d.row) for d in drawn} == {count}
        for k in (1, count // 2, count):
            kth = [d.priority[k - 1] for d in drawn]
            assert scipy.stats.kstest(kth, scipy.stats.beta(rows - k + 1, k).cdf).pvalue > 1e-3
        where = np.bincount([d.row[0] for d in drawn], minlength=rows)
        assert scipy.stats.chisquare(where).pvalue > 1e-3


def test_candidates_of_a_batch_are_those_of_its_images():
    whole = draw_candidates(range(5, 8), 2, 6, 40)
    alone = [draw_candidates(range(5 + i, 6 + i), 2, 2, 40) for i in range(3)]
    table = sorted(
        (-priority, part * 3 + i, row)
        for i, drawn in enumerate(alone)
        for priority, part, row in zip(drawn.priority, drawn.image, drawn.row, strict=True)
    )
    found = zip(-whole.priority, whole.image, whole.row, strict=True)
    assert [*found] == table[:SAMPLE_ROWS]
    # Another call, and another prompt, draw others.
    assert draw_candidates(range(5, 8), 3, 6, 40).priority[0] != whole.priority[0]
    assert alone[0].priority[0] != alone[1].priority[0]


@pytest.mark.parametrize(("seeds", "images"), [(range(3), 4), (range(1), 9), (range(2), 1)])
def test_input_that_is_no_batch_is_drawn_as_one_image(seeds, images):
    drawn, whole = draw_candidates(seeds, 0, images, 7), draw_candidates(range(1), 0, 1, images * 7)
    assert (drawn.image * 7 + drawn.row).tolist() == whole.row.tolist()
    assert drawn.image.max() < images


CONVOLUTIONS = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "downsampler": {"kernel_size": 3, "stride": 2},
    "uneven": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)},
    "same": {"kernel_size": 4, "padding": "same"},
    "1x1": {"kernel_size": 1},
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_rows_of_a_convolution_times_its_weight_are_its_output(options):
    torch.manual_seed(0)
    conv, x = torch.nn.Conv2d(4, 6, bias=False, **options), torch.randn(3, 4, 7, 9)
    wanted = conv(x).movedim(1, -1).reshape(3, -1, 6)
    count = row_count(x, conv)
    assert count == wanted.shape[1]
    image, row = np.divmod(np.arange(3 * count), count)
    rows = rows_of_input(x, conv, image, row)
    found = rows @ to_rows(conv.weight).T
    torch.testing.assert_close(found.reshape(3, -1, 6), wanted, rtol=1e-4, atol=1e-5)


def test_rows_of_a_linear_layer_are_its_tokens():
    linear, x = torch.nn.Linear(5, 2), torch.randn(2, 3, 4, 5)
    assert row_count(x, linear) == 12
    found = rows_of_input(x, linear, np.array([1, 0]), np.array([7, 11]))
    assert torch.equal(found, torch.stack((x[1, 1, 3], x[0, 2, 3])))
    assert row_count(torch.randn(4, 5), linear) == 1


def test_sample_holds_the_rows_of_the_largest_priorities():
    inputs = [(torch.randn(2, 4, 5, 6), float(t)) for t in (9, 7, 5, 3, 1)]
    found = observe(inputs).statistics()["early"]
    conv = torch.nn.Conv2d(4, 8, 3, padding=1)
    image, row = np.divmod(np.arange(60), 30)
    table = []
    for call, (x, _) in enumerate(inputs[3:], 3):
        rows = rows_of_input(x, conv, image, row)
        drawn = draw_candidates(range(1), call, 2, 30)
        for priority, i, r in zip(drawn.priority, drawn.image, drawn.row, strict=True):
            table.append((priority, rows[i * 30 + r]))
    table.sort(key=lambda entry: -entry[0])
    assert found.sample_priority[0].tolist() == [p for p, _ in table[:SAMPLE_ROWS]]
    assert torch.equal(found.samples[0], torch.stack([x for _, x in table[:32]]).bfloat16())
    assert found.sample_count.tolist() == [SAMPLE_ROWS] * 2


def test_few_rows_are_all_kept():
    inputs = [(torch.randn(1, 4, 2, 2), float(t)) for t in (4, 3)]
    found = observe(inputs).statistics()["early"]
    assert found.sample_count.tolist() == [4, 4]
    windows = torch.nn.functional.unfold(inputs[1][0], 3, padding=1)[0].T.bfloat16()
    wanted = windows.reshape(4, 4, 9).movedim(1, 2).reshape(4, 36)
    assert {*map(tuple, found.samples[0, :4].tolist())} == {*map(tuple, wanted.tolist())}
    assert not found.samples[0, 4:].any()


# Hooks


class Denoiser(torch.nn.Module):
    """Two layers and a timestep, as small as a denoiser can be."""

    def __init__(self):
        super().__init__()
        self.late = torch.nn.Linear(8, 8)
        self.early = torch.nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, sample, timestep):
        return self.late(self.early(sample).movedim(1, -1))


class Scheduler:
    def __init__(self, *timesteps):
        self.timesteps = torch.tensor(timesteps)


def layer_of(name, kind, shape):
    return Layer(name, kind, TensorInfo(f"{name}.weight", "F16", shape, 0, 0), Path("none"), True)


LAYERS = (layer_of("late", "linear", (8, 8)), layer_of("early", "conv2d", (8, 4, 3, 3)))


def observe(inputs, buckets=2):
    """Run a denoiser over (sample, timestep) pairs and return the collector."""
    torch.manual_seed(0)
    denoiser = Denoiser()
    collector = Collector("unet", denoiser, LAYERS, buckets)
    scheduler = Scheduler(*(t for _, t in inputs))
    with torch.no_grad(), collector.attached(scheduler, lambda calls: None):
        for x, t in inputs:
            denoiser(x, torch.tensor([t, t]))
    return collector


def test_statistics_are_those_of_the_inputs():
    inputs = [(torch.randn(2, 4, 5, 6) * (i + 1), float(t)) for i, t in enumerate((9, 7, 5, 3))]
    collector = observe(inputs)
    assert collector.edges == (6.0,)
    assert collector.calls == [2, 2]
    found = collector.statistics()["early"]
    rows = [x.movedim(1, -1).reshape(-1, 4) for x, _ in inputs]
    wanted = statistics_of(torch.cat(rows[2:]), torch.cat(rows[:2]))
    for field in ("amax", "histogram", "channel_amax", "count"):
        assert torch.equal(getattr(found, field), getattr(wanted, field)), field
    torch.testing.assert_close(found.second_moment, wanted.second_moment, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-5, atol=1e-6)


def test_memory_does_not_grow_with_calls():
    def size(collector):
        sums = collector._sums.values()
        return sum(t.numel() for s in sums for t in vars(s).values() if torch.is_tensor(t))

    few = observe([(torch.randn(1, 4, 2, 2), float(t)) for t in (4, 3)])
    many = observe([(torch.randn(8, 4, 9, 9), float(t)) for t in range(50, 0, -1)])
    # Per bucket the channels' amax, sum and squares, a histogram and an average; per layer a flag.
    assert size(few) == size(many) == 2 * (3 * 4 + BINS + 1 + 3 * 8 + BINS + 1) + 2
    for collector in (few, many):
        shapes = {name: tuple(s.sample.rows.shape) for name, s in collector._sums.items()}
        assert shapes == {"early": (2, SAMPLE_ROWS, 36), "late": (2, SAMPLE_ROWS, 8)}


@pytest.mark.parametrize("step", [1, 3], ids=["first", "last"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_value_that_is_not_finite_names_layer_and_step(step, value):
    inputs = [(torch.randn(1, 4, 3, 3), float(t)) for t in (30, 20, 10)]
    inputs[step - 1][0][0, 2, 1, 1] = value
    with pytest.raises(NonFiniteError, match=rf"unet\.early: NaN or Inf .* at step {step} ") as e:
        observe(inputs)
    assert f"(timestep {40 - 10 * step})" in str(e.value)


def test_value_that_comes_up_inside_names_the_layer_that_reads_it():
    torch.manual_seed(0)
    denoiser = Denoiser()
    denoiser.early.bias.data[3] = torch.nan
    collector = Collector("unet", denoiser, LAYERS, 1)
    with (
        torch.no_grad(),
        pytest.raises(NonFiniteError, match=r"unet\.late: NaN"),
        collector.attached(Scheduler(5.0), lambda calls: None),
    ):
        denoiser(torch.randn(1, 4, 3, 3), 5.0)
    assert not denoiser._forward_pre_hooks


def test_hooks_are_gone_when_the_work_fails():
    denoiser = Denoiser()
    collector = Collector("unet", denoiser, LAYERS, 1)
    with pytest.raises(KeyError), collector.attached(Scheduler(5.0), lambda calls: None):
        raise KeyError
    assert not any(module._forward_pre_hooks for module in denoiser.modules())


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (layer_of("none", "linear", (8, 8)), "diffusers builds no module none"),
        (layer_of("late", "conv2d", (8, 8, 1, 1)), "late: found Linear, wanted Conv2d"),
        (layer_of("late", "linear", (8, 9)), r"late: found Linear, .* \(8, 9\)"),
    ],
    ids=["missing", "kind", "shape"],
)
def test_module_that_is_not_as_the_file_says_is_refused(layer, message):
    with pytest.raises(ModelError, match=message):
        Collector("unet", Denoiser(), [layer], 1)


@pytest.mark.parametrize("unit", [1.0, 1e-3], ids=["SD", "Flux"])
@pytest.mark.parametrize(("steps", "buckets"), [(4, 1), (4, 4), (20, 4), (28, 3), (7, 4)])
def test_schedule_is_split_evenly_in_the_denoisers_unit(steps, buckets, unit):
    timesteps = torch.linspace(999, 31, steps).tolist()
    edges = split_schedule(Scheduler(*timesteps), timesteps[0] * unit, buckets)
    counts = np.bincount([bucket_of(t * unit, edges) for t in timesteps], minlength=buckets)
    assert len(edges) == buckets - 1
    assert counts.max() - counts.min() <= 1


def test_repeated_timesteps_count_once():
    # The second-order and pseudo-numerical schedulers visit timesteps twice.
    assert split_schedule(Scheduler(9.0, 7.0, 7.0, 5.0, 5.0, 3.0), 9.0, 2) == (6.0,)


def test_schedule_that_cannot_be_split_is_refused():
    with pytest.raises(RecipeError, match="buckets 3: the schedule has 2 steps"):
        split_schedule(Scheduler(2.0, 1.0), 2.0, 3)
    with pytest.raises(ModelError, match="called with timestep 0 where the scheduler has 999"):
        split_schedule(Scheduler(999.0, 1.0), 0.0, 2)


def test_bucket_without_a_call_is_refused():
    denoiser = Denoiser()
    collector = Collector("unet", denoiser, LAYERS, 2)
    with torch.no_grad(), collector.attached(Scheduler(9.0, 1.0), lambda calls: None):
        denoiser(torch.randn(1, 4, 3, 3), 9.0)
    with pytest.raises(ModelError, match="bucket 0 saw no call"):
        collector.statistics()


# Pipelines


@pytest.fixture(scope="module")
def flux_dir(tmp_path_factory):
    import diffusers

    from tests.support.pipelines import tiny_flux_pipeline

    build = diffusers.FluxPipeline.__init__

    @functools.wraps(build)
    def smaller(self, *args, **kwargs):
        build(self, *args, **kwargs)
        # Its own default is 128, whatever the model: a thousand tokens too many for a test.
        self.default_sample_size = 16

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers.FluxPipeline, "__init__", smaller)
        yield tiny_flux_pipeline(tmp_path_factory.mktemp("tiny") / "flux")


@pytest.fixture(scope="module", params=["sd", "sd3", "flux"])
def source(request, pipeline_dir, transformer_pipeline_dir):
    paths = {"sd": pipeline_dir, "sd3": transformer_pipeline_dir}
    path = paths.get(request.param) or request.getfixturevalue("flux_dir")
    return open_model(str(path))


@pytest.fixture(scope="module")
def calibration(source):
    return calibrate(source, RECIPE, PROMPTS, device="cpu", progress=silent)


def test_pipeline_is_observed_as_its_layers_see_it(source, calibration):
    (component,) = source.components
    raw = {layer.name: ([], []) for layer in observed_layers(component, RECIPE)}
    bucket = [0]
    with quiet_libraries():
        pipe = load_pipeline(source, torch.device("cpu"))
        denoiser = getattr(pipe, component.name)

        def begin(module, args, kwargs):
            t = kwargs["timestep"] if "timestep" in kwargs else args[1]
            bucket[0] = bucket_of(float(torch.as_tensor(t).reshape(-1)[0]), calibration.edges)

        def keep(name):
            def listen(module, args):
                axis = 1 if args[0].ndim == 4 else -1
                x = args[0].movedim(axis, -1)
                raw[name][bucket[0]].append(x.reshape(-1, x.shape[-1]).clone())

            return listen

        denoiser.register_forward_pre_hook(begin, with_kwargs=True)
        for name in raw:
            denoiser.get_submodule(name).register_forward_pre_hook(keep(name))
        for batch in split_batches(PROMPTS, RECIPE.calibration):
            run_batch(pipe, batch, RECIPE.calibration)
    found = calibration.of(component)
    assert set(found) == set(raw)
    for name, buckets in raw.items():
        wanted = statistics_of(*(torch.cat(b) for b in buckets))
        assert torch.equal(found[name].amax, wanted.amax), name
        assert torch.equal(found[name].histogram, wanted.histogram), name
        assert torch.equal(found[name].count, wanted.count), name
        torch.testing.assert_close(found[name].second_moment, wanted.second_moment)
        torch.testing.assert_close(found[name].mean, wanted.mean, rtol=1e-4, atol=1e-5)
        if wanted.samples.shape == found[name].samples.shape:
            for rows, stored in zip(buckets, found[name].samples, strict=True):
                seen = {*map(tuple, torch.cat(rows).bfloat16().tolist())}
                assert {*map(tuple, stored.tolist())} <= seen, name


def test_provenance_says_how_it_was_taken(source, calibration):
    about = calibration.metadata
    (component,) = source.components
    assert (about.recipe, about.prompts, about.steps, about.seed) == ("fp8", 3, 4, 7)
    # 4 steps of 2 batches, split over 2 buckets
    assert about.calls == {component.name: [4, 4]}
    assert set(about.versions) == {"quantkit", "torch", "diffusers"}
    layers = observed_layers(component, RECIPE)
    assert set(calibration.digests_of(component)) == {layer.name for layer in layers}


def test_edges_are_in_the_unit_of_the_call(source, calibration):
    (edge,) = calibration.edges
    low, high = (0, 1) if source.components[0].family.name == "flux" else (200, 900)
    assert low < edge < high


def test_calibration_survives_its_file(source, calibration, tmp_path):
    path = tmp_path / "c.safetensors"
    save_calibration(calibration, path, force=False)
    loaded = load_calibration(path)
    assert (loaded.edges, loaded.metadata) == (calibration.edges, calibration.metadata)
    (component,) = source.components
    for name, statistics in calibration.of(component).items():
        again = loaded.of(component)[name]
        for field in FIELDS:
            assert torch.equal(getattr(again, field), getattr(statistics, field))
    with pytest.raises(OutputError, match="exists already"):
        save_calibration(calibration, path, force=False)


@pytest.fixture(scope="module")
def sd(pipeline_dir):
    return open_model(str(pipeline_dir))


@pytest.fixture(scope="module")
def sd_calibration(sd):
    return calibrate(sd, RECIPE, PROMPTS, device="cpu", progress=silent)


def test_batches_change_nothing_but_rounding(sd, sd_calibration):
    one = calibrate(
        sd, RECIPE.with_calibration({"batch": 1}), PROMPTS, device="cpu", progress=silent
    )
    for name, statistics in sd_calibration.layers["unet"].items():
        other = one.layers["unet"][name]
        assert torch.equal(other.count, statistics.count)
        torch.testing.assert_close(other.amax, statistics.amax, rtol=1e-3, atol=1e-5)
        # The same rows of the same images.
        assert torch.equal(other.sample_priority, statistics.sample_priority)
        torch.testing.assert_close(other.samples, statistics.samples, rtol=0.02, atol=0.02)


def test_guidance_and_prompts_reach_the_pipeline(sd, sd_calibration):
    unguided = calibrate(
        sd, RECIPE.with_calibration({"guidance": 1.0}), PROMPTS, device="cpu", progress=silent
    )
    name = "mid_block.attentions.0.proj_in"
    counts = [c.layers["unet"][name].count.sum() for c in (sd_calibration, unguided)]
    # Guidance runs every prompt twice.
    assert counts[0] == 2 * counts[1]


def test_only_the_first_prompts_are_used(sd, sd_calibration):
    again = calibrate(sd, RECIPE, (*PROMPTS, "more"), device="cpu", progress=silent)
    name = "mid_block.attentions.0.proj_in"
    found, wanted = (c.layers["unet"][name] for c in (again, sd_calibration))
    assert torch.equal(found.histogram, wanted.histogram)


def test_progress_ends_at_its_total(sd):
    seen = {}
    calibrate(
        sd,
        RECIPE.with_calibration({"prompts": 1}),
        PROMPTS,
        device="cpu",
        progress=lambda step, done, total: seen.__setitem__(step, (done, total)),
    )
    assert seen["denoising"] == (4, 4)
    assert seen["hashing weights"][0] == seen["hashing weights"][1] > 0


def test_statistics_of_a_pipeline_serve_its_denoiser_alone(sd, sd_calibration):
    alone = open_model(str(sd.components[0].path)).components[0]
    assert alone.name == ""
    assert sd_calibration.of(alone) is sd_calibration.layers["unet"]


def test_component_that_was_not_calibrated_is_named(sd_calibration, transformer_pipeline_dir):
    (component,) = open_model(str(transformer_pipeline_dir)).components
    with pytest.raises(ArtefactError, match="no component 'transformer', found 'unet'"):
        sd_calibration.of(component)


def test_nan_weight_is_found_where_it_is_read(pipeline_dir, tmp_path):
    path = Path(shutil.copytree(pipeline_dir, tmp_path / "p"))
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["down_blocks.0.resnets.0.conv1.bias"][5] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    pattern = r"unet\.down_blocks\.0\.resnets\.0\.conv2: NaN or Inf in its input at step 1 "
    with pytest.raises(NonFiniteError, match=pattern):
        calibrate(open_model(str(path)), RECIPE, PROMPTS, device="cpu", progress=silent)


def test_component_alone_cannot_be_calibrated(transformer_dir):
    model = open_model(str(transformer_dir))
    with pytest.raises(ModelError, match="runs the whole pipeline; pass the pipeline's directory"):
        calibrate(model, RECIPE, PROMPTS, device="cpu", progress=silent)


def test_pipeline_that_diffusers_cannot_load_is_one_line(pipeline_dir, tmp_path):
    path = Path(shutil.copytree(pipeline_dir, tmp_path / "p"))
    (path / "text_encoder" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="diffusers cannot load it") as caught:
        calibrate(open_model(str(path)), RECIPE, PROMPTS, device="cpu", progress=silent)
    assert "\n" not in str(caught.value)


def test_no_prompts_are_refused(sd):
    with pytest.raises(PromptError, match="no prompts"):
        calibrate(sd, RECIPE, (), device="cpu", progress=silent)


def test_device_and_dtype(sd):
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_dtype(sd, torch.device("cpu")) is torch.float32
    assert choose_dtype(sd, torch.device("cuda")) is torch.float16
    with pytest.raises(ModelError, match="device 'tpu9': unknown"):
        choose_device("tpu9")
    with pytest.raises(ModelError, match="torch sees"):
        choose_device("cuda:99")


def test_libraries_are_as_loud_as_before():
    from diffusers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with quiet_libraries():
        assert not logging.is_progress_bar_enabled()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# Prompts


def test_bundled_prompts_are_128_different_ones():
    prompts = read_prompts(None)
    assert len(prompts) == len(set(prompts)) == 128


def test_prompt_file_is_read_line_by_line(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbfa cat\r\n\r\n  caf\xc3\xa9, # not a comment \n")
    assert read_prompts(path) == ("a cat", "café, # not a comment")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty, wanted one prompt a line"),
        (b" \n\n", "empty"),
        (b"caf\xe9\n", r"not UTF-8 \(byte 3\)"),
        (None, "missing"),
    ],
    ids=["empty", "blank", "latin-1", "missing"],
)
def test_bad_prompt_file_is_refused(tmp_path, content, message):
    path = tmp_path / "p.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PromptError, match=message):
        read_prompts(path)


# The file


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def rewrite_entry(path, **changes):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        entry = json.loads(file.metadata()["quantkit_calibration"])
    text = json.dumps({**entry, **changes})
    save_file(load_file(path), path, metadata={"quantkit_calibration": text})


DAMAGE = {
    "missing": (Path.unlink, "missing"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-1]), ": truncated"),
    "empty": (lambda p: p.write_bytes(b""), ": truncated"),
    "not safetensors": (lambda p: p.write_text("x" * 100), "not safetensors"),
    "bit in a tensor": (lambda p: flip(p, -9), "its checksum does not agree"),
    "newer": (lambda p: rewrite_entry(p, format_version=4), "format_version 4, wanted 1 to 3; u"),
    "other numbers": (lambda p: rewrite_entry(p, about="{}"), "its checksum does not agree"),
    "other file": (lambda p: save_file({}, p), "not a quantkit_calibration file"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_is_refused(sd_calibration, tmp_path, damage, message):
    path = tmp_path / "c.safetensors"
    save_calibration(sd_calibration, path, force=False)
    damage(path)
    with pytest.raises(ArtefactError, match=message) as caught:
        load_calibration(path)
    assert "\n" not in str(caught.value)


def test_tensor_of_a_wrong_shape_is_refused(sd_calibration, tmp_path):
    path = tmp_path / "c.safetensors"
    save_calibration(sd_calibration, path, force=False)
    tensors, about = read_artefact(path, "quantkit_calibration", newest=3)
    for missing in ("updates", "mean", "samples", "sample_priority"):
        half = {n: t for n, t in tensors.items() if not n.endswith(f"/{missing}")}
        write_artefact(path, "quantkit_calibration", half, about, force=True, version=3)
        with pytest.raises(ArtefactError, match=rf"damaged \(.*{missing}"):
            load_calibration(path)
    name = "unet/mid_block.attentions.0.proj_in/amax"
    tensors[name] = tensors[name][:1]
    write_artefact(path, "quantkit_calibration", tensors, about, force=True)
    with pytest.raises(ArtefactError, match=r"proj_in/amax: shape \(1,\), wanted \(2,\)"):
        load_calibration(path)
    del tensors[name]
    write_artefact(path, "quantkit_calibration", tensors, about, force=True)
    with pytest.raises(ArtefactError, match=r"damaged .*amax"):
        load_calibration(path)


# Merging


@pytest.fixture(scope="module")
def halves(sd):
    """Calibrations of the first two prompts and of the last, as the run over all three has them."""
    later = RECIPE.with_calibration({"seed": 9})
    return {
        "a": calibrate(sd, RECIPE, PROMPTS[:2], device="cpu", progress=silent),
        "b": calibrate(sd, later, PROMPTS[2:], device="cpu", progress=silent),
    }


def test_merged_halves_are_the_whole_run(sd_calibration, halves):
    merged = merge(halves)
    assert merged.edges == sd_calibration.edges
    about, wanted = merged.metadata, sd_calibration.metadata
    told = hashlib.sha256(
        "\n".join(part.metadata.prompts_digest for part in halves.values()).encode()
    ).hexdigest()
    assert about == replace(wanted, prompts_digest=told)
    assert set(merged.layers["unet"]) == set(sd_calibration.layers["unet"])
    for name, whole in sd_calibration.layers["unet"].items():
        found = merged.layers["unet"][name]
        exact = ("amax", "histogram", "channel_amax", "count", "updates")
        for field in (*exact, "samples", "sample_priority", "sample_count"):
            assert torch.equal(getattr(found, field), getattr(whole, field)), (name, field)
        torch.testing.assert_close(found.second_moment, whole.second_moment, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.mean, whole.mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.moving_amax, whole.moving_amax, rtol=1e-12, atol=0)


def test_order_matters_to_the_average_alone(halves):
    name = "mid_block.attentions.0.proj_in"
    one, two = (
        merge(dict(p)).layers["unet"][name] for p in (halves.items(), [*halves.items()][::-1])
    )
    assert torch.equal(one.histogram, two.histogram)
    torch.testing.assert_close(one.second_moment, two.second_moment, rtol=1e-6, atol=0)
    assert not torch.equal(one.moving_amax, two.moving_amax)


def test_three_parts_merge_as_two_and_one():
    parts = [statistics_of(sample(name, rows=50 * i)) for i, name in enumerate(SAMPLES[:3], 1)]
    found = merge_layer(merge_layer(parts[0], parts[1]), parts[2])
    other = merge_layer(parts[0], merge_layer(parts[1], parts[2]))
    wanted = statistics_of(
        torch.cat([sample(n, rows=50 * i) for i, n in enumerate(SAMPLES[:3], 1)])
    )
    for field in FIELDS:
        torch.testing.assert_close(getattr(found, field), getattr(other, field), rtol=1e-6, atol=0)
        if "sample" not in field and field not in {"moving_amax", "updates"}:
            torch.testing.assert_close(getattr(found, field), getattr(wanted, field))
    assert float(found.moving_amax) == pytest.approx(filtered([float(p.amax) for p in parts]))


@pytest.mark.parametrize("missing", OLDER.values(), ids=OLDER)
def test_what_a_part_does_not_have_is_left_out(halves, missing):
    table = {
        name: replace(statistics, **dict.fromkeys(missing))
        for name, statistics in halves["b"].layers["unet"].items()
    }
    merged = merge({**halves, "b": replace(halves["b"], layers={"unet": table})})
    for statistics in merged.layers["unet"].values():
        assert {f for f in FIELDS if getattr(statistics, f) is None} == set(missing)


def renamed(part):
    return replace(
        part,
        layers={"transformer": part.layers["unet"]},
        metadata=replace(part.metadata, digests={"transformer": part.metadata.digests["unet"]}),
    )


def with_digest(part, layer, digest):
    digests = {"unet": {**part.metadata.digests["unet"], layer: digest}}
    return replace(part, metadata=replace(part.metadata, digests=digests))


def with_layers(part, names):
    table = part.layers["unet"]
    return replace(part, layers={"unet": {name: table.get(name, table[FIRST]) for name in names}})


FIRST = "mid_block.attentions.0.proj_in"
OTHERS = {
    "components": (renamed, "b: components transformer, wanted unet as in a;"),
    "edges": (lambda p: replace(p, edges=(500.5,)), r"b: bucket edges 500\.5, wanted .* as in a;"),
    "steps": (
        lambda p: replace(p, metadata=replace(p.metadata, steps=5)),
        "b: steps 5, wanted 4 as in a;",
    ),
    "guidance": (
        lambda p: replace(p, metadata=replace(p.metadata, guidance=1.0)),
        "b: guidance 1.0, wanted None as in a;",
    ),
    "model": (
        lambda p: with_digest(p, FIRST, "0" * 64),
        rf"b: the weight of unet/{FIRST} is not that of a; merge calibrations of one model",
    ),
    "missing layer": (
        lambda p: with_layers(p, set(p.layers["unet"]) - {FIRST}),
        rf"b: no layer unet/{FIRST}, which a has; calibrate both with the same recipe",
    ),
    "more layers": (
        lambda p: with_layers(p, (*p.layers["unet"], "zz")),
        "a: no layer unet/zz, which b has;",
    ),
}


@pytest.mark.parametrize(("change", "message"), OTHERS.values(), ids=OTHERS)
def test_parts_that_do_not_belong_together_are_refused(halves, change, message):
    with pytest.raises(ArtefactError, match=message) as caught:
        merge({"a": halves["a"], "b": change(halves["b"])})
    assert "\n" not in str(caught.value)


def test_same_run_does_not_count_twice(halves):
    with pytest.raises(
        ArtefactError, match="c: the same prompts and seed as a; give each run once"
    ):
        merge({**halves, "c": halves["a"]})


def test_command_merges_files(halves, sd_calibration, tmp_path):
    paths = [tmp_path / f"{name}.safetensors" for name in halves]
    for path, part in zip(paths, halves.values(), strict=True):
        save_calibration(part, path, force=False)
    output = tmp_path / "c.safetensors"

    def invoke(*arguments):
        return CliRunner().invoke(calibrate_command, ["merge", *map(str, arguments)])

    result = invoke(*paths, "-o", output, "--json")
    assert result.exit_code == 0, result.output
    said, stored = json.loads(result.stdout), load_calibration(output)
    assert said["prompts"] == stored.metadata.prompts == 3
    assert said["components"]["unet"]["calls"] == sd_calibration.metadata.calls["unet"]
    assert isinstance(invoke(*paths, "-o", output).exception, OutputError)
    assert str(output) in invoke(*paths, "-o", output, "--force").stdout
    for few in (paths[:1], [paths[0], paths[0]]):
        error = invoke(*few, "-o", tmp_path / "d").exception
        assert "wanted two or more different ones" in str(error)
    assert not (tmp_path / "d").exists()


# Observers


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
    codes = scaled[kept].astype(np.float32).astype(getattr(ml_dtypes, f"float8_{fmt.name}"))
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
    table = {amax * fraction: divergence(x, amax * fraction, fmt) for fraction in CLIP_GRID}
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


# The moving average


def filtered(values):
    """Return the average by scipy's recursive filter, and without its start of zero."""
    both = scipy.signal.lfilter([RATE], [1, RATE - 1], [values, [1.0] * len(values)])
    return both[0, -1] / both[1, -1]


def test_average_is_that_of_a_recursive_filter():
    loud = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    timesteps = (9.0, 8.0, 2.0, 1.0, 9.0, 8.0, 2.0, 1.0)
    inputs = []
    for amax, t in zip(loud, timesteps, strict=True):
        x = torch.rand(2, 4, 3, 3) * amax / 2
        x[0, 1, 2, 0] = -amax
        inputs.append((x, t))
    found = observe(inputs).statistics()["early"]
    wanted = [filtered([loud[i] for i in calls]) for calls in ((2, 3, 6, 7), (0, 1, 4, 5))]
    assert found.moving_amax.tolist() == pytest.approx(wanted, rel=1e-12)
    assert found.updates.tolist() == [4, 4]
    assert float(OBSERVERS["moving_average"](found, FORMATS["e5m2"], 0.0)[0]) == (
        pytest.approx(wanted[0], rel=1e-6)
    )


@pytest.mark.parametrize("cut", range(8))
def test_average_goes_on_from_where_it_was(cut):
    loud = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    ends = [filtered(part) if part else 0.0 for part in (loud[:cut], loud[cut:])]
    first, second = (torch.tensor([end], dtype=torch.float64) for end in ends)
    joined = continued(first, torch.tensor([cut]), second, torch.tensor([7 - cut]))
    assert float(joined) == pytest.approx(filtered(loud), rel=1e-12)


def test_pooled_average_weighs_buckets_by_their_calls():
    statistics = replace(
        statistics_of(sample("gaussian"), sample("heavy"), sample("relu")),
        moving_amax=torch.tensor([2.0, 5.0, 7.0], dtype=torch.float64),
        updates=torch.tensor([1, 3, 0]),
    )
    pooled = statistics.regrouped([0, 0, 1])
    assert pooled.moving_amax.tolist() == [17 / 4, 0.0]
    assert pooled.updates.tolist() == [4, 0]


@pytest.mark.parametrize("version", OLDER)
def test_older_file_serves_all_that_it_holds(sd_calibration, tmp_path, version):
    path = tmp_path / "c.safetensors"
    save_calibration(sd_calibration, path, force=False)
    tensors, about = read_artefact(path, "quantkit_calibration", newest=3)
    with pytest.raises(ArtefactError, match="format_version 3, wanted 1; update"):
        read_artefact(path, "quantkit_calibration")
    older = {n: t for n, t in tensors.items() if n.rpartition("/")[2] not in OLDER[version]}
    write_artefact(path, "quantkit_calibration", older, about, force=True, version=version)
    loaded, name = load_calibration(path), "mid_block.attentions.0.proj_in"
    statistics = loaded.layers["unet"][name]
    assert torch.equal(statistics.histogram, sd_calibration.layers["unet"][name].histogram)
    assert statistics.samples is None
    for observer in OBSERVERS:
        recipe = ActivationRecipe(mode="static", observer=observer, buckets=2)
        if observer == "moving_average" and version == 1:
            with pytest.raises(ArtefactError, match=r"has no moving average \(format_version 1\)"):
                static_scale(statistics, recipe, FORMATS["e4m3fn"], edges=loaded.edges)
        else:
            scale = static_scale(statistics, recipe, FORMATS["e4m3fn"], edges=loaded.edges)
            assert bool((scale > 0).all())
    # Written again it is what it was: nothing that an older program could not read.
    save_calibration(loaded, path, force=True)
    assert read_artefact(path, "quantkit_calibration", newest=version)[1] == about


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


def test_buckets_that_are_not_there_are_refused():
    recipe = ActivationRecipe(mode="static", buckets=2)
    with pytest.raises(RecipeError, match="has 1 buckets, which do not pool into 2"):
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
    monkeypatch.setattr("quantkit.calibration.observers.AUTO_TOLERANCE", 1.25)
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


# Smoothing


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_smoothing_changes_no_product(alpha):
    x, w = sample("heavy", rows=50), sample("gaussian", rows=16)
    factor = smooth_factor(statistics_of(x), w, alpha)
    torch.testing.assert_close((x * factor) @ (w / factor).T, x @ w.T, rtol=1e-4, atol=1e-3)
    if alpha == 0.5:
        loud, heavy = (x * factor).abs().amax(0), (w / factor).abs().amax(0)
        torch.testing.assert_close(loud, heavy)
    if alpha == 1.0:
        torch.testing.assert_close((x * factor).abs().amax(0), torch.ones(8))


def test_taps_of_a_convolution_share_a_factor():
    x, weight = sample("heavy"), torch.randn(6, 8, 3, 3)
    factor = smooth_factor(statistics_of(x), to_rows(weight), 0.5)
    per_channel = weight.abs().amax(dim=(0, 2, 3))
    torch.testing.assert_close(factor, (per_channel / x.abs().amax(0)).sqrt())


def test_silent_channels_are_left_alone():
    x, w = sample("gaussian"), torch.randn(4, 8)
    x[:, 2], w[:, 5] = 0, 0
    factor = smooth_factor(statistics_of(x), w, 0.5)
    assert (factor[2], factor[5]) == (1.0, 1.0)
    assert bool(factor.isfinite().all())
    with pytest.raises(ShapeError, match="K 9 is not a multiple of the 8 input channels"):
        smooth_factor(statistics_of(x), torch.randn(4, 9), 0.5)


# The command


def run(*arguments):
    return CliRunner().invoke(calibrate_command, ["model", *map(str, arguments)])


def test_command_writes_a_calibration(pipeline_dir, tmp_path):
    output, prompts = tmp_path / "c.safetensors", tmp_path / "p.txt"
    prompts.write_text("a\nb\n")
    options = ("--prompts", prompts, "--steps", 4, "--seed", 3, "--device", "cpu", "--json", "-q")
    result = run(pipeline_dir, "-o", output, *options)
    assert result.exit_code == 0, result.output
    said, stored = json.loads(result.stdout), load_calibration(output)
    assert (said["prompts"], said["steps"], said["edges"]) == (2, 4, list(stored.edges))
    assert set(said["components"]["unet"]["layers"]) == set(stored.layers["unet"])
    assert stored.metadata.seed == 3
    assert isinstance(run(pipeline_dir, "-o", output).exception, OutputError)


def test_dry_run_writes_nothing(pipeline_dir, tmp_path):
    output = tmp_path / "c.safetensors"
    result = run(pipeline_dir, "-o", output, "--dry-run", "--count", 5)
    assert result.exit_code == 0, result.output
    assert "would observe" in result.stdout
    assert "71" in result.stdout
    assert not list(tmp_path.iterdir())
