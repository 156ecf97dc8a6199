"""Gains: how much of a layer's error reaches the output."""

import pytest

from quantkit.sensitivity.error_propagation import find_gains
from quantkit.sensitivity.sensitivity_file import Measured
from tests.support.sensitivities import layer_with


def test_gain_is_measured_or_the_median_of_role_kind_or_all():
    token = "e4m3fn-token"
    layers = [
        layer_with(f"a.{i}.to_q", measured=Measured(token, final), **{token: 0.01})
        for i, final in enumerate((0.1, 0.3, 0.2))
    ]
    layers += [
        layer_with("b.a.to_q", **{token: 0.5}),
        layer_with("b.ff.out", **{token: 0.5}),
        layer_with("c.conv1", kind="conv2d", **{token: 0.5}),
    ]
    gains = find_gains(layers)
    assert gains["a.1.to_q"].value == pytest.approx(30)
    assert [gains[layer.name].source for layer in layers] == [
        *["measured"] * 3,
        "median of linear a.to_q",
        "median of linear",
        "median of all",
    ]
    assert [gains[layer.name].value for layer in layers[3:]] == pytest.approx([20] * 3)
    assert find_gains(layers[3:])["c.conv1"].value == 1.0


def test_role_is_kind_and_last_two_words():
    name = "up_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj"
    assert layer_with(name).role == "linear net.proj"
    assert layer_with("proj_in", kind="conv2d").role == "conv2d proj_in"


def test_layer_without_local_error_has_the_median():
    flat = layer_with("a.x", measured=Measured("e4m3fn-token", 0.0), **{"e4m3fn-token": 0.0})
    assert find_gains([flat])["a.x"].source == "nothing measured"
