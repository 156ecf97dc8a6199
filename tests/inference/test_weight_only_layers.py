"""Linear layers whose inputs stay in 16 bit: few rows take the weight as it is packed."""

import pytest
import torch
from torch import nn

from quantkit.device import log
from quantkit.device.backends import Backend, use
from quantkit.inference.layers.layer_summary import packed_layers
from quantkit.numerics.formats import E4M3FN, E5M2, INT4, INT8
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.packed import packed_module
from tests.support.sampling import one_of_each, turned

NONE = Activation.NONE
TAKEN = {
    "int4": Scheme(INT4, PerChannel(), None, NONE),
    "int8": Scheme(INT8, PerChannel(), None, NONE),
    "int8-tensor": Scheme(INT8, PerTensor(), None, NONE),
    "e4m3fn": Scheme(E4M3FN, PerChannel(), None, NONE),
    "e5m2-tensor": Scheme(E5M2, PerTensor(), None, NONE),
}
LEFT = {
    "group": (Scheme(E4M3FN, PerGroup(32), None, NONE), 64, "a scale per group"),
    "sparse": (Scheme(INT8, PerChannel(), TWO_OF_FOUR, NONE), 64, "2:4 weights"),
    "short": (Scheme(INT8, PerChannel(), None, NONE), 48, "K 48 is not a multiple of 32"),
}


def calls_of(layer, x):
    """Return what a layer gives, and the operations that it ran."""
    with log.record() as seen:
        y = layer(x)
    return y, {name for name, *_ in seen.calls}


@pytest.mark.parametrize("case", turned(TAKEN, (torch.float16, torch.bfloat16)))
def test_few_rows_take_the_weight_as_it_is_packed(case):
    scheme, dtype = TAKEN[case[0]], case[1]
    torch.manual_seed(0)
    layer = packed_module(nn.Linear(96, 40), scheme)
    for rows in (1, 64):
        x = torch.randn(rows, 96).to(dtype)
        y, ran = calls_of(layer, x)
        wanted = x.double() @ layer.dequantized().double().T + layer.bias.double()
        assert ran == {"gemm_w16"}
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y.double(), wanted, rtol=2 * eps, atol=eps)


@pytest.mark.parametrize(
    ("rows", "dtype"), [(65, torch.float16), (4, torch.float32)], ids=["65 rows", "float32"]
)
def test_other_inputs_take_a_dequantized_weight(rows, dtype):
    layer = packed_module(nn.Linear(96, 40), TAKEN["int4"])
    y, ran = calls_of(layer, torch.randn(rows, 96, dtype=dtype))
    assert (ran, y.shape, y.dtype) == (set(), (rows, 40), dtype)


@pytest.mark.parametrize(("scheme", "k", "reason"), LEFT.values(), ids=LEFT)
def test_what_no_kernel_takes_says_so_and_is_dequantized(scheme, k, reason):
    layer = packed_module(nn.Linear(k, 8), scheme)
    (info,) = packed_layers(nn.ModuleDict({"a": layer}))
    assert info.backend == "dequantized"
    assert reason in info.reason
    x = torch.randn(2, k).bfloat16()
    wanted = x.double() @ layer.dequantized().double().T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), wanted, rtol=0.03, atol=0.03)


def test_leading_axes_and_no_rows():
    layer = packed_module(nn.Linear(64, 8), TAKEN["int4"])
    assert layer(torch.randn(2, 3, 64).half()).shape == (2, 3, 8)
    assert layer(torch.randn(64).half()).shape == (8,)
    assert layer(torch.empty(0, 64).half()).shape == (0, 8)


def test_the_reference_can_be_asked_for():
    layer = packed_module(nn.Linear(64, 8), TAKEN["int8"])
    x = torch.randn(3, 64).half()
    with use(Backend.REFERENCE):
        (info,) = packed_layers(nn.ModuleDict({"a": layer}))
        y = layer(x)
    assert info.backend == "dequantized"
    torch.testing.assert_close(y, layer(x), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", one_of_each(TAKEN, type))
def test_it_compiles_into_one_graph(name):
    scheme = TAKEN[name]
    torch._dynamo.reset()
    model = nn.Sequential(packed_module(nn.Linear(64, 32), scheme), nn.SiLU())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for rows in (2, 5, 80):
        x = torch.randn(rows, 64).bfloat16()
        assert torch.equal(compiled(x), model(x))


def test_the_same_inputs_give_the_same_bits():
    layer = packed_module(nn.Linear(1152, 40), TAKEN["int4"])
    x = torch.randn(33, 1152).half()
    assert torch.equal(layer(x), layer(x))
