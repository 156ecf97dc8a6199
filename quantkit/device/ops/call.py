"""Calling an operation on tensors: check, choose the back end, run, log.

On a GPU, a call whose operands have the shapes and dtypes of an earlier one goes straight to what
was prepared for that (gpu.gpu_calls).

Codes are uint8 tensors with the format's name beside them. Operands that are not contiguous, or do
not start on 16 bytes, are copied first: kernels read rows of plain memory.
"""

import logging
from functools import lru_cache
from typing import Any

from torch import Tensor

from quantkit.device import log
from quantkit.device.backends import Backend, sums_are_fast
from quantkit.device.choosing import choose
from quantkit.device.gpu import gpu_calls as calls
from quantkit.device.gpu.prepare import prepare, signature, why_not_direct
from quantkit.device.host.host_calls import run
from quantkit.device.ops.op import Detour, Op, Operands, Options, Problem

_logger = logging.getLogger(__name__)


def call(op: Op, *arguments: Any) -> Any:
    """Return what an operation writes: a tensor, or several in launch order.

    Args:
        op: a row of OPS.
        arguments: operands, then options, as the schema of ``op`` names them.

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    operands, options = arguments[: op.inputs], arguments[op.inputs :]
    key = signature(op.name, operands, (options, sums_are_fast()))
    if key and (ready := calls.find(key)):
        found = ready(*operands)
    else:
        found = _run(op, operands, options, key)
    return found[0] if len(found) == 1 else tuple(found)


def prepared(op: str, operands: Operands, options: Options) -> calls.Call | None:
    """Return what ``call`` runs on a GPU for operands like these, once it has run it."""
    key = signature(op, operands, (options, sums_are_fast()))
    return calls.find(key) if key else None


def _run(op: Op, operands: Operands, options: Options, key: calls.Signature) -> list[Tensor]:
    """Return what ``op`` writes where no call is prepared."""
    problem = op.check(op, operands, options)
    outputs = op.outputs(operands, options)
    x = operands[0]
    assert x is not None
    if any(0 in shape for shape, _ in outputs):
        return [x.new_empty(shape, dtype=dtype) for shape, dtype in outputs]
    choice = choose(op.name, x.device, k=problem.k, group_scales=problem.group_scales)
    if reason := _why_detour(op, problem, choice.backend, x):
        return _go_round(op, operands, options, reason)
    if choice.backend is Backend.REFERENCE:
        _say(op.name, f"runs on the reference: {choice.reason}")
        log.note(op.name, "_".join(word for word in problem.words if word), Backend.REFERENCE)
        result = op.reference(*operands, *options)
        return list(result) if isinstance(result, tuple) else [result]
    if choice.backend is Backend.GPU:
        return prepare(op, problem, operands, outputs, key)(*operands)
    return run(op, problem, operands, outputs)


def _why_detour(op: Op, problem: Problem, backend: Backend, x: Tensor) -> str:
    """Return why another operation computes this; empty when ``op`` does it itself."""
    if op.detour is None:
        return ""
    if backend is Backend.REFERENCE:
        return "no kernel runs here"
    return why_not_direct(op, problem, x)


def _go_round(op: Op, operands: Operands, options: Options, reason: str) -> list[Tensor]:
    assert op.detour is not None
    way: Detour = op.detour(op, operands, options)
    _say(op.name, f"runs as {way.op.name}: {reason}")
    y: Tensor = call(way.op, *way.operands, *way.options)
    return [y.reshape(way.shape)]


@lru_cache(maxsize=1024)
def _say(op: str, what: str) -> None:
    _logger.info("%s %s", op, what)
