"""``quantkit demo``: the whole job on the bundled pipeline."""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import evaluation_options, options
from quantkit.cli.console import echo, print_json, progress_bar
from quantkit.cli.report_tables import print_methods

if TYPE_CHECKING:
    from quantkit.eval.demo.run import Outcome


@click.command()
@click.option(
    "-o",
    "--output",
    type=options.PATH,
    default=Path("demo-output"),
    show_default=True,
    help="Where to write; the output of an earlier demo is replaced.",
)
@click.option(
    "--full",
    is_flag=True,
    help="Every method, recovery by distillation included: about ten minutes on a GPU, a day on a "
    "CPU.",
)
@click.option(
    "--prompts",
    type=options.COUNT,
    help="Pictures to compare; default: 6, with --full 64.",
)
@click.option("--steps", type=options.STEPS, default=20, show_default=True, help="Denoising steps.")
@evaluation_options.noise_floor
@options.device
@options.quiet
@options.as_json
def demo(output: Path, quiet: bool, as_json: bool, **given: Any) -> None:
    """Pack the bundled pipeline to FP8 and 4:2, run it on quantkit's kernels, and report.

    Calibrates, chooses masks, lets the kept weights make up for the dropped ones, packs, verifies,
    loads, generates and compares, on a CPU in a few minutes. Exits with 1 when FP8 fails its gates;
    one-shot 4:2 is shown as it is.
    """
    outcomes, seconds = show_demo(output, quiet=quiet, **given)
    if as_json:
        from quantkit.eval.serialize import to_json

        print_json({
            "schema": "quantkit.demo", "schema_version": 3, "output": str(output),
            "seconds": seconds,
            "reports": {o.row.compared: to_json(o.report) for o in outcomes},
        })  # fmt: skip
    else:
        print_outcomes(outcomes, output, seconds)
    if not outcomes[0].report.passed:
        sys.exit(1)


def show_demo(
    output: Path, *, full: bool, prompts: int | None, steps: int, noise_floor: bool, device: str,
    quiet: bool,
) -> "tuple[tuple[Outcome, ...], float]":  # fmt: skip
    """Run the demo and write its index page.

    Raises:
        OutputError: the output exists and is not a demo's.
    """
    from quantkit.eval.demo import commands as plan
    from quantkit.eval.demo.run import Stage, run_demo, write_index
    from quantkit.pipelines.running import choose_device

    started, numbers = perf_counter(), count(1)

    def say(line: str) -> None:
        if not quiet:
            echo(f"{next(numbers):2}. {line}", err=True)

    chosen = plan.FULL if full else plan.SHORT
    with progress_bar(quiet=quiet) as progress:
        outcomes = run_demo(
            Stage(output, run_command, say, progress, choose_device(device)),
            chosen,
            prompts=prompts or chosen.prompts,
            steps=steps,
            noise_floor=noise_floor,
        )
    seconds = perf_counter() - started
    write_index(output, outcomes, seconds)
    return outcomes, seconds


def run_command(arguments: list[str]) -> dict[str, Any]:
    """Run one command of quantkit in this process and return what it prints as JSON."""
    from quantkit.cli import quantkit

    printed = StringIO()
    with redirect_stdout(printed):
        quantkit(args=arguments, prog_name="quantkit", standalone_mode=False)
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def print_outcomes(outcomes: "tuple[Outcome, ...]", output: Path, seconds: float) -> None:
    """Print the comparison, what a failed gate means, and where to look."""
    from quantkit.eval.demo.run import methods, remarks

    print_methods(f"quantkit demo: {seconds:.0f} s", methods(outcomes))
    for outcome in outcomes:
        echo(outcome.report.verdict)
        for line in outcome.report.warnings:
            echo(f"note: {line}")
    for line in remarks(outcomes):
        echo(line)
    echo(f"open {output / 'index.html'}")
