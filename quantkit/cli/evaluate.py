"""``quantkit eval``: what packing cost, in pictures and numbers."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import evaluation_options, options, report
from quantkit.cli.console import print_json, progress_bar
from quantkit.cli.report_tables import print_gates, print_metrics
from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.eval.comparison import Comparison


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
@options.device
@options.quiet
@options.as_json
def images(**given: Any) -> None:
    """Run the metrics on two folders: pictures of A are the original, equal names make a pair.

    Exits with 1 when a gate was given and fails.
    """
    from quantkit.eval.gates import Compression, Limits, judge, passed
    from quantkit.eval.serialize import comparison_json, gates_json

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
    from quantkit.eval.backbones import load_backbones
    from quantkit.eval.comparison import compare
    from quantkit.eval.images import match_folders
    from quantkit.pipelines.running import choose_device, read_prompts

    pairs = match_folders(first, second, None if prompts is None else read_prompts(prompts))
    left_out = without if prompts is not None else (*without, "clip")
    with progress_bar(quiet=quiet) as progress:
        backbones = load_backbones(lpips_weights, clip, left_out, device=choose_device(device))
        return compare(pairs, backbones, progress=progress)


evaluate.add_command(report.report)
evaluate.add_command(report.compare)
