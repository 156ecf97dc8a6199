"""quantkit's contenders: its operators, called as packed layers call them."""

from dataclasses import asdict

import torch
from torch import Tensor

from quantkit.bench.kernels.contender import Contender, UnavailableError, differing_codes, worst_of
from quantkit.bench.kernels.kernel_shapes import Shape
from quantkit.bench.kernels.problem import FORMAT, BenchProblem
from quantkit.bench.kernels.roofline import Precision
from quantkit.bench.kernels.timing import Call
from quantkit.device.backends import Backend
from quantkit.device.choosing import choose
from quantkit.device.gpu.calls import Call as DeviceCall
from quantkit.device.gpu.choice import choose_kernel
from quantkit.device.gpu.devices import find_device
from quantkit.device.hopper import gemm as hopper
from quantkit.device.ops.table import find_op
from quantkit.inference.layers.torch_operators import OPERATORS

# float16 rounds by 2^-12 of a value at most 2^-11, and values reach 6 rms: 0.003. The rest is for
# sums in a matrix unit that keeps fewer bits than float32 (docs/notes/kernels.md). A scale that is
# 2 % off, or one wrong product, is 0.06 and more.
_EXACT = 0.02

_MULTIPLY, _MULTIPLY_SPARSE = OPERATORS["gemm_fp8"], OPERATORS["gemm_fp8_sparse"]
_QUANTIZE_TOKEN = OPERATORS["quantize_fp8_token"]
_QUANTIZE_STATIC = OPERATORS["quantize_fp8_static"]
#: formats of inputs and weights, and the type of outputs
_HOW = (FORMAT, FORMAT, torch.float16)


def _gemm(problem: BenchProblem) -> Call:
    need_kernel("gemm_fp8", problem)
    x, x_scale = problem.x
    w, w_scale = problem.w
    return lambda: _MULTIPLY(x, x_scale, w, w_scale, None, *_HOW)


def _gemm_sparse(problem: BenchProblem) -> Call:
    need_kernel("gemm_fp8_sparse", problem)
    x, x_scale = problem.x
    w, meta, w_scale = problem.w_packed
    return lambda: _MULTIPLY_SPARSE(x, x_scale, w, meta, w_scale, None, *_HOW)


def _gemm_fast(problem: BenchProblem) -> Call:
    launch = prepared_fast("gemm_fp8", problem, problem.shape, torch.float16, "token")
    x, x_scale = problem.x
    w, w_scale = problem.w
    return lambda: launch(x, x_scale, w, w_scale, None)[0]


def _gemm_sparse_fast(problem: BenchProblem) -> Call:
    launch = prepared_fast("gemm_fp8_sparse", problem, problem.shape, torch.float16, "token")
    x, x_scale = problem.x
    w, meta, w_scale = problem.w_packed
    return lambda: launch(x, x_scale, w, meta, w_scale, None)[0]


def prepared_fast(
    op: str, problem: BenchProblem, shape: Shape, dtype: torch.dtype, x_scale: str
) -> DeviceCall:
    """Return a prepared call whose sums stay in the matrix unit, as under ``fast_sums``.

    Args:
        op: gemm_fp8, geglu_fp8, or one of these with 2:4 weights.
        problem: whose device it runs on.
        shape: M, columns of the result, and K.
        dtype: of the result.
        x_scale: tensor or token.

    Raises:
        UnavailableError: no kernel runs, or sums have one mode here.
    """
    need_kernel(op, problem)
    if problem.device.type != "cuda":
        raise UnavailableError("the host kernels have no fast sums")
    device = find_device(problem.device.index or torch.cuda.current_device())
    if device.arch.name != hopper.ARCHITECTURE:
        raise UnavailableError(f"the kernels of {device.arch.name} have no fast sums")
    row = find_op(op)
    # GEGLU's result has a format, too.
    last = (FORMAT,) if row.words("QK_Y_FORMAT") else ()
    words = (FORMAT, FORMAT, x_scale, "channel", "f16", *last)
    kernel = choose_kernel(device, row, words, asdict(shape), accurate=False)
    outputs = (((shape.m, shape.n), dtype),)
    no_bias = [[a.name for a in row.args].index("bias")]
    return DeviceCall(device, kernel, asdict(shape), outputs, nulls=no_bias)


def _gemm_of_sparse(problem: BenchProblem) -> Call:
    need_kernel("gemm_fp8", problem)
    x, x_scale = problem.x
    w, w_scale = problem.w_sparse
    return lambda: _MULTIPLY(x, x_scale, w, w_scale, None, *_HOW)


def _quantize_token(problem: BenchProblem) -> Call:
    need_kernel("quantize_fp8_token", problem)
    x = problem.x16
    return lambda: _QUANTIZE_TOKEN(x, None, FORMAT)


def _quantize_static(problem: BenchProblem) -> Call:
    need_kernel("quantize_fp8_static", problem)
    x, scale = problem.x16, problem.static_scale
    return lambda: _QUANTIZE_STATIC(x, None, scale, FORMAT)


def _linear(problem: BenchProblem) -> Call:
    need_kernel("gemm_fp8", problem)
    x, (w, w_scale) = problem.x16, problem.w

    def call() -> object:
        scale, codes = _QUANTIZE_TOKEN(x, None, FORMAT)
        return _MULTIPLY(codes, scale, w, w_scale, None, *_HOW)

    return call


def _linear_static(problem: BenchProblem) -> Call:
    need_kernel("gemm_fp8", problem)
    x, (w, w_scale), scale = problem.x16, problem.w, problem.static_scale

    def call() -> object:
        codes = _QUANTIZE_STATIC(x, None, scale, FORMAT)
        return _MULTIPLY(codes, scale, w, w_scale, None, *_HOW)

    return call


def _linear_sparse(problem: BenchProblem) -> Call:
    need_kernel("gemm_fp8_sparse", problem)
    x, (w, meta, w_scale) = problem.x16, problem.w_packed

    def call() -> object:
        scale, codes = _QUANTIZE_TOKEN(x, None, FORMAT)
        return _MULTIPLY_SPARSE(codes, scale, w, meta, w_scale, None, *_HOW)

    return call


def _judge_token(problem: BenchProblem, output: object) -> float:
    assert isinstance(output, tuple)
    scale, codes = output
    right, right_scale = problem.x
    if not torch.equal(scale, right_scale):
        return float("nan")
    return differing_codes(codes, right)


def _judge_static(problem: BenchProblem, output: object) -> float:
    assert isinstance(output, Tensor)
    return differing_codes(output, problem.x_static[0])


def need_kernel(op: str, problem: BenchProblem) -> None:
    """Refuse to time the fallback under the kernel's name.

    Raises:
        UnavailableError: there is no kernel of ``op`` for this problem here.
    """
    choice = choose(op, problem.device, k=problem.shape.k)
    if choice.backend is Backend.REFERENCE:
        raise UnavailableError(f"no kernel: {choice.reason}")


_FP8, _SPARSE = Precision.FP8, Precision.FP8_SPARSE
_CODES, _CODES_SPARSE = worst_of("exact_codes"), worst_of("exact_codes_sparse")

GEMM = (
    Contender("quantkit", True, _FP8, _gemm, _CODES, _EXACT),
    Contender("quantkit, fast sums", True, _FP8, _gemm_fast, _CODES, _EXACT, fast=True),
)
GEMM_SPARSE = (
    Contender("quantkit 2:4", True, _SPARSE, _gemm_sparse, _CODES_SPARSE, _EXACT),
    Contender(
        "quantkit 2:4, fast sums",
        True,
        _SPARSE,
        _gemm_sparse_fast,
        _CODES_SPARSE,
        _EXACT,
        fast=True,
    ),
    Contender("quantkit dense", True, _FP8, _gemm_of_sparse, _CODES_SPARSE, _EXACT),
)
QUANTIZE_TOKEN = (Contender("quantkit", True, None, _quantize_token, _judge_token, 0.0),)
QUANTIZE_STATIC = (Contender("quantkit", True, None, _quantize_static, _judge_static, 0.0),)
LINEAR = (
    Contender("quantkit, per token", True, _FP8, _linear, _CODES, _EXACT),
    Contender("quantkit, static", True, _FP8, _linear_static, worst_of("exact_static"), _EXACT),
)
LINEAR_SPARSE = (
    Contender("quantkit 2:4, per token", True, _SPARSE, _linear_sparse, _CODES_SPARSE, _EXACT),
)
