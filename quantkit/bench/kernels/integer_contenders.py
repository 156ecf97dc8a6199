"""Contenders of int8 and of int4 weights, beside FP8's: quantkit's operators, and torch's."""

from functools import partial

import torch
from torch import Tensor

from quantkit.bench.kernels import libraries, own_contenders
from quantkit.bench.kernels.contender import Contender, UnavailableError, worst_of
from quantkit.bench.kernels.own_contenders import need_kernel
from quantkit.bench.kernels.problem import BenchProblem
from quantkit.bench.kernels.roofline import Precision
from quantkit.bench.kernels.timing import Call
from quantkit.inference.layers.torch_operators import OPERATORS

# As quantkit's FP8 ones: float16 rounds by 0.003 of the rms, a scale that is 2 % off is 0.06.
_EXACT = 0.02
# bfloat16 rounds by 2^-9 of a value at most, and values reach 6 rms: 0.012.
_ROUNDED = 0.04
# int8 leaves 0.01 of the rms as noise for both operands, int4 0.1; the largest of 10^8 is 6 times
# that. torchao's rows are scaled in bfloat16.
_NOISY = 0.15
#: torch._int_mm takes no fewer tokens.
_LEAST_TOKENS = 17

_MULTIPLY, _MULTIPLY_INT4 = OPERATORS["gemm_int8"], OPERATORS["gemm_w4a8"]
_QUANTIZE_TOKEN = OPERATORS["quantize_int8_token"]
_QUANTIZE_STATIC = OPERATORS["quantize_int8_static"]
_INT8 = ("int8", "int8", torch.float16)
_INT4 = ("int8", "int4", torch.float16)


def _gemm(problem: BenchProblem) -> Call:
    need_kernel("gemm_int8", problem)
    (x, x_scale), (w, w_scale) = problem.x_int8, problem.w_int8
    return lambda: _MULTIPLY(x, x_scale, w, w_scale, None, *_INT8)


def _gemm_int4(problem: BenchProblem) -> Call:
    need_kernel("gemm_w4a8", problem)
    (x, x_scale), (w, group, w_scale) = problem.x_int8, problem.w_int4
    return lambda: _MULTIPLY_INT4(x, x_scale, w, group, w_scale, None, *_INT4)


def _linear(problem: BenchProblem) -> Call:
    need_kernel("gemm_int8", problem)
    x, (w, w_scale) = problem.x16, problem.w_int8

    def call() -> object:
        scale, codes = _QUANTIZE_TOKEN(x, None, "int8")
        return _MULTIPLY(codes, scale, w, w_scale, None, *_INT8)

    return call


def _linear_static(problem: BenchProblem) -> Call:
    need_kernel("gemm_int8", problem)
    x, (w, w_scale), scale = problem.x16, problem.w_int8, problem.static_scale_int8

    def call() -> object:
        codes = _QUANTIZE_STATIC(x, None, scale, "int8")
        return _MULTIPLY(codes, scale, w, w_scale, None, *_INT8)

    return call


def _linear_int4(problem: BenchProblem) -> Call:
    need_kernel("gemm_w4a8", problem)
    x, (w, group, w_scale) = problem.x16, problem.w_int4

    def call() -> object:
        scale, codes = _QUANTIZE_TOKEN(x, None, "int8")
        return _MULTIPLY_INT4(codes, scale, w, group, w_scale, None, *_INT4)

    return call


def _multiply_and_scale(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """Return torch's int8 product with the epilogue that it lacks, as its users write it."""
    return (torch._int_mm(x, w).float() * x_scale * w_scale).half()  # noqa: SLF001  torch's only one


def _dynamic(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / 127
    codes = (x.float() / scale).round().clamp(-127, 127).to(torch.int8)
    return _multiply_and_scale(codes, w, scale, w_scale)


def _int_mm(problem: BenchProblem) -> Call:
    _need_tokens(problem)
    (x, x_scale), (w, w_scale) = problem.x_int8, problem.w_int8
    compiled = torch.compile(_multiply_and_scale, dynamic=False)
    a, b = x.view(torch.int8), w.view(torch.int8).t()
    return partial(compiled, a, b, x_scale.unsqueeze(1), w_scale.unsqueeze(0))


def _compiled_dynamic(problem: BenchProblem) -> Call:
    _need_tokens(problem)
    w, w_scale = problem.w_int8
    compiled = torch.compile(_dynamic, dynamic=False)
    return partial(compiled, problem.x16, w.view(torch.int8).t(), w_scale.unsqueeze(0))


def _need_tokens(problem: BenchProblem) -> None:
    libraries.need_compiler(problem)
    if problem.shape.m < _LEAST_TOKENS:
        raise UnavailableError(f"torch._int_mm takes {_LEAST_TOKENS} tokens or more")


_INT8_CODES, _W4A8_CODES = worst_of("exact_int8"), worst_of("exact_w4a8")
_8, _4 = Precision.INT8, Precision.W4A8

GEMM = (
    Contender("quantkit", True, _8, _gemm, _INT8_CODES, _EXACT),
    Contender("quantkit w4a8", True, _4, _gemm_int4, _W4A8_CODES, _EXACT),
    *(contender.renamed(f"{contender.name}, fp8") for contender in own_contenders.GEMM),
)
LINEAR = (
    Contender("quantkit, per token", True, _8, _linear, _INT8_CODES, _EXACT),
    Contender("quantkit, static", True, _8, _linear_static, worst_of("exact_static_int8"), _EXACT),
    Contender("quantkit w4a8, per token", True, _4, _linear_int4, _W4A8_CODES, _EXACT),
    *(contender.renamed(f"{contender.name}, fp8") for contender in own_contenders.LINEAR),
)
LIBRARIES_GEMM = (
    *libraries.GEMM[:1],
    Contender("_int_mm, scaled, compiled", False, _8, _int_mm, _INT8_CODES, _ROUNDED),
)
LIBRARIES_LINEAR = (
    *libraries.GEMM[:1],
    Contender("compiled dynamic int8", False, _8, _compiled_dynamic, worst_of("exact"), _NOISY),
    Contender(
        "torchao int8, compiled",
        False,
        _8,
        partial(libraries.torchao_layer, kind="int8"),
        worst_of("exact"),
        _NOISY,
    ),
)
