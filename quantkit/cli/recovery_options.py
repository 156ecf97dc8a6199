"""The settings of a recovery as options: of ``recover``, and of older spellings of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.storage.limits import MAX_COUNT

if TYPE_CHECKING:
    from quantkit.workflow.training import Training

Command = Callable[..., None]

_POSITIVE = options.FiniteRange(min=0, min_open=True)

#: name -> what click is told besides the name; each is a field of ``Training``
_OPTIONS: dict[str, dict[str, Any]] = {
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
}

#: Parameters whose names differ from their options'.
_RENAMED = {"--no-graphs": "graphs"}

masks_output = click.option(
    "--masks-output",
    type=options.PATH,
    help="The mask file; default: OUTPUT.masks.safetensors.",
)


def recovery_options(
    *, hidden: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the settings of a training to a command.

    Args:
        hidden: help leaves them out.
    """

    def add(command: Command) -> Command:
        for name, about in reversed(_OPTIONS.items()):
            renamed = (_RENAMED[name],) if name in _RENAMED else ()
            text = about["help"]
            shown = {**about, "help": text[0].upper() + text[1:], "hidden": hidden}
            command = click.option(name, *renamed, **shown)(command)
        return command

    return add


def training_of(given: dict[str, Any]) -> "Training":
    """Return the settings of a training that were given as options; others are not looked at."""
    from quantkit.workflow.training import Training

    return Training(**{name: value for name, value in given.items() if value is not None})
