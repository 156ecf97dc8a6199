"""The settings of a recovery as options of ``recover``."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.storage.limits import MAX_COUNT

if TYPE_CHECKING:
    from quantkit.workflow.recovery_settings import Training

Command = Callable[..., None]

_POSITIVE = options.FiniteRange(min=0, min_open=True)

#: name -> what click is told besides the name; each is a field of ``Training``
_OPTIONS: dict[str, dict[str, Any]] = {
    "--quantize/--no-quantize": {
        "default": None,
        "help": "compute as packed with the recipe while training, or in 16 bit; default: as "
        "packed if there are no masks.",
    },
    "--minutes": {
        "type": _POSITIVE,
        "help": "training time, sampling of trajectories included. Default: 2, or no limit with "
        "--steps.",
    },
    "--steps": {
        "type": options.STEPS,
        "help": "number of training steps.",
    },
    "--batch": {
        "type": options.COUNT,
        "help": "denoiser calls per step; default: 256, on a CPU 16.",
    },
    "--rate": {
        "type": _POSITIVE,
        "help": "highest learning rate; default: 3e-4.",
    },
    "--sampling-steps": {
        "type": options.STEPS,
        "help": "denoising steps of a trajectory; default: the recipe's.",
    },
    "--sampling-batch": {
        "type": options.COUNT,
        "help": "prompts denoised at a time; default: 256, on a CPU 16.",
    },
    "--trajectories": {
        "type": options.COUNT,
        "help": "number of trajectories stored at a time; default: 4096, on a CPU 64.",
    },
    "--guidance": {"type": options.NUMBER, "help": "guidance scale; default: the recipe's."},
    "--watch-every": {
        "type": click.IntRange(0, MAX_COUNT),
        "help": "compare pictures with the teacher's every so many steps; 0: never. Default: 500.",
    },
    "--patience": {
        "type": options.COUNT,
        "help": "stop after this many comparisons in a row without improvement, and keep the best "
        "weights. Default: train to the end.",
    },
    "--save-every": {
        "type": _POSITIVE,
        "metavar": "SECONDS",
        "help": "how often the training is saved, beside OUTPUT. Default: 600.",
    },
    "--resume": {"is_flag": True, "default": None, "help": "continue the saved training."},
    "--checkpointing": {
        "is_flag": True,
        "default": None,
        "help": "recompute activations, for less memory.",
    },
    "--offload": {
        "is_flag": True,
        "default": None,
        "help": "keep optimizer states and averaged weights in the CPU's memory; implies "
        "--checkpointing.",
    },
    "--no-graphs": {
        "flag_value": False,
        "default": None,
        "help": "do not use CUDA graphs, which make training a quarter faster.",
    },
    "--seed": {
        "type": options.SEED,
        "help": "seed of the first noise; default: the recipe's.",
    },
}

#: Parameters whose names differ from their options'.
_RENAMED = {"--no-graphs": "graphs"}

masks_output = click.option(
    "--masks-output",
    type=options.PATH,
    help="The mask file; default: OUTPUT.masks.safetensors.",
)


def recovery_options(command: Command) -> Command:
    """Add the settings of a training to a command."""
    for name, about in reversed(_OPTIONS.items()):
        renamed = (_RENAMED[name],) if name in _RENAMED else ()
        text = about["help"]
        shown = {**about, "help": text[0].upper() + text[1:]}
        command = click.option(name, *renamed, **shown)(command)
    return command


def training_of(given: dict[str, Any]) -> "Training":
    """Return the settings of a training that were given as options; others are not looked at."""
    from quantkit.workflow.recovery_settings import Training

    return Training(**{name: value for name, value in given.items() if value is not None})
