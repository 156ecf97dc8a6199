"""The test that a GPU passes before kernels are trusted on it: small products with known results.

An architecture's name can lie (HSA_OVERRIDE_GFX_VERSION), and a driver or compiler can be broken.
One wave's block of the GEMMs that a pipeline calls, dense and sparse, is compared with integer
arithmetic: every lane, slot and nibble takes part, so a swapped fragment cannot pass.
"""

import threading
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.device.gpu.calls import Call
from quantkit.device.gpu.choice import choose_gemm
from quantkit.device.gpu.devices import Device, find_device
from quantkit.errors import KernelError
from quantkit.numerics.packing import LEGAL_NIBBLES, unpack_two_of_four

#: One matrix of outputs; K covers several fragments of every architecture.
_M, _N, _K = 16, 16, 128
#: The codes of 0 to 3 and their negatives in e4m3fn. Sums stay below 2048, where float16 is exact.
_CODES = (0x00, 0x38, 0x40, 0x44, 0xB8, 0xC0, 0xC4)
_VALUES = (0, 1, 2, 3, -1, -2, -3)
_WORDS = ("e4m3fn", "e4m3fn", "tensor", "tensor", "f16")


@dataclass(frozen=True)
class DeviceState:
    """What was found out about a GPU."""

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
    for op, operands, expected in _cases():
        sizes, no_bias = {"m": _M, "n": _N, "k": _K}, [len(operands)]
        kernel = choose_gemm(device, op, _WORDS, sizes)
        call = Call(device, kernel, sizes, [((_M, _N), torch.float16)], no_bias)
        try:
            (y,) = call(*(t.to(device.torch_device) for t in operands), None)
            found = y.cpu()
        except RuntimeError as error:
            raise KernelError(f"{op}: failed while it ran ({error})") from error
        wrong = int((found != expected).sum())
        if wrong:
            raise KernelError(
                f"{op}: the self-test of the matrix instruction got {wrong} of {expected.numel()} "
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


def _cases() -> list[tuple[str, tuple[Tensor, ...], Tensor]]:
    """Return operation, operands up to the bias, and the exact result."""
    x, w = _pattern(_M, _K, 1), _pattern(_N, _K, 2)
    kept, one = _pattern(_N, _K // 2, 3), torch.ones(1)
    nibbles = torch.tensor(LEGAL_NIBBLES, dtype=torch.uint8)[_scatter(_N, _K // 4, 4) % 6]
    meta = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    sparse = unpack_two_of_four(kept, meta)
    return [
        ("gemm_fp8", (x, one, w, one), _product(x, w)),
        ("gemm_fp8_sparse", (x, one, kept, meta, one), _product(x, sparse)),
    ]


def _pattern(rows: int, columns: int, seed: int) -> Tensor:
    return torch.tensor(_CODES, dtype=torch.uint8)[_scatter(rows, columns, seed) % len(_CODES)]


def _scatter(rows: int, columns: int, seed: int) -> Tensor:
    """Return numbers without a pattern, the same everywhere (Knuth's multiplicative hash)."""
    places = torch.arange(rows * columns, dtype=torch.int64) + seed * 1000003
    return (places * 2654435761 % 2**32 >> 12).reshape(rows, columns)


def _product(x: Tensor, w: Tensor) -> Tensor:
    values = torch.zeros(256, dtype=torch.int64)
    values[list(_CODES)] = torch.tensor(_VALUES)
    return (values[x.long()] @ values[w.long()].T).half()
