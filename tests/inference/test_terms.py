"""Inputs as sums of two FP8 values."""

import json

import pytest
import torch
from torch import nn

from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import verify
from quantkit.errors import CheckpointError, RecipeError
from quantkit.inference.terms import split
from quantkit.models.source import open_model
from quantkit.numerics.formats import E4M3FN, E5M2
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from quantkit.recovery.fake_quant import plan_quants
from tests.support.packed import packed_module
from tests.support.packing import calibration_of, component, run, small_tensors

pytestmark = pytest.mark.usefixtures("any_model")


def summed(terms, fmt):
    return sum(
        codes.view(fmt.torch_dtype).double() * scale.double().reshape(-1, 1)
        for codes, scale in terms
    )


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("static", [False, True], ids=["token", "static"])
def test_two_terms_have_twice_the_bits(fmt, static):
    torch.manual_seed(0)
    x = torch.randn(64, 96)
    scale = (x.abs().max() / fmt.max).reshape(1) if static else None
    one, two = (summed(split(x, scale, None, None, fmt, n), fmt) - x for n in (1, 2))
    # Rounding to m bits leaves at most 2^-(m + 1) of a normal number, and the rest is one again.
    gain = 2.0 ** (fmt.mantissa_bits + 1)
    assert two.norm() < one.norm() / gain
    normal = x.abs() > x.abs().max() / 16
    bound = x.abs()[normal] * gain**-2 * (1 + 1e-5)
    assert bool((two[normal].abs() <= bound).all())


def test_the_second_term_knows_shift_and_smooth_through_the_first():
    torch.manual_seed(1)
    x, smooth, shift = torch.randn(5, 32), torch.linspace(0.5, 2, 32), torch.linspace(-3, 3, 32)
    found = summed(split(x, None, smooth, shift, E4M3FN, 2), E4M3FN)
    torch.testing.assert_close(found, ((x - shift) * smooth).double(), rtol=0, atol=0.02)


@pytest.mark.parametrize("static", [False, True], ids=["token", "static"])
def test_zeros_saturation_and_nan(static):
    x = torch.tensor([[0.0, 0.0], [1.0, -1000.0], [float("nan"), 1.0]])
    scale = torch.tensor([1.0]) if static else None
    found = summed(split(x, scale, None, None, E4M3FN, 2), E4M3FN)
    assert torch.equal(found[0], torch.zeros(2, dtype=torch.float64))
    assert bool(found[2, 0].isnan())
    # The second term reaches 448 / 16 beyond the first one's end.
    assert float(found[1, 1]) == (-476.0 if static else pytest.approx(-1000, rel=1e-3))


@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 32), lambda: nn.Conv2d(64, 32, 3, 1, 1)])
@pytest.mark.parametrize("activation", [Activation.TOKEN, Activation.STATIC], ids=lambda a: a.value)
def test_layers_of_two_terms_lose_a_sixteenth(make, activation):
    torch.manual_seed(2)
    dense = make()
    x = torch.randn(2, 64, 8, 8) if isinstance(dense, nn.Conv2d) else torch.randn(50, 64)
    errors = []
    for terms in (1, 2):
        layer = packed_module(dense, Scheme(E4M3FN, PerChannel(), None, activation, terms=terms))
        exact = nn.Conv2d(64, 32, 3, 1, 1) if x.ndim == 4 else nn.Linear(64, 32)
        exact.load_state_dict({"weight": layer.dequantized(), "bias": dense.bias})
        errors.append((layer(x) - exact(x)).norm())
    assert errors[1] < errors[0] / 12


def test_terms_are_written_and_need_the_second_version(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    recipe = {"activation": {"mode": "token", "terms": 2}}
    run(folder, tmp_path / "packed", recipe)
    verify(tmp_path / "packed", progress=silent)
    config = open_packed(tmp_path / "packed").components[0].config
    assert config.format_version == 2
    assert all(scheme.terms == 2 for scheme in config.layers.values())
    path = tmp_path / "packed" / "config.json"
    text = path.read_text()
    for old, new, match in (
        ('"format_version": 2', '"format_version": 1', "format_version 1 with a shift or terms"),
        ('"terms": 2', '"terms": 3', "terms 3, wanted 2"),
        ('"terms": 2', '"terms": true', "terms True, wanted 2"),
        ('"token"', '"none"', "terms with activation 'none'"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(CheckpointError, match=match):
            open_packed(tmp_path / "packed")


def test_one_term_is_not_written(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    activation = {"mode": "static", "terms": 1}
    run(folder, tmp_path / "packed", {"activation": activation},
        calibration=calibration_of(folder))  # fmt: skip
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert config["format_version"] == 1
    assert all("terms" not in scheme for scheme in config["schemes"])


@pytest.mark.parametrize("terms", [0, 3, "2"])
def test_recipes_have_one_or_two_terms(terms):
    with pytest.raises((RecipeError, ValueError), match="terms"):
        Recipe.model_validate({"name": "t", "activation": {"terms": terms}})


def test_nothing_is_split_where_nothing_is_quantized():
    with pytest.raises(RecipeError, match="terms with mode none"):
        Recipe.model_validate({"name": "t", "activation": {"mode": "none", "terms": 2}})


def test_layers_of_two_terms_are_not_trained(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    recipe = Recipe.model_validate({"name": "t", "activation": {"mode": "token", "terms": 2}})
    with pytest.raises(RecipeError, match=r"training cannot imitate activation\.terms: 2"):
        plan_quants(open_model(str(folder)).components[0], recipe, ())
