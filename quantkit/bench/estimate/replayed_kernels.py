"""The kernels of a replayed step: of a program that was made shorter, with row kernels."""

from quantkit.bench.estimate.estimated_kernels import Kernel, once, separate
from quantkit.bench.estimate.tracing import View, calls_of, view_of
from quantkit.bench.kernels.operator_costs import SMALL
from quantkit.fusion.program import Call, Program, Value
from quantkit.fusion.rows.row_groups import RowGroup, with_row_kernels


def replayed(program: Program) -> tuple[Kernel, ...]:
    """Return the kernels of a step that is replayed: generated ones, and one for each other call.

    Args:
        program: a simplified one.
    """
    found: list[Kernel] = []
    for call in with_row_kernels(program, lambda group: group).calls:
        if isinstance(call.operator, RowGroup):
            found.append(_row_kernel(call, program))
        else:
            found.extend(separate(calls_of([call], program.layouts)))
    return tuple(found)


def _row_kernel(call: Call, program: Program) -> Kernel:
    """Return the kernel of a group, in the group that a profile has all generated ones in."""
    group: RowGroup = call.operator
    members = separate(calls_of((program.calls[at] for at in group.calls), program.layouts))

    def views(values: tuple[Value, ...]) -> tuple[View, ...]:
        return once([view_of(program.layouts[value]) for value in values])

    return Kernel(
        SMALL,
        tuple(name for member in members for name in member.names),
        views(group.reads),
        views(tuple(group.outputs)),
        instructions=sum(member.instructions for member in members),
        summed=group.rows.columns is not None,
    )
