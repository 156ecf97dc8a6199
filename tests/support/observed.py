"""Statistics of inputs that are at hand, and what a tiny pipeline is calibrated with."""

from dataclasses import fields
from pathlib import Path

import scipy.signal
import scipy.stats
import torch

from quantkit.calibration.observing.hooks import Collector
from quantkit.calibration.statistics.layer_statistics import LayerStatistics
from quantkit.calibration.statistics.moving_average import RATE
from quantkit.calibration.statistics.sampling import SAMPLE_ROWS
from quantkit.models.component_layers import Layer
from quantkit.numerics.histogram import count_bins
from quantkit.pipelines.batches import GrowingBatches
from quantkit.recipe.load import change_recipe, load_recipe
from quantkit.storage.tensorfile import TensorInfo

PROMPTS = ("a red circle", "two blue squares", "a tree")

RECIPE = change_recipe(
    load_recipe("fp8"),
    {
        "calibration.prompts": 3,
        "calibration.steps": 4,
        "calibration.buckets": 2,
        "calibration.batch": 2,
        "calibration.seed": 7,
    },
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


FIELDS = tuple(field.name for field in fields(LayerStatistics))

SAMPLES = ("gaussian", "heavy", "relu", "tiny", "outlier")


class TwoAtOnce(GrowingBatches):
    """What a GPU does that has room for two batches, on a CPU."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.count = 2


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


def filtered(values):
    """Return the average by scipy's recursive filter, and without its start of zero."""
    both = scipy.signal.lfilter([RATE], [1, RATE - 1], [values, [1.0] * len(values)])
    return both[0, -1] / both[1, -1]
