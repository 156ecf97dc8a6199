"""The libraries' contenders of attention: torch's own, SageAttention, and cuDNN in FP8.

All of them but cuDNN's FP8 take 16-bit heads, so what they do to them is in their time.
"""

from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quantkit.bench.kernels import libraries
from quantkit.bench.kernels.attention_problem import AttentionProblem
from quantkit.bench.kernels.contender import Contender, UnavailableError, worst_of
from quantkit.bench.kernels.roofline import Precision
from quantkit.bench.kernels.timing import Call

# float16 rounds probabilities by 2^-12, and results of up to 5 rms by 2^-11 of them.
_ROUNDED = 0.02
# 8-bit scores, probabilities and values, whose noise averages over the keys: quantkit's is 0.65.
_NOISY, _NOISE = 0.02, 2.0
# cuDNN's FP8 gives e4m3, half a step is 1/16 of a value, and keeps long sums in 13 bits.
_CODED = 0.35

_E4M3 = torch.float8_e4m3fn
#: cuDNN takes probabilities, which are at most 1, times this to e4m3.
_P_SCALE = 256.0


def _sdpa(problem: AttentionProblem) -> Call:
    return partial(scaled_dot_product_attention, problem.q, problem.k, problem.v)


def _sdpa_by(problem: AttentionProblem, backend: SDPBackend) -> Call:
    attend = _sdpa(problem)

    def call() -> object:
        with sdpa_kernel(backend):
            return attend()

    return call


def _sdpa_cudnn(problem: AttentionProblem) -> Call:
    libraries.need_gpu(problem)
    return _sdpa_by(problem, SDPBackend.CUDNN_ATTENTION)


def _sage(problem: AttentionProblem) -> Call:
    try:
        from sageattention import sageattn  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(f"SageAttention is not installed ({error})") from error
    libraries.need_gpu(problem)
    q, k, v = problem.q, problem.k, problem.v
    return partial(sageattn, q, k, v, tensor_layout="HND", is_causal=False)


def _cudnn_fp8(problem: AttentionProblem) -> Call:
    try:
        import cudnn  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(f"cuDNN's front end is not installed ({error})") from error
    libraries.need_gpu(problem)
    # Plans live as long as their handle.
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(problem.device).cuda_stream)
    return _cudnn_graph(cudnn, handle, problem)


def _cudnn_graph(cudnn: Any, handle: Any, problem: AttentionProblem) -> Call:
    """Return a call of cuDNN's FP8 attention with one scale per operand."""
    e4m3, f32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=e4m3, intermediate_data_type=f32, compute_data_type=f32, handle=handle
    )
    coded = {name: _coded(getattr(problem, name)) for name in "qkv"}
    y = torch.empty(problem.q.shape, dtype=_E4M3, device=problem.device)
    scalars = {f"descale_{name}": scale for name, (_, scale) in coded.items()}
    scalars["scale_s"] = torch.full_like(coded["q"][1], _P_SCALE)
    scalars["descale_s"] = 1 / scalars["scale_s"]
    # Means of values are no larger than the largest value.
    scalars["scale_o"] = 1 / coded["v"][1]
    tensors = {**{name: codes for name, (codes, _) in coded.items()}, **scalars}
    # By hand: older ones cannot read FP8 tensors of torch's.
    named = {
        name: graph.tensor(
            name=name,
            dim=list(t.shape),
            stride=list(t.stride()),
            data_type=e4m3 if name in coded else f32,
        )
        for name, t in tensors.items()
    }
    out, _, *amaxes = graph.sdpa_fp8(
        **named, is_inference=True, attn_scale=1 / sqrt(problem.shape.head_size)
    )
    out.set_output(True).set_dim(list(y.shape)).set_stride(list(y.stride())).set_data_type(e4m3)
    pack = {named[name]: t for name, t in tensors.items()} | {out: y}
    for amax in amaxes:
        one = torch.empty(1, 1, 1, 1, device=problem.device)
        amax.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(f32)
        pack[amax] = one
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=problem.device)

    def call() -> Tensor:
        graph.execute(pack, workspace, handle=handle)
        return y

    return call


def _coded(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes and their (1, 1, 1, 1) scale."""
    scale = (heads.float().abs().amax() / torch.finfo(_E4M3).max).reshape(1, 1, 1, 1)
    return (heads.float() / scale).to(_E4M3), scale


def _decoded(problem: AttentionProblem, y: Tensor) -> Tensor:
    return y.float() * _coded(problem.v)[1]


_EXACT, _F16 = worst_of("exact"), Precision.F16
_flash = partial(_sdpa_by, backend=SDPBackend.FLASH_ATTENTION)
_math = partial(_sdpa_by, backend=SDPBackend.MATH)

LIBRARIES = (
    Contender("SDPA, torch's choice", False, _F16, _sdpa, _EXACT, _ROUNDED),
    Contender("SDPA, flash", False, _F16, _flash, _EXACT, _ROUNDED),
    Contender("SDPA, cuDNN", False, _F16, _sdpa_cudnn, _EXACT, _ROUNDED),
    Contender("SDPA, math", False, _F16, _math, _EXACT, _ROUNDED),
    Contender("SageAttention", False, Precision.INT8, _sage, _EXACT, _NOISY, averaged=_NOISE),
    Contender(
        "cuDNN, fp8, codes given",
        False,
        Precision.FP8,
        _cudnn_fp8,
        worst_of("exact", _decoded),
        _CODED,
        averaged=_NOISE,
        x_bytes=1.0,
    ),
)
