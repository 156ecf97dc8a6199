"""GEGLU's contenders: a product whose second half gates the first one, as codes of the result."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.bench.kernels import libraries
from quantkit.bench.kernels.contender import (
    Contender,
    Judge,
    UnavailableError,
    differing_codes,
    worst_of,
)
from quantkit.bench.kernels.kernel_shapes import Shape
from quantkit.bench.kernels.own_contenders import need_kernel, prepared_fast
from quantkit.bench.kernels.problem import FORMAT, BenchProblem, gated
from quantkit.bench.kernels.roofline import Precision
from quantkit.bench.kernels.timing import Call
from quantkit.device.ops.geglu import gate_static
from quantkit.inference.layers.torch_operators import OPERATORS

# Sums in another order, or in a matrix unit that keeps fewer bits, move a value across the boundary
# between two codes: 0.013 of them on an H200, fast sums 0.04; rounding to bfloat16 in between 0.06.
_MOVED, _MOVED_BFLOAT = 0.03, 0.12
# float16 rounds by 2^-12 of a value, and gated values reach 30 rms.
_ROUNDED = 0.04

_GATE, _GATE_SPARSE = OPERATORS["geglu_fp8"], OPERATORS["geglu_fp8_sparse"]


def _fused(problem: BenchProblem) -> Call:
    x, x_scale, w, w_scale, scale = _operands(problem)
    how = (scale, FORMAT, FORMAT, FORMAT, torch.float16)
    return lambda: _GATE(x, x_scale, w, w_scale, None, *how)


def _fused_sparse(problem: BenchProblem) -> Call:
    x, x_scale, w, meta, w_scale, scale = _packed_operands(problem)
    how = (scale, FORMAT, FORMAT, FORMAT, torch.float16)
    return lambda: _GATE_SPARSE(x, x_scale, w, meta, w_scale, None, *how)


def _fused_fast(problem: BenchProblem) -> Call:
    x, x_scale, w, w_scale, scale = _operands(problem)
    launch = prepared_fast("geglu_fp8", problem, _halved(problem.shape), torch.uint8, "tensor")
    return lambda: launch(x, x_scale, w, w_scale, None, scale)[0]


def _fused_sparse_fast(problem: BenchProblem) -> Call:
    x, x_scale, w, meta, w_scale, scale = _packed_operands(problem)
    shape = _halved(problem.shape)
    launch = prepared_fast("geglu_fp8_sparse", problem, shape, torch.uint8, "tensor")
    return lambda: launch(x, x_scale, w, meta, w_scale, None, scale)[0]


def _halved(shape: Shape) -> Shape:
    return replace(shape, n=shape.n // 2)


def _compiled_f16(problem: BenchProblem, *, sparse: bool = False) -> Call:
    libraries.need_compiler(problem)
    _need_gates(problem)
    compiled = torch.compile(_linear_and_gate, dynamic=False)
    return partial(compiled, problem.x16, problem.w16_sparse if sparse else problem.w16)


def _compiled_fp8(problem: BenchProblem, *, sparse: bool = False) -> Call:
    libraries.need_compiler(problem)
    _need_gates(problem)
    (x, x_scale), (w, w_scale) = problem.x_static, problem.w_sparse if sparse else problem.w
    scale = problem.gated_scale_sparse if sparse else problem.gated_scale
    scales = (x_scale.expand(len(x)).contiguous().unsqueeze(1), w_scale.unsqueeze(0))
    a, b = x.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn).t()
    compiled = torch.compile(_multiply_and_gate, dynamic=False)
    return partial(compiled, a, b, scales, scale)


def _linear_and_gate(x: Tensor, w: Tensor) -> Tensor:
    return gated(functional.linear(x, w))


def _multiply_and_gate(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], scale: Tensor
) -> Tensor:
    return gate_static(libraries.scaled_product(a, b, scales, fast=True), scale, FORMAT)


def _operands(problem: BenchProblem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    need_kernel("geglu_fp8", problem)
    _need_gates(problem)
    return (*problem.x_static, *problem.w, problem.gated_scale)


def _packed_operands(
    problem: BenchProblem,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    need_kernel("geglu_fp8_sparse", problem)
    _need_gates(problem)
    return (*problem.x_static, *problem.w_packed, problem.gated_scale_sparse)


def _need_gates(problem: BenchProblem) -> None:
    if problem.shape.n % 2:
        raise UnavailableError(f"N {problem.shape.n} is odd, and GEGLU needs an even N")


def _judge(problem: BenchProblem, output: object) -> float:
    return _moved(output, problem.exact_gated / problem.gated_scale.double())


def _judge_sparse(problem: BenchProblem, output: object) -> float:
    return _moved(output, problem.exact_gated_sparse / problem.gated_scale_sparse.double())


def _moved(output: object, values: Tensor) -> float:
    """Return the share of codes that are not the nearest ones."""
    assert isinstance(output, Tensor)
    right = values.clamp(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)
    return differing_codes(output, right)


OWN = (
    Contender("quantkit", True, Precision.FP8, _fused, _judge, _MOVED),
    Contender("quantkit, fast sums", True, Precision.FP8, _fused_fast, _judge, _MOVED, fast=True),
)
OWN_SPARSE = (
    Contender("quantkit", True, Precision.FP8_SPARSE, _fused_sparse, _judge_sparse, _MOVED),
    Contender(
        "quantkit, fast sums",
        True,
        Precision.FP8_SPARSE,
        _fused_sparse_fast,
        _judge_sparse,
        _MOVED,
        fast=True,
    ),
)


def _libraries(judge: Judge, exact_f16: str, *, sparse: bool) -> tuple[Contender, ...]:
    """Return what torch.compile makes of it; of 2:4 weights it makes dense ones."""
    return (
        Contender(
            "compiled f16",
            False,
            Precision.F16,
            partial(_compiled_f16, sparse=sparse),
            worst_of(exact_f16),
            _ROUNDED,
        ),
        Contender(
            "_scaled_mm, per row, fast, compiled",
            False,
            Precision.FP8,
            partial(_compiled_fp8, sparse=sparse),
            judge,
            _MOVED_BFLOAT,
            fast=True,
        ),
    )


LIBRARIES = _libraries(_judge, "exact_gated_f16", sparse=False)
LIBRARIES_SPARSE = _libraries(_judge_sparse, "exact_gated_f16_sparse", sparse=True)
