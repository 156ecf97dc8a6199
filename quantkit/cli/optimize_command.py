"""``quantkit calibrate optimize``: a treatment per layer within a budget, as a recipe."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from quantkit.workflow.optimize import Optimized


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
    help="Least mean SSIM of pictures, which are made for it; needs --model and --calibration.",
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
    "--count", type=options.COUNT, default=8, show_default=True, help="Pictures per trial."
)
@click.option("--steps", type=options.STEPS, help="Denoising steps; default: the recipe's.")
@click.option("--guidance", type=options.NUMBER, help="Guidance scale; default: the recipe's.")
@click.option("--seed", type=options.SEED, help="Seed of the first picture's noise.")
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
    model: str | None,
    calibration: Path | None,
    hessians: Path | None,
    prompts: Path | None,
    count: int,
    steps: int | None,
    guidance: float | None,
    seed: int | None,
    batch: int | None,
    device: str,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Choose a treatment for every layer of SENSITIVITY within one budget.

    Writes a recipe for 'quantkit sparsify' and 'quantkit pack', with the reason beside every layer.
    Without an option the recipe's budget section is used. Only --ssim needs the model: it bisects
    on the predicted error and makes pictures for every trial.
    """
    from quantkit.workflow.arguments import Sampling
    from quantkit.workflow.optimize import Budget, Pictures, optimize

    pictures = None
    if model is not None and calibration is not None:
        sampling = Sampling(count, steps, guidance, seed, batch)
        pictures = Pictures(model, calibration, hessians, prompts, sampling, device)
    with progress_bar(quiet=quiet) as progress:
        found = optimize(
            sensitivity,
            recipe=recipe,
            output=output,
            budget=Budget(size, error, speed, ssim, treatments),
            pictures=pictures,
            force=force,
            progress=progress,
        )
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)


def _print(found: "Optimized") -> None:
    losses: dict[str, list[float]] = {}
    for candidate in found.chosen.assignment.chosen:
        losses.setdefault(candidate.treatment, []).append(candidate.loss)
    rows = [(name, len(each), float(sum(each))) for name, each in sorted(losses.items())]
    if found.trials:
        trials = [(t.assignment.error, t.assignment.size, t.ssim) for t in found.trials]
        print_table("Trials", ("predicted error", "bytes", "SSIM"), trials)
    print_table("Chosen", ("treatment", "layers", "predicted error"), rows)
    echo(f"{found.output}: {found.chosen.summary}")
