"""Attention that ends in its output projection's codes: the same results by fewer operators."""

import copy

import pytest
import torch
from torch import nn

import quantkit
from quantkit.device import compilers, log
from quantkit.inference.attention import attention_ends
from quantkit.models.attention_modules import attention_modules
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.inference.test_static_attention import ROW, with_scales
from tests.support.kernel_cases import need
from tests.support.packed import packed_module
from tests.support.tiny_denoisers import answer, compile_a_block, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

STATIC = Scheme(E4M3FN, PerChannel(), None, Activation.STATIC)
CODED = {
    "static": STATIC,
    "sparse": Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, Activation.STATIC),
    "smooth": Scheme(E4M3FN, PerChannel(), None, Activation.STATIC, smooth=True),
}
WIDE = {
    "token": Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN),
    "int8": Scheme(INT8, PerChannel(), None, Activation.STATIC),
    "no codes": Scheme(E4M3FN, PerChannel(), None, Activation.NONE),
}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """Every device has kernels that end in codes, a CPU too."""
    need(compilers.host_compiler)
    monkeypatch.setattr(attention_ends, "has_kernel", lambda *_: True)


@pytest.fixture(scope="module")
def scaled():
    """Models whose attention has static scales, by class."""
    return {name: with_scales(tiny_model(ROW[name]), margin=2.0) for name in ROW if name in CLASSES}


#: Class -> whether attention has an output projection of its own alone.
CLASSES = {
    "UNet2DConditionModel": True,
    "PixArtTransformer2DModel": True,
    "SD3Transformer2DModel": False,
    "FluxTransformer2DModel": False,
}


def made(scaled, name, scheme, qk="e4m3fn"):
    """Return a model whose attention multiplies codes, and whose attention's layers are packed."""
    model = copy.deepcopy(scaled[name])
    for of, attention in attention_modules(model):
        for path, layer in list(attention.named_modules()):
            if type(layer) is nn.Linear:
                packed = packed_module(layer, scheme, name=f"{of}.{path}")
                attention.set_submodule(path, packed)
    quantkit.attention(model, qk=qk, min_keys=1)
    return model


def asked(model):
    """Return a model's answer, and how often attention ended in codes and in 16 bit."""
    with log.record() as seen:
        y = answer(model)
    calls = [(name, n) for (name, *_), n in seen.calls.items() if name.startswith("attention")]
    coded = sum(n for name, n in calls if name.endswith("_codes"))
    return y, coded, sum(n for _, n in calls) - coded


def without(monkeypatch, model):
    with monkeypatch.context() as patch:
        patch.setattr(attention_ends, "has_kernel", lambda *_: False)
        return asked(model)


@pytest.mark.parametrize("qk", ["e4m3fn", "int8"])
@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("name", CLASSES)
def test_results_are_the_same_to_the_bit(scaled, monkeypatch, name, scheme, qk):
    model = made(scaled, name, CODED[scheme], qk)
    wanted, none, every = without(monkeypatch, model)
    found, coded, wide = asked(model)
    assert none == 0 < every
    assert (coded, wide) == ((every, 0) if CLASSES[name] else (0, every))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("scheme", WIDE)
def test_other_inputs_stay_in_16_bit(scaled, monkeypatch, scheme):
    model = made(scaled, "UNet2DConditionModel", WIDE[scheme])
    wanted, _, every = without(monkeypatch, model)
    found, coded, wide = asked(model)
    assert (coded, wide) == (0, every)
    assert torch.equal(found, wanted)


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)


def offloaded(layer):
    layer.forward = layer.forward


def adapted(layer):
    layer.__class__ = type("Adapted", (type(layer),), {})


@pytest.mark.parametrize("change", [hooked, offloaded, adapted])
def test_who_waits_for_a_call_of_the_layer_gets_16_bit(scaled, change):
    model = made(scaled, "UNet2DConditionModel", STATIC)
    wanted, every, _ = asked(model)
    attention = next(module for _, module in attention_modules(model))
    change(attention.to_out[0])
    found, coded, wide = asked(model)
    assert (coded, wide) == (every - 1, 1)
    assert torch.equal(found, wanted)


def test_values_in_16_bit_have_no_such_kernel(scaled):
    model = made(scaled, "UNet2DConditionModel", STATIC)
    quantkit.attention(model, pv=None, min_keys=1)
    _, coded, wide = asked(model)
    assert coded == 0 < wide


def test_a_graph_of_torch_has_16_bit(scaled):
    model = made(scaled, "UNet2DConditionModel", STATIC)
    wanted, every, _ = asked(model)
    compile_a_block(model)
    found, coded, wide = asked(model)
    assert (coded, wide) == (every - 2, 2)
    assert torch.equal(found, wanted)


def test_attention_whose_result_is_divided_still_is(scaled):
    model = made(scaled, "UNet2DConditionModel", STATIC)
    before = answer(model)
    for _, module in attention_modules(model):
        module.rescale_output_factor = 2.0
    halved = asked(model)
    assert halved[1] > 0
    for _, module in attention_modules(model):
        module.rescale_output_factor = 1.0
        layer = module.to_out[0]
        layer.weight_scale.data /= 2
        if layer.bias is not None:
            layer.bias.data /= 2
    assert not torch.equal(halved[0], before)
    assert torch.allclose(halved[0], answer(model), rtol=1e-4, atol=1e-5)
