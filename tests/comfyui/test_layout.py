"""Packed weights as QuantizedTensors of comfy-kitchen: what ComfyUI does with such a tensor."""

import pytest
import torch
from torch import nn

from quantkit.errors import InputError
from tests.inference.test_inference import SCHEMES
from tests.support.packed import packed_module, packed_tensors
from tests.support.sampling import turned

pytest.importorskip("comfy_kitchen")

from comfy_kitchen.tensor import QuantizedTensor

from quantkit.comfyui.layout import is_packed, packed_weight


def dense(kind):
    torch.manual_seed(0)
    return nn.Linear(64, 24) if kind == "linear" else nn.Conv2d(32, 24, 3, 2, 1)


def packed_of(scheme, module, dtype=torch.bfloat16):
    parts = packed_tensors(module.weight, scheme)
    return packed_weight("blocks.0.to_q", scheme, parts, tuple(module.weight.shape), dtype)


@pytest.mark.parametrize("case", turned(SCHEMES, ("linear", "conv")))
def test_its_values_are_the_packed_layers(case):
    scheme, module = SCHEMES[case[0]], dense(case[1])
    weight = packed_of(scheme, module)
    assert is_packed(weight)
    assert (weight.shape, weight.dtype) == (module.weight.shape, torch.bfloat16)
    expected = packed_module(module, scheme)
    assert torch.equal(weight.to(torch.float32).dequantize(), expected.dense_weight())
    assert torch.equal(weight.dequantize(), expected.to(torch.bfloat16).dense_weight())


@pytest.mark.parametrize("name", SCHEMES)
def test_it_is_whole_after_a_copy_into_a_buffer_of_bytes(name):
    """Offloaded weights are copied so: part by part, into views of one buffer."""
    weight = packed_of(SCHEMES[name], dense("linear"))
    names, context = weight.__tensor_flatten__()
    views = {}
    for part in names:
        tensor = getattr(weight, part)
        buffer = torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        views[part] = buffer.view(tensor.dtype).view(tensor.shape)
    there = QuantizedTensor.__tensor_unflatten__(views, context, 0, 0)
    there.copy_(weight)
    assert torch.equal(there.dequantize(), weight.dequantize())
    assert len(names) == len(packed_tensors(dense("linear").weight, SCHEMES[name]))


def test_a_clone_has_memory_of_its_own():
    weight = packed_of(SCHEMES["int4-token"], dense("linear"))
    before, clone = weight.dequantize(), weight.clone()
    clone.params.scale.zero_()
    clone._qdata.zero_()
    assert torch.equal(weight.dequantize(), before)
    assert not clone.dequantize().any()


def test_its_state_dict_has_all_parts():
    module, scheme = dense("linear"), SCHEMES["static-smooth-sparse"]
    found, parts = packed_of(scheme, module).state_dict("w"), packed_tensors(module.weight, scheme)
    names = {
        "w": "weight", "w_scale": "weight_scale", "w_meta": "weight_meta",
        "w_input_scale": "input_scale", "w_input_smooth": "input_smooth",
    }  # fmt: skip
    assert found.keys() == names.keys()
    assert all(torch.equal(tensor, parts[names[name]]) for name, tensor in found.items())


def test_other_values_are_refused_with_a_cure():
    weight = packed_of(SCHEMES["int8-token"], dense("linear"))
    with pytest.raises(InputError, match=r"takes no other values.*needs the 16-bit model"):
        weight.requantize_from_float(torch.zeros(24, 64), scale="recalculate")


def test_a_dense_weight_is_not_a_packed_one():
    layout = "TensorWiseINT8Layout"
    other = QuantizedTensor.from_float(torch.randn(16, 32), layout)
    assert not is_packed(other)
    assert not is_packed(torch.zeros(2))
    assert not is_packed(None)
