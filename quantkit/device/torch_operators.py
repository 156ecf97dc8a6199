"""The operations as ``torch.library`` operators, which ``torch.compile`` traces.

Each has a fake implementation (shapes and dtypes only). What computes is ``device.ops.call``, which
chooses kernel or reference at run time, outside of any compiled graph. Codes are uint8 here; the
format's name says what they mean.

They are defined through ``torch.library.define``, whose dispatch costs a quarter of what
``torch.library.custom_op`` adds to every call. None has a gradient: packed layers are not trained.
Where nothing looks at what is dispatched, calls leave it out: it takes as long as all the rest.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack  # what looks at calls has no public sign
from torch._C._autograd import _profiler_enabled
from torch._ops import OpOverload

from quantkit.device.ops import call as execute
from quantkit.device.ops.op import Op
from quantkit.device.ops.table import OPS, name_for

Operator = Callable[..., Any]


def define(op: Op) -> OpOverload[..., Any]:
    """Return a new operator ``quantkit::NAME`` for a row of OPS."""
    qualified, count = f"quantkit::{op.name}", op.inputs

    def fake(*arguments: Any) -> Any:
        x, outputs = arguments[0], op.outputs(arguments[:count], arguments[count:])
        made = [x.new_empty(shape, dtype=dtype) for shape, dtype in outputs]
        return made[0] if len(made) == 1 else tuple(made)

    torch.library.define(qualified, op.schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "default", runner(op))
    torch.library.register_fake(qualified, fake)
    overload: OpOverload[..., Any] = getattr(torch.ops.quantkit, op.name).default
    return overload


def runner(op: Op) -> Operator:
    """Return the function that computes a row of OPS."""

    def run(*arguments: Any) -> Any:
        return execute.call(op, *arguments)

    def run_lists(*arguments: Any) -> Any:
        # A list of numbers is no key of a prepared call.
        return run(*(tuple(a) if type(a) is list else a for a in arguments))

    return run_lists if "[]" in op.schema else run


def callable_of(op: Op, overload: Operator) -> Operator:
    """Return a function that calls an operator, or its implementation where that is the same."""
    run = runner(op)

    def operator(*arguments: Any) -> Any:
        return run(*arguments) if is_plain_call(arguments[0]) else overload(*arguments)

    return operator


def is_plain_call(x: object) -> TypeGuard[Tensor]:
    """Tell whether a call on a tensor is not traced, faked, profiled or differentiated."""
    return not (
        torch.compiler.is_compiling()
        or _profiler_enabled()
        or torch.is_grad_enabled()
        or type(x) is not Tensor
        or _len_torch_dispatch_stack()
    )


#: name of an operation -> its operator, as torch has it
OVERLOADS: dict[str, OpOverload[..., Any]] = {name: define(op) for name, op in OPS.items()}
#: name of an operation -> its operator
OPERATORS: dict[str, Operator] = {
    name: callable_of(op, OVERLOADS[name]) for name, op in OPS.items()
}


def operator_for(
    family: str, x_format: str, w_format: str = "", *, sparse: bool = False
) -> Operator:
    """Return the operator of the operation that ``name_for`` names."""
    return OPERATORS[name_for(family, x_format, w_format, sparse=sparse)]
