"""The options of a recovery, for ``recover`` and for ``sparsify --recover``."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.errors import RecipeError
from quantkit.storage.limits import MAX_COUNT

if TYPE_CHECKING:
    from quantkit.recipe.schema import Recipe
    from quantkit.recovery.distill.settings import Settings

METHODS = click.Choice(["distill", "reconstruct"])
#: Where second moments are at hand there is one more, which trains nothing.
SPARSE_METHODS = click.Choice(["distill", "obs", "reconstruct"])

_POSITIVE = options.FiniteRange(min=0, min_open=True)

#: name -> what click is told besides the name; help texts gain a prefix in ``sparsify``
_OPTIONS: dict[str, dict[str, Any]] = {
    "--masks-output": {
        "type": options.PATH,
        "help": "the mask file; default: OUTPUT.masks.safetensors.",
    },
    "--quantize/--no-quantize": {
        "default": None,
        "help": "train as packed with the recipe, or in 16 bit; default: as packed where nothing "
        "is masked.",
    },
    "--minutes": {
        "type": _POSITIVE,
        "help": "how long to train, trajectories included. Default: 2, or no limit with --steps.",
    },
    "--steps": {
        "type": options.STEPS,
        "help": "how many training steps; of reconstruct, the gradient steps of a block.",
    },
    "--batch": {
        "type": options.COUNT,
        "help": "calls of the denoiser a step; default: 256, on a CPU 16. Of reconstruct, calls in "
        "all; default: 256, or what the time allows.",
    },
    "--rate": {
        "type": _POSITIVE,
        "help": "the highest learning rate; default: 3e-4, of reconstruct 1e-3.",
    },
    "--prompts": {
        "type": options.PATH,
        "help": "a UTF-8 file with one prompt a line; default: the bundled set.",
    },
    "--sampling-steps": {
        "type": options.STEPS,
        "help": "denoising steps of a trajectory; default: the recipe's, of reconstruct 3, 4 and 7 "
        "in turn.",
    },
    "--sampling-batch": {
        "type": options.COUNT,
        "help": "prompts denoised at a time; default: 256, on a CPU 16; of reconstruct 16 and 4.",
    },
    "--trajectories": {
        "type": options.COUNT,
        "help": "how many are kept at a time; default: 4096, on a CPU 64; of reconstruct 64.",
    },
    "--guidance": {"type": options.NUMBER, "help": "guidance scale; default: the recipe's."},
    "--watch-every": {
        "type": click.IntRange(0, MAX_COUNT),
        "help": "steps after which pictures are compared with the teacher's; 0: never. "
        "Default: 500.",
    },
    "--patience": {
        "type": options.COUNT,
        "help": "stop when so many comparisons in a row brought nothing better, and keep the "
        "best. Default: train to the end.",
    },
    "--save-every": {
        "type": _POSITIVE,
        "metavar": "SECONDS",
        "help": "how often the training is saved, beside OUTPUT. Default: 600.",
    },
    "--resume": {"is_flag": True, "default": None, "help": "go on with the saved training."},
    "--checkpointing": {
        "is_flag": True,
        "default": None,
        "help": "recompute activations, for less memory.",
    },
    "--offload": {
        "is_flag": True,
        "default": None,
        "help": "keep optimizer and average in the CPU's memory; implies --checkpointing.",
    },
    "--no-graphs": {
        "flag_value": False,
        "default": None,
        "help": "no CUDA graphs, which make training a quarter faster.",
    },
    "--seed": {
        "type": options.SEED,
        "help": "of the first noise; default: the recipe's.",
    },
    "--device": {"metavar": "auto|cpu|cuda[:N]", "help": "where to train; default: auto."},
}

#: Parameters whose names differ from their options'.
_RENAMED = {"--no-graphs": "graphs"}

#: Options that are no setting of the training.
_APART = (
    "masks_output", "quantize", "minutes", "prompts", "save_every", "resume", "device",
    "how",
)  # fmt: skip

#: Settings that differ from the defaults of a distillation on a GPU: (method, on a CPU) -> values.
_DEFAULTS: dict[tuple[str, bool], dict[str, Any]] = {
    ("distill", False): {},
    # What a CPU takes in minutes rather than days.
    ("distill", True): {"batch": 16, "sampling_batch": 16, "trajectories": 64},
    ("reconstruct", False): {"rate": 1e-3, "sampling_batch": 16, "trajectories": 64},
    # Few prompts at a time, so that sampling can stop when its share of a minute is over.
    ("reconstruct", True): {"rate": 1e-3, "sampling_batch": 4, "trajectories": 64},
}

#: method -> parameters that mean nothing to it
_FOREIGN = {
    "obs": frozenset({
        "quantize", "minutes", "steps", "batch", "rate", "prompts", "sampling_steps",
        "sampling_batch", "trajectories", "guidance", "watch_every", "patience", "save_every",
        "resume", "checkpointing", "offload", "graphs", "seed",
    }),
    "reconstruct": frozenset({
        "quantize", "watch_every", "patience", "checkpointing", "offload", "graphs",
    }),
    "distill": frozenset[str](),
}  # fmt: skip

SAVE_EVERY = 600.0


def recovery_options(prefix: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options to a command.

    Args:
        prefix: of every help text, as "With --recover: ".
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for name, about in reversed(_OPTIONS.items()):
            text = prefix + about["help"]
            renamed = (_RENAMED[name],) if name in _RENAMED else ()
            shown = {**about, "help": text[0].upper() + text[1:]}
            command = click.option(name, *renamed, **shown)(command)
        return command

    return add


def split_options(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a recovery that were given, and all other parameters."""
    names = {_parameter(name): name for name in _OPTIONS}
    mine = {n: value for n, value in given.items() if n in names and value is not None}
    return mine, {n: value for n, value in given.items() if n not in names}


def refuse_alone(mine: dict[str, Any]) -> None:
    """Refuse options of a recovery where there is none.

    Raises:
        RecipeError: naming the first.
    """
    for name, value in sorted(mine.items()):
        shown = _option(name, value)
        raise RecipeError(f"{shown}: belongs to a recovery; add --recover distill, or drop it")


def refuse_foreign(how: str, mine: dict[str, Any]) -> None:
    """Refuse options that mean nothing to a method.

    Raises:
        RecipeError: naming the first.
    """
    for name in sorted(set(mine) & _FOREIGN[how]):
        option = _option(name, mine[name])
        raise RecipeError(
            f"{option}: belongs to another recovery and means nothing to {how}; drop it"
        )


def make_settings(
    recipe: "Recipe", given: dict[str, Any], *, on_cpu: bool, how: str = "distill"
) -> "Settings":
    """Return the settings that the options and the recipe ask for."""
    from quantkit.recovery.distill.settings import Settings

    run = recipe.calibration
    values = dict(_DEFAULTS[how, on_cpu])
    values |= {"sampling_steps": run.steps, "guidance": run.guidance, "seed": run.seed}
    if "minutes" in given:
        values["seconds"] = 60 * given["minutes"]
    elif "steps" in given:
        values["seconds"] = None
    values |= {n: v for n, v in given.items() if n not in _APART}
    values["watch_every"] = values.get("watch_every", Settings.watch_every) or None
    return Settings(**values)


def masks_path(output: Path, given: dict[str, Any]) -> Path:
    """Return where the masks of a recovered pipeline go: beside it by default."""
    chosen: Path | None = given.get("masks_output")
    return chosen or output.with_name(f"{output.name}.masks.safetensors")


def _option(name: str, value: object) -> str:
    """Return the option that a parameter was given by."""
    option = next(option for option in _OPTIONS if _parameter(option) == name)
    yes, _, no = option.partition("/")
    return no if no and value is False else yes


def _parameter(option: str) -> str:
    """Return the name of an option's parameter."""
    plain = option.partition("/")[0].removeprefix("--").replace("-", "_")
    return _RENAMED.get(option, plain)
