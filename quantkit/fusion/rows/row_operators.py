"""The operators that row kernels compute: elementwise ones, norms, pairs of columns, and codes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from quantkit.device.ops.table import name_for
from quantkit.device.torch_operators import OVERLOADS
from quantkit.fusion.program import Call, Layout, Value
from quantkit.fusion.rows.access import access_of, is_of_rows
from quantkit.fusion.rows.expressions import EXPRESSIONS, expression_of, number
from quantkit.fusion.rows.lowering import NotARowError, Rows
from quantkit.fusion.rows.row_nodes import (
    FLOATS,
    Codes,
    Concatenated,
    Joined,
    Level,
    Load,
    Map,
    Node,
    Piece,
    Reduce,
    Reduction,
    Second,
)
from quantkit.numerics.formats import find_format

_ATEN = torch.ops.aten
#: One format of each kind of codes.
_CODES = ("e4m3fn", "int8")
#: The rows that it needs, and the nodes of its results.
_Lowered = tuple[Rows, dict[Value, Node]]
Lowering = Callable[[Rows, Call], _Lowered]


def lower(rows: Rows, call: Call) -> Rows:
    """Return the rows with the results of a call.

    Raises:
        NotARowError: they cannot compute it.
    """
    lowering, sources = OPERATORS.get(call.operator), rows.sources
    results = [result for result in call.results if result is not None]
    if lowering is None or not sources.is_settled(call):
        raise NotARowError
    given, nodes = lowering(rows, call)
    if any(result in sources.read and result not in nodes for result in results):
        raise NotARowError
    return replace(given, nodes={**given.nodes, **nodes})


def places_of(call: Call, layouts: Mapping[Value, Layout]) -> int:
    """Return the places of the smallest rows that may compute a call; 0 where none does."""
    if call.operator not in OPERATORS:
        return 0
    tensors = [value for value in (*call.reads, *call.results) if value is not None]
    return max(
        layouts[v].numel * (2 if layouts[v].dtype is torch.complex64 else 1) for v in tensors
    )


def _elementwise(rows: Rows, call: Call) -> _Lowered:
    result = call.result
    layout = rows.layout(result)
    if layout.dtype is torch.complex64:
        return rows, {result: _complex_product(rows, call, layout)}
    if layout.dtype not in FLOATS:
        raise NotARowError
    level = rows.level_of(layout)
    nodes = tuple(rows.argument(value, layout, level) for value in call.reads)
    try:
        return rows, {result: Map(level, expression_of(call), nodes)}
    except (KeyError, TypeError):
        raise NotARowError from None


def _complex_product(rows: Rows, call: Call, layout: Layout) -> Node:
    """Return the real and imaginary parts in turns."""
    complex_ = [rows.layout(value).dtype is torch.complex64 for value in call.reads]
    if call.operator is not _ATEN.mul.Tensor or complex_ != [True, True]:
        raise NotARowError
    a, b = (rows.argument(value, layout, rows.level_of(layout)) for value in call.reads)
    parts = tuple(Second(Level.HALF, odd, node) for node in (a, b) for odd in (False, True))
    real = Map(Level.HALF, "({0} * {2} - {1} * {3})", parts)
    return Joined(Level.FULL, real, Map(Level.HALF, "({0} * {3} + {1} * {2})", parts))


def _reduction(rows: Rows, call: Call) -> _Lowered:
    x, axes, *_ = call.arguments
    result = call.result
    of, layout = rows.layout(x), rows.layout(result)
    if axes is None or not of.shape or call.keywords or layout.dtype not in FLOATS:
        raise NotARowError
    reduced = {axis % len(of.shape) for axis in axes}
    columns = prod(of.shape[axis] for axis in reduced)
    rows = rows.with_columns(columns)
    access = access_of(_kept(layout, of, reduced), of)
    if access is None or not is_of_rows(access, columns):
        raise NotARowError
    mean = call.operator is _ATEN.mean.dim
    total = _sum(rows.argument(x, of, rows.level_of(of)))
    return rows, {result: _scaled(total, 1 / columns) if mean else total}


def _kept(layout: Layout, of: Layout, reduced: Iterable[int]) -> Layout:
    """Return the layout of a reduction with the reduced axes kept, of one element each."""
    if len(layout.shape) == len(of.shape):
        return layout
    strides = iter(layout.strides)
    shape = tuple(1 if axis in reduced else size for axis, size in enumerate(of.shape))
    kept = tuple(0 if axis in reduced else next(strides) for axis in range(len(of.shape)))
    return replace(layout, shape=shape, strides=kept)


def _rms_norm(rows: Rows, call: Call) -> _Lowered:
    x, shape, weight, eps = (*call.arguments, None, None)[:4]
    if eps is None:
        eps = torch.finfo(rows.layout(x).dtype).eps
    rows = rows.with_columns(prod(shape))
    result, node = _input(rows, x, call)
    return rows, _normed(rows, result, node, [("*", weight)], eps)


def _layer_norm(rows: Rows, call: Call) -> _Lowered:
    x, shape, weight, bias, eps = call.arguments
    rows = rows.with_columns(prod(shape))
    result, node = _input(rows, x, call)
    mean = _scaled(_sum(node), 1 / prod(shape))
    centred = Map(Level.FULL, "({0} - {1})", (node, mean))
    return rows, _normed(rows, result, centred, [("*", weight), ("+", bias)], eps)


def _input(rows: Rows, x: Value, call: Call) -> tuple[Value, Node]:
    """Return the result of a norm and its input, which has the shape of that."""
    (result, *_) = call.results
    assert result is not None
    layout = rows.layout(result)
    if rows.level_of(layout) is not Level.FULL or layout.dtype not in FLOATS:
        raise NotARowError
    return result, rows.argument(x, layout, Level.FULL)


def _normed(
    rows: Rows, result: Value, node: Node, affine: Sequence[tuple[str, Value | None]], eps: float
) -> dict[Value, Node]:
    """Return a norm of rows whose mean is zero, or counts as zero, then * weight and + bias."""
    assert rows.columns is not None
    layout = rows.layout(result)
    square = Map(Level.FULL, "({0} * {0})", (node,))
    inverse = Map(
        Level.ROW,
        f"(1.0f / qk::sqrt_rounded({{0}} + {number(eps)}))",
        (_scaled(_sum(square), 1 / rows.columns),),
    )
    y: Node = Map(Level.FULL, "({0} * {1})", (node, inverse))
    for sign, value in affine:
        if value is not None:
            operand = rows.argument(value, layout, Level.FULL)
            y = Map(Level.FULL, f"({{0}} {sign} {{1}})", (y, operand))
    return {result: y}


def _sum(node: Node) -> Node:
    if node.level is not Level.FULL:
        raise NotARowError
    return Reduce(Level.ROW, Reduction.SUM, node)


def _scaled(node: Node, factor: float) -> Node:
    return Map(Level.ROW, f"({{0}} * {number(factor)})", (node,))


def _stack(rows: Rows, call: Call) -> _Lowered:
    tensors, axis = (*call.arguments, 0)[:2]
    result = call.result
    layout = rows.layout(result)
    last = axis % len(layout.shape) == len(layout.shape) - 1
    if not last or len(tensors) != 2 or rows.level_of(layout) is not Level.FULL:
        raise NotARowError
    *shape, _ = layout.shape
    strides = tuple(stride // 2 for stride in layout.strides[:-1])
    half = replace(layout, shape=tuple(shape), strides=strides)
    even, odd = (rows.argument(value, half, Level.HALF) for value in tensors)
    return rows, {result: Joined(Level.FULL, even, odd)}


def _concatenation(rows: Rows, call: Call) -> _Lowered:
    tensors, axis = (*call.arguments, 0)[:2]
    result = call.result
    layout = rows.layout(result)
    last = axis % len(layout.shape) == len(layout.shape) - 1
    fits = layout.dtype in FLOATS and rows.level_of(layout) is Level.FULL
    if not last or not fits or layout.strides[-1] != 1:
        raise NotARowError
    pieces, first = [], 0
    for value in tensors:
        columns = rows.layout(value).shape[-1]
        pieces.append(Piece(rows.piece(value), first, columns))
        first += columns
    return rows, {result: Concatenated(Level.FULL, tuple(pieces))}


def _quantize_static(rows: Rows, call: Call) -> _Lowered:
    x, smooth, scale, fmt = call.arguments
    result = call.result
    node = _smoothed(rows, x, smooth, result)
    factor = rows.argument(scale, rows.layout(result), Level.FULL)
    if not isinstance(factor, Load):
        raise NotARowError
    return rows, {result: Codes(Level.FULL, node, factor, fmt)}


def _quantize_token(rows: Rows, call: Call) -> _Lowered:
    x, smooth, fmt = call.arguments
    scale, result = call.results
    assert scale is not None
    assert result is not None
    rows = rows.with_columns(rows.layout(x).shape[1])
    node = _smoothed(rows, x, smooth, result)
    amax = Reduce(Level.ROW, Reduction.AMAX, node)
    largest = number(find_format(fmt).max)
    text = f"({{0}} == 0.0f ? 1.0f : {{0}} / {largest})"
    factor = Map(Level.ROW, text, (amax,))
    return rows, {scale: factor, result: Codes(Level.FULL, node, factor, fmt)}


def _smoothed(rows: Rows, x: Value, smooth: Value | None, result: Value) -> Node:
    layout = rows.layout(result)
    if rows.level_of(layout) is not Level.FULL:
        raise NotARowError
    node = rows.argument(x, layout, Level.FULL)
    if smooth is None:
        return node
    return Map(Level.FULL, "({0} * {1})", (node, rows.argument(smooth, layout, Level.FULL)))


OPERATORS: Mapping[Any, Lowering] = {
    **dict.fromkeys(EXPRESSIONS, _elementwise),
    _ATEN.mean.dim: _reduction,
    _ATEN.sum.dim_IntList: _reduction,
    _ATEN._fused_rms_norm.default: _rms_norm,  # noqa: SLF001  an operator's name
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.stack.default: _stack,
    _ATEN.cat.default: _concatenation,
    **{OVERLOADS[name_for("quantize_static", fmt)]: _quantize_static for fmt in _CODES},
    **{OVERLOADS[name_for("quantize_token", fmt)]: _quantize_token for fmt in _CODES},
}
