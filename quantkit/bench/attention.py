"""quantkit's contenders of attention: on codes that are given, and with the making of codes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quantkit.bench import libraries
from quantkit.bench.attention_problem import AttentionProblem
from quantkit.bench.contender import Contender, UnavailableError, differing_codes, worst_of
from quantkit.bench.roofline import Precision
from quantkit.bench.timing import Call
from quantkit.device.backends import Backend
from quantkit.device.choosing import choose
from quantkit.device.ops.table import name_for
from quantkit.inference.operators import OPERATORS
from quantkit.numerics.attention import AttentionCodes, attention_codes, padded
from quantkit.numerics.formats import E4M3FN, INT8

#: Columns of V have means of 1, so the rms of a result is about 1. float16 rounds by 2^-12 of a
#: value at most 2^-11, and values reach 5 rms. A scale or a mean that is 2 % off is 0.06.
_ROUNDED = 0.01
#: Rounding probabilities to e4m3fn moves a mean of K values by 0.05 / sqrt(K) of their rms; the
#: largest of 10^7 is 5 times that. Found: 0.18 / sqrt(K), and with codes of q, k and v 0.67.
_PROBABILITIES, _ALL = 0.35, 1.0
#: torch.compile multiplies by reciprocals where eager divides: a code may be its neighbour.
_MOVED = 0.01

_Make = Callable[..., AttentionCodes]


def _given(problem: AttentionProblem, qk_format: str) -> Call:
    _need_kernel(problem, qk_format)
    codes = _codes_of(problem, qk_format)
    return lambda: _product(codes, problem)


def _making(problem: AttentionProblem, qk_format: str) -> Call:
    return partial(_codes, *_rows(problem), qk_format)


def _making_compiled(problem: AttentionProblem, qk_format: str) -> Call:
    libraries.need_compiler(problem)
    compiled = torch.compile(_codes, dynamic=False, fullgraph=True)
    return partial(compiled, *_rows(problem), qk_format)


def _whole(problem: AttentionProblem, qk_format: str) -> Call:
    _need_kernel(problem, qk_format)
    q, k, v = _rows(problem)
    return lambda: _product(attention_codes(q, k, v, qk_format=qk_format), problem)


def _whole_compiled(problem: AttentionProblem, qk_format: str) -> Call:
    libraries.need_compiler(problem)
    # What is timed is what a compiled model has: codes, then the operator, in one graph.
    call = _whole(problem, qk_format)
    return torch.compile(call, dynamic=False, fullgraph=True)


def _codes(q: Tensor, k: Tensor, v: Tensor, qk_format: str) -> tuple[Tensor, ...]:
    made = attention_codes(q, k, v, qk_format=qk_format)
    return made.q, made.k, made.v


def _product(codes: AttentionCodes, problem: AttentionProblem) -> Tensor:
    shape, fmt = problem.shape, codes.qk_format
    y: Tensor = OPERATORS[name_for("attention", fmt)](
        codes.q, codes.k, codes.v, codes.q_scale, codes.k_scale, codes.v_scale, codes.v_mean,
        shape.keys, shape.heads, shape.head_size, fmt, torch.float16,
    )  # fmt: skip
    return y


def _rows(problem: AttentionProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operands as (B * H, N, D)."""
    return problem.q.flatten(0, 1), problem.k.flatten(0, 1), problem.v.flatten(0, 1)


def _need_kernel(problem: AttentionProblem, qk_format: str) -> None:
    """Refuse to time the fallback under the kernel's name.

    Raises:
        UnavailableError: there is no kernel here.
    """
    columns = padded(problem.shape.head_size)
    choice = choose(name_for("attention", qk_format), problem.device, k=columns)
    if choice.backend is Backend.REFERENCE:
        raise UnavailableError(f"no kernel: {choice.reason}")


def _codes_of(problem: AttentionProblem, qk_format: str) -> AttentionCodes:
    return problem.codes_int8 if qk_format == INT8.name else problem.codes_fp8


def _judge_codes(problem: AttentionProblem, output: object, qk_format: str) -> float:
    """Return the share of codes of q, k and v that are not the eager ones."""
    assert isinstance(output, tuple)
    right = _codes_of(problem, qk_format)
    pairs = zip(output, (right.q, right.k, right.v), strict=True)
    return max(differing_codes(*pair) for pair in pairs)


def by_head(problem: AttentionProblem, y: Tensor) -> Tensor:
    """Return (B, H, Q, D) of quantkit's (B, Q, H, D)."""
    del problem
    return y.transpose(1, 2)


def _contenders(qk_format: str, precision: Precision, exact: str) -> tuple[Contender, ...]:
    given = Contender(
        "quantkit, codes given",
        True,
        precision,
        partial(_given, qk_format=qk_format),
        worst_of(exact, by_head),
        _ROUNDED,
        averaged=_PROBABILITIES,
        x_bytes=1.0,
    )
    whole = replace(
        given.renamed("quantkit, codes made"),
        prepare=partial(_whole, qk_format=qk_format),
        judge=worst_of("exact", by_head),
        averaged=_ALL,
        x_bytes=None,
    )
    making = Contender(
        "quantkit, making codes alone",
        True,
        None,
        partial(_making, qk_format=qk_format),
        partial(_judge_codes, qk_format=qk_format),
        0.0,
    )
    return (
        given,
        whole,
        replace(
            whole.renamed("quantkit, codes made, compiled"),
            prepare=partial(_whole_compiled, qk_format=qk_format),
        ),
        making,
        replace(
            making.renamed("quantkit, making codes alone, compiled"),
            prepare=partial(_making_compiled, qk_format=qk_format),
            limit=_MOVED,
        ),
    )


FP8 = _contenders(E4M3FN.name, Precision.FP8, "exact_fp8")
INT8_QK = _contenders(INT8.name, Precision.INT8, "exact_int8")
