"""T5's feed-forward over packed layers: its last product is in float32 where the rest is float16.

What it adds to the residual stream leaves float16's range, so transformers keeps the weight of
``wo`` in float32 and casts its input to whatever dtype that weight has: to codes, of a packed one.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quantkit.inference.packed_layer import PackedLayer


class WideFeedForward(nn.Module):
    """T5DenseActDense, T5DenseGatedActDense and UMT5's: parameters and submodules are the same."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return (..., d_model): float32 of an input in float16, else in the input's dtype."""
        parts: Any = self
        if hasattr(self, "wi_0"):
            hidden = parts.act(parts.wi_0(hidden_states)) * parts.wi_1(hidden_states)
        else:
            hidden = parts.act(parts.wi(hidden_states))
        hidden = parts.dropout(hidden)
        wide = hidden.float() if hidden.dtype is torch.float16 else hidden
        y: Tensor = parts.wo(wide)
        return y


#: transformers' classes; UMT5's are copies.
_CLASSES = ("T5DenseActDense", "T5DenseGatedActDense", "UMT5DenseActDense",
            "UMT5DenseGatedActDense")  # fmt: skip


#: Where a network keeps the class that it had.
_FORMER = "quantkit_former_class"


def install(model: nn.Module) -> None:
    """Let T5's feed-forward networks with a packed ``wo`` choose their dtype by the input's."""
    for module in model.modules():
        if type(module).__name__ in _CLASSES and isinstance(module.wo, PackedLayer):
            setattr(module, _FORMER, type(module))
            module.__class__ = WideFeedForward


def uninstall(model: nn.Module) -> None:
    """Give the networks back their class, and to ``wo`` the dtype that transformers gives it."""
    for module in model.modules():
        if isinstance(module, WideFeedForward):
            module.__class__ = module.__dict__.pop(_FORMER)
            wo: Any = module.wo
            if wo.weight.dtype is torch.float16:
                wo.to(torch.float32)
