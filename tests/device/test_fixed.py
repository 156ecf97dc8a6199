"""Calls at addresses that stay, on the stand-in: the same bits, and memory only while they run."""

import contextlib

import pytest
import torch

from quantkit.device import log
from quantkit.device.gpu.fixed import Product, TwoKernels
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError
from tests.support.kernel_cases import gemm_case
from tests.support.standin_calls import GEMM, SMALL
from tests.support.standin_hip import STREAM
from tests.support.standin_memory import Keeper
from tests.support.threads import run_in_threads

M, N, K = 9, 70, 48
STATIC = Variant(OPS["quantize_fp8_static"], ("f32", "e4m3fn", ""))
STATIC_GEMM = Variant(OPS["gemm_fp8"], ("e4m3fn", "e4m3fn", "tensor", "channel", "f16", "t2"))


class Pair:
    """A layer's two calls on a device of the stand-in, apart and as one."""

    def __init__(self, hip, *, static=False, bias=True, **changes):
        self.keeper = Keeper()
        device = hip.device(memory=self.keeper.memory(), **changes)
        kernels = (STATIC, STATIC_GEMM) if static else (SMALL, GEMM)
        hip.provide(*kernels)
        tensors = gemm_case(GEMM, M, N, K, torch.Generator().manual_seed(4), bias=bias).tensors
        self.weights = [tensors[name] for name in ("w", "w_scale", "bias")]
        self.given = [torch.linspace(0.5, 2, K), *([torch.ones(1) / 64] if static else [])]
        codes = [((M, K), torch.uint8)]
        made = codes if static else [((M,), torch.float32), *codes]
        self.quantize = Call(device, kernels[0], {"m": M, "k": K}, made, [])
        output, nulls = ((M, N), torch.float16), [] if bias else [4]
        self.multiply = Call(device, kernels[1], {"m": M, "n": N, "k": K}, [output], nulls)
        places = [t.data_ptr() for t in self.weights if t is not None]
        given = tuple(t.data_ptr() for t in self.given if t is not None)
        self.product = Product(self.multiply, tuple(places))
        self.both = TwoKernels(self.quantize, given, self.multiply, tuple(places))

    def apart(self, x):
        """Return codes, their scale and the product, by calls on tensors."""
        *scales, codes = self.quantize(x, *self.given)
        scale = scales[0] if scales else self.given[-1]
        return codes, scale, self.multiply(codes, scale, *self.weights)[0]


def drawn(seed=0):
    return torch.randn(M, K, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "token"])
def test_calls_at_addresses_are_the_same(hip, static, bias):
    pair = Pair(hip, static=static, bias=bias)
    for x in (drawn(), drawn(1), torch.stack((drawn(), drawn(2)), dim=-1)[..., 1]):
        with log.record() as wanted:
            codes, scale, y = pair.apart(x)
        with log.record() as found:
            assert torch.equal(pair.both(x), y)
        assert found.calls == wanted.calls
        assert torch.equal(pair.product(codes, scale), y)
    assert not pair.keeper.taken
    assert pair.keeper.streams == [STREAM] * 3
    apart, together = (
        [(each["grid"], each["block"], each["lds"], each["stream"]) for each in launches]
        for launches in (hip.launches()[:2], hip.launches()[2:4])
    )
    assert apart == together


def test_other_devices_and_streams_are_followed(hip):
    entered, current, streams = [], [0], iter(range(100, 200))

    @contextlib.contextmanager
    def guard(index):
        entered.append(index)
        current.append(index)
        yield
        current.pop()

    where = {"index": 1, "current": lambda: current[-1], "guard": guard}
    pair = Pair(hip, stream=lambda _: next(streams), **where)
    entered.clear()
    hip.forget_calls()
    wanted = pair.apart(drawn())[2]
    assert all(torch.equal(pair.both(drawn()), wanted) for _ in range(2))
    assert [each["stream"] for each in hip.launches()] == ["100", "101", "102", "102", "103", "103"]
    assert entered == [1] * 4
    assert pair.keeper.streams == [102, 103]


@pytest.mark.parametrize("failing", [1, 2])
def test_memory_is_given_back_when_a_launch_fails(hip, failing):
    pair, entries = Pair(hip), [0, 0]
    pair.both(drawn())
    entries[failing - 1] = 719
    for call, status in zip((pair.quantize, pair.multiply), entries, strict=True):
        call.launch._entry = lambda *_, status=status: status
    with pytest.raises(KernelError, match="719"):
        pair.both(drawn())
    assert len(pair.keeper.streams) == 2
    assert not pair.keeper.taken


def test_threads_do_not_mix_their_codes(hip):
    pair, wrong = Pair(hip), []

    def work(seed):
        x = drawn(seed)
        wanted = pair.apart(x)[2]
        wrong.extend(seed for _ in range(60) if not torch.equal(pair.both(x), wanted))

    run_in_threads(work)
    assert not wrong
    assert not pair.keeper.taken
