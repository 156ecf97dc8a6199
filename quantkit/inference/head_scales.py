"""Static scales of attention in a model: a child of each attention module that has them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.attention import CHILD, HeadShape
from quantkit.errors import CheckpointError
from quantkit.inference.buckets import apply_keeping_dtype
from quantkit.numerics.attention_scales import SHAPES, AttentionScales


class HeadScales(nn.Module):
    """The tensors of FORMAT.md; float32 whatever the model computes in."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        for part, by_column in SHAPES.items():
            columns = (shape.head_size,) if by_column else ()
            empty = torch.empty(shape.heads, *columns, dtype=torch.float32, device="meta")
            self.register_buffer(part, empty)

    def fill(self, part: str, value: Tensor) -> None:
        """Put a tensor in its place; it is kept, not copied."""
        setattr(self, part, value)

    def forward(self) -> AttentionScales:
        """Return them; a call, so that what offloads modules brings them back."""
        return AttentionScales(*(getattr(self, part) for part in SHAPES))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  torch's signature
        return apply_keeping_dtype(self, super()._apply, fn, recurse=recurse)


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
                f"attention: {name}: {found}, wanted {shape.heads} heads; pack the model again"
            )
        modules[name].add_module(CHILD, HeadScales(shape))
    return {f"{name}.{CHILD}.{part}" for name in static for part in SHAPES}


def uninstall(model: nn.Module) -> None:
    """Take all scales away."""
    for module in list(model.modules()):
        if isinstance(getattr(module, CHILD, None), HeadScales):
            delattr(module, CHILD)


def scales_of(module: nn.Module) -> AttentionScales | None:
    """Return the static scales of an attention module; None where it has none."""
    child = getattr(module, CHILD, None)
    if child is None:
        return None
    scales: AttentionScales = child()
    return scales
