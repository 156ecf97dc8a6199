"""Layers under a treatment inside a module, against packed ones."""

import pytest
import torch
from torch import nn

from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.sensitivity.simulate import Substitute, relative_error, treated
from quantkit.sensitivity.treated_layer import treat_weight
from quantkit.sensitivity.treatments import BY_NAME
from tests.support.packed import packed_module
from tests.support.sensitivities import settings_of

CONVOLUTIONS = {
    "plain": {"padding": 1},
    "strided": {"padding": 1, "stride": 2},
    "dilated same": {"padding": "same", "dilation": 2},
    "one tap": {"kernel_size": 1, "bias": False},
    "no padding": {"stride": (2, 1)},
}


@pytest.mark.parametrize("name", ["e4m3fn-static", "e4m3fn-token", "2:4-magnitude-e4m3fn-token"])
@pytest.mark.parametrize("form", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_treated_convolution_is_the_packed_one(name, form):
    torch.manual_seed(1)
    dense = nn.Conv2d(32, 8, **{"kernel_size": 3, **form}).requires_grad_(requires_grad=False)
    x = torch.randn(2, 32, 7, 6)
    assert_treated_is_packed(dense, x, BY_NAME[name])


@pytest.mark.parametrize("name", ["e4m3fn-static", "e5m2-token", "2:4-magnitude-e4m3fn-token"])
def test_treated_linear_is_the_packed_one(name):
    torch.manual_seed(1)
    dense = nn.Linear(64, 24).requires_grad_(requires_grad=False)
    assert_treated_is_packed(dense, torch.randn(2, 5, 64), BY_NAME[name])


class Root(nn.Module):
    """A denoiser of one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, timestep):
        return self.layer(x)


def assert_treated_is_packed(dense, x, treatment):
    from quantkit.numerics.packed_2to4 import to_rows
    from quantkit.sensitivity.treated_layer import InputCast

    root = Root(dense)
    before = root(x, timestep=5)
    mask = TWO_OF_FOUR if treatment.method else None
    packed = packed_module(
        dense, Scheme(treatment.format, PerChannel(), mask, treatment.activation)
    )
    rows = treat_weight(to_rows(dense.weight), treatment, settings_of(), None)
    cast = InputCast(treatment.format, None)
    if treatment.activation is Activation.STATIC:
        cast = InputCast(treatment.format, packed.input_scale.reshape(1))
    with treated(root, {"layer": Substitute.of(rows, tuple(dense.weight.shape), cast)}):
        found = root(x, timestep=torch.tensor([5]))
        half = root(x.half(), timestep=5)
    torch.testing.assert_close(found, packed(x), rtol=1e-5, atol=1e-5)
    assert half.dtype == torch.float16
    assert torch.equal(root(x, timestep=5), before)
    assert "forward" not in vars(dense)


def test_scale_follows_the_timestep():
    from quantkit.sensitivity.treated_layer import InputCast

    root = Root(nn.Linear(16, 16, bias=False).requires_grad_(requires_grad=False))
    cast = InputCast(BY_NAME["e4m3fn-static"].format, torch.tensor([1e-3, 1.0]), (500.0,))
    x = torch.full((1, 16), 100.0)
    with treated(root, {"layer": Substitute.of(torch.eye(16), (16, 16), cast)}):
        low, high = root(x, timestep=499), root(x, timestep=500)
    # The small scale saturates at 448 codes; the large one rounds 100 to e4m3's 96 or 104.
    assert float(low[0, 0]) == pytest.approx(0.448)
    assert float(high[0, 0]) in (96.0, 104.0)


def test_layers_are_restored_after_an_error():
    root = Root(nn.Linear(16, 16))
    substitutes = {"layer": Substitute(torch.eye(16), None)}
    with pytest.raises(ZeroDivisionError), treated(root, substitutes):
        raise ZeroDivisionError
    assert "forward" not in vars(root.layer)
    assert not root._forward_pre_hooks


def test_relative_error_is_the_median_over_prompts():
    wanted = torch.ones(3, 2, 2)
    found = wanted * torch.tensor([1.1, 1.2, 5.0]).reshape(3, 1, 1)
    assert relative_error(found, wanted) == pytest.approx(0.04)
    assert relative_error(torch.zeros(1, 4), torch.zeros(1, 4)) == 0
