"""Time loading a packed pipeline and its first pictures, in a process of its own.

``python docs/measure_first_picture.py PIPELINE [replay]``; run it twice: the first run compiles the
kernels.
"""

import sys
import time

START = time.perf_counter()

import click  # noqa: E402
import torch  # noqa: E402

import quantkit  # noqa: E402

STEPS, SIZE, PICTURES = 20, 1024, 3


def main() -> None:
    """Print seconds of importing, of loading, and of each picture."""
    imported = time.perf_counter()
    pipe = quantkit.load_pipeline(sys.argv[1], device="cuda", replay="replay" in sys.argv[2:])
    torch.cuda.synchronize()
    loaded = time.perf_counter()
    pipe.set_progress_bar_config(disable=True)
    click.echo(f"import {imported - START:.2f} s, load {loaded - imported:.2f} s")
    for seed in range(PICTURES):
        before = time.perf_counter()
        generator = torch.Generator().manual_seed(seed)
        pipe(
            "a red square on a blue table",
            num_inference_steps=STEPS,
            height=SIZE,
            width=SIZE,
            generator=generator,
        )
        click.echo(f"picture {seed + 1}: {time.perf_counter() - before:.2f} s")


if __name__ == "__main__":
    main()
