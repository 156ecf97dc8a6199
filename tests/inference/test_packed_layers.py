"""Packed layers as parameters and as dense layers: what other libraries ask of them."""

from typing import Any

import pytest
import torch
from torch import nn

from quantkit.inference.layers.codes import Codes
from quantkit.inference.layers.modules import pack_module
from tests.inference.test_inference import SCHEMES
from tests.support.packed import packed_module


@pytest.mark.parametrize("bias", [True, False])
def test_bias_and_compute_dtype_follow_the_model(bias):
    layer = packed_module(nn.Linear(32, 8, bias), SCHEMES["token"])
    assert layer.compute_dtype == torch.float32
    layer.half()
    assert layer.compute_dtype == torch.float16
    # diffusers' layerwise casting stores layers so, between calls.
    layer.to(torch.float8_e4m3fn)
    assert layer.compute_dtype == torch.float16
    assert not bias or layer.bias.dtype == torch.float16
    assert not any(p.requires_grad for p in layer.parameters())
    assert not any(p.is_floating_point() for n, p in layer.named_parameters() if n != "bias")


def test_codes_leave_the_meta_device_as_codes():
    layer = pack_module("l", SCHEMES["token"], nn.Linear(32, 8, device="meta"), None)
    layer.to_empty(device="cpu")
    assert type(layer.codes) is Codes
    assert layer.codes.dtype == torch.float8_e4m3fn
    assert layer.codes.device.type == layer.weight_scale.device.type == "cpu"


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_layers_are_dense_layers_to_those_who_ask(scheme):
    linear = packed_module(nn.Linear(64, 24), scheme)
    assert isinstance(linear, nn.Linear)
    assert (linear.in_features, linear.out_features) == (64, 24)
    assert type(type(linear)(3, 5, bias=False)) is nn.Linear
    assert type(type(linear)(in_features=3, out_features=5)) is nn.Linear
    dense = nn.Conv2d(32, 24, (3, 1), (2, 1), padding="valid", dilation=(1, 2))
    conv = packed_module(dense, scheme)
    assert isinstance(conv, nn.Conv2d)
    # peft counts the axes of a weight, whatever the rows of its codes are.
    assert conv.weight.ndim == 4
    for name in nn.Conv2d.__constants__:
        assert getattr(conv, name) == getattr(dense, name)
    kind: Any = type(conv)
    made = kind(32, 4, conv.kernel_size, conv.stride, conv.padding, bias=False)
    assert type(made) is nn.Conv2d
    assert made.weight.shape == (4, 32, 3, 1)
