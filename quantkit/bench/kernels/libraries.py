"""The libraries' contenders (``--against torch``), but for attention: what a user has without us.

Outputs are bfloat16 where torch's FP8 products insist on it. Everything here is torch's, so it may
be missing or refuse: the reason is what the user sees.
"""

# ruff: noqa: SLF001  torch has its FP8, int8 and 2:4 products under private names only

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.bench.kernels.contender import (
    Contender,
    PreparedCall,
    UnavailableError,
    need_compiler,
    need_gpu,
)
from quantkit.bench.kernels.operator_costs import COSTS
from quantkit.bench.kernels.problem import LinearProblem, Problem
from quantkit.bench.kernels.torchao_dynamic import quantize
from quantkit.device.ops.op import Op
from quantkit.device.ops.products.geglu import gate_static
from quantkit.numerics.formats import INT8

_E4M3 = torch.float8_e4m3fn
#: bfloat16 rounds by 2^-9 of a value at most, and values reach 6 rms: 0.012.
_ROUNDED = 0.04
#: FP8 leaves 0.037 of the rms as noise for both operands, int8 0.01; the largest of 10^8 is 6 times
#: that, and torchao's rows of int8 are scaled in bfloat16.
_NOISY = {"fp8": 0.35, "int8": 0.15}
#: The share of codes that rounding to 16 bit in between moves: 0.06 on an H200.
_MOVED = 0.12
#: torch._int_mm takes no fewer tokens.
_LEAST_TOKENS = 17


def _f16(problem: Problem) -> PreparedCall:
    return PreparedCall(functional.linear, (problem.x16, problem.w16))


def scaled_product(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], *, fast: bool) -> Tensor:
    """Return torch's FP8 product in bfloat16.

    Args:
        a: (M, K) FP8.
        b: (K, N) FP8, K contiguous.
        scales: float32, of a (M, 1) or (), of b (1, N) or ().
        fast: sums stay in the matrix unit.
    """
    return torch._scaled_mm(
        a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _codes(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return (M, K) and (K, N) codes, and their scales as (M, 1) and (1, N)."""
    scales = problem.operand("x_scale").reshape(-1, 1), problem.operand("w_scale").reshape(1, -1)
    return problem.operand("x").view(dtype), problem.weights.view(dtype).t(), scales


def _scaled_mm(problem: Problem, *, fast: bool, per_row: bool) -> PreparedCall:
    need_gpu(problem)
    a, b, scales = _codes(problem, _E4M3)
    one = torch.ones((), device=problem.device)
    multiply = partial(scaled_product, fast=fast)
    return PreparedCall(multiply, (a, b, scales if per_row else (one, one)))


def _scaled(problem: Problem, y: Tensor) -> Tensor:
    """Return a product of bare codes with its scales applied."""
    return y.double() * problem.operand("x_scale").unsqueeze(1) * problem.operand("w_scale")


def _int_mm(problem: Problem) -> PreparedCall:
    _need_tokens(problem)
    a, b, scales = _codes(problem, torch.int8)
    return PreparedCall(torch.compile(_multiply_and_scale, dynamic=False), (a, b, *scales))


def _multiply_and_scale(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """Return torch's int8 product with the epilogue that it lacks, as its users write it."""
    return (torch._int_mm(x, w).float() * x_scale * w_scale).half()


def _need_tokens(problem: Problem) -> None:
    need_compiler(problem)
    if problem.shape.m < _LEAST_TOKENS:
        raise UnavailableError(f"torch._int_mm takes {_LEAST_TOKENS} tokens or more")


def _dynamic(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """Quantize per row and multiply, as torch's users write it."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / 448
    codes = (x.float() / scale).clamp(-448, 448).to(_E4M3)
    return scaled_product(codes, w, (scale, w_scale), fast=True)


def _dynamic_int8(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / 127
    codes = (x.float() / scale).round().clamp(-127, 127).to(torch.int8)
    return _multiply_and_scale(codes, w, scale, w_scale)


def _compiled_dynamic(problem: LinearProblem) -> PreparedCall:
    need_compiler(problem)
    dtype, function = _E4M3, _dynamic
    if problem.x_format == INT8.name:
        _need_tokens(problem)
        dtype, function = torch.int8, _dynamic_int8
    _, w, (_, w_scale) = _codes(problem, dtype)
    return PreparedCall(torch.compile(function, dynamic=False), (problem.x16, w, w_scale))


def _torchao(problem: LinearProblem, *, kind: str) -> PreparedCall:
    need_compiler(problem)
    n, k = problem.w16.shape
    layer = torch.nn.Linear(k, n, bias=False, device=problem.device, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(problem.w16)
    try:
        quantize(layer, kind, tuned=True)
    except ImportError as error:
        raise UnavailableError(f"torchao is not installed ({error})") from error
    compiled = torch.compile(layer, dynamic=False)
    return PreparedCall(compiled, (problem.x16.bfloat16(),), held=(problem.weights,))


def _cusparselt(problem: Problem) -> PreparedCall:
    need_gpu(problem)
    sparse = torch.sparse.to_sparse_semi_structured(problem.w16)
    # As many bytes as 2:4 codes of 16 bit have: half of the values, and 2 bits of each.
    held = problem.w16.flatten()[: problem.w16.numel() * 9 // 16]
    return PreparedCall(partial(functional.linear, weight=sparse), (problem.x16,), held=(held,))


def _cusparselt_fp8(problem: Problem) -> PreparedCall:
    need_gpu(problem)
    x, w, _ = _codes(problem, _E4M3)
    compressed = torch._cslt_compress(w.t())
    multiply = partial(torch._cslt_sparse_mm, out_dtype=torch.bfloat16)
    return PreparedCall(multiply, (compressed, x.t()))


def _scaled_transposed(problem: Problem, y: Tensor) -> Tensor:
    return _scaled(problem, y.t())


def _gated_f16(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return gate_static(functional.linear(x, w), scale, "e4m3fn")


def _gated_fp8(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], scale: Tensor) -> Tensor:
    return gate_static(scaled_product(a, b, scales, fast=True), scale, "e4m3fn")


def _compiled_gate(problem: Problem, *, fp8: bool) -> PreparedCall:
    need_compiler(problem)
    operands = _codes(problem, _E4M3) if fp8 else (problem.x16, problem.w16)
    compiled = torch.compile(_gated_fp8 if fp8 else _gated_f16, dynamic=False)
    return PreparedCall(compiled, (*operands, problem.operand("y_scale")))


def _compiled_reference(problem: Problem) -> PreparedCall:
    """Return the row's own PyTorch, compiled."""
    need_compiler(problem)
    operands, options = problem.call
    return PreparedCall(torch.compile(problem.op.reference, dynamic=False), (*operands, *options))


def _fp8(name: str, *, fast: bool, per_row: bool) -> Contender:
    prepare = partial(_scaled_mm, fast=fast, per_row=per_row)
    finish = None if per_row else _scaled
    return Contender(name, False, prepare, "fp8", _ROUNDED, fast=fast, finish=finish)


def _noisy(
    name: str, prepare: Callable[[LinearProblem], PreparedCall], kind: str, precision: str = ""
) -> Contender:
    return Contender(name, False, prepare, precision or kind, _NOISY[kind])


def _linear(kind: str, torchao: str) -> tuple[Contender, ...]:
    """Return layers whose inputs are 16-bit, judged by one whose inputs are quantized."""
    return (
        _noisy("F.linear, f16", _f16, kind, "f16"),
        _noisy(f"compiled dynamic {kind}", _compiled_dynamic, kind),
        _noisy(torchao, partial(_torchao, kind=kind), kind),
    )


_F16 = Contender("F.linear, f16", False, _f16, "f16", _ROUNDED)
_CUSPARSELT = Contender("cuSPARSELt, f16 2:4", False, _cusparselt, "f16 2:4", _ROUNDED)
_COMPILED_REFERENCE = Contender("compiled torch", False, _compiled_reference, moved=0.01)

#: Family and kind of codes, to contenders.
_LIBRARIES: dict[tuple[str, str], tuple[Contender, ...]] = {
    ("gemm", "fp8"): (
        _F16,
        _fp8("_scaled_mm, per row", fast=False, per_row=True),
        _fp8("_scaled_mm, per row, fast", fast=True, per_row=True),
        _fp8("_scaled_mm, per tensor", fast=False, per_row=False),
        _fp8("_scaled_mm, per tensor, fast", fast=True, per_row=False),
    ),
    ("gemm", "int8"): (
        _F16,
        Contender("_int_mm, scaled, compiled", False, _int_mm, "int8", _ROUNDED),
    ),
    ("linear", "fp8"): _linear("fp8", "torchao, compiled"),
    ("linear", "int8"): _linear("int8", "torchao int8, compiled"),
    ("geglu", "fp8"): (
        Contender("compiled f16", False, partial(_compiled_gate, fp8=False), "f16", moved=_MOVED),
        Contender(
            "_scaled_mm, per row, fast, compiled",
            False,
            partial(_compiled_gate, fp8=True),
            "fp8",
            moved=_MOVED,
        ),
    ),
}
#: The same of 2:4 weights, which the others multiply as dense ones.
_OF_SPARSE: dict[tuple[str, str], tuple[Contender, ...]] = {
    ("gemm", "fp8"): (
        _CUSPARSELT,
        Contender(
            "cuSPARSELt, fp8 2:4",
            False,
            _cusparselt_fp8,
            "fp8 2:4",
            _ROUNDED,
            finish=_scaled_transposed,
        ),
    ),
    ("linear", "fp8"): (_noisy("cuSPARSELt, f16 2:4", _cusparselt, "fp8", "f16 2:4"),),
}


def forget_compiled() -> None:
    """Forget compiled functions: those of earlier shapes count against torch's limit."""
    torch._dynamo.reset()


def library_contenders(op: Op, *, linear: bool) -> tuple[Contender, ...]:
    """Return the libraries' ways to compute an operation.

    Args:
        op: its row.
        linear: inputs are 16-bit and quantized first.
    """
    if COSTS[op.family].product is None:
        return (_COMPILED_REFERENCE,)
    kind = "int8" if op.words("QK_X_FORMAT") == (INT8.name,) else "fp8"
    of = ("linear" if linear else op.family, kind)
    return _LIBRARIES.get(of, ()) + (_OF_SPARSE.get(of, ()) if op.sparse else ())
