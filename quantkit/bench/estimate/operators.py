"""How many multiplications an operator makes, and of which formats, by its operands' shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from quantkit.device.ops.table import find_op


@dataclass(frozen=True)
class Product:
    """Products of matrices: ``count`` of M tokens, N outputs and K summands."""

    #: linear, conv or attention
    kind: str
    #: f16 (and bfloat16), f32, fp8 or int8
    precision: str
    m: int
    n: int
    k: int
    count: int = 1
    #: 2:4 weights
    sparse: bool = False

    @property
    def flops(self) -> float:
        """Multiplications and additions, dropped weights included."""
        return 2.0 * self.count * self.m * self.n * self.k

    @staticmethod
    def attention(  # noqa: PLR0917  the axes of attention, in their order
        rows: int, queries: int, keys: int, head: int, value: int, precision: str = "f16"
    ) -> "Product":
        """Return the two products of attention of so many pictures' heads.

        K is half of what a query and a key multiply: columns of keys, then of values.
        """
        return Product("attention", precision, queries, keys, head + value, rows)


def product_of(name: str, args: Sequence[Any], result: Any) -> Product | None:
    """Return what a call of an operator multiplies; None for what multiplies no matrices.

    Args:
        name: as aten.addmm or quantkit.gemm_fp8.
        args: the operator's.
        result: tensors of the right shapes.
    """
    space, _, operator = name.partition(".")
    if space == "quantkit":
        return _own(operator, args, result)
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


#: Operators of quantkit whose first operand is the input and third the weight, by how they begin.
_WEIGHTED = ("gemm_", "geglu_", "conv_", "project_")


def _own(operator: str, args: Sequence[Any], result: Any) -> Product | None:
    if operator.startswith("attention_"):
        return _own_attention(operator, args)
    if operator == "gemm_w16":
        return _weight_only(args)
    if not operator.startswith(_WEIGHTED):
        return None
    x, w = args[0], args[2]
    sparse, halved = "_sparse" in operator, "w4a8" in operator
    n, k = w.shape[0], prod(w.shape[1:]) * (2 if sparse or halved else 1)
    is_conv = operator.startswith("conv_")
    # Windows overlap: their rows are those of the result.
    m = result.numel() // n if is_conv else x.numel() // k
    precision = "fp8" if "fp8" in operator else "int8"
    return Product("conv" if is_conv else "linear", precision, m, n, k, sparse=sparse)


def _weight_only(args: Sequence[Any]) -> Product:
    x, w = args[:2]
    return Product("linear", "f16", x.numel() // x.shape[-1], w.shape[0], x.shape[-1])


def _own_attention(operator: str, args: Sequence[Any]) -> Product:
    # Operands, then options: the first of these.
    q, keys = args[0], args[find_op(operator).inputs]
    rows, queries, columns = prod(q.shape[:-2]), q.shape[-2], q.shape[-1]
    precision = "fp8" if "fp8" in operator else "int8"
    return Product.attention(rows, queries, keys, columns, columns, precision)
