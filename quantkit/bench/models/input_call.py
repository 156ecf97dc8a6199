"""One call of a denoiser whose inputs are made: its config, and how large they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quantkit.errors import ModelError

#: Frames of a video's latents: 17 frames of pictures, at four a frame.
_FRAMES = 5

#: Keys of the width of text embeddings, before those of what a model makes of them: the first that
#: a config has counts.
_TEXT_WIDTHS = (
    "joint_attention_dim",
    "text_embed_dim",
    "text_dim",
    "in_text_dim",
    "text_in_dim",
    "cap_feat_dim",
    "caption_channels",
    "context_in_dim",
    "cross_attention_input_dim",
    "encoder_hid_dim",
    "encoder_hidden_size",
    "cross_attention_dim",
    "embedding_dim",
    "condition_dim",
    "hidden_size",
)
#: Numbers of tokens that a config fixes.
_TEXT_LENGTHS = ("max_text_seq_length", "text_len", "num_embeddings")
#: Tokens of a prompt, as pipelines make them; SD3's are CLIP's and T5's.
_CLASS_LENGTHS = {
    "LTXVideoTransformer3DModel": 128,
    "PixArtTransformer2DModel": 300,
    "SanaTransformer2DModel": 300,
    "SD3Transformer2DModel": 256 + 77,
}
#: Others: CLIP's, which UNets read, and those of FLUX.1-dev's T5.
_CLIP_TOKENS, _T5_TOKENS = 77, 512


@dataclass(frozen=True)
class Call:
    """A call of a denoiser, for which inputs are made."""

    class_name: str
    #: of the model, with the class's defaults
    config: Any
    #: latents at once
    batch: int
    #: width and height of a picture's latents
    size: int
    #: maker of normal tensors, from a shape
    normal: Callable[..., Tensor]

    def width(self, *keys: str) -> int:
        """Return the first of these dimensions that the config has; of a list the first.

        Raises:
            ModelError: none.
        """
        for key in keys:
            found = self.config.get(key)
            found = found[0] if isinstance(found, list | tuple) and found else found
            if isinstance(found, int):
                return found
        raise ModelError(
            f"{self.class_name}: config has none of {', '.join(keys)}, which an input's width "
            "would follow from"
        )

    def text(self) -> Tensor:
        """Return embeddings of prompts, as (batch, tokens, width)."""
        return self.normal(self.batch, self.tokens, self.width(*_TEXT_WIDTHS))

    @property
    def tokens(self) -> int:
        """Tokens of a prompt."""
        fixed = next((n for key in _TEXT_LENGTHS if isinstance(n := self.config.get(key), int)), 0)
        usual = _CLIP_TOKENS if "UNet" in self.class_name else _T5_TOKENS
        return fixed or _CLASS_LENGTHS.get(self.class_name, usual)

    @property
    def frames(self) -> int:
        """Frames of a video's latents."""
        fixed = self.config.get("video_length")
        return fixed if isinstance(fixed, int) else _FRAMES

    @property
    def side(self) -> int:
        """Tokens along a picture, of 2 x 2 latents each."""
        return max(self.size // 2, 1)

    def full(self, value: float) -> Tensor:
        """Return one number per latent."""
        return torch.full_like(self.normal(self.batch), value)

    def rows(self, *values: float) -> Tensor:
        """Return the same numbers for each latent."""
        return torch.tensor(values).repeat(self.batch, 1).to(self.normal(1))

    def seen(self, *shape: int) -> Tensor:
        """Return a mask that hides nothing."""
        return torch.ones(shape or (self.batch, self.tokens), dtype=torch.bool).to(self.device)

    def numbers(self, *shape: int, below: int) -> Tensor:
        """Return integers from 0 on."""
        count = torch.Size(shape).numel()
        return (torch.arange(count) % below).reshape(shape).to(self.device)

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return self.normal(1).device


#: What makes one input; None of it: the class's default.
Maker: TypeAlias = Callable[[Call], Any]
