"""``quantkit eval report`` and ``eval compare``: packed pipelines against their original."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import evaluation_options, options
from quantkit.cli.command import Command
from quantkit.cli.console import command_line, echo, print_json, print_verdict, progress_bar, say
from quantkit.cli.preview import print_so_far
from quantkit.cli.report_tables import exit_by, print_methods, print_report, shown

if TYPE_CHECKING:
    from quantkit.eval.pages.live import Watcher


@click.command(
    "report",
    cls=Command,
    example="quantkit eval report sdxl sdxl-int8 -o report",
    left="{}/report.html",
)
@options.model
@options.packed
@options.output
@evaluation_options.sampling
@evaluation_options.gates
@evaluation_options.calibration
@evaluation_options.sensitivity
@evaluation_options.watch
@evaluation_options.preview
@options.device
@options.dry_run
@options.quiet
@options.as_json
@options.force
def report(watch: bool, preview: bool, quiet: bool, as_json: bool, **given: Any) -> None:
    """Run both pipelines on the same prompts and seeds, and write a report on the difference.

    PACKED may also be a 16-bit pipeline, or what another tool quantized (SDNQ, torchao,
    bitsandbytes, optimum-quanto, GGUF): a pipeline, a component alone, a .gguf file.

    Writes report.html, report.md, report.json and the pictures. Exits with 1 when a gate fails,
    with 3 when the prompts are too few to tell.
    """
    from quantkit.workflow.evaluate import EvaluationPlan, evaluate

    settings = evaluation_options.take_settings(given)
    limits = evaluation_options.take_limits(given)
    output, shows = given["output"], preview and not as_json
    with progress_bar(quiet=quiet) as progress:
        found = evaluate(
            **given,
            settings=settings,
            limits=limits,
            commands=(command_line(),),
            watch=_watcher(output, quiet=quiet, pictures=shows) if watch else None,
            progress=progress,
        )
    if isinstance(found, EvaluationPlan):
        echo(found)
        return
    if as_json:
        print_json(found.to_json())
    else:
        print_report(found, output, preview=preview, card=settings.card)
    exit_by(found.state)


@click.command(
    "compare", cls=Command, example="quantkit eval compare sdxl sdxl-int8 sdxl-int4 -o methods"
)
@options.model
@click.argument("packed", metavar="PACKED...", type=options.PATH, nargs=-1, required=True)
@options.output
@evaluation_options.sampling
@evaluation_options.gates
@options.device
@options.dry_run
@options.quiet
@options.as_json
@options.force
def compare(quiet: bool, as_json: bool, **given: Any) -> None:
    """Run the original once and several packed pipelines, and write one table of methods.

    PACKED may be all that 'eval report' takes.

    Writes index.html, methods.md and methods.json, and a folder with the report of every packed
    directory. Exits with 1 when a gate of any fails, with 3 when none does and some are open.
    """
    from quantkit.workflow.evaluate import EvaluationPlan, compare

    settings = evaluation_options.take_settings(given)
    limits = evaluation_options.take_limits(given)
    with progress_bar(quiet=quiet) as progress:
        found = compare(
            **given,
            settings=settings,
            limits=limits,
            commands=(command_line(),),
            progress=progress,
        )
    if isinstance(found, EvaluationPlan):
        echo(found)
        return
    if as_json:
        print_json(found.to_json())
    else:
        print_methods(f"{given['model']}: {len(found.methods)} packed pipelines", found.methods)
        for method in found.methods:
            echo(f"{method.name}: {method.report.verdict}")
        echo(f"table: {given['output'] / 'index.html'}")
        print_verdict(found.headline, passed=shown(found.state))
    exit_by(found.state)


def _watcher(output: Path, *, quiet: bool, pictures: bool) -> "Watcher":
    """Return a watcher that names the page, then shows the worst pair so far."""
    from quantkit.workflow.evaluate import unwatched

    if quiet:
        return unwatched
    say(f"filling {output / 'report.html'}")
    return partial(print_so_far, pictures=pictures)
