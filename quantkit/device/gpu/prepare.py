"""Preparing GPU calls: variant and tile from the operands of an operation, sizes and outputs."""

import torch
from torch import Tensor

from quantkit.device import backends
from quantkit.device.gpu import calls
from quantkit.device.gpu.calls import Call, Output, Signature
from quantkit.device.gpu.devices import find_device
from quantkit.device.operands import IO_WORDS
from quantkit.device.ops import Variant, find_op
from quantkit.device.tiles import choose_tile


def signature(op: str, operands: tuple[Tensor | None, ...], words: tuple[object, ...]) -> Signature:
    """Return the key of a prepared GPU call; empty where none may be used."""
    x = operands[0]
    assert x is not None
    return calls.signature(op, operands, words) if x.is_cuda and backends.is_free() else ()


def prepare_quantize(op: str, words: tuple[str, ...], x: Tensor, key: Signature) -> Call:
    """Return the prepared call of a quantize operation, kept under ``key``.

    Its inputs are the arguments that the kernel reads, in launch order.

    Raises:
        KernelError: the kernel cannot be compiled or loaded.
    """
    m, k = x.shape
    codes: Output = ((m, k), torch.uint8)
    outputs: list[Output] = (
        [codes] if op == "quantize_fp8_static" else [((m,), torch.float32), codes]
    )
    return _prepare(Variant(find_op(op), words), x, {"m": m, "k": k}, outputs, key)


def prepare_gemm(op: str, words: tuple[str, ...], x: Tensor, w: Tensor, key: Signature) -> Call:
    """Return the prepared call of a GEMM, kept under ``key``; ``words`` are all but the tile's.

    Raises:
        KernelError: the kernel cannot be compiled or loaded.
    """
    (m, k), n = x.shape, w.shape[0]
    device = find_device(x.get_device())
    tile = choose_tile(m, n, device.units, device.arch.tile_speed)
    variant = Variant(find_op(op), (*words, tile))
    dtype = next(dtype for dtype, word in IO_WORDS.items() if word == words[-1])
    return _prepare(variant, x, {"m": m, "n": n, "k": k}, [((m, n), dtype)], key)


def _prepare(
    variant: Variant, x: Tensor, sizes: dict[str, int], outputs: list[Output], key: Signature
) -> Call:
    call = Call(find_device(x.get_device()), variant, sizes, outputs)
    return calls.keep(key, call) if key else call
