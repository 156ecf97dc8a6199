"""Calls of an operation on the host: tiles, plain memory, and running to the end."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from functools import lru_cache

import torch
from torch import Tensor

from quantkit.device import host, log
from quantkit.device.backends import Backend
from quantkit.device.ops import Variant, find_op
from quantkit.device.tiles import choose_tile

#: GFLOP/s of one core per tile of the menu, whole tiles of a dense GEMM with K = 512 (Zen 5, g++
#: 12, docs/kernels.md); only the ratios matter. Its tiles beyond these are made for gfx12.
_TILE_SPEED = (75.0, 55.0, 26.0)


def run_quantize(
    op: str,
    words: tuple[str, ...],
    inputs: tuple[Tensor | None, ...],
    scale: Tensor,
    q: Tensor,
) -> None:
    """Run a quantize kernel: ``q`` is written, and ``scale`` by the one per token.

    Args:
        inputs: x, smooth and shift; of a gate x alone.
    """
    if q.numel() == 0:
        return
    (m, k), kernel = q.shape, _kernel(op, words)
    # Names keep the copies alive until the kernel has returned.
    plain, scale_in = [None if t is None else _plain(t) for t in inputs], _plain(scale)
    values = (*map(_address, plain), scale_in.data_ptr(), q.data_ptr(), m, k)
    kernel.launch(values, m, 0, k, torch.get_num_threads())
    log.note(op, kernel.variant.name, Backend.HOST)


def run_gemm(
    op: str,
    words: tuple[str, ...],
    x: Tensor,
    x_scale: Tensor,
    weights: tuple[Tensor, ...],
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Run a GEMM kernel; ``words`` are the variant's but for the tile."""
    (m, k), n = x.shape, weights[0].shape[0]
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    threads = torch.get_num_threads()
    kernel = _kernel(op, (*words, choose_tile(m, n, threads, _TILE_SPEED)))
    x, x_scale, w_scale = _plain(x), _plain(x_scale), _plain(w_scale)
    weights, bias = tuple(_plain(w) for w in weights), None if bias is None else _plain(bias)
    values = (
        x.data_ptr(),
        x_scale.data_ptr(),
        *(w.data_ptr() for w in weights),
        w_scale.data_ptr(),
        _address(bias),
        y.data_ptr(),
        m,
        n,
        k,
    )
    kernel.launch(values, m, n, k, threads)
    log.note(op, kernel.variant.name, Backend.HOST)
    return y


@lru_cache(maxsize=1024)
def _kernel(op: str, words: tuple[str, ...]) -> host.HostKernel:
    return host.load(Variant(find_op(op), words))


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    # A view can start anywhere, and weights mapped from a file often start on 8 bytes.
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
