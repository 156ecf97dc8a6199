"""Refusing what adds to queries or keys of attention modules that have another basis.

LoRAs of ``to_q`` and ``to_k``, and IP-Adapters whose keys meet the queries of such a module, were
trained in the basis before ``quantkit rotate``: pictures would be wrong, and nothing would say so.
peft, diffusers and a user's own assignment put what they add in the place of a module's child, so
torch's hook on that sees all of them, before a picture is drawn.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from quantkit.errors import CheckpointError, InputError
from quantkit.models.attention import attention_modules

#: Where an attention module keeps its path, if its queries and keys have another basis.
_MARK = "quantkit_rotated"
#: What makes queries and keys, alone and joined, of a module and of its second stream.
_PROJECTIONS = frozenset({
    "to_q", "to_k", "to_qk", "to_kv", "to_qkv", "add_q_proj", "add_k_proj", "to_added_qkv",
})  # fmt: skip
#: How a processor calls projections of its own: to_k_ip of IP-Adapters, to_q_lora.
_OWN = ("to_q", "to_k")
#: peft's names for the layer inside an adapter's, and inside one that replaces it.
_INSIDE = frozenset({"base_layer", "original_module"})


@dataclass(frozen=True)
class _Mark:
    """The path of a module; where a pickle or a copy of it arrives, adapters are refused, too."""

    path: str

    def __post_init__(self) -> None:
        _listen()

    def __reduce__(self) -> tuple[type["_Mark"], tuple[str]]:
        # Pickles of dataclasses would be filled without being made.
        return _Mark, (self.path,)


def install(model: nn.Module, modules: Iterable[str]) -> None:
    """Refuse adapters on queries and keys of these modules from now on.

    Raises:
        CheckpointError: a module that the model has not.
    """
    known = dict(attention_modules(model))
    for name in modules:
        if name not in known:
            raise CheckpointError(
                f"rotated: {name:.80}: no such attention module in {type(model).__name__}; pack "
                "the model again"
            )
        setattr(known[name], _MARK, _Mark(name))


def _refuse(module: nn.Module, name: str, child: Any) -> None:
    """Refuse a child of an attention module that knows another basis.

    Raises:
        InputError: naming the place.
    """
    mark = vars(module).get(_MARK)
    if not isinstance(mark, _Mark) or not isinstance(child, nn.Module):
        return
    inside = vars(child).get("_modules", {})
    adapted = name in _PROJECTIONS and not _INSIDE.isdisjoint(inside)
    own = next((part for part in inside if part.startswith(_OWN)), "")
    if adapted or own:
        raise InputError(
            f"adapter: {mark.path}.{own or name}: was trained in the basis that queries and keys "
            "had before 'quantkit rotate'; merge it into the 16-bit model (fuse_lora, "
            "save_pretrained), rotate and pack that, or take one that leaves them alone"
        )


@cache
def _listen() -> None:
    # Once there is a mark: who has no such model pays nothing.
    register_module_module_registration_hook(_refuse)
