"""The denoisers that are measured whole: configs as published, random weights, random inputs."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.bench.kernels.kernel_benchmark import one_line
from quantkit.errors import ModelError
from quantkit.interchange.derived_config import UNETS
from quantkit.models.families import is_denoiser
from quantkit.models.hub import cached
from quantkit.models.location import HUB_ID
from quantkit.pipelines.running import quiet_libraries
from quantkit.storage.jsonfile import read_json

#: Where pipelines keep their denoisers.
_FOLDERS = ("unet", "transformer", "prior", "decoder")

#: Of weights that a class does not make random itself.
_STD = 0.02


@dataclass(frozen=True)
class Denoiser:
    """A denoiser to build."""

    #: as the user named it
    name: str
    #: of diffusers
    class_name: str
    #: as far as it differs from the class's defaults
    config: Mapping[str, Any]
    #: where the config is published
    source: str


DENOISERS: dict[str, Denoiser] = {
    denoiser.name: denoiser
    for denoiser in (
        Denoiser(
            "sdxl",
            "UNet2DConditionModel",
            UNETS["sdxl", 2048],
            "stabilityai/stable-diffusion-xl-base-1.0, unet/config.json",
        ),
        Denoiser(
            "flux",
            "FluxTransformer2DModel",
            {"guidance_embeds": True},
            "black-forest-labs/FLUX.1-dev, transformer/config.json",
        ),
        Denoiser(
            "sd15",
            "UNet2DConditionModel",
            UNETS["sd1", 768],
            "stable-diffusion-v1-5/stable-diffusion-v1-5, unet/config.json",
        ),
        Denoiser(
            "sd3",
            "SD3Transformer2DModel",
            {
                "sample_size": 128,
                "num_layers": 24,
                "attention_head_dim": 64,
                "num_attention_heads": 24,
                "caption_projection_dim": 1536,
                "pos_embed_max_size": 192,
            },
            "stabilityai/stable-diffusion-3-medium-diffusers, transformer/config.json",
        ),
        Denoiser(
            "pixart",
            "PixArtTransformer2DModel",
            {
                "sample_size": 128,
                "caption_channels": 4096,
                "interpolation_scale": 2,
                "use_additional_conditions": False,
            },
            "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS, transformer/config.json",
        ),
        Denoiser(
            "sana",
            "SanaTransformer2DModel",
            {},
            "Efficient-Large-Model/Sana_1600M_1024px_diffusers, transformer/config.json",
        ),
        Denoiser(
            "flux2",
            "Flux2Transformer2DModel",
            {},
            "black-forest-labs/FLUX.2-dev, transformer/config.json",
        ),
        Denoiser(
            "chroma",
            "ChromaTransformer2DModel",
            {},
            "lodestones/Chroma1-HD, transformer/config.json",
        ),
        Denoiser(
            "qwenimage",
            "QwenImageTransformer2DModel",
            {},
            "Qwen/Qwen-Image, transformer/config.json",
        ),
        Denoiser(
            "zimage",
            "ZImageTransformer2DModel",
            {},
            "Tongyi-MAI/Z-Image-Turbo, transformer/config.json",
        ),
        Denoiser(
            "wan",
            "WanTransformer3DModel",
            {},
            "Wan-AI/Wan2.2-T2V-A14B-Diffusers, transformer/config.json",
        ),
        Denoiser(
            "ltx",
            "LTXVideoTransformer3DModel",
            {},
            "Lightricks/LTX-Video, transformer/config.json",
        ),
    )
}


def find_denoiser(text: str) -> Denoiser:
    """Return a row of DENOISERS, what a config.json describes, or a class as it is by default.

    Args:
        text: a name; a directory: a component's, or a pipeline's, of which one denoiser counts; a
            hub id whose files are in the cache; or a denoiser class of diffusers.

    Raises:
        ModelError: none of these, or no denoiser.
    """
    if text in DENOISERS:
        return DENOISERS[text]
    if os.path.isdir(text):  # noqa: PTH112  Path's raises for names that are too long
        return _described(text, Path(text))
    if (folder := cached(text) if HUB_ID.fullmatch(text) else None) is not None:
        return _described(text, folder)
    if _is_class(text):
        return Denoiser(text, text, {}, f"{text}, diffusers' defaults")
    raise ModelError(
        f"{text:.200}: unknown, expected {', '.join(DENOISERS)}, a directory, a hub id that is in "
        "the cache, or a denoiser class of diffusers"
    )


def _described(text: str, folder: Path) -> Denoiser:
    """Return what a directory's config.json describes."""
    places = (folder, *(folder / name for name in _FOLDERS))
    path = next((p / "config.json" for p in places if (p / "config.json").is_file()), None)
    if path is None:
        raise ModelError(f"{folder}: no config.json, and none in its {', '.join(_FOLDERS)}")
    config = read_json(path)
    class_name = config.get("_class_name")
    if not isinstance(class_name, str) or not _is_class(class_name):
        raise ModelError(
            f"{path}: class {class_name!s:.80}, expected a denoiser of the installed diffusers"
        )
    # What a packed or published config says beside the architecture.
    own = {k: v for k, v in config.items() if not k.startswith("_") and k != "quantization_config"}
    return Denoiser(text, class_name, own, str(path))


def _is_class(name: str) -> bool:
    """Return whether the installed diffusers has such a denoiser."""
    import diffusers

    found = getattr(diffusers, name, None) if name.isidentifier() else None
    return isinstance(found, type) and issubclass(found, diffusers.ModelMixin) and is_denoiser(name)


def build_denoiser(denoiser: Denoiser, device: torch.device) -> nn.Module:
    """Return the model in float16, made on the device with torch's own random weights.

    What its class keeps in float32 is float32, as from_pretrained has it.

    Raises:
        ModelError: the config does not describe such a model.
    """
    import diffusers

    build: Any = getattr(diffusers, denoiser.class_name).from_config
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        kept = [device] if device.type == "cuda" else []
        with quiet_libraries(), torch.random.fork_rng(kept), torch.device(device):
            torch.manual_seed(0)
            with unwritten_as_nan():
                model: nn.Module = build(dict(denoiser.config))
            _fill(model)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{denoiser.source}: {one_line(error)}") from error
    finally:
        torch.set_default_dtype(usual)
    # Some parts ask for float32 themselves; diffusers' own to() remarks on every cast.
    nn.Module.to(model, device, torch.float16)
    for name, parameter in model.named_parameters():
        if set(name.split(".")) & set(getattr(model, "_keep_in_fp32_modules", None) or ()):
            parameter.data = parameter.data.float()
    return model.eval().requires_grad_(False)


@contextmanager
def unwritten_as_nan() -> Iterator[None]:
    """Let torch.empty give NaN, which shows the weights that a class leaves to its files."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def _fill(model: nn.Module) -> None:
    """Make weights random that are not: unwritten ones, and zeros, which make outputs zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            zero = parameter.ndim > 1 and not parameter.any()
            if zero or parameter.isnan().any():
                parameter.normal_(std=_STD)
