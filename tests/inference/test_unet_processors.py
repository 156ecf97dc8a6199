"""Processors of a packed UNet: what its attention on codes keeps of them."""

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
)
from torch import nn

from quantkit.checkpoint.packed_attention import PackedAttention
from quantkit.device import compilers
from quantkit.inference.attention import coded_attention
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


def attending(*, context=None, dtype=torch.float32, **options):
    """Return a module whose queries are packed, with the processor of a packed model."""
    torch.manual_seed(0)
    attn = Attention(32, cross_attention_dim=context, heads=4, dim_head=8, **options)
    attn = attn.to(dtype).eval()
    attn.to_q = packed_module(attn.to_q, CODED["e4m3fn"], name="to_q")
    return attn


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
        attention_head_dim=2,
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
    wanted = answer(model)
    coded_attention.install(model, PackedAttention("e4m3fn", 1))
    own = set(map(type, model.attn_processors.values()))
    assert AttnProcessor2_0 not in own
    assert not torch.equal(answer(model), wanted)
    model.set_default_attn_processor()
    assert set(map(type, model.attn_processors.values())) == {AttnProcessor}
    assert torch.allclose(answer(model), wanted, rtol=1e-3, atol=1e-3)
    model.set_attn_processor(AttnProcessor2_0())
    assert set(map(type, model.attn_processors.values())) == own
    coded_attention.uninstall(model)
    assert not {"set_attn_processor", "set_default_attn_processor"} & vars(model).keys()
