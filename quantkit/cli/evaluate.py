"""``quantkit eval``: what packing cost, in pictures and numbers."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import print_json, progress_bar
from quantkit.cli.report_tables import print_gates, print_metrics, print_report
from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.eval.comparison import Comparison
    from quantkit.eval.result import Report

lpips_weights = click.option(
    "--lpips-weights",
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="torchvision's AlexNet weights, or a folder with a feature network like the demo's; "
    "default: torchvision's cache, or a download.",
)
clip = click.option(
    "--clip",
    metavar="DIR|HUB-ID",
    help="The model of the CLIP score; default: openai/clip-vit-base-patch32.",
)
without = click.option(
    "--without",
    type=click.Choice(["lpips", "clip"]),
    multiple=True,
    help="Leave a metric out, as when its network cannot be had; its gate is then not judged.",
)


@click.group("eval")
def evaluate() -> None:
    """Measure what packing cost, in pictures and numbers."""


@evaluate.command("images")
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="A UTF-8 file with one prompt per picture, in the order of the names: adds CLIP score.",
)
@lpips_weights
@clip
@without
@click.option("--gate-ssim", type=float, help="Fail unless the mean SSIM is above this.")
@click.option("--gate-lpips", type=float, help="Fail unless the mean LPIPS is below this.")
@click.option("--gate-clip", type=float, help="Fail unless the CLIP score loss is below this (%).")
@options.device
@options.quiet
@options.as_json
def images(**given: Any) -> None:
    """Run the metrics on two folders: pictures of A are the original, equal names make a pair.

    Exits with 1 when a gate was given and fails.
    """
    from quantkit.eval.gates import Compression, Limits, judge, passed
    from quantkit.eval.result import comparison_json, gates_json

    _check_gates(given)
    comparison = compare_folders(**{
        key: value for key, value in given.items()
        if not key.startswith("gate_") and key != "as_json"
    })  # fmt: skip
    limits = Limits(given["gate_ssim"], given["gate_lpips"], clip_fp8=given["gate_clip"])
    gates = judge(comparison, limits, Compression.FP8)
    if given["as_json"]:
        values = comparison_json(comparison)
        print_json({"schema": "quantkit.images", "schema_version": 1, **values,
                    "gates": gates_json(gates)})  # fmt: skip
    else:
        print_metrics(f"{given['second']} against {given['first']}", comparison)
        print_gates(gates)
    if gates and not passed(gates):
        sys.exit(1)


def _check_gates(given: dict[str, Any]) -> None:
    """Refuse a gate on a metric that will not be measured: it would pass unseen."""
    for metric in ("lpips", "clip"):
        if given[f"gate_{metric}"] is not None and metric in given["without"]:
            raise InputError(
                f"--gate-{metric}: {metric} is left out by --without; drop one of both"
            )
    if given["gate_clip"] is not None and given["prompts"] is None:
        raise InputError("--gate-clip: CLIP score wants the prompts; pass --prompts FILE")


def compare_folders(
    first: Path,
    second: Path,
    *,
    prompts: Path | None = None,
    lpips_weights: Path | None = None,
    clip: str | None = None,
    without: tuple[str, ...] = (),
    device: str = "auto",
    quiet: bool = False,
) -> "Comparison":
    """Measure every pair of pictures with one name in two folders.

    Raises:
        InputError: pictures without a partner, of other sizes, or networks that cannot be had.
    """
    from quantkit.calibration.running import choose_device, read_prompts
    from quantkit.eval.backbones import load_backbones
    from quantkit.eval.comparison import compare
    from quantkit.eval.images import match_folders

    pairs = match_folders(first, second, None if prompts is None else read_prompts(prompts))
    left_out = without if prompts is not None else (*without, "clip")
    with progress_bar(quiet=quiet) as progress:
        backbones = load_backbones(lpips_weights, clip, left_out, device=choose_device(device))
        return compare(pairs, backbones, progress=progress)


@evaluate.command("report")
@options.model
@options.packed
@options.output
@options.prompts
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="Number of prompts; default: all of FILE, or 16 of the bundled set.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Denoising steps."
)
@click.option("--guidance", type=float, help="Guidance scale; default: the pipeline's own.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the first prompt; the next has the next.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts at a time."
)
@lpips_weights
@clip
@without
@click.option(
    "--gate-ssim", type=float, default=0.95, show_default=True, help="The mean must be above."
)
@click.option(
    "--gate-lpips", type=float, default=0.1, show_default=True, help="The mean must be below."
)
@click.option(
    "--gate-clip-fp8",
    type=float,
    default=1.0,
    show_default=True,
    help="CLIP score loss in % must be below, for FP8.",
)
@click.option(
    "--gate-clip-sparse", type=float, default=2.0, show_default=True, help="The same for 4:2."
)
@click.option(
    "--gate-clip-both", type=float, default=3.0, show_default=True, help="The same for both."
)
@options.device
@options.dry_run
@options.quiet
@options.as_json
@options.force
def report(**given: Any) -> None:
    """Run both pipelines on the same prompts and seeds, and write a report on the difference.

    Writes report.html, report.md, report.json and the pictures. Exits with 1 when a gate fails.
    """
    as_json = given.pop("as_json")
    result = evaluate_packed(**given, command=_command())
    if result is None:
        return
    if as_json:
        from quantkit.eval.result import to_json

        print_json(to_json(result))
    else:
        print_report(result, given["output"])
    if not result.passed:
        sys.exit(1)


def evaluate_packed(
    model: str,
    packed: Path,
    output: Path,
    *,
    prompts: Path | None,
    count: int | None,
    steps: int,
    guidance: float | None,
    seed: int,
    batch: int,
    lpips_weights: Path | None,
    clip: str | None,
    without: tuple[str, ...],
    gate_ssim: float,
    gate_lpips: float,
    gate_clip_fp8: float,
    gate_clip_sparse: float,
    gate_clip_both: float,
    device: str,
    dry_run: bool,
    quiet: bool,
    force: bool,
    command: str,
) -> "Report | None":
    """Generate, measure and write the report; None after a dry run.

    Raises:
        InputError: a model, a packed directory, prompts or networks that cannot be used.
    """
    from quantkit.calibration.running import choose_device
    from quantkit.eval.backbones import load_backbones
    from quantkit.eval.evaluation import evaluate, open_pair
    from quantkit.eval.gates import Limits
    from quantkit.eval.generation import choose_prompts, make_settings
    from quantkit.eval.report import write_report
    from quantkit.files import refuse_existing

    refuse_existing(output, force=force)
    pair = open_pair(model, packed)
    texts = choose_prompts(prompts, count, last=prompts is None)
    settings = make_settings(texts, steps=steps, guidance=guidance, seed=seed, batch=batch)
    if dry_run:
        click.echo(
            f"would run {len(settings.prompts)} prompts of {steps} steps through both pipelines "
            f"and write {output}"
        )
        return None
    place = choose_device(device)
    backbones = load_backbones(lpips_weights, clip, without, device=place)
    limits = Limits(gate_ssim, gate_lpips, gate_clip_fp8, gate_clip_sparse, gate_clip_both)
    with progress_bar(quiet=quiet) as progress:
        result, pairs = evaluate(
            pair,
            settings,
            backbones=backbones,
            limits=limits,
            device=place,
            commands=(command,),
            progress=progress,
        )
        write_report(result, pairs, output, force=force)
    return result


def _command() -> str:
    return shlex.join(["quantkit", *sys.argv[1:]])
