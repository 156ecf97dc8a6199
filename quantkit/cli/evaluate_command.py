"""``quantkit eval``: what packing cost, in pictures and numbers."""

from pathlib import Path

import click

from quantkit.cli import evaluation_options, options, report_command
from quantkit.cli.console import command_line, echo, print_json, progress_bar
from quantkit.cli.report_tables import exit_by, print_gates, print_metrics, print_outcome


@click.group("eval")
def evaluate() -> None:
    """Measure what packing cost, in pictures and numbers."""


@evaluate.command("images")
@click.argument("first", metavar="A", type=options.PATH)
@click.argument("second", metavar="B", type=options.PATH)
@click.option(
    "--prompts",
    type=options.PATH,
    help="A UTF-8 file with one prompt per picture, in the order of the names: adds CLIP score.",
)
@evaluation_options.lpips_weights
@evaluation_options.clip
@evaluation_options.without
@click.option("--gate-ssim", type=options.NUMBER, help="Fail unless the mean SSIM is above this.")
@click.option("--gate-lpips", type=options.NUMBER, help="Fail unless the mean LPIPS is below this.")
@click.option(
    "--gate-clip", type=options.NUMBER, help="Fail unless the CLIP score loss is below this (%)."
)
@click.option(
    "--gate-broken",
    type=options.NUMBER,
    help="Fail unless at most so many of the pictures (%) are broken.",
)
@click.option(
    "-o", "--output", type=options.PATH, help="Write report.html, report.json and the pictures."
)
@evaluation_options.pictures
@options.device
@options.quiet
@options.as_json
@options.force
def images(
    first: Path,
    second: Path,
    prompts: Path | None,
    lpips_weights: Path | None,
    clip: str | None,
    without: tuple[str, ...],
    gate_ssim: float | None,
    gate_lpips: float | None,
    gate_clip: float | None,
    gate_broken: float | None,
    output: Path | None,
    pictures: str,
    device: str,
    quiet: bool,
    as_json: bool,
    force: bool,
) -> None:
    """Run the metrics on two folders: pictures of A are the original, equal names make a pair.

    With -o, writes a page of the pairs like that of 'eval report'. Exits with 1 when a gate was
    given and fails, with 3 when the pictures are too few to tell.
    """
    from quantkit.workflow.compare_images import compare_images
    from quantkit.workflow.evaluate import Limits

    limits = Limits(gate_ssim, gate_lpips, gate_clip, gate_broken)
    with progress_bar(quiet=quiet) as progress:
        found = compare_images(
            first,
            second,
            prompts=prompts,
            lpips_weights=lpips_weights,
            clip=clip,
            without=without,
            limits=limits,
            output=output,
            beside=pictures == "beside",
            force=force,
            commands=(command_line(),),
            device=device,
            progress=progress,
        )
    if as_json:
        print_json(found.to_json())
    else:
        print_metrics(f"{second} against {first}", found.comparison)
        print_gates(found.gates)
        if found.gates:
            print_outcome(found.gates, found.state)
        if output is not None:
            echo(f"page: {output / 'report.html'}")
    if found.gates:
        exit_by(found.state)


@evaluate.command("fetch")
@evaluation_options.clip
@evaluation_options.without
@options.as_json
def fetch(clip: str | None, without: tuple[str, ...], as_json: bool) -> None:
    """Download the networks of LPIPS and CLIP score, which evaluations look for first."""
    from quantkit.workflow.evaluate import fetch_networks

    names = fetch_networks(clip=clip, without=without)
    if as_json:
        print_json({"networks": names})
    else:
        echo(*(f"{name}: there" for name in names))


evaluate.add_command(report_command.report)
evaluate.add_command(report_command.compare)
