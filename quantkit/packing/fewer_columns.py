"""Choosing how many columns of queries and keys each attention module multiplies."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quantkit.calibration.attention_statistics import AttentionStatistics
from quantkit.calibration.column_errors import errors_of_module, relative
from quantkit.checkpoint.column_decisions import ColumnDecision
from quantkit.errors import RecipeError
from quantkit.numerics.attention_formats import AttentionFormat
from quantkit.packing.attention_speed import HAS_KERNEL, LEAST_GAIN, gain
from quantkit.recipe.attention import AttentionRecipe

#: Digits of what is told of a head.
_DIGITS = 4


@dataclass(frozen=True)
class Treatment:
    """One way to multiply fewer columns, in one module."""

    #: as ``ColumnErrors`` has it: ``rank 32``, or ``2:4``
    name: str
    #: relative, of the module's output on held-out prompts; None: was not measured
    error: float | None
    #: 0.1: a tenth more in the same time, by ``attention_speed``
    gain: float

    @property
    def rank(self) -> int | None:
        """How many columns are multiplied; None: two of every four of the keys."""
        kind, _, number = self.name.partition(" ")
        return int(number) if kind == "rank" else None

    def __str__(self) -> str:
        """Return its name."""
        return self.name


class Decision(NamedTuple):
    """What was chosen for a module."""

    #: None: all columns are multiplied
    chosen: Treatment | None
    #: what the header says of it
    told: ColumnDecision


def decide(
    section: AttentionRecipe,
    statistics: Mapping[str, AttentionStatistics],
    formats: Mapping[str, AttentionFormat],
) -> dict[str, Decision]:
    """Return what was chosen for the modules that have a basis, by path; entropy decides nothing.

    With ``sparse_k: auto`` the others are told of, too.

    Args:
        section: of the recipe; empty where its ``sparse_k`` is none.
        statistics: by module, of those whose attention is on codes.
        formats: of the same modules.

    Raises:
        RecipeError: no module's errors were measured, and the recipe insists on fewer columns.
    """
    if section.sparse_k == "none":
        return {}
    measured = any(of_module.errors() for of_module in statistics.values())
    if not measured and section.sparse_k != "auto":
        raise RecipeError(
            f"attention.sparse_k {section.sparse_k}: the calibration has no errors of fewer "
            "columns; run 'quantkit rotate', and pack the model that it writes with the "
            "calibration beside it, or drop sparse_k",
            fields=("calibration",),
        )
    found = {name: _decide(section, s, formats[name].pv_word) for name, s in statistics.items()}
    told = section.sparse_k == "auto"
    return {name: d for name, d in found.items() if told or statistics[name].errors() is not None}


def _decide(section: AttentionRecipe, seen: AttentionStatistics, pv: str) -> Decision:
    pooled, lost = seen.pooled(), seen.errors()
    shares = _rounded(pooled.entropy[0]), _rounded(pooled.locality[0])
    if lost is None:
        why = "no basis of its own; 'quantkit rotate' gives one where there can be one"
        return Decision(None, ColumnDecision(None, None, None, why, *shares, {}))
    power = lost["power"]
    named = [f"rank {rank}" for rank in lost["ranks"].tolist()]
    rows = [*lost["rank_lost"], *lost["sparse_lost"]]
    by_head = {
        name: _rounded(relative(row, power))
        for name, row in zip([*named, "2:4"], rows, strict=False)
    }
    errors, keys = errors_of_module(lost), int(seen.call_keys.max())
    ways = list(_treatments(section, errors, seen.columns, keys, pv))
    chosen, reason = _choose(section, ways)
    told = ColumnDecision(
        None if chosen is None else str(chosen),
        None if chosen is None else chosen.error,
        None if chosen is None else round(chosen.gain, _DIGITS),
        reason,
        *shares,
        by_head,
    )
    return Decision(chosen, told)


def _rounded(values: Any) -> tuple[float, ...]:
    return tuple(round(value, _DIGITS) for value in values.tolist())


def _treatments(
    section: AttentionRecipe, errors: Mapping[str, float], columns: int, keys: int, pv: str
) -> Iterator[Treatment]:
    """Yield the ways that the recipe allows."""
    if section.rank is not None:
        if section.rank < columns:
            name = f"rank {section.rank}"
            yield Treatment(name, errors.get(name), gain(columns, keys, name, pv))
        return
    for name, error in errors.items():
        kind = name.partition(" ")[0]
        if section.sparse_k == kind or (section.sparse_k == "auto" and HAS_KERNEL[kind]):
            yield Treatment(name, error, gain(columns, keys, name, pv))


def _choose(section: AttentionRecipe, treatments: list[Treatment]) -> tuple[Treatment | None, str]:
    """Return the fastest way within the budget, and why; None where all columns are multiplied."""
    if not treatments:
        return None, "heads have no columns to leave out"
    if section.rank is not None:
        return treatments[0], f"the recipe's rank, gains {treatments[0].gain:.1%}"
    fast = [t for t in treatments if t.gain >= LEAST_GAIN]
    if not fast:
        most = max(treatments, key=lambda t: t.gain)
        return None, f"{most} gains {most.gain:.1%}, less than {LEAST_GAIN:.0%}"
    near = [t for t in fast if t.error is not None and t.error <= section.error_budget]
    if not near:
        least = min(fast, key=lambda t: t.error or 0.0)
        return None, f"{least}: error {least.error:.4f}, over {section.error_budget:g}"
    best = max(near, key=lambda t: t.gain)
    return best, f"error {best.error:.4f}, gains {best.gain:.1%}"
