"""``quantkit pack``: write the packed checkpoint of a model."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from quantkit.packing.dry_run import Forecast
    from quantkit.packing.pack import PackSummary

#: Beyond this, the disk and the memory bus are busy, and each thread costs 10 MB of buffers.
MOST_THREADS = 8


@click.command()
@options.model
@options.recipe
@options.calibration
@options.hessians
@click.option(
    "--masks",
    type=options.PATH,
    help="Masks written by 'quantkit sparsify'; default: chosen here, as the recipe says.",
)
@options.output
@click.option(
    "--threads",
    type=options.THREADS,
    help=f"Tensors in work at once; default: the cores, at most {MOST_THREADS}. The bytes are "
    "the same for any number.",
)
@options.force
@options.dry_run
@options.quiet
@options.as_json
def pack(
    model: str,
    recipe: str,
    calibration: Path | None,
    hessians: Path | None,
    masks: Path | None,
    output: Path,
    threads: int | None,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Pack MODEL: a pipeline directory, a component directory (as its unet) or a hub id.

    Linear and Conv2d weights of the denoiser become FP8 codes, 2:4 sparse where the recipe says
    so; everything else is copied byte for byte. Without --calibration, weights are scaled from
    the weights alone and activations per token. Memory stays small whatever the model's size.

    With --dry-run, a calibration or second moments that the recipe needs may still be missing.
    """
    pack_model(
        model,
        recipe,
        output,
        calibration=calibration,
        hessians=hessians,
        masks=masks,
        threads=threads or min(len(os.sched_getaffinity(0)), MOST_THREADS),
        force=force,
        dry_run=dry_run,
        quiet=quiet,
        as_json=as_json,
    )


def pack_model(
    model: str,
    recipe: str,
    output: Path,
    *,
    calibration: Path | None,
    hessians: Path | None = None,
    masks: Path | None,
    threads: int,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write the packed directory and print what became of every layer.

    Args:
        model: pipeline directory, component directory or hub id.
        recipe: a bundled name or a YAML file.
        output: the directory to make.
        calibration: statistics of the same model.
        hessians: second moments of the same model.
        masks: masks of the same model.
        threads: tensors in work at once.
        force: replace an existing output.
        dry_run: plan and print, but write nothing.
        quiet: no progress.
        as_json: print JSON.
    """
    from quantkit.calibration.hessian import load_hessians
    from quantkit.calibration.statistics import load_calibration
    from quantkit.models.chosen import open_for
    from quantkit.packing import dry_run as forecast
    from quantkit.packing import pack as pipeline
    from quantkit.sparsity.maskfile import load_masks
    from quantkit.storage.places import check_directory, refuse_overlap

    source, chosen = open_for(model, recipe)
    refuse_overlap(output, source.path)
    check_directory(output, kind=pipeline.KIND, force=force)
    statistics = load_calibration(calibration) if calibration else None
    moments = load_hessians(hessians) if hessians else None
    stored = load_masks(masks) if masks else None
    missing = forecast.missing_artefacts(
        chosen, calibration=statistics, masks=stored, hessians=moments
    )
    if dry_run and missing:
        plan = forecast.forecast_pack(source, chosen, output, missing=missing, masks=stored)
        _tell(plan, as_json=as_json)
        return
    with progress_bar(quiet=quiet) as progress:
        if dry_run:
            planned = pipeline.plan_pack(
                source,
                chosen,
                calibration=statistics,
                masks=stored,
                hessians=moments,
                progress=progress,
            )
            summary = pipeline.summarize(planned, output)
        else:
            summary = pipeline.pack(
                source,
                chosen,
                output,
                calibration=statistics,
                masks=stored,
                hessians=moments,
                threads=threads,
                force=force,
                progress=progress,
            )
    if as_json:
        print_json({"written": not dry_run, **pipeline.to_json(summary)})
    else:
        _print(summary, "nothing written" if dry_run else f"written to {output}")


def _tell(forecast: "Forecast", *, as_json: bool) -> None:
    """Print what would be packed if the artefacts that the recipe needs were there."""
    from quantkit.packing.dry_run import forecast_to_json

    if as_json:
        print_json({"written": False, **forecast_to_json(forecast)})
        return
    _print(forecast.summary, "nothing written")
    echo(*told_forecast(forecast))
    echo(f"Not given, planned as if it were: {', '.join(forecast.missing)}")


def told_forecast(forecast: "Forecast") -> list[str]:
    """Return a forecast in lines: layers and bytes, and those with all masks of an error budget."""
    from quantkit.packing.dry_run import masked_layers

    summary, sparsest = forecast.summary, forecast.sparsest
    packed = sum(summary.by_scheme().values())
    kept = len(summary.layers) - packed
    counts = f"{packed} layers packed, {masked_layers(summary)} of them sparse, {kept} kept"
    lines = [f"{counts} in 16 bit: {_sizes(summary.bytes_before, summary.bytes_after)}"]
    if sparsest is not None:
        sizes = _sizes(sparsest.bytes_before, sparsest.bytes_after)
        lines.append(f"with all {masked_layers(sparsest)} layers masked that may be: {sizes}")
    return lines


def _print(summary: "PackSummary", where: str) -> None:
    rows = [
        (
            scheme.weight.name,
            str(scheme.granularity),
            "dense" if scheme.sparsity is None else str(scheme.sparsity),
            scheme.activation.value,
            count,
        )
        for scheme, count in summary.by_scheme().items()
    ]
    columns = ("weight", "scale per", "sparsity", "activation", "layers")
    print_table("Packed", columns, rows)
    _print_reasons("Kept in 16 bit", summary.kept())
    _print_reasons("Dense", summary.dense())
    if summary.by_alpha():
        alphas = [(a, len(names), _some(names)) for a, names in summary.by_alpha().items()]
        print_table("Smoothed", ("alpha", "layers", "which"), alphas)
    if uncorrected := summary.uncorrected():
        echo(f"Without a bias to correct: {len(uncorrected)} layers, {_some(uncorrected)}")
    if summary.left_out:
        echo(f"Left out (other weights): {', '.join(map(str, summary.left_out))}")
    for component in summary.components:
        name = component.name or component.class_name
        echo(f"{name}: {_sizes(component.bytes_before, component.bytes_after)}")
    if summary.copied_files:
        echo(f"copied: {summary.copied_files} files, {summary.copied_bytes:,} bytes")
    echo(f"total: {_sizes(summary.bytes_before, summary.bytes_after)}, {where}")


def _print_reasons(title: str, reasons: dict[str, list[str]]) -> None:
    if reasons:
        rows = [(reason, len(names), _some(names)) for reason, names in reasons.items()]
        print_table(title, ("why", "layers", "which"), rows)


def _some(names: list[str]) -> str:
    """Return the first names; a long list is in --json."""
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def _sizes(before: int, after: int) -> str:
    return f"{before:,} -> {after:,} bytes ({after / before:.1%})"
