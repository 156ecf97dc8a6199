"""Networks of packed models: one operator instead of several, and when it is not taken."""

import copy
from contextlib import nullcontext

import pytest
import torch
from diffusers.models.attention import FeedForward
from torch import nn

from quantkit.device import log
from quantkit.device.backends import fast_sums
from quantkit.errors import KernelError, ShapeError
from quantkit.inference.blocks import activation_codes, feed_forward
from quantkit.inference.blocks.feed_forward import (
    ActivatedFeedForward,
    GatedFeedForward,
    install,
    uninstall,
)
from quantkit.inference.layers import fused_op
from quantkit.numerics.formats import E4M3FN, E5M2, INT8
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.kernel_cases import operate
from tests.support.packed import packed_module
from tests.support.sampling import turned

TOKEN, STATIC, NONE = Activation.TOKEN, Activation.STATIC, Activation.NONE
PLAIN = Scheme(E4M3FN, PerChannel(), None, STATIC)
#: Of the layer before the gate; the one behind it is PLAIN.
FUSED = {
    "static": PLAIN,
    "token": Scheme(E4M3FN, PerChannel(), None, TOKEN),
    "tensor e5m2": Scheme(E5M2, PerTensor(), None, STATIC),
    "sparse": Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, STATIC),
    "smooth": Scheme(E4M3FN, PerChannel(), None, STATIC, smooth=True),
}
APART = {
    "up 16 bit": (Scheme(E4M3FN, PerChannel(), None, NONE), PLAIN),
    "up groups": (Scheme(E4M3FN, PerGroup(16), None, STATIC), PLAIN),
    "up dense": (None, PLAIN),
    "down dense": (PLAIN, None),
    "down token": (PLAIN, Scheme(E4M3FN, PerChannel(), None, TOKEN)),
    "down smooth": (PLAIN, Scheme(E4M3FN, PerChannel(), None, STATIC, smooth=True)),
}


def network(up, down, *, bias=True, activation="geglu", dim=32):
    """Return a model of one FeedForward in eval mode."""
    torch.manual_seed(0)
    ff = FeedForward(dim, activation_fn=activation, bias=bias)
    for holder, name, scheme in ((ff.net[0], "proj", up), (ff.net, "2", down)):
        if scheme:
            layer = getattr(holder, name)
            setattr(holder, name, packed_module(layer, scheme, name=f"ff.{name}"))
    return nn.Sequential(ff).eval()


@pytest.fixture
def fusing(monkeypatch):
    """Every device fuses, a CPU too."""
    monkeypatch.setattr(feed_forward, "has_kernel", lambda *_: True)
    monkeypatch.setattr(activation_codes, "has_kernel", lambda *_: True)


def operators(function):
    """Return how often each operator of quantkit was called."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        result = function()
    counts = {e.key: e.count for e in seen.key_averages() if e.key.startswith("quantkit::")}
    return result, {key.removeprefix("quantkit::"): count for key, count in counts.items()}


@torch.no_grad()
@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_network_gives_the_bits_of_its_kernels(name, bias, dtype):
    model, x = network(FUSED[name], PLAIN, bias=bias).to(dtype), torch.randn(2, 5, 32).to(dtype)
    apart, (up, down) = model(x), (model[0].net[0].proj, model[0].net[2])
    codes = up.gated_codes(x, down)
    one = down.multiply_codes(codes, dtype).reshape(x.shape)
    install(model)
    assert type(model[0]) is GatedFeedForward
    found, called = operators(lambda: model(x))
    assert torch.equal(found, one)
    # A few codes are a place off, up to 1/8 of their value: gelu is, and bfloat16 rounds it.
    assert float((found - apart).float().norm() / apart.float().norm()) < 0.03
    operator = "geglu_fp8_sparse" if FUSED[name].sparsity else "geglu_fp8"
    kind = "token" if FUSED[name].activation is TOKEN else "static"
    assert called == {f"quantize_fp8_{kind}": 1, operator: 1, "gemm_fp8": 1}


@torch.no_grad()
@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("name", APART)
def test_layers_that_do_not_allow_it_stay_apart(name):
    model = network(*APART[name])
    install(model)
    assert type(model[0]) is FeedForward


@pytest.mark.parametrize("activation", ["geglu-approximate", "swiglu"])
def test_other_activations_stay_as_they_are(activation):
    model = network(PLAIN, PLAIN, activation=activation)
    install(model)
    assert type(model[0]) is FeedForward


def wrapped(layer):
    layer.forward = layer.forward  # as offloading does


@torch.no_grad()
@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize(
    "disturb",
    [
        lambda ff: ff.net[2].register_forward_hook(lambda *_: None),
        lambda ff: ff.net[0].proj.register_forward_pre_hook(lambda *_: None),
        lambda ff: wrapped(ff.net[0].proj),
        lambda ff: wrapped(ff.net[2]),
        lambda ff: setattr(ff.net[0], "proj", nn.Sequential(ff.net[0].proj)),
        lambda ff: ff.train(),
    ],
    ids=["hook", "pre-hook", "forward of first", "forward of last", "adapter", "training"],
)
def test_who_looks_at_a_layer_sees_it_called(disturb):
    model, x = network(PLAIN, PLAIN), torch.randn(3, 32)
    apart = model(x)
    install(model)
    disturb(model[0])
    found, called = operators(lambda: model(x))
    assert "geglu_fp8" not in called
    assert called["gemm_fp8"] == 2
    assert torch.equal(found, apart)


@torch.no_grad()
def test_a_cpu_has_no_kernel_for_it():
    model = network(PLAIN, PLAIN)
    install(model)
    _, called = operators(lambda: model(torch.randn(3, 32)))
    assert "geglu_fp8" not in called
    assert not fused_op.has_kernel("geglu_fp8", "cpu", 32)


@torch.no_grad()
@pytest.mark.usefixtures("fusing")
def test_installing_changes_no_parameter_and_survives_copies():
    model, x = network(PLAIN, PLAIN), torch.randn(3, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    install(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert isinstance(model[0], FeedForward)
    other = copy.deepcopy(model)
    other[0].net[2].input_scale *= 2  # a copy reads its own layers
    assert torch.equal(model(x), copy.deepcopy(model)(x))
    assert not torch.equal(model(x), other(x))


@torch.no_grad()
@pytest.mark.usefixtures("fusing")
def test_it_compiles_without_a_graph_break():
    model, x = network(PLAIN, PLAIN), torch.randn(2, 5, 32)
    install(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
    _, called = operators(lambda: compiled(x))
    assert called["geglu_fp8"] == 1


# ----------------------------------------------------------------------------- GELU and SiLU

#: Activations of diffusers' networks.
ACTIVATED = ("gelu", "gelu-approximate", "linear-silu")
#: Of the layer behind the activation; the one before it is PLAIN.
READERS = {
    **{name: FUSED[name] for name in ("static", "sparse", "smooth")},
    "int8": Scheme(INT8, PerChannel(), None, STATIC),
    "groups": Scheme(E4M3FN, PerGroup(16), None, STATIC),
}


_INT8 = Scheme(INT8, PerChannel(), None, STATIC)
#: Of both layers, and the operation that makes the codes between them.
BEFORE = {
    "dense": (None, PLAIN, "gelu_codes_fp8"),
    "token": (Scheme(E4M3FN, PerChannel(), None, TOKEN), PLAIN, "project_gelu_fp8"),
    "sparse": (FUSED["sparse"], FUSED["smooth"], "project_gelu_fp8_sparse"),
    "smooth": (FUSED["smooth"], FUSED["smooth"], "project_gelu_fp8"),
    "int8": (_INT8, _INT8, "project_gelu_int8"),
    "groups": (READERS["groups"], PLAIN, "gelu_codes_fp8"),
}


@torch.no_grad()
@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize(
    "how", turned(READERS, ACTIVATED, (torch.float32, torch.float16, torch.bfloat16), times=4)
)
def test_an_activation_and_its_codes_are_one_operation(how):
    name, activation, dtype = how
    down = READERS[name]
    model = network(PLAIN, down, activation=activation).to(dtype)
    x = torch.randn(2, 5, 32).to(dtype)
    apart = model(x)
    install(model)
    assert type(model[0]) is ActivatedFeedForward
    found, called = operators(lambda: model(x))
    assert found.dtype is dtype
    # A few codes are a place off, up to 1/8 of their value.
    assert float((found - apart).float().norm() / apart.float().norm()) < 0.02
    # A product of FP8 ends in codes of FP8.
    ends = "gelu_codes_int8" if down.input is INT8 else "project_gelu_fp8"
    assert called[ends] == 1
    # The first layer's input alone.
    assert sum(n for key, n in called.items() if key.startswith("quantize")) == 1


@torch.no_grad()
@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("name", BEFORE)
def test_any_layer_may_stand_before_an_activation(name):
    up, down, ends = BEFORE[name]
    model, x = network(up, down, activation="gelu"), torch.randn(3, 32)
    apart = model(x)
    install(model)
    found, called = operators(lambda: model(x))
    assert called[ends] == 1
    assert sum(called[op] for op in called if op.startswith(("gelu_", "project_"))) == 1
    assert float((found - apart).norm() / apart.norm()) < 0.02


@pytest.mark.parametrize(
    "down",
    [scheme for name, (_, scheme) in APART.items() if name in {"down dense", "down token"}],
    ids=["dense", "token"],
)
def test_readers_that_take_no_static_codes_stay_apart(down):
    model = network(PLAIN, down, activation="gelu")
    install(model)
    assert type(model[0]) is FeedForward


@torch.no_grad()
@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize(
    "disturb",
    [
        lambda ff: ff.net[0].register_forward_hook(lambda *_: None),
        lambda ff: ff.net[0].activation.register_forward_hook(lambda *_: None),
        lambda ff: ff.net[1].register_forward_hook(lambda *_: None),
        lambda ff: ff.net[2].register_forward_pre_hook(lambda *_: None),
        lambda ff: wrapped(ff.net[0]),
        lambda ff: wrapped(ff.net[2]),
        lambda ff: ff.net.__setitem__(2, nn.Sequential(ff.net[2])),
        lambda ff: ff.train(),
    ],
    ids=["hook", "inner hook", "dropout", "pre-hook", "first", "last", "adapter", "training"],
)
def test_who_looks_behind_an_activation_sees_16_bit(disturb):
    model, x = network(PLAIN, PLAIN, activation="linear-silu"), torch.randn(3, 32)
    apart = model(x)
    install(model)
    disturb(model[0])
    found, called = operators(lambda: model(x))
    assert called == {"quantize_fp8_static": 2, "gemm_fp8": 2}
    assert torch.equal(found, apart)


@torch.no_grad()
@pytest.mark.usefixtures("fusing")
def test_who_looks_at_the_first_layer_sees_it_called():
    model, x = network(PLAIN, PLAIN, activation="gelu"), torch.randn(3, 32)
    wanted, seen = model[0].net[0].proj(x), []
    install(model)
    model[0].net[0].proj.register_forward_hook(lambda *args: seen.append(args[-1]))
    _, called = operators(lambda: model(x))
    assert called["gelu_codes_fp8"] == len(seen) == 1
    assert torch.equal(seen[0], wanted)


@torch.no_grad()
@pytest.mark.usefixtures("fusing")
def test_a_final_dropout_is_called():
    model, x = network(PLAIN, PLAIN, activation="gelu"), torch.randn(3, 32)
    model[0].net.append(nn.Dropout(0.5).eval())
    install(model)
    before = model(x)
    model[0].net[3].register_forward_hook(lambda _, __, y: 2 * y)
    assert torch.equal(model(x), 2 * before)


@torch.no_grad()
def test_a_cpu_has_no_kernel_for_activations():
    model, x = network(PLAIN, PLAIN, activation="gelu"), torch.randn(3, 32)
    apart = model(x)
    install(model)
    assert torch.equal(model(x), apart)
    uninstall(model)
    assert type(model[0]) is FeedForward


@torch.no_grad()
@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("activation", ACTIVATED)
def test_an_activated_network_compiles_without_a_graph_break(activation):
    model, x = network(PLAIN, PLAIN, activation=activation), torch.randn(2, 5, 32)
    install(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
    _, called = operators(lambda: compiled(x))
    assert called["project_gelu_fp8"] == 1


# ------------------------------------------------------------------------------------ the operation


def operands(m=5, n=48, k=64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def codes(rows):
        values = torch.randn(rows, k, generator=generator)
        return values.to(torch.float8_e4m3fn).view(torch.uint8)

    x_scale, w_scale = (torch.rand(count, generator=generator) + 0.5 for count in (m, 2 * n))
    bias = torch.randn(2 * n, generator=generator)
    return [codes(m), x_scale, codes(2 * n), w_scale / 8, bias, torch.tensor([0.07])]


def test_no_tokens_have_no_codes():
    x, x_scale, *rest = operands()
    found = operate("geglu_fp8", x[:0], x_scale[:0], *rest, *("e4m3fn",) * 3, torch.float32)
    assert (found.shape, found.dtype) == ((0, 48), torch.uint8)


@pytest.mark.parametrize(
    ("index", "value", "error", "text"),
    [
        (
            5,
            torch.ones(2),
            ShapeError,
            r"geglu_fp8: y_scale has shape \(2,\), expected one element",
        ),
        (5, torch.ones(1).double(), KernelError, "y_scale is torch.float64, expected float32"),
        (0, torch.zeros(5, 32, dtype=torch.uint8), ShapeError, "w has shape"),
        (4, torch.zeros(96).half(), KernelError, "bias is torch.float16, expected torch.float32"),
    ],
)
def test_operands_that_do_not_fit_are_refused(index, value, error, text):
    given = operands()
    given[index] = value
    with pytest.raises(error, match=text):
        operate("geglu_fp8", *given, *("e4m3fn",) * 3, torch.float32)


def test_an_output_without_a_gate_is_refused():
    x, x_scale, w, w_scale, bias, y_scale = operands()
    with pytest.raises(ShapeError, match="w has 95 rows, expected as many gates as outputs"):
        operate(
            *("geglu_fp8", x, x_scale, w[:-1], w_scale[:-1], bias[:-1], y_scale),
            *("e4m3fn",) * 3,
            torch.float32,
        )


# ---------------------------------------------------------------------------------------- on a GPU


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["static", "token", "sparse"])
def test_a_gpu_gates_in_the_product(name, compiled):
    model = network(FUSED[name], PLAIN, dim=64).half().cuda()
    x = torch.randn(3, 50, 64, device="cuda").half()
    apart = model(x).float()
    install(model)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True) if compiled else model
    with log.record() as seen:
        found = step(x).float()
    operation = "geglu_fp8_sparse" if FUSED[name].sparsity else "geglu_fp8"
    assert sum(count for (op, *_), count in seen.calls.items() if op == operation) == 1
    # One by one rounds to float16 twice more: a few codes are a place off, 1/16 of their value.
    error = (found - apart).norm() / apart.norm()
    assert float(error) < 0.01
    assert not model(x[:0]).numel()


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("fast", [False, True], ids=["accurate", "fast"])
@pytest.mark.parametrize("activation", ACTIVATED)
def test_a_gpu_multiplies_activates_and_quantizes_in_one_pass(activation, fast, compiled):
    model = network(PLAIN, PLAIN, activation=activation, dim=64).half().cuda()
    x = torch.randn(3, 50, 64, device="cuda").half()
    apart = model(x).float()
    install(model)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True) if compiled else model
    with log.record() as seen, fast_sums() if fast else nullcontext():
        found = step(x).float()
    assert sum(count for (op, *_), count in seen.calls.items() if op == "project_gelu_fp8") == fast
    assert float((found - apart).norm() / apart.norm()) < 0.01
    assert not model(x[:0]).numel()
