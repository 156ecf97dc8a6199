"""quantkit's contenders: an operation's operator, what layers make of a product, and attention."""

from functools import partial

import torch

from quantkit.bench.kernels.contender import (
    Contender,
    PreparedCall,
    UnavailableError,
    need_compiler,
)
from quantkit.bench.kernels.problem import AttentionProblem, LinearProblem, Problem
from quantkit.device.backends import Backend, fast_sums, use
from quantkit.device.choosing import choose
from quantkit.device.gpu.devices import find_device
from quantkit.device.gpu.kernel_choice import is_hopper
from quantkit.device.ops.op import Op
from quantkit.device.ops.table import name_for
from quantkit.device.torch_operators import OPERATORS
from quantkit.inference.attention.attention_call import AttentionSettings, attend
from quantkit.inference.attention.attention_heads import product_of_streams, stream_of
from quantkit.models.attention_modules import AttentionCall, Heads
from quantkit.numerics.attention_factors import head_factors

#: What a mean of K values may be off, over 1 / sqrt(K) of their rms: where sums have another order,
#: a probability is the next code, and with codes that are made first one of q, k or v is, too.
_PROBABILITIES, _HEADS = 0.5, 0.7


def _operator(problem: Problem) -> PreparedCall:
    """Return the operation as packed layers call it.

    Raises:
        UnavailableError: no kernel runs here, and the fallback is not timed under its name.
    """
    choice = choose(problem.op.name, problem.device, k=problem.reduced)
    if choice.backend is Backend.REFERENCE:
        raise UnavailableError(f"no kernel: {choice.reason}")
    operands, options = problem.call
    return PreparedCall(OPERATORS[problem.op.name], (*operands, *options))


def _fast(problem: Problem) -> PreparedCall:
    """Return the operation with sums that stay in the matrix unit."""
    call = _operator(problem)
    if problem.device.type != "cuda":
        raise UnavailableError("the host kernels have no fast sums")
    device = find_device(problem.device.index or 0)
    if not is_hopper(device):
        raise UnavailableError(f"the kernels of {device.arch.name} have no fast sums")

    def fast(*arguments: object) -> object:
        with fast_sums():
            return call.function(*arguments)

    return PreparedCall(fast, call.operands)


def _linear(problem: LinearProblem, *, static: bool) -> PreparedCall:
    """Return quantizing and multiplying, as a packed layer does it."""
    multiply, fmt = _operator(problem), problem.x_format
    family = "quantize_static" if static else "quantize_token"
    quantize, operator = OPERATORS[name_for(family, fmt)], multiply.function

    def of_tokens(x: torch.Tensor, *weights: object) -> object:
        scale, codes = quantize(x, None, fmt)
        return operator(codes, scale, *weights)

    def of_one_scale(x: torch.Tensor, scale: torch.Tensor, *weights: object) -> object:
        return operator(quantize(x, None, scale, fmt), scale, *weights)

    _, _, *weights = multiply.operands
    if static:
        return PreparedCall(of_one_scale, (problem.x16, problem.scale, *weights))
    return PreparedCall(of_tokens, (problem.x16, *weights))


def _static_attention(problem: AttentionProblem) -> PreparedCall:
    _operator(problem)
    shape = problem.shape
    # A packed model keeps what follows from its scales.
    factors = head_factors(problem.scales, shape.head_size, problem.qk_format)

    def attend_on_codes(*heads: torch.Tensor) -> object:
        stream, rows = stream_of(Heads(*heads))
        product = product_of_streams([stream], rows, factors, problem.qk_format)
        return product.of_pictures(shape.heads).wide()

    return PreparedCall(attend_on_codes, (problem.q, problem.k, problem.v))


def _dynamic_attention(problem: AttentionProblem, *, compiled: bool) -> PreparedCall:
    if compiled:
        need_compiler(problem)
    _operator(problem)
    # What a compiled model has: scales, codes and the product in one graph.
    function = torch.compile(attend, dynamic=False, fullgraph=True) if compiled else attend
    settings, nothing = AttentionSettings(problem.qk_format, 1), AttentionCall(None, "")
    backend = Backend.GPU if problem.device.type == "cuda" else Backend.HOST

    def forced(*heads: torch.Tensor) -> object:
        # Where torch would be faster, too.
        with use(backend):
            return function(settings, Heads(*heads), nothing)

    return PreparedCall(forced, (problem.q, problem.k, problem.v))


def _by_rows(_: AttentionProblem, y: torch.Tensor) -> torch.Tensor:
    """Return (B, Q, H, D) of heads."""
    return y.transpose(1, 2)


_QUANTKIT = Contender("quantkit", True, _operator)
_FAST = Contender("quantkit, fast sums", True, _fast, fast=True, moved=0.06)
_LINEAR = (
    Contender("quantkit, per token", True, partial(_linear, static=False)),
    Contender("quantkit, static", True, partial(_linear, static=True), expected="expected_static"),
)
_ATTENTION = (
    Contender("quantkit, codes given", True, _operator, averaged=_PROBABILITIES),
    Contender("quantkit, static scales", True, _static_attention, averaged=_HEADS),
    *(
        Contender(
            f"quantkit, scales of each call{', compiled' if compiled else ''}",
            True,
            partial(_dynamic_attention, compiled=compiled),
            averaged=_HEADS,
            finish=_by_rows,
        )
        for compiled in (False, True)
    ),
)


def own_contenders(op: Op, *, linear: bool) -> tuple[Contender, ...]:
    """Return quantkit's ways to compute an operation.

    Args:
        op: its row.
        linear: inputs are 16-bit and quantized first.
    """
    if linear:
        return _LINEAR
    if op.family == "attention":
        return _ATTENTION
    multiplies_fp8 = op.family in {"gemm", "geglu"} and "e4m3fn" in op.words("QK_X_FORMAT")
    return (_QUANTKIT, _FAST) if multiplies_fp8 else (_QUANTKIT,)
