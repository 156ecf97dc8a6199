"""Reimplemented attention processors of diffusers.

A static scale belongs to a module, which the call of attention inside a processor does not know. So
these few are reimplemented, for modules with scales, and for heads in 16 bit that one kernel makes
(``attention_wide``). Everything else, such as norms that they do not know, is left to the original
processor.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.device.archs import OneLaunch
from quantkit.inference.attention.attention_call import AttentionSettings, why_not_sizes
from quantkit.inference.attention.attention_heads import (
    Part,
    Pending,
    Projection,
    Rotation,
    Shape,
    Stream,
    are_of_one_launch,
    computed,
    product_of_streams,
)
from quantkit.inference.attention.attention_wide import NORMS, WideAttention
from quantkit.inference.attention.coded_projections import joint_of, joint_product
from quantkit.inference.attention.head_factors import factors_of
from quantkit.inference.layers.head_scales import FoldedScales, scales_of
from quantkit.inference.layers.quantized_input import QuantizedInput
from quantkit.numerics.attention_scales import AttentionScales
from quantkit.numerics.formats import E4M3FN


def with_streams(processor_class: type, call: Any, settings: AttentionSettings | None) -> Any:
    """Return the ``__call__`` of a processor of a packed model, or of a quantized one.

    Args:
        processor_class: of diffusers.
        call: of it, with scales of each call's own numbers.
        settings: of the attention; None: it stays in 16 bit.
    """
    own = _PROCESSORS.get(processor_class.__name__)
    if own is None:
        return call

    def with_heads(self: Any, attn: Any, *args: Any, **kwargs: Any) -> Any:
        for attention in _ways(self, attn, settings):
            if (y := own(attention, *args, **kwargs)) is not None:
                return y
        return call(self, attn, *args, **kwargs)

    # Attention modules ask a processor what it takes.
    function: Any = with_heads
    function.__signature__ = inspect.signature(call)
    # Who listens to attention, or computes it otherwise, does so in the call that this stands for.
    function.__wrapped__ = call
    return function


def is_reimplemented(processor_class: type) -> bool:
    """Tell whether a processor of a packed model is reimplemented here in 16 bit."""
    return processor_class.__name__ in _JOINT


def _ways(
    processor: Any, attn: Any, settings: AttentionSettings | None
) -> Iterator["_CodedAttention | WideAttention"]:
    """Yield implementations that may compute a call, the fastest first."""
    if settings is not None and (found := scales_of(attn)) is not None:
        yield _CodedAttention(attn, settings, *found, type(processor).__name__ in _JOINT)
    if type(processor).__name__ in _JOINT:
        yield WideAttention(attn, processor, settings)


class _CodedAttention(NamedTuple):
    """An attention module with static scales."""

    module: Any
    settings: AttentionSettings
    scales: AttentionScales
    folds: FoldedScales | None
    #: one pass may make its heads in 16 bit
    has_joint_heads: bool

    def attend_to_itself(self, x: Tensor) -> Tensor | QuantizedInput | None:
        """Return self-attention of an input whose projections are one launch.

        It is for the output projection. None where projections are more launches, or torch's
        attention is faster.
        """
        settings, size = self.settings, self.scales.head_size
        if not self._is_plain_fp8 or torch.is_grad_enabled():
            return None
        joint = joint_of(self.module, self.folds, x.device)
        if joint is None or why_not_sizes(settings, x.shape[1], size, x, OneLaunch.PROJECTIONS):
            return None
        product = joint_product(joint, x, Shape(self.scales.heads, size))
        return product.read_by(self.module.to_out[0])

    def takes(
        self, tokens: int, like: Tensor, mask: Tensor | None = None, rotary: Any = None
    ) -> bool:
        """Tell whether a kernel computes attention over so many keys."""
        launch = OneLaunch.STREAMS if self._has_streams(like, rotary) else None
        reason = why_not_sizes(self.settings, tokens, self.scales.head_size, like, launch)
        return mask is None and not reason

    @property
    def _is_plain_fp8(self) -> bool:
        return self.settings.qk_format == self.settings.pv == E4M3FN.name

    def _has_streams(self, like: Tensor, rotary: Any) -> bool:
        """Tell whether one launch makes all codes, where another makes the heads in 16 bit."""
        attn = self.module
        norms = [getattr(attn, name, None) for name in NORMS]
        joined = rotary is not None or attn.added_kv_proj_dim is not None or any(norms)
        known = self.has_joint_heads and self._is_plain_fp8
        return known and joined and are_of_one_launch(norms, like.dtype)

    def attend(
        self,
        streams: Sequence[Stream],
        rotary: Any = None,
        mask: Tensor | None = None,
        *,
        reader: Any = None,
    ) -> Tensor | QuantizedInput | None:
        """Return attention over the tokens of all streams, one after another: (B, T, H * D).

        None where gradients are enabled.

        Args:
            streams: of tokens.
            rotary: of heads.
            mask: None.
            reader: the layer that alone reads the result, which may be codes then.
        """
        del mask
        x = streams[0].q.x
        if torch.is_grad_enabled():
            streams = [
                s._replace(q=computed(s.q), k=computed(s.k), v=computed(s.v)) for s in streams
            ]
            if any(part.x.requires_grad for s in streams for part in (s.q, s.k, s.v)):
                return None
        shape = Shape(self.scales.heads, self.scales.head_size)
        rotation = None if rotary is None else Rotation(*(t.to(x.device).float() for t in rotary))
        qk_format = self.settings.qk_format
        product = product_of_streams(
            streams,
            shape,
            factors_of(self.module, self.scales, qk_format),
            qk_format,
            rotation=rotation,
            pv=self.settings.pv,
        )
        return product.read_by(reader)


_Own = _CodedAttention | WideAttention


def _unet(
    own: _CodedAttention,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    temb: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Compute AttnProcessor2_0: UNets, PixArt."""
    del temb
    attn = own.module
    extra = (attn.spatial_norm, attn.group_norm, attn.norm_cross, attn.residual_connection)
    context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    if attention_mask is not None or any(extra) or hidden_states.ndim != 3:
        return None
    plain = encoder_hidden_states is None and attn.norm_q is None and attn.norm_k is None
    y = own.attend_to_itself(hidden_states) if plain else None
    if y is None and own.takes(context.shape[1], hidden_states):
        stream = _projected(attn, hidden_states, encoder_hidden_states)
        y = own.attend([stream], reader=attn.to_out[0])
    if y is None:
        return None
    out, factor = _out(attn, y), attn.rescale_output_factor
    return out if factor == 1 else out / factor


def _joint(
    own: _Own,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Any:
    """Compute JointAttnProcessor2_0, which ignores masks: Stable Diffusion 3, the text last."""
    del attention_mask
    attn, text = own.module, encoder_hidden_states
    tokens = hidden_states.shape[1] + (0 if text is None else text.shape[1])
    if not own.takes(tokens, hidden_states):
        return None
    streams = [_projected(attn, hidden_states)]
    if text is not None:
        streams.append(_projected_text(attn, text))
    # Of two streams, each has an output projection of its own.
    y: Any = own.attend(streams, reader=attn.to_out[0] if text is None else None)
    if y is None or text is None:
        return None if y is None else _out(attn, y)
    picture, words = y[:, : hidden_states.shape[1]], y[:, hidden_states.shape[1] :]
    return _out(attn, picture), words if attn.context_pre_only else attn.to_add_out(words)


def _flux(
    own: _Own,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
) -> Any:
    """Compute FluxAttnProcessor: FLUX, Chroma, the text first."""
    attn, text = own.module, encoder_hidden_states
    joint = text is not None and attn.added_kv_proj_dim is not None
    if (text is not None) != joint:
        return None
    tokens = hidden_states.shape[1] + (text.shape[1] if text is not None else 0)
    if not own.takes(tokens, hidden_states, attention_mask, image_rotary_emb):
        return None
    streams = [_projected(attn, hidden_states)]
    if text is not None:
        streams.insert(0, _projected_text(attn, text))
    y: Any = own.attend(streams, image_rotary_emb, attention_mask)
    if y is None or text is None:
        return y
    words, picture = y[:, : text.shape[1]], y[:, text.shape[1] :]
    return _out(attn, picture.contiguous()), attn.to_add_out(words.contiguous())


def _fused_joint(own: _Own, *args: Any, **kwargs: Any) -> Any:
    """Compute FusedJointAttnProcessor2_0, which leaves norms out."""
    return None if own.module.norm_q is not None else _joint(own, *args, **kwargs)


def _projected(attn: Any, x: Tensor, context: Tensor | None = None) -> Stream:
    if not attn.fused_projections:
        context = x if context is None else context
        q, k, v = Pending(attn.to_q, x), Pending(attn.to_k, context), Pending(attn.to_v, context)
        return Stream(q, k, v, attn.norm_q, attn.norm_k)
    first: Part
    if context is None:
        first, key, value = _side_by_side(attn.to_qkv(x), 3)
    else:
        first = Pending(attn.to_q, x)
        key, value = _side_by_side(attn.to_kv(context), 2)
    return Stream(first, key, value, attn.norm_q, attn.norm_k)


def _projected_text(attn: Any, x: Tensor) -> Stream:
    q: Part
    k: Part
    v: Part
    if attn.fused_projections:
        q, k, v = _side_by_side(attn.to_added_qkv(x), 3)
    else:
        layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        q, k, v = (Pending(layer, x) for layer in layers)
    return Stream(q, k, v, attn.norm_added_q, attn.norm_added_k)


def _side_by_side(x: Tensor, count: int) -> list[Projection]:
    return [Projection(x, x.shape[-1] // count * i) for i in range(count)]


def _out(attn: Any, y: Tensor | QuantizedInput) -> Tensor:
    """Return the result of the output projection and dropout."""
    projection, dropout = attn.to_out[0], attn.to_out[1]
    result: Tensor = dropout(projection(y))
    return result


#: Processor -> its implementation, which returns None for calls that it does not support.
_PROCESSORS: dict[str, Callable[..., Any]] = {
    "AttnProcessor2_0": _unet,
    "FusedAttnProcessor2_0": _unet,
    "JointAttnProcessor2_0": _joint,
    "FusedJointAttnProcessor2_0": _fused_joint,
    "FluxAttnProcessor": _flux,
}
#: Those of them that norm and rotate heads, or join two streams.
_JOINT = frozenset({"JointAttnProcessor2_0", "FusedJointAttnProcessor2_0", "FluxAttnProcessor"})
