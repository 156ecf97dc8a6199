"""The contents of a single file that was given as MODEL without a config: a sentence on each kind.

A denoiser in a layout of ``derived_config`` needs none.

Only the header is read, and no torch is imported.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, NoReturn

from quantkit.errors import ModelError
from quantkit.interchange.gguf_header import MAX_HEADER_BYTES, walk_header
from quantkit.interchange.layout_names import layout_of_names
from quantkit.interchange.original_layouts import Layout
from quantkit.interchange.pickled import refuse_pickle
from quantkit.storage.inputfile import open_file
from quantkit.storage.tensorfile import read_header


class Kind(NamedTuple):
    """A kind of file that is no denoiser."""

    #: in words
    what: str
    #: names of tensors that such a file has
    names: re.Pattern[str]
    #: what to do with it
    cure: str


#: The first that fits counts.
KINDS = (
    Kind(
        "a LoRA",
        re.compile(
            r"(.*[._])?(lora[._](up|down|A|B|mid|unet|te\d?)|lokr_w\d|hada_w\d|oft_\w+|dora_scale)\b.*"
        ),
        "pack the model that it is for, and give it to pipe.load_lora_weights of the packed one",
    ),
    Kind(
        "a ControlNet",
        re.compile(r"control_model\..*|controlnet_.*|(.*\.)?input_hint_block\..*"),
        "only denoisers are packed; diffusers loads it together with a packed one",
    ),
    Kind(
        "a language model",
        re.compile(r"((language_)?model\.)+layers\.\d+\.self_attn\..*|blk\.\d+\.attn_(q|qkv)\..*"),
        "quantkit packs denoisers, and text encoders in a pipeline's folder",
    ),
    Kind(
        "a text encoder",
        re.compile(
            r"(text_model\.)?encoder\.(layers|block)\.\d+\..*|enc\.blk\.\d+\..*"
            r"|(transformer|model)\.resblocks\.\d+\..*|shared\.weight"
        ),
        "give the pipeline's folder and set text_encoders: int8 in the recipe",
    ),
    Kind(
        "a VAE",
        re.compile(r"((first_stage_model|vae)\.)?decoder\.(conv_in|conv1|mid|middle)\b.*"),
        "give the file of the denoiser, or the pipeline's folder with vae: int8 in the recipe",
    ),
    Kind(
        "an embedding",
        re.compile(r"(emb_params|string_to_param|clip_[lg])\b.*"),
        "give the file of the denoiser, and load the embedding with load_textual_inversion",
    ),
)
#: A pipeline of each layout that is published, for the example of a command.
_PUBLISHED = {
    ("sd1", "UNet2DConditionModel"): "stable-diffusion-v1-5/stable-diffusion-v1-5",
    ("sdxl", "UNet2DConditionModel"): "stabilityai/stable-diffusion-xl-base-1.0",
    ("sd3", "SD3Transformer2DModel"): "stabilityai/stable-diffusion-3.5-large",
    ("flux", "FluxTransformer2DModel"): "black-forest-labs/FLUX.1-dev",
    ("flux", "Flux2Transformer2DModel"): "black-forest-labs/FLUX.2-dev",
    ("flux", "ChromaTransformer2DModel"): "lodestones/Chroma1-HD",
    ("qwen_image", "QwenImageTransformer2DModel"): "Qwen/Qwen-Image",
    ("lumina2", "ZImageTransformer2DModel"): "Tongyi-MAI/Z-Image-Turbo",
    ("ltxv", "LTXVideoTransformer3DModel"): "Lightricks/LTX-Video",
    ("pixart", "PixArtTransformer2DModel"): "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
}
#: What a download that went wrong begins with.
_NO_MODELS = {
    b"version https://git-lfs": "a pointer of Git LFS, and no model; run 'git lfs pull' there",
    b"<": "a web page, and no model; download it again, with a token where it is gated",
}


def refuse_bare_file(path: Path) -> None:
    """Refuse a single file without a config whose denoiser does not say it; say what the file is.

    Args:
        path: of the file.

    Raises:
        ModelError: no denoiser, or one in names of diffusers.
    """
    with open_file(path) as file:
        begin = file.read(32)
    if not begin:
        raise ModelError(f"{path}: empty, 0 bytes; download it again")
    refuse_pickle(path)
    for magic, what in _NO_MODELS.items():
        if begin.lstrip().startswith(magic):
            raise ModelError(f"{path}: {what}")
    names = _names_of(path, is_gguf=begin.startswith(b"GGUF"))
    if layout_of_names(names) is not None:
        return
    kind = None if _has_denoiser(names) else kind_of(names)
    if kind is not None:
        raise ModelError(f"{path}: {kind.what}, which is no MODEL; {kind.cure}")
    refuse_underived(path, names)


def refuse_underived(path: Path, names: Collection[str]) -> NoReturn:
    """Refuse a denoiser whose tensors do not say its config.

    Raises:
        ModelError: always.
    """
    found = layout_of_names(names)
    raise ModelError(
        f"{path}: a single file has no config; give the directory or the hub id of the pipeline "
        f"that it belongs to as config, too{_told(found and found[0])}",
        fields=("config",),
    )


def _names_of(path: Path, *, is_gguf: bool) -> Collection[str]:
    """Return the names of the tensors."""
    if not is_gguf:
        return read_header(path).tensors
    with open_file(path) as file:
        data = file.read(MAX_HEADER_BYTES)
    try:
        return [tensor.name for tensor in walk_header(data).tensors]
    except ValueError as error:
        raise ModelError(f"{path}: truncated or damaged GGUF file; download it again") from error


def _has_denoiser(names: Collection[str]) -> bool:
    return any(name.startswith("model.diffusion_model.") for name in names)


def kind_of(names: Collection[str]) -> Kind | None:
    """Return what a file is by the names of its tensors; None: no kind that is known."""
    return next((kind for kind in KINDS if any(map(kind.names.fullmatch, names))), None)


def _told(layout: Layout | None) -> str:
    """Return what a denoiser is, with a published pipeline of its layout."""
    if layout is None:
        return ""
    published = _PUBLISHED.get((layout.architecture, layout.class_name))
    example = f"; one is {published}" if published else ""
    return f" (it holds {layout.class_name}, layout {layout.architecture}{example})"
