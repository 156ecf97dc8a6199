"""Calls of packed layers that look nothing up: the same bits, and only while nothing changed."""

import copy
import ctypes
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from quantkit.device import log
from quantkit.device.backends import Backend, fast_sums, use
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError, ShapeError
from quantkit.inference.layers import launch_cache, modules, packed_layer
from quantkit.inference.layers.quantized_input import QuantizedInput
from quantkit.inference.layers.timestep_buckets import TimestepBuckets
from quantkit.numerics.formats import E4M3FN, INT4, INT8
from quantkit.numerics.granularity import PerChannel, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Schedule, Scheme
from tests.support.packed import packed_module
from tests.support.standin_memory import Keeper

STREAM = 0x57A40
STATIC, TOKEN = Activation.STATIC, Activation.TOKEN
FP8 = Scheme(E4M3FN, PerChannel(), None, STATIC)
#: Two kernels, whatever they are.
SCHEMES = {
    "static": FP8,
    "token": Scheme(E4M3FN, PerChannel(), None, TOKEN),
    "smooth": Scheme(E4M3FN, PerTensor(), None, TOKEN, smooth=True),
    "sparse": Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, STATIC),
    "int8": Scheme(INT8, PerChannel(), None, STATIC),
}
#: More than that at every call.
OTHERS = {
    "buckets": Scheme(E4M3FN, PerChannel(), None, STATIC, (300.5,)),
    "sparse int4": Scheme(INT4, PerChannel(), TWO_OF_FOUR, STATIC),
}


class _Launch:
    """A kernel that the reference computes, on operands like these wherever they lie."""

    def __init__(self, made, op, operands, options):
        self.made, self.op, self.options = made, op, options
        self.operands = [None if t is None else (t.shape, t.dtype) for t in operands]

    def block(self, addresses):
        assert all(address % 16 == 0 for address in addresses)
        return SimpleNamespace(places=list(addresses))

    def queue(self, block, stream):
        assert stream == STREAM
        self.made.append(self.op)
        places = iter(block.places)
        read = [None if o is None else _read(next(places), *o) for o in self.operands]
        found = OPS[self.op].reference(*read, *self.options)
        for tensor in found if isinstance(found, tuple) else (found,):
            ctypes.memmove(next(places), tensor.data_ptr(), tensor.nbytes)
        assert next(places, None) is None


def _read(address, shape, dtype):
    memory = (ctypes.c_char * (shape.numel() * dtype.itemsize)).from_address(address)
    found = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(shape).clone()
    return found.view(torch.uint8) if dtype.itemsize == 1 else found


class _Call(Call):
    """What ``prepared`` finds on a GPU."""

    def __init__(self, device, launch, outputs):
        self.device, self.launch, self.said = device, launch, (launch.op, "", Backend.GPU)
        self.outputs = tuple((s, torch.empty(s, device="meta").stride(), t) for s, t in outputs)


@pytest.fixture
def keeper():
    """Memory that direct calls have taken."""
    return Keeper()


@pytest.fixture
def made(monkeypatch, keeper):
    """The operations of direct calls, as they are made."""
    names: list[str] = []
    device = SimpleNamespace(
        index=0, current=lambda: 0, stream=lambda _: STREAM, memory=keeper.memory()
    )

    def prepared(op, operands, options):
        outputs = OPS[op].outputs(operands, options)
        return _Call(device, _Launch(names, op, operands, options), outputs)

    monkeypatch.setattr(launch_cache, "_has_kernels", lambda _: True)
    for module in (modules, packed_layer):
        monkeypatch.setattr(module, "prepared", prepared)
    return names


def layer_of(scheme=FP8, *, bias=True, buckets=None):
    torch.manual_seed(1)
    return packed_module(nn.Linear(32, 48, bias=bias), scheme, buckets=buckets).eval()


@torch.no_grad()
def asked(layer, x):
    """Return what the layer answers when it looks everything up."""
    with use(Backend.REFERENCE):
        return layer(x)


def known(layer, x):
    """Return the layer, which has answered such an input."""
    with torch.no_grad():
        layer(x)
    return layer


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 5, 32), (7, 32), (32,), (1, 2, 3, 32)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_answers_are_those_of_a_layer_that_asks(made, name, shape):
    x = torch.randn(shape)
    layer = known(layer_of(SCHEMES[name], bias=len(shape) != 2), x)
    assert made == []
    answers = [layer(x), layer(x * 2)]
    kind = "int8" if name == "int8" else "fp8"
    assert [op.startswith((f"quantize_{kind}_", f"gemm_{kind}")) for op in made] == [True] * 4
    assert all(map(torch.equal, answers, [asked(layer, x), asked(layer, x * 2)]))


@torch.no_grad()
@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_do_more_always_ask(made, name):
    buckets = TimestepBuckets(OTHERS[name].schedule or Schedule())
    buckets.threads.own.index = torch.tensor([0])
    layer = layer_of(OTHERS[name], buckets=buckets if name == "buckets" else None)
    x = torch.randn(5, 32)
    # The reference's sums have an order of their own, which depends on threads.
    assert all(torch.allclose(layer(x), asked(layer, x), atol=1e-6) for _ in range(3))
    assert not any(op.startswith("quantize") for op in made)


def as_codes(layer, x):
    codes, scale = layer._coded(x)
    return QuantizedInput(codes, scale, x.shape, x.dtype)


@torch.no_grad()
def test_products_of_codes_are_known(made):
    """As behind norms and activations, which write codes."""
    layer, x = layer_of(SCHEMES["token"]), torch.randn(2, 5, 32)
    codes = as_codes(layer, x)
    answers = [layer(codes) for _ in range(3)]
    assert made == ["gemm_fp8"] * 2
    assert all(torch.equal(y, asked(layer, codes)) for y in answers)
    made.clear()
    layer(as_codes(layer_of(FP8), x))
    assert made == []


@torch.no_grad()
def test_convolutions_of_codes_are_known(made):
    torch.manual_seed(1)
    layer = packed_module(nn.Conv2d(16, 32, 3, padding=1), FP8).eval()
    x = torch.randn(2, 16, 5, 4)
    answers = [layer(x) for _ in range(3)]
    assert made == ["conv_fp8"] * 2
    assert all(torch.equal(y, asked(layer, x)) for y in answers)


def written(layer):
    layer.weight_scale.mul_(1.25)


def filled(layer):
    layer.fill("weight_scale", layer.weight_scale * 1.25)


def given_other_data(layer):
    layer.weight_scale.data = layer.weight_scale * 1.25


def registered(layer):
    layer._parameters["bias"] = nn.Parameter(layer.bias + 1.0, requires_grad=False)


def unbiased(layer):
    layer.bias = None


@torch.no_grad()
@pytest.mark.parametrize(
    "change", [written, filled, given_other_data, registered, unbiased], ids=lambda f: f.__name__
)
def test_other_weights_are_read(made, change):
    x = torch.randn(5, 32)
    layer = known(layer_of(), x)
    before = layer(x)
    change(layer)
    answers = [layer(x) for _ in range(3)]
    assert not torch.allclose(answers[0], before)
    assert all(torch.allclose(y, asked(layer, x), atol=1e-6) for y in answers)
    # Moved tensors are asked for once, and known again from then on.
    assert len(made) >= 2 + 2 * 2


@torch.no_grad()
@pytest.mark.parametrize(
    "other",
    [torch.randn(6, 32), torch.randn(5, 32).half(), torch.randn(1, 5, 32)],
    ids=["rows", "dtype", "axes"],
)
def test_another_input_is_asked_for(made, other):
    layer = known(layer_of(bias=False), torch.randn(5, 32))
    made.clear()
    answer = layer(other)
    assert "quantize_fp8_static" not in made
    assert (answer.shape, answer.dtype) == ((*other.shape[:-1], 48), other.dtype)
    layer(other)
    assert made[-2:] == ["quantize_fp8_static", "gemm_fp8"]


def test_a_bias_that_is_cast_is_asked_for(made):
    layer, x = layer_of(), torch.randn(5, 32).half()
    with torch.no_grad():
        assert all(torch.equal(layer(x), layer(x)) for _ in range(2))
        assert made == []
        layer.half()
        layer(x)
        layer(x)
    assert len(made) == 2


@torch.no_grad()
def test_rows_that_are_not_plain_memory_are_copied(made):
    x = torch.randn(5, 32)
    layer = known(layer_of(), x)
    apart, odd = torch.randn(5, 64)[:, ::2], torch.randn(161)[1:].view(5, 32)
    assert odd.data_ptr() % 16
    assert all(torch.equal(layer(y), asked(layer, y)) for y in (apart, odd, x.T.contiguous().T))
    assert made == ["quantize_fp8_static", "gemm_fp8"] * 3


def test_a_wrong_width_is_refused_as_ever(made):
    layer = known(layer_of(), torch.randn(5, 32))
    with torch.no_grad(), pytest.raises(ShapeError, match=r"input \[5, 16\], expected"):
        layer(torch.randn(5, 16))


def test_what_is_looked_at_is_asked_for(made):
    x = torch.randn(5, 32)
    layer = known(layer_of(), x)
    layer(x)
    with torch.no_grad():
        asked(layer, x)
        with fast_sums():
            layer(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            layer(x)
        assert launch_cache.key_of(x) is not None
        with FakeTensorMode() as fakes:
            assert launch_cache.key_of(fakes.from_tensor(x)) is None
    assert made == []


@torch.no_grad()
def test_a_bias_is_asked_for_that_was_cast_where_it_lay(made):
    layer, x = layer_of(SCHEMES["token"]).half(), torch.randn(5, 32).half()
    memory = torch.zeros(48, 4, dtype=torch.uint8)
    narrow = memory.view(-1)[: 2 * 48].view(torch.half)
    layer.bias.data = narrow.copy_(layer.bias)
    assert torch.equal(known(layer, x)(x), asked(layer, x))
    assert len(made) == 2

    wide = memory.view(torch.float32)[:, 0]
    layer._apply(lambda t: wide.copy_(t.clone()) if t.data_ptr() == wide.data_ptr() else t)
    assert layer.bias.dtype is torch.float32
    assert torch.equal(layer(x), asked(layer, x))


def hooked(layer, seen):
    layer.register_forward_hook(lambda *_: seen.append(1))


def hooked_before(layer, seen):
    layer.register_forward_pre_hook(lambda *_: seen.append(1))


def hooked_as_all(layer, seen):
    return nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))


def hooked_as_all_before(layer, seen):
    return nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append(1))


def replaced(layer, seen):
    forward = layer.forward
    layer.forward = lambda x: seen.append(1) or forward(x)


def compiled(layer, seen):
    layer.compile(backend=lambda graph, _: lambda *given: seen.append(1) or graph(*given))


WATCHES = [hooked, hooked_before, hooked_as_all, hooked_as_all_before, replaced, compiled]


@torch.no_grad()
@pytest.mark.parametrize("watch", WATCHES, ids=lambda watch: watch.__name__)
def test_who_waits_for_a_call_gets_it(made, watch):
    x, seen = torch.randn(5, 32), []
    layer = known(layer_of(), x)
    wanted = layer(x)
    handle = watch(layer, seen)
    try:
        assert torch.allclose(layer(x), wanted, atol=1e-5)
    finally:
        if handle is not None:
            handle.remove()
    assert seen == [1]


@torch.no_grad()
def test_a_named_input_is_answered(made):
    x = torch.randn(5, 32)
    layer = known(layer_of(), x)
    assert torch.equal(layer(input=x), layer(x))
    with pytest.raises(TypeError, match="positional"):
        layer(x, x)


@torch.no_grad()
def test_copies_and_pickles_ask(made):
    x = torch.randn(5, 32)
    layer = known(layer_of(), x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        other.weight_scale.mul_(2)
        other(x)
        assert made == []
        assert torch.equal(other(x), asked(other, x))
        made.clear()


def users(storage):
    """Return how many tensors and names have a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


@torch.no_grad()
@pytest.mark.parametrize("name", SCHEMES)
def test_no_memory_is_kept_that_the_layer_gave_up(made, name):
    """What offloads a layer gives its parameters other data, and frees the old."""
    x = torch.randn(5, 32)
    layer = known(layer_of(SCHEMES[name]), x)
    layer(x)
    assert len(made) == 2
    parts = list(layer.parameters())
    storages = [part.untyped_storage() for part in parts]
    for part in parts:
        part.data = part.data.clone()
    alone = torch.zeros(4).untyped_storage()
    assert {users(storage) for storage in storages} == {users(alone)}


@torch.no_grad()
def test_the_latest_shapes_are_known(made):
    layer = layer_of()
    for rows in range(1, 60):
        layer(torch.randn(rows, 32))
    assert len(layer.direct._known[0]) <= 32
    layer(torch.randn(59, 32))
    assert len(made) == 2


# -------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SCHEMES)
@torch.no_grad()
def test_a_gpu_gives_the_same_bits_and_counts_the_same(name):
    layer = layer_of(SCHEMES[name]).cuda().half()
    inputs = [torch.randn(3, 5, 32, device="cuda").half() for _ in range(4)]
    layer(inputs[0])
    layer.direct = launch_cache.LaunchCache()
    with log.record() as wanted:
        first = layer(inputs[0])
    with log.record() as found:
        assert torch.equal(layer(inputs[0]), first)
    assert found.calls == wanted.calls
    assert len(found.calls) == 2
    # Rows that stand apart, or start between 16 bytes, are copied as ever.
    apart = torch.randn(3, 5, 64, device="cuda").half()[..., ::2]
    odd = torch.randn(481, device="cuda").half()[1:].view(3, 5, 32)
    for x in (*inputs, apart, odd):
        other = copy.deepcopy(layer)
        assert torch.equal(layer(x), other(x))
    layer.cpu()
    with pytest.raises(KernelError, match="on cpu, x is on cuda"):
        layer(inputs[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that records graphs")
@torch.no_grad()
def test_a_gpu_captures_them():
    layer, x = layer_of().cuda().half(), torch.randn(3, 5, 32, device="cuda").half()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.mul_(2)
    graph.replay()
    assert torch.equal(y, layer(x))
