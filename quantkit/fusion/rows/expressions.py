"""Elementwise operators as C++, on float32."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from quantkit.fusion.program import Call, Value

_ATEN = torch.ops.aten
#: From the texts of an operator's arguments in order, and of keywords, to its own.
_Write = Callable[..., str]


def _sum(sign: str) -> _Write:
    def write(a: str, b: str, alpha: str = "") -> str:
        return f"{a} {sign} {b}" if alpha in {"", "1.0f"} else f"{a} {sign} {alpha} * {b}"

    return write


def _difference_from(a: str, b: str, alpha: str = "") -> str:
    return _sum("-")(b, a, alpha)


def _power(a: str, exponent: str) -> str:
    """Return a power that products and roots make.

    Raises:
        KeyError: another one.
    """
    return {
        "2.0f": f"{a} * {a}",
        "3.0f": f"{a} * {a} * {a}",
        "0.5f": f"qk::sqrt_rounded({a})",
        "-0.5f": f"1.0f / qk::sqrt_rounded({a})",
        "-1.0f": f"1.0f / {a}",
    }[exponent]


def _gelu(a: str, approximate: str = "none") -> str:
    return {"none": f"qk::times_gelu(1.0f, {a})", "tanh": f"qk::tanh_gelu({a})"}[approximate]


def _clamped(a: str, low: str = "", high: str = "") -> str:
    floor = f"qk::rows::at_least({a}, {low})" if low else a
    return f"qk::rows::at_most({floor}, {high})" if high else floor


def _product_added(a: str, b: str, c: str, value: str = "1.0f") -> str:
    return f"{a} + {value} * {b} * {c}" if value != "1.0f" else f"{a} + {b} * {c}"


def _of(text: str) -> _Write:
    return text.format


def _infix(sign: str) -> _Write:
    return lambda a, b: f"{a} {sign} {b}"


#: What arithmetic alone computes, cheaper than what it reads.
CHEAP: Mapping[Any, _Write] = {
    _ATEN.add.Tensor: _sum("+"),
    _ATEN.add.Scalar: _sum("+"),
    _ATEN.sub.Tensor: _sum("-"),
    _ATEN.sub.Scalar: _sum("-"),
    _ATEN.rsub.Scalar: _difference_from,
    _ATEN.rsub.Tensor: _difference_from,
    _ATEN.mul.Tensor: _infix("*"),
    _ATEN.mul.Scalar: _infix("*"),
    _ATEN.neg.default: _of("-{}"),
    _ATEN.addcmul.default: _product_added,
}
#: Others; a copy and a change of dtype are the number itself.
EXPRESSIONS: Mapping[Any, _Write] = {
    **CHEAP,
    _ATEN.clone.default: _of("{}"),
    _ATEN._to_copy.default: _of("{}"),  # noqa: SLF001  an operator's name
    _ATEN.div.Tensor: _infix("/"),
    _ATEN.div.Scalar: _infix("/"),
    _ATEN.reciprocal.default: _of("1.0f / {}"),
    _ATEN.square.default: lambda a: f"{a} * {a}",
    _ATEN.pow.Tensor_Scalar: _power,
    _ATEN.sqrt.default: _of("qk::sqrt_rounded({})"),
    _ATEN.rsqrt.default: _of("1.0f / qk::sqrt_rounded({})"),
    _ATEN.exp.default: _of("qk::rows::exponential({})"),
    _ATEN.sigmoid.default: _of("qk::rows::sigmoid({})"),
    _ATEN.tanh.default: _of("qk::rows::tangent({})"),
    _ATEN.silu.default: _of("qk::silu({})"),
    _ATEN.gelu.default: _gelu,
    _ATEN.relu.default: _of("qk::rows::at_least({}, 0.0f)"),
    _ATEN.abs.default: _of("qk::rows::magnitude({})"),
    _ATEN.maximum.default: lambda a, b: f"qk::rows::at_least({a}, {b})",
    _ATEN.minimum.default: lambda a, b: f"qk::rows::at_most({a}, {b})",
    _ATEN.clamp.default: _clamped,
    _ATEN.clamp_min.default: _clamped,
}
#: Keywords that say where a result lies, not what it is.
_PLACES = frozenset({"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"})


def expression_of(call: Call) -> str:
    """Return what a call computes of its tensors {0}, {1}, ..., in the order of ``call.reads``.

    Raises:
        KeyError: an operator or an argument that has no expression here.
    """
    tensors = iter(range(len(call.reads)))

    def text(argument: Any) -> str:
        if isinstance(argument, Value):
            return f"{{{next(tensors)}}}"
        if argument is None:
            return ""
        return argument if isinstance(argument, str) else number(argument)

    arguments = [text(argument) for argument in call.arguments]
    keywords = {k: text(v) for k, v in call.keywords.items() if k not in _PLACES}
    return f"({EXPRESSIONS[call.operator](*arguments, **keywords)})"


def is_expression(call: Call) -> bool:
    """Tell whether a call has an expression."""
    try:
        return bool(expression_of(call))
    except (KeyError, TypeError):
        return False


def number(value: float) -> str:
    """Return a number as a literal of C++, rounded to float32.

    Raises:
        KeyError: infinities and NaN, which have none.
    """
    rounded = torch.tensor(float(value), dtype=torch.float32)
    if not rounded.isfinite():
        raise KeyError(value)
    return f"{float(rounded)!r}f"
