"""Whole checkpoints of tiny models, as other programs write them, and the pipelines they belong to.

``tests/interchange/test_checkpoints.py`` lets diffusers' converters read them, too.
"""

import json
from dataclasses import dataclass
from functools import partial

import torch

from quantkit.interchange.layout_names import original_tensors
from quantkit.interchange.part_layouts import OPEN_CLIP, VAE
from tests.support.denoisers import original_state, tiny_denoiser

INSIDE = "model.diffusion_model."
_CLIP = {
    "vocab_size": 40, "intermediate_size": 48, "num_attention_heads": 2,
    "max_position_embeddings": 16, "bos_token_id": 38, "eos_token_id": 39, "pad_token_id": 39,
}  # fmt: skip


def clip(class_name, width, layers=2):
    import transformers

    config = transformers.CLIPTextConfig(
        **_CLIP, hidden_size=width, projection_dim=width, num_hidden_layers=layers
    )
    return getattr(transformers, class_name)(config)


def t5():
    import transformers

    config = transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5EncoderModel(config)


def vae(**changed):
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=(16, 24, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=8,
        **changed,
    )


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint."""

    denoiser: str
    #: of the denoiser in the pipeline
    component: str
    vae: partial
    #: of the VAE in the file
    vae_prefix: str
    #: component -> how it is made, the file's prefix, whether in OpenCLIP's names
    encoders: dict[str, tuple[partial, str, bool]]


_PLAIN, _PROJECTED = "CLIPTextModel", "CLIPTextModelWithProjection"
_CLIP_L, _CLIP_G = "text_encoders.clip_l.transformer.", "text_encoders.clip_g.transformer."
_T5 = "text_encoders.t5xxl.transformer."

KINDS = {
    "sd15": Kind("sd15", "unet", partial(vae), "first_stage_model.", {
        "text_encoder": (partial(clip, _PLAIN, 32), "cond_stage_model.transformer.", False),
    }),
    # 23 of 24 layers, as diffusers has it, which typed the number of the last one in.
    "sd2": Kind("sd2", "unet", partial(vae), "first_stage_model.", {
        "text_encoder": (partial(clip, _PLAIN, 16, 23), "cond_stage_model.model.", True),
    }),
    "sdxl": Kind("sdxl", "unet", partial(vae), "first_stage_model.", {
        "text_encoder": (
            partial(clip, _PLAIN, 32), "conditioner.embedders.0.transformer.", False,
        ),
        "text_encoder_2": (partial(clip, _PROJECTED, 48), "conditioner.embedders.1.model.", True),
    }),
    "sd3": Kind("sd3", "transformer", partial(vae, use_quant_conv=False,
                                              use_post_quant_conv=False), "first_stage_model.", {
        "text_encoder": (partial(clip, _PROJECTED, 32), _CLIP_L, False),
        "text_encoder_2": (partial(clip, _PROJECTED, 48), _CLIP_G, False),
        "text_encoder_3": (partial(t5), _T5, False),
    }),
    "flux": Kind("flux", "transformer", partial(vae, use_quant_conv=False,
                                                use_post_quant_conv=False), "vae.", {
        "text_encoder": (partial(clip, _PLAIN, 32), _CLIP_L, False),
        "text_encoder_2": (partial(t5), _T5, False),
    }),
}  # fmt: skip


def made(build, seed):
    """A model whose tensors are all random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().eval()
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter)
    return model


def write_config(name, folder):
    """Write a pipeline's directory without weights and return it."""
    kind = KINDS[name]
    denoiser = tiny_denoiser(kind.denoiser)
    denoiser.save_config(folder / kind.component)
    kind.vae().save_config(folder / "vae")
    index = {
        "_class_name": "DiffusionPipeline",
        "vae": ["diffusers", "AutoencoderKL"],
        kind.component: ["diffusers", type(denoiser).__name__],
    }
    for component, (build, *_) in kind.encoders.items():
        encoder = build()
        encoder.config.save_pretrained(folder / component)
        index[component] = ["transformers", type(encoder).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def published(state):
    """A text encoder's tensors under the names of published files, no tensor twice."""
    bare = "embeddings.token_embedding.weight" in state
    return {
        ("text_model." * bare + key): value
        for key, value in state.items()
        if key != "encoder.embed_tokens.weight"
    }


def in_layout(layout, state):
    """Return tensors in an original layout."""
    found = {}
    for original in original_tensors(layout, state):
        value = torch.cat([state[name] for name in original.parts])
        found[original.name] = value.T.contiguous() if original.transposed else value
    return found


def vae_state(model):
    """The VAE of latent diffusion, whose attention is of 1x1 convolutions."""
    return {
        key: value[..., None, None] if ".attn_1." in key and value.ndim == 2 else value
        for key, value in in_layout(VAE, model.state_dict()).items()
    }


def encoder_state(model, prefix, *, is_open):
    """A text encoder as a checkpoint has it, perhaps in OpenCLIP's names."""
    state = published(model.state_dict())
    state = in_layout(OPEN_CLIP, state) if is_open else state
    return {prefix + key: value for key, value in state.items()}


def checkpoint(name, dtype=torch.float16):
    """Return the tensors of a whole checkpoint, and the dense components that it holds."""
    kind = KINDS[name]
    parts = {kind.component: tiny_denoiser(kind.denoiser, seed=5), "vae": made(kind.vae, 6)}
    tensors = {INSIDE + key: value for key, value in original_state(parts[kind.component]).items()}
    tensors |= {kind.vae_prefix + key: value for key, value in vae_state(parts["vae"]).items()}
    for seed, (component, (build, prefix, is_open)) in enumerate(kind.encoders.items(), 7):
        parts[component] = made(build, seed)
        tensors |= encoder_state(parts[component], prefix, is_open=is_open)
    if name == "sd2":
        last = "cond_stage_model.model.transformer.resblocks."
        tensors |= {
            key.replace(".22.", ".23."): value + 1
            for key, value in tensors.items() if key.startswith(f"{last}22.")
        } | {"cond_stage_model.model.text_projection": torch.randn(16, 16)}  # fmt: skip
    return {key: value.to(dtype).contiguous() for key, value in tensors.items()}, parts
