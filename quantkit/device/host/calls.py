"""Calls of an operation on the host: tiles, plain memory, and running to the end."""

from functools import lru_cache

import torch
from torch import Tensor

from quantkit.device import log
from quantkit.device.backends import Backend
from quantkit.device.host import library as host
from quantkit.device.ops.table import Variant, find_op
from quantkit.device.ops.windows import integers
from quantkit.device.tiles import choose_tile
from quantkit.numerics.windows import ConvShape

#: GFLOP/s of one core per tile of the menu, whole tiles of a dense GEMM with K = 512 (Zen 5, g++
#: 12, docs/notes/kernels.md); only the ratios matter. Its tiles beyond these are made for gfx12.
_TILE_SPEED = (75.0, 55.0, 26.0)

#: What a kernel reads, in launch order.
Inputs = tuple[Tensor | None, ...]


def run_quantize(
    op: str,
    words: tuple[str, ...],
    inputs: tuple[Tensor, Tensor | None, Tensor | None],
    scale: Tensor,
    q: Tensor,
) -> None:
    """Run a quantize kernel: ``q`` is written, and ``scale`` by the one per token.

    Args:
        inputs: x, smooth and shift.
    """
    if q.numel() == 0:
        return
    (m, k), kernel = inputs[0].shape, _kernel(op, words)
    # Names keep the copies alive until the kernel has returned.
    plain, scale_in = [None if t is None else _plain(t) for t in inputs], _plain(scale)
    values = (*map(_address, plain), scale_in.data_ptr(), q.data_ptr(), m, k)
    kernel.launch(values, m, 0, k, torch.get_num_threads())
    log.note(op, kernel.variant.name, Backend.HOST)


def run_gemm(op: str, words: tuple[str, ...], inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """Run a GEMM kernel; ``words`` are the variant's but for the tile."""
    x, n = _tokens_and_rows(inputs)
    y = torch.empty(x.shape[0], n, dtype=dtype, device=x.device)
    _run_tiles(op, words, inputs, y, (*y.shape, x.shape[1]))
    return y


def run_geglu(op: str, words: tuple[str, ...], inputs: Inputs) -> Tensor:
    """Run a gated GEMM kernel; ``words`` are the variant's but for the tile."""
    x, rows = _tokens_and_rows(inputs)
    y = torch.empty(x.shape[0], rows // 2, dtype=torch.uint8, device=x.device)
    _run_tiles(op, words, inputs, y, (*y.shape, x.shape[1]))
    return y


def run_conv(
    op: str, words: tuple[str, ...], shape: ConvShape, inputs: Inputs, dtype: torch.dtype
) -> Tensor:
    """Run a convolution's kernel; ``words`` are the variant's but for the tile."""
    y = torch.empty(shape.batch, *shape.outputs, shape.n, dtype=dtype)
    _run_tiles(op, words, inputs, y, tuple(integers(shape).values()))
    return y


def _run_tiles(
    op: str, words: tuple[str, ...], inputs: Inputs, y: Tensor, numbers: tuple[int, ...]
) -> None:
    """Write y by the best tile of the menu; ``numbers`` are m, n, k and what else there is."""
    if y.numel() == 0:
        return
    (_, rows), threads, (m, n, k) = _tokens_and_rows(inputs), torch.get_num_threads(), numbers[:3]
    kernel = _kernel(op, (*words, choose_tile(m, rows, threads, _TILE_SPEED)))
    # Names keep the copies alive until the kernel has returned.
    plain = [None if t is None else _plain(t) for t in inputs]
    kernel.launch((*map(_address, plain), y.data_ptr(), *numbers), m, n, k, threads)
    log.note(op, kernel.variant.name, Backend.HOST)


def _tokens_and_rows(inputs: Inputs) -> tuple[Tensor, int]:
    """Return x and the number of rows of w."""
    x, w = inputs[0], inputs[2]
    assert x is not None
    assert w is not None
    return x, w.shape[0]


@lru_cache(maxsize=1024)
def _kernel(op: str, words: tuple[str, ...]) -> host.HostKernel:
    return host.load(Variant(find_op(op), words))


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    # A view can start anywhere, and weights mapped from a file often start on 8 bytes.
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
