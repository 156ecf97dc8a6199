"""The libraries' contenders (``--against torch``): what a user has without quantkit.

Outputs are bfloat16 where torch's FP8 products insist on it. Everything here is torch's, so it may
be missing or refuse: the reason is what the user sees.
"""

# ruff: noqa: SLF001  torch has its FP8 and 2:4 products under private names only

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.bench.kernels.contender import Contender, Problem, UnavailableError, worst_of
from quantkit.bench.kernels.problem import BenchProblem
from quantkit.bench.kernels.roofline import Precision
from quantkit.bench.kernels.timing import Call
from quantkit.bench.kernels.torchao_dynamic import quantize

_E4M3 = torch.float8_e4m3fn
# bfloat16 rounds by 2^-9 of a value at most, and values reach 6 rms: 0.012.
_ROUNDED = 0.04
# FP8 leaves 0.037 of the rms as noise for both operands; the largest of 10^8 is 6 times that.
_NOISY = 0.35


def forget_compiled() -> None:
    """Forget compiled functions: those of earlier shapes count against torch's limit."""
    torch._dynamo.reset()


def _f16(problem: BenchProblem) -> Call:
    x, w = problem.x16, problem.w16
    return lambda: functional.linear(x, w)


def _f16_of_sparse(problem: BenchProblem) -> Call:
    x, w = problem.x16, problem.w16_sparse
    return lambda: functional.linear(x, w)


def _scaled_mm(problem: BenchProblem, *, fast: bool, per_row: bool, sparse: bool = False) -> Call:
    need_gpu(problem)
    (x, x_scale), (w, w_scale) = problem.x, problem.w_sparse if sparse else problem.w
    one = torch.ones((), device=problem.device)
    scales = (x_scale.unsqueeze(1), w_scale.unsqueeze(0)) if per_row else (one, one)
    a, b = x.view(_E4M3), w.view(_E4M3).t()
    return partial(scaled_product, a, b, scales, fast=fast)


def scaled_product(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], *, fast: bool) -> Tensor:
    """Return torch's FP8 product in bfloat16.

    Args:
        a: (M, K) FP8.
        b: (K, N) FP8, K contiguous.
        scales: float32, of a (M, 1) or (), of b (1, N) or ().
        fast: sums stay in the matrix unit.
    """
    return torch._scaled_mm(
        a,
        b,
        scale_a=scales[0],
        scale_b=scales[1],
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _dynamic(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """Quantize per row and multiply, as torch's users write it."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / 448
    codes = (x.float() / scale).clamp(-448, 448).to(_E4M3)
    return scaled_product(codes, w, (scale, w_scale), fast=True)


def _compiled_dynamic(problem: BenchProblem, *, sparse: bool = False) -> Call:
    need_compiler(problem)
    codes, scale = problem.w_sparse if sparse else problem.w
    x, w, w_scale = problem.x16, codes.view(_E4M3).t(), scale.unsqueeze(0)
    compiled: Callable[..., object] = torch.compile(_dynamic, dynamic=False)
    return partial(compiled, x, w, w_scale)


def torchao_layer(problem: BenchProblem, kind: str = "fp8") -> Call:
    """Return a call of a compiled layer of torchao's.

    Args:
        problem: whose weights and inputs it has.
        kind: fp8 or int8.

    Raises:
        UnavailableError: torchao or a compiler is missing.
    """
    need_compiler(problem)
    n, k = problem.w16.shape
    layer = torch.nn.Linear(k, n, bias=False, device=problem.device, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(problem.w16)
    try:
        quantize(layer, kind, tuned=True)
    except ImportError as error:
        raise UnavailableError(f"torchao is not installed ({error})") from error
    return partial(torch.compile(layer, dynamic=False), problem.x16.bfloat16())


def _cusparselt(problem: BenchProblem) -> Call:
    need_gpu(problem)
    x, w = problem.x16, problem.w16_sparse
    sparse = torch.sparse.to_sparse_semi_structured(w)
    return lambda: functional.linear(x, sparse)


def _cusparselt_fp8(problem: BenchProblem) -> Call:
    need_gpu(problem)
    w = torch._cslt_compress(problem.w_sparse[0].view(_E4M3))
    x = problem.x[0].view(_E4M3).t()
    return lambda: torch._cslt_sparse_mm(w, x, out_dtype=torch.bfloat16)


def _compiled_quantize(problem: BenchProblem) -> Call:
    need_compiler(problem)
    return partial(torch.compile(_quantize, dynamic=False), problem.x16)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / 448
    return (x.float() / scale).clamp(-448, 448).to(_E4M3), scale


def _judge_quantize(problem: BenchProblem, output: object) -> float:
    """Return the largest error over the rms of the input: codes may round elsewhere."""
    assert isinstance(output, tuple)
    codes, scale = output
    error = codes.float() * scale - problem.x16.float()
    return float(error.abs().max() / problem.x16.float().square().mean().sqrt())


def _unscaled(exact: str, *, transposed: bool = False) -> Callable[[BenchProblem, object], float]:
    """Return a judge of a product of bare codes, whose scales are still to be applied."""

    def finish(problem: BenchProblem, y: Tensor) -> Tensor:
        scale = (problem.w_sparse if exact.endswith("sparse") else problem.w)[1]
        rows = y.t() if transposed else y
        return rows.double() * problem.x[1].unsqueeze(1) * scale

    return worst_of(exact, finish)


def need_gpu(problem: Problem) -> None:
    """Refuse where there is none.

    Raises:
        UnavailableError: on the CPU.
    """
    if problem.device.type != "cuda":
        raise UnavailableError("needs a GPU")


def need_compiler(problem: Problem) -> None:
    """Refuse where torch.compile makes no GPU code.

    Raises:
        UnavailableError: on the CPU, and without Triton.
    """
    from torch.utils._triton import has_triton

    need_gpu(problem)
    if not has_triton():
        raise UnavailableError("torch.compile needs Triton, which is missing or has no GPU here")


def _fp8(name: str, *, fast: bool, per_row: bool) -> Contender:
    judge = worst_of("exact_codes") if per_row else _unscaled("exact_codes")
    prepare = partial(_scaled_mm, fast=fast, per_row=per_row)
    return Contender(name, False, Precision.FP8, prepare, judge, _ROUNDED, fast=fast)


_EXACT, _EXACT_SPARSE = worst_of("exact"), worst_of("exact_sparse")
_F16 = Contender("F.linear, f16", False, Precision.F16, _f16, _EXACT, _ROUNDED)
_F16_OF_SPARSE = Contender(
    "F.linear, f16", False, Precision.F16, _f16_of_sparse, _EXACT_SPARSE, _ROUNDED
)
_COMPILED = "compiled dynamic fp8"

GEMM = (
    _F16,
    _fp8("_scaled_mm, per row", fast=False, per_row=True),
    _fp8("_scaled_mm, per row, fast", fast=True, per_row=True),
    _fp8("_scaled_mm, per tensor", fast=False, per_row=False),
    _fp8("_scaled_mm, per tensor, fast", fast=True, per_row=False),
)
GEMM_SPARSE = (
    _F16_OF_SPARSE,
    Contender(
        "_scaled_mm, per row, fast",
        False,
        Precision.FP8,
        partial(_scaled_mm, fast=True, per_row=True, sparse=True),
        worst_of("exact_codes_sparse"),
        _ROUNDED,
        fast=True,
    ),
    Contender(
        "_scaled_mm, per tensor, fast",
        False,
        Precision.FP8,
        partial(_scaled_mm, fast=True, per_row=False, sparse=True),
        _unscaled("exact_codes_sparse"),
        _ROUNDED,
        fast=True,
    ),
    Contender(
        "cuSPARSELt, f16 2:4", False, Precision.F16_SPARSE, _cusparselt, _EXACT_SPARSE, _ROUNDED
    ),
    Contender(
        "cuSPARSELt, fp8 2:4",
        False,
        Precision.FP8_SPARSE,
        _cusparselt_fp8,
        _unscaled("exact_codes_sparse", transposed=True),
        _ROUNDED,
    ),
)
# The widest gap between codes is 32/448 of a row's largest value, which is 6 rms at most; half.
QUANTIZE_TOKEN = (
    Contender("compiled torch", False, None, _compiled_quantize, _judge_quantize, 0.3),
)
LINEAR = (
    _F16,
    Contender(_COMPILED, False, Precision.FP8, _compiled_dynamic, _EXACT, _NOISY),
    Contender("torchao, compiled", False, Precision.FP8, torchao_layer, _EXACT, _NOISY),
)
LINEAR_SPARSE = (
    _F16_OF_SPARSE,
    Contender(
        _COMPILED,
        False,
        Precision.FP8,
        partial(_compiled_dynamic, sparse=True),
        _EXACT_SPARSE,
        _NOISY,
    ),
    Contender(
        "cuSPARSELt, f16 2:4", False, Precision.F16_SPARSE, _cusparselt, _EXACT_SPARSE, _ROUNDED
    ),
)
