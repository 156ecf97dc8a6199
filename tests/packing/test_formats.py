"""Which format a layer gets besides the one asked for: fallbacks, layers that families keep."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from quantkit.calibration.observing.collect import layers_to_pack
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import verify
from quantkit.errors import RecipeError
from quantkit.models.source import open_model
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.scheme import Activation
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from tests.support.packing import (
    WEIGHTS,
    bits,
    calibration_of,
    component,
    expected,
    run,
    small_tensors,
    with_samples,
)

pytestmark = pytest.mark.usefixtures("any_model")
INT8 = {"weight": {"format": "int8", "fallback": "e4m3fn"}}
E4M3FN = FORMATS["e4m3fn"]


def outlying(folder, layer, factor, spared=0):
    """A model of which a layer's first channel is so many times larger, its weight as much smaller.

    The function is the same, but for some outputs whose weight stays, which the amax of the column
    tells. Returns the model, and its calibration.
    """
    tensors = small_tensors(torch.float32)
    tensors[f"{layer}.weight"][spared:, 0] /= factor
    source = component(folder, tensors)
    calibration = with_samples(calibration_of(source), source)
    old = calibration.layers[""][layer]
    channels = torch.ones(old.channel_amax.shape[-1])
    channels[0] = factor
    columns = channels.repeat(old.samples.shape[-1] // len(channels))
    table = dict(calibration.layers[""])
    table[layer] = replace(
        old,
        amax=(old.channel_amax * channels).amax(dim=1),
        channel_amax=old.channel_amax * channels,
        samples=(old.samples.float() * columns).bfloat16(),
    )
    return source, replace(calibration, layers={"": table})


def formats(path):
    layers = open_packed(path).components[0].config.layers
    return {name: scheme.weight.name for name, scheme in layers.items()}


@pytest.fixture
def calibration(source):
    return with_samples(calibration_of(source), source)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("layer", ["a.fc", "a.conv"])
def test_a_layer_that_fp8_holds_better_gets_it(source, calibration, tmp_path, fmt, layer):
    recipe = {"weight": {"format": fmt, "fallback": "e4m3fn"}}
    run(source, tmp_path / "even", recipe, calibration=calibration)
    assert set(formats(tmp_path / "even").values()) == {fmt}
    other, far = outlying(tmp_path / "other", layer, 100)
    summary = run(other, tmp_path / "far", recipe, calibration=far)
    found = formats(tmp_path / "far")
    assert {name for name, chosen in found.items() if chosen == "e4m3fn"} == {layer}
    (reason,) = summary.otherwise()
    assert reason.startswith("e4m3fn: the output loses ")
    assert summary.otherwise()[reason] == [layer]
    told = open_packed(tmp_path / "far").components[0].metadata[0].recipe["fallback_chosen"]
    assert told == {layer: reason}
    stored = load_file(tmp_path / "far" / WEIGHTS)
    weight = load_file(other / WEIGHTS)[f"{layer}.weight"]
    wanted = expected(weight, E4M3FN, "channel")
    assert torch.equal(bits(stored[f"{layer}.weight"]), bits(wanted["weight"]))
    verify(tmp_path / "far", progress=silent)


def test_smoothing_spares_the_fallback(tmp_path):
    source, far = outlying(tmp_path / "model", "a.fc", 100)
    run(source, tmp_path / "plain", INT8, calibration=far)
    summary = run(source, tmp_path / "smooth", {**INT8, "smooth": "auto"}, calibration=far)
    assert formats(tmp_path / "plain")["a.fc"] == "e4m3fn"
    assert formats(tmp_path / "smooth")["a.fc"] == "int8"
    alphas = {layer.name: layer.smooth_alpha for layer in summary.layers}
    assert alphas["a.fc"] is not None


def test_a_layer_that_falls_back_is_not_smoothed(tmp_path):
    source, far = outlying(tmp_path / "model", "a.fc", 100, spared=1)
    run(source, tmp_path / "packed", {**INT8, "smooth": 0.05}, calibration=far)
    layers = open_packed(tmp_path / "packed").components[0].config.layers
    assert (layers["a.fc"].weight.name, layers["a.fc"].smooth) == ("e4m3fn", False)
    assert (layers["a.point"].weight.name, layers["a.point"].smooth) == ("int8", True)
    verify(tmp_path / "packed", progress=silent)


REFUSED = {
    "of a float": ({"weight": {"fallback": "e5m2"}}, "a float stands in for an integer"),
    "an integer": ({"weight": {"format": "int4", "fallback": "int8"}}, "set e4m3fn"),
    "blind": ({**INT8, "data_free": True}, "weight.fallback with data_free"),
    "of kept layers": ({"kept": INT8["weight"]}, r"kept\.fallback: no input is quantized"),
}


@pytest.mark.parametrize(("recipe", "message"), REFUSED.values(), ids=REFUSED)
def test_fallbacks_that_mean_nothing_are_refused(recipe, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.model_validate({"name": "t", **recipe})


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_integer_inputs_without_statistics_are_to_be_asked_for(source, tmp_path, fmt):
    recipe = {"weight": {"format": fmt}}
    with pytest.raises(RecipeError, match=r"a\.conv: int.* without statistics.*data_free: true"):
        run(source, tmp_path / "packed", recipe)
    assert not (tmp_path / "packed").exists()
    # Without integer inputs there is nothing to be afraid of.
    run(source, tmp_path / "alone", {**recipe, "activation": {"mode": "none"}})
    run(source, tmp_path / "packed", {**recipe, "data_free": True})
    assert set(formats(tmp_path / "packed").values()) == {fmt}


KEPT = ("time_embedding.linear_1", "a.time_emb_proj", "a.odd.time_emb_proj", "conv_in")


@pytest.fixture
def model(tmp_path):
    tensors = small_tensors() | {
        f"{name}.weight": torch.randn(64, k).half()
        for name, k in zip(KEPT[:3], (64, 96, 48), strict=True)
    }
    return component(tmp_path / "model", tensors)


@pytest.mark.parametrize("fmt", ["int4", "int8", "e4m3fn"])
def test_layers_of_the_family_are_packed_as_weights_alone(model, tmp_path, fmt):
    recipe = {"kept": {"format": fmt}, "keep": ["a.point"]}
    run(model, tmp_path / "packed", recipe)
    layers = open_packed(tmp_path / "packed").components[0].config.layers
    # K 36 is no multiple of 16; and who writes keep means it.
    assert not {"conv_in", "a.point"} & set(layers)
    alone = {name for name, scheme in layers.items() if scheme.activation is Activation.NONE}
    assert alone == set(KEPT[:3])
    # 32 do not divide the last one's 48 columns.
    found = [layers[name].weight.name for name in KEPT[:3]]
    assert found == [fmt, fmt, "int8" if fmt == "int4" else fmt]
    assert layers["a.fc"].weight.name == "e4m3fn"
    verify(tmp_path / "packed", progress=silent)


def test_what_is_packed_alone_is_planned(model):
    (source,) = open_model(str(model)).components
    plain = {layer.name for layer in layers_to_pack(source, Recipe(name="t"))}
    kept = Recipe.model_validate({"name": "t", "kept": {"format": "int4", "rounding": "gptq"}})
    assert {layer.name for layer in layers_to_pack(source, kept)} - plain == set(KEPT[:3])
    assert kept.needs_hessians
    assert not Recipe(name="t").needs_hessians
