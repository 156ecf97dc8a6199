"""What artefacts hold: statistics of a layer, and second moments."""

import torch

from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
from quantkit.calibration.statistics.layer_statistics import CalibrationProvenance, LayerStatistics
from quantkit.calibration.statistics.moving_average import RATE
from quantkit.calibration.statistics.sampling import SAMPLE_ROWS
from quantkit.numerics.histogram import BINS


def statistics(channels=4, buckets=2):
    priority = torch.zeros(buckets, SAMPLE_ROWS, dtype=torch.float64)
    priority[:, :3] = torch.tensor([0.9, 0.5, 0.1])
    ones = torch.ones(buckets)
    return LayerStatistics(
        amax=ones * 2,
        histogram=torch.ones(buckets, BINS, dtype=torch.float64),
        second_moment=torch.ones(buckets, channels),
        channel_amax=torch.full((buckets, channels), 2.0),
        count=torch.full((buckets,), 7),
        moving_amax=ones.double(),
        updates=torch.full((buckets,), 3),
        mean=torch.full((buckets, channels), -0.25),
        samples=-torch.ones(buckets, SAMPLE_ROWS, 2 * channels, dtype=torch.bfloat16),
        sample_priority=priority,
        sample_count=torch.full((buckets,), 3),
    )


ABOUT = CalibrationProvenance(
    {"unet": {"a": "0" * 64}}, "r", 1, "0" * 64, 2, None, 0, {"unet": [1, 1]}, {}
)


def sums():
    return {
        "channel_amax": torch.ones(2, 4),
        "mean": torch.ones(2, 4, dtype=torch.float64),
        "second_moment": torch.ones(2, 4, dtype=torch.float64),
        "histogram": torch.ones(2, BINS, dtype=torch.float64),
        "moving_amax": torch.full((2,), RATE, dtype=torch.float64),
        "updates": torch.tensor([1, 1]),
        "count": torch.tensor([4, 4]),
        "samples": torch.ones(2, SAMPLE_ROWS, 8, dtype=torch.bfloat16),
        "sample_priority": torch.ones(2, SAMPLE_ROWS, dtype=torch.float64),
    }


def attention_sums(buckets=2, heads=3, columns=8):
    """Return the sums of one call per bucket: q, k and v of 64 and 40 rows, all of them ones."""
    ones = torch.ones(buckets, heads, columns)
    ends = {f"{what}_{end}": ones.clone() for what in "kv" for end in ("low", "high")}
    rows = {"q": 64, "k": 40, "v": 40}
    return {
        "q_amax": torch.ones(buckets, heads),
        **ends,
        **{f"{what}_mean": ones.double() * count for what, count in rows.items()},
        **{name: torch.tensor([64] * buckets) for name in ("queries", "call_queries")},
        **{name: torch.tensor([40] * buckets) for name in ("keys", "call_keys")},
    }


def attention_statistics(buckets=2, heads=3, columns=8):
    """Return what those come to: all ones."""
    return AttentionStatistics.of_sums(attention_sums(buckets, heads, columns))
