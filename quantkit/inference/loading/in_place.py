"""Packing the layers of a model in memory: what diffusers does while loading, on a built model."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from quantkit.inference.loading.checksums import checksums
from quantkit.inference.loading.diffusers_loading import QuantkitConfig, QuantkitQuantizer
from quantkit.models.quantizers import CONFIG_KEY
from quantkit.storage.jsonfile import read_json


@torch.no_grad()
def fill_model(model: Any, folder: Path) -> None:
    """Replace layers of a dense model by packed ones, on the devices where they are.

    Args:
        model: of diffusers, in the compute dtype; its norms and embeddings stay as they are.
        folder: of its packed component, which may be deleted afterwards.

    Raises:
        CheckpointError: the folder breaks a rule of FORMAT.md, or does not fit the model.
    """
    config = read_json(folder / "config.json")[CONFIG_KEY]
    quantizer = QuantkitQuantizer(QuantkitConfig(**config))
    files = sorted(folder.glob("*.safetensors"))
    quantizer.update_torch_dtype(model.dtype)
    quantizer.maybe_update_loaded_keys([], [str(file) for file in files])
    with checksums(enabled=False):  # written a moment ago, by this process
        quantizer.preprocess_model(model)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dict
                _take(quantizer, model, name, opened)
    quantizer.postprocess_model(model)
    quantizer.files = ()
    model.hf_quantizer = quantizer
    model.register_to_config(**{CONFIG_KEY: quantizer.quantization_config})


def _take(quantizer: QuantkitQuantizer, model: nn.Module, name: str, opened: Any) -> None:
    """Put a tensor of a packed file into the model; biases, too, which packing may correct."""
    owner, _, part = name.rpartition(".")
    module: Any = model.get_submodule(owner)
    if quantizer.check_if_quantized_param(model, torch.empty(0), name):
        device = next(module.parameters(), torch.empty(0)).device
        value = opened.get_tensor(name)
        quantizer.create_quantized_param(model, value, name, device, {name: value})
    elif part == "bias":
        module.bias.copy_(opened.get_tensor(name))
