"""``quantkit demo``: the whole job on the bundled pipeline."""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import evaluation_options, options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, print_verdict, progress_bar
from quantkit.cli.report_tables import print_methods, shown

if TYPE_CHECKING:
    from quantkit.workflow.demo import Demo


@click.command(cls=Command, example="quantkit demo -o demo-output")
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
    help="Every method, including recovery by distillation: about ten minutes on a GPU, a day on "
    "a CPU.",
)
@click.option(
    "--prompts",
    type=options.COUNT,
    help="Pictures to compare; default: 12, with --full 64.",
)
@click.option(
    "--steps",
    type=options.STEPS,
    help="Denoising steps of a picture; default: 4, with --full 20.",
)
@evaluation_options.noise_floor
@options.device
@options.quiet
@options.as_json
def demo(
    output: Path,
    full: bool,
    prompts: int | None,
    steps: int | None,
    noise_floor: bool,
    device: str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Pack the bundled pipeline in several ways, run it on quantkit's kernels, and report.

    Calibrates, chooses masks, updates the kept weights, packs, verifies, loads, generates and
    compares, in a few minutes on a CPU. Exits with 1 when FP8 fails its gates.
    """
    from quantkit.workflow.demo import make_demo

    numbers = count(1)

    def tell(line: str) -> None:
        if not quiet:
            echo(f"{next(numbers):2}. {line}", err=True)

    with progress_bar(quiet=quiet) as progress:
        made = make_demo(
            output,
            command=run_command,
            full=full,
            prompts=prompts,
            steps=steps,
            noise_floor=noise_floor,
            device=device,
            tell=tell,
            progress=progress,
        )
    if as_json:
        print_json(made.to_json())
    else:
        print_demo(made)
    if made.state.value == "failed":
        sys.exit(1)


def run_command(arguments: list[str]) -> dict[str, Any]:
    """Run one command of quantkit in this process and return its JSON output."""
    from quantkit.cli import quantkit

    printed = StringIO()
    with redirect_stdout(printed):
        quantkit(args=arguments, prog_name="quantkit", standalone_mode=False)
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def print_demo(made: "Demo") -> None:
    """Print the comparison, remarks on failed gates, and the output's path."""
    print_methods(f"quantkit demo: {made.seconds:.0f} s", made.methods)
    for outcome in made.outcomes:
        echo(outcome.report.verdict)
        for line in outcome.report.warnings:
            echo(f"note: {line}")
    for line in made.remarks:
        echo(line)
    echo(f"open {made.output / 'index.html'}")
    words = {
        "passed": "PASS: FP8 keeps its gates",
        "failed": "FAIL: FP8 fails its gates",
        "undecided": "UNDECIDED: so few pictures do not settle FP8's gates; --prompts makes more",
        "not judged": "NOT JUDGED: no gate was measured",
    }
    print_verdict(words[made.state.value], passed=shown(made.state))
