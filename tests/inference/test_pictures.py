"""Pictures between packed convolutions: put off, made by bands, and the same as torch's."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from quantkit.inference.layers.modules import PackedConv2d
from quantkit.inference.pictures import content
from quantkit.inference.pictures.deferred import Deferred
from quantkit.numerics.formats import find_format
from quantkit.numerics.granularity import parse_granularity
from quantkit.numerics.scheme import Activation, Scheme

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = Scheme(
    find_format("int8"), parse_granularity("channel"), sparsity=None, activation=Activation.TOKEN
)


def packed(*channels, defers=True, **how):
    """Return a convolution of random int8 weights."""
    torch.manual_seed(0)
    layer = PackedConv2d("c", SCHEME, nn.Conv2d(*channels, **how), None)
    layer.fill("weight", torch.randint(-127, 128, layer.codes.shape, dtype=torch.int8))
    layer.fill("weight_scale", torch.rand(channels[1]) / 1000 + 1e-4)
    layer.defers = defers
    return layer


def pictures(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def by_lines(monkeypatch):
    """One line at a time."""
    monkeypatch.setattr(content, "BAND", 1)


GEOMETRIES = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 1},
    {"kernel_size": 3, "stride": 2},
    {"kernel_size": (5, 1), "padding": (3, 0), "dilation": (2, 1)},
    {"kernel_size": 3, "padding": "same", "stride": 1},
]


@pytest.mark.parametrize("how", GEOMETRIES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_bands_are_the_convolution_to_the_bit(how, last, monkeypatch):
    x = pictures(2, 16, 11, 7)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    layer = packed(16, 8, defers=False, **how)
    at_once = layer(x)
    assert at_once.is_contiguous() is not last
    dense = functional.conv2d(x, layer.weight.float(), layer.bias, layer.stride,
                              layer.padding, layer.dilation)  # fmt: skip
    assert float((at_once - dense).norm() / dense.norm()) < 0.01
    monkeypatch.setattr(content, "BAND", 1)
    assert torch.equal(layer(x), at_once)
    layer.defers = True
    with torch.no_grad():
        deferred = layer(x)
        assert isinstance(deferred, Deferred)
        assert deferred.shape == at_once.shape
        assert torch.equal(deferred.clone(), at_once)


def block(x, layers, norm):
    """Return what residual blocks of VAEs compute."""
    first, second, shortcut = layers
    hidden = first(functional.silu(norm(x)))
    hidden = functional.dropout(functional.silu(norm(hidden)), training=False)
    return (shortcut(x) + second(hidden)) / 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("by_lines")
def test_a_block_put_off_is_the_block(dtype):
    norm = nn.GroupNorm(4, 16, eps=1e-6).to(dtype)
    nn.init.normal_(norm.weight)
    layers = [packed(16, 16, kernel_size=3, padding=1) for _ in range(2)]
    layers += [packed(16, 16, kernel_size=1)]
    head = packed(16, 16, kernel_size=1)
    for layer in (*layers, head):
        layer.to(dtype)
    with torch.no_grad():
        put_off = block(head(pictures(2, 16, 9, 8, dtype=dtype)), layers, norm)
        assert isinstance(put_off, Deferred)
        assert isinstance(put_off.content, content.Sum)
        doubled = functional.interpolate(put_off, scale_factor=2.0, mode="nearest")
        assert isinstance(doubled, Deferred)
        assert isinstance(doubled.content, content.Doubled)
        found = layers[0](doubled).clone()
        for layer in (*layers, head):
            layer.defers = False
        plain = block(head(pictures(2, 16, 9, 8, dtype=dtype)), layers, norm)
        plain = layers[0](functional.interpolate(plain, scale_factor=2.0, mode="nearest"))
    assert type(found) is torch.Tensor
    # A norm's last bit moves codes by one step, a 127th of a window's largest value.
    assert float((found.float() - plain.float()).norm() / plain.float().norm()) < 0.01


def test_large_upsampled_pictures_are_given_up_and_computed_again(monkeypatch):
    monkeypatch.setattr(content, "BAND", 1)
    monkeypatch.setattr(content, "LARGE", 1)
    first, second = (packed(16, 16, kernel_size=3, padding=1) for _ in range(2))
    norm = nn.GroupNorm(2, 16)
    with torch.no_grad():
        small = first(pictures(1, 16, 6, 5))
        upsampled = second(functional.interpolate(small, scale_factor=2.0, mode="nearest"))
        assert isinstance(upsampled, Deferred)
        normed = norm(upsampled)
        kept = upsampled.content
        assert isinstance(kept, content.Remade)
        before = kept.picture.clone()
        answer = second(functional.silu(normed))
        total = upsampled + answer
        assert kept.picture is not None
        answer.sum()
        assert kept.picture is None
        summed = total.clone()
        assert torch.equal(summed, before + answer)
        assert torch.equal(upsampled.clone(), before)
        monkeypatch.setattr(content, "LARGE", 2**40)
        kept.release()
        assert kept.picture is not None


def test_anything_else_computes_it_once(monkeypatch):
    calls = []
    lines = content.Product.lines
    monkeypatch.setattr(
        content.Product, "lines", lambda self, *a: (calls.append(a), lines(self, *a))[1]
    )
    with torch.no_grad():
        deferred = packed(16, 8, kernel_size=1)(pictures(1, 16, 4, 4))
        assert (deferred.shape, deferred.dtype, deferred.dim()) == ((1, 8, 4, 4), torch.float32, 4)
        assert not calls
        total = deferred.sum() + torch.cat([deferred, deferred]).sum() + (deferred * 2).sum()
        assert type(total) is torch.Tensor
        values = deferred.numpy()
    assert len(calls) == 1
    torch.testing.assert_close(float(total), float(values.sum() * 5), rtol=1e-5, atol=0)


#: What no norm kernel takes, another upsampling, and sums of other shapes.
OTHERS = {
    "groups of 3": (6, lambda x: functional.group_norm(x, 2)),
    "silu alone": (8, functional.silu),
    "in place": (8, lambda x: functional.silu(functional.group_norm(x, 2), inplace=True)),
    "by 3": (8, lambda x: functional.interpolate(x, scale_factor=3.0, mode="nearest")),
    "to a size": (8, lambda x: functional.interpolate(x, size=(8, 8), mode="nearest")),
    "bilinear": (8, lambda x: functional.interpolate(x, scale_factor=2.0, mode="bilinear")),
    "a column": (8, lambda x: x + torch.ones(1, 8, 1, 1)),
    "a number": (8, lambda x: 1 + x),
    "another dtype": (8, lambda x: x + x.detach().clone().double()),
    "divided": (8, lambda x: x / 2),
    "squeezed": (8, lambda x: x.flatten(1).softmax(1)),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("by_lines")
def test_what_is_not_put_off_is_torchs(name):
    outputs, apply = OTHERS[name]
    layer, x = packed(16, outputs, kernel_size=3, padding=1), pictures(1, 16, 5, 4)
    with torch.no_grad():
        found = apply(layer(x))
        layer.defers = False
        wanted = apply(layer(x))
    found = found.compute() if isinstance(found, Deferred) else found
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_nothing_is_put_off_with_gradients_compilers_or_hooks():
    layer, x = packed(16, 8, kernel_size=1), pictures(1, 16, 4, 4)
    assert type(layer(x)) is torch.Tensor
    with torch.no_grad():
        assert type(torch.compile(layer, backend="eager", fullgraph=True)(x)) is torch.Tensor
    layer.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        assert type(layer(x)) is torch.Tensor


def test_nan_stays_where_it_is():
    layer, x = packed(16, 8, kernel_size=3, padding=1), pictures(1, 16, 6, 6)
    x[0, 3, 0, 0] = float("nan")
    with torch.no_grad():
        nan = layer(x).isnan()
    assert nan[..., :2, :2].all()
    assert nan.sum() == 4 * 8


def test_flat_groups_and_large_means_are_normed():
    """Variances below eps, and of values that are 1000 times their spread."""
    x = pictures(1, 8, 6, 5)
    x[:, :4] = 3
    x[:, 4:] += 1000
    normed = content.Normed.of(content.Stored(x), 2, None, None, 1e-6)
    found = torch.cat([normed.lines(i, i + 1) for i in range(6)], 1).permute(0, 3, 1, 2)
    wanted = functional.group_norm(x.double(), 2, eps=1e-6)
    torch.testing.assert_close(found.double(), wanted, atol=2e-4, rtol=0)
