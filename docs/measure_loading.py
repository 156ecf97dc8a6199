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
from quantkit.inference.checksums import VARIABLE

RUNS = 7


def seconds(folder: Path, *, checksums: bool) -> float:
    """Return how long one load takes, in seconds."""
    os.environ[VARIABLE] = "1" if checksums else "0"
    cls = getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"])
    start = time.perf_counter()
    model = cls.from_pretrained(folder, torch_dtype=torch.float16)
    taken = time.perf_counter() - start
    del model
    gc.collect()
    return taken


def main() -> None:
    """Print the times of each run, their medians and the ratio."""
    folder = Path(sys.argv[1])
    seconds(folder, checksums=False)
    times = [
        (seconds(folder, checksums=False), seconds(folder, checksums=True)) for _ in range(RUNS)
    ]
    without, with_them = (median(column) for column in zip(*times, strict=True))
    for pair in times:
        click.echo("{:.2f} s without, {:.2f} s with".format(*pair))
    click.echo(f"medians {without:.2f} s, {with_them:.2f} s: {with_them / without:.2f}")


if __name__ == "__main__":
    main()
