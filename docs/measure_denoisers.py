"""Print GB of published denoisers in 16 bit and by the recommended recipes.

``python docs/measure_denoisers.py`` writes directories whose weights are holes, with the tensors
of the published models, and asks ``pack --dry-run``. Nothing is run and nothing is downloaded.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from quantkit.workflow.pack import pack

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.headers import golden_keys, write_component

#: key list -> name
DENOISERS = {
    "sd15": "Stable Diffusion 1.5",
    "sdxl": "Stable Diffusion XL",
    "sd35_medium": "Stable Diffusion 3.5 Medium",
    "sd35_large": "Stable Diffusion 3.5 Large",
    "flux1_dev": "FLUX.1-dev",
    "flux2_dev": "FLUX.2-dev",
    "chroma1_hd": "Chroma1-HD",
    "qwen_image": "Qwen-Image",
    "z_image": "Z-Image",
    "sana_1600m": "Sana 1600M",
    "pixart_sigma": "PixArt-Sigma",
    "wan22_t2v_14b": "Wan 2.2 T2V 14B, each of two",
    "ltx_video": "LTX-Video",
}
FORMATS = ("fp8", "int8", "int4")


def main() -> None:
    """Print the rows of a Markdown table."""
    for name, title in DENOISERS.items():
        keys = golden_keys(name)
        with TemporaryDirectory() as folder:
            path = write_component(Path(folder) / "model", keys["class_name"], keys["tensors"])
            found: list[Any] = [
                pack(path, output=Path(folder) / "out", recipe=fmt, dry_run=True) for fmt in FORMATS
            ]
        plans = [getattr(plan, "summary", plan) for plan in found]
        after = " | ".join(f"{plan.bytes_after / 1e9:.2f}" for plan in plans)
        click.echo(f"| {title} | {plans[0].bytes_before / 1e9:.2f} | {after} |")


if __name__ == "__main__":
    main()
