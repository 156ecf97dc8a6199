"""The backend of each attention module of a packed component on a device."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.packed_attention import PackedAttention
from quantkit.checkpoint.reader import Packed
from quantkit.checkpoint.verification import contents_of
from quantkit.device.archs import OneLaunch
from quantkit.device.backends import Backend
from quantkit.device.choosing import choose, least_keys, why_on_request
from quantkit.device.ops.table import attention_for, is_operation
from quantkit.models.building import read_skeleton
from quantkit.models.skeleton import Skeleton
from quantkit.numerics.attention_factors import COLUMNS, padded
from quantkit.numerics.formats import E4M3FN
from quantkit.recipe.fields import matches

#: The backend of attention where no kernel computes it.
TORCH = "torch"
#: Models whose processors make heads of streams in one pass, and pass no masks.
_OF_STREAMS = frozenset({"FluxTransformer2DModel", "SD3Transformer2DModel"})


@dataclass(frozen=True)
class AttentionChoice:
    """The backend of one attention module on this device, with the reason."""

    component: str
    module: str
    #: of queries and keys, as "int8, static, 32 columns, values in 16 bit"; empty: 16 bit
    format: str
    #: gpu, host or torch
    backend: str
    #: why it is torch's, or which calls are
    reason: str

    @property
    def runs_on_kernel(self) -> bool:
        """True when a kernel takes calls, though perhaps not all."""
        return self.backend != TORCH


def attention_choices(packed: Packed, device: torch.device) -> tuple[AttentionChoice, ...]:
    """Return the backends of the attention modules on codes in a packed component's config.

    Raises:
        CheckpointError: no model can be built from its config.json.
    """
    return tuple(
        choice
        for component in packed.components
        if component.config.attention is not None
        for choice in _of_component(component, component.config.attention, device)
    )


def _of_component(
    component: PackedComponent, settings: PackedAttention, device: torch.device
) -> Iterator[AttentionChoice]:
    names = contents_of(component).tensors
    skeleton = read_skeleton(component.path / "config.json", component.class_name, names)
    for module, kept in skeleton.attention.items():
        reason = "excluded" if matches(module, settings.exclude) else kept
        launch = _launch_of(module, component, settings, skeleton)
        told = ("", TORCH, reason) if reason else _of_module(module, settings, device, launch)
        yield AttentionChoice(component.name, module, *told)


def _launch_of(
    module: str, component: PackedComponent, settings: PackedAttention, skeleton: Skeleton
) -> OneLaunch | None:
    """Return the operation that makes all codes of a module in one launch, if any."""
    shapes, found = skeleton.tensors, settings.format_of(module)
    q, k = (shapes.get(f"{module}.{name}.weight") for name in ("to_q", "to_k"))
    if module not in settings.static or not found.qk == found.pv == E4M3FN.name or q != k:
        return None
    if any(f"{module}.{name}.weight" in shapes for name in ("norm_q", "add_q_proj")):
        return OneLaunch.STREAMS if skeleton.class_name in _OF_STREAMS else None
    layers = [component.config.layers.get(f"{module}.{name}") for name in ("to_q", "to_k", "to_v")]
    first = layers[0]
    if first is None or layers != [first] * len(layers):
        return None
    kinds, sparse = (first.input.name, first.codes.name), first.sparsity is not None
    joint = is_operation("project_heads", *kinds, sparse=sparse)
    return OneLaunch.PROJECTIONS if joint else None


def _of_module(
    module: str,
    settings: PackedAttention,
    device: torch.device,
    launch: OneLaunch | None,
) -> tuple[str, str, str]:
    shape, found = settings.static.get(module), settings.format_of(module)
    words = found.qk if shape is None else f"{found.qk}, static"
    if found.pv is None:
        words += ", values in 16 bit"
    columns = COLUMNS if shape is None else padded(shape.head_size)
    op = attention_for(found.qk, found.pv)
    choice = choose(op, device, k=columns)
    if choice.backend is Backend.REFERENCE:
        return words, TORCH, choice.reason
    least = settings.min_keys
    if reason := why_on_request(op, device):
        from_keys = least_keys(device, launch, shape.head_size) if shape and launch else None
        if from_keys is None:
            return words, TORCH, reason
        least = max(least, from_keys)
    fewer = f"torch's with fewer than {least} keys" if least > 1 else ""
    return words, choice.backend.value, fewer
