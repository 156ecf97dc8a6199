"""A summary of a loaded model's packed layers and their backends."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from quantkit.checkpoint.spec import Kind
from quantkit.inference.layers.layer_choices import choose_layer
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.numerics.scheme import Scheme


@dataclass(frozen=True)
class LayerInfo:
    """A packed layer and its backend on its current device."""

    #: name of the pipeline's component; empty for a model alone
    component: str
    #: module path inside the component
    name: str
    kind: Kind
    scheme: Scheme
    #: "gpu", "host", "reference" or "dequantized"
    backend: str
    #: why no kernel runs, or which inputs it does not take; empty when one takes all
    reason: str


def packed_layers(model: Any) -> tuple[LayerInfo, ...]:
    """Return the packed layers of a pipeline or a model, and which back end each would use now.

    Args:
        model: a DiffusionPipeline, or a module.
    """
    return tuple(_describe(*found) for found in iterate_packed(model))


def iterate_packed(model: Any) -> Iterator[tuple[str, str, PackedLayer]]:
    """Yield component, module path and module of every packed layer of a pipeline or a model."""
    components = {"": model} if isinstance(model, nn.Module) else modules_of(model)
    for component, module in components.items():
        # torch.compile wraps the model; the paths stay those inside it.
        for name, layer in getattr(module, "_orig_mod", module).named_modules():
            if isinstance(layer, PackedLayer):
                yield component, name, layer


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the components of a DiffusionPipeline that are modules, by name.

    ``pipe.components`` would raise for pipelines that do not list their components properly.
    """
    return {name: value for name, value in vars(pipe).items() if isinstance(value, nn.Module)}


def _describe(component: str, name: str, layer: PackedLayer) -> LayerInfo:
    _, backend, reason = choose_layer(layer.dense_shape, layer.scheme, layer.codes.device)
    return LayerInfo(component, name, layer.kind, layer.scheme, backend, reason)
