"""Tensors that stand for pictures that are not computed yet.

Convolutions of a model that is no denoiser return them, outside of autograd. Group norms, silu,
sums and upsampling by 2 of them are put off, too, until a packed convolution reads their lines.
Anything else computes them first: to all other code they are tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import get_default_nowrap_functions
from torch.utils import _pytree as pytree

from quantkit.inference.pictures.content import (
    Content,
    Convolution,
    Doubled,
    Normed,
    Product,
    Remade,
    Stored,
    Sum,
    whole,
)
from quantkit.numerics.norms import MAX_CHANNELS

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

#: Channels that ``group_norm`` loads at once.
_ALIGNED = 8


class Deferred(Tensor):
    """A picture (B, C, H, W) that is computed when its numbers are read, once."""

    content: Content

    @staticmethod
    def __new__(cls: type[Self], content: Content, like: Tensor) -> Self:
        """Return a tensor for what ``content`` computes.

        Args:
            content: gives the numbers.
            like: of its device.
        """
        b, h, w, c = content.shape
        strides = (h * w * c, 1, w * c, c)
        made: Self = Tensor._make_wrapper_subclass(  # noqa: SLF001  the only way
            cls, (b, c, h, w), strides=strides, dtype=content.dtype, device=like.device
        )
        made.content = content
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Put a call off, or make it with what is computed."""
        del types
        if func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  as torch's subclasses do
                return func(*args, **(kwargs or {}))
        rule = _RULES.get(func)
        found = rule(*args, **(kwargs or {})) if rule else NotImplemented
        if found is not NotImplemented:
            return found
        return func(*_computed(args), **_computed(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make a call that came past ``__torch_function__`` with what is computed."""
        del types
        return func(*_computed(args), **_computed(kwargs or {}))

    def compute(self) -> Tensor:
        """Return the picture as a plain tensor with channels last, and keep it."""
        content = self.content
        if isinstance(content, Product) and isinstance(content.source, Doubled):
            content = self.content = Remade(content)
        if isinstance(content, Remade):
            return content.whole()
        if not isinstance(content, Stored):
            content = self.content = Stored(whole(content))
        return content.picture


def convolved(layer: Convolution, x: Tensor) -> Deferred:
    """Return the convolution of a picture (B, C, H, W), put off."""
    source = _content(x)
    # Of what a convolution gives, lines would be computed again for every window along H.
    if isinstance(source, Product | Sum):
        source = _kept(x)
    return Deferred(Product(source, layer), x)


def _content(x: Tensor) -> Content:
    return x.content if isinstance(x, Deferred) else Stored(x)


def _kept(x: Tensor) -> Content:
    """Return a picture as it is kept once it is computed."""
    if isinstance(x, Deferred):
        x.compute()
    return _content(x)


def _computed(arguments: Any) -> Any:
    return pytree.tree_map_only(Deferred, Deferred.compute, arguments)


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    dtypes = {t.dtype for t in (weight, bias) if t is not None}
    channels = x.shape[1]
    fits = channels % _ALIGNED == 0 and channels <= MAX_CHANNELS and channels % num_groups == 0
    if not fits or dtypes - {x.dtype}:
        return NotImplemented
    return Deferred(Normed.of(_kept(x), num_groups, weight, bias, eps), x)


def _silu(x: Tensor, inplace: bool = False) -> Any:  # noqa: FBT001, FBT002  torch's signature
    content = _content(x)
    if inplace or not isinstance(content, Normed) or content.activation:
        return NotImplemented
    return Deferred(content.activated("silu"), x)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: FBT001, FBT002  torch's signature
    del p, inplace
    return NotImplemented if training else x


def _interpolated(x: Tensor, *sizes: Any, **options: Any) -> Any:
    plain = {"mode": "nearest", "scale_factor": 2}
    given = {name: value for name, value in options.items() if value not in (None, False)}
    if sizes or given != plain:
        return NotImplemented
    return Deferred(Doubled(_kept(x)), x)


def _added(x: Any, y: Any) -> Any:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return NotImplemented
    if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
        return NotImplemented
    products = [isinstance(_content(z), Product) for z in (x, y)]
    return Deferred(Sum(_content(x), _content(y)), x) if any(products) else NotImplemented


def _divided(x: Any, by: Any) -> Any:
    return x if isinstance(by, int | float) and by == 1 else NotImplemented


#: What tells of a tensor without its numbers.
_PLAIN = frozenset({
    *get_default_nowrap_functions(),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout",
                                                  "is_cuda", "requires_grad", "is_meta")),
    Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_floating_point,
})  # fmt: skip
#: Operator -> what puts it off, or NotImplemented.
_RULES: dict[Any, Callable[..., Any]] = {
    functional.group_norm: _group_norm,
    functional.silu: _silu,
    functional.dropout: _dropout,
    functional.interpolate: _interpolated,
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _added),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), _divided),
}
