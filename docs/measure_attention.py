"""Draw the demo's 64 prompts with attention in 16 bit and on codes, into folders of pictures.

``python docs/measure_attention.py FOLDER`` prints SSIM to the original's, and what becomes of the
CLIP score; ``quantkit eval images FOLDER/original FOLDER/e4m3fn-e4m3fn-1-dynamic --prompts
FOLDER/prompts.txt --clip eval/assets/clip`` the rest. Static scales are those of a calibration on
16 of the prompts and other seeds. A second argument takes fewer prompts.
"""

import sys
from itertools import product
from pathlib import Path

import click
import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from quantkit.eval.measuring.backbones import ClipBackbone, load_clip
from skimage.metrics import structural_similarity

import quantkit
from quantkit.calibration.statistics.layer_statistics import load_calibration
from quantkit.checkpoint.packed_attention import CHILD, HeadShape
from quantkit.device.backends import Backend, use
from quantkit.inference.layers import head_scales
from quantkit.numerics.attention_scales import SHAPES
from quantkit.packing.attention_plan import static_scales

ASSETS = Path(__file__).parents[1] / "eval" / "assets"
PROMPTS, BATCH = 64, 16
SEEN, OTHER_SEED, MARGIN = 16, 1000, 2.0
#: format of queries and keys, of probabilities and values, and the fewest keys
SETTINGS = tuple(product(("e4m3fn", "int8"), ("e4m3fn", None), (1, 64)))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(pipe: DiffusionPipeline, prompts: list[str], folder: Path) -> tuple[np.ndarray, ...]:
    """Return (prompts, height, width, 3) pictures from 0 to 1, and the 8-bit ones it wrote."""
    folder.mkdir(parents=True)
    found = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        seeds = [torch.Generator().manual_seed(start + i) for i in range(len(batch))]
        drawn = pipe(
            batch, num_inference_steps=20, guidance_scale=4.0, generator=seeds, output_type="np"
        )
        found.append(drawn.images)
    pictures = np.concatenate(found)
    rounded = (pictures * 255).round().astype("uint8")
    for index, picture in enumerate(rounded):
        Image.fromarray(picture).save(folder / f"{index:03}.png")
    return pictures, rounded


def clip_score(clip: ClipBackbone, pictures: np.ndarray, prompts: list[str]) -> float:
    """Return the mean over all prompts."""
    return float(np.mean([clip.score(*pair) for pair in zip(pictures, prompts, strict=True)]))


def give_static_scales(pipe: DiffusionPipeline, prompts: Path, folder: Path) -> None:
    """Calibrate, and give all attention of the denoiser its scales."""
    calibration = folder / "calibration.safetensors"
    run = {"calibration.steps": 20, "calibration.guidance": 4.0, "calibration.seed": OTHER_SEED}
    recipe = quantkit.load_recipe("fp8", run)
    quantkit.calibrate(
        ASSETS / "pipeline", recipe=recipe, output=calibration, prompts=prompts, count=SEEN
    )
    found = load_calibration(calibration).attention["unet"]
    scales = {name: static_scales(seen, MARGIN) for name, seen in found.items()}
    head_scales.install(pipe.unet, {n: HeadShape(s.heads, s.head_size) for n, s in scales.items()})
    for name, numbers in scales.items():
        for part in SHAPES:
            child = getattr(pipe.unet.get_submodule(name), CHILD)
            child.fill(part, getattr(numbers, part).to(DEVICE))


def main() -> None:
    """Print a line for every setting."""
    folder = Path(sys.argv[1])
    count = int(sys.argv[2]) if len(sys.argv) > 2 else PROMPTS
    prompts = (ASSETS / "prompts.txt").read_text(encoding="utf-8").split("\n")[:count]
    pipe = DiffusionPipeline.from_pretrained(ASSETS / "pipeline", torch_dtype=torch.float32).to(
        DEVICE
    )
    pipe.set_progress_bar_config(disable=True)
    clip = load_clip(str(ASSETS / "clip"), device=torch.device("cpu"))
    original, rounded = draw(pipe, prompts, folder / "original")
    wanted = clip_score(clip, rounded, prompts)
    click.echo(f"CLIP score of torch's attention: {wanted:.3f}")
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    for scales in ("dynamic", "static"):
        if scales == "static":
            give_static_scales(pipe, folder / "prompts.txt", folder)
        for qk, pv, min_keys in SETTINGS:
            quantkit.attention(pipe, qk=qk, pv=pv, min_keys=min_keys)
            name = f"{qk}-{pv or 'f16'}-{min_keys}-{scales}"
            pictures, rounded = draw(pipe, prompts, folder / name)
            pairs = zip(original, pictures, strict=True)
            scores = [structural_similarity(a, b, channel_axis=2, data_range=1.0) for a, b in pairs]
            found = clip_score(clip, rounded, prompts)
            click.echo(
                f"{qk}, {pv or 'f16'}, {min_keys} keys, {scales}: SSIM {np.mean(scores):.4f}, "
                f"worst {np.min(scores):.4f}; CLIP score {found:.3f} ({found / wanted - 1:+.3%})"
            )


if __name__ == "__main__":
    # Not torch's, where that is faster.
    with use(Backend.GPU if DEVICE.type == "cuda" else Backend.HOST):
        main()
