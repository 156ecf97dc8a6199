"""quantkit's contenders of attention: on codes that are given, and with the making of codes.

Scales are given with the codes, static ones of a packed model, or those of each call's own numbers.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quantkit.bench.kernels import libraries
from quantkit.bench.kernels.attention_problem import AttentionProblem
from quantkit.bench.kernels.contender import Contender, UnavailableError, differing_codes, worst_of
from quantkit.bench.kernels.roofline import Precision
from quantkit.bench.kernels.timing import Call
from quantkit.device.backends import Backend, use
from quantkit.device.choosing import choose
from quantkit.device.ops.table import name_for
from quantkit.inference.attention.attention_call import AttentionSettings, attend
from quantkit.inference.attention.attention_heads import (
    Shape,
    Stream,
    product_of_streams,
    stream_of,
)
from quantkit.inference.layers.torch_operators import OPERATORS
from quantkit.models.attention_modules import AttentionCall, Heads
from quantkit.numerics.attention_factors import (
    KEYS,
    AttentionCodes,
    HeadFactors,
    head_factors,
    padded,
)
from quantkit.numerics.formats import E4M3FN, INT8

#: Columns of V have means of 1, so the rms of a result is about 1. float16 rounds by 2^-12 of a
#: value at most 2^-11, and values reach 5 rms. A scale or a mean that is 2 % off is 0.06.
_ROUNDED = 0.01
#: Rounding probabilities to e4m3fn moves a mean of K values by 0.05 / sqrt(K) of their rms; the
#: largest of 10^7 is 5 times that, where rows are flat. Found on an H200, of up to 10^7 results: up
#: to 0.63 / sqrt(K), and with codes of q, k and v 1.14.
_PROBABILITIES, _ALL = 0.7, 1.3
#: The kernel adds and multiplies in another order than the reference: a code may be its neighbour.
_MOVED = 0.01

_NO_ROTATION = "none"


def _given(problem: AttentionProblem, qk_format: str) -> Call:
    _need_kernel(problem, qk_format)
    codes = _codes_of(problem, qk_format)
    return lambda: _product(codes, problem)


def _static(problem: AttentionProblem, qk_format: str) -> Call:
    _need_kernel(problem, qk_format)
    scales, shape = problem.scales, _shape(problem)
    # A packed model keeps what follows from its scales.
    factors = head_factors(scales, shape.head_size, qk_format)
    return lambda: product_of_streams(
        [_stream(problem)], shape, scales, qk_format, factors=factors
    ).wide()


def _dynamic(problem: AttentionProblem, qk_format: str) -> Call:
    _need_kernel(problem, qk_format)
    call = partial(
        attend, AttentionSettings(qk_format, 1), _heads(problem), AttentionCall(None, "")
    )
    return _on_kernel(problem, call)


def _on_kernel(problem: AttentionProblem, call: Call) -> Call:
    """Return a call that takes the kernel where torch would be faster, too."""
    backend = Backend.GPU if problem.device.type == "cuda" else Backend.HOST

    def forced() -> object:
        with use(backend):
            return call()

    return forced


def _dynamic_compiled(problem: AttentionProblem, qk_format: str) -> Call:
    libraries.need_compiler(problem)
    # What a compiled model has: scales, codes and the product in one graph.
    settings, heads = AttentionSettings(qk_format, 1), _heads(problem)
    call = torch.compile(attend, dynamic=False, fullgraph=True)
    return _on_kernel(problem, partial(call, settings, heads, AttentionCall(None, "")))


def _making(problem: AttentionProblem, qk_format: str) -> Call:
    """Return a call of the operators that make codes with scales that are given."""
    _need_kernel(problem, qk_format)
    projections, shape = _projections(problem), _shape(problem)
    made = head_factors(problem.scales, shape.head_size, qk_format)
    if qk_format == E4M3FN.name and len({x.shape for x in projections}) == 1:
        return partial(_at_once, projections, made, shape)
    return partial(_one_by_one, projections, made, shape, qk_format)


def _at_once(projections: Sequence[Tensor], made: HeadFactors, shape: Shape) -> tuple[Tensor, ...]:
    scales = made.scales
    codes: tuple[Tensor, ...] = OPERATORS[name_for("stream_codes", E4M3FN.name)](
        *projections, *[None] * 9, scales.key_mean, made.query, made.key, scales.value_mean,
        scales.value_scale, [0] * 6, *shape, 0.0, _NO_ROTATION,
    )  # fmt: skip
    return codes


def _one_by_one(
    projections: Sequence[Tensor], made: HeadFactors, shape: Shape, qk_format: str
) -> tuple[Tensor, ...]:
    q, k, v = projections
    scales, head = made.scales, OPERATORS[name_for("head_codes", qk_format)]
    codes = []
    for x, mean, factor, group in ((q, None, made.query, 1), (k, scales.key_mean, made.key, KEYS)):
        groups = (group,) if qk_format == INT8.name else ()
        found = head(x, *[None] * 5, mean, factor, 0, 0, *shape, 0.0, _NO_ROTATION, *groups)
        codes.append(found[0] if isinstance(found, tuple) else found)
    value = OPERATORS[name_for(*_VALUES)]
    return *codes, value(v, None, scales.value_mean, scales.value_scale, 0, 0, *shape)


_VALUES = ("value_codes", E4M3FN.name)


def _product(codes: AttentionCodes, problem: AttentionProblem) -> Tensor:
    shape, fmt = problem.shape, codes.qk_format
    y: Tensor = OPERATORS[name_for("attention", fmt)](
        codes.q, codes.k, codes.v, codes.q_scale, codes.k_scale, codes.v_scale, codes.v_mean,
        shape.keys, shape.heads, shape.head_size, fmt, torch.float16,
    )  # fmt: skip
    return y


def _heads(problem: AttentionProblem) -> Heads:
    return Heads(problem.q, problem.k, problem.v)


def _stream(problem: AttentionProblem) -> Stream:
    return stream_of(_heads(problem))


def _projections(problem: AttentionProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operands as projections write them, (B, N, H * D)."""
    stream = _stream(problem)
    return stream.q.x, stream.k.x, stream.v.x


def _shape(problem: AttentionProblem) -> Shape:
    return Shape(problem.shape.heads, problem.shape.head_size)


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
    """Return the share of codes of q, k or v that are not the reference's."""
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
    static = replace(
        given.renamed("quantkit, static scales"),
        prepare=partial(_static, qk_format=qk_format),
        judge=worst_of("exact", by_head),
        averaged=_ALL,
        x_bytes=None,
    )
    dynamic = replace(
        static.renamed("quantkit, scales of each call"),
        prepare=partial(_dynamic, qk_format=qk_format),
        judge=worst_of("exact"),
    )
    compiled = replace(
        dynamic.renamed("quantkit, scales of each call, compiled"),
        prepare=partial(_dynamic_compiled, qk_format=qk_format),
    )
    making = Contender(
        "quantkit, making codes alone",
        True,
        None,
        partial(_making, qk_format=qk_format),
        partial(_judge_codes, qk_format=qk_format),
        _MOVED,
    )
    return given, static, dynamic, compiled, making


FP8 = _contenders(E4M3FN.name, Precision.FP8, "exact_fp8")
INT8_QK = _contenders(INT8.name, Precision.INT8, "exact_int8")
