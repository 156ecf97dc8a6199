"""Preparing GPU calls: the kernel from the operands of an operation, sizes and outputs."""

from torch import Tensor

from quantkit.device import backends
from quantkit.device.gpu import gpu_calls as calls
from quantkit.device.gpu.devices import find_device
from quantkit.device.gpu.gpu_calls import Call, Signature
from quantkit.device.gpu.kernel_choice import choose_kernel, why_detour
from quantkit.device.ops.op import Op, Operands, Output, Problem


def signature(op: str, operands: Operands, options: tuple[object, ...]) -> Signature:
    """Return the key of a prepared GPU call; empty where none may be used."""
    usable = _first(operands).is_cuda and backends.is_free()
    return calls.signature(op, operands, options) if usable else ()


def prepare(
    op: Op, problem: Problem, operands: Operands, outputs: tuple[Output, ...], key: Signature
) -> Call:
    """Return the prepared call of an operation, kept under ``key``.

    Args:
        op: what is computed.
        problem: of these operands.
        operands: the arguments that the kernel reads, in launch order.
        outputs: what it writes.
        key: of this call; empty where it is not to be kept.

    Raises:
        KernelError: the kernel cannot be compiled or loaded.
    """
    device = find_device(_first(operands).get_device())
    accurate = not backends.sums_are_fast()
    kernel = choose_kernel(device, op, problem.words, problem.sizes, accurate=accurate)
    nulls = [index for index, tensor in enumerate(operands) if tensor is None]
    call = Call(device, kernel, problem.sizes, outputs, nulls)
    return calls.keep(key, call) if key else call


def why_not_direct(op: Op, problem: Problem, x: Tensor) -> str:
    """Return why kernels do not take these sizes where ``x`` is; empty when they do."""
    device = find_device(x.get_device()) if x.is_cuda else None
    return why_detour(device, op, problem.words, problem.sizes)


def _first(operands: Operands) -> Tensor:
    assert operands[0] is not None
    return operands[0]
