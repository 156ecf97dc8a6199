"""Pictures as arrays: checked, read from folders, matched, saved, subtracted. No metrics here."""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps

from quantkit.errors import InputError, NonFiniteError, ShapeError
from quantkit.storage.inputfile import open_file
from quantkit.storage.jsonfile import DAMAGE, short

#: (height, width, 3), RGB, 8 bit: what is saved is what is measured.
Pixels = NDArray[np.uint8]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")

#: How much a difference is amplified to be seen: FP8 moves a pixel by 1 to 5 of 255.
GAIN = 8


@dataclass(frozen=True)
class Pairs:
    """Pictures of two pipelines, matched one to one."""

    names: tuple[str, ...]
    original: tuple[Pixels, ...]
    packed: tuple[Pixels, ...]
    #: one per pair, or None when nobody knows what the pictures should show
    prompts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.original) == len(self.packed)
        assert self.prompts is None or len(self.prompts) == len(self.names)
        for name, first, second in zip(self.names, self.original, self.packed, strict=True):
            check_same_size(name, first, second)


def check_same_size(name: str, first: Pixels, second: Pixels) -> None:
    """Refuse pictures that cannot be compared pixel by pixel.

    Raises:
        ShapeError: the sizes differ.
    """
    if first.shape != second.shape:
        raise ShapeError(
            f"{name}: {_size(first)} against {_size(second)} pixels; "
            "metrics want equal sizes, generate both at one size"
        )


def to_pixels(values: NDArray[np.floating], *, name: str) -> Pixels:
    """Return the 8-bit picture of float values.

    Args:
        values: (height, width, 3), in [0, 1]; values outside saturate.
        name: where the picture comes from, for the error.

    Raises:
        NonFiniteError: a value is NaN or Inf.
    """
    bad = values.size - int(np.isfinite(values).sum())
    if bad:
        raise NonFiniteError(
            f"{name}: {bad} of {values.size} values are NaN or Inf, so something overflowed; "
            "compute in float32, or keep more layers in 16 bit"
        )
    rounded: Pixels = np.round(np.clip(values, 0.0, 1.0) * 255.0).astype(np.uint8)
    return rounded


def read_image(path: Path) -> Pixels:
    """Return the pixels of an 8-bit picture file as viewers show it; grey becomes RGB.

    EXIF's orientation turns it.

    Raises:
        InputError: not a picture, not one picture, more than 8 bits a channel, colours that are
            not those of sRGB, or transparent pixels.
    """
    try:
        with open_file(path, error=InputError) as file, Image.open(file) as opened:
            _refuse_kind(path, opened)
            image = ImageOps.exif_transpose(opened)
    except (*DAMAGE, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"{path}: not a picture that Pillow can read ({short(error)}); save it as PNG"
        ) from error
    rgba = np.asarray(image.convert("RGBA"))
    if (rgba[..., 3] != 255).any():
        raise InputError(
            f"{path}: has transparent pixels, which cannot be compared; flatten it first"
        )
    return np.ascontiguousarray(rgba[..., :3])


def _refuse_kind(path: Path, image: Image.Image) -> None:
    """Refuse what is more than one opaque 8-bit picture in sRGB: it would be measured as another.

    Raises:
        InputError: one of those.
    """
    bits = 16 if _is_deep(image) else 8
    if bits > 8 or image.mode not in ("RGB", "RGBA", "L", "LA", "P", "1"):
        raise InputError(
            f"{path}: mode {image.mode} of {bits} bits a channel, expected an 8-bit RGB or grey "
            "picture; convert it first"
        )
    frames = getattr(image, "n_frames", 1)
    # Cameras put a preview behind a JPEG, which no viewer shows.
    if frames > 1 and image.format != "MPO":
        raise InputError(f"{path}: {frames} pictures, expected one; save each as its own file")
    profile = _profile_name(image)
    if profile is not None and "srgb" not in profile.lower():
        raise InputError(
            f"{path}: colours of the profile {profile!r:.80}, expected sRGB; convert it to sRGB "
            "first"
        )


def _is_deep(image: Image.Image) -> bool:
    """Return whether a file has 16 bits a channel: Pillow makes 8 of those of PNG's colours."""
    raw = [str(tile.args) for tile in getattr(image, "tile", ())]
    return any(";16B" in args for args in raw)


def _profile_name(image: Image.Image) -> str | None:
    """Return what the ICC profile calls itself; None: there is none, which means sRGB."""
    data = image.info.get("icc_profile")
    if not data:
        return None
    try:
        return ImageCms.getProfileDescription(ImageCms.getOpenProfile(BytesIO(data))).strip()
    except ImageCms.PyCMSError:
        return "that cannot be read"


def match_folders(first: Path, second: Path, prompts: tuple[str, ...] | None = None) -> Pairs:
    """Return the pictures of two folders, matched by file name without suffix, sorted.

    Args:
        first: pictures of the original.
        second: pictures to judge.
        prompts: one per picture in the order of the names.

    Raises:
        InputError: an empty folder, a picture without a partner, or another number of prompts.
        ShapeError: a pair of different sizes.
    """
    left, right = _list(first), _list(second)
    for here, there, have, other in ((first, second, left, right), (second, first, right, left)):
        alone = sorted(set(have) - set(other))
        if alone:
            raise InputError(
                f"{there}: {len(alone)} of {len(have)} pictures of {here} have no file of the "
                f"same name here, as {have[alone[0]].name}; give both folders the same file names"
            )
    names = tuple(sorted(left))
    if prompts is not None and len(prompts) != len(names):
        raise InputError(
            f"{len(prompts)} prompts for {len(names)} pictures of {first}; "
            "expected one line per picture, in the order of the file names"
        )
    return Pairs(
        names,
        tuple(read_image(left[name]) for name in names),
        tuple(read_image(right[name]) for name in names),
        prompts,
    )


def amplified_difference(first: Pixels, second: Pixels, *, gain: int = GAIN) -> Pixels:
    """Return ``gain`` times the absolute difference, saturating at white."""
    difference = np.abs(first.astype(np.int32) - second.astype(np.int32)) * gain
    saturated: Pixels = np.minimum(difference, 255).astype(np.uint8)
    return saturated


def save_png(pixels: Pixels, path: Path) -> None:
    """Write the picture losslessly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels, "RGB").save(path, format="PNG", optimize=False)


def _list(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise InputError(f"{folder}: not a folder; expected one with {', '.join(SUFFIXES)} files")
    files = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES]
    if not files:
        raise InputError(f"{folder}: no pictures; expected {', '.join(SUFFIXES)} files")
    found: dict[str, Path] = {}
    for path in files:
        if path.stem in found:
            raise InputError(
                f"{folder}: {found[path.stem].name} and {path.name} have the same name; keep one"
            )
        found[path.stem] = path
    return found


def _size(pixels: Pixels) -> str:
    return f"{pixels.shape[1]}x{pixels.shape[0]}"
