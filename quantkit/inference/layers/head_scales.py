"""Static scales of attention in a model: a child of each attention module that has them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantkit.checkpoint.packed_attention import CHILD, HeadShape
from quantkit.errors import CheckpointError
from quantkit.inference.layers.timestep_buckets import apply_keeping_dtype
from quantkit.numerics.attention_scales import SHAPES, AttentionScales


class FoldedScales(NamedTuple):
    """Folded scales and biases of projections that write codes, and of values; float32."""

    #: (3, N) each: of queries, keys and values, factors and means of heads in them
    scale: Tensor
    bias: Tensor
    #: (H, D), D up to a multiple of 16
    value_scale: Tensor
    value_mean: Tensor


class StaticScales(NamedTuple):
    """The static scales of an attention module."""

    scales: AttentionScales
    #: None where its projections have not been folded
    folds: FoldedScales | None


class HeadScales(nn.Module):
    """The tensors of FORMAT.md, and values derived from them; float32 in a model of any dtype."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        for part, by_column in SHAPES.items():
            columns = (shape.head_size,) if by_column else ()
            empty = torch.empty(shape.heads, *columns, dtype=torch.float32, device="meta")
            self.register_buffer(part, empty)
        for name in _FOLDS:
            self.register_buffer(name, None, persistent=False)

    def fill(self, part: str, value: Tensor) -> None:
        """Put a tensor in its place; it is kept, not copied. What was folded is gone."""
        setattr(self, part, value)
        self.keep(None)

    def part(self, name: str) -> Tensor:
        """Return a tensor of FORMAT.md, as ``PackedLayer.part``."""
        found: Tensor = getattr(self, name)
        return found

    def keep(self, folds: FoldedScales | None) -> None:
        """Store the values derived from the scales and the module's layers."""
        for name, tensor in zip(_FOLDS, folds or (None,) * len(_FOLDS), strict=True):
            setattr(self, name, tensor)

    def forward(self) -> StaticScales:
        """Return them; a call, so that offloading hooks bring them back."""
        scales = AttentionScales(*(getattr(self, part) for part in SHAPES))
        first, *others = (getattr(self, name) for name in _FOLDS)
        return StaticScales(scales, None if first is None else FoldedScales(first, *others))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  torch's signature
        return apply_keeping_dtype(self, super()._apply, fn, recurse=recurse)


#: Names of the tensors that follow from others.
_FOLDS = tuple(f"folded_{name}" for name in FoldedScales._fields)


def install(model: nn.Module, static: Mapping[str, HeadShape]) -> set[str]:
    """Give attention modules empty scales.

    Returns:
        the names of their tensors.

    Raises:
        CheckpointError: the model has no such module, or one with other heads.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for name, shape in static.items():
        heads = getattr(modules.get(name), "heads", None)
        if heads != shape.heads:
            found = "no such attention module" if heads is None else f"{heads} heads"
            raise CheckpointError(
                f"attention: {name}: {found}, expected {shape.heads} heads; pack the model again"
            )
        modules[name].add_module(CHILD, HeadScales(shape))
    return {f"{name}.{CHILD}.{part}" for name in static for part in SHAPES}


def uninstall(model: nn.Module) -> None:
    """Take all scales away."""
    for module in list(model.modules()):
        if isinstance(getattr(module, CHILD, None), HeadScales):
            delattr(module, CHILD)


def scales_of(module: nn.Module) -> StaticScales | None:
    """Return the static scales of an attention module; None where it has none."""
    child = getattr(module, CHILD, None)
    if child is None:
        return None
    found: StaticScales = child()
    return found
