"""The attention modules of diffusers' denoisers, and replacing their attention function.

Processors end in one call: torch's ``scaled_dot_product_attention``, or diffusers' own
``dispatch_attention_fn``. A processor with another attention is the same code with another function
under that name. So projections, norms, rotary embeddings and what joins two streams stay
diffusers'.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch.nn.functional as torch_functional
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

#: Names of the two functions.
_DISPATCH, _TORCHS = "dispatch_attention_fn", "scaled_dot_product_attention"


class Heads(NamedTuple):
    """The operands of an attention call, (B, H, N, D)."""

    q: Tensor
    k: Tensor
    v: Tensor


class AttentionCall(NamedTuple):
    """The other arguments of an attention call."""

    #: of q k'; None: 1 / sqrt(D)
    scale: float | None
    #: why it is more than softmax(scale q k') v; empty if it is that
    more: str


#: Returns (B, H, M, D), or None where torch is to compute the call.
Attend = Callable[[Heads, AttentionCall], Tensor | None]


def attention_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attention modules of a model, or of a pipeline's denoisers, by name."""
    parts = {"": model} if isinstance(model, nn.Module) else denoisers_of(model)
    for part, module in parts.items():
        for name, child in module.named_modules(prefix=part):
            if hasattr(child, "processor") and hasattr(child, "set_processor"):
                yield name, child


def denoisers_of(pipeline: Any) -> dict[str, nn.Module]:
    """Return the models of a pipeline that make the picture: VAEs, which encode, are not."""
    # This module is imported while diffusers is.
    from diffusers import ModelMixin

    components = getattr(pipeline, "components", {})
    return {
        name: part
        for name, part in components.items()
        if isinstance(part, ModelMixin) and not hasattr(part, "encode")
    }


def why_kept(processor: Any) -> str:
    """Return why a processor stays as it is; empty for one whose attention is such a call."""
    cls = type(processor)
    if isinstance(processor, nn.Module):
        return f"{cls.__name__} has weights of an adapter"
    return "" if _calls_attention(cls) else f"{cls.__name__} calls no attention of torch's"


def _calls_attention(processor_class: type) -> bool:
    """Tell whether the call of a processor ends in one of the functions that can be replaced."""
    call = inspect.unwrap(processor_class.__call__)
    if not isinstance(call, FunctionType):
        return False
    names, known = {*call.__code__.co_names}, call.__globals__
    functional = names >= {"F", _TORCHS} and hasattr(known.get("F"), _TORCHS)
    return functional or (_DISPATCH in names and _DISPATCH in known)


def call_with(processor_class: type, attend: Attend) -> FunctionType:
    """Return the ``__call__`` of a processor with another attention.

    Args:
        processor_class: not ``why_kept``, or one with a call from here.
        attend: computes what it does not leave to what the class computes it with.
    """
    # What is written again names the call that it stands for, which ends in that one function.
    original: Any = inspect.unwrap(processor_class.__call__)
    functions = {**original.__globals__, **_functions(attend, original.__globals__)}
    # Dynamo of torch 2.11 looks names up in the module of that name, which has the former ones.
    functions.pop("__name__", None)
    call = FunctionType(
        original.__code__, functions, original.__name__, original.__defaults__, original.__closure__
    )
    call.__kwdefaults__ = original.__kwdefaults__
    call.__module__ = original.__module__
    # Among it the signature that attention modules ask for.
    call.__dict__.update(original.__dict__)
    return call


def _functions(attend: Attend, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the globals of a processor, with other functions under torch's and diffusers' names.

    Args:
        attend: as ``call_with``'s.
        names: what they stood for.
    """
    before_functional = names.get("F", torch_functional)
    before_dispatch = names.get("dispatch_attention_fn", dispatch_attention_fn)

    def dispatch(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Replace ``dispatch_attention_fn``: (B, N, H, D)."""
        heads = Heads(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        y = attend(heads, _parse(attn_mask, **options))
        if y is None:
            theirs: Tensor = before_dispatch(query, key, value, attn_mask, **options)
            return theirs
        return y.transpose(1, 2)

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Replace torch's: (B, H, N, D)."""
        y = attend(Heads(query, key, value), _parse(attn_mask, **options))
        if y is not None:
            return y
        theirs: Tensor = before_functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, **options
        )
        return theirs

    functional = ModuleType("functional")
    functional.__dict__.update(vars(before_functional))
    functional.__dict__["scaled_dot_product_attention"] = scaled_dot_product_attention
    return {"F": functional, "dispatch_attention_fn": dispatch}


def _parse(
    attn_mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    parallel_config: Any = None,
    attention_kwargs: Any = None,
    **_: Any,
) -> AttentionCall:
    """Return a call's options as a value; those that are left over change nothing.

    Args:
        attn_mask: what is added to scores.
        dropout_p: of probabilities.
        is_causal: later keys are hidden.
        scale: of q k'.
        parallel_config: several devices compute it.
        attention_kwargs: of one back end of diffusers.
    """
    asked = (attn_mask is not None, dropout_p, is_causal, parallel_config, attention_kwargs)
    more = "scores are masked, or more than softmax is asked for" if any(asked) else ""
    return AttentionCall(scale, more)
