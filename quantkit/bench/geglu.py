"""GEGLU's contenders: a product whose second half gates the first one, as codes of the result."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.bench import libraries
from quantkit.bench.contender import Contender, UnavailableError, differing_codes, worst_of
from quantkit.bench.own import need_kernel, prepared_fast
from quantkit.bench.problem import FORMAT, Problem, gated
from quantkit.bench.roofline import Precision
from quantkit.bench.timing import Call
from quantkit.device import execute, reference
from quantkit.inference import gated_operators, operators

# Sums in another order, or in a matrix unit that keeps fewer bits, move a value across the boundary
# between two codes: 0.013 of them on an H200, fast sums 0.04; rounding to float16 in between 0.01,
# to bfloat16 0.06.
_MOVED, _MOVED_BFLOAT = 0.03, 0.12
# float16 rounds by 2^-12 of a value, and gated values reach 30 rms.
_ROUNDED = 0.04


def _fused(problem: Problem) -> Call:
    x, x_scale, w, w_scale, scale = _operands(problem)
    how = (scale, FORMAT, FORMAT, torch.float16)
    return lambda: gated_operators.geglu(x, x_scale, w, w_scale, None, *how)


def _fused_fast(problem: Problem) -> Call:
    x, x_scale, w, w_scale, scale = _operands(problem)
    halves = replace(problem.shape, n=problem.shape.n // 2)
    launch = prepared_fast("geglu_fp8", problem, halves, torch.uint8, "tensor")
    return lambda: launch(x, x_scale, w, w_scale, None, scale)[0]


def _two_kernels(problem: Problem) -> Call:
    x, x_scale, w, w_scale, scale = _operands(problem)

    def call() -> object:
        y = operators.gemm(x, x_scale, w, w_scale, None, FORMAT, torch.float16)
        return execute.gate_static(y, scale, FORMAT)

    return call


def _gate_static(problem: Problem) -> Call:
    need_kernel("gate_fp8_static", problem)
    x, scale = problem.x16, problem.gate_scale
    return lambda: execute.gate_static(x, scale, FORMAT)


def _compiled_gate(problem: Problem) -> Call:
    libraries.need_compiler(problem)
    compiled = torch.compile(reference.gate_static, dynamic=False)
    return partial(compiled, problem.x16, problem.gate_scale, FORMAT)


def _compiled_f16(problem: Problem) -> Call:
    libraries.need_compiler(problem)
    _need_gates(problem)
    compiled = torch.compile(_linear_and_gate, dynamic=False)
    return partial(compiled, problem.x16, problem.w16)


def _compiled_fp8(problem: Problem) -> Call:
    libraries.need_compiler(problem)
    x, x_scale, w, w_scale, scale = _operands(problem)
    scales = (x_scale.expand(len(x)).contiguous().unsqueeze(1), w_scale.unsqueeze(0))
    a, b = x.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn).t()
    compiled = torch.compile(_multiply_and_gate, dynamic=False)
    return partial(compiled, a, b, scales, scale)


def _linear_and_gate(x: Tensor, w: Tensor) -> Tensor:
    return gated(functional.linear(x, w))


def _multiply_and_gate(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], scale: Tensor
) -> Tensor:
    return reference.gate_static(libraries.scaled_product(a, b, scales, fast=True), scale, FORMAT)


def _operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    need_kernel("gemm_fp8", problem)
    _need_gates(problem)
    return (*problem.x_static, *problem.w, problem.gated_scale)


def _need_gates(problem: Problem) -> None:
    if problem.shape.n % 2:
        raise UnavailableError(f"N {problem.shape.n} is odd: an output has no gate")


def _judge(problem: Problem, output: object) -> float:
    return _moved(output, problem.exact_gated / problem.gated_scale.double())


def _judge_gate(problem: Problem, output: object) -> float:
    return _moved(output, problem.exact_gate / problem.gate_scale.double())


def _moved(output: object, values: Tensor) -> float:
    """Return the share of codes that are not the nearest ones."""
    assert isinstance(output, Tensor)
    right = values.clamp(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)
    return differing_codes(output, right)


GATE = (Contender("quantkit", True, None, _gate_static, _judge_gate, _MOVED),)
GATE_LIBRARIES = (Contender("compiled torch", False, None, _compiled_gate, _judge_gate, _MOVED),)
OWN = (
    Contender("quantkit", True, Precision.FP8, _fused, _judge, _MOVED),
    Contender("quantkit, fast sums", True, Precision.FP8, _fused_fast, _judge, _MOVED, fast=True),
    Contender("quantkit, two kernels", True, Precision.FP8, _two_kernels, _judge, _MOVED),
)
LIBRARIES = (
    Contender(
        "compiled f16",
        False,
        Precision.F16,
        _compiled_f16,
        worst_of("exact_gated_f16"),
        _ROUNDED,
    ),
    Contender(
        "_scaled_mm, per row, fast, compiled",
        False,
        Precision.FP8,
        _compiled_fp8,
        _judge,
        _MOVED_BFLOAT,
        fast=True,
    ),
)
