"""Settings of a recovery from users; defaults depend on method and device."""

from dataclasses import dataclass, fields, replace

from quantkit.errors import RecipeError
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recovery.distill.settings import DistillSettings


@dataclass(frozen=True)
class Training:
    """Duration, learning rate and batches of a recovery; None: the method's default."""

    #: minutes to train, trajectories included; None: 2, or no limit where steps are set
    minutes: float | None = None
    #: training steps
    steps: int | None = None
    #: calls of the denoiser a step: 256, on a CPU 16
    batch: int | None = None
    #: the highest learning rate: 3e-4
    rate: float | None = None
    #: prompts denoised at a time: 256, on a CPU 16
    sampling_batch: int | None = None
    #: how many are kept at a time: 4096, on a CPU 64
    trajectories: int | None = None
    #: go on with the saved training
    resume: bool = False
    #: recompute activations, for less memory
    checkpointing: bool = False
    #: keep optimizer and average in the CPU's memory; implies checkpointing
    offload: bool = False

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of settings that differ from the default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)


METHODS = ("distill", "obs")

#: What a CPU takes in minutes rather than days.
_ON_CPU = DistillSettings(batch=16, sampling_batch=16, trajectories=64)

#: Settings that have one name, and no other meaning, for users and for the training.
_SAME = ("steps", "batch", "rate", "sampling_batch", "trajectories", "checkpointing", "offload")


def refuse_foreign(method: str, training: Training) -> None:
    """Refuse settings that mean nothing to a method.

    Raises:
        RecipeError: no such method; or naming the first setting.
    """
    if method not in METHODS:
        raise RecipeError(
            f"method {method!r}: unknown, expected one of {', '.join(METHODS)}", fields=("method",)
        )
    for name in sorted(training.changed if method == "obs" else ()):
        raise RecipeError(
            f"{name}: method {method} does not use it; drop it",
            fields=(name,),
        )


def settings_of(training: Training, run: CalibrationRecipe, *, on_cpu: bool) -> DistillSettings:
    """Return the settings that the user and the recipe ask for.

    Args:
        training: what the user set.
        run: the recipe's calibration section: how pictures are sampled.
        on_cpu: where it runs.

    Raises:
        RecipeError: a value out of range, or settings that do not go together.
    """
    base = _ON_CPU if on_cpu else DistillSettings()
    same = {name: getattr(training, name) for name in _SAME if name in training.changed}
    return replace(
        base,
        seconds=_seconds(training, base.seconds),
        sampling_steps=run.steps,
        weighting=run.weighting,
        guidance=run.guidance,
        seed=run.seed,
        **same,
    )


def _seconds(training: Training, default: float | None) -> float | None:
    if training.minutes is not None:
        return 60 * training.minutes
    return None if training.steps is not None else default
