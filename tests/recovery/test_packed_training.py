"""Training of packed layers: their numbers forward, the dense layers' gradients backward."""

import copy
import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional

import quantkit
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.spec import PACKED_PARTS
from quantkit.device.backends import Backend, use
from quantkit.errors import ModelError
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.inference.loading.pipeline_loading import load_pipeline as load_packed
from quantkit.models.source import open_model
from quantkit.numerics.formats import E4M3FN, E5M2, INT4, INT8, Q4_0, Q8_0
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.packing.pack_model import pack
from quantkit.pipelines.running import choose_device, load_pipeline
from quantkit.progress import silent
from quantkit.recipe.layer_recipes import ActivationRecipe, WeightRecipe
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import Override, Recipe
from quantkit.recovery.packed_training import (
    Timesteps,
    install,
    packed_tensors,
    trained_layer,
)
from quantkit.recovery.trained_checkpoint import write_trained
from quantkit.sparsity.choose import choose_masks
from tests.support.loading import packable
from tests.support.packed import pack_component, packed_module
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
    "q4_0": Scheme(Q4_0, PerGroup(32), None, NONE),
    "q8_0": Scheme(Q8_0, PerGroup(32), None, NONE),
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
    return packed, trained_layer("layer", dense, scheme, parts_of(packed), Timesteps())


def parts_of(packed):
    """The tensors of FORMAT.md that a packed layer has."""
    parts = {part: packed.part(part) for part in PACKED_PARTS}
    return {part: value.detach() for part, value in parts.items() if value is not None}


@pytest.mark.parametrize("case", turned(SCHEMES, LAYERS, times=2))
def test_forward_is_that_of_the_packed_layer(case):
    dense, x = drawn(case[1])
    packed, trained = both(dense, SCHEMES[case[0]])
    with use(Backend.REFERENCE), torch.no_grad():
        wanted = packed(x)
        found, exact = trained(x), dense(x)
    # Both multiply in float32, the scales before or after the sum.
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(trained.quantized_weight(), packed.dequantized(), rtol=0, atol=0)
    # Quantization is not what rounding is: the dense layer is far away.
    assert float((exact - wanted).abs().max()) > 1e-2


@pytest.mark.parametrize("case", turned(SCHEMES, LAYERS, times=2))
def test_gradients_are_those_of_the_layer_with_the_quantized_weight(case):
    dense, x = drawn(case[1])
    _, trained = both(dense, SCHEMES[case[0]])
    weight = trained.quantized_weight().detach().requires_grad_()
    x, kept = (x.clone().requires_grad_() for _ in range(2))
    y, wanted = trained(x), plain(trained, kept, weight)
    noise = torch.randn(y.shape)
    y.backward(noise)
    wanted.backward(noise)
    torch.testing.assert_close(x.grad, kept.grad, rtol=1e-4, atol=1e-4)
    # By the chain rule: a weight is code x factor x scale x exp(growth).
    slope = torch.autograd.grad((trained.quantized_weight() * weight.grad).sum(),
                                (trained.codes, trained.growth))  # fmt: skip
    for parameter, right in zip((trained.codes, trained.growth), slope, strict=True):
        torch.testing.assert_close(parameter.grad, right, rtol=1e-3, atol=1e-3)


def plain(trained, x, weight):
    """The layer in torch's operators alone, with a given weight and no rounding of inputs."""
    channels = x.shape[1] if x.ndim == 4 else x.shape[-1]
    given = trained._layer.part("input_smooth")
    smooth = torch.ones(channels) if given is None else given
    if x.ndim != 4:
        return functional.linear(x * smooth, weight, trained.bias)
    windows = trained.windows
    z = functional.pad(x * smooth.reshape(-1, 1, 1), windows.padding)
    return functional.conv2d(z, weight, trained.bias, windows.stride, 0, windows.dilation)


def test_gradients_of_codes_and_scales_are_those_of_lsq():
    torch.manual_seed(0)
    _, trained = both(nn.Linear(64, 24), SCHEMES["int8-static"])
    codes = trained.rounded_codes()[1].detach()
    cost = torch.randn(24, 64)
    (trained.quantized_weight() * cost).sum().backward()
    scale = trained.scale().detach()
    inside = codes.abs() < 127
    unit = 4 * 127
    torch.testing.assert_close(
        trained.codes.grad[inside], (cost * scale.unsqueeze(1) * unit)[inside], rtol=1e-5, atol=1e-7
    )
    # d/d(log scale) of code x scale is the weight itself.
    wanted = (cost * codes * scale.unsqueeze(1)).sum(1)
    torch.testing.assert_close(trained.growth.grad, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_codes_are_written_as_they_were_read(name):
    packed, trained = both(drawn("linear")[0], SCHEMES[name])
    for part, value in trained.packed().items():
        stored = packed.part(part)
        assert torch.equal(value.to(stored.dtype), stored.reshape(value.shape))


def test_moved_codes_and_scales_are_the_ones_that_are_written():
    packed, trained = both(drawn("3x3")[0], SCHEMES["int4-token-sparse"])
    torch.manual_seed(1)
    with torch.no_grad():
        trained.codes += 0.05 * torch.randn_like(trained.codes)
        trained.growth += 0.1 * torch.randn_like(trained.growth)
    for part, value in trained.packed().items():
        packed.fill(part, value)
    torch.testing.assert_close(packed.dequantized(), trained.quantized_weight())


def test_scales_of_zeros_stay_one():
    dense = nn.Linear(64, 24)
    dense.weight.data[3] = 0
    _, trained = both(dense, SCHEMES["int8-static"])
    trained.quantized_weight().sum().backward()
    assert not torch.any(trained.codes.grad[3])
    assert trained.packed()["weight_scale"][3] == 1


@pytest.mark.parametrize("case", turned(SCHEMES, LAYERS, (torch.float16, torch.bfloat16), times=3))
def test_sixteen_bit_pipelines_get_what_their_packed_layers_give(case):
    name, layer, dtype = case
    dense, x = drawn(layer)
    packed, trained = both(dense.to(dtype), SCHEMES[name])
    # Inputs of hundreds: codes of 448 and their sums must not overflow float16.
    x = (100 * x).to(dtype)
    with use(Backend.REFERENCE), torch.no_grad():
        wanted, found = packed(x), trained(x)
    assert found.dtype == wanted.dtype == dtype
    error = (found.float() - wanted.float()).square().mean() / wanted.float().square().mean()
    assert float(error) < 1e-3


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(32, 32, 3, groups=2), nn.Conv2d(32, 32, 3, padding_mode="reflect"), nn.SiLU()],
    ids=["groups", "reflect", "no layer"],
)
def test_what_cannot_be_packed_is_refused(layer):
    with pytest.raises(ModelError, match="expected"):
        trained_layer("layer", layer, SCHEMES["token"], {}, Timesteps())


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
    made = packed_by(recipe, pipeline_dir, tmp_path / "packed")
    unet = trained_unet(pipeline_dir, made)
    calls = packed_calls(load_packed(made.path, torch_dtype=torch.float32).unet)
    assert set(calls) == set(made.components[0].config.layers)
    # Layer by layer: over a whole model one sum that rounds the other way moves codes everywhere.
    for name, (x, wanted) in calls.items():
        with torch.no_grad():
            torch.testing.assert_close(unet.get_submodule(name)(x), wanted, rtol=1e-4, atol=1e-4)


def packed_by(recipe, pipeline_dir, output):
    """The pipeline packed with a recipe."""
    model = open_model(str(pipeline_dir))
    masks = choose_masks(model, recipe, None, progress=silent) if recipe.sparsity else None
    pack(model, recipe, output, calibration=None, masks=masks, threads=1, force=False,
         progress=silent)  # fmt: skip
    return open_packed(output)


def trained_unet(pipeline_dir, made):
    """The denoiser as it is trained from a packed directory."""
    unet = load_pipeline(open_model(str(pipeline_dir)), choose_device("cpu")).unet
    install(unet, made.components[0])
    return unet


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


def test_a_packed_model_of_other_shapes_is_refused(pipeline_dir, tmp_path):
    made = packed_by(RECIPES["fp8"], pipeline_dir, tmp_path / "packed")
    unet = load_pipeline(open_model(str(pipeline_dir)), choose_device("cpu")).unet
    layer, norm = unet.time_embedding.linear_1, unet.conv_norm_out
    for name, other in (("conv_norm_out", nn.GroupNorm(2, 8)), ("linear_1", nn.Linear(32, 64))):
        unet.time_embedding.linear_1 = other if name == "linear_1" else layer
        unet.conv_norm_out = other if name == "conv_norm_out" else norm
        with pytest.raises(ModelError, match=rf"{name}\.weight is \[.*; give what was packed from"):
            install(copy.deepcopy(unet), made.components[0])


def test_a_written_model_is_the_trained_one(pipeline_dir, tmp_path):
    made = packed_by(RECIPES["mixed"], pipeline_dir, tmp_path / "packed")
    unet = trained_unet(pipeline_dir, made)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-2)
    out = tmp_path / "out"
    write_trained(made, "unet", dict(packed_tensors(unet)), out, force=False)
    assert not quantkit.verify(out).breaches
    calls = packed_calls(load_packed(out, torch_dtype=torch.float32).unet)
    with torch.no_grad():
        for name, (x, wanted) in calls.items():
            # Biases were rounded to the float16 of their file.
            found = unet.get_submodule(name)(x)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    sizes = [sorted((p.relative_to(d), p.stat().st_size) for p in d.rglob("*.safetensors"))
             for d in (made.path, out)]  # fmt: skip
    assert sizes[0] == sizes[1]
    before, after = ((d / "README.md").read_text(encoding="utf-8") for d in (made.path, out))
    assert "Trained after it was packed, and not measured since." in after
    assert "quantkit recover MODEL --packed OUTPUT" in after
    assert before.partition("## Evaluation")[0] == after.partition("## Evaluation")[0]


def test_untrained_values_are_written_as_they_were(pipeline_dir, tmp_path):
    made = packed_by(RECIPES["integers"], pipeline_dir, tmp_path / "packed")
    unet = trained_unet(pipeline_dir, made)
    out = tmp_path / "out"
    write_trained(made, "unet", dict(packed_tensors(unet)), out, force=False)
    for path in made.path.rglob("*.safetensors"):
        assert path.read_bytes() == (out / path.relative_to(made.path)).read_bytes()


def test_rows_of_other_counts_than_the_batch_have_buckets():
    timesteps, edges = Timesteps(), torch.tensor((250.0, 500.0), dtype=torch.float64)
    timesteps.values = torch.tensor((960, 20))
    assert timesteps.buckets(edges, 6).tolist() == [2, 2, 2, 0, 0, 0]
    assert timesteps.buckets(edges, 1).tolist() == [2]


@pytest.mark.parametrize("buckets", [(), (250.0, 500.0)])
@pytest.mark.parametrize("token_below", [None, 50.0])
def test_each_row_has_the_scale_of_its_timestep(pipeline_dir, tmp_path, buckets, token_below):
    """A training batch mixes timesteps; the packed model has one at a time."""
    path = tmp_path / "packed"
    shutil.copytree(pipeline_dir, path)
    bucketed = Scheme(INT8, PerChannel(), None, STATIC, buckets, token_below=token_below)
    pack_component(path / "unet", dict.fromkeys(packable(path / "unet"), bucketed))
    made = open_packed(path)
    unet = trained_unet(pipeline_dir, made)
    own = load_packed(made.path, torch_dtype=torch.float32).unet
    torch.manual_seed(0)
    times = torch.tensor((20.0, 250.0, 960.0))
    calls = {}
    for name in made.components[0].config.layers:
        unet.get_submodule(name).register_forward_hook(
            lambda _, args, y, name=name: calls.update({name: (args[0], y)})
        )
    with torch.no_grad(), use(Backend.REFERENCE):
        unet(torch.randn(3, 4, 8, 8), times, torch.randn(3, 16, 32))
        for name, (x, y) in calls.items():
            layer = own.get_submodule(name)
            for row, time in enumerate(times):
                for of_layer in filter(None, layer.buckets):
                    of_layer.update(time)
                wanted = layer(x[row : row + 1])
                torch.testing.assert_close(y[row : row + 1], wanted, rtol=1e-4, atol=1e-4)
    assert len(calls) > 40
