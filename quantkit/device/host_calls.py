"""Calls of an operation on the host: tiles, plain memory, and running to the end."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from functools import lru_cache

import torch
from torch import Tensor

from quantkit.device import host, log
from quantkit.device.backends import Backend
from quantkit.device.ops import Variant, find_op
from quantkit.device.pictures import integers
from quantkit.device.tiles import choose_tile
from quantkit.numerics.windows import ConvShape

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
        inputs: x, smooth and shift.
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
    y = torch.empty(x.shape[0], weights[0].shape[0], dtype=dtype, device=x.device)
    _multiply(op, words, (x, x_scale, *weights, w_scale, bias), y)
    return y


def run_geglu(
    op: str,
    words: tuple[str, ...],
    x: Tensor,
    x_scale: Tensor,
    weights: tuple[Tensor, ...],
    w_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
) -> Tensor:
    """Run a gated GEMM kernel; ``words`` are the variant's but for the tile."""
    columns = weights[0].shape[0] // 2
    y = torch.empty(x.shape[0], columns, dtype=torch.uint8, device=x.device)
    _multiply(op, words, (x, x_scale, *weights, w_scale, bias, y_scale), y)
    return y


def run_conv(
    op: str,
    words: tuple[str, ...],
    shape: ConvShape,
    inputs: tuple[Tensor | None, ...],
    dtype: torch.dtype,
) -> Tensor:
    """Run a convolution's kernel; ``words`` are the variant's but for the tile.

    Args:
        inputs: what the kernel reads, in launch order.
    """
    y = torch.empty(shape.batch, *shape.outputs, shape.n, dtype=dtype)
    _run_tiles(op, words, inputs, y, tuple(integers(shape).values()))
    return y


def _multiply(
    op: str, words: tuple[str, ...], inputs: tuple[Tensor | None, ...], y: Tensor
) -> None:
    """Write y (M, N), the kernel's result of what it reads, in launch order."""
    x = inputs[0]
    assert x is not None
    if y.numel():
        _run_tiles(op, words, inputs, y, (*y.shape, x.shape[1]))


def _run_tiles(
    op: str,
    words: tuple[str, ...],
    inputs: tuple[Tensor | None, ...],
    y: Tensor,
    numbers: tuple[int, ...],
) -> None:
    """Write y by the best tile of the menu; ``numbers`` are m, n, k and what else there is."""
    w, threads, (m, n, k) = inputs[2], torch.get_num_threads(), numbers[:3]
    assert w is not None
    kernel = _kernel(op, (*words, choose_tile(m, w.shape[0], threads, _TILE_SPEED)))
    # Names keep the copies alive until the kernel has returned.
    plain = [None if t is None else _plain(t) for t in inputs]
    kernel.launch((*map(_address, plain), y.data_ptr(), *numbers), m, n, k, threads)
    log.note(op, kernel.variant.name, Backend.HOST)


@lru_cache(maxsize=1024)
def _kernel(op: str, words: tuple[str, ...]) -> host.HostKernel:
    return host.load(Variant(find_op(op), words))


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    # A view can start anywhere, and weights mapped from a file often start on 8 bytes.
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
