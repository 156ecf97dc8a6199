"""``quantkit calibrate hessian``: store the second moments of what layers read."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import print_json, print_table, progress_bar

if TYPE_CHECKING:
    from quantkit.models.source import Model
    from quantkit.recipe.schema import Recipe


@click.command("hessian")
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
@click.option(
    "--weighting",
    type=click.Choice(["uniform", "schedule"]),
    help="What a timestep counts: all the same, or its effect on the final sample. Default: the "
    "recipe's.",
)
@click.option(
    "--row-share",
    type=options.FiniteRange(min=0, max=1, min_open=True),
    help="Of the rows of each call, drawn at random: a quarter of the rows of four times the "
    "prompts costs about the same and says more. Default: the recipe's.",
)
@click.option(
    "--memory",
    type=options.FiniteRange(min=0, min_open=True),
    default=4.0,
    show_default=True,
    metavar="GIB",
    help="What the matrices of one run may take; the prompts run as often as needed.",
)
@options.device
@options.force
@options.dry_run
@options.quiet
@options.as_json
def hessian(
    model: str,
    recipe: str,
    output: Path,
    prompts: Path | None,
    count: int | None,
    memory: float,
    device: str,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **run: Any,
) -> None:
    """Run MODEL, a pipeline, on prompts and store E[x x^T] and E[x] of what its layers read.

    SparseGPT masks and GPTQ rounding are computed from them. OUTPUT is a directory with a file per
    layer; a run that was killed goes on where it stopped when it is started again.
    """
    take_hessians(
        model,
        recipe,
        output,
        prompts=prompts,
        count=count,
        run={name: value for name, value in run.items() if value is not None},
        memory=memory,
        device=device,
        force=force,
        dry_run=dry_run,
        quiet=quiet,
        as_json=as_json,
    )


def take_hessians(
    model: str,
    recipe: str,
    output: Path,
    *,
    prompts: Path | None,
    count: int | None,
    run: dict[str, Any],
    memory: float,
    device: str,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Take the second moments and print what was stored.

    Args:
        model: pipeline directory or hub id.
        recipe: a bundled name or a YAML file.
        output: the directory to make, or to go on with.
        prompts: a file of prompts; None: the bundled set.
        count: how many of them; None: all of a file, the recipe's number of the bundled set.
        run: settings of the recipe's calibration section to replace.
        memory: GiB that the matrices of one run may take.
        device: auto, cpu or cuda[:N].
        force: begin again where a directory of hessians exists.
        dry_run: say what would be observed, and write nothing.
        quiet: no progress.
        as_json: print JSON.
    """
    from quantkit.models.chosen import open_for
    from quantkit.pipelines.running import read_prompts

    texts = read_prompts(prompts)
    if count or prompts:
        run = {**run, "prompts": count or len(texts)}
    source, chosen = open_for(model, recipe)
    chosen = chosen.with_calibration(run)
    result = plan_moments(source, chosen, memory * 2**30)
    if not dry_run:
        from quantkit.calibration.collect_hessians import collect_hessians

        _check_output(output, source, result, force=force)
        with progress_bar(quiet=quiet) as progress:
            collect_hessians(
                source,
                chosen,
                texts,
                output,
                memory=memory * 2**30,
                device=device,
                progress=progress,
                force=force,
            )
        result["written"] = str(output)
    if as_json:
        print_json(result)
    else:
        _print(result, "nothing written" if dry_run else f"written to {output}")


def _check_output(output: Path, source: "Model", planned: dict[str, Any], *, force: bool) -> None:
    """Refuse a directory that could not be written, before anything is hashed or run."""
    from quantkit.calibration.hessian import KIND
    from quantkit.storage.places import check_directory, check_room, refuse_overlap

    refuse_overlap(output, source.path)
    # One that is there may be gone on with, which what it holds decides.
    if force or not output.exists():
        check_directory(output, kind=KIND, force=force)
        check_room(output, sum(entry["bytes"] for entry in planned["components"].values()))


def plan_moments(source: "Model", recipe: "Recipe", memory: float) -> dict[str, Any]:
    """Return what would be observed, its bytes, and how often the prompts would run.

    Args:
        source: of which headers are read.
        recipe: what is packed, and how the pipeline is run.
        memory: bytes that the matrices of one run may take.

    Raises:
        RecipeError: one layer alone does not fit.
    """
    from quantkit.calibration.collect import observed_layers
    from quantkit.calibration.heldout import held_bytes, held_count
    from quantkit.calibration.moments import group_layers, moment_bytes

    held = held_count(recipe.calibration.prompts) > 0
    observed = {c.name: observed_layers(c, recipe) for c in source.components}
    return {
        "written": None,
        "weighting": recipe.calibration.weighting,
        "components": {
            name: {
                "layers": [layer.name for layer in layers],
                "groups": len(group_layers(layers, memory)),
                "bytes": sum(moment_bytes(x) + held * held_bytes(x.k) for x in layers),
            }
            for name, layers in observed.items()
        },
    }


def _print(result: dict[str, Any], where: str) -> None:
    rows = [
        (name, len(entry["layers"]), f"{entry['bytes']:,}", entry["groups"])
        for name, entry in result["components"].items()
    ]
    title = f"Second moments, {result['weighting']} weighting ({where})"
    print_table(title, ("component", "layers", "bytes", "runs of the prompts"), rows)
