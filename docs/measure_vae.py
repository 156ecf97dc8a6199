"""The VAE in INT8: its bytes, and how far its pictures and latents are from the 16-bit one's.

``python docs/measure_vae.py`` packs the VAE of the bundled pipeline, and random ones of the shapes
of SD 1.5, SDXL, SD 3 and FLUX.1, whose last convolution is scaled so that pictures have the
contrast of photographs. Both decode the same latents, and encode the same pictures. Random ones are
small: convolutions do not ask how large a picture is.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from skimage.metrics import structural_similarity

import quantkit
from quantkit.recipe.component_formats import COMPONENT_FORMATS

BUNDLED = Path(__file__).parents[1] / "eval" / "assets" / "pipeline"
#: Latent pixels along a side.
LATENT = 12
_WIDE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
}  # fmt: skip
_LATENTS_16 = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
#: What the configs of published VAEs set.
SHAPES: dict[str, dict[str, Any]] = {
    "SD 1.5, SDXL": {**_WIDE, "latent_channels": 4},
    "SD 3, FLUX.1": {**_WIDE, **_LATENTS_16},
}


_INT8: dict[str, Any] = COMPONENT_FORMATS["vae"]["int8"]
#: Sections that the bundled VAE is packed by.
SECTIONS: dict[str, Any] = {
    "int8": "int8",
    "int8, last up block in 16 bit": {**_INT8, "keep": ["decoder.up_blocks.2.*"]},
    "int8 weights, inputs in 16 bit": {**_INT8, "activation": {"mode": "none"}},
}


def bundled(folder: Path) -> tuple[Path, torch.Tensor]:
    """Return the bundled VAE and latents of pictures that its pipeline draws."""
    from diffusers import DiffusionPipeline

    del folder
    pipe = DiffusionPipeline.from_pretrained(BUNDLED)
    pipe.set_progress_bar_config(disable=True)
    pipe.to(torch.float32)
    prompts = ["a red square on blue", "a green circle", "three stripes", "a yellow star"]
    generator = torch.Generator().manual_seed(0)
    latents = pipe(prompts, num_inference_steps=12, output_type="latent", generator=generator)
    return BUNDLED / "vae", latents.images / pipe.vae.config.scaling_factor


def random_one(config: dict[str, Any]) -> Callable[[Path], tuple[Path, torch.Tensor]]:
    """Return what makes a random VAE of a config, and random latents."""

    def make(folder: Path) -> tuple[Path, torch.Tensor]:
        from diffusers import AutoencoderKL

        torch.manual_seed(0)
        vae = AutoencoderKL(**config).eval()
        latents = torch.randn(1, config["latent_channels"], LATENT, LATENT)
        with torch.no_grad():
            found = vae.decode(latents).sample
            vae.decoder.conv_out.weight *= 0.5 / found.std()
            vae.decoder.conv_out.bias *= 0
        vae.to(torch.bfloat16).save_pretrained(folder / "vae")
        return folder / "vae", latents

    return make


def measure(
    make: Callable[[Path], tuple[Path, torch.Tensor]], section: Any = "int8"
) -> dict[str, float]:
    """Return bytes and errors of one VAE, and those of layers that give bfloat16."""
    from diffusers import AutoencoderKL

    with tempfile.TemporaryDirectory() as name:
        source, latents = make(Path(name))
        recipe = quantkit.load_recipe("int8", {"vae": section})
        summary = quantkit.pack(source, output=Path(name) / "packed", recipe=recipe)
        (part,) = summary.components
        dense = AutoencoderKL.from_pretrained(source, torch_dtype=torch.float32)
        packed = AutoencoderKL.from_pretrained(Path(name) / "packed", torch_dtype=torch.float32)
        with torch.no_grad():
            pictures = [vae.decode(latents).sample.clamp(-1, 1) for vae in (dense, packed)]
            found = [vae.encode(pictures[0]).latent_dist.mean for vae in (dense, packed)]
            for module in dense.modules():
                if not list(module.children()):
                    module.register_forward_hook(_to_bfloat16)
            short = dense.decode(latents).sample
    exact, ours, rounded = map(as_pixels, (*pictures, short.clamp(-1, 1)))
    return {
        "bytes": part.bytes_after / part.bytes_before,
        "ssim": similarity(exact, ours),
        "psnr": psnr(exact, ours),
        "ssim_of_bfloat16": similarity(exact, rounded),
        "psnr_of_bfloat16": psnr(exact, rounded),
        "ssim_of_bytes": similarity(*map(as_bytes, (exact, ours))),
        "ssim_of_bytes_of_bfloat16": similarity(*map(as_bytes, (exact, rounded))),
        "latents": float((found[0] - found[1]).norm() / found[0].norm()),
    }


def _to_bfloat16(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    del module, inputs
    return output.bfloat16().float()


def as_pixels(pictures: torch.Tensor) -> Any:
    """Return pictures (B, H, W, 3) from 0 to 1."""
    return (pictures / 2 + 0.5).permute(0, 2, 3, 1).numpy()


def as_bytes(pictures: Any) -> Any:
    """Return pictures as a file has them."""
    return np.round(pictures * 255) / 255


def similarity(first: Any, second: Any) -> float:
    """Return the mean SSIM of pictures."""
    each = [
        structural_similarity(a, b, channel_axis=-1, data_range=1.0)
        for a, b in zip(first, second, strict=True)
    ]
    return float(np.mean(each))


def psnr(first: Any, second: Any) -> float:
    """Return the PSNR in dB of the mean squared error over all pictures."""
    return float(-10 * np.log10(np.mean((first - second) ** 2)))


def main() -> None:
    """Print a line of JSON for each VAE."""
    for name, section in SECTIONS.items():
        click.echo(f"bundled, {name} {json.dumps(measure(bundled, section))}")
    for name, config in SHAPES.items():
        click.echo(f"{name} {json.dumps(measure(random_one(config)))}")


if __name__ == "__main__":
    main()
