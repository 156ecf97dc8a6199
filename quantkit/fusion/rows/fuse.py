"""Putting row kernels in a program, where several calls become one."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from quantkit.device.gpu.kernel import GeneratedKernel
from quantkit.fusion.program import Call, Program, Value, values_in
from quantkit.fusion.rows.grouping import Group, group
from quantkit.fusion.rows.lowering import Rows
from quantkit.fusion.rows.row_kernel import RowKernel
from quantkit.fusion.rows.row_nodes import Codes, Load, Node
from quantkit.fusion.rows.row_source import source_of
from quantkit.fusion.rows.schedule import Schedule
from quantkit.fusion.simplify import without_unread
from quantkit.storage.system import cores

#: Kernels load and store 16 bytes at once.
_ALIGNED = 16


def fuse_rows(program: Program) -> Program:
    """Put row kernels in a program.

    Chains of elementwise operators and of reductions and norms of rows, up to the codes that a
    product reads, become one generated kernel each: float32 within, rounded once. All kernels are
    compiled and loaded when this returns.

    Raises:
        KernelError: one cannot be compiled.
    """
    groups = group(program)
    fused = {one: one.rows for one in groups if one.rows is not None and len(one.calls) > 1}
    read = _read_outside(program, groups, fused)
    calls: list[Call] = []
    for one in groups:
        if (rows := fused.get(one)) is None:
            calls.extend(program.calls[place] for place in one.calls)
            continue
        calls.append(_kernel_call(program, rows, read))
    kernels = {str(c.operator): c.operator for c in calls if isinstance(c.operator, RowKernel)}
    with ThreadPoolExecutor(max_workers=cores()) as pool:
        list(pool.map(RowKernel.load, kernels.values()))
    return without_unread(replace(program, calls=tuple(calls)))


def _read_outside(
    program: Program, groups: Iterable[Group], fused: Mapping[Group, Rows]
) -> frozenset[Value]:
    """Return the values that are read from memory, and those that they are views of."""
    read = {*values_in(program.output)}
    for one in groups:
        if (rows := fused.get(one)) is not None:
            nodes = Schedule(tuple(rows.nodes.values())).everything
            read |= {node.value for node in nodes if isinstance(node, Load)}
        else:
            kept = (program.calls[place] for place in one.calls)
            read |= {value for call in kept if not _is_view(call) for value in call.reads}
    for call in reversed(program.calls):
        if _is_view(call) and not read.isdisjoint(filter(None, call.results)):
            read |= {*call.reads}
    return frozenset(read)


def _is_view(call: Call) -> bool:
    return not call.fresh and not call.writes


def _kernel_call(program: Program, rows: Rows, read: frozenset[Value]) -> Call:
    """Return the call of a kernel that writes what others read of rows."""
    outputs = {value: node for value, node in rows.nodes.items() if value in read}
    source = source_of(rows, outputs, lambda value: _is_aligned(program, value))
    pointers = len(source.reads) + len(source.writes)
    kernel = GeneratedKernel(source.symbol, source.text, source.blocks, source.threads, pointers)
    layouts = tuple(program.layouts[value] for value in source.writes)
    formats = tuple(_format_of(outputs[value]) for value in source.writes)
    operator = RowKernel(kernel, layouts, formats)
    return Call(operator, source.reads, {}, source.writes, writes=False, fresh=True)


def _format_of(node: Node) -> str:
    return node.format_name if isinstance(node, Codes) else ""


def _is_aligned(program: Program, value: Value) -> bool:
    constant = program.constants.get(value)
    if constant is not None:
        return constant.data_ptr() % _ALIGNED == 0
    layout = program.layouts[value]
    return layout.offset * layout.dtype.itemsize % _ALIGNED == 0
