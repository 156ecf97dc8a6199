"""``quantkit run``: calibrate, sparsify, pack and evaluate with one recipe."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import evaluate, options
from quantkit.cli.console import print_json, progress_bar
from quantkit.cli.report_tables import print_report

if TYPE_CHECKING:
    from quantkit.eval.gates import Limits
    from quantkit.eval.result import Report
    from quantkit.recipe import Recipe


@click.command()
@click.argument("recipe", metavar="RECIPE")
@options.model
@options.output
@options.prompts
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="Prompts to evaluate on, from the end; default: all of FILE, or 16.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Denoising steps."
)
@click.option("--guidance", type=float, help="Guidance scale; default: the pipeline's own.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the evaluation."
)
@click.option(
    "--batch", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts at a time."
)
@evaluate.lpips_weights
@evaluate.clip
@evaluate.without
@options.device
@options.dry_run
@options.quiet
@options.as_json
@options.force
def run(**given: Any) -> None:
    """Calibrate, sparsify, pack and evaluate MODEL with RECIPE, a bundled name or a YAML file.

    Writes into the output folder: calibration.safetensors and masks.safetensors where the recipe
    asks for them, sensitivity.json and chosen.yaml where it has a budget, packed/ and report/. The
    gates are the recipe's; exits with 1 when one fails.
    """
    as_json = given.pop("as_json")
    result = run_recipe(**given, command=shlex.join(["quantkit", *sys.argv[1:]]))
    if result is None:
        return
    if as_json:
        from quantkit.eval.result import to_json

        print_json(to_json(result))
    else:
        print_report(result, given["output"] / "report")
    if not result.passed:
        sys.exit(1)


def run_recipe(
    recipe: str,
    model: str,
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
    device: str,
    dry_run: bool,
    quiet: bool,
    force: bool,
    command: str,
) -> "Report | None":
    """Do it all; None after a dry run.

    Raises:
        InputError: a recipe, model, prompts or networks that cannot be used, or an output that
            exists without ``force``.
    """
    from quantkit.calibration.running import choose_device, read_prompts
    from quantkit.eval.backbones import load_backbones
    from quantkit.eval.build import PACKED, build, needs_calibration, refuse_search
    from quantkit.eval.evaluation import evaluate as evaluate_pair
    from quantkit.eval.evaluation import open_pair, require_pipeline
    from quantkit.eval.generation import choose_prompts, make_settings
    from quantkit.eval.report import write_report
    from quantkit.files import refuse_existing
    from quantkit.recipefile import load_recipe

    refuse_existing(output, force=force)
    chosen = load_recipe(recipe)
    refuse_search(chosen)
    opened = require_pipeline(model)
    texts = choose_prompts(prompts, count, last=True)
    settings = make_settings(texts, steps=steps, guidance=guidance, seed=seed, batch=batch)
    if dry_run:
        click.echo(describe_run(chosen, output, calibrated=needs_calibration(chosen)))
        return None
    place = choose_device(device)
    # Before the long work: a missing network should not be found out after packing.
    backbones = load_backbones(lpips_weights, clip, without, device=place)
    with progress_bar(quiet=quiet) as progress:
        build(
            opened,
            chosen,
            output,
            prompts=read_prompts(prompts),
            device=device,
            threads=os.cpu_count() or 1,
            force=force,
            progress=progress,
        )
        result, pairs = evaluate_pair(
            open_pair(model, output / PACKED),
            settings,
            backbones=backbones,
            limits=limits_of(chosen),
            device=place,
            title=f"{Path(model).name} with recipe {chosen.name}",
            commands=(command,),
            progress=progress,
        )
        write_report(result, pairs, output / "report", force=force)
    return result


def limits_of(recipe: "Recipe") -> "Limits":
    """Return the recipe's gates, with the defaults where it has none."""
    from quantkit.eval.gates import Limits

    default, gates = Limits(), recipe.gates
    if gates is None:
        return default
    loss = gates.clip_loss
    return Limits(
        default.ssim if gates.ssim is None else gates.ssim,
        default.lpips if gates.lpips is None else gates.lpips,
        default.clip_fp8 if loss is None else loss,
        default.clip_sparse if loss is None else loss,
        default.clip_both if loss is None else loss,
    )


def describe_run(recipe: "Recipe", output: Path, *, calibrated: bool) -> str:
    """Return what a run would write."""
    files = ["calibration.safetensors"] * calibrated
    files += ["sensitivity.json", "chosen.yaml"] * (recipe.budget is not None)
    files += ["masks.safetensors"] * (recipe.sparsity is not None)
    files += ["packed/", "report/"]
    return f"recipe {recipe.name}: would write {', '.join(files)} into {output}"
