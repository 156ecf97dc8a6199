"""Choosing the formats of each attention module's products."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantkit.checkpoint.format_decisions import FormatDecision
from quantkit.errors import RecipeError
from quantkit.numerics.attention_formats import ATTENTION_FORMATS, AttentionFormat
from quantkit.numerics.attention_limits import takes_heads

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
    from quantkit.recipe.attention_recipe import AttentionRecipe

#: Digits of an error that is told.
_DIGITS = 4


@dataclass(frozen=True)
class ChosenFormats:
    """The formats chosen for the known attention modules of a component."""

    #: by module on codes
    formats: Mapping[str, AttentionFormat] = field(default_factory=dict)
    #: modules in 16 bit, except excluded ones
    kept: tuple[str, ...] = ()
    #: of the modules whose error decided
    decisions: Mapping[str, FormatDecision] = field(default_factory=dict)

    @property
    def most(self) -> AttentionFormat | None:
        """The format of most modules, the first row on a tie; None: no module is on codes."""
        counts = Counter(self.formats.values())
        return max(ATTENTION_FORMATS, key=lambda row: counts[row]) if counts else None

    @property
    def others(self) -> dict[str, AttentionFormat]:
        """The modules that have another one."""
        return {name: found for name, found in self.formats.items() if found != self.most}


def choose_attention_formats(
    section: AttentionRecipe,
    modules: Iterable[str],
    statistics: Mapping[str, AttentionStatistics] | None,
) -> ChosenFormats:
    """Return the formats of modules: the recipe's, or the fastest within its error budget.

    Args:
        section: of the recipe.
        modules: with processors that can be replaced, and not excluded.
        statistics: by module; None: they are not there yet, and the fastest is taken.

    Raises:
        RecipeError: errors that are to decide were not measured.
    """
    allowed = {name: section.formats_of(name) for name in modules}
    decisions = {} if statistics is None else _decisions(section, allowed, statistics)
    formats = {name: _fastest(rows) for name, rows in allowed.items() if rows}
    for name, decision in decisions.items():
        formats.pop(name)
        if decision.chosen is not None:
            formats[name] = next(row for row in allowed[name] if row.name == decision.chosen)
    kept = tuple(name for name in allowed if name not in formats)
    return ChosenFormats(formats, kept, decisions)


def _fastest(rows: Sequence[AttentionFormat]) -> AttentionFormat:
    return min(rows, key=lambda row: row.cost)


def _decisions(
    section: AttentionRecipe,
    allowed: Mapping[str, Sequence[AttentionFormat]],
    statistics: Mapping[str, AttentionStatistics],
) -> dict[str, FormatDecision]:
    return {
        name: _decide(section, name, rows, statistics.get(name))
        for name, rows in allowed.items()
        if len(rows) > 1
    }


def _decide(
    section: AttentionRecipe,
    name: str,
    rows: Sequence[AttentionFormat],
    seen: AttentionStatistics | None,
) -> FormatDecision:
    if seen is None:
        return FormatDecision(None, None, "calibration saw no call without a mask", {})
    keys = int(seen.call_keys.max())
    if keys < section.min_keys:
        return FormatDecision(None, None, f"{keys} keys, fewer than {section.min_keys}", {})
    if not takes_heads(seen.columns):
        return FormatDecision(None, None, f"heads of {seen.columns} columns", {})
    errors = seen.format_errors()
    if errors is None:
        raise RecipeError(
            f"attention.qk or pv auto: the calibration has no errors of formats for {name:.80}; "
            "run 'quantkit calibrate model' with this recipe, or give formats",
            fields=("attention", "calibration"),
        )
    told = {row: round(error, _DIGITS) for row, error in errors.items()}
    near = [row for row in rows if errors[row.name] <= section.error_budget]
    if not near:
        least = min(rows, key=lambda row: errors[row.name])
        why = f"{least.name}: error {errors[least.name]:.4f}, over {section.error_budget:g}"
        return FormatDecision(None, None, why, told)
    best = _fastest(near)
    return FormatDecision(best.name, told[best.name], _why(best, rows, errors), told)


def _why(
    best: AttentionFormat, rows: Sequence[AttentionFormat], errors: Mapping[str, float]
) -> str:
    """Return the errors of the chosen format and of the faster ones."""
    faster = [row for row in rows if row.cost < best.cost]
    refused = ", ".join(f"{row.name} {errors[row.name]:.4f}" for row in faster)
    return f"error {errors[best.name]:.4f}" + (f"; {refused}" if refused else "")
