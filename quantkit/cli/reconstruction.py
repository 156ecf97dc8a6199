"""Reconstructing from the command line, for ``recover`` and for ``sparsify --recover``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.cli.console import echo, progress_bar
from quantkit.cli.recovered import write_and_describe
from quantkit.cli.recovery_options import SAVE_EVERY, make_settings, masks_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from quantkit.models.source import Model
    from quantkit.recipe.schema import Recipe
    from quantkit.recovery.reconstruct.blockfile import Rebuilt
    from quantkit.sparsity.maskfile import MaskSet
    from quantkit.sparsity.surgery import Surgeon


def reconstruct_and_write(
    model: "Model",
    recipe: "Recipe",
    masks: "MaskSet | None",
    output: Path,
    given: dict[str, Any],
    *,
    surgeon: "Surgeon | None" = None,
    force: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Reconstruct, write the pipeline and its masks, and return JSON values that say how it went.

    Args:
        model: the dense pipeline.
        recipe: its calibration section says how pictures are sampled.
        masks: which weights are kept.
        output: the directory to make.
        given: the options of a recovery.
        surgeon: second moments, whose update is where to start; None: the masked weights are.
        force: replace existing outputs, and what was saved.
        quiet: no progress and no losses.

    Raises:
        InputError: a model, masks, prompts or settings that cannot be used.
    """
    from quantkit.errors import ArtefactError
    from quantkit.pipelines.running import choose_device, read_prompts
    from quantkit.recovery.distill.recover import Keeping, Task
    from quantkit.recovery.distill.saving import refuse_unfinished
    from quantkit.recovery.reconstruct.reconstruct import SCHEDULES, ignore, reconstruct
    from quantkit.recovery.writing import refuse_outputs

    if masks is None:
        raise ArtefactError("masks: none, and reconstruct fits masked layers; pass --masks")
    where = masks_path(output, given)
    refuse_outputs(model, output, where, force=force)
    resume, device = given.get("resume", False), given.get("device", "auto")
    file = output.with_name(f"{output.name}.recovery.safetensors")
    refuse_unfinished(file, resume=resume, force=force)
    on_cpu = choose_device(device).type == "cpu"
    settings = make_settings(recipe, given, on_cpu=on_cpu, how="reconstruct")
    with progress_bar(quiet=quiet) as progress:
        recovered = reconstruct(
            Task(model, masks, None, read_prompts(given.get("prompts")), device),
            settings,
            progress=progress,
            schedules=(given["sampling_steps"],) if "sampling_steps" in given else SCHEDULES,
            start=_start(model, masks, surgeon),
            watch=ignore if quiet else _print_block(),
            keeping=Keeping(file, given.get("save_every", SAVE_EVERY), resume),
        )
    result = write_and_describe(model, masks, recovered, output, where, force=force)
    file.unlink(missing_ok=True)
    return result


def _start(
    model: "Model", masks: "MaskSet", surgeon: "Surgeon | None"
) -> "Mapping[str, Tensor] | None":
    from quantkit.recovery.distill.recover import only_denoiser
    from quantkit.recovery.surgery import UpdatedTensors

    return None if surgeon is None else UpdatedTensors(only_denoiser(model), masks, surgeon)


def _print_block() -> "Callable[[Rebuilt], None]":
    """Return a watcher that prints what every block misses of its teacher's answers."""

    def show(block: "Rebuilt") -> None:
        echo(
            f"{block.block}: misses {block.before:.4f} -> {block.after:.4f} of the power, "
            f"{block.steps} steps",
            err=True,
        )

    return show
