"""Tiny pipelines that a prompt alone does not run, or that also take a picture, in fp16 on disk."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from .pipelines import (
    flux_transformer,
    narrow_unet,
    picture_pipeline,
    small_pictures,
    t5_encoder,
    t5_tokenizer,
    text_encoder,
    tokenizer,
    vae,
)


def refiner() -> Any:
    """Return SDXL's refiner: no first text encoder, a score of beauty among the conditions."""
    import diffusers

    return diffusers.StableDiffusionXLImg2ImgPipeline(
        vae=vae(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=text_encoder(projection=32),
        tokenizer_2=tokenizer(),
        unet=narrow_unet(
            "sdxl",
            down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
            up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"],
            transformer_layers_per_block=1,
            attention_head_dim=2,
            cross_attention_dim=32,
            addition_time_embed_dim=32,
            # Two sizes and the score embedded, and the pooled text.
            projection_class_embeddings_input_dim=5 * 32 + 32,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(),
        requires_aesthetics_score=True,
        add_watermarker=False,
    )


def controlnet() -> Any:
    """Return SD 1.5 with a ControlNet."""
    return _controlled(1)


def two_controlnets() -> Any:
    """Return SD 1.5 with two ControlNets, which a list of two pictures would suit by chance."""
    return _controlled(2)


def _controlled(count: int) -> Any:
    import diffusers

    plain = picture_pipeline("StableDiffusionPipeline")
    nets = [
        diffusers.ControlNetModel.from_unet(plain.unet, conditioning_embedding_out_channels=(8, 8))
        for _ in range(count)
    ]
    # As many halvings as the tiny VAE has.
    return diffusers.StableDiffusionControlNetPipeline(
        **plain.components, controlnet=nets if count > 1 else nets[0]
    )


def upscaler() -> Any:
    """Return SD's x4 upscaler, whose picture is as large as its latents."""
    import diffusers

    plain = picture_pipeline("StableDiffusionPipeline", in_channels=7, num_class_embeds=1000)
    parts = {name: plain.components[name] for name in ("vae", "text_encoder", "tokenizer", "unet")}
    return diffusers.StableDiffusionUpscalePipeline(
        **parts,
        scheduler=diffusers.DDIMScheduler(),
        low_res_scheduler=diffusers.DDPMScheduler(),
    )


def depth() -> Any:
    """Return SD's depth2img, whose UNet reads a depth that a DPT estimates."""
    import diffusers
    import transformers

    plain = picture_pipeline("StableDiffusionPipeline", in_channels=5)
    parts = {name: plain.components[name] for name in ("vae", "text_encoder", "tokenizer", "unet")}
    estimator = transformers.DPTForDepthEstimation(
        transformers.DPTConfig(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
            image_size=32, patch_size=16, backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, is_hybrid=False,
        )
    )  # fmt: skip
    return diffusers.StableDiffusionDepth2ImgPipeline(
        **parts,
        scheduler=diffusers.DDIMScheduler(),
        depth_estimator=estimator,
        feature_extractor=transformers.DPTImageProcessor(size={"height": 32, "width": 32}),
    )


def gligen() -> Any:
    """Return GLIGEN: phrases and boxes, which its fusers read."""
    return picture_pipeline("StableDiffusionGLIGENPipeline", attention_type="gated")


def fill() -> Any:
    """Return FLUX Fill: the packed latents of noise and masked picture, and the packed mask."""
    return _flux("FluxFillPipeline", in_channels=3 * 16, out_channels=16)


def kontext() -> Any:
    """Return FLUX Kontext: a picture's tokens after those of the noise."""
    return _flux("FluxKontextPipeline")


def _flux(cls: str, **changed: int) -> Any:
    import diffusers

    return getattr(diffusers, cls)(
        transformer=flux_transformer(**changed),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae(shift_factor=0.0),
        text_encoder=text_encoder(),
        tokenizer=tokenizer(),
        text_encoder_2=t5_encoder(),
        tokenizer_2=t5_tokenizer(),
    )


#: All of them, by name.
PICTURE_PIPELINES: dict[str, Callable[[], Any]] = {
    make.__name__: make for make in (refiner, controlnet, upscaler, depth, gligen, fill, kontext)
}


@contextmanager
def small_flux_pictures() -> Iterator[None]:
    """Let FLUX' pipelines draw 32 pixels: theirs are 1024, whatever the model."""
    from diffusers.pipelines.flux import pipeline_flux_kontext as kontext_module

    call: Any = inspect.unwrap(kontext_module.FluxKontextPipeline.__call__)
    area = 1024**2
    with (
        small_pictures("FluxFillPipeline", "FluxKontextPipeline"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(kontext_module, "PREFERRED_KONTEXT_RESOLUTIONS", [(32, 32)])
        defaults = tuple(32 * 32 if value == area else value for value in call.__defaults__)
        patch.setattr(call, "__defaults__", defaults)
        yield


def save(name: str, path: Path) -> Path:
    """Write a pipeline of the table in fp16 to ``path`` and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = PICTURE_PIPELINES[name]()
    pipe.to(torch.float16).save_pretrained(path)
    return path
