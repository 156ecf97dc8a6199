"""Fake quantization: the packed layers' numbers forward, the dense layers' gradients backward."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from quantkit.device.backends import Backend, use
from quantkit.errors import ModelError, RecipeError
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.inference.loading.pipeline_loading import load_pipeline as load_packed
from quantkit.models.source import open_model
from quantkit.numerics.formats import E4M3FN, E5M2, INT4, INT8
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.packed_2to4 import from_rows
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.packing.pack_model import pack
from quantkit.pipelines.running import choose_device, load_pipeline
from quantkit.progress import silent
from quantkit.recipe.layer_recipes import ActivationRecipe, WeightRecipe
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import Override, Recipe
from quantkit.recovery import straight_through_estimator
from quantkit.recovery.fake_quant import fake_quantized, install, plan_quants
from quantkit.recovery.straight_through_estimator import LayerQuant
from quantkit.sparsity.choose import choose_masks
from tests.support.packed import packed_module
from tests.support.sampling import turned

TOKEN, STATIC, NONE = Activation.TOKEN, Activation.STATIC, Activation.NONE
SCHEMES = {
    "token": Scheme(E4M3FN, PerChannel(), None, TOKEN),
    "token-smooth": Scheme(E4M3FN, PerTensor(), None, TOKEN, smooth=True),
    "token-sparse": Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, TOKEN),
    "token-e5m2": Scheme(E5M2, PerChannel(), None, TOKEN),
    "static": Scheme(E4M3FN, PerChannel(), None, STATIC),
    "static-smooth-sparse": Scheme(E4M3FN, PerTensor(), TWO_OF_FOUR, STATIC, smooth=True),
    "group": Scheme(E4M3FN, PerGroup(16), None, TOKEN),
    "int8-static": Scheme(INT8, PerChannel(), None, STATIC),
    "int8-token-sparse": Scheme(INT8, PerChannel(), TWO_OF_FOUR, TOKEN, smooth=True),
    "int4-token": Scheme(INT4, PerChannel(), None, TOKEN),
    "int4-token-sparse": Scheme(INT4, PerChannel(), TWO_OF_FOUR, TOKEN),
    "int4-none": Scheme(INT4, PerChannel(), None, NONE),
    "none": Scheme(E4M3FN, PerChannel(), None, NONE),
    "none-smooth-sparse": Scheme(E5M2, PerChannel(), TWO_OF_FOUR, NONE, smooth=True),
}
LAYERS = {
    "linear": (lambda: nn.Linear(64, 24), (2, 3, 64)),
    "rows": (lambda: nn.Linear(64, 24, bias=False), (5, 64)),
    "3x3": (lambda: nn.Conv2d(32, 24, 3, padding=1), (2, 32, 9, 7)),
    "stride": (lambda: nn.Conv2d(32, 24, 3, stride=2, padding=1, bias=False), (2, 32, 9, 7)),
    "1x1": (lambda: nn.Conv2d(32, 24, 1), (1, 32, 3, 5)),
    "dilated": (lambda: nn.Conv2d(32, 8, (2, 3), padding=(2, 1), dilation=(2, 3)), (2, 32, 9, 7)),
    "same": (lambda: nn.Conv2d(32, 8, (2, 3), padding="same"), (2, 32, 4, 7)),
}


def drawn(name):
    """Return a layer and an input, of which one row (or pixel) is all zero."""
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    x = 2 * torch.randn(shape)
    x[..., :1, :] = 0
    return make(), x


def both(dense, scheme):
    """The packed layer, and the one that stands for it in training."""
    packed = packed_module(dense, scheme)
    if scheme.sparsity:
        dense.weight.data *= packed.dequantized() != 0
    quant = LayerQuant(scheme, smooth=packed.input_smooth, input_scale=packed.input_scale)
    return packed, fake_quantized("layer", dense, quant)


@pytest.mark.parametrize("case", turned(SCHEMES, LAYERS, times=2))
def test_forward_is_that_of_the_packed_layer(case):
    dense, x = drawn(case[1])
    packed, fake = both(dense, SCHEMES[case[0]])
    with use(Backend.REFERENCE), torch.no_grad():
        wanted = packed(x)
        found, exact = fake(x), dense(x)
    # Both multiply in float32, the scales before or after the sum.
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fake.quantized_weight(), packed.dequantized(), rtol=0, atol=0)
    # Quantization is not what rounding is: the dense layer is far away.
    assert float((exact - wanted).abs().max()) > 1e-2


def test_windows_in_pieces_give_the_same(monkeypatch):
    torch.manual_seed(0)
    _, fake = both(nn.Conv2d(32, 24, 3, padding=1), SCHEMES["token"])
    x = torch.randn(5, 32, 9, 7)
    whole = fake(x)
    monkeypatch.setattr(straight_through_estimator, "WINDOW_ELEMENTS", 2 * 9 * 7 * 32 * 9)
    torch.testing.assert_close(fake(x), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", turned(SCHEMES, LAYERS, times=2))
def test_gradients_are_those_of_the_layer_with_the_quantized_weight(case):
    dense, x = drawn(case[1])
    _, fake = both(dense, SCHEMES[case[0]])
    grads, wanted = _gradients(fake, fake, x), _gradients(fake, copy.deepcopy(dense), x)
    for found, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def _gradients(fake, module, x):
    """Gradients of input, weight and bias; of a dense module with the weight of ``fake``."""
    x = x.clone().requires_grad_()
    smooth = fake.smooth
    if module is fake:
        y = fake(x)
        parameters = list(fake.parameters())
    else:
        weight = fake.quantized_weight().detach().requires_grad_()
        wide = torch.ones(x.shape[1] if x.ndim == 4 else x.shape[-1]) if smooth is None else smooth
        z = x * (wide.reshape(-1, 1, 1) if x.ndim == 4 else wide)
        parameters = [weight, *([] if module.bias is None else [module.bias])]
        if isinstance(module, nn.Linear):
            y = functional.linear(z, weight, module.bias)
        else:
            z = functional.pad(z, fake.padding)
            y = functional.conv2d(z, weight, module.bias, module.stride, 0, module.dilation)
    torch.manual_seed(1)
    grads = list(torch.autograd.grad(y, [x, *parameters], torch.randn(y.shape)))
    if module is not fake and smooth is not None:
        grads[1] = grads[1] / smooth.reshape(-1, *[1] * (grads[1].ndim - 2))
    return grads


@pytest.mark.parametrize("case", turned(SCHEMES, LAYERS, (torch.float16, torch.bfloat16), times=3))
def test_sixteen_bit_pipelines_get_what_their_packed_layers_give(case):
    name, layer, dtype = case
    dense, x = drawn(layer)
    packed, fake = both(dense, SCHEMES[name])
    # Inputs of hundreds: codes of 448 and their sums must not overflow float16.
    x = (100 * x).to(dtype)
    with use(Backend.REFERENCE), torch.no_grad():
        wanted, found = packed.to(dtype)(x), fake.to(dtype)(x)
    assert found.dtype == wanted.dtype == dtype
    error = (found.float() - wanted.float()).square().mean() / wanted.float().square().mean()
    # One rounding of outputs, and of bfloat16 weights: a weight that moves across an edge of the
    # FP8 grid counts more, and is rare.
    assert float(error) < 1e-3


def test_static_scale_is_the_batch_amax_when_none_is_given():
    torch.manual_seed(0)
    dense, x = nn.Linear(64, 24), torch.randn(5, 64)
    given = LayerQuant(SCHEMES["static"], input_scale=x.abs().amax() / 448)
    own = replace(given, input_scale=None)
    first, second = (fake_quantized("layer", dense, quant)(x) for quant in (given, own))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_weight_is_rounded_as_its_file_will_be():
    torch.manual_seed(0)
    dense = nn.Linear(64, 24)
    half = copy.deepcopy(dense).half().float()
    exact = LayerQuant(SCHEMES["token"])
    rounded = replace(exact, stored=torch.float16)
    first = fake_quantized("layer", dense, rounded).quantized_weight()
    assert torch.equal(first, fake_quantized("layer", half, exact).quantized_weight())
    assert not torch.equal(first, fake_quantized("layer", dense, exact).quantized_weight())


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(32, 32, 3, groups=2), nn.Conv2d(32, 32, 3, padding_mode="reflect"), nn.SiLU()],
    ids=["groups", "reflect", "no layer"],
)
def test_what_cannot_be_packed_is_refused(layer):
    with pytest.raises(ModelError, match="expected a Linear"):
        fake_quantized("layer", layer, LayerQuant(SCHEMES["token"]))


def test_module_that_is_not_there_is_refused():
    with pytest.raises(ModelError, match="nowhere"):
        install(nn.Sequential(), {"nowhere": LayerQuant(SCHEMES["token"])})


RECIPES = {
    "fp8": load_recipe("fp8"),
    "mixed": Recipe(
        name="mixed",
        weight=WeightRecipe(granularity="group:16", observer="mse"),
        keep=("conv_out",),
        overrides=(
            Override(layers=("*.attn1.*",), weight=WeightRecipe(format="e5m2")),
            Override(
                layers=("*.ff.*",),
                weight=WeightRecipe(granularity="tensor"),
                activation=ActivationRecipe(mode="none"),
            ),
            Override(layers=("*.resnets.*",), weight=WeightRecipe(observer="mse")),
        ),
    ),
    "integers": Recipe(
        name="integers",
        weight=WeightRecipe(format="int4", observer="mse"),
        kept=WeightRecipe(format="int4"),
        overrides=(Override(layers=("*.resnets.*",), weight=WeightRecipe(format="int8")),),
        data_free=True,
    ),
    "sparse": load_recipe("fp8-sparse").model_copy(
        update={"sparsity": load_recipe("fp8-sparse").sparsity.model_copy(
            update={"method": "magnitude"})}
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_denoiser_computes_as_its_packed_directory(recipe, pipeline_dir, tmp_path):
    model = open_model(str(pipeline_dir))
    masks = choose_masks(model, recipe, None, progress=silent) if recipe.sparsity else None
    packed = tmp_path / "packed"
    pack(model, recipe, packed, calibration=None, masks=masks, threads=1, force=False,
         progress=silent)  # fmt: skip
    unet = load_pipeline(model, choose_device("cpu")).unet
    component = model.components[0]
    chosen = {} if masks is None else masks.of(component)
    for name, mask in chosen.items():
        weight = unet.get_submodule(name).weight
        rows = mask.dense(weight.shape[0], weight[0].numel())
        weight.data *= from_rows(rows, tuple(weight.shape))
    quants = plan_quants(component, recipe, set(chosen))
    install(unet, quants)
    calls = packed_calls(load_packed(packed, torch_dtype=torch.float32).unet)
    assert set(calls) == set(quants)
    # Layer by layer: over a whole model one sum that rounds the other way moves codes everywhere.
    for name, (x, wanted) in calls.items():
        with torch.no_grad():
            torch.testing.assert_close(unet.get_submodule(name)(x), wanted, rtol=1e-4, atol=1e-4)


def packed_calls(unet):
    """Input and output of every packed layer for one question."""
    calls = {}

    def listen(layer, args, output):
        calls[layer.name] = args[0], output

    for layer in unet.modules():
        if isinstance(layer, PackedLayer):
            layer.register_forward_hook(listen)
    with torch.no_grad(), use(Backend.REFERENCE):
        unet(torch.randn(2, 4, 8, 8), 500, torch.randn(2, 16, 32))
    return calls


def test_static_buckets_are_trained_as_one(pipeline_dir):
    component = open_model(str(pipeline_dir)).components[0]
    quants = plan_quants(component, load_recipe("fp8-buckets"), ())
    assert {q.scheme.activation for q in quants.values()} == {STATIC}
    assert {q.scheme.buckets for q in quants.values()} == {()}
    assert {q.stored for q in quants.values()} == {torch.float16}


@pytest.mark.parametrize(
    ("changes", "text"), [({"smooth": 0.5}, "smooth depends"), ({"keep": ("*",)}, "packs no layer")]
)
def test_recipes_that_cannot_be_trained_are_refused(changes, text, pipeline_dir):
    component = open_model(str(pipeline_dir)).components[0]
    with pytest.raises(RecipeError, match=text):
        plan_quants(component, load_recipe("fp8").model_copy(update=changes), ())
