"""The backend of each packed layer on a device, for a loaded model or for files."""

from dataclasses import dataclass

import torch

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.reader import Packed
from quantkit.checkpoint.spec import rows_of
from quantkit.device.backends import Backend
from quantkit.device.choosing import choose
from quantkit.device.gpu.devices import Device
from quantkit.device.gpu.kernel_choice import why_detour
from quantkit.device.gpu.selftest import state_of
from quantkit.device.ops.table import find_op, name_for
from quantkit.inference.layers.weight_only_layers import OTHERS, why_dequantized
from quantkit.numerics.conv_windows import ConvShape, Windows
from quantkit.numerics.granularity import PerGroup
from quantkit.numerics.scheme import Activation, Scheme

#: The word for layers with 16-bit inputs where torch multiplies, without an operator.
DEQUANTIZED = "dequantized"

_WEIGHT_ONLY = "gemm_w16"

#: Axes of a convolution's weight.
_CONV_RANK = 4


@dataclass(frozen=True)
class LayerChoice:
    """The backend of one packed layer on this device, with the reason."""

    component: str
    layer: str
    #: empty where none does
    op: str
    #: gpu, host, reference, or dequantized (inputs stay in 16 bit, and no operation takes them)
    backend: str
    #: why no kernel runs, or which inputs it does not take; empty when one takes all
    reason: str

    @property
    def runs_on_kernel(self) -> bool:
        """True when a kernel takes inputs, though perhaps not all."""
        return self.backend in {Backend.GPU.value, Backend.HOST.value}


def layer_choices(packed: Packed, device: torch.device) -> tuple[LayerChoice, ...]:
    """Return the backend of every packed layer of a checkpoint on ``device``."""
    return tuple(
        _of_file(component, layer, scheme, device)
        for component in packed.components
        for layer, scheme in component.config.layers.items()
    )


def choose_layer(
    weight: tuple[int, ...], scheme: Scheme, device: torch.device
) -> tuple[str, str, str]:
    """Return operation, back end and reason of a layer, as ``LayerChoice`` says them.

    Args:
        weight: shape of the dense weight.
        scheme: of the layer.
        device: where it lies, or would.
    """
    if scheme.activation is Activation.NONE:
        return _of_weight_only(weight, scheme, device)
    op = op_of(weight, scheme, device)
    grouped = isinstance(scheme.granularity, PerGroup)
    choice = choose(op, device, k=rows_of(weight)[1], group_scales=grouped)
    return op, choice.backend.value, choice.reason


def op_of(weight: tuple[int, ...], scheme: Scheme, device: torch.device) -> str:
    """Return the operation of a layer's weight; a convolution that is unfolded is a GEMM.

    Its picture and stride are not in the checkpoint: a single window stands for all, and one of a
    single pixel for the pixels.
    """
    x_format, codes = scheme.input.name, scheme.codes.name
    gemm, conv = (
        name_for(family, x_format, codes, sparse=scheme.sparsity is not None)
        for family in ("gemm", "conv")
    )
    if len(weight) != _CONV_RANK:
        return gemm
    n, channels, *kernel = weight
    shape = ConvShape(1, kernel[0], kernel[1], channels, n, Windows((kernel[0], kernel[1])))
    words = (x_format, codes, "tensor", "channel", "f16")
    return gemm if why_detour(_gpu_of(device), find_op(conv), words, shape) else conv


def _of_weight_only(
    weight: tuple[int, ...], scheme: Scheme, device: torch.device
) -> tuple[str, str, str]:
    if reason := why_dequantized(weight, scheme):
        return "", DEQUANTIZED, reason
    choice = choose(_WEIGHT_ONLY, device, k=weight[1])
    if choice.backend is Backend.REFERENCE:
        return _WEIGHT_ONLY, DEQUANTIZED, f"inputs stay in 16 bit; {choice.reason}"
    return _WEIGHT_ONLY, choice.backend.value, OTHERS


def _gpu_of(device: torch.device) -> Device | None:
    return state_of(device.index or 0).device if device.type == "cuda" else None


def _of_file(
    component: PackedComponent, layer: str, scheme: Scheme, device: torch.device
) -> LayerChoice:
    found = choose_layer(component.records[layer].shape, scheme, device)
    return LayerChoice(component.name, layer, *found)
