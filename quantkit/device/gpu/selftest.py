"""The test that a GPU passes before kernels are trusted on it: small products with known results.

An architecture's name can lie (HSA_OVERRIDE_GFX_VERSION), and a driver or compiler can be broken.
Every tile that a GEMM may take here, dense and sparse, is compared with integer arithmetic: on a
whole tile and on 19x21, which masks lanes in both directions, with a first step that K does not
fill and one that it does. Every lane, slot and nibble takes part, so a swapped fragment cannot
pass. GEGLU and convolutions have the loop of the same tiles.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.device.geometry import tiles
from quantkit.device.gpu.devices import Device, find_device
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.gpu.kernel import Kernel
from quantkit.device.gpu.kernel_choice import choose_kernel, is_hopper
from quantkit.device.ops.op import Op, Variant
from quantkit.device.ops.table import find_op
from quantkit.errors import KernelError
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.packed_2to4 import LEGAL_NIBBLES, unpack_two_of_four
from quantkit.numerics.scales import decode

#: Sums stay below 2048, where float16 is exact.
_VALUES = (0, 1, 2, 3, -1, -2, -3)
_OPS = ("gemm_fp8", "gemm_fp8_sparse")
#: Where FP8 has no kernels.
_OPS_WITHOUT_FP8 = ("gemm_int8", "gemm_int8_sparse")
#: M and N that no tile divides.
_PARTIAL = (19, 21)
#: M, N and K for Hopper's kernels, whose tiles follow from the shape: few tokens, and many.
_HOPPER = ((*_PARTIAL, 160), (300, 264, 160))


@dataclass(frozen=True)
class DeviceState:
    """The result of a GPU's self-test."""

    index: int
    #: None when nothing runs on it
    device: Device | None
    #: of the self-test, compiling included
    seconds: float
    #: why no kernel runs on it; empty when they do
    problem: str


_states: dict[int, DeviceState] = {}
_lock = threading.Lock()


def state_of(index: int) -> DeviceState:
    """Return the state of ``cuda:index``; the first call tests it.

    Raises:
        KernelError: the first call comes while a graph is captured.
    """
    if index not in _states:
        with _lock:
            if index not in _states:
                _states[index] = _examine(index)
    return _states[index]


def forget() -> None:
    """Forget what was found out; the next question tests again."""
    _states.clear()


def run_self_test(device: Device) -> None:
    """Run the self-test.

    Raises:
        KernelError: a kernel cannot be compiled, loaded or run, or its result is wrong.
    """
    for case in _cases(device):
        op, expected = case.kernel.operation, case.expected
        outputs, no_bias = [(tuple(expected.shape), torch.float16)], [len(case.operands)]
        call = Call(device, case.kernel, case.sizes, outputs, no_bias)
        try:
            (y,) = call(*(t.to(device.torch_device) for t in case.operands), None)
            found = y.cpu()
        except RuntimeError as error:
            raise KernelError(f"{op}: failed while it ran ({error})") from error
        wrong = int((found != expected).sum())
        if wrong:
            raise KernelError(
                f"{op}: the self-test of {case.kernel.name} got {wrong} of {expected.numel()} "
                f"known values wrong on {device.name}"
            )


def _examine(index: int) -> DeviceState:
    started = time.perf_counter()
    try:
        device = find_device(index)
    except KernelError as error:
        return DeviceState(index, None, 0.0, str(error))
    if device.capturing():
        # Not the device's fault, so nothing is remembered.
        raise KernelError(
            f"{device.name}: its self-test cannot run while a graph is captured; run the model "
            "once before capturing"
        )
    try:
        run_self_test(device)
    except KernelError as error:
        return DeviceState(index, device, time.perf_counter() - started, str(error))
    return DeviceState(index, device, time.perf_counter() - started, "")


@dataclass(frozen=True)
class _Case:
    """One product of the self-test."""

    kernel: Kernel
    sizes: dict[str, int]
    #: up to the bias
    operands: tuple[Tensor, ...]
    #: exact
    expected: Tensor


def _cases(device: Device) -> Iterator[_Case]:
    fp8 = not device.arch.why_without("gemm", _OPS[0])
    for op in map(find_op, _OPS if fp8 else _OPS_WITHOUT_FP8):
        for kernel, sizes in _kernels(device, op):
            yield _Case(kernel, sizes, *_product_of(op, **sizes))


def _kernels(device: Device, op: Op) -> Iterator[tuple[Kernel, dict[str, int]]]:
    """Yield every kernel that inference may choose for a GEMM, and the sizes to test it with."""
    if is_hopper(device):
        for m, n, k in _HOPPER:
            sizes = {"m": m, "n": n, "k": k}
            yield choose_kernel(device, op, _words(op), sizes), sizes
        return
    for index, tile in enumerate(tiles()):
        if not device.arch.has_tile(op.name, f"t{index}"):
            continue
        for m, n in (_PARTIAL, (tile.m, tile.n)):
            sizes = {"m": m, "n": n, "k": tile.k + 32}
            yield Variant(op, (*_words(op), f"t{index}")), sizes


def _format(op: Op) -> str:
    return op.words("QK_X_FORMAT")[0]


def _words(op: Op) -> tuple[str, ...]:
    return (_format(op), _format(op), "tensor", "tensor", "f16")


def _product_of(op: Op, m: int, n: int, k: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return operands up to the bias, and the exact result."""
    fmt = _format(op)
    x, one = _pattern(m, k, 1, fmt), torch.ones(1)
    if not op.sparse:
        w = _pattern(n, k, 2, fmt)
        return (x, one, w, one), _product(x, w, fmt)
    kept = _pattern(n, k // 2, 3, fmt)
    nibbles = torch.tensor(LEGAL_NIBBLES, dtype=torch.uint8)[_scatter(n, k // 4, 4) % 6]
    meta = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    return (x, one, kept, meta, one), _product(x, unpack_two_of_four(kept, meta), fmt)


def _pattern(rows: int, columns: int, seed: int, fmt: str) -> Tensor:
    """Return codes of the values, scattered."""
    codes = torch.tensor(_VALUES).to(FORMATS[fmt].torch_dtype).view(torch.uint8)
    return codes[_scatter(rows, columns, seed) % len(codes)]


def _scatter(rows: int, columns: int, seed: int) -> Tensor:
    """Return numbers without a pattern, the same everywhere (Knuth's hash, mixed once more)."""
    places = torch.arange(rows * columns, dtype=torch.int64) + seed * 1000003
    mixed = places * 2654435761 % 2**32
    mixed = (mixed ^ mixed >> 16) * 73244475 % 2**32
    return (mixed >> 12).reshape(rows, columns)


def _product(x: Tensor, w: Tensor, fmt: str) -> Tensor:
    # float32 holds these sums exactly, and is faster than integers.
    return (decode(x, fmt) @ decode(w, fmt).T).half()
