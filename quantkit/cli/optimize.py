"""``quantkit calibrate optimize``: a treatment per layer within a budget, as a recipe."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from quantkit.eval.generation import Settings
    from quantkit.recipe.goals import BudgetRecipe
    from quantkit.recipe.schema import Recipe
    from quantkit.sensitivity.choosing import Chosen
    from quantkit.sensitivity.result import Sensitivity


@click.command("optimize")
@click.argument("sensitivity", metavar="SENSITIVITY", type=options.PATH)
@options.recipe
@click.option(
    "--bytes",
    "size",
    type=options.FiniteRange(min=0, min_open=True),
    help="Largest packed size, as a share of the source's.",
)
@click.option(
    "--error",
    type=options.FiniteRange(min=0, min_open=True),
    help="Largest predicted relative error (NMSE) of the final latents.",
)
@click.option("--speed", type=options.FiniteRange(min=1), help="Least modelled speed-up.")
@click.option(
    "--ssim",
    type=options.FiniteRange(min=0, max=1, min_open=True),
    help="Least mean SSIM of pictures, which are made: wants --model and --calibration.",
)
@click.option(
    "--treatments",
    multiple=True,
    metavar="GLOB",
    help="Choose among these besides 16-bit, as 'e4m3fn-*'; repeatable. Default: the recipe's.",
)
@options.output
@click.option("--model", metavar="MODEL", help="With --ssim: the pipeline.")
@options.calibration
@options.hessians
@options.prompts
@click.option(
    "--count", type=options.COUNT, default=8, show_default=True, help="Pictures of a trial."
)
@click.option("--steps", type=options.STEPS, help="Denoising steps; default: the recipe's.")
@click.option("--guidance", type=options.NUMBER, help="Guidance scale; default: the recipe's.")
@click.option("--seed", type=options.SEED, help="Of the first picture's noise.")
@click.option("--batch", type=options.COUNT, help="Pictures at a time.")
@options.device
@options.force
@options.quiet
@options.as_json
def optimize(
    sensitivity: Path,
    recipe: str,
    output: Path,
    size: float | None,
    error: float | None,
    speed: float | None,
    ssim: float | None,
    treatments: tuple[str, ...],
    force: bool,
    as_json: bool,
    **pictures: Any,
) -> None:
    """Choose a treatment for every layer of SENSITIVITY within one budget.

    Writes a recipe that 'quantkit sparsify' and 'quantkit pack' take as any other, with the reason
    beside every layer. Without an option the recipe's budget section holds. The model is not needed
    but for --ssim, which bisects on the predicted error and makes pictures for every trial.
    """
    goals = {"bytes": size, "error": error, "speed": speed, "ssim": ssim}
    result = choose(
        sensitivity,
        recipe,
        output,
        goals={name: value for name, value in goals.items() if value is not None},
        treatments=treatments,
        pictures=pictures,
        force=force,
    )
    if as_json:
        print_json(result)
    else:
        _print(result)


def choose(
    path: Path,
    recipe: str,
    output: Path,
    *,
    goals: dict[str, float],
    treatments: tuple[str, ...],
    pictures: dict[str, Any],
    force: bool,
) -> dict[str, Any]:
    """Choose, write the recipe and return what was chosen as JSON values.

    Args:
        path: of the sensitivity.
        recipe: a bundled name or a YAML file.
        output: the recipe to write.
        goals: of the budget, in place of the recipe's.
        treatments: globs of those allowed; empty: the recipe's.
        pictures: of --ssim: model, calibration, hessians, prompts, count, device, quiet, and
            settings of the calibration section to replace.
        force: replace an existing file.

    Raises:
        ArtefactError: not a sensitivity.
        RecipeError: no budget, or one that cannot be met.
    """
    from quantkit.recipe.load import load_recipe
    from quantkit.sensitivity import choosing
    from quantkit.sensitivity.result import load_sensitivity
    from quantkit.sensitivity.writing import save_recipe
    from quantkit.storage.files import write_or_keep
    from quantkit.storage.places import check_file

    check_file(output, force=force)
    base, measured = load_recipe(recipe), load_sensitivity(path)
    budget = _budget(base, goals, treatments)
    trials: list[dict[str, float]] = []
    if budget.ssim is None:
        chosen = choosing.choose(measured, base, budget)
    else:
        chosen, trials = _search(measured, base, budget, pictures)
    write_or_keep(partial(save_recipe, chosen.recipe, chosen.remarks, force=force), output)
    return {"written": str(output), "trials": trials, **choosing.to_json(chosen)}


def _budget(
    recipe: "Recipe", goals: dict[str, float], treatments: tuple[str, ...]
) -> "BudgetRecipe":
    from quantkit.errors import RecipeError
    from quantkit.recipe.fields import section_of
    from quantkit.recipe.goals import GOALS, BudgetRecipe

    given = BudgetRecipe() if recipe.budget is None else recipe.budget
    values = {**given.model_dump(), **({"treatments": treatments} if treatments else {})}
    if goals:
        values |= {name: goals.get(name) for name in GOALS}
    budget = section_of(BudgetRecipe, values)
    if not budget.goals:
        raise RecipeError(
            f"recipe {recipe.name}: no budget; pass --bytes, --error, --speed or --ssim, or give "
            "the recipe a budget section"
        )
    return budget


def _search(
    measured: "Sensitivity", base: "Recipe", budget: "BudgetRecipe", pictures: dict[str, Any]
) -> "tuple[Chosen, list[dict[str, float]]]":
    """Return the choice whose pictures keep the SSIM, and the trials on the way."""
    from quantkit.calibration.hessian import load_hessians
    from quantkit.calibration.statistics import load_calibration
    from quantkit.errors import InputError
    from quantkit.eval.search import search_ssim
    from quantkit.models.source import open_model
    from quantkit.pipelines.running import choose_device
    from quantkit.sensitivity.budget import make_problems
    from quantkit.sensitivity.choosing import describe
    from quantkit.sensitivity.subject import Subject
    from quantkit.sparsity.surgery import Surgeon

    model, calibration = pictures["model"], pictures["calibration"]
    if model is None or calibration is None:
        raise InputError("--ssim makes pictures: pass --model and --calibration too")
    assert budget.ssim is not None
    device, hessians = choose_device(pictures["device"]), pictures["hessians"]
    surgeon = None if hessians is None else Surgeon(load_hessians(hessians), device)
    subject = Subject.of(open_model(model), measured.recipe, load_calibration(calibration), surgeon)
    subject.refuse_others(measured)
    with progress_bar(quiet=pictures["quiet"]) as progress:
        found = search_ssim(
            subject,
            make_problems(measured, base, budget.treatments),
            _settings(measured, pictures),
            least=budget.ssim,
            device=device,
            progress=progress,
        )
    remark = f", SSIM {found.best.ssim:.4f} on the {pictures['count']} pictures of the search"
    trials = [
        {"error": t.choice.error, "size": t.choice.size, "ssim": t.ssim} for t in found.trials
    ]
    return describe(measured, base, budget, found.best.choice, remark=remark), trials


def _settings(measured: "Sensitivity", pictures: dict[str, Any]) -> "Settings":
    from quantkit.eval.generation import choose_prompts, make_settings
    from quantkit.pipelines.running import choose_device

    names = ("steps", "guidance", "seed", "batch")
    run = {name: pictures[name] for name in names if pictures[name] is not None}
    section = measured.recipe.with_calibration(run).calibration
    return make_settings(
        choose_prompts(
            pictures["prompts"],
            pictures["count"],
            device=choose_device(pictures["device"]),
            last=True,
        ),
        steps=section.steps,
        guidance=section.guidance,
        seed=section.seed,
        batch=section.batch,
    )


def _print(result: dict[str, Any]) -> None:
    counts: dict[str, list[float]] = {}
    for layer in result["layers"]:
        counts.setdefault(layer["treatment"], []).append(layer["loss"])
    rows = [(name, len(losses), float(sum(losses))) for name, losses in sorted(counts.items())]
    if result["trials"]:
        trials = [(t["error"], t["size"], t["ssim"]) for t in result["trials"]]
        print_table("Trials", ("predicted error", "bytes", "SSIM"), trials)
    print_table(str(result["written"]), ("treatment", "layers", "predicted error"), rows)
    echo(result["summary"])
