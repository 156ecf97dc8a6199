"""Listening to the attention modules of a running denoiser, whose processors tell what they see.

A module's processor is replaced by one with the same code, which shows its q, k and v and computes
what it did before.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from quantkit.models.attention import (
    AttentionCall,
    Heads,
    attention_modules,
    call_with,
    why_kept,
)

#: Processors that multiply what q's and k's projections return, where the module has no norms.
BARE = (
    "AttnProcessor2_0",
    "FusedAttnProcessor2_0",
    "FusedJointAttnProcessor2_0",
    "JointAttnProcessor2_0",
    "SanaAttnProcessor2_0",
)
_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")

#: Told the module, what it multiplies, and how.
Tell = Callable[[str, Heads, AttentionCall], None]


def observed_modules(denoiser: nn.Module) -> dict[str, Any]:
    """Return the attention modules whose processor is known, by name."""
    return {
        name: module
        for name, module in attention_modules(denoiser)
        if not why_kept(module.processor)
    }


def is_bare(module: Any) -> bool:
    """Tell whether q and k are products with weights and nothing else."""
    normed = any(getattr(module, name, None) is not None for name in _NORMS)
    return type(module.processor).__name__ in BARE and not normed


def is_cross(module: Any, heads: Heads) -> bool:
    """Tell whether keys are of another sequence than queries."""
    return bool(getattr(module, "is_cross_attention", False)) or (
        heads.q.shape[2] != heads.k.shape[2]
    )


@contextmanager
def listening(modules: Mapping[str, Any], tell: Tell) -> Iterator[None]:
    """Let modules tell what they multiply while the body runs; calls with a mask are not told of.

    Args:
        modules: by name, with known processors.
        tell: is to leave tensors as they are.
    """
    before = {name: module.processor for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.processor = _telling(module.processor, partial(tell, name))
        yield
    finally:
        for name, module in modules.items():
            module.processor = before[name]


def _telling(processor: Any, tell: Callable[[Heads, AttentionCall], None]) -> Any:
    """Return a processor that tells, and then computes what ``processor`` does."""

    def attend(heads: Heads, call: AttentionCall) -> None:
        if not call.more and _is_plain(heads):
            tell(heads, call)

    cls = type(processor)
    body = {"__call__": call_with(cls, attend), "__module__": cls.__module__}
    telling: Any = type(cls.__name__, (cls,), body)
    copy = telling.__new__(telling)
    copy.__dict__ = processor.__dict__
    return copy


def _is_plain(heads: Heads) -> bool:
    """Tell whether every query head has keys and values of its own, all of one size."""
    q, k, v = heads
    return q.shape[1] == k.shape[1] and k.shape == v.shape and bool(q.numel() and k.numel())
