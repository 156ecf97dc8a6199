"""Time loading a packed component with checksums and without, in turns, from a warm cache."""

import gc
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

import click
import diffusers
import torch

import quantkit  # noqa: F401  diffusers then knows packed components
from quantkit.inference.loading.checksums import VARIABLE

RUNS = 7


def seconds(folder: Path, *, checksums: bool) -> tuple[float, float]:
    """Return how long one load takes, in seconds, and in seconds of all cores."""
    os.environ[VARIABLE] = "1" if checksums else "0"
    cls = getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"])
    start, before = time.perf_counter(), time.process_time()
    model = cls.from_pretrained(folder, torch_dtype=torch.float16)
    taken = time.perf_counter() - start, time.process_time() - before
    del model
    gc.collect()
    return taken


def main() -> None:
    """Print the times of each run, then how long loading takes and how fast that is."""
    folder = Path(sys.argv[1])
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9
    seconds(folder, checksums=False)
    turns = [
        (seconds(folder, checksums=False), seconds(folder, checksums=True)) for _ in range(RUNS)
    ]
    for (without, _), (with_them, _) in turns:
        click.echo(f"{without:.2f} s without, {with_them:.2f} s with")
    for name, runs in zip(("without", "with"), zip(*turns, strict=True), strict=True):
        wall, cpu = ([run[place] for run in runs] for place in (0, 1))
        click.echo(
            f"{name}: {median(wall):.2f} s ({min(wall):.2f} to {max(wall):.2f}), "
            f"{median(cpu):.2f} CPU seconds; {size:.2f} GB at {size / median(wall):.2f} GB/s"
        )


if __name__ == "__main__":
    main()
