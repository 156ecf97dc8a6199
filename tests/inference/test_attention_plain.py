"""A packed UNet's attention: diffusers' answers with less work."""

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
)
from torch import nn

from quantkit.calibration.observing.attention_observer import listening
from quantkit.device import compilers
from quantkit.inference.attention import attention_plain, coded_attention
from tests.support.kernel_cases import need
from tests.support.packed import packed_module
from tests.support.picture_schemes import CODED

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _without_gradients():
    need(compilers.host_compiler)
    with torch.no_grad():
        yield


def calls_of(monkeypatch, owner, name):
    """Return a list that grows with each call of a function."""
    seen, function = [], getattr(owner, name)

    def counting(*arguments, **options):
        seen.append(arguments)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, counting)
    return seen


def attending(*, context=None, dtype=torch.float32, **options):
    """Return a module whose queries are packed, with the processor of a packed model."""
    torch.manual_seed(0)
    attn = Attention(32, cross_attention_dim=context, heads=4, dim_head=8, **options)
    attn = attn.to(dtype).eval()
    attn.to_q = packed_module(attn.to_q, CODED["e4m3fn"], name="to_q")
    return attn


def pair_of_answers(attn, *arguments, **options):
    """Return what diffusers' processor gives, and what a packed model's gives."""
    wanted = attn(*arguments, **options)
    coded_attention._quantize(nn.Sequential(attn), None)
    return wanted, attn(*arguments, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("context", [None, 24])
def test_attention_without_the_division_is_the_same_to_the_bit(context, dtype, monkeypatch):
    seen = calls_of(monkeypatch, attention_plain, "scaled_dot_product_attention")
    x = torch.randn(2, 9, 32).to(dtype)
    x[0, 0] = -0.0
    words = None if context is None else torch.randn(2, 5, context).to(dtype)
    wanted, found = pair_of_answers(attending(context=context, dtype=dtype), x, words)
    assert len(seen) == 1
    assert torch.equal(wanted, found)
    assert torch.equal(wanted.signbit(), found.signbit())


def test_a_processor_that_is_written_again_can_be_listened_to():
    attn, x, told = attending(), torch.randn(2, 9, 32), []
    wanted, answer = pair_of_answers(attn, x)
    with listening({"attn": attn}, lambda name, heads, _: told.append((name, heads.q.shape))):
        found = attn(x)
    assert told == [("attn", (2, 4, 9, 8))]
    assert torch.equal(found, wanted)
    assert torch.equal(attn(x), answer)
    assert len(told) == 1


@pytest.mark.parametrize("context", [None, 24])
def test_joined_projections_are_read_where_they_lie(context, monkeypatch):
    attn = attending(context=context)
    attn.to_q = nn.Linear(32, 32, bias=False)
    attn.fuse_projections()
    attn.set_processor(FusedAttnProcessor2_0())
    attn.to_out[0] = packed_module(attn.to_out[0], CODED["e4m3fn"], name="to_out")
    seen = calls_of(monkeypatch, attention_plain, "scaled_dot_product_attention")
    words = None if context is None else torch.randn(2, 5, context)
    wanted, found = pair_of_answers(attn, torch.randn(2, 9, 32), words)
    assert len(seen) == 1
    assert torch.equal(wanted, found)


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"rescale_output_factor": 2.0}, {}),
        ({"residual_connection": True}, {}),
        ({"norm_num_groups": 4}, {}),
        ({"qk_norm": "layer_norm"}, {}),
        ({}, {"attention_mask": torch.zeros(2, 1, 9)}),
    ],
    ids=["factor", "residual", "norm", "norms of heads", "mask"],
)
def test_what_is_more_than_attention_is_diffusers_own(options, call, monkeypatch):
    seen = calls_of(monkeypatch, attention_plain, "scaled_dot_product_attention")
    wanted, found = pair_of_answers(attending(**options), torch.randn(2, 9, 32), **call)
    assert not seen
    assert torch.equal(wanted, found)


def test_a_factor_divides_attention_on_codes_too():
    x = torch.randn(1, 64, 32)
    found = []
    for factor in (1.0, 4.0):
        attn = attending(rescale_output_factor=factor)
        coded_attention.attention(wrapped := nn.Sequential(attn), min_keys=1)
        found.append(wrapped[0](x))
    assert torch.equal(found[0] / 4, found[1])


def unet():
    """Return a small UNet whose layers are packed."""
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    ).eval()
    for name, module in list(model.named_modules()):
        if not name.startswith(("conv_", "time_")) and type(module) in (nn.Linear, nn.Conv2d):
            model.set_submodule(name, packed_module(module, CODED["e4m3fn"], name=name))
    return model


def answer(model):
    generator = torch.Generator().manual_seed(1)
    x, words = torch.randn(2, 4, 8, 8, generator=generator), torch.ones(2, 7, 32)
    return model(x, 10, words).sample


def test_default_processors_may_be_set_and_known_ones_come_back():
    model = unet()
    coded_attention.install(model, None)
    own = set(map(type, model.attn_processors.values()))
    assert AttnProcessor2_0 not in own
    wanted = answer(model)
    model.set_default_attn_processor()
    assert set(map(type, model.attn_processors.values())) == {AttnProcessor}
    assert torch.allclose(answer(model), wanted, rtol=1e-3, atol=1e-3)
    model.set_attn_processor(AttnProcessor2_0())
    assert set(map(type, model.attn_processors.values())) == own
    coded_attention.uninstall(model)
    assert not {"set_attn_processor", "set_default_attn_processor"} & vars(model).keys()
