"""Transformer blocks of packed models with fused norms; see ``norm_codes``.

A block is replaced by exact class, because diffusers' forward passes 16 bit from the norm to the
layers. It computes the same in the same order; parameters and submodules are the same.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from diffusers.models.normalization import AdaLayerNormZero, AdaLayerNormZeroSingle
from diffusers.models.transformers.transformer_flux import (
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import Tensor, nn

from quantkit.inference.blocks.activation_codes import (
    activated,
    has_fused_op,
    has_fused_product,
    projected,
)
from quantkit.inference.blocks.joined_streams import joined
from quantkit.inference.blocks.norm_codes import Branch, Modulation, layer_normed, read_alike
from quantkit.inference.blocks.norm_readers import CodedNorms, readers_at
from quantkit.inference.blocks.residuals import ResidualSum
from quantkit.inference.layers.compiler_fuses import compiler_quantizes
from quantkit.inference.layers.modules import is_watched
from quantkit.inference.layers.prompts import is_plain

#: The attribute of a block with the names of norms whose readers have one scale.
_CODED = "quantkit_coded_norms"


class CodedTransformerBlock(BasicTransformerBlock):  # type: ignore[misc]  # diffusers' is untyped
    """Blocks with LayerNorms before self-attention, cross-attention and GEGLU, as in SDXL."""

    def forward(  # noqa: PLR0917  diffusers' signature
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the output of BasicTransformerBlock, (B, T, K)."""
        context, options = encoder_hidden_states, cross_attention_kwargs or {}
        if (
            context is None
            or not _is_usual(self, hidden_states)
            or {"gligen", "scale"} & set(options)
        ):
            former: Tensor = super().forward(
                hidden_states, attention_mask, context, encoder_attention_mask, timestep,
                cross_attention_kwargs, class_labels, added_cond_kwargs,
            )  # fmt: skip
            return former
        y: Any
        x, y = layer_normed(self.norm1, _readers(self, "norm1", hidden_states), hidden_states)
        with ResidualSum(_end(self, "attn1.to_out"), x) as end:
            y = self.attn1(y, encoder_hidden_states=None, attention_mask=attention_mask, **options)
        x, y = layer_normed(self.norm2, _readers(self, "norm2", x), *end.parts(y))
        with ResidualSum(_end(self, "attn2.to_out"), x) as end:
            y = self.attn2(
                y,
                encoder_hidden_states=context,
                attention_mask=encoder_attention_mask,
                **options,
            )
        x, y = layer_normed(self.norm3, _readers(self, "norm3", x), *end.parts(y))
        with ResidualSum(_end(self, "ff"), x) as end:
            y = self.ff(y)
        return end.total(y)


class CodedJointBlock(JointTransformerBlock):  # type: ignore[misc]  # as above
    """Stable Diffusion 3."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Return what JointTransformerBlock returns: the text, if it goes on, and the picture."""
        x, text, options = hidden_states, encoder_hidden_states, joint_attention_kwargs or {}
        if self.training or self.use_dual_attention or self._chunk_size is not None:
            y: tuple[Tensor | None, Tensor] = super().forward(x, text, temb, joint_attention_kwargs)
            return y
        normed, gate, *mlp = _adaptive(self, "norm1", x, temb)
        if self.context_pre_only:
            words: Any = self.norm1_context(text, temb)
            text_gate = None
        else:
            words, text_gate, *text_mlp = _adaptive(self, "norm1_context", text, temb)
        end = ResidualSum(_end(self, "attn.to_out"), x, gate)
        last = None if self.context_pre_only else _end(self, "attn.to_add_out")
        with end, ResidualSum(last, text, text_gate) as end_of_text:
            a, b = self.attn(hidden_states=normed, encoder_hidden_states=words, **options)
        x = _feed_forward(self, "", end.parts(a), mlp)
        if self.context_pre_only:
            return None, x
        return _feed_forward(self, "_context", end_of_text.parts(b), text_mlp), x


class CodedFluxBlock(FluxTransformerBlock):  # type: ignore[misc]  # as above
    """FLUX's blocks of two streams."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what FluxTransformerBlock returns: the text's tokens and the picture's."""
        x, text = hidden_states, encoder_hidden_states
        normed, gate, *mlp = _adaptive(self, "norm1", x, temb)
        words, text_gate, *text_mlp = _adaptive(self, "norm1_context", text, temb)
        end = ResidualSum(_end(self, "attn.to_out"), x, gate)
        last = _end(self, "attn.to_add_out")
        with end, ResidualSum(last, text, text_gate) as end_of_text:
            a, b, *prompted = self.attn(
                hidden_states=normed,
                encoder_hidden_states=words,
                image_rotary_emb=image_rotary_emb,
                **(joint_attention_kwargs or {}),
            )
        x = _feed_forward(self, "", end.parts(a), mlp)
        for added in prompted:
            x = x + added
        text = _feed_forward(self, "_context", end_of_text.parts(b), text_mlp)
        return _clipped(text), x


class CodedFluxSingleBlock(FluxSingleTransformerBlock):  # type: ignore[misc]  # as above
    """FLUX's blocks of one stream; attention and network are side by side as codes alone."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what FluxSingleTransformerBlock returns: the text's tokens and the picture's."""
        words = encoder_hidden_states.shape[1]
        x = joined(encoder_hidden_states, hidden_states)
        y, gate = _adaptive(self, "norm", x, temb)
        options = joint_attention_kwargs or {}
        heads = self.attn(hidden_states=y, image_rotary_emb=image_rotary_emb, **options)
        read = _side_by_side(self, heads, y)
        with ResidualSum(None if self.training else self.proj_out, x, gate) as end:
            y = self.proj_out(read)
        x = _clipped(end.total(y))
        return x[:, :words], x[:, words:]


#: Block -> its replacement, and its norms with their readers.
_BLOCKS: Mapping[type, tuple[type, Mapping[str, tuple[str, ...]]]] = {
    BasicTransformerBlock: (
        CodedTransformerBlock,
        {"norm1": ("attn1.to_qkv",), "norm2": ("attn2.to_q",), "norm3": ("ff",)},
    ),
    JointTransformerBlock: (
        CodedJointBlock,
        {
            "norm1": ("attn.to_qkv",),
            "norm1_context": ("attn.to_added_qkv",),
            "norm2": ("ff",),
            "norm2_context": ("ff_context",),
        },
    ),
    FluxTransformerBlock: (
        CodedFluxBlock,
        {
            "norm1": ("attn.to_qkv",),
            "norm1_context": ("attn.to_added_qkv",),
            "norm2": ("ff",),
            "norm2_context": ("ff_context",),
        },
    ),
    FluxSingleTransformerBlock: (
        CodedFluxSingleBlock,
        {"norm": ("attn.to_qkv", "proj_mlp")},
    ),
}


def install(model: nn.Module) -> None:
    """Let the norms of a packed model's blocks write codes where their readers allow it."""
    for module in model.modules():
        if type(module) in _BLOCKS:
            coded, norms = _BLOCKS[type(module)]
            found = frozenset(n for n, paths in norms.items() if _can_share(module, paths))
            if found:
                setattr(module, _CODED, CodedNorms(found))
                module.__class__ = coded


def uninstall(model: nn.Module) -> None:
    """Undo ``install``."""
    for module in model.modules():
        if type(module) in _FORMER:
            delattr(module, _CODED)
            module.__class__ = _FORMER[type(module)]


_FORMER = {coded: former for former, (coded, _) in _BLOCKS.items()}
_NORMS = dict(_BLOCKS.values())


def _as_their_formers() -> None:
    """Register the classes in diffusers in place of those that they replace.

    It finds blocks to compile by the name of their class, and those to cache by a table of classes.
    """
    for coded, former in _FORMER.items():
        # Pickles go by the qualified name.
        coded.__name__ = former.__name__
        with suppress(ValueError):  # not all are there
            TransformerBlockRegistry.register(coded, replace(TransformerBlockRegistry.get(former)))


_as_their_formers()


def _can_share(block: Any, paths: tuple[str, ...]) -> bool:
    readers = readers_at(block, paths)
    return readers is not None and read_alike(readers.layers)


def _readers(block: Any, norm: str, x: Tensor) -> list[Any]:
    """Return the layers that read a norm's codes now; none where a reader needs 16 bit."""
    if block.training or compiler_quantizes(x):
        return []
    found: CodedNorms = getattr(block, _CODED)
    return found.layers(block, norm, _NORMS[type(block)][norm])


def _end(block: Any, path: str) -> Any:
    """Return the layer that computes the output of attention or a network, or None."""
    if block.training or torch.compiler.is_compiling():
        return None
    found: CodedNorms = getattr(block, _CODED)
    return found.end(block, path)


def _is_usual(block: Any, x: Tensor) -> bool:
    """Tell whether a block is computed as SDXL's: with LayerNorms, without extra modules."""
    unusual = block.only_cross_attention or block.attn2 is None or block.pos_embed is not None
    chunked = block._chunk_size is not None  # noqa: SLF001  diffusers has no other name for it
    return block.norm_type == "layer_norm" and x.ndim == 3 and not (unusual or chunked)


def _adaptive(block: Any, name: str, x: Tensor, emb: Tensor) -> tuple[Any, ...]:
    """Return the outputs of AdaLayerNormZero and its kind: the norm, gates, scales and shifts."""
    norm, readers = getattr(block, name), _readers(block, name, x)
    parts = {AdaLayerNormZero: 6, AdaLayerNormZeroSingle: 3}.get(type(norm))
    if not readers or parts is None or is_watched(norm) or getattr(norm, "emb", None) is not None:
        found: tuple[Any, ...] = norm(x, emb=emb)
        return found
    numbers = norm.linear(norm.silu(emb))
    if readers[0].takes_parts and len(numbers) > 1:
        # One copy for all: an operation reads whole rows.
        shift, scale, *others = numbers.unflatten(1, (parts, -1)).transpose(0, 1).contiguous()
    else:
        shift, scale, *others = numbers.chunk(parts, dim=1)
    _, y = layer_normed(norm.norm, readers, x, modulation=Modulation(scale, shift))
    return y, *others


def _feed_forward(
    block: Any, suffix: str, parts: tuple[Tensor, Branch | None], mlp: list[Tensor]
) -> Tensor:
    """Return tokens after attention's branch, and the network's shift, scale and gate."""
    shift, scale, gate = mlp
    name, network = f"norm2{suffix}", getattr(block, f"ff{suffix}")
    readers = _readers(block, name, parts[0])
    x, y = layer_normed(getattr(block, name), readers, *parts, Modulation(scale, shift))
    with ResidualSum(_end(block, f"ff{suffix}"), x, gate) as end:
        y = network(y)
    return end.total(y)


def _side_by_side(block: Any, heads: Tensor, x: Any) -> Any:
    """Return the input of a single-stream block's last projection: heads and hidden tokens."""
    layer, activation, up = block.proj_out, block.act_mlp, block.proj_mlp
    if not block.training and has_fused_product(up, activation, layer, x, heads):
        return projected(up, activation, layer, x, heads)
    hidden = up(x)
    if not block.training and has_fused_op(activation, layer, hidden, heads):
        return activated(activation, layer, hidden, heads)
    parts = (heads, activation(hidden))
    if not (is_plain(layer) and layer.takes_parts) or compiler_quantizes(heads):
        return torch.cat(parts, dim=2)
    return layer.codes_of_parts(parts)


def _clipped(x: Tensor) -> Tensor:
    # As diffusers' blocks do: float16 ends there.
    return x.clip(-65504, 65504) if x.dtype is torch.float16 else x
