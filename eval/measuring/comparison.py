"""Comparison of pairs: every metric of every pair, and summaries."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.judges import Judgement, give_judgement
from quantkit.eval.measuring.metrics import METRICS, Metric, Needs
from quantkit.eval.measuring.pictures import Pairs
from quantkit.eval.measuring.resemblance import Resemblance, resemble
from quantkit.eval.measuring.sample_statistics import (
    Summary,
    bootstrap_loss,
    relative_loss,
    summarize,
    summarize_difference,
)

from quantkit.errors import InputError
from quantkit.progress import Progress, silent


@dataclass(frozen=True)
class Score:
    """One metric over all pairs."""

    metric: Metric
    #: the network behind the number, empty when there is none
    backbone: str
    #: one per pair; PSNR of identical pictures is infinite
    values: tuple[float, ...]
    summary: Summary


@dataclass(frozen=True)
class ClipScores:
    """CLIP score of both pipelines, and the difference between them."""

    backbone: str
    original: Score
    packed: Score
    #: packed - original in points, prompt by prompt
    change: Summary
    #: in % of the original's mean score; negative when the packed pipeline scores higher
    loss: Summary


@dataclass(frozen=True)
class Comparison:
    """All that was measured on pairs of pictures."""

    names: tuple[str, ...]
    prompts: tuple[str, ...] | None
    #: the metrics of pairs, by name
    scores: dict[str, Score]
    clip: ClipScores | None
    #: None without CLIP or prompts
    resemblance: Resemblance | None = None
    #: of those judges that were asked for
    judgements: tuple[Judgement, ...] = ()

    def worst_first(self) -> tuple[int, ...]:
        """Return the pairs' positions by rising SSIM."""
        values = self.scores["ssim"].values
        return tuple(sorted(range(len(values)), key=lambda index: values[index]))


def compare(pairs: Pairs, backbones: Backbones, *, progress: Progress = silent) -> Comparison:
    """Measure every metric whose backbone and prompts are there.

    Raises:
        InputError: no pairs.
        ShapeError: pictures smaller than a metric can take.
    """
    if not pairs.names:
        raise InputError("no pictures to compare; expected at least one pair")
    metrics = [m for m in METRICS.values() if m.needs is Needs.PAIR and backbones.has(m.backbone)]
    scores = {}
    for done, metric in enumerate(metrics):
        progress("metrics", done, len(metrics) + 1)
        scores[metric.name] = _score_pairs(metric, pairs, backbones)
    clip = resemblance = None
    if backbones.clip is not None and pairs.prompts is not None:
        clip = _score_prompts(METRICS["clip"], pairs, pairs.prompts, backbones)
        resemblance = resemble(pairs, pairs.prompts, backbones.clip)
    progress("metrics", len(metrics) + 1, len(metrics) + 1)
    judgements = tuple(give_judgement(judge, pairs) for judge in backbones.judges)
    return Comparison(pairs.names, pairs.prompts, scores, clip, resemblance, judgements)


def join(parts: Sequence[Comparison]) -> Comparison:
    """Return the pairs of several comparisons in one, with the metrics of pairs alone."""
    scores = {}
    for name, first in parts[0].scores.items():
        values = tuple(value for part in parts for value in part.scores[name].values)
        scores[name] = Score(first.metric, first.backbone, values, _summarize_pairs(values))
    prompts = tuple(text for part in parts for text in part.prompts or ())
    return Comparison(tuple(n for part in parts for n in part.names), prompts or None, scores, None)


def _score_pairs(metric: Metric, pairs: Pairs, backbones: Backbones) -> Score:
    assert metric.pair is not None
    values = tuple(
        metric.pair(first, second, backbones)
        for first, second in zip(pairs.original, pairs.packed, strict=True)
    )
    return Score(metric, backbones.name_of(metric.backbone), values, _summarize_pairs(values))


def _summarize_pairs(values: Sequence[float]) -> Summary:
    return summarize(values, infinite_note="pairs identical (infinite)")


def _score_prompts(
    metric: Metric, pairs: Pairs, prompts: Collection[str], backbones: Backbones
) -> ClipScores:
    measure, name = metric.prompt, backbones.name_of(metric.backbone)
    assert measure is not None
    before, after = (
        tuple(measure(image, text, backbones) for image, text in zip(side, prompts, strict=True))
        for side in (pairs.original, pairs.packed)
    )
    return ClipScores(
        name,
        Score(metric, name, before, summarize(before)),
        Score(metric, name, after, summarize(after)),
        summarize_difference(after, before),
        _summarize_loss(before, after),
    )


def _summarize_loss(before: tuple[float, ...], after: tuple[float, ...]) -> Summary:
    """Return the loss of the means with its interval; the spread is that of single prompts."""
    first, second = np.array(before), np.array(after)
    loss = relative_loss(first, second)
    if loss is None:
        note = "the original's mean score is not positive, so no relative loss"
        return Summary(len(before), None, None, None, None, None, None, note)
    single = [100.0 * (b - a) / b for b, a in zip(before, after, strict=True) if b > 0.0]
    spread = summarize(single)
    return Summary(
        len(before),
        loss,
        spread.std,
        spread.minimum,
        spread.maximum,
        spread.median,
        bootstrap_loss(first, second),
        "mean = loss of the mean score; std, min, max, median over single prompts",
    )
