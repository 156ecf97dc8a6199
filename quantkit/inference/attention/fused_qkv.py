"""``fuse_qkv_projections`` of packed models: one product for all projections of an input.

diffusers would copy weights into an nn.Linear, which packed codes do not fit. Attention modules
with packed projections get a ``fuse_projections`` of their own, which the model's method calls;
what reads the joined layers are diffusers' own processors. Rows of a weight keep their scales, and
the projections of an input have its one scale in common: results stay the same to the bit.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.joined_parts import join_parts, joined_scheme, why_separate
from quantkit.checkpoint.spec import PACKED_PARTS
from quantkit.errors import InputError
from quantkit.inference.layers.modules import PackedLinear, is_watched
from quantkit.inference.layers.prompts import PromptLinear, is_plain, keep_as

#: Attribute that diffusers' processors read -> the layers that it joins.
JOINED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}


class _Joined(nn.Module):
    """Layers of one input joined by rows; not part of the model's files."""

    #: the attention module and the attributes that it has the layers under; a tuple hides it from
    #: the module tree
    layers: tuple[nn.Module, tuple[str, ...]]

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs: one product unless a layer has an adapter or hooks."""
        if self.is_whole:
            y: Tensor = super().forward(x)
            return y
        return torch.cat([layer(x) for layer in self._apart()], dim=-1)

    @property
    def is_whole(self) -> bool:
        """True when no layer has an adapter or hooks."""
        return all(map(_is_plain, self._apart()))

    def _apart(self) -> list[nn.Module]:
        attention, names = self.layers
        return [getattr(attention, name) for name in names]

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Add nothing: the layers that were joined hold the same rows."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield nothing for this layer; the model's own parameters include them.

        What offloads layer by layer looks parameters up in the state dict. It watches the layers
        that were joined, too, which are then called in place of this one.
        """
        del args, kwargs
        return iter(())


class JoinedLinear(_Joined, PromptLinear):  # type: ignore[misc, override]  # as PackedLinear
    """Packed layers of one input as one."""


class JoinedDense(_Joined, nn.Linear):
    """Layers in 16 bit as one."""


def install(model: nn.Module) -> None:
    """Give the attention modules of a packed model their own ``fuse_projections``."""
    for module in model.modules():
        if not hasattr(module, "fuse_projections"):
            continue
        layers = (getattr(module, n, None) for names in JOINED.values() for n in names)
        if any(isinstance(layer, PackedLinear) for layer in layers):
            own: Any = partial(fuse_projections, module)
            module.fuse_projections = own


def uninstall(model: nn.Module) -> None:
    """Leave ``fuse_projections`` to the modules' classes."""
    for module in model.modules():
        vars(module).pop("fuse_projections", None)


def separate(model: nn.Module) -> list[Any]:
    """Remove the joined layers; the original ones are still there.

    Returns:
        the modules that had them.
    """
    fused: list[Any] = [m for m in model.modules() if getattr(m, "fused_projections", False)]
    for module in fused:
        for name in JOINED:
            if isinstance(getattr(module, name, None), _Joined):
                delattr(module, name)
        module.fused_projections = False
    return fused


def fuse_projections(self: Any, fuse: bool = True) -> None:  # noqa: FBT001, FBT002  diffusers' signature
    """Join the projections of one input; the layers stay, as views of the joined rows.

    Args:
        self: an attention module of diffusers.
        fuse: kept as ``fused_projections``, which processors read.

    Raises:
        InputError: projections that are packed differently; nothing was changed.
    """
    if not getattr(self, "_supports_qkv_fusion", True) or getattr(self, "fused_projections", False):
        return
    first = "to_kv" if getattr(self, "is_cross_attention", False) else "to_qkv"
    found = {
        name: [_base(getattr(self, part, None)) for part in JOINED[name]]
        for name in (first, "to_added_qkv")
    }
    joined = {name: _join(name, layers) for name, layers in found.items() if None not in layers}
    for name, layer in joined.items():
        layer.layers = (self, JOINED[name])
        setattr(self, name, layer)
    self.fused_projections = fuse


@torch.no_grad()
def _join(name: str, layers: Sequence[Any]) -> Any:
    if all(type(layer) is nn.Linear for layer in layers):
        return _join_dense(layers)
    reason = why_apart(layers)
    if reason:
        names = ", ".join(getattr(layer, "name", "a layer in 16 bit") for layer in layers)
        raise InputError(
            f"fuse_qkv_projections: {names}: {reason}; do not fuse this model's projections"
        )
    return _join_packed(name, layers)


def why_apart(layers: Sequence[Any]) -> str:
    """Return why layers cannot be joined; empty when they can."""
    first, *others = layers
    if not all(isinstance(layer, PackedLinear) for layer in layers):
        return "some are packed and some are not"
    if any(layer.k != first.k for layer in others):
        return "they have different inputs"
    if any((layer.bias is None) != (first.bias is None) for layer in others):
        return "some have a bias and some have none"
    return why_separate([layer.scheme for layer in layers], [_parts(layer) for layer in layers])


def _parts(layer: PackedLinear) -> dict[str, Tensor]:
    """Return the tensors that a layer has, as FORMAT.md names them."""
    found = {part: layer.part(part) for part in PACKED_PARTS}
    return {part: tensor for part, tensor in found.items() if tensor is not None}


def _is_plain(layer: nn.Module) -> bool:
    """Tell whether a layer is the joined one, not an adapter in its place."""
    return is_plain(layer) or (type(layer) is nn.Linear and not is_watched(layer))


def _base(layer: Any) -> Any:
    """Return the layer that an adapter wraps."""
    return getattr(layer, "base_layer", layer)


def _join_packed(name: str, layers: Sequence[PackedLinear]) -> JoinedLinear:
    first = layers[0]
    shape = nn.Linear(first.k, sum(layer.n for layer in layers), device="meta")
    path = first.name.rpartition(".")[0]
    scheme = joined_scheme(first.scheme)
    joined = JoinedLinear(f"{path}.{name}".strip("."), scheme, shape, first.buckets[0])
    for part, tensor in join_parts(first.scheme, [_parts(layer) for layer in layers]).items():
        joined.fill(part, tensor)
    joined.bias = _biases(layers)
    _share(joined, layers)
    keep_as(joined, layers)
    joined.train(first.training)
    return joined


def _join_dense(layers: Sequence[nn.Linear]) -> JoinedDense:
    weight = torch.cat([layer.weight for layer in layers])
    joined = JoinedDense(weight.shape[1], len(weight), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    joined.register_parameter("bias", _biases(layers))
    return joined


def _biases(layers: Sequence[PackedLinear | nn.Linear]) -> nn.Parameter | None:
    parts: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return nn.Parameter(torch.cat(parts), requires_grad=False) if parts else None


def _share(joined: PackedLinear, layers: Sequence[PackedLinear]) -> None:
    """Make the layers' codes views of the joined rows, to store them once."""
    places = pairwise(accumulate((layer.n for layer in layers), initial=0))
    for layer, (start, end) in zip(layers, places, strict=True):
        for part in ("weight", "weight_meta", "weight_group"):
            if (rows := joined.part(part)) is not None:
                layer.fill(part, rows[start:end])
