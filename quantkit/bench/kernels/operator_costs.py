"""Costs of operators: products of torch's, and a row for each family of quantkit's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from quantkit.bench.kernels.matrix_product import Product
from quantkit.device.ops.op import Op
from quantkit.device.ops.table import OPS
from quantkit.numerics.conv_windows import ConvShape
from quantkit.numerics.formats import INT8

#: The groups that kernels are in.
PRODUCTS, ATTENTION, NORMS, SMALL = "products", "attention", "norms", "elementwise and copies"

#: Integers of a call by name, or a convolution, to its product.
_Reader = Callable[[Op, Any], Product]


@dataclass(frozen=True)
class Cost:
    """Of a call."""

    group: str
    #: of the vector unit, for an element of the largest tensor
    instructions: int = 0
    #: it sums over rows, which takes longer to start and to end
    summed: bool = False
    #: None for what multiplies no matrices
    product: _Reader | None = None


def cost_of(name: str) -> Cost | None:
    """Return the costs of an operator, as quantkit.gemm_fp8; None where it is not quantkit's."""
    space, _, operator = name.partition(".")
    return COSTS[OPS[operator].family] if space == "quantkit" else None


def product_of(name: str, args: Sequence[Any], result: Any) -> Product | None:
    """Return what a call of an operator multiplies; None for what multiplies no matrices.

    Args:
        name: as aten.addmm or quantkit.gemm_fp8.
        args: the operator's.
        result: tensors of the right shapes.
    """
    space, _, operator = name.partition(".")
    if space == "quantkit":
        return _own_product(operator, args)
    read = _ATEN.get(operator)
    return None if read is None else read(args, result)


def _own_product(operator: str, args: Sequence[Any]) -> Product | None:
    """Return what a call of an operation multiplies, by the sizes that its row finds."""
    op = OPS[operator]
    read = COSTS[op.family].product
    if read is None:
        return None
    # Lists of numbers come from torch, and are no keys.
    given: list[Any] = [tuple(arg) if type(arg) is list else arg for arg in args]
    problem = op.check(op, tuple(given[: op.inputs]), tuple(given[op.inputs :]))
    return read(op, problem.sizes)


def _gemm(op: Op, sizes: dict[str, int]) -> Product:
    n = sizes["n"] * op.rows_per_column
    return Product("linear", _precision(op), sizes["m"], n, sizes["k"], sparse=op.sparse)


def _conv(op: Op, sizes: ConvShape) -> Product:
    tall, wide = sizes.outputs
    m, precision = sizes.batch * tall * wide, _precision(op)
    # One of single pixels runs as a GEMM.
    kind = "linear" if sizes.windows.are_pixels else "conv"
    return Product(kind, precision, m, sizes.n, sizes.k, sparse=op.sparse)


def _weight_only(_: Op, sizes: dict[str, int]) -> Product:
    return Product("linear", "f16", sizes["m"], sizes["n"], sizes["k"])


def _attention(op: Op, sizes: dict[str, int]) -> Product:
    # With probabilities in 16 bit most of the time is theirs.
    precision = "f16" if op.family == "attention_f16" else _precision(op)
    columns = sizes["k"]
    return Product.attention(sizes["n"], sizes["m"], sizes["keys"], columns, columns, precision)


def _precision(op: Op) -> str:
    return "int8" if op.words("QK_X_FORMAT") == (INT8.name,) else "fp8"


#: Instructions are counted in the kernels' sources: conversions, divisions and polynomials as
#: compilers write them out. Those of products are in the shares of their peak, but for gelu's.
COSTS: Mapping[str, Cost] = {
    "gemm": Cost(PRODUCTS, product=_gemm),
    "gemm_residual": Cost(PRODUCTS, product=_gemm),
    "conv": Cost(PRODUCTS, product=_conv),
    "conv_residual": Cost(PRODUCTS, product=_conv),
    "geglu": Cost(PRODUCTS, product=_gemm),
    "project_gelu": Cost(PRODUCTS, 40, product=_gemm),
    "gemm_w16": Cost(PRODUCTS, product=_weight_only),
    "project_codes": Cost(PRODUCTS, product=_gemm),
    "project_values": Cost(PRODUCTS, product=_gemm),
    "project_heads": Cost(PRODUCTS, product=_gemm),
    "attention": Cost(ATTENTION, product=_attention),
    "attention_codes": Cost(ATTENTION, product=_attention),
    "attention_f16": Cost(ATTENTION, product=_attention),
    "head_codes": Cost(ATTENTION, 30),
    "value_codes": Cost(ATTENTION, 20),
    "value_codes_f16": Cost(ATTENTION, 10),
    "stream_codes": Cost(ATTENTION, 30),
    "joint_heads": Cost(ATTENTION, 20),
    "head_partials": Cost(ATTENTION, 5, summed=True),
    "head_factors": Cost(ATTENTION, 4, summed=True),
    "quantize_static": Cost(SMALL, 20),
    "quantize_token": Cost(SMALL, 24, summed=True),
    "quantize_windows": Cost(SMALL, 32, summed=True),
    "group_partials": Cost(NORMS, 4, summed=True),
    "group_norm": Cost(NORMS, 30),
    "group_norm_codes": Cost(NORMS, 40),
    "observe_columns": Cost(SMALL, 10, summed=True),
    "observe_pictures": Cost(SMALL, 10, summed=True),
}


def _matrices(x: Tensor, w: Tensor) -> Product:
    return Product("linear", _width(x), x.shape[-2], w.shape[-1], x.shape[-1])


def _batched(x: Tensor, w: Tensor) -> Product:
    return Product("linear", _width(x), x.shape[1], w.shape[2], x.shape[2], x.shape[0])


def _convolution(x: Tensor, w: Tensor, result: Tensor) -> Product:
    outputs = w.shape[0]
    rows = result.numel() // outputs if outputs else 0
    return Product("conv", _width(x), rows, outputs, prod(w.shape[1:]))


def _torch_attention(query: Tensor, key: Tensor, value: Tensor) -> Product:
    batch, heads, queries, columns = query.shape
    return Product.attention(batch * heads, queries, key.shape[-2], columns, value.shape[-1])


_ATEN: dict[str, Callable[[Sequence[Any], Any], Product]] = {
    "mm": lambda args, _: _matrices(args[0], args[1]),
    "addmm": lambda args, _: _matrices(args[1], args[2]),
    "bmm": lambda args, _: _batched(args[0], args[1]),
    "baddbmm": lambda args, _: _batched(args[1], args[2]),
    "_scaled_dot_product_efficient_attention": lambda args, _: _torch_attention(*args[:3]),
    "convolution": lambda args, result: _convolution(args[0], args[1], result),
}


def _width(x: Tensor) -> str:
    return "f16" if x.element_size() == 2 else "f32"
