"""A packed UNet's attention, upsamplers, ends and up-blocks: diffusers' answers with less work."""

import copy
import pickle

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
)
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

from quantkit.calibration.observing.attention_observer import listening
from quantkit.device import compilers, log
from quantkit.inference.attention import attention_plain, coded_attention
from quantkit.inference.blocks import (
    first_last_conv,
    group_norms,
    picture_norms,
    up_blocks,
    upsampling,
)
from tests.support.kernel_cases import need
from tests.support.packed import packed_module
from tests.support.picture_schemes import APART, CODED, PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")

LAST = torch.channels_last
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


# ------------------------------------------------------------------------------------- attention


def attending(*, context=None, dtype=torch.float32, **options):
    """Return a module whose queries are packed, with the processor of a packed model."""
    torch.manual_seed(0)
    attn = Attention(32, cross_attention_dim=context, heads=4, dim_head=8, **options)
    attn = attn.to(dtype).eval()
    attn.to_q = packed_module(attn.to_q, PLAIN, name="to_q")
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
    attn.to_out[0] = packed_module(attn.to_out[0], PLAIN, name="to_out")
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


# ------------------------------------------------------------------------------------ upsampling


def upsampler(scheme, dtype=torch.float32, channels=16, **options):
    torch.manual_seed(0)
    up = Upsample2D(channels, use_conv=True, out_channels=8, **options).to(dtype).eval()
    if scheme:
        up.conv = packed_module(up.conv, scheme, name="conv")
    return nn.Sequential(up)


def upsampled(model, x, size=None):
    """Return what diffusers gives, what codes give, and how many values were quantized."""
    wanted = model[0](x, size)
    group_norms.install(model)
    with log.record() as seen:
        found = model[0](x, size)
    numbers = [seen.calls[call] for call in seen.calls if call[0].startswith("quantize")]
    assert numbers == [1]
    return wanted, found


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", CODED.values(), ids=CODED)
def test_upsampled_codes_are_the_same_to_the_bit(scheme, dtype, layout):
    x = torch.randn(2, 16, 5, 7).to(dtype).to(memory_format=layout)
    model = upsampler(scheme, dtype)
    wanted, found = upsampled(model, x)
    assert type(model[0]) is upsampling.CodedUpsample2D
    assert torch.equal(wanted, found)
    assert wanted.stride() == found.stride()


@pytest.mark.parametrize("channels", [8, 24, 32, 48])
def test_any_run_of_codes_is_doubled(channels):
    x = torch.randn(2, channels, 3, 1)
    wanted, found = upsampled(upsampler(PLAIN, channels=channels), x)
    assert torch.equal(wanted, found)


@pytest.mark.parametrize("size", [(9, 13), (10, 14), (1, 1), torch.Size((11, 8)), (33, 7)])
def test_other_sizes_are_the_same_to_the_bit(size):
    wanted, found = upsampled(upsampler(PLAIN), torch.randn(1, 16, 5, 7), size)
    assert torch.equal(wanted, found)


def test_codes_of_nan_are_moved_as_they_are():
    # As float64, codes of all ones are a NaN: its bits must stay.
    x = torch.full((1, 16, 2, 2), torch.nan)
    wanted, found = upsampled(upsampler(PLAIN), x)
    assert wanted.isnan().all()
    assert found.isnan().all()


def test_pixels_are_quantized_before_they_are_repeated(monkeypatch):
    seen = calls_of(monkeypatch, upsampling, "_repeated")
    model = upsampler(PLAIN)
    upsampled(model, torch.randn(2, 16, 5, 7))
    ((codes, size),) = seen
    assert (codes.dtype, codes.shape, size) == (torch.uint8, (2, 5, 7, 16), None)


@pytest.mark.parametrize("scheme", APART.values(), ids=APART)
def test_other_treatments_keep_diffusers_upsampler(scheme):
    model = upsampler(scheme)
    group_norms.install(model)
    assert type(model[0]) is Upsample2D


@pytest.mark.parametrize(
    "options",
    [{"norm_type": "ln_norm"}, {"interpolate": False}, {"channels": 12}, {"name": "op"}],
    ids=str,
)
def test_other_upsamplers_keep_diffusers_code(options):
    name = options.get("name", "conv")
    model = upsampler(None, **options)
    attribute = "conv" if name == "conv" else "Conv2d_0"
    conv = packed_module(getattr(model[0], attribute), PLAIN, name="conv")
    setattr(model[0], attribute, conv)
    group_norms.install(model)
    assert type(model[0]) is Upsample2D


def test_a_watched_convolution_is_called():
    model = upsampler(PLAIN)
    group_norms.install(model)
    seen = []
    model[0].conv.register_forward_hook(lambda _, given, y: seen.append((given[0].shape, y.shape)))
    model[0](torch.randn(1, 16, 5, 7))
    assert seen == [((1, 16, 10, 14), (1, 8, 10, 14))]


# -------------------------------------------------------------------------------- ends, up-blocks


def unet(**options):
    """Return a UNet like SDXL's whose layers are packed, as one that is not."""
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        **{
            "sample_size": 16,
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
            "use_linear_projection": True,
            "norm_num_groups": 8,
            **options,
        }
    ).eval()
    for name, module in list(model.named_modules()):
        inner = not name.startswith("conv_") and "time_emb" not in name
        if inner and type(module) in (nn.Linear, nn.Conv2d):
            model.set_submodule(name, packed_module(module, PLAIN, name=name))
    return model


def answer(model):
    generator = torch.Generator().manual_seed(1)
    x, words = torch.randn(2, 4, 16, 24, generator=generator), torch.ones(2, 7, 32)
    return model(x, 10, words).sample


@pytest.fixture
def coding(monkeypatch):
    """Every device computes norms of pictures, a CPU too."""
    for module in (picture_norms, first_last_conv):
        monkeypatch.setattr(module, "has_picture_kernel", lambda *_: True)


def ends(model):
    return [
        type(getattr(model, name)) for name in ("conv_in", "conv_norm_out", "conv_act", "conv_out")
    ]


OWN = [
    first_last_conv.FirstConv2d,
    first_last_conv.LastGroupNorm,
    first_last_conv.LastSiLU,
    first_last_conv.LastConv2d,
]
TORCH = [nn.Conv2d, nn.GroupNorm, nn.SiLU, nn.Conv2d]


def test_the_last_norm_computes_its_activation(coding):
    model = unet()
    group_norms.install(model)
    wanted = answer(model)
    first_last_conv.install(model)
    assert ends(model) == OWN
    with log.record() as seen:
        found = answer(model)
    assert "group_norm" in {name for name, _, _ in seen.calls}
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert found.is_contiguous()


@pytest.mark.parametrize("name", ["conv_norm_out", "conv_act"])
def test_a_watched_end_is_called_with_its_own_input(name, coding):
    model = unet()
    group_norms.install(model)
    wanted = answer(model)
    first_last_conv.install(model)
    seen = []
    getattr(model, name).register_forward_hook(lambda _, x, y: seen.append((type(x[0]), type(y))))
    assert torch.equal(answer(model), wanted)
    assert seen == [(torch.Tensor, torch.Tensor)]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "conv_act", nn.Mish()),
        lambda m: setattr(m, "conv_out", packed_module(m.conv_out, PLAIN, name="conv_out")),
        lambda m: setattr(m.mid_block.resnets[0], "nonlinearity", nn.GELU()),
    ],
    ids=["activation", "packed", "block"],
)
def test_other_unets_keep_torchs_modules(change):
    model = unet()
    change(model)
    group_norms.install(model)
    kept = ends(model)
    first_last_conv.install(model)
    assert ends(model) == kept


def test_a_unet_without_a_last_norm_is_left_alone():
    model = unet()
    model.conv_norm_out = model.conv_act = None
    group_norms.install(model)
    first_last_conv.install(model)
    assert type(model.conv_in) is nn.Conv2d


def test_ends_follow_copies_and_pickles_and_go(coding):
    model = unet()
    group_norms.install(model)
    first_last_conv.install(model)
    wanted = answer(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.conv_norm_out.activation_behind[0] is other.conv_act
        assert torch.equal(answer(other), wanted)
    first_last_conv.uninstall(model)
    assert ends(model) == TORCH
    assert "activation_behind" not in vars(model.conv_norm_out)


@pytest.fixture
def joining(monkeypatch):
    """Return the calls that join pictures."""
    return calls_of(monkeypatch, up_blocks, "_joined")


def test_up_blocks_answer_as_diffusers_do(coding, joining):
    model = unet()
    group_norms.install(model)
    model.conv_in.to(memory_format=LAST)
    wanted = answer(model)
    up_blocks.install(model)
    assert [type(block) for block in model.up_blocks] == [
        up_blocks.WideCrossAttnUpBlock2D,
        up_blocks.WideUpBlock2D,
    ]
    assert torch.equal(answer(model), wanted)
    assert len(joining) == 4
    up_blocks.uninstall(model)
    assert [type(block) for block in model.up_blocks] == [CrossAttnUpBlock2D, UpBlock2D]


def test_free_u_is_diffusers_own(joining):
    model = unet()
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    wanted = answer(model)
    up_blocks.install(model)
    assert torch.equal(answer(model), wanted)
    assert not joining


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layouts", [(LAST, LAST), (LAST, None), (None, None)], ids=str)
def test_joined_pictures_are_torchs_concatenation(layouts, dtype, joining):
    x, skip = (
        torch.randn(2, channels, 3, 5).to(dtype).to(memory_format=layout or torch.contiguous_format)
        for channels, layout in zip((16, 24), layouts, strict=True)
    )
    found = up_blocks._joined(x, skip)
    assert torch.equal(found, torch.cat([x, skip], dim=1))
    assert found.is_contiguous(memory_format=LAST) == (layouts == (LAST, LAST))


# ------------------------------------------------------------------------------ default processors


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
