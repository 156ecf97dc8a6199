"""Preparing GPU calls: the kernel from the operands of an operation, sizes and outputs."""

import torch
from torch import Tensor

from quantkit.device import backends
from quantkit.device.gpu import calls
from quantkit.device.gpu.calls import Call, Output, Signature
from quantkit.device.gpu.choice import choose_conv, choose_geglu, choose_gemm
from quantkit.device.gpu.devices import find_device
from quantkit.device.gpu.kernel import Kernel, Sizes
from quantkit.device.ops.checks import IO_WORDS
from quantkit.device.ops.table import Variant, find_op
from quantkit.numerics.windows import ConvShape

#: What a kernel reads, in launch order.
Inputs = tuple[Tensor | None, ...]


def signature(op: str, inputs: Inputs, words: tuple[object, ...]) -> Signature:
    """Return the key of a prepared GPU call; empty where none may be used."""
    usable = _first(inputs).is_cuda and backends.is_free()
    return calls.signature(op, inputs, words) if usable else ()


def prepare_quantize(op: str, words: tuple[str, ...], inputs: Inputs, key: Signature) -> Call:
    """Return the prepared call of a quantize operation, kept under ``key``.

    Args:
        inputs: the arguments that the kernel reads, in launch order.

    Raises:
        KernelError: the kernel cannot be compiled or loaded.
    """
    m, k = _first(inputs).shape
    codes: Output = ((m, k), torch.uint8)
    per_token: Output = ((m,), torch.float32)
    outputs = (codes,) if op == "quantize_fp8_static" else (per_token, codes)
    return _prepare(Variant(find_op(op), words), inputs, {"m": m, "k": k}, outputs, key)


def prepare_gemm(op: str, words: tuple[str, ...], inputs: Inputs, key: Signature) -> Call:
    """Return the prepared call of a GEMM, kept under ``key``.

    Args:
        words: of the variant, but for the tile's.
        inputs: the arguments that the kernel reads, in launch order.

    Raises:
        KernelError: the kernel cannot be compiled or loaded.
    """
    x, w = _first(inputs), inputs[2]
    assert w is not None
    (m, k), n = x.shape, w.shape[0]
    sizes = {"m": m, "n": n, "k": k}
    accurate = not backends.sums_are_fast()
    kernel = choose_gemm(find_device(x.get_device()), op, words, sizes, accurate=accurate)
    return _prepare(kernel, inputs, sizes, (((m, n), _dtype_of(words)),), key)


def prepare_conv(
    op: str, words: tuple[str, ...], shape: ConvShape, inputs: Inputs, key: Signature
) -> Call:
    """Return the prepared call of a convolution, kept under ``key``.

    Args:
        words: of the variant, but for the tile's.
        inputs: the arguments that the kernel reads, in launch order.

    Raises:
        KernelError: the kernel cannot be compiled or loaded.
    """
    accurate = not backends.sums_are_fast()
    device = find_device(_first(inputs).get_device())
    kernel = choose_conv(device, op, words, shape, accurate=accurate)
    result = (shape.batch, *shape.outputs, shape.n)
    return _prepare(kernel, inputs, shape, ((result, _dtype_of(words)),), key)


def prepare_geglu(op: str, words: tuple[str, ...], inputs: Inputs, key: Signature) -> Call:
    """Return the prepared call of a gated GEMM, kept under ``key``.

    Args:
        words: of the kernel, but for the tile's.
        inputs: the arguments that the kernel reads, in launch order.

    Raises:
        KernelError: the kernel cannot be compiled or loaded.
    """
    x, w = _first(inputs), inputs[2]
    assert w is not None
    (m, k), n = x.shape, w.shape[0] // 2
    sizes = {"m": m, "n": n, "k": k}
    accurate = not backends.sums_are_fast()
    kernel = choose_geglu(find_device(x.get_device()), op, words, sizes, accurate=accurate)
    return _prepare(kernel, inputs, sizes, (((m, n), torch.uint8),), key)


def _dtype_of(words: tuple[str, ...]) -> torch.dtype:
    return next(dtype for dtype, word in IO_WORDS.items() if word == words[-1])


def _prepare(
    kernel: Kernel,
    inputs: Inputs,
    sizes: Sizes,
    outputs: tuple[Output, ...],
    key: Signature,
) -> Call:
    nulls = [index for index, tensor in enumerate(inputs) if tensor is None]
    call = Call(find_device(_first(inputs).get_device()), kernel, sizes, outputs, nulls)
    return calls.keep(key, call) if key else call


def _first(inputs: Inputs) -> Tensor:
    assert inputs[0] is not None
    return inputs[0]
