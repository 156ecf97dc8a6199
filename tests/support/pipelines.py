"""Tiny pipelines with random weights, for tests: real module structure, milliseconds a step."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

#: Every character is a token, alone or at the end of a word: no merges needed.
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.-"
SPECIALS = ("<|startoftext|>", "<|endoftext|>")
#: Tokens of a prompt, start and end included.
PROMPT_TOKENS = 16
#: The noise schedule of Stable Diffusion's published schedulers.
_SD_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def tiny_pipeline(path: Path, *, seed: int = 0) -> Path:
    """Write a StableDiffusionPipeline in fp16 to ``path`` and return it.

    The UNet has 3x3 and 1x1 convolutions, self and cross attention, GEGLU, skip concatenations, a
    down- and an upsampler; channels are multiples of 32, so every packed layer can be 2:4 sparse.
    """
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = _stable_diffusion(
            tiny_unet,
            diffusers.DDIMScheduler(
                prediction_type="v_prediction",
                rescale_betas_zero_snr=True,
                timestep_spacing="trailing",
                clip_sample=False,
                steps_offset=1,
            ),
        )
    pipe.to(torch.float16).save_pretrained(path)
    return path


def tiny_gated_pipeline(path: Path) -> Path:
    """Write a StableDiffusionPipeline with GLIGEN's fusers, which only boxes call, to ``path``."""
    pipe = picture_pipeline("StableDiffusionPipeline", attention_type="gated")
    pipe.to(torch.float16).save_pretrained(path)
    return path


def picture_pipeline(cls: str, **changed: Any) -> Any:
    """Return a pipeline of SD 1.5's parts in float32, with a UNet of one block each way."""
    import diffusers

    narrow = {
        "block_out_channels": [32],
        "down_block_types": ["CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D"],
        "cross_attention_dim": 32,
        "attention_head_dim": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe: Any = getattr(diffusers, cls)(
            vae=vae(),
            text_encoder=text_encoder(),
            tokenizer=tokenizer(),
            unet=narrow_unet("sd15", **narrow | changed),
            scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_sd15_pipeline(path: Path, *, seed: int = 0) -> Path:
    """Write a StableDiffusionPipeline of SD 1.5's blocks and scheduler in fp16 to ``path``."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = _stable_diffusion(
            lambda: narrow_unet(
                "sd15",
                down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
                up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
                cross_attention_dim=32,
                attention_head_dim=2,
            ),
            diffusers.PNDMScheduler(
                **_SD_BETAS, set_alpha_to_one=False, skip_prk_steps=True, steps_offset=1
            ),
        )
    pipe.to(torch.float16).save_pretrained(path)
    return path


def _stable_diffusion(unet: Callable[[], torch.nn.Module], scheduler: object) -> Any:
    """Return a StableDiffusionPipeline; the UNet is made last, which decides its random weights."""
    import diffusers

    return diffusers.StableDiffusionPipeline(
        vae=vae(),
        text_encoder=text_encoder(),
        tokenizer=tokenizer(),
        unet=unet(),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def tiny_sdxl_pipeline(path: Path, *, seed: int = 0) -> Path:
    """Write a StableDiffusionXLPipeline of SDXL's blocks and scheduler in fp16 to ``path``."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = diffusers.StableDiffusionXLPipeline(
            vae=vae(),
            text_encoder=text_encoder(),
            tokenizer=tokenizer(),
            text_encoder_2=text_encoder(projection=32),
            tokenizer_2=tokenizer(),
            unet=narrow_unet(
                "sdxl",
                down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
                up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"],
                transformer_layers_per_block=[1, 2],
                attention_head_dim=[1, 2],
                cross_attention_dim=64,
                addition_time_embed_dim=32,
                # Six sizes embedded, and the pooled text.
                projection_class_embeddings_input_dim=6 * 32 + 32,
            ),
            scheduler=diffusers.EulerDiscreteScheduler(
                **_SD_BETAS, steps_offset=1, timestep_spacing="leading"
            ),
            add_watermarker=False,
        )
    pipe.to(torch.float16).save_pretrained(path)
    return path


def tiny_transformer_pipeline(path: Path, *, seed: int = 0) -> Path:
    """Write a StableDiffusion3Pipeline in fp16 to ``path`` and return it."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = diffusers.StableDiffusion3Pipeline(
            transformer=_sd3_transformer(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=vae(shift_factor=0.0),
            text_encoder=text_encoder(projection=32),
            tokenizer=tokenizer(),
            text_encoder_2=text_encoder(projection=32),
            tokenizer_2=tokenizer(),
            text_encoder_3=t5_encoder(),
            tokenizer_3=t5_tokenizer(),
        )
    pipe.to(torch.float16).save_pretrained(path)
    return path


def tiny_flux_pipeline(path: Path, *, seed: int = 0) -> Path:
    """Write a FluxPipeline in fp16 to ``path`` and return it."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = diffusers.FluxPipeline(
            transformer=flux_transformer(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=vae(shift_factor=0.0),
            text_encoder=text_encoder(),
            tokenizer=tokenizer(),
            text_encoder_2=t5_encoder(),
            tokenizer_2=t5_tokenizer(),
        )
    pipe.to(torch.float16).save_pretrained(path)
    return path


def tiny_wan_pipeline(path: Path, *, seed: int = 0) -> Path:
    """Write a WanPipeline of two experts, as Wan 2.2 has, in fp16 to ``path`` and return it."""
    import diffusers
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = diffusers.WanPipeline(
            tokenizer=t5_tokenizer(),
            text_encoder=transformers.UMT5EncoderModel(
                transformers.UMT5Config(
                    vocab_size=len(_t5_vocabulary()), d_model=32, d_kv=16, d_ff=32, num_layers=1,
                    num_heads=2,
                )
            ),
            vae=diffusers.AutoencoderKLWan(
                base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
            ),
            scheduler=diffusers.UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            ),
            transformer=_wan_transformer(),
            transformer_2=_wan_transformer(),
            boundary_ratio=0.875,
        )  # fmt: skip
    pipe.to(torch.float16).save_pretrained(path)
    return path


@contextmanager
def small_pictures(*class_names: str) -> Iterator[None]:
    """Let pipelines of these classes draw 32 pixels: theirs are 256, whatever the model."""
    import diffusers

    with pytest.MonkeyPatch.context() as patch:
        for name in class_names:
            cls = getattr(diffusers, name)
            patch.setattr(cls, "__init__", _with_small_default(cls.__init__))
        yield


def _with_small_default(build: Callable[..., None]) -> Callable[..., None]:
    # diffusers reads a pipeline's components from the signature.
    @functools.wraps(build)
    def small(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.default_sample_size = 16

    return small


def draw_to(pipe: Any, file: Path) -> bytes:
    """Save a picture in two steps, always of the same noise, and return the file's bytes."""
    pipe.set_progress_bar_config(disable=True)
    seed = torch.Generator().manual_seed(0)
    image = pipe("a red cube", num_inference_steps=2, generator=seed).images[0]
    file.parent.mkdir(exist_ok=True)
    image.save(file)
    return file.read_bytes()


def _wan_transformer() -> torch.nn.Module:
    import diffusers

    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=1,
        rope_max_seq_len=32,
    )


def tiny_transformer(path: Path, *, seed: int = 0) -> Path:
    """Write a PixArtTransformer2DModel alone, in fp16, to ``path`` and return it."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = diffusers.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=32,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            cross_attention_dim=64,
            caption_channels=32,
            sample_size=8,
            use_additional_conditions=False,
        )
    model.to(torch.float16).save_pretrained(path)
    return path


def tiny_unet() -> torch.nn.Module:
    """Return the UNet of ``tiny_pipeline``, random in float32."""
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=2,
    )


def narrow_unet(published: str, **narrow: Any) -> torch.nn.Module:
    """Return a UNet of a published config, 32 channels wide, with one block of each kind."""
    import diffusers

    from tests.golden.make_keys import MODELS

    return diffusers.UNet2DConditionModel(
        **{
            **MODELS[published][2],
            "sample_size": 8,
            "block_out_channels": [32, 32],
            "layers_per_block": 1,
            "norm_num_groups": 8,
            **narrow,
        }
    )


def _sd3_transformer() -> torch.nn.Module:
    import diffusers

    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
    )


def flux_transformer(**changed: int) -> torch.nn.Module:
    """Return FLUX's transformer with one block of each kind."""
    import diffusers

    return diffusers.FluxTransformer2DModel(
        **{"in_channels": 16, **changed},
        patch_size=1,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def vae(**extra: float) -> torch.nn.Module:
    """Return a VAE that halves once."""
    import diffusers

    return diffusers.AutoencoderKL(
        **extra,
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=16,
    )


def text_encoder(projection: int | None = None) -> torch.nn.Module:
    """Return a CLIP text encoder, with a projection where a size is given."""
    import transformers

    size = len(_vocabulary())
    config = transformers.CLIPTextConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=PROMPT_TOKENS,
        projection_dim=projection or 32,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
        pad_token_id=size - 1,
    )
    if projection:
        return transformers.CLIPTextModelWithProjection(config)
    return transformers.CLIPTextModel(config)


def tokenizer() -> object:
    """Return CLIP's tokenizer of single characters."""
    import transformers

    return transformers.CLIPTokenizer(
        vocab=_vocabulary(), merges=[], model_max_length=PROMPT_TOKENS
    )


def t5_encoder() -> torch.nn.Module:
    """Return a T5 encoder of one layer."""
    import transformers

    config = transformers.T5Config(
        vocab_size=len(_t5_vocabulary()),
        d_model=64,
        d_kv=32,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return transformers.T5EncoderModel(config)


def t5_tokenizer() -> object:
    """Return T5's tokenizer of single characters."""
    import transformers

    return transformers.T5Tokenizer(vocab=_t5_vocabulary(), extra_ids=0, model_max_length=64)


def _t5_vocabulary() -> list[tuple[str, float]]:
    return [(token, -2.0) for token in ("<pad>", "</s>", "<unk>", "\u2581", *CHARACTERS)]


def _vocabulary() -> dict[str, int]:
    tokens = [*CHARACTERS, *(f"{c}</w>" for c in CHARACTERS), *SPECIALS]
    return {token: index for index, token in enumerate(tokens)}
