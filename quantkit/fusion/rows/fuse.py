"""Putting row kernels in a program, where several calls become one."""

from concurrent.futures import ThreadPoolExecutor

from quantkit.device.gpu.kernel import GeneratedKernel
from quantkit.fusion.program import Program, Value
from quantkit.fusion.rows.row_groups import RowGroup, with_row_kernels
from quantkit.fusion.rows.row_kernel import RowKernel
from quantkit.fusion.rows.row_nodes import Codes, Node
from quantkit.fusion.rows.row_source import source_of
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
    fused = with_row_kernels(program, lambda one: _kernel_of(program, one))
    operators = (call.operator for call in fused.calls)
    kernels = {str(one): one for one in operators if isinstance(one, RowKernel)}
    with ThreadPoolExecutor(max_workers=cores()) as pool:
        list(pool.map(RowKernel.load, kernels.values()))
    return fused


def _kernel_of(program: Program, one: RowGroup) -> RowKernel:
    source = source_of(one.rows, one.outputs, lambda value: _is_aligned(program, value))
    pointers = len(one.reads) + len(one.outputs)
    kernel = GeneratedKernel(source.symbol, source.text, source.blocks, source.threads, pointers)
    layouts = tuple(program.layouts[value] for value in one.outputs)
    return RowKernel(kernel, layouts, tuple(map(_format_of, one.outputs.values())))


def _format_of(node: Node) -> str:
    return node.format_name if isinstance(node, Codes) else ""


def _is_aligned(program: Program, value: Value) -> bool:
    constant = program.constants.get(value)
    if constant is not None:
        return constant.data_ptr() % _ALIGNED == 0
    layout = program.layouts[value]
    return layout.offset * layout.dtype.itemsize % _ALIGNED == 0
