"""ComfyUI's operations over packed weights: products, patches, moves."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from quantkit.errors import InputError
from quantkit.inference.layers.timestep_buckets import TimestepBuckets
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme
from tests.inference.test_inference import SCHEMES
from tests.support.fake_comfy import make_module
from tests.support.packed import packed_module, packed_tensors
from tests.support.sampling import turned

pytestmark = pytest.mark.usefixtures("comfy_sd")

KINDS = ("linear", "conv")


def dense(kind, *, bias=True):
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Linear(64, 24, bias=bias)
    return nn.Conv2d(32, 24, 3, 2, 1, bias=bias)


def inputs(kind, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shape = (2, 5, 64) if kind == "linear" else (2, 32, 9, 7)
    return torch.randn(shape, generator=generator).to(dtype)


def weight_of(scheme, module, dtype=torch.float32):
    from quantkit.comfyui.layout import packed_weight

    parts = packed_tensors(module.weight, scheme)
    return packed_weight("blocks.0.to_q", scheme, parts, tuple(module.weight.shape), dtype)


def made(scheme, module, *, dtype=torch.float32, buckets=None):
    """Return ComfyUI's module with a packed weight, loaded as a model's is."""
    from quantkit.comfyui.operations import Surroundings, make_operations

    model = nn.ModuleDict(
        {"to_q": make_module(make_operations(Surroundings(buckets or {})), module)}
    )
    state = {"to_q.weight": weight_of(scheme, module, dtype)}
    if module.bias is not None:
        state["to_q.bias"] = module.bias.detach()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing
    assert not unexpected
    return model["to_q"]


@pytest.mark.parametrize("case", turned(SCHEMES, KINDS, (torch.float32, torch.float16)))
def test_products_are_those_of_the_packed_layer(case):
    scheme, dtype = SCHEMES[case[0]], case[2]
    module = dense(case[1], bias=case[0] != "token")
    layer = made(scheme, module)
    expected = packed_module(module, scheme)
    x = inputs(case[1], dtype)
    assert torch.equal(layer(x), expected(x))
    assert torch.equal(layer(x), expected(x)), "and so is the second product"
    assert layer.uncast == 2


def test_a_layer_that_is_not_packed_is_dense():
    from quantkit.comfyui.operations import Surroundings, make_operations

    module = dense("linear")
    layer = make_module(make_operations(Surroundings()), module)
    layer.load_state_dict(module.state_dict())
    x = inputs("linear")
    assert torch.equal(layer(x), module(x))
    assert make_operations(Surroundings()).LayerNorm is not None, "other operations are ComfyUI's"


def test_a_weight_that_moved_is_the_one_that_multiplies():
    """A weight that is offloaded arrives as another tensor at each product."""
    module, other = dense("linear"), dense("linear")
    nn.init.normal_(other.weight)
    layer = made(SCHEMES["int8-token"], module)
    x = inputs("linear")
    layer(x)
    layer.weight = nn.Parameter(weight_of(SCHEMES["int8-token"], other), requires_grad=False)
    layer.bias = nn.Parameter(torch.ones(24))
    other.bias.data.fill_(1.0)
    assert torch.equal(layer(x), packed_module(other, SCHEMES["int8-token"])(x))


@pytest.mark.parametrize("case", turned(("int4-token", "static-smooth-sparse"), KINDS))
@pytest.mark.parametrize("attribute", ["weight_function", "weight_lowvram_function"])
def test_a_patch_is_added_to_the_dense_weight_at_each_product(case, attribute):
    module = dense(case[1])
    layer = made(SCHEMES[case[0]], module)
    delta = torch.randn_like(module.weight)
    patch = lambda weight: weight + delta  # noqa: E731
    setattr(layer, attribute, [patch] if attribute == "weight_function" else patch)
    x = inputs(case[1])
    weight = packed_module(module, SCHEMES[case[0]]).dense_weight() + delta
    by_hand = functional.linear if case[1] == "linear" else functional.conv2d
    options = {} if case[1] == "linear" else {"stride": 2, "padding": 1}
    assert torch.equal(layer(x), by_hand(x, weight, module.bias, **options))
    setattr(layer, attribute, [] if attribute == "weight_function" else None)
    assert torch.equal(layer(x), packed_module(module, SCHEMES[case[0]])(x))


def test_comfyui_sees_no_function_whose_result_it_would_quantize():
    layer = made(SCHEMES["int8-token"], dense("linear"))
    layer.weight_lowvram_function = torch.neg
    layer.weight_function = [torch.abs]
    assert layer.weight_lowvram_function is None
    assert layer.weight_function == [torch.neg, torch.abs], "patches come before wrappers"


def test_a_patched_weight_is_kept_dense_and_can_be_taken_back():
    module = dense("linear")
    layer = made(SCHEMES["int4-token"], module)
    x, before, backup = inputs("linear"), layer(inputs("linear")), layer.weight
    found = layer.convert_weight(layer.weight.to(torch.float32), inplace=True)
    assert torch.equal(found, packed_module(module, SCHEMES["int4-token"]).dense_weight())
    assert layer.set_weight(found + 1.0, return_weight=True).dtype == torch.float32
    assert layer.weight is backup, "what is only returned is not kept"
    layer.set_weight(found + 1.0, inplace_update=False, seed=3)
    assert torch.equal(layer(x), functional.linear(x, found + 1.0, module.bias))
    assert layer.convert_weight(layer.weight) is layer.weight
    layer.weight = backup
    assert torch.equal(layer(x), before)


def test_a_patch_on_a_schedule_is_refused():
    layer = made(SCHEMES["int8-token"], dense("linear"))
    with pytest.raises(InputError, match=r"blocks\.0\.to_q: is packed.*load it with LoraLoader"):
        layer.set_weight(torch.zeros(24, 64), inplace_update=True, seed=1)


@pytest.mark.parametrize("move", [lambda m: m.to(torch.float16), lambda m: m.half()])
def test_codes_stay_when_the_model_changes_its_dtype(move):
    from quantkit.comfyui.layout import is_packed

    module = dense("linear")
    layer = move(made(SCHEMES["int8-token"], module))
    assert is_packed(layer.weight)
    assert layer.weight.dtype == layer.bias.dtype == torch.float16
    x = inputs("linear", torch.float16)
    assert torch.equal(layer(x), packed_module(module, SCHEMES["int8-token"]).half()(x))


def test_a_model_that_was_loaded_in_inference_mode_moves_outside_of_it():
    """ComfyUI runs nodes in that mode, and moves models when it likes."""
    module, x = dense("linear"), inputs("linear", torch.float16)
    with torch.inference_mode():
        layer = made(SCHEMES["int8-token"], module)
        layer(x)
    layer.to(torch.float16)
    layer.state_dict()
    assert torch.equal(layer(x), packed_module(module, SCHEMES["int8-token"]).half()(x))


def test_missing_weights_are_reported_and_zero():
    from quantkit.comfyui.operations import Surroundings, make_operations

    model = nn.ModuleDict({"it": make_module(make_operations(Surroundings()), dense("conv"))})
    missing, _ = model.load_state_dict({}, strict=False)
    assert missing == ["it.weight", "it.bias"]
    assert not model["it"](inputs("conv")).any()


def test_scales_follow_the_timestep():
    scheme = Scheme(E4M3FN, PerChannel(), None, Activation.STATIC, (300.5, 600.5))
    buckets = TimestepBuckets(scheme.schedule)
    layer = made(scheme, dense("linear"), buckets={scheme.schedule: buckets})
    expected = packed_module(dense("linear"), scheme, buckets=buckets)
    outputs = []
    for timestep in (900.0, 100.0):
        buckets.update(timestep)
        outputs.append(layer(inputs("linear")))
        assert torch.equal(outputs[-1], expected(inputs("linear")))
    assert not torch.equal(*outputs)
