"""The modules of a running model that the layers of its files are."""

from collections.abc import Sequence

from torch import nn

from quantkit.errors import ModelError
from quantkit.models.component_layers import Layer
from quantkit.models.encoder_skeleton import loaded_names


def find_modules(model: nn.Module, layers: Sequence[Layer], component: str) -> dict[str, nn.Module]:
    """Return the modules of layers, by the names that the layers have in the files.

    Args:
        model: of diffusers, or of transformers, which renames while it loads.
        layers: of its files.
        component: its name, for messages.

    Raises:
        ModelError: a layer of the files is not the module that was built.
    """
    paths = {layer.name: layer.name for layer in layers}
    if hasattr(model, "base_model_prefix"):
        # What is joined while loading is not among them, and is no module then.
        found = loaded_names(model, [f"{name}.weight" for name in paths])
        paths |= {n.removesuffix(".weight"): m.removesuffix(".weight") for n, m in found.items()}
    return {
        layer.name: _find_module(model, paths[layer.name], layer, component) for layer in layers
    }


def _find_module(model: nn.Module, path: str, layer: Layer, component: str) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise ModelError(f"{component}: the model that was built has no module {path}") from error
    kind = nn.Linear if layer.kind == "linear" else nn.Conv2d
    weight = getattr(module, "weight", None)
    if not isinstance(module, kind) or weight is None or tuple(weight.shape) != layer.shape:
        raise ModelError(
            f"{component}.{layer.name}: found {type(module).__name__}, expected {kind.__name__} "
            f"with a weight of {layer.shape}; the weight files do not fit the config, download "
            "the model again"
        )
    return module
