"""Text encoders that transformers reads with compressed-tensors: a directory, Linear layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import ModelError
from quantkit.interchange.denoiser import Denoiser
from quantkit.interchange.layer_codes import LayerCodes
from quantkit.interchange.targets import Target
from quantkit.interchange.tensor_export import FilePlan
from quantkit.interchange.tensor_plan import Entry, plan_tensors, unchanged
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.scheme import Activation
from quantkit.storage.jsonfile import read_json

COMPRESSED_TENSORS = Target(
    "compressed-tensors",
    formats=(E4M3FN, INT8),
    static="any",
    inputs="they are scaled by token",
    cure="pack with scales by channel",
)
#: transformers' name of a model's weights
WEIGHTS = "model.safetensors"

_TYPES = {E4M3FN: "float", INT8: "int"}
#: How inputs of layers are quantized: None is not at all.
_INPUTS: Mapping[Activation, Mapping[str, Any] | None] = {
    Activation.NONE: None,
    Activation.STATIC: {"strategy": "tensor", "dynamic": False},
    Activation.TOKEN: {"strategy": "token", "dynamic": True},
}


def plan_compressed_tensors(source: Denoiser, *, requantize: bool) -> FilePlan:
    """Return the plan of a text encoder's weight file.

    Raises:
        ModelError: a denoiser, which no program reads in this format.
        CheckpointError: a layer that compressed-tensors does not hold.
    """
    config = read_json(source.path / "config.json")
    if "architectures" not in config:
        raise ModelError(
            f"{source.path}: no model of transformers; compressed-tensors is for text encoders: "
            "export a denoiser to comfyui or sdnq"
        )
    entries = plan_tensors(source, unchanged(source.shapes), COMPRESSED_TENSORS,
                           requantize=requantize)  # fmt: skip
    name = str(config["architectures"][0])
    return FilePlan(source, COMPRESSED_TENSORS, entries, _lay_out, name)


def compressed_tensors_config(plan: FilePlan) -> dict[str, Any]:
    """Return the ``quantization_config`` of the config.json: a group for each treatment."""
    groups: dict[tuple[str, Activation], list[str]] = {}
    for entry in plan.entries:
        if entry.fmt is not None:
            key = (_TYPES[entry.fmt], _activation(plan.source, entry))
            groups.setdefault(key, []).append(entry.name.removesuffix(".weight"))
    told = {
        f"group_{i}": _group(kind, activation, layers)
        for i, ((kind, activation), layers) in enumerate(groups.items())
    }
    formats = {group["format"] for group in told.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        # With "frozen" transformers loads the model and answers NaN.
        "quantization_status": "compressed",
        "config_groups": told,
        "ignore": [],
    }


def _activation(source: Denoiser, entry: Entry) -> Activation:
    activation = source.schemes[entry.original.parts[0]].activation
    lost = activation is Activation.STATIC and not entry.static
    return Activation.TOKEN if lost else activation


def _group(kind: str, activation: Activation, layers: list[str]) -> dict[str, Any]:
    eight_bits = {"num_bits": 8, "type": kind, "symmetric": True}
    inputs = _INPUTS[activation]
    return {
        "targets": layers,
        "format": "naive-quantized" if inputs is None else f"{kind}-quantized",
        "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
        "input_activations": None if inputs is None else {**eight_bits, **inputs},
    }


def _lay_out(layer: str, codes: LayerCodes) -> dict[str, Tensor]:
    tensors = {
        f"{layer}.weight": codes.codes,
        f"{layer}.weight_scale": codes.scale.reshape(-1, 1),
    }
    if codes.input_scale is not None:
        tensors[f"{layer}.input_scale"] = torch.tensor([codes.input_scale])
    return tensors
