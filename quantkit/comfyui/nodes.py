"""The nodes, and the tables by which ComfyUI finds them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import folder_paths
from torch import Tensor

from quantkit.checkpoint.reader import find_components
from quantkit.comfyui.loading import load_encoders, load_model, load_vae
from quantkit.errors import QuantkitError

#: ComfyUI's folders whose sub-folders are pipelines, and denoisers alone.
_FOLDERS = ("diffusers", "diffusion_models")

#: An input of the loaders, as ComfyUI describes one.
_REPLAY = (
    "BOOLEAN",
    {
        "default": True,
        "tooltip": "Record a step once and launch it again: fast, and all weights stay on the "
        "card. Turn it off where they do not fit: ComfyUI then moves them (dynamic VRAM).",
    },
)


class PackedPipelineLoader:
    """A packed pipeline: denoiser, text encoders and VAE."""

    CATEGORY = "quantkit"
    DESCRIPTION = "Loads a packed pipeline from models/diffusers; layers run in quantkit's kernels."
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        """Return the packed pipelines that there are."""
        whole = [name for name, path in packed_folders() if (path / "model_index.json").is_file()]
        return {"required": {"pipeline": (whole,)}, "optional": {"replay": _REPLAY}}

    def load(self, pipeline: str, replay: bool = True) -> tuple[Any, Any, Any]:  # noqa: FBT001, FBT002  ComfyUI's way
        """Return model, text encoders and VAE."""
        path = dict(packed_folders())[pipeline]
        embeddings = folder_paths.get_folder_paths("embeddings")
        return load_model(path, replay=replay), load_encoders(path, embeddings), load_vae(path)


class PackedModelLoader:
    """A packed denoiser, of a pipeline or alone."""

    CATEGORY = "quantkit"
    DESCRIPTION = (
        "Loads a packed denoiser from models/diffusers or models/diffusion_models; take text "
        "encoders and VAE from other loaders."
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        """Return the packed folders that there are."""
        packed = [name for name, _ in packed_folders()]
        return {"required": {"model": (packed,)}, "optional": {"replay": _REPLAY}}

    def load(self, model: str, replay: bool = True) -> tuple[Any]:  # noqa: FBT001, FBT002  ComfyUI's way
        """Return the model."""
        return (load_model(dict(packed_folders())[model], replay=replay),)


class JudgePictures:
    """SSIM of a packed model's pictures against the original's."""

    CATEGORY = "quantkit"
    DESCRIPTION = (
        "Compares pictures of a packed model with the 16-bit model's of the same seed; eight or "
        "more decide."
    )
    RETURN_TYPES = ("STRING", "FLOAT")
    RETURN_NAMES = ("verdict", "ssim")
    FUNCTION = "judge"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        """Return the two batches."""
        return {"required": {"original": ("IMAGE",), "packed": ("IMAGE",)}}

    def judge(self, original: Tensor, packed: Tensor) -> dict[str, Any]:
        """Return the verdict, and show it."""
        # Here: metrics import diffusers, which takes seconds that a start of ComfyUI need not wait.
        from quantkit.comfyui.judging import judge_pictures

        found = judge_pictures(original, packed)
        return {"ui": {"text": [found.words]}, "result": (found.words, found.ssim)}


def packed_folders() -> Iterator[tuple[str, Path]]:
    """Yield the packed folders in ComfyUI's model folders: the name in its lists, and the path."""
    for kind in _FOLDERS:
        for base in map(Path, folder_paths.get_folder_paths(kind)):
            yield from ((path.name, path) for path in sorted(base.glob("*/")) if _is_packed(path))


def _is_packed(path: Path) -> bool:
    try:
        return any(True for _ in find_components(path))
    except QuantkitError:
        return False


NODE_CLASS_MAPPINGS: Mapping[str, Any] = {
    "QuantkitPipelineLoader": PackedPipelineLoader,
    "QuantkitModelLoader": PackedModelLoader,
    "QuantkitJudge": JudgePictures,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "QuantkitPipelineLoader": "Load Packed Pipeline (quantkit)",
    "QuantkitModelLoader": "Load Packed Model (quantkit)",
    "QuantkitJudge": "Judge Packed Pictures (quantkit)",
}
