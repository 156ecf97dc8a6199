"""``quantkit calibrate``: run a pipeline on prompts and store what its layers read, and merge."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.calibration.collect import Run
    from quantkit.calibration.statistics import Calibration
    from quantkit.pipelines.processes import Processes


@click.group()
def calibrate() -> None:
    """Take the statistics that static scales, smoothing and Wanda masks are chosen from."""


@calibrate.command("model")
@options.model
@options.recipe
@options.output
@options.prompts
@click.option(
    "--count",
    type=options.COUNT,
    help="Use the first so many prompts; default: all of --prompts, or the recipe's number.",
)
@click.option("--steps", type=options.STEPS, help="Denoising steps; default: the recipe's.")
@click.option("--guidance", type=options.NUMBER, help="Guidance scale; default: the recipe's.")
@click.option("--seed", type=options.SEED, help="Of the first prompt's noise.")
@click.option("--batch", type=options.COUNT, help="Prompts denoised at a time.")
@click.option("--resume", is_flag=True, help="Go on with a run that was killed.")
@options.device
@options.force
@options.dry_run
@options.quiet
@options.as_json
def model_command(
    model: str,
    recipe: str,
    output: Path,
    prompts: Path | None,
    count: int | None,
    resume: bool,
    device: str,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **run: Any,
) -> None:
    """Run MODEL, a pipeline, on prompts and store statistics of what its layers read.

    They are kept per layer and timestep bucket: amax, a histogram, a sample of rows, and per
    channel amax, mean and mean square. Scales and masks are chosen from them later, without running
    the model again. Started by torchrun or accelerate, all processes share the prompts.
    """
    calibrate_model(
        model,
        recipe,
        output,
        prompts=prompts,
        count=count,
        run={name: value for name, value in run.items() if value is not None},
        resume=resume,
        device=device,
        force=force,
        dry_run=dry_run,
        quiet=quiet,
        as_json=as_json,
    )


def calibrate_model(
    model: str,
    recipe: str,
    output: Path,
    *,
    prompts: Path | None,
    count: int | None,
    run: dict[str, Any],
    resume: bool,
    device: str,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Calibrate, write the file and print what is in it.

    Args:
        model: pipeline directory or hub id.
        recipe: a bundled name or a YAML file.
        output: the file to write.
        prompts: a file of prompts; None: the bundled set.
        count: how many of them; None: all of a file, the recipe's number of the bundled set.
        run: settings of the recipe's calibration section to replace.
        resume: go on with what a run that was killed had kept beside the output.
        device: auto, cpu or cuda[:N].
        force: replace an existing file.
        dry_run: say what would be observed, and write nothing.
        quiet: no progress.
        as_json: print JSON.
    """
    from quantkit.pipelines.processes import joined
    from quantkit.storage.places import check_file, refuse_overlap

    result: dict[str, Any] | None = None
    with joined() as processes:
        with processes.together():
            chosen = _opened(model, recipe, prompts, count, run, device)
            check_file(output, force=force)
            refuse_overlap(output, chosen.model.path)
        if not dry_run:
            result = _made(chosen, output, processes, resume=resume, quiet=quiet, force=force)
        elif processes.is_first:
            result = _planned(chosen)
    if result is None:
        return
    if as_json:
        print_json(result)
    else:
        _print(result, f"{model}: would observe" if dry_run else str(output))


def _opened(
    model: str,
    recipe: str,
    prompts: Path | None,
    count: int | None,
    run: dict[str, Any],
    device: str,
) -> "Run":
    from quantkit.calibration.collect import Run
    from quantkit.models.chosen import open_for
    from quantkit.pipelines.running import choose_device, read_prompts, refuse_component

    texts = read_prompts(prompts)
    if count or prompts:
        run = {**run, "prompts": count or len(texts)}
    source, chosen = open_for(model, recipe)
    chosen = chosen.with_calibration(run)
    # What loading would refuse, after minutes of hashing.
    refuse_component(source)
    choose_device(device)
    return Run(source, chosen, texts, device)


def _made(
    run: "Run", output: Path, processes: "Processes", *, resume: bool, quiet: bool, force: bool
) -> dict[str, Any] | None:
    """Calibrate and write; what the first process prints, None in the others."""
    from quantkit.calibration.collect import calibrate_share
    from quantkit.calibration.statistics import save_calibration
    from quantkit.storage.files import write_or_keep

    with progress_bar(quiet=quiet or not processes.is_first) as progress:
        calibration, kept = calibrate_share(
            run,
            output,
            processes=processes,
            resume=resume,
            progress=progress,
            note=lambda text: echo(text, err=True),
        )
    with processes.together():
        if calibration is not None:
            write_or_keep(partial(save_calibration, calibration, force=force), output)
    kept.discard()
    return None if calibration is None else _described(calibration, output)


@calibrate.command("merge")
@click.argument("calibrations", nargs=-1, required=True, type=options.PATH)
@options.output
@options.force
@options.as_json
def merge_command(calibrations: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Merge CALIBRATIONS of one model into what one run over all their prompts would store.

    They must have the same layers, timestep buckets, steps and guidance, and be given in the order
    of their prompts. Prompt i starts from the seed plus i: pass each part a --seed of its own.
    """
    merge_calibrations(calibrations, output, force=force, as_json=as_json)


def merge_calibrations(
    calibrations: "Sequence[Path]", output: Path, *, force: bool, as_json: bool
) -> None:
    """Merge, write the file and print what is in it.

    Args:
        calibrations: two files or more.
        output: the file to write.
        force: replace an existing file.
        as_json: print JSON.

    Raises:
        ArtefactError: fewer than two, or files that do not belong together.
    """
    from quantkit.calibration.merge import merge
    from quantkit.calibration.statistics import load_calibration, save_calibration
    from quantkit.errors import ArtefactError
    from quantkit.storage.places import check_file

    check_file(output, force=force)
    parts = {str(path): path for path in calibrations}
    if len(calibrations) < 2 or len(parts) < len(calibrations):
        raise ArtefactError(
            f"merge: {len(calibrations)} files, {len(parts)} of them different, wanted two or more "
            "different ones; give each run once"
        )
    merged = merge({name: load_calibration(path) for name, path in parts.items()})
    save_calibration(merged, output, force=force)
    result = _described(merged, output)
    if as_json:
        print_json(result)
    else:
        _print(result, str(output))


def _planned(run: "Run") -> dict[str, Any]:
    return {
        "written": None,
        "prompts": len(run.prompts),
        "steps": run.settings.steps,
        "buckets": run.settings.buckets,
        "edges": None,
        "components": {
            name: {"layers": [layer.name for layer in layers]}
            for name, layers in run.layers.items()
        },
    }


def _described(calibration: "Calibration", output: Path) -> dict[str, Any]:
    about = calibration.metadata
    return {
        "written": str(output),
        "prompts": about.prompts,
        "steps": about.steps,
        "buckets": len(calibration.edges) + 1,
        "edges": list(calibration.edges),
        "components": {
            name: {
                "calls": about.calls[name],
                "layers": {layer: stats.amax.tolist() for layer, stats in layers.items()},
            }
            for name, layers in calibration.layers.items()
        },
    }


def _print(result: dict[str, Any], title: str) -> None:
    rows = [
        (name, len(entry["layers"]), result["prompts"], result["steps"], result["buckets"])
        for name, entry in result["components"].items()
    ]
    print_table(title, ("component", "layers", "prompts", "steps", "buckets"), rows)
