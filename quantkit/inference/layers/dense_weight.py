"""``layer.weight`` of a packed layer: the dense weight, for code that reads it directly.

Adapters multiply a weight themselves, processors cast to its dtype, modules hand it to functions of
torch. They get a tensor of the dense shape, in the compute dtype. Its values are dequantized for
the operation that reads them, and not kept; writes to it would be lost.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from quantkit.errors import InputError

#: What looks into a tensor's memory, and so needs one that has some.
_OF_MEMORY = frozenset({
    Tensor.__array__, Tensor.__deepcopy__, Tensor.__dlpack__, Tensor.__reduce_ex__,
    Tensor.__repr__, Tensor.data_ptr, Tensor.numpy, Tensor.tolist, Tensor.untyped_storage,
})  # fmt: skip
_TENSOR: Any = Tensor
_SETTERS = (_TENSOR.data.__set__, _TENSOR.grad.__set__)
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class DenseWeight(Tensor):
    """A weight that each operation dequantizes again; views of it refuse writes, too."""

    #: nn.Parameter's own sign, by which ``get_parameter`` takes it
    _is_param = True
    layer: str
    make: Callable[[], Tensor]

    @staticmethod
    def of(
        layer: str, make: Callable[[], Tensor], like: Tensor, device: torch.device
    ) -> "DenseWeight":
        """Return a weight.

        Args:
            layer: its name, for messages.
            make: returns the values.
            like: has their shape, strides and dtype.
            device: of the codes.
        """
        made: DenseWeight = Tensor._make_wrapper_subclass(  # noqa: SLF001  torch's way
            DenseWeight, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made.layer, made.make = layer, make
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what replaces the values, and give memory to what looks for it.

        Raises:
            InputError: naming the layer.
        """
        del types
        if func in _SETTERS:
            raise InputError(_refusal(args[0]))
        if func in _OF_MEMORY:
            args = tree_map(_values, args)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  as Tensor's own does
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as an instance's
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the values, if it only reads them.

        Raises:
            InputError: naming the layer.
        """
        del types
        if (target := _written(func, args, kwargs or {})) is not None:
            raise InputError(_refusal(target))
        first = args[0] if args else None
        if func in _SAME and isinstance(first, DenseWeight):
            return DenseWeight.of(first.layer, first.make, first, first.device)
        result = func(*tree_map(_values, args), **tree_map(_values, kwargs or {}))
        if func.is_view and isinstance(first, DenseWeight):
            name = first.layer
            return tree_map(lambda v: DenseWeight.of(name, lambda: v, v, v.device), result)
        return result


@torch.no_grad()
def _values(value: Any) -> Any:
    return value.make() if isinstance(value, DenseWeight) else value


def _written(func: Any, args: Any, kwargs: Any) -> DenseWeight | None:
    """Return the weight that an operator would write to; None where it writes to none."""
    schema = func._schema  # noqa: SLF001  nothing else says it
    if not schema.is_mutable:
        return None
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    for argument in schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for leaf in tree_leaves((given | kwargs).get(argument.name)):
            if isinstance(leaf, DenseWeight):
                return leaf
    return None


def _refusal(weight: DenseWeight) -> str:
    return refusal(weight.layer)


def refusal(layer: str) -> str:
    """Return why nothing is written to a layer's weight, and what to do."""
    return (
        f"{layer}.weight: is packed: it is read, and codes take nothing in; leave out what writes "
        "to it (merge, fuse, an adapter's first values), or change the 16-bit model and pack that, "
        "or call model.dequantize()"
    )
