"""The attention of a component: what its recipe asks for, and scales from calibration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantkit.checkpoint.attention import CHILD, HeadShape, PackedAttention
from quantkit.errors import RecipeError
from quantkit.models.building import read_skeleton
from quantkit.recipe.schema import matches

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from quantkit.calibration.attention_statistics import AttentionStatistics
    from quantkit.models.source import Component
    from quantkit.numerics.attention_scales import AttentionScales
    from quantkit.packing.fewer_columns import Decision
    from quantkit.recipe.attention import AttentionRecipe


@dataclass(frozen=True, eq=False)
class PlannedAttention:
    """What config.json says, and the tensors that come with it."""

    #: None: in 16 bit
    packed: PackedAttention | None = None
    #: float32, by name
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    #: how many columns modules multiply, and why, by path
    decisions: Mapping[str, Decision] = field(default_factory=dict)


def plan_attention(
    component: Component,
    section: AttentionRecipe | None,
    statistics: Mapping[str, AttentionStatistics] | None,
) -> PlannedAttention:
    """Decide how attention is computed.

    Args:
        component: a denoiser.
        section: of the recipe; None: in 16 bit.
        statistics: by module; None: they are not there yet, and no scales are stored.

    Raises:
        RecipeError: scales from a calibration that did not observe attention, or fewer columns
            from one of a model without a basis.
    """
    if section is None:
        return PlannedAttention()
    from quantkit.numerics.attention_scales import SHAPES
    from quantkit.packing.fewer_columns import decide

    scales, decisions = {}, {}
    if section.needs_calibration and statistics is not None:
        _refuse_none(component, section, statistics)
        on_codes = _on_codes(section, statistics)
        decisions = decide(section, on_codes)
        if section.scales == "static":
            scales = {name: static_scales(s, section.margin) for name, s in on_codes.items()}
    shapes = {name: HeadShape(s.heads, s.head_size) for name, s in scales.items()}
    chosen = {name: d.chosen for name, d in decisions.items() if d.chosen is not None}
    packed = PackedAttention(
        section.qk,
        section.min_keys,
        section.exclude,
        shapes,
        {name: t.rank for name, t in chosen.items() if t.rank is not None},
        tuple(name for name, t in chosen.items() if t.rank is None),
        None if section.pv == "none" else section.pv,
    )
    tensors = {
        f"{module}.{CHILD}.{part}": getattr(of_module, part)
        for module, of_module in scales.items()
        for part in SHAPES
    }
    return PlannedAttention(packed, tensors, decisions)


def _refuse_none(
    component: Component, section: AttentionRecipe, statistics: Mapping[str, AttentionStatistics]
) -> None:
    """Refuse a calibration without attention, unless the model has none that is known."""
    if statistics:
        return
    reasons = read_skeleton(component.path / "config.json").attention.values()
    if not all(reasons):
        static = section.scales == "static"
        asked, cure = ("scales static", "set attention.scales to dynamic")
        if not static:
            asked, cure = (f"sparse_k {section.sparse_k}", "set attention.sparse_k to none")
        raise RecipeError(
            f"attention.{asked}: the calibration has no attention; calibrate again with this "
            f"quantkit, or {cure}",
            fields=("attention", "calibration"),
        )


def _on_codes(
    section: AttentionRecipe, statistics: Mapping[str, AttentionStatistics]
) -> dict[str, AttentionStatistics]:
    """Return the statistics of the modules whose attention is on codes."""
    return {
        name: of_module
        for name, of_module in statistics.items()
        if not matches(name, section.exclude) and of_module.call_keys.max() >= section.min_keys
    }


def static_scales(statistics: AttentionStatistics, margin: float) -> AttentionScales:
    """Return the scales of a module, one for all timesteps: buckets gained nothing (SSIM .9995)."""
    from quantkit.calibration.attention_statistics import largest_about
    from quantkit.numerics.attention_scales import scales_of_ranges

    seen = statistics.pooled()
    q, low, high, k_mean, v_low, v_high, v_mean = (
        t[0]
        for t in (
            seen.q_amax, seen.k_low, seen.k_high, seen.k_mean, seen.v_low, seen.v_high, seen.v_mean
        )
    )  # fmt: skip
    k = largest_about(low, high, k_mean).amax(dim=1)
    v = largest_about(v_low, v_high, v_mean)
    return scales_of_ranges(q=q, k=k, k_mean=k_mean, v=v, v_mean=v_mean, margin=margin)
