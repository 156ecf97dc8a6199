"""Short sentences of a report; verdict.py has the long ones."""

from collections.abc import Sequence

from .gates import Gate, passed
from .number_format import show
from .result import Report


def gate_remark(gate: Gate) -> str:
    """Return what else there is to know about a gate."""
    unsure = (
        "more prompts could change it: the interval includes the limit" if not gate.settled else ""
    )
    if gate.passed is None or gate.settled is None:
        unsure = ""
    return "; ".join(part for part in (gate.note, unsure) if part)


def headline(gates: Sequence[Gate]) -> str:
    """Return the verdict in as few words as are true."""
    results = {gate.passed for gate in gates}
    if False in results:
        return "Failed."
    if True not in results:
        return "Not judged."
    return "Passed what was measured." if None in results else "Passed."


def lead(gates: Sequence[Gate]) -> str:
    """Return the verdict as one sentence: the gates that fail, or all that hold."""
    words = headline(gates)
    told = [gate for gate in gates if gate.passed is not None]
    if not told:
        return f"{words[:-1]}: no gate was measured."
    if not passed(tuple(gates)):
        told = [gate for gate in told if not gate.passed]
    numbers = ", ".join(
        # The network's name stands in the tables.
        f"{gate.title.partition(' [')[0]} {show(gate.found, gate.unit)} (wanted {gate.wanted})"
        for gate in told
    )
    close = any(gate.settled is False for gate in told)
    return f"{words[:-1]}: {numbers}{'; more prompts could change this' * close}."


def kernel_sentence(report: Report) -> str:
    """Return which backends ran how often, and how far they were from reference."""
    kernels = report.kernels
    if report.quantized_by:
        return _tool_sentence(report)
    if not kernels.total:
        return "No packed layer ran."
    parts = [f"{count:,} on {backend}" for backend, count in kernels.by_backend.items()]
    if kernels.worst_deviation is None:
        return f"{kernels.total:,} calls: {', '.join(parts)}. {kernels.watched}"
    return (
        f"{kernels.total:,} calls: {', '.join(parts)}. Largest deviation from reference "
        f"{kernels.worst_deviation:.3g} of the rms, in {kernels.worst_layer} ({kernels.watched})."
    )


def _tool_sentence(report: Report) -> str:
    """Return which tool quantized what, and that quantkit neither computed nor checked it."""
    found: dict[str, list[str]] = {}
    for by in report.quantized_by:
        found.setdefault(by.words, []).append(by.component)
    parts = [f"{' and '.join(names)} by {words}" for words, names in found.items()]
    return (
        f"Quantized: {'; '.join(parts)}. The tool's own code loaded and computed it: no kernel of "
        "quantkit ran, and no layer was held against a reference."
    )
