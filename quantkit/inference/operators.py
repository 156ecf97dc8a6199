"""The operations as ``torch.library`` operators: ``torch.compile`` sees through them.

Each has a fake implementation (shapes and dtypes only). What computes is ``device.ops.call``, which
chooses kernel or reference at run time, outside of any compiled graph. Codes are uint8 here; the
format's name says what they mean.

They are defined through ``torch.library.define``, whose dispatch costs a quarter of what
``torch.library.custom_op`` adds to every call. None has a gradient: packed layers are not trained.
"""

from typing import Any

import torch
from torch._ops import OpOverload

from quantkit.device.ops import call as execute
from quantkit.device.ops.op import Op
from quantkit.device.ops.table import OPS, name_for

Operator = OpOverload[..., Any]


def define(op: Op) -> Operator:
    """Return a new operator ``quantkit::NAME`` for a row of OPS."""
    qualified, count = f"quantkit::{op.name}", op.inputs
    # A list of numbers is no key of a prepared call.
    lists = "[]" in op.schema

    def run(*arguments: Any) -> Any:
        if lists:
            arguments = tuple(tuple(a) if type(a) is list else a for a in arguments)
        return execute.call(op, *arguments)

    def fake(*arguments: Any) -> Any:
        x, outputs = arguments[0], op.outputs(arguments[:count], arguments[count:])
        made = [x.new_empty(shape, dtype=dtype) for shape, dtype in outputs]
        return made[0] if len(made) == 1 else tuple(made)

    torch.library.define(qualified, op.schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "default", run)
    torch.library.register_fake(qualified, fake)
    operator: Operator = getattr(torch.ops.quantkit, op.name).default
    return operator


#: name of an operation -> its operator
OPERATORS: dict[str, Operator] = {name: define(op) for name, op in OPS.items()}


def operator_for(
    family: str, x_format: str, w_format: str = "", *, sparse: bool = False
) -> Operator:
    """Return the operator of the operation that ``name_for`` names."""
    return OPERATORS[name_for(family, x_format, w_format, sparse=sparse)]
