"""``quantkit run``: calibrate, sparsify, pack and evaluate with one recipe."""

from typing import Any

import click

from quantkit.cli import evaluation_options, options
from quantkit.cli.console import command_line, echo, print_json, progress_bar, say
from quantkit.cli.report_command import Request
from quantkit.cli.report_tables import exit_by, print_report
from quantkit.progress import unheard


@click.command()
@click.argument("recipe", metavar="RECIPE")
@options.model
@options.output
@evaluation_options.sampling
@evaluation_options.pictures
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
def run(recipe: str, model: str, resume: bool, as_json: bool, **given: Any) -> None:
    """Calibrate, sparsify, pack and evaluate MODEL with RECIPE, a bundled name or a YAML file.

    Writes into the output folder: calibration.safetensors, hessians/ and masks.safetensors where
    the recipe asks for them, sensitivity.json and chosen.yaml where it has a budget, packed/,
    report/, run.log and run.json, which says what they follow from. The gates are the recipe's;
    exits with 1 when one fails, with 3 when the prompts are too few to tell.
    """
    from quantkit.workflow.run import REPORT, plan_run, run

    request = Request(**given)
    if request.dry_run:
        plan = plan_run(model, recipe=recipe, resume=resume, **request.task())
        if as_json:
            print_json(plan.to_json())
        else:
            echo(*str(plan).split("\n"))
        return
    with progress_bar(quiet=request.quiet) as progress:
        report = run(
            model,
            recipe=recipe,
            **request.task(),
            resume=resume,
            commands=(command_line(),),
            progress=progress,
            tell=unheard if request.quiet else say,
        )
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report, request.output / REPORT)
    exit_by(report.state)
