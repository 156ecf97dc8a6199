"""Collecting second moments for SparseGPT masks and GPTQ rounding."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibration.moments.collect_hessians import collect_hessians, moment_layers
from quantkit.calibration.moments.held_out_rows import held_bytes, held_count
from quantkit.calibration.moments.moment_files import KIND, Hessians
from quantkit.calibration.moments.moments import group_layers, moment_bytes
from quantkit.calibration.statistics.layer_statistics import tell_unseen
from quantkit.models.recipe_check import refuse_unmatched_others
from quantkit.models.source import Model
from quantkit.progress import Progress, silent
from quantkit.recipe.recommended import DEFAULT
from quantkit.recipe.schema import Recipe
from quantkit.storage.places import check_directory, check_room, refuse_overlap
from quantkit.storage.sizes import tell_bytes
from quantkit.workflow.arguments import (
    ModelLike,
    PromptsLike,
    RecipeLike,
    name_of,
    opened,
    with_prompts,
)


@dataclass(frozen=True)
class ComponentMoments:
    """The second moments of one denoiser or text encoder."""

    layers: tuple[str, ...]
    #: how often the prompts run
    groups: int
    #: of all files
    nbytes: int


@dataclass(frozen=True)
class MomentPlan:
    """The plan of a collection: layers, bytes, and number of runs over the prompts."""

    weighting: str
    components: dict[str, ComponentMoments]

    def __repr__(self) -> str:
        """Return a line for each component."""
        return "\n".join(
            f"second moments: {len(found.layers)} layers, {tell_bytes(found.nbytes)}, "
            f"{found.groups} runs of the prompts"
            for found in self.components.values()
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "written": None,
            "weighting": self.weighting,
            "components": {
                name: {"layers": list(x.layers), "groups": x.groups, "bytes": x.nbytes}
                for name, x in self.components.items()
            },
        }


@dataclass(frozen=True, eq=False)
class TakenMoments:
    """Second moments on disk."""

    hessians: Hessians
    plan: MomentPlan

    @property
    def output(self) -> Path:
        """The directory."""
        return self.hessians.path

    @property
    def unseen_summary(self) -> str:
        """The layers that no prompt called, in a line; empty where there is none."""
        return tell_unseen(self.hessians.unseen).strip()

    def __repr__(self) -> str:
        """Return what was taken and where it was written."""
        return f"{self.plan}\n{tell_unseen(self.hessians.unseen)}written: {self.output}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        unseen = {name: list(layers) for name, layers in self.hessians.unseen.items()}
        return self.plan.to_json() | {"written": str(self.output), "unseen": unseen}


def calibrate_hessians(
    model: ModelLike,
    *,
    recipe: RecipeLike = DEFAULT,
    output: str | Path,
    prompts: PromptsLike | None = None,
    count: int | None = None,
    memory: float = 4.0,
    device: str = "auto",
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
) -> TakenMoments | Any:
    """Run a pipeline on prompts, and store E[x x^T] and E[x] of its layers' inputs.

    A run that was killed goes on where it stopped when it is started again.

    Args:
        model: a pipeline: its directory, a hub id, or opened.
        recipe: whose calibration section says how to run; what it keeps in 16 bit is not observed,
            and denoisers are not where it rounds nothing but text encoders by GPTQ.
        output: the directory to make, or to go on with.
        prompts: texts, or a file with one a line; None: the bundled set.
        count: use the first so many prompts; None: all of those given, or the recipe's number.
        memory: GiB that the matrices of one run may take; the prompts run as often as needed.
        device: auto, cpu or cuda[:N].
        force: begin again where a directory of second moments exists.
        dry_run: say what would be observed, and write nothing.
        progress: told of denoiser calls, by group of layers.

    Returns:
        the second moments, opened; with ``dry_run`` the ``MomentPlan``.

    Raises:
        InputError: a model, recipe or prompts that cannot be used, an output that is something
            else, a layer that does not fit in ``memory``.
        NonFiniteError: NaN or Inf in an activation; the text names the layer.
    """
    source, chosen = opened(model, recipe)
    refuse_unmatched_others(chosen, name_of(recipe), source)
    chosen, texts = with_prompts(chosen, prompts, count)
    plan = moments_of(source, chosen, memory=memory * 2**30)
    if dry_run:
        return plan
    _check_output(Path(output), source, plan, force=force)
    found = collect_hessians(
        source,
        chosen,
        texts,
        Path(output),
        memory=memory * 2**30,
        device=device,
        progress=progress,
        force=force,
    )
    return TakenMoments(found, plan)


def moments_of(model: Model, recipe: Recipe, *, memory: float) -> MomentPlan:
    """Return the plan of an opened model; only headers are read.

    Args:
        model: a pipeline.
        recipe: what is packed, and how the pipeline is run.
        memory: bytes that the matrices of one run may take.

    Raises:
        RecipeError: one layer alone does not fit.
    """
    held = held_count(recipe.calibration.prompts) > 0
    denoisers = {component.name for component in model.components}
    observed = moment_layers(model, recipe)
    return MomentPlan(
        recipe.calibration.weighting,
        {
            name: ComponentMoments(
                tuple(layer.name for layer in layers),
                len(group_layers(layers, memory)),
                sum(
                    moment_bytes(x) + (held and name in denoisers) * held_bytes(x.k) for x in layers
                ),
            )
            for name, layers in observed.items()
        },
    )


def _check_output(output: Path, source: Model, plan: MomentPlan, *, force: bool) -> None:
    """Refuse a directory that could not be written, before anything is hashed or run."""
    refuse_overlap(output, source.path)
    # One that is there may be gone on with, which what it holds decides.
    if force or not output.exists():
        check_directory(output, kind=KIND, force=force)
        check_room(output, sum(found.nbytes for found in plan.components.values()))
