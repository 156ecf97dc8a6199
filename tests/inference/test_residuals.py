"""Blocks whose last products end in the sum: diffusers' results, rounded less often."""

import threading

import peft
import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from quantkit.device import compilers, log
from quantkit.inference.blocks import feed_forward, group_norms, picture_norms, residuals
from quantkit.inference.blocks.normed_blocks import install
from quantkit.inference.blocks.residuals import ResidualSum
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.granularity import PerChannel, PerGroup
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.inference.test_group_norms import picture, resnet, transformer
from tests.inference.test_normed_blocks import (
    CASES,
    STATIC,
    Logging,
    answer,
    hooked,
    offloaded,
    packed,
)
from tests.support.kernel_cases import need
from tests.support.packed import packed_module
from tests.support.picture_schemes import CODED
from tests.support.sampling import turned

SCHEMES = {
    "static": STATIC,
    "token": Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN),
    "int8": Scheme(INT8, PerChannel(), None, Activation.STATIC),
    "sparse": Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, Activation.STATIC),
}
#: Sums that end a product: both attentions and the network; of both streams attention and network.
SUMS = {"basic": 3, "joint": 4, "joint, last": 2, "joint, dual": 0, "flux": 4, "flux, single": 1}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """Every device has kernels that add, a CPU too."""
    need(compilers.host_compiler)
    monkeypatch.setattr(residuals, "has_kernel", lambda *_: True)


def counted(function):
    """Return what a function gives, and how many products it ended in a sum."""
    with log.record() as seen:
        result = function()
    return result, sum(n for (name, *_), n in seen.calls.items() if name.endswith("_residual"))


def near(found, wanted):
    # Codes behind a sum in other bits go to the next place, 1/8 of their value.
    return all(
        a.dtype is b.dtype and float((a - b).float().norm() / b.float().norm()) < 0.02
        for a, b in zip(found, wanted, strict=True)
    )


def cast(model, inputs, dtype):
    model.to(dtype)
    return {k: v if k == "image_rotary_emb" else v.to(dtype) for k, v in inputs.items()}


@torch.no_grad()
@pytest.mark.parametrize("how", turned(CASES, (torch.bfloat16, torch.float16)))
def test_products_of_blocks_end_in_the_sum(how):
    case, dtype = how
    model, inputs = packed(case)
    inputs = cast(model, inputs, dtype)
    feed_forward.install(model)
    wanted, none = counted(lambda: answer(model, inputs))
    install(model)
    found, sums = counted(lambda: answer(model, inputs))
    assert (none, sums) == (0, SUMS[case])
    assert near(found, wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("case", ["basic", "flux", "flux, single"])
def test_every_scheme_of_one_term_adds(case, name):
    model, inputs = packed(case, SCHEMES[name])
    wanted = answer(model, inputs)
    install(model)
    found, sums = counted(lambda: answer(model, inputs))
    assert sums == SUMS[case]
    assert near(found, wanted)


@torch.no_grad()
def test_gated_networks_add(monkeypatch):
    monkeypatch.setattr(feed_forward, "has_kernel", lambda *_: True)
    model, inputs = packed("basic")
    feed_forward.install(model)
    wanted = answer(model, inputs)
    install(model)
    found, sums = counted(lambda: answer(model, inputs))
    assert sums == SUMS["basic"]
    assert near(found, wanted)


def dropping(module):
    module.train()


#: What is not as ever -> how many sums that leaves.
OTHERWISE = {
    "hook on attention": ("attn1", hooked, 2),
    "hook on the layer": ("attn2.to_out.0", hooked, 2),
    "offloaded layer": ("attn2.to_out.0", offloaded, 2),
    "hook on dropout": ("attn1.to_out.1", hooked, 2),
    "dropout at work": ("attn1.to_out.1", dropping, 2),
    "hook on the network": ("ff", hooked, 2),
    "hook on its layer": ("ff.net.2", hooked, 2),
    "scaled attention": ("attn1", lambda a: setattr(a, "rescale_output_factor", 2.0), 2),
    "another's processor": ("attn1", lambda a: a.set_processor(Logging()), 2),
}


@torch.no_grad()
@pytest.mark.parametrize(("path", "change", "left"), OTHERWISE.values(), ids=list(OTHERWISE))
def test_who_looks_at_a_part_gets_what_it_gave(path, change, left):
    model, inputs = packed("basic")
    before = counted(lambda: answer(model, inputs))[0]
    install(model)
    # Found before, and no more as it was.
    assert counted(lambda: answer(model, inputs))[1] == SUMS["basic"]
    change(model[0].get_submodule(path))
    torch.manual_seed(1)
    found, sums = counted(lambda: answer(model, inputs))
    assert sums == left
    if change in {hooked, offloaded}:
        assert near(found, before)


@torch.no_grad()
@pytest.mark.parametrize(
    ("path", "scheme"),
    [
        ("attn2.to_out.0", Scheme(E4M3FN, PerChannel(), None, Activation.NONE)),
        ("ff.net.2", Scheme(E4M3FN, PerGroup(16), None, Activation.STATIC)),
        ("ff.net.2", None),
    ],
    ids=["16 bit", "groups", "dense"],
)
def test_layers_that_no_kernel_computes_add_as_ever(path, scheme):
    model, inputs = packed("basic")
    torch.manual_seed(1)
    width = 128 if "net" in path else 32
    dense = nn.Linear(width, 32)
    model[0].set_submodule(path, packed_module(dense, scheme) if scheme else dense)
    wanted = answer(model, inputs)
    install(model)
    found, sums = counted(lambda: answer(model, inputs))
    assert sums == SUMS["basic"] - 1
    assert near(found, wanted)


@torch.no_grad()
@pytest.mark.parametrize("case", ["basic", "flux"])
def test_an_adapter_adds_as_ever(case):
    model, inputs = packed(case)
    install(model)
    assert counted(lambda: answer(model, inputs))[1] == SUMS[case]
    config = peft.LoraConfig(r=4, target_modules=["to_out.0", "net.2"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    assert counted(lambda: answer(model, inputs))[1] == (0 if case == "basic" else 1)


def test_gradients_of_what_is_added_are_not_lost():
    model, inputs = packed("basic")
    install(model)
    x = inputs["hidden_states"].requires_grad_()
    (y,), sums = counted(lambda: answer(model, {**inputs, "hidden_states": x}))
    assert sums == 0
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))


@torch.no_grad()
def test_another_thread_in_the_middle_gets_its_own_sum():
    torch.manual_seed(0)
    layer = packed_module(nn.Linear(32, 32), STATIC)
    x, mine, theirs = torch.randn(3, 2, 5, 32)
    product, found = layer(x), []

    def other():
        with ResidualSum(layer, theirs) as end:
            found.append(end.total(layer(x)))

    with ResidualSum(layer, mine) as end:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        y = end.total(layer(x))
    assert torch.allclose(y, mine + product, atol=1e-5)
    assert torch.allclose(found[0], theirs + product, atol=1e-5)
    assert "forward" not in vars(layer)


@torch.no_grad()
def test_a_failure_leaves_the_layer_as_it_was():
    layer, x = packed_module(nn.Linear(32, 32), STATIC), torch.randn(2, 5, 32)
    with pytest.raises(ZeroDivisionError), ResidualSum(layer, x):
        raise ZeroDivisionError
    assert "forward" not in vars(layer)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_is_added_has_the_shape_and_dtype_of_the_product(dtype):
    layer, x = packed_module(nn.Linear(32, 32), STATIC), torch.randn(2, 5, 32).to(dtype)
    product = layer(x)
    for added in (torch.randn(1, 5, 32).to(dtype), torch.randn(2, 5, 32).double()):
        with ResidualSum(layer, added) as end:
            assert torch.equal(layer(x), product)
        assert torch.equal(end.total(product), added + product)


# --------------------------------------------------------------------------------------- pictures


@pytest.fixture
def coding(monkeypatch):
    monkeypatch.setattr(picture_norms, "has_picture_kernel", lambda *_: True)


@torch.no_grad()
@pytest.mark.usefixtures("coding")
@pytest.mark.parametrize(
    ("name", "out", "dtype"),
    [
        ("e4m3fn", 64, torch.float16),
        ("int8", 32, torch.bfloat16),
        ("sparse", 64, torch.float32),
        ("smooth", 32, torch.float16),
    ],
)
def test_a_resnet_block_adds_its_picture(name, out, dtype):
    model, given = resnet(CODED[name], out=out, dtype=dtype), picture(dtype=dtype)
    wanted = model[0](*given)
    group_norms.install(model)
    found, sums = counted(lambda: model[0](*given))
    assert sums == 1
    assert found.shape == wanted.shape
    assert near([found], [wanted])


@torch.no_grad()
@pytest.mark.usefixtures("coding")
@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "output_scale_factor", 2.0),
        lambda block: hooked(block.conv2),
        lambda block: setattr(block.conv2, "forward", block.conv2.forward),
    ],
    ids=["scaled", "hooked", "offloaded"],
)
def test_a_resnet_block_that_is_not_as_ever_adds_as_ever(change):
    model = resnet(CODED["e4m3fn"])
    change(model[0])
    wanted = model[0](*picture())
    group_norms.install(model)
    assert type(model[0]) is not ResnetBlock2D
    found, sums = counted(lambda: model[0](*picture()))
    assert sums == 0
    assert near([found], [wanted])


@torch.no_grad()
@pytest.mark.usefixtures("coding")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_transformer_adds_its_picture(dtype):
    model = transformer(CODED["e4m3fn"], dtype)
    model[0].proj_out = packed_module(model[0].proj_out, CODED["e4m3fn"], name="proj_out")
    model.to(memory_format=torch.channels_last)
    x = picture(dtype=dtype)[0].to(memory_format=torch.channels_last)
    wanted = model[0](x).sample
    group_norms.install(model)
    found, sums = counted(lambda: model[0](x).sample)
    assert sums == 1
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert near([found], [wanted])
