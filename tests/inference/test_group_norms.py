"""Group norms that write codes: what diffusers' blocks answer, and when they are not taken."""

import copy
import pickle

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from quantkit.device import compilers, log
from quantkit.inference.blocks import group_norms, picture_norms
from quantkit.inference.blocks.coded_transformer import CodedTransformer2DModel
from quantkit.inference.blocks.group_norms import CodedResnetBlock, install
from tests.support.kernel_cases import need
from tests.support.packed import packed_module
from tests.support.picture_schemes import APART, CODED, PLAIN


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


@pytest.fixture
def coding(monkeypatch):
    """Every device codes, a CPU too."""
    monkeypatch.setattr(picture_norms, "has_picture_kernel", lambda *_: True)


def _randomised(module):
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.data = torch.randn_like(parameter)
    return module


def resnet(scheme, *, out=64, dtype=torch.float32, **options):
    """Return a model of one block with packed convolutions, in eval mode."""
    torch.manual_seed(0)
    block = ResnetBlock2D(in_channels=32, out_channels=out, temb_channels=16, groups=8, **options)
    _randomised(block).to(dtype)
    for name in ("conv1", "conv2"):
        if scheme:
            setattr(block, name, packed_module(getattr(block, name), scheme, name=name))
    return nn.Sequential(block).eval()


def transformer(scheme, dtype=torch.float32):
    torch.manual_seed(0)
    model = Transformer2DModel(
        2, 16, in_channels=32, num_layers=1, norm_num_groups=8, use_linear_projection=True
    )
    _randomised(model).to(dtype)
    if scheme:
        model.proj_in = packed_module(model.proj_in, scheme, name="proj_in")
    return nn.Sequential(model).eval()


def picture(height=7, width=5, batch=2, dtype=torch.float32):
    torch.manual_seed(1)
    return (torch.randn(batch, 32, height, width) + 2).to(dtype), torch.randn(batch, 16).to(dtype)


def both(model, *arguments):
    """Return what diffusers gives, what codes give, and the kernels of that."""
    with torch.no_grad():
        wanted = model[0](*arguments)
        install(model)
        with log.record() as seen:
            found = model[0](*arguments)
    return wanted, found, {name for name, _, _ in seen.calls}


def near(found, wanted):
    # A norm that is summed in another order moves single values to the next code.
    lost = (found.float() - wanted.float()).square().mean().sqrt()
    return float(lost / wanted.float().square().mean().sqrt()) < 5e-3


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("out", [32, 64])
@pytest.mark.parametrize("scheme", CODED.values(), ids=CODED)
def test_a_block_answers_as_diffusers_does(scheme, out, layout, coding):
    x, temb = picture()
    wanted, found, kernels = both(resnet(scheme, out=out), x.to(memory_format=layout), temb)
    assert "group_partials" in kernels
    assert not any(name.startswith("quantize") for name in kernels)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert near(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"skip_time_act": True}, {"output_scale_factor": 2.0}])
def test_options_and_dtypes(dtype, options, coding):
    x, temb = picture(dtype=dtype)
    wanted, found, kernels = both(resnet(PLAIN, dtype=dtype, **options), x, temb)
    assert "group_norm_codes_fp8" in kernels
    assert found.dtype is dtype
    assert near(found, wanted)


def test_no_time_and_one_pixel(coding):
    model = resnet(PLAIN)
    model[0].time_emb_proj = None
    x, _ = picture(1, 1, batch=1)
    wanted, found, kernels = both(model, x, None)
    assert "group_norm_codes_fp8" in kernels
    assert near(found, wanted)


@pytest.mark.parametrize("scheme", [PLAIN, CODED["smooth"]], ids=str)
def test_a_transformer_answers_as_diffusers_does(scheme, coding):
    x, _ = picture()
    model = transformer(scheme).to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        wanted = model[0](x).sample
        install(model)
        assert type(model[0]) is CodedTransformer2DModel
        with log.record() as seen:
            found = model[0](x).sample
    assert any(name == "group_norm_codes_fp8" for name, _, _ in seen.calls)
    assert near(found, wanted)
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("scheme", APART.values(), ids=APART)
def test_other_treatments_keep_diffusers_block(scheme):
    model = resnet(scheme)
    install(model)
    assert type(model[0]) is ResnetBlock2D


@pytest.mark.parametrize(
    "options",
    [
        {"time_embedding_norm": "scale_shift"},
        {"non_linearity": "gelu"},
        {"up": True},
        {"down": True},
    ],
    ids=str,
)
def test_other_blocks_keep_diffusers_code(options):
    model = resnet(PLAIN, **options)
    install(model)
    assert type(model[0]) is ResnetBlock2D


@pytest.mark.parametrize("part", ["norm1", "conv1", "norm2", "conv2", "nonlinearity", "dropout"])
def test_what_is_watched_is_called(part, coding):
    model, (x, temb) = resnet(PLAIN), picture()
    install(model)
    seen = []
    getattr(model[0], part).register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model[0](x, temb)
    assert seen


def test_training_and_another_dtype_are_diffusers_own(coding, monkeypatch):
    model, (x, temb) = resnet(PLAIN), picture()
    install(model)
    called = []
    monkeypatch.setattr(group_norms, "norm_codes", lambda *_: called.append(1))
    model.train()
    with torch.no_grad():
        model[0](x, temb)
        model.eval()
        model[0].norm1.double()
        with pytest.raises(RuntimeError):
            model[0](x, temb)  # torch's own norm takes no other weight
    assert not called


def test_without_a_gpu_blocks_are_diffusers_own():
    model, (x, temb) = resnet(PLAIN), picture()
    with torch.no_grad():
        wanted = model[0](x, temb)
        install(model)
        assert type(model[0]) is CodedResnetBlock
        assert torch.equal(model[0](x, temb), wanted)


def test_pickles_and_copies_stay_coded():
    model = nn.Sequential(*resnet(PLAIN), *transformer(PLAIN))
    install(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(part) for part in other] == [CodedResnetBlock, CodedTransformer2DModel]


def test_uninstall_gives_the_classes_back():
    model = nn.Sequential(*resnet(PLAIN), *transformer(PLAIN))
    install(model)
    group_norms.uninstall(model)
    assert [type(part) for part in model] == [ResnetBlock2D, Transformer2DModel]
