"""The networks behind LPIPS and CLIP score, each with the name that stands beside its numbers.

Numbers of two backbones cannot be compared, so nothing here returns a number without a name.
"""

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar
from urllib.error import URLError

import torch
from quantkit.eval.measuring.judges import LoadedJudge
from quantkit.eval.measuring.pictures import Pixels
from safetensors import SafetensorError
from torch import Tensor

from quantkit.errors import ModelError, ShapeError
from quantkit.pipelines.running import quiet_libraries
from quantkit.storage.inputfile import open_file, refuse_odd_files
from quantkit.storage.jsonfile import DAMAGE, short

CLIP_DEFAULT = "openai/clip-vit-base-patch32"
IMAGENET_NAME = "ImageNet AlexNet"
#: AlexNet's 11x11 stride-4 stem and two 3x3 stride-2 poolings leave nothing of less.
LPIPS_MIN_SIDE = 32
Network = TypeVar("Network")


@dataclass(frozen=True)
class LpipsBackbone:
    """A perceptual distance between pictures."""

    name: str
    #: two (1, 3, H, W) float32 in [-1, 1] to a scalar
    measure: Callable[[Tensor, Tensor], Tensor]
    device: torch.device

    def distance(self, first: Pixels, second: Pixels) -> float:
        """Return the distance; 0 for identical pictures.

        Raises:
            ShapeError: a side is too small for the network.
        """
        if min(first.shape[:2]) < LPIPS_MIN_SIDE:
            raise ShapeError(
                f"lpips: {first.shape[1]}x{first.shape[0]} pixels; expected at least "
                f"{LPIPS_MIN_SIDE}x{LPIPS_MIN_SIDE} for {self.name}"
            )
        with torch.inference_mode():
            return float(self.measure(_signed(first, self.device), _signed(second, self.device)))


@dataclass(frozen=True)
class ClipBackbone:
    """A model that embeds pictures and texts in one space."""

    name: str
    model: Any
    processor: Any
    device: torch.device

    def score(self, picture: Pixels, prompt: str) -> float:
        """Return 100 times the cosine."""
        image, text = self.embed(picture, prompt)
        return float(100.0 * torch.nn.functional.cosine_similarity(image, text, dim=0))

    def embed(self, picture: Pixels, prompt: str) -> tuple[Tensor, Tensor]:
        """Return what picture and prompt are embedded as; texts beyond the length are cut.

        Returns:
            two float32 vectors of the model's projection size.
        """
        inputs = self.processor(
            text=[prompt], images=[picture], return_tensors="pt", padding=True, truncation=True
        ).to(self.device)
        with torch.inference_mode():
            output = self.model(**inputs)
        return output.image_embeds[0].float(), output.text_embeds[0].float()


@dataclass(frozen=True)
class Backbones:
    """The networks that are loaded; None leaves its metric out."""

    lpips: LpipsBackbone | None = None
    clip: ClipBackbone | None = None
    #: asked for besides
    judges: tuple[LoadedJudge, ...] = ()

    def has(self, backbone: str | None) -> bool:
        """Return True when a metric that wants ``backbone`` can be measured."""
        return backbone is None or getattr(self, backbone) is not None

    def name_of(self, backbone: str | None) -> str:
        """Return the name to print beside the metric; empty when it needs no network."""
        return "" if backbone is None else str(getattr(self, backbone).name)


def load_backbones(
    lpips_weights: Path | None,
    clip: str | None,
    without: Collection[str] = (),
    *,
    device: torch.device,
) -> Backbones:
    """Return the backbones of all metrics except those that are left out by name.

    Raises:
        ModelError: weights that cannot be found, downloaded or read; of all networks at once.
    """
    missing = list[ModelError]()
    lpips = clip_score = None
    if "lpips" not in without:
        lpips = _attempt(partial(load_lpips, lpips_weights, device=device), missing)
    if "clip" not in without:
        clip_score = _attempt(partial(load_clip, clip or CLIP_DEFAULT, device=device), missing)
    if missing:
        raise _named_together(missing)
    return Backbones(lpips, clip_score)


def _attempt(load: Callable[[], Network], missing: list[ModelError]) -> Network | None:
    try:
        return load()
    except ModelError as error:
        missing.append(error)
        return None


def _named_together(missing: Sequence[ModelError]) -> ModelError:
    told = "; ".join(map(str, missing))
    fields = dict.fromkeys(field for error in missing for field in error.fields)
    cure = "; 'quantkit eval fetch' downloads both where there is a network" if fields else ""
    return ModelError(f"{told}{cure}", fields=tuple(fields))


def load_lpips(weights: Path | None, *, device: torch.device) -> LpipsBackbone:
    """Return the LPIPS backbone.

    Args:
        weights: None takes torchvision's ImageNet AlexNet from its cache, or downloads it; a file
            is the same state dict on disk; a directory holds a feature network like the demo's.
        device: where it runs.

    Raises:
        ModelError: the weights are missing, cannot be downloaded, or are of another network.
    """
    if weights is not None and os.path.isdir(weights):  # noqa: PTH112  Path's raises
        return _load_own(weights, device)
    model = _fetch_imagenet() if weights is None else _read_imagenet(weights)
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    return LpipsBackbone(IMAGENET_NAME, lambda a, b: model(a, b).squeeze(), device)


@quiet_libraries()
def load_clip(text: str, *, device: torch.device) -> ClipBackbone:
    """Return the CLIP model of a hub id or a directory.

    Raises:
        ModelError: it cannot be found, downloaded or read.
    """
    from transformers import CLIPModel, CLIPProcessor

    if os.path.isdir(text):  # noqa: PTH112
        refuse_odd_files(Path(text))
    try:
        model = CLIPModel.from_pretrained(text, dtype=torch.float32)
        processor = CLIPProcessor.from_pretrained(text)
    except (*DAMAGE, OSError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"{text:.200}: no CLIP model could be loaded ({short(error)}); "
            "give a directory of one, or none to leave CLIP out",
            fields=("clip",),
        ) from error
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    return ClipBackbone(_clip_name(text), model, processor, device)


def _load_own(folder: Path, device: torch.device) -> LpipsBackbone:
    from quantkit.eval.world.alexnet import load_feature_network, perceptual_distance

    network = load_feature_network(folder).to(device)
    return LpipsBackbone(
        _own_name(folder, "AlexNet"), lambda a, b: perceptual_distance(network, a, b), device
    )


def _fetch_imagenet() -> Any:
    try:
        return _build(pretrained=True)
    except (URLError, OSError, RuntimeError) as error:
        raise ModelError(
            f"LPIPS: torchvision's ImageNet AlexNet is not in the cache and cannot be downloaded "
            f"({short(error)}); give its file, or none to leave LPIPS out",
            fields=("lpips_weights",),
        ) from error


def _read_imagenet(path: Path) -> Any:
    try:
        with open_file(path) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except (*DAMAGE, OSError, EOFError, RuntimeError, UnpicklingError) as error:
        raise ModelError(
            f"{path}: not a torch state dict ({short(error)}); expected AlexNet of torchvision"
        ) from error
    model = _build(pretrained=False)
    _copy_features(state, model.net, path)
    return model


def _build(*, pretrained: bool) -> Any:
    import lpips

    # torchvision warns about lpips' old spelling of "pretrained", and prints while it downloads.
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        return lpips.LPIPS(net="alex", pnet_rand=not pretrained, verbose=False)


def _copy_features(state: object, network: torch.nn.Module, path: Path) -> None:
    """Copy torchvision's ``features.3.weight`` to the ``slice2.3.weight`` of lpips."""
    expected = {name.split(".", 1)[1]: tensor for name, tensor in network.state_dict().items()}
    for name, tensor in expected.items():
        found = state.get(f"features.{name}") if isinstance(state, Mapping) else None
        if not isinstance(found, Tensor) or found.shape != tensor.shape:
            have = tuple(found.shape) if isinstance(found, Tensor) else "nothing"
            raise ModelError(
                f"{path}: features.{name}: found {have}, expected {tuple(tensor.shape)}; "
                "pass torchvision's AlexNet weights"
            )
        tensor.copy_(found)


def _own_name(folder: Path, kind: str) -> str:
    """Name a backbone of the demo as such, any other by its folder."""
    from quantkit.resources import demo_assets

    if folder.resolve().parent == demo_assets().resolve():
        return f"quantkit demo {kind}"
    return f"{folder.name} ({kind})"


def _clip_name(text: str) -> str:
    path = Path(text)
    if not path.is_dir():
        return text
    return _own_name(path, "CLIP")


def _signed(pixels: Pixels, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].to(device, torch.float32)
    return tensor / 127.5 - 1.0
