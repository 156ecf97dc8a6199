"""``quantkit run``: calibrate, sparsify, pack and evaluate with one recipe."""

from typing import Any

import click

from quantkit.cli import evaluation_options, options
from quantkit.cli.command import Command
from quantkit.cli.console import command_line, echo, print_json, progress_bar, say
from quantkit.cli.report_tables import exit_by, print_report
from quantkit.progress import unheard


@click.command(cls=Command, example="quantkit run int8 sdxl -o sdxl-run", kept="{}/run.json")
@click.argument("recipe", metavar="RECIPE", callback=options.changed_recipe)
@options.changes
@options.model
@options.output
@evaluation_options.sampling
@options.device
@options.dry_run
@options.quiet
@options.as_json
@options.force
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with an output of the same run that was stopped: what is complete is kept.",
)
def run(quiet: bool, as_json: bool, **given: Any) -> None:
    """Calibrate, sparsify, pack and evaluate MODEL with RECIPE, a bundled name or a YAML file.

    Writes into the output folder: calibration.safetensors, hessians/ and masks.safetensors where
    the recipe asks for them, sensitivity.json and chosen.yaml where it has a budget, packed/,
    report/, run.log and run.json, which says what they follow from. The gates are the recipe's;
    exits with 1 when one fails, with 3 when the prompts are too few to tell.
    """
    from quantkit.workflow.run import REPORT, RunPlan, run

    settings = evaluation_options.take_settings(given)
    with progress_bar(quiet=quiet) as progress:
        found = run(
            **given,
            settings=settings,
            commands=(command_line(),),
            progress=progress,
            tell=unheard if quiet else say,
        )
    if as_json:
        print_json(found.to_json())
    elif isinstance(found, RunPlan):
        echo(*str(found).split("\n"))
    else:
        print_report(found, given["output"] / REPORT, card=settings.card)
    if not isinstance(found, RunPlan):
        exit_by(found.state)
