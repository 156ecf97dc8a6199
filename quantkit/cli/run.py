"""``quantkit run``: calibrate, sparsify, pack and evaluate with one recipe."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import evaluation_options, options
from quantkit.cli.console import echo, print_json, progress_bar
from quantkit.cli.hessian import plan_moments
from quantkit.cli.pack import told_forecast
from quantkit.cli.report import Request, command_line
from quantkit.cli.report_tables import print_report

if TYPE_CHECKING:
    from quantkit.eval.gates import Limits
    from quantkit.eval.result import Report
    from quantkit.models.source import Model
    from quantkit.recipe.schema import Recipe


@click.command()
@click.argument("recipe", metavar="RECIPE")
@options.model
@options.output
@evaluation_options.sampling
@options.device
@options.dry_run
@options.quiet
@options.as_json
@options.force
def run(recipe: str, model: str, as_json: bool, **given: Any) -> None:
    """Calibrate, sparsify, pack and evaluate MODEL with RECIPE, a bundled name or a YAML file.

    Writes into the output folder: calibration.safetensors, hessians/ and masks.safetensors where
    the recipe asks for them, sensitivity.json and chosen.yaml where it has a budget, packed/ and
    report/. The gates are the recipe's; exits with 1 when one fails.
    """
    request = Request(**given)
    result = run_recipe(recipe, model, request, command=command_line(), as_json=as_json)
    if result is None:
        return
    if as_json:
        from quantkit.eval.serialize import to_json

        print_json(to_json(result))
    else:
        print_report(result, request.output / "report")
    if not result.passed:
        sys.exit(1)


def run_recipe(
    recipe: str, model: str, request: Request, *, command: str, as_json: bool = False
) -> "Report | None":
    """Do it all; None after a dry run, which prints the plan.

    Raises:
        InputError: a recipe, model, prompts or networks that cannot be used, or an output that
            exists without ``force``.
    """
    from quantkit.eval.build import PACKED, build, refuse_search
    from quantkit.eval.evaluation import evaluate, open_pair, require_pipeline
    from quantkit.eval.report import write_report
    from quantkit.models.chosen import refuse_unmatched
    from quantkit.pipelines.running import read_prompts
    from quantkit.recipe.load import load_recipe
    from quantkit.storage.files import write_or_keep

    output, chosen = request.output, load_recipe(recipe)
    refuse_search(chosen)
    opened = require_pipeline(model)
    refuse_unmatched(chosen, recipe, opened)
    _check_outputs(output, chosen, opened, force=request.force)
    settings = request.settings(last=True)
    if request.dry_run:
        _print_plan(opened, chosen, output, as_json=as_json)
        return None
    # Before the long work: a missing network should not be found out after packing.
    backbones = request.backbones()
    with progress_bar(quiet=request.quiet) as progress:
        build(
            opened,
            chosen,
            output,
            prompts=read_prompts(request.prompts),
            device=request.device,
            threads=os.cpu_count() or 1,
            force=request.force,
            progress=progress,
        )
        baseline = request.baseline(opened, settings, backbones, progress)
        result, pairs = evaluate(
            open_pair(model, output / PACKED),
            baseline,
            limits=limits_of(chosen),
            title=f"{Path(model).name} with recipe {chosen.name}",
            commands=(command,),
            progress=progress,
        )
    write_or_keep(partial(write_report, result, pairs, force=request.force), output / "report")
    return result


def _check_outputs(output: Path, recipe: "Recipe", model: "Model", *, force: bool) -> None:
    """Refuse what could not be written, before the long work.

    Raises:
        OutputError: the folder exists without ``force``; or, with it, holds what is not replaced.
    """
    from quantkit.calibration import hessian
    from quantkit.eval import report
    from quantkit.packing import pack as pipeline
    from quantkit.storage.places import check_directory, check_file, refuse_overlap

    refuse_overlap(output, model.path)
    if not force:
        check_directory(output, kind="run", force=False)
    kinds = {"packed/": pipeline.KIND, "report/": report.KIND, "hessians/": hessian.KIND}
    for name in files_of(recipe):
        if name in kinds:
            # Second moments that are there are gone on with.
            if name != "hessians/" or not (output / name).exists():
                check_directory(output / name, kind=kinds[name], force=force)
        else:
            check_file(output / name, force=force)


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


def files_of(recipe: "Recipe") -> tuple[str, ...]:
    """Return what a run writes."""
    files = ["calibration.safetensors"] * recipe.needs_calibration
    files += ["hessians/"] * recipe.needs_hessians
    files += ["sensitivity.json", "chosen.yaml"] * (recipe.budget is not None)
    files += ["masks.safetensors"] * (recipe.sparsity is not None)
    return (*files, "packed/", "report/")


def _print_plan(model: "Model", recipe: "Recipe", output: Path, *, as_json: bool) -> None:
    """Print what a run would write; sizes are not known where a budget chooses the treatments."""
    from quantkit.eval.build import HESSIAN_MEMORY, PACKED
    from quantkit.packing.dry_run import forecast_pack, forecast_to_json

    values: dict[str, Any] = {"written": False, "files": files_of(recipe)}
    lines = [f"recipe {recipe.name}: would write {', '.join(files_of(recipe))} into {output}"]
    if recipe.needs_calibration or recipe.needs_hessians:
        settings = recipe.calibration
        values["calibration"] = settings.model_dump(mode="json")
        lines.append(f"calibration: {settings.prompts} prompts, {settings.steps} steps")
    if recipe.needs_hessians:
        values["hessians"] = plan_moments(model, recipe, HESSIAN_MEMORY)["components"]
        lines += [
            f"second moments: {len(entry['layers'])} layers, {entry['bytes']:,} bytes, "
            f"{entry['groups']} runs of the prompts"
            for entry in values["hessians"].values()
        ]
    if recipe.budget is None:
        forecast = forecast_pack(model, recipe, output / PACKED, missing=())
        values["packed"] = forecast_to_json(forecast)
        lines += told_forecast(forecast)
    if as_json:
        print_json(values)
    else:
        echo(*lines)
