"""Listening to the attention modules of a running denoiser, whose processors tell what they see.

A module's processor is replaced by one with the same code, which shows its q, k and v and computes
what it did before.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from quantkit.models.attention_modules import (
    Attend,
    AttentionCall,
    Heads,
    attention_modules,
    call_with,
    why_kept,
)

#: Told the module, what it multiplies, and how.
Tell = Callable[[str, Heads, AttentionCall], None]


def observed_modules(denoiser: nn.Module) -> dict[str, Any]:
    """Return the attention modules whose processor is known, by name."""
    return {
        name: module
        for name, module in attention_modules(denoiser)
        if not why_kept(module.processor)
    }


def listening(modules: Mapping[str, Any], tell: Tell) -> AbstractContextManager[None]:
    """Return the context in which modules tell what they multiply; calls with a mask are left out.

    Args:
        modules: by name, with processors that can be replaced.
        tell: is to leave tensors as they are.
    """
    return attending(modules, {name: partial(tell, name) for name in modules})


@contextmanager
def attending(modules: Mapping[str, Any], attends: Mapping[str, Attend]) -> Iterator[None]:
    """Let modules compute attention otherwise while the body runs, but for calls with a mask.

    Args:
        modules: by name, with processors that can be replaced.
        attends: by the same names; what one returns None for is computed as before.
    """
    before = {name: module.processor for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.processor = _with_attention(module.processor, attends[name])
        yield
    finally:
        for name, module in modules.items():
            module.processor = before[name]


def _with_attention(processor: Any, attend: Attend) -> Any:
    """Return a processor that asks ``attend`` first, and else computes what it did."""

    def ask(heads: Heads, call: AttentionCall) -> Tensor | None:
        return attend(heads, call) if not call.more and _is_plain(heads) else None

    cls = type(processor)
    body = {"__call__": call_with(cls, ask), "__module__": cls.__module__}
    asking: Any = type(cls.__name__, (cls,), body)
    copy = asking.__new__(asking)
    copy.__dict__ = processor.__dict__
    return copy


def _is_plain(heads: Heads) -> bool:
    """Tell whether every query head has keys and values of its own, all of one size."""
    q, k, v = heads
    return q.shape[1] == k.shape[1] and k.shape == v.shape and bool(q.numel() and k.numel())
