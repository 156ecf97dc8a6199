"""``quantkit calibrate hessian``: store the second moments of what layers read."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from quantkit.workflow.hessians import MomentPlan, TakenMoments


@click.command("hessian")
@options.model
@options.recipe
@click.option(
    "--text-encoders",
    type=click.Choice(["int8-gptq", "int4-gptq"]),
    help="Observe the text encoders, too, for packing them alike; default: as the recipe says.",
)
@options.output
@options.prompts
@click.option(
    "--count",
    type=options.COUNT,
    help="Use the first so many prompts; default: all of --prompts, or the recipe's number.",
)
@click.option("--steps", type=options.STEPS, help="Denoising steps; default: the recipe's.")
@click.option("--guidance", type=options.NUMBER, help="Guidance scale; default: the recipe's.")
@click.option("--seed", type=options.SEED, help="Seed of the first prompt's noise.")
@click.option("--batch", type=options.COUNT, help="Prompts denoised at a time.")
@click.option(
    "--weighting",
    type=click.Choice(["uniform", "schedule"]),
    help="The weight of a timestep: the same for all, or by its effect on the final sample. "
    "Default: the recipe's.",
)
@click.option(
    "--row-share",
    type=options.FiniteRange(min=0, max=1, min_open=True),
    help="Share of the rows of each call, drawn at random. A quarter of the rows of four times as "
    "many prompts costs about the same and is more accurate. Default: the recipe's.",
)
@click.option(
    "--memory",
    type=options.FiniteRange(min=0, min_open=True),
    default=4.0,
    show_default=True,
    metavar="GIB",
    help="Memory for the matrices of one run; the prompts run as often as needed.",
)
@options.device
@options.force
@options.dry_run
@options.quiet
@options.as_json
def hessian(
    model: str,
    recipe: str,
    text_encoders: str | None,
    output: Path,
    prompts: Path | None,
    count: int | None,
    steps: int | None,
    guidance: float | None,
    seed: int | None,
    batch: int | None,
    weighting: str | None,
    row_share: float | None,
    memory: float,
    device: str,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run MODEL, a pipeline, on prompts and store the second moments of its layers' inputs.

    These are E[x x^T] and E[x], from which SparseGPT masks and GPTQ rounding are computed. Where
    the recipe rounds nothing but text encoders, prompts are encoded and not denoised. OUTPUT
    is a directory with a file per layer; a run that was killed continues where it stopped when it
    is started again.
    """
    from quantkit.workflow.arguments import Sampling
    from quantkit.workflow.hessians import calibrate_hessians, plan_hessians

    sampling = Sampling(count, steps, guidance, seed, batch)
    if dry_run:
        plan = plan_hessians(
            model,
            recipe=recipe,
            text_encoders=text_encoders,
            prompts=prompts,
            sampling=sampling,
            weighting=weighting,
            row_share=row_share,
            memory=memory,
        )
        _print(plan, plan, "nothing written", as_json=as_json)
        return
    with progress_bar(quiet=quiet) as progress:
        taken = calibrate_hessians(
            model,
            recipe=recipe,
            text_encoders=text_encoders,
            output=output,
            prompts=prompts,
            sampling=sampling,
            weighting=weighting,
            row_share=row_share,
            memory=memory,
            device=device,
            force=force,
            progress=progress,
        )
    _print(taken, taken.plan, f"written to {output}", as_json=as_json)


def _print(
    found: "MomentPlan | TakenMoments", plan: "MomentPlan", where: str, *, as_json: bool
) -> None:
    from quantkit.workflow.hessians import TakenMoments

    if as_json:
        print_json(found.to_json())
        return
    rows = [
        (name, len(moments.layers), f"{moments.nbytes:,}", moments.groups)
        for name, moments in plan.components.items()
    ]
    print_table("Second moments", ("component", "layers", "bytes", "runs of the prompts"), rows)
    if isinstance(found, TakenMoments) and found.unseen_told:
        echo(found.unseen_told)
    echo(f"Second moments, {plan.weighting} weighting ({where})")
