"""Paths of the data that ships with quantkit: kernel sources, recipes, the demo pipeline."""

from importlib.resources import files
from pathlib import Path


def kernel_sources() -> Path:
    """Return the folder of the HIP sources."""
    return _folder("quantkit.kernels")


def recipes() -> Path:
    """Return the folder of the bundled recipes."""
    return _folder("quantkit.recipes")


def demo_assets() -> Path:
    """Return the folder of the demo pipeline, its CLIP model and its feature network."""
    return _folder("quantkit.eval") / "assets"


def _folder(package: str) -> Path:
    # quantkit is installed unzipped (compilers read these files), so this is a real path.
    return Path(str(files(package)))
