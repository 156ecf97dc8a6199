"""``quantkit eval report`` and ``eval compare``: packed pipelines against their original."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import click

from quantkit.cli import evaluation_options, options
from quantkit.cli.console import command_line, echo, print_json, print_verdict, progress_bar, say
from quantkit.cli.preview import print_so_far
from quantkit.cli.report_tables import exit_by, print_methods, print_report, shown

if TYPE_CHECKING:
    from quantkit.eval.pages.live import Watcher
    from quantkit.workflow.evaluate import EvaluationSettings


class EvaluationTask(TypedDict):
    """What all evaluations take."""

    output: Path
    settings: "EvaluationSettings"
    device: str
    force: bool


@dataclass(frozen=True)
class Request:
    """What the options of an evaluation ask for; None: the default that help names."""

    output: Path
    prompts: Path | None
    count: int | None
    steps: int
    guidance: float | None
    seed: int
    batch: int
    lpips_weights: Path | None
    clip: str | None
    without: tuple[str, ...]
    noise_floor: bool
    judge: tuple[str, ...]
    pictures: str
    device: str
    dry_run: bool
    quiet: bool
    force: bool

    def task(self) -> "EvaluationTask":
        """Return what all evaluations take."""
        from quantkit.workflow.evaluate import EvaluationSettings

        settings = EvaluationSettings(
            self.prompts,
            self.count,
            self.steps,
            self.guidance,
            self.seed,
            self.batch,
            self.lpips_weights,
            self.clip,
            self.without,
            self.noise_floor,
            self.judge,
            self.pictures == "beside",
        )
        return {
            "output": self.output,
            "settings": settings,
            "device": self.device,
            "force": self.force,
        }


@click.command("report")
@options.model
@options.packed
@options.output
@evaluation_options.sampling
@evaluation_options.gates
@evaluation_options.calibration
@evaluation_options.sensitivity
@evaluation_options.watch
@evaluation_options.preview
@evaluation_options.pictures
@options.device
@options.dry_run
@options.quiet
@options.as_json
@options.force
def report(
    model: str,
    packed: Path,
    calibration: Path | None,
    sensitivity: Path | None,
    watch: bool,
    preview: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Run both pipelines on the same prompts and seeds, and write a report on the difference.

    PACKED may also be a 16-bit pipeline, or what another tool quantized (SDNQ, torchao,
    bitsandbytes, optimum-quanto, GGUF): a pipeline, a component alone, a .gguf file.

    Writes report.html, report.md, report.json and the pictures. Exits with 1 when a gate fails,
    with 3 when the prompts are too few to tell.
    """
    from quantkit.workflow.evaluate import evaluate, plan_evaluation

    limits = evaluation_options.pop_limits(given)
    request = Request(**given)
    if request.dry_run:
        echo(plan_evaluation(model, [packed], **request.task()))
        return
    with progress_bar(quiet=request.quiet) as progress:
        found = evaluate(
            model,
            packed,
            limits=limits,
            calibration=calibration,
            sensitivity=sensitivity,
            commands=(command_line(),),
            watch=_watcher(request, pictures=preview and not as_json) if watch else None,
            progress=progress,
            **request.task(),
        )
    if as_json:
        print_json(found.to_json())
    else:
        print_report(found, request.output, preview=preview)
    exit_by(found.state)


@click.command("compare")
@options.model
@click.argument("packed", metavar="PACKED...", type=options.PATH, nargs=-1, required=True)
@options.output
@evaluation_options.sampling
@evaluation_options.gates
@evaluation_options.pictures
@options.device
@options.dry_run
@options.quiet
@options.as_json
@options.force
def compare(model: str, packed: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """Run the original once and several packed pipelines, and write one table of methods.

    PACKED may be all that 'eval report' takes.

    Writes index.html, methods.md and methods.json, and a folder with the report of every packed
    directory. Exits with 1 when a gate of any fails, with 3 when none does and some are open.
    """
    from quantkit.workflow.evaluate import compare, plan_evaluation

    limits = evaluation_options.pop_limits(given)
    request = Request(**given)
    if request.dry_run:
        echo(plan_evaluation(model, packed, **request.task()))
        return
    with progress_bar(quiet=request.quiet) as progress:
        found = compare(
            model,
            packed,
            limits=limits,
            commands=(command_line(),),
            progress=progress,
            **request.task(),
        )
    if as_json:
        print_json(found.to_json())
    else:
        print_methods(f"{model}: {len(found.methods)} packed pipelines", found.methods)
        for method in found.methods:
            echo(f"{method.name}: {method.report.verdict}")
        echo(f"table: {request.output / 'index.html'}")
        print_verdict(found.headline, passed=shown(found.state))
    exit_by(found.state)


def _watcher(request: Request, *, pictures: bool) -> "Watcher":
    """Return what shows the worst pair so far, and names the page first."""
    from quantkit.workflow.evaluate import unwatched

    if request.quiet:
        return unwatched
    say(f"filling {request.output / 'report.html'}")
    return partial(print_so_far, pictures=pictures)
