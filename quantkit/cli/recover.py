"""``quantkit sparsify --recover``: train the masked denoiser on the dense one's trajectories."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import progress_bar
from quantkit.errors import RecipeError

if TYPE_CHECKING:
    from quantkit.models.source import Model
    from quantkit.recipe import Recipe
    from quantkit.recovery.settings import Settings
    from quantkit.recovery.training import Point
    from quantkit.sparsity.maskfile import MaskSet
    from quantkit.sparsity.surgery import Surgeon

_OPTIONS = (
    click.option(
        "--recover",
        type=click.Choice(["distill", "obs"]),
        help="distill: train the masked denoiser on the dense one's own trajectories; obs: let the "
        "kept weights and biases make up for the dropped ones, from --hessians, without training. "
        "OUTPUT is then a 16-bit pipeline directory.",
    ),
    click.option(
        "--masks-output",
        type=click.Path(path_type=Path),
        help="With --recover: the mask file; default: OUTPUT.masks.safetensors.",
    ),
    click.option(
        "--minutes",
        type=click.FloatRange(min=0, min_open=True),
        help="With --recover: how long to train, trajectories included. "
        "Default: 2, or no limit with --steps.",
    ),
    click.option(
        "--steps", type=click.IntRange(min=1), help="With --recover: how many training steps."
    ),
    click.option(
        "--batch",
        type=click.IntRange(min=1),
        help="With --recover: calls of the denoiser a step; default: 256, on a CPU 16.",
    ),
    click.option(
        "--rate",
        type=click.FloatRange(min=0, min_open=True),
        help="With --recover: the highest learning rate; default: 3e-4.",
    ),
    options.prompts,
    click.option(
        "--sampling-steps",
        type=click.IntRange(min=1),
        help="With --recover: denoising steps of a trajectory; default: the recipe's.",
    ),
    click.option(
        "--sampling-batch",
        type=click.IntRange(min=1),
        help="With --recover: prompts denoised at a time; default: 256, on a CPU 16.",
    ),
    click.option(
        "--trajectories",
        type=click.IntRange(min=1),
        help="With --recover: how many are kept at a time; default: 4096, on a CPU 64.",
    ),
    click.option(
        "--guidance", type=float, help="With --recover: guidance scale; default: the recipe's."
    ),
    click.option(
        "--checkpointing",
        is_flag=True,
        default=None,
        help="With --recover: recompute activations, for less memory.",
    ),
    click.option(
        "--no-graphs",
        "graphs",
        flag_value=False,
        default=None,
        help="With --recover: no CUDA graphs, which make training a quarter faster.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        help="With --recover: of the first noise; default: the recipe's.",
    ),
    options.device,
)

#: What a CPU takes in minutes rather than days.
_ON_CPU = {"batch": 16, "sampling_batch": 16, "trajectories": 64}


def recover_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a recovery to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def split_options(given: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the options of a recovery, None where none is wanted, and all others.

    Raises:
        RecipeError: an option of a recovery without ``--recover``.
    """
    names = {
        "masks_output", "minutes", "steps", "batch", "rate", "prompts", "sampling_steps",
        "sampling_batch", "trajectories", "guidance", "checkpointing", "graphs", "seed",
    }  # fmt: skip
    mine = {name: value for name, value in given.items() if name in names and value is not None}
    others = {n: v for n, v in given.items() if n not in {*names, "recover", "device"}}
    if given["recover"] == "obs" and set(mine) - {"masks_output"}:
        option = min(set(mine) - {"masks_output"}).replace("_", "-")
        raise RecipeError(f"--{option}: belongs to --recover distill; obs trains nothing")
    if given["recover"] is not None:
        return {**mine, "device": given["device"], "how": given["recover"]}, others
    if mine:
        option = min(mine).replace("_", "-").replace("graphs", "no-graphs")
        raise RecipeError(f"--{option}: belongs to a recovery; add --recover distill, or drop it")
    return None, others


def masks_path(output: Path, given: dict[str, Any]) -> Path:
    """Return where the masks of a recovered pipeline go: beside it by default."""
    chosen: Path | None = given.get("masks_output")
    return chosen or output.with_name(f"{output.name}.masks.safetensors")


def recover_and_write(
    model: "Model",
    recipe: "Recipe",
    masks: "MaskSet",
    output: Path,
    given: dict[str, Any],
    *,
    force: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Train, write the pipeline and its masks, and return JSON values that say how it went.

    Args:
        model: the dense pipeline.
        recipe: its calibration section says how pictures are sampled.
        masks: which weights are kept.
        output: the directory to make.
        given: the options of a recovery.
        force: replace existing outputs.
        quiet: no progress and no loss.

    Raises:
        InputError: a model, masks, prompts or settings that cannot be used.
    """
    from quantkit.calibration.running import choose_device, read_prompts
    from quantkit.recovery.recover import ignore, recover
    from quantkit.recovery.writing import refuse_outputs, write_recovered

    where = masks_path(output, given)
    refuse_outputs(model, output, where, force=force)
    prompts = read_prompts(given.get("prompts"))
    on_cpu = choose_device(given["device"]).type == "cpu"
    with progress_bar(quiet=quiet) as progress:
        recovered = recover(
            model,
            masks,
            make_settings(recipe, given, on_cpu=on_cpu),
            prompts=prompts,
            device=given["device"],
            progress=progress,
            watch=ignore if quiet else _print_point(),
        )
    write_recovered(model, masks, recovered, output, where, force=force)
    last = recovered.points[-1]
    return {
        "written": str(output),
        "masks": str(where),
        "steps": last.step,
        "seconds": round(last.seconds, 1),
        "trajectories": recovered.trajectories,
        "first_loss": recovered.points[0].loss,
        "last_loss": last.loss,
    }


def update_and_write(
    model: "Model",
    masks: "MaskSet",
    surgeon: "Surgeon",
    output: Path,
    given: dict[str, Any],
    *,
    force: bool,
) -> dict[str, Any]:
    """Write the pipeline with updated weights, and its masks, and return JSON values about it.

    Args:
        model: the dense pipeline.
        masks: which weights are kept.
        surgeon: its second moments.
        output: the directory to make.
        given: the options of a recovery.
        force: replace existing outputs.

    Raises:
        InputError: a model, masks or moments that cannot be used.
    """
    from quantkit.recovery.recover import Recovered, only_denoiser
    from quantkit.recovery.surgery import UpdatedTensors
    from quantkit.recovery.writing import write_recovered

    where = masks_path(output, given)
    component = only_denoiser(model)
    updated = UpdatedTensors(component, masks, surgeon)
    recovered = Recovered(component, updated, (), trajectories=0)
    write_recovered(model, masks, recovered, output, where, force=force)
    return {"written": str(output), "masks": str(where), "tensors": len(updated)}


def make_settings(recipe: "Recipe", given: dict[str, Any], *, on_cpu: bool) -> "Settings":
    """Return the settings that the options and the recipe ask for."""
    from quantkit.recovery.settings import Settings

    run = recipe.calibration
    values: dict[str, Any] = dict(_ON_CPU) if on_cpu else {}
    values |= {"sampling_steps": run.steps, "guidance": run.guidance, "seed": run.seed}
    if "minutes" in given:
        values["seconds"] = 60 * given["minutes"]
    elif "steps" in given:
        values["seconds"] = None
    apart = {"masks_output", "minutes", "prompts", "device", "how"}
    return Settings(**{**values, **{n: v for n, v in given.items() if n not in apart}})


def _print_point() -> Callable[["Point"], None]:
    """Return a watcher that prints the loss at about every twentieth of the training."""
    due = 0.0

    def show(point: "Point") -> None:
        nonlocal due
        if point.fraction >= due:
            due = point.fraction + 0.05
            click.echo(f"step {point.step}: loss {point.loss:.5f}, {point.seconds:.0f} s", err=True)

    return show
