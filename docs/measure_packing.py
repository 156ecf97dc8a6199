"""Time packing and verifying a UNet as large as that of Stable Diffusion 1.5, as whole processes.

Without a folder, one of random weights is written first, to a temporary place. The cache is warm:
each command runs once before it is timed, which also compiles the core and builds the model, and
writes the bytecode of quantkit, as pip does when it installs a package.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import click

RUNS = 7

#: What is timed, and the recipe: a bundled name or YAML.
RECIPES = {
    "fp8": "fp8",
    "2:4 + fp8": """
name: fp8-magnitude
weight: {format: e4m3fn, granularity: channel, observer: amax}
activation: {mode: token}
sparsity: {pattern: "2:4", method: magnitude}
""",
    "int4": """
name: int4-nearest
weight: {format: int4, granularity: channel, observer: amax}
activation: {mode: token}
data_free: true
""",
    "int4, mse": """
name: int4-searched
weight: {format: int4, granularity: channel, observer: mse}
activation: {mode: token}
data_free: true
""",
    "int8, mse": """
name: int8-searched
weight: {format: int8, granularity: channel, observer: mse}
activation: {mode: token}
data_free: true
""",
}


@dataclass(frozen=True)
class Run:
    """What one process took: seconds, seconds of all cores, MiB."""

    wall: float
    cpu: float
    peak: float


def run(command: Sequence[str]) -> Run:
    """Return what a process took, by the operating system's account."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: ended with {os.waitstatus_to_exitcode(status)}")
    wall = time.perf_counter() - start
    return Run(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def write_unet(folder: Path) -> None:
    """Write a UNet of 860 million random numbers in float16."""
    import torch
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(cross_attention_dim=768)
    model = model.to(torch.float16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    model.save_pretrained(folder)


def measure(what: str, command: Sequence[str], output: Path | None = None) -> None:
    """Print the median of several runs; an output is deleted before each."""
    runs = []
    for _ in range(RUNS + 1):
        if output is not None:
            shutil.rmtree(output, ignore_errors=True)
        runs.append(run(command))
    taken = runs[1:]
    wall = sorted(r.wall for r in taken)
    click.echo(
        f"{what}: {median(wall):.2f} s ({wall[0]:.2f} to {wall[-1]:.2f}), "
        f"{median(r.cpu for r in taken):.2f} CPU seconds, peak {max(r.peak for r in taken):.0f} MiB"
    )


def main() -> None:
    """Measure each recipe, verifying, the help and the interpreter alone."""
    quantkit = [sys.executable, "-m", "quantkit"]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(scratch / "bytecode")
        model = Path(sys.argv[1]) if len(sys.argv) > 1 else scratch / "unet"
        if len(sys.argv) == 1:
            # In a process of its own: a process begins with the peak of who starts it.
            writing = get_context("spawn").Process(target=write_unet, args=(model,))
            writing.start()
            writing.join()
        for name, recipe in RECIPES.items():
            file = scratch / "recipe.yaml"
            file.write_text(recipe)
            chosen = str(file) if "\n" in recipe else recipe
            output = scratch / "packed"
            command = [*quantkit, "pack", str(model), "-r", chosen, "-o", str(output), "-q"]
            measure(f"pack {name}", command, output)
            if name == "fp8":
                measure("verify fp8", [*quantkit, "verify", str(output), "-q"])
        measure("--help", [*quantkit, "--help"])
        measure("the interpreter alone", [sys.executable, "-c", "pass"])


if __name__ == "__main__":
    main()
