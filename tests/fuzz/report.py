"""What a run is told as: a table of kinds by verdicts, and the failures with what repeats them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from quantkit.cli.console import printable

from .cases import Outcome, Verdict

#: Failures of one kind that are told; all are in the JSON.
SHOWN = 3


def table(outcomes: Sequence[Outcome], *, by_kind: bool) -> str:
    """Return counts by family, or by kind, and verdict, in Markdown."""
    shown = [v for v in Verdict if not v.failed or any(o.verdict is v for o in outcomes)]
    rows: dict[str, Counter[Verdict]] = {}
    for outcome in outcomes:
        name = outcome.case.kind if by_kind else outcome.case.kind.split("/", 1)[0]
        rows.setdefault(name, Counter())[outcome.verdict] += 1
    rows = dict(sorted(rows.items())) if by_kind else rows
    total = sum(rows.values(), Counter())
    lines = [
        f"| {'kind' if by_kind else 'files'} | cases | {' | '.join(v.value for v in shown)} |",
        f"|---|{'---:|' * (len(shown) + 1)}",
    ]
    for name, counts in (*rows.items(), ("all", total)):
        cells = " | ".join(f"{counts[v]:,}" for v in shown)
        lines.append(f"| {name} | {counts.total():,} | {cells} |")
    return "\n".join(lines)


def failures(outcomes: Sequence[Outcome]) -> str:
    """Return the failures, kind by kind, each with the command that repeats it."""
    found: dict[tuple[str, Verdict], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.verdict.failed:
            found.setdefault((outcome.case.kind, outcome.verdict), []).append(outcome)
    lines = []
    for (kind, verdict), some in sorted(found.items(), key=lambda item: item[0][0]):
        lines.append(f"{kind}: {len(some)} x {verdict.value}")
        for outcome in some[:SHOWN]:
            lines += [f"    {printable(outcome.note[:300])}", f"    {command(outcome)}"]
    return "\n".join(lines)


def command(outcome: Outcome) -> str:
    """Return what repeats a case."""
    return f"python -m tests.fuzz --case '{outcome.case}'"


def to_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return every case as JSON values."""
    return [
        {
            "case": str(o.case),
            "verdict": o.verdict.value,
            "failed": o.verdict.failed,
            "note": o.note,
        }
        for o in outcomes
    ]
