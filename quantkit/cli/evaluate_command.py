"""``quantkit eval``: the quality of packed pipelines, in pictures and numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from quantkit.cli import evaluation_options, options, report_command
from quantkit.cli.command import Group
from quantkit.cli.console import command_line, echo, print_json, progress_bar
from quantkit.cli.report_tables import exit_by, print_gates, print_metrics, print_outcome


@click.group("eval", cls=Group)
def evaluate() -> None:
    """Measure what packing cost, in pictures and numbers."""


@evaluate.command("images", example="quantkit eval images original packed --gate ssim=0.95 -o page")
@click.argument("first", metavar="A", type=options.PATH)
@click.argument("second", metavar="B", type=options.PATH)
@click.option(
    "--prompts",
    type=options.PATH,
    help="A UTF-8 file with one prompt per picture, in the order of the names: adds CLIP score.",
)
@evaluation_options.lpips_weights
@evaluation_options.clip
@evaluation_options.asked_gates
@click.option(
    "-o", "--output", type=options.PATH, help="Write report.html, report.json and the pictures."
)
@evaluation_options.pictures
@options.device
@options.quiet
@options.as_json
@options.force
def images(
    first: Path, second: Path, gates: dict[str, float], quiet: bool, as_json: bool, **given: Any
) -> None:
    """Run the metrics on two folders: pictures of A are the original, equal names make a pair.

    With -o, writes a page of the pairs like that of 'eval report'. Exits with 1 when a gate was
    given and fails, with 3 when the pictures are too few to tell.
    """
    from quantkit.workflow.compare_images import NO_LIMITS, compare_images

    evaluation_options.take_networks(given)
    with progress_bar(quiet=quiet) as progress:
        found = compare_images(
            first,
            second,
            **given,
            limits=replace(NO_LIMITS, **gates),
            commands=(command_line(),),
            progress=progress,
        )
    if as_json:
        print_json(found.to_json())
    else:
        print_metrics(f"{second} against {first}", found.comparison)
        print_gates(found.gates)
        if found.gates:
            print_outcome(found.gates, found.state)
        if given["output"] is not None:
            echo(f"page: {given['output'] / 'report.html'}")
    if found.gates:
        exit_by(found.state)


@evaluate.command("fetch", example="quantkit eval fetch")
@evaluation_options.lpips_weights
@evaluation_options.clip
@options.as_json
def fetch(as_json: bool, **given: Any) -> None:
    """Download the networks of LPIPS and CLIP score, which evaluations look for first."""
    from quantkit.workflow.evaluate import fetch_networks

    evaluation_options.take_networks(given)
    names = fetch_networks(**given)
    if as_json:
        print_json({"networks": names})
    else:
        echo(*(f"{name}: there" for name in names))


evaluate.add_command(report_command.report)
evaluate.add_command(report_command.compare)
