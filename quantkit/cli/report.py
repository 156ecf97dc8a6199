"""``quantkit eval report`` and ``eval compare``: packed pipelines against their original."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import evaluation_options, options
from quantkit.cli.console import echo, print_json, progress_bar
from quantkit.cli.report_tables import print_methods, print_report

if TYPE_CHECKING:
    import torch

    from quantkit.eval.backbones import Backbones
    from quantkit.eval.evaluation import Baseline
    from quantkit.eval.gates import Limits
    from quantkit.eval.generation import Settings
    from quantkit.eval.methods import Method
    from quantkit.eval.result import Report
    from quantkit.models.source import Model
    from quantkit.progress import Progress


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
    device: str
    dry_run: bool
    quiet: bool
    force: bool

    def place(self) -> "torch.device":
        """Return the device.

        Raises:
            ModelError: it is not on this machine.
        """
        from quantkit.pipelines.running import choose_device

        return choose_device(self.device)

    def settings(self, *, last: bool) -> "Settings":
        """Return prompts, seeds and steps; see ``choose_prompts`` for ``last``.

        Raises:
            InputError: prompts that cannot be used.
        """
        from quantkit.eval.generation import choose_prompts, make_settings

        texts = choose_prompts(self.prompts, self.count, device=self.place(), last=last)
        return make_settings(
            texts, steps=self.steps, guidance=self.guidance, seed=self.seed, batch=self.batch
        )

    def backbones(self) -> "Backbones":
        """Return the networks of LPIPS and CLIP score.

        Raises:
            ModelError: one that cannot be had.
        """
        from quantkit.eval.backbones import load_backbones

        return load_backbones(self.lpips_weights, self.clip, self.without, device=self.place())

    def baseline(
        self, model: "Model", settings: "Settings", backbones: "Backbones", progress: "Progress"
    ) -> "Baseline":
        """Run the original, and its noise floor where that is asked for."""
        from quantkit.eval.evaluation import measure_baseline

        return measure_baseline(
            model,
            settings,
            backbones=backbones,
            device=self.place(),
            noise_floor=self.noise_floor,
            progress=progress,
        )


@click.command("report")
@options.model
@options.packed
@options.output
@evaluation_options.sampling
@evaluation_options.gates
@options.device
@options.dry_run
@options.quiet
@options.as_json
@options.force
def report(model: str, packed: Path, as_json: bool, **given: Any) -> None:
    """Run both pipelines on the same prompts and seeds, and write a report on the difference.

    Writes report.html, report.md, report.json and the pictures. Exits with 1 when a gate fails.
    """
    limits = evaluation_options.pop_limits(given)
    request = Request(**given)
    result = evaluate_packed(model, packed, request, limits, command=command_line())
    if result is None:
        return
    if as_json:
        from quantkit.eval.serialize import to_json

        print_json(to_json(result))
    else:
        print_report(result, request.output)
    if not result.passed:
        sys.exit(1)


def evaluate_packed(
    model: str, packed: Path, request: Request, limits: "Limits", *, command: str
) -> "Report | None":
    """Generate, measure and write the report; None after a dry run.

    Raises:
        InputError: a model, a packed directory, prompts or networks that cannot be used.
    """
    from quantkit.eval.evaluation import evaluate, open_pair
    from quantkit.eval.report import KIND, write_report
    from quantkit.storage.files import write_or_keep
    from quantkit.storage.places import check_directory, refuse_overlap

    check_directory(request.output, kind=KIND, force=request.force)
    pair = open_pair(model, packed)
    for source in (pair.model.path, packed):
        refuse_overlap(request.output, source)
    settings = request.settings(last=request.prompts is None)
    if request.dry_run:
        echo(describe_run(settings, request, "both pipelines"))
        return None
    backbones = request.backbones()
    with progress_bar(quiet=request.quiet) as progress:
        baseline = request.baseline(pair.model, settings, backbones, progress)
        result, pairs = evaluate(
            pair, baseline, limits=limits, commands=(command,), progress=progress
        )
    write_or_keep(partial(write_report, result, pairs, force=request.force), request.output)
    return result


@click.command("compare")
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
def compare(model: str, packed: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """Run the original once and several packed pipelines, and write one table of methods.

    Writes index.html, methods.md and methods.json, and a folder with the report of every packed
    directory. Exits with 1 when a gate of any fails.
    """
    limits = evaluation_options.pop_limits(given)
    request = Request(**given)
    methods = compare_packed(model, packed, request, limits, command=command_line())
    if methods is None:
        return
    if as_json:
        from quantkit.eval.methods import to_json

        print_json(to_json(methods))
    else:
        print_methods(f"{model}: {len(methods)} packed pipelines", methods)
        for method in methods:
            echo(f"{method.name}: {method.report.verdict}")
        echo(f"table: {request.output / 'index.html'}")
    if not all(method.report.passed for method in methods):
        sys.exit(1)


def compare_packed(
    model: str, packed: Sequence[Path], request: Request, limits: "Limits", *, command: str
) -> "tuple[Method, ...] | None":
    """Evaluate every packed directory against one run of the original; None after a dry run.

    Raises:
        InputError: a model, a packed directory, prompts or networks that cannot be used.
    """
    from quantkit.eval.evaluation import evaluate, open_pair
    from quantkit.eval.methods import KIND, Method, name_methods, write_methods
    from quantkit.eval.report import write_report
    from quantkit.storage.files import staged_directory
    from quantkit.storage.places import check_directory, refuse_overlap

    check_directory(request.output, kind=KIND, force=request.force)
    names = name_methods(packed)
    # Every directory is opened before the long work: a broken one should not be found out last.
    opened = [open_pair(model, path) for path in packed]
    for source in (opened[0].model.path, *packed):
        refuse_overlap(request.output, source)
    settings = request.settings(last=request.prompts is None)
    if request.dry_run:
        echo(describe_run(settings, request, f"{1 + len(packed)} pipelines"))
        return None
    backbones, methods = request.backbones(), []
    with (
        progress_bar(quiet=request.quiet) as progress,
        staged_directory(request.output, kind=KIND, force=request.force) as stage,
    ):
        baseline = request.baseline(opened[0].model, settings, backbones, progress)
        for name, pair in zip(names, opened, strict=True):
            result, pairs = evaluate(
                pair, baseline, limits=limits, commands=(command,),
                progress=_named(name, progress),
            )  # fmt: skip
            write_report(result, pairs, stage / name, force=False)
            methods.append(Method(name, result, name))
        write_methods(methods, stage, (command,))
    return tuple(methods)


def describe_run(settings: "Settings", request: Request, pipelines: str) -> str:
    """Return what an evaluation would do."""
    floor = ", the original twice more for its noise floor," * request.noise_floor
    return (
        f"would run {len(settings.prompts)} prompts of {settings.steps} steps through {pipelines}"
        f"{floor} and write {request.output}"
    )


def command_line() -> str:
    """Return what was typed."""
    return shlex.join(["quantkit", *sys.argv[1:]])


def _named(name: str, progress: "Progress") -> "Progress":
    return lambda step, done, total: progress(f"{name}: {step}", done, total)
