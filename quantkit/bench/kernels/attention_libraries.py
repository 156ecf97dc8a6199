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

from quantkit.bench.kernels.contender import Contender, PreparedCall, UnavailableError, need_gpu
from quantkit.bench.kernels.problem import AttentionProblem

# Results are judged by those of quantkit's codes, whose noise averages over the keys, as that of
# other codes does.
_NOISE, _BOTH = 1.3, 2.5
# cuDNN's FP8 gives e4m3, half a step is 1/16 of a value, and keeps long sums in 13 bits.
_CODED = 0.35

_E4M3 = torch.float8_e4m3fn
#: cuDNN takes probabilities, which are at most 1, times this to e4m3.
_P_SCALE = 256.0


def _sdpa(problem: AttentionProblem) -> PreparedCall:
    return PreparedCall(scaled_dot_product_attention, (problem.q, problem.k, problem.v))


def _sdpa_by(problem: AttentionProblem, *, backend: SDPBackend) -> PreparedCall:
    if backend is SDPBackend.CUDNN_ATTENTION:
        need_gpu(problem)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    return PreparedCall(attend, _sdpa(problem).operands)


def _sage(problem: AttentionProblem) -> PreparedCall:
    try:
        from sageattention import sageattn  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(f"SageAttention is not installed ({error})") from error
    need_gpu(problem)
    attend = partial(sageattn, tensor_layout="HND", is_causal=False)
    return PreparedCall(attend, _sdpa(problem).operands)


def _cudnn_fp8(problem: AttentionProblem) -> PreparedCall:
    try:
        import cudnn  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(f"cuDNN's front end is not installed ({error})") from error
    need_gpu(problem)
    # Plans live as long as their handle.
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(problem.device).cuda_stream)
    return _cudnn_graph(cudnn, handle, problem)


def _cudnn_graph(cudnn: Any, handle: Any, problem: AttentionProblem) -> PreparedCall:
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

    def execute(*_: Tensor) -> Tensor:
        graph.execute(pack, workspace, handle=handle)
        return y

    return PreparedCall(execute, tuple(codes for codes, _ in coded.values()))


def _coded(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes and their (1, 1, 1, 1) scale."""
    scale = (heads.float().abs().amax() / torch.finfo(_E4M3).max).reshape(1, 1, 1, 1)
    return (heads.float() / scale).to(_E4M3), scale


def _by_rows(_: AttentionProblem, y: Tensor) -> Tensor:
    """Return (B, Q, H, D) of heads."""
    return y.transpose(1, 2)


def _decoded(problem: AttentionProblem, y: Tensor) -> Tensor:
    return _by_rows(problem, y.float() * _coded(problem.v)[1])


ATTENTION = (
    *(
        Contender(f"SDPA, {name}", False, prepare, "f16", averaged=_NOISE, finish=_by_rows)
        for name, prepare in (
            ("torch's choice", _sdpa),
            ("flash", partial(_sdpa_by, backend=SDPBackend.FLASH_ATTENTION)),
            ("cuDNN", partial(_sdpa_by, backend=SDPBackend.CUDNN_ATTENTION)),
            ("math", partial(_sdpa_by, backend=SDPBackend.MATH)),
        )
    ),
    Contender("SageAttention", False, _sage, "int8", averaged=_BOTH, finish=_by_rows),
    Contender(
        "cuDNN, fp8, codes given", False, _cudnn_fp8, "fp8", _CODED, averaged=_BOTH, finish=_decoded
    ),
)
