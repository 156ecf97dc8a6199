"""Comparisons of made values: no picture is behind them."""

from dataclasses import replace
from itertools import combinations

import numpy as np
from quantkit.eval.measuring.comparison import ClipScores, Comparison, Score
from quantkit.eval.measuring.metrics import METRICS
from quantkit.eval.measuring.sample_statistics import (
    bootstrap_loss,
    relative_loss,
    summarize,
    summarize_difference,
)


def score(name, values, backbone=""):
    return Score(METRICS[name], backbone, tuple(values), summarize(values))


def clip_scores(before, after):
    loss = summarize([100 * (b - a) / b for b, a in zip(before, after, strict=True)])
    first, second = np.array(before), np.array(after)
    loss = replace(loss, mean=relative_loss(first, second), interval=bootstrap_loss(first, second))
    change = summarize_difference(after, before)
    return ClipScores("tiny CLIP", score("clip", before), score("clip", after), change, loss)


def comparison(ssim, *, lpips=None, clip=None, mse=0.01):
    """Return a comparison; ``mse`` is of each picture, or of all."""
    errors = mse if isinstance(mse, list) else [mse] * len(ssim)
    scores = {"mse": score("mse", errors), "ssim": score("ssim", ssim)}
    if lpips:
        scores["lpips"] = score("lpips", lpips, "net")
    names = tuple(f"{i:03d}" for i in range(len(ssim)))
    return Comparison(names, tuple(f"a ball and {i} cats" for i in range(len(ssim))), scores, clip)


def holm_by_closure(p_values):
    """Return Holm's p-values as the closed test of Bonferroni's, which they are a short cut for.

    An hypothesis falls when every set of hypotheses that holds it falls.
    """
    places = range(len(p_values))
    sets = [group for size in places for group in combinations(places, size + 1)]
    joint = {group: min(1.0, len(group) * min(p_values[i] for i in group)) for group in sets}
    return [max(joint[group] for group in sets if place in group) for place in places]


def is_near(found, expected, share=0.01):
    """Tell whether answers of a step are the same but for rounding: float32 within its kernels."""
    size = float(expected.abs().max())
    return float((found - expected).abs().max()) <= share * size
