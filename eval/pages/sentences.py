"""Short sentences of a report; verdict.py has the long ones."""

from collections.abc import Sequence

from quantkit.eval.judging.evaluation_result import Report
from quantkit.eval.judging.gates import Gate, State, state_of
from quantkit.eval.measuring.number_format import show, show_interval


def gate_remark(gate: Gate) -> str:
    """Return what else there is to know about a gate."""
    more = ""
    if gate.state is State.UNDECIDED:
        number = f"about {gate.prompts_needed}" if gate.prompts_needed else "more than 10,000"
        more = f"{number} prompts would decide"
    return "; ".join(part for part in (gate.note, more) if part)


def headline(gates: Sequence[Gate]) -> str:
    """Return the verdict in as few words as are true."""
    state = state_of(gates)
    if state is State.PASSED and any(gate.state is State.NOT_JUDGED for gate in gates):
        return "Passed what was measured."
    return f"{state.value.capitalize()}."


def lead(gates: Sequence[Gate]) -> str:
    """Return the verdict as one sentence, with the gates that decide it."""
    words, state = headline(gates), state_of(gates)
    if state is State.NOT_JUDGED:
        return f"{words[:-1]}: no gate was measured."
    told = [gate for gate in gates if gate.state is state]
    numbers = ", ".join(
        # The network's name stands in the tables.
        f"{gate.title.partition(' [')[0]} {_found(gate)} (expected {gate.expected})"
        for gate in told
    )
    needed = [gate.prompts_needed for gate in told if gate.prompts_needed]
    more = f"; about {max(needed)} prompts would decide" if needed else ""
    return f"{words[:-1]}: {numbers}{more}."


def _found(gate: Gate) -> str:
    """Return a gate's number with its interval."""
    tail = f" {show_interval(gate.interval)}" if gate.interval else ""
    return f"{show(gate.found, gate.unit)}{tail}"


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
