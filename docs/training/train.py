"""Train the bundled pipeline, CLIP, the feature network and an MMDiT, on one GPU.

    python -m docs.training.train -o DIR  # 24 minutes on one H200, 9 of them for the MMDiT
    python -m docs.training.train -o DIR --stages unet,samples
    python -m docs.training.train -o DIR --device cpu --scale 1e-3 --batch-scale 1e-2

A stage reads what earlier stages wrote under DIR. Figures go to DIR/training.json.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from docs.training.train_alexnet import train_alexnet
from docs.training.train_clip import train_clip
from docs.training.train_common import Options, read_figures, write_figures
from docs.training.train_mmdit import train_mmdit
from docs.training.train_samples import sample_pipeline
from docs.training.train_unet import train_unet
from docs.training.train_vae import train_vae

#: Name on the command line and in training.json, in the order in which they need each other.
STAGES: dict[str, Callable[[Options], dict[str, Any]]] = {
    "clip": train_clip,
    "vae": train_vae,
    "alexnet": train_alexnet,
    "unet": train_unet,
    "samples": sample_pipeline,
    "mmdit": train_mmdit,
}


def main(arguments: list[str] | None = None) -> None:
    """Run the stages that the command line names and write down what came of them."""
    parsed = _parser().parse_args(arguments)
    names = parsed.stages.split(",")
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        _parser().error(f"--stages: no stage {unknown[0]!r}; choose from {', '.join(STAGES)}")
    # Reports on weights that one model of a file leaves to another would bury the figures.
    transformers.utils.logging.set_verbosity_error()
    device = torch.device(parsed.device)
    options = Options(
        out=parsed.out,
        device=device,
        scale=parsed.scale,
        batch_scale=parsed.batch_scale,
        compiled=parsed.compile,
        seed=parsed.seed,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    for name in (name for name in STAGES if name in names):
        _run_stage(name, options, arguments)


def _run_stage(name: str, options: Options, arguments: list[str] | None) -> None:
    begun = time.monotonic()
    found = STAGES[name](options)
    seconds = round(time.monotonic() - begun, 1)
    print(f"{name}: {found} in {seconds} s", flush=True)
    figures = read_figures(options.out)
    given = sys.argv[1:] if arguments is None else arguments
    stage = {
        "command": " ".join(["python -m docs.training.train", *given]),
        "device": _device_name(options.device),
        "versions": {item: version(item) for item in ("torch", "transformers", "diffusers")},
        "seed": options.seed,
        "seconds": seconds,
        **found,
    }
    write_figures(options.out, {**figures, name: stage})


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("-o", "--out", type=Path, required=True, help="directory of the assets")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma between names")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the planned steps")
    parser.add_argument("--batch-scale", type=float, default=1.0, help="share of the batch sizes")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="send models through torch.compile: worth its minutes only on long runs",
    )
    parser.add_argument("--seed", type=int, default=2026)
    return parser


if __name__ == "__main__":
    main()
