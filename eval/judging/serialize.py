"""The parts of a report as JSON values: strict JSON, infinities as null with a note."""

import dataclasses
from enum import Enum
from math import isfinite
from typing import Any

from quantkit.eval.judging.gates import Gate
from quantkit.eval.judging.noise_floor import FloorGap
from quantkit.eval.measuring.comparison import Comparison, Score
from quantkit.eval.measuring.composition import PictureKinds
from quantkit.eval.measuring.judges import Judgement
from quantkit.eval.measuring.step_errors import StepErrors


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return the measured values, per pair and together."""
    scores = {name: _score_json(score) for name, score in comparison.scores.items()}
    clip = comparison.clip
    return {
        "names": list(comparison.names),
        "prompts": plain(comparison.prompts),
        "metrics": scores,
        "clip": clip and {
            "backbone": clip.backbone,
            "original": _score_json(clip.original),
            "packed": _score_json(clip.packed),
            "change": plain(clip.change),
            "relative_loss_percent": plain(clip.loss),
        },
        "resemblance": plain(comparison.resemblance),
        "judges": {found.judge.name: _judgement_json(found) for found in comparison.judgements},
    }  # fmt: skip


def gates_json(gates: tuple[Gate, ...]) -> list[dict[str, Any]]:
    """Return the gates as JSON values."""
    return [plain(gate) | {"passed": gate.passed, "expected": gate.expected} for gate in gates]


def pictures_json(pictures: PictureKinds) -> dict[str, Any]:
    """Return what became of every picture, and how many of each kind there are."""
    counts = {kind.value: count for kind, count in pictures.counts.items()}
    return {"counts": counts, **plain(pictures)}


def gap_json(gap: FloorGap) -> dict[str, Any]:
    """Return a noise floor, and what packing costs beyond it."""
    floor = gap.floor
    return {
        "name": floor.name,
        "title": floor.title,
        "note": floor.note or None,
        "comparison": floor.comparison and comparison_json(floor.comparison),
        "divergence": steps_json(floor.divergence),
        "packed_minus_floor": plain(gap.differences),
        "tests": plain(gap.tests),
    }


def steps_json(errors: StepErrors | None) -> dict[str, Any] | None:
    """Return errors over the denoising steps; None: not measured."""
    if errors is None:
        return None
    return {
        "timesteps": list(errors.timesteps),
        "mean": plain(errors.mean),
        "quartile_low": plain(errors.quantile(0.25)),
        "quartile_high": plain(errors.quantile(0.75)),
        "count": len(errors.values[0]),
    }


def _score_json(score: Score) -> dict[str, Any]:
    metric = score.metric
    identical = sum(not isfinite(value) for value in score.values)
    return {
        "title": metric.title,
        "backbone": score.backbone or None,
        "meaning": metric.meaning,
        "better": metric.better.value,
        "unit": metric.unit or None,
        "values": plain(score.values),
        "null_means": "infinite: identical pictures" if identical else None,
        "summary": plain(score.summary),
    }


def _judgement_json(found: Judgement) -> dict[str, Any]:
    judge = found.judge
    return {
        "title": judge.title,
        "source": found.source or None,
        "meaning": judge.meaning,
        "better": "higher" if judge.higher_is_better else "lower",
        "original": list(found.original),
        "packed": list(found.packed),
        "summary": plain(found.summary),
        "change": plain(found.change),
        "note": found.note or None,
    }


def plain(value: Any) -> Any:
    """Return dataclasses, enums and tuples as JSON values; floats that JSON cannot say as None."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value
