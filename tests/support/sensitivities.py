"""Layers and sensitivities made for tests, and choosing among them."""

import torch

from quantkit.models.component_layers import list_layers
from quantkit.recipe.goals import BudgetRecipe
from quantkit.recipe.load import load_recipe
from quantkit.sensitivity import selection
from quantkit.sensitivity.sensitivity_file import (
    LayerSensitivity,
    Outcome,
    Sensitivity,
    SensitivityProvenance,
)
from quantkit.sensitivity.treatments import TREATMENTS
from tests.support.components import component_with

CPU = torch.device("cpu")

PACKING = [t.name for t in TREATMENTS if t.packs]

SHAPES = {"linear": (24, 64), "conv": (8, 32, 3, 3)}


def layer_in(path, shape, seed=3):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    model = component_with(path / "model", {"layer": weight})
    return list_layers(model.components[0])[0]


def settings_of(recipe="fp8"):
    return load_recipe(recipe).settings("layer")


def layer_with(name, kind="linear", measured=None, **errors):
    outcomes = {"16-bit": Outcome(0.0, 1000, 1.0)}
    sizes = {"e4m3fn": (500, 0.5), "2:4": (300, 0.25)}
    for treatment, error in errors.items():
        nbytes, seconds = sizes["2:4" if treatment.startswith("2:4") else "e4m3fn"]
        outcomes[treatment] = Outcome(error, nbytes, seconds)
    return LayerSensitivity(name, kind, (4, 4), "00", 16.0, outcomes, measured)


def made(layers, fixed=100):
    about = SensitivityProvenance("m", "0", "0", 0, "0", 20, None, 0, "card", {"quantkit": "0"})
    recipe = load_recipe("fp8-static")
    return Sensitivity("unet", "unet", tuple(layers), (250.0,), fixed, recipe, about)


def three_layers():
    return made(
        layer_with(name, **{
            "e4m3fn-static": error, "e4m3fn-token": error * 1.01,
            "2:4-magnitude-e4m3fn-token": 130 * error, "2:4-wanda-e4m3fn-token": 100 * error,
        })
        for name, error in (("a.one", 1e-3), ("a.two", 2e-3), ("a.three", 4e-3))
    )  # fmt: skip


FP8 = load_recipe("fp8")


def choose(sensitivity, recipe=FP8, **goal):
    return selection.choose(sensitivity, recipe, BudgetRecipe(**goal))
