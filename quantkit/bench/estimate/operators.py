"""How many multiplications an operator makes, and of which formats, by its operands' shapes."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from quantkit.bench.estimate.own_operators import own_product
from quantkit.bench.estimate.products import Product


def product_of(name: str, args: Sequence[Any], result: Any) -> Product | None:
    """Return what a call of an operator multiplies; None for what multiplies no matrices.

    Args:
        name: as aten.addmm or quantkit.gemm_fp8.
        args: the operator's.
        result: tensors of the right shapes.
    """
    space, _, operator = name.partition(".")
    if space == "quantkit":
        return own_product(operator, args)
    read = _ATEN.get(operator)
    return None if read is None else read(args, result)


def _matrices(x: Tensor, w: Tensor) -> Product:
    return Product("linear", _precision(x), x.shape[-2], w.shape[-1], x.shape[-1])


def _batched(x: Tensor, w: Tensor) -> Product:
    return Product("linear", _precision(x), x.shape[1], w.shape[2], x.shape[2], x.shape[0])


def _convolution(x: Tensor, w: Tensor, result: Tensor) -> Product:
    outputs = w.shape[0]
    rows = result.numel() // outputs if outputs else 0
    return Product("conv", _precision(x), rows, outputs, prod(w.shape[1:]))


_ATEN: dict[str, Callable[[Sequence[Any], Any], Product]] = {
    "mm": lambda args, _: _matrices(args[0], args[1]),
    "addmm": lambda args, _: _matrices(args[1], args[2]),
    "bmm": lambda args, _: _batched(args[0], args[1]),
    "baddbmm": lambda args, _: _batched(args[1], args[2]),
    "convolution": lambda args, result: _convolution(args[0], args[1], result),
}


def _precision(x: Tensor) -> str:
    return "f16" if x.element_size() == 2 else "f32"
