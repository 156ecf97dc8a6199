"""Common code of the diffusers and transformers quantizers: config, devices, replacing layers."""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from quantkit.checkpoint.spec import QUANT_METHOD, PackedConfig, parse_config
from quantkit.errors import InputError
from quantkit.inference.layers import timestep_buckets
from quantkit.inference.layers.modules import pack_module
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.numerics.scheme import Scheme


class Method(str, Enum):
    """The name that both libraries look up."""

    QUANTKIT = QUANT_METHOD


class CarriedConfig:
    """The ``quantization_config`` of a packed component, as a library carries it."""

    def __init__(self, **config: Any) -> None:
        self.quant_method = Method.QUANTKIT
        self.packed: PackedConfig = parse_config(config)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of config.json."""
        return self.packed.to_json()

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the same: nothing here has a default."""
        return self.to_dict()

    def __repr__(self) -> str:
        entries = self.packed.schemes
        count = sum(len(entry.layers) for entry in entries)
        return f"{type(self).__name__}({count} layers in {len(entries)} schemes)"


def refuse_unpacked(options: Mapping[str, Any]) -> None:
    """Refuse to quantize while loading.

    Args:
        options: what a library makes its quantizer with.

    Raises:
        InputError: the model is not packed.
    """
    if not options.get("pre_quantized", True):
        raise InputError(
            "quantization_config: quantkit does not quantize while loading; run 'quantkit pack' "
            "and load the packed directory"
        )


def device_of(device_map: object) -> torch.device | None:
    """Return the first device of a map; None where it names none.

    Raises:
        InputError: the disk is one of them.
    """
    if isinstance(device_map, str):
        # "auto" and its kind fill GPUs first
        return torch.device("cuda") if torch.cuda.is_available() else None
    if not isinstance(device_map, dict):
        return None
    places = list(device_map.values())
    if "disk" in places:
        raise InputError(
            "device_map: packed layers cannot be offloaded to 'disk'; keep the packed model in "
            "memory, or call enable_model_cpu_offload() on the pipeline"
        )
    return torch.device(places[0]) if places else None


def replace_layers(
    model: nn.Module,
    layers: Iterable[tuple[str, str, Scheme]],
    is_wide: Callable[[str], object] = lambda _: False,
) -> dict[str, PackedLayer]:
    """Replace layers by empty packed ones; the model was checked to have them.

    Args:
        model: dense.
        layers: name in the files, module path, scheme.
        is_wide: tells of a tensor's path whether the library keeps it in float32.

    Returns:
        by module path.
    """
    expected = list(layers)
    modules = dict(model.named_modules())
    shared = timestep_buckets.install(model, {s.schedule for _, _, s in expected if s.schedule})
    packed = {}
    for name, path, scheme in expected:
        layer = packed[path] = pack_module(name, scheme, modules[path], shared.get(scheme.schedule))
        if is_wide(f"{path}.weight"):
            layer.compute_dtype = torch.float32
        model.set_submodule(path, layer)
    return packed
