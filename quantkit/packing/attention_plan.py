"""The attention of a component: what its recipe asks for, and scales from calibration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quantkit.checkpoint.packed_attention import CHILD, HeadShape, PackedAttention
from quantkit.errors import RecipeError
from quantkit.models.building import read_skeleton
from quantkit.models.source_tensors import source_tensors
from quantkit.numerics.attention_formats import NONE
from quantkit.packing.choose_attention_formats import choose_attention_formats
from quantkit.recipe.fields import matches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
    from quantkit.checkpoint.format_decisions import FormatDecision
    from quantkit.models.source import Component
    from quantkit.numerics.attention_scales import AttentionScales
    from quantkit.recipe.attention_recipe import AttentionRecipe


@dataclass(frozen=True, eq=False)
class PlannedAttention:
    """The attention entry of config.json, and its tensors."""

    #: None: in 16 bit
    packed: PackedAttention | None = None
    #: float32, by name
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    #: formats with reasons, by module path, where errors decided
    formats: Mapping[str, FormatDecision] = field(default_factory=dict)


def plan_attention(
    component: Component,
    section: AttentionRecipe | None,
    statistics: Mapping[str, AttentionStatistics] | None,
) -> PlannedAttention:
    """Plan the formats and scales of attention.

    Args:
        component: a denoiser.
        section: of the recipe; None: in 16 bit.
        statistics: by module; None: they are not there yet, and no scales are stored.

    Raises:
        RecipeError: scales from a calibration that did not observe attention, or formats from one
            that did not measure their errors.
    """
    if section is None or section.is_off:
        return PlannedAttention()
    from quantkit.numerics.attention_scales import SHAPES

    if section.needs_calibration and statistics is not None:
        _refuse_none(component, section, statistics)
    base, decided = _formats(component, section, statistics)
    if base is None:
        return PlannedAttention(formats=decided)
    scales = {}
    if section.scales == "static" and statistics is not None:
        on_codes = _on_codes(base, statistics)
        scales = {name: static_scales(s, section.margin) for name, s in on_codes.items()}
    static = {name: HeadShape(s.heads, s.head_size) for name, s in scales.items()}
    packed = replace(base, static=static)
    tensors = {
        f"{module}.{CHILD}.{part}": getattr(of_module, part)
        for module, of_module in scales.items()
        for part in SHAPES
    }
    return PlannedAttention(packed, tensors, decided)


def _formats(
    component: Component,
    section: AttentionRecipe,
    statistics: Mapping[str, AttentionStatistics] | None,
) -> tuple[PackedAttention | None, Mapping[str, FormatDecision]]:
    """Return the formats of all modules, None where all stay in 16 bit; and the decisions."""
    if section.is_uniform:
        # Whatever modules there are: nothing is built to list them.
        pv = None if section.pv == NONE else section.pv
        return PackedAttention(section.qk, section.min_keys, section.exclude, pv=pv), {}
    found = choose_attention_formats(section, _known(component, section.exclude), statistics)
    if found.most is None:
        return None, found.decisions
    kept = (*section.exclude, *found.kept)
    return PackedAttention(
        found.most.qk, section.min_keys, kept, pv=found.most.pv, formats=found.others
    ), found.decisions


def _known(component: Component, exclude: Sequence[str]) -> list[str]:
    """Return the attention modules whose processors are known, but for excluded ones."""
    config, names = component.path / "config.json", source_tensors(component)
    modules = read_skeleton(config, component.class_name, names).attention
    return [name for name, why in modules.items() if not why and not matches(name, exclude)]


def _refuse_none(
    component: Component, section: AttentionRecipe, statistics: Mapping[str, AttentionStatistics]
) -> None:
    """Refuse a calibration without attention, unless the model has none that is known."""
    if statistics or not _known(component, ()):
        return
    if section.scales == "static":
        asked, cure = "scales static", "set attention.scales to dynamic"
    else:
        asked, cure = "qk or pv auto", "give formats"
    raise RecipeError(
        f"attention.{asked}: the calibration has no attention; run 'quantkit calibrate "
        f"model' again, or {cure}",
        fields=("attention", "calibration"),
    )


def _on_codes(
    packed: PackedAttention, statistics: Mapping[str, AttentionStatistics]
) -> dict[str, AttentionStatistics]:
    """Return the statistics of the modules whose attention is on codes."""
    return {
        name: of_module
        for name, of_module in statistics.items()
        if not matches(name, packed.exclude) and of_module.call_keys.max() >= packed.min_keys
    }


def static_scales(statistics: AttentionStatistics, margin: float) -> AttentionScales:
    """Return the scales of a module, one for all timesteps: buckets gained nothing (SSIM .9995)."""
    from quantkit.calibration.statistics.attention_statistics import largest_about
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
