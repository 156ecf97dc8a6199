"""The settings of a recovery as options of ``recover``."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options

if TYPE_CHECKING:
    from quantkit.workflow.recovery_settings import Training

Command = Callable[..., None]

_POSITIVE = options.FiniteRange(min=0, min_open=True)

#: name -> click's other arguments; each is a field of ``Training``
_OPTIONS: dict[str, dict[str, Any]] = {
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
    "--sampling-batch": {
        "type": options.COUNT,
        "help": "prompts denoised at a time; default: 256, on a CPU 16.",
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
}

masks_output = click.option(
    "--masks-output",
    type=options.PATH,
    help="The mask file; default: OUTPUT.masks.safetensors.",
)


def recovery_options(command: Command) -> Command:
    """Add the settings of a training to a command."""
    for name, about in reversed(_OPTIONS.items()):
        text = about["help"]
        shown = {**about, "help": text[0].upper() + text[1:]}
        command = click.option(name, **shown)(command)
    return command


def take_training(given: dict[str, Any]) -> "Training":
    """Take the settings of a training out of a command's options."""
    from quantkit.workflow.recovery_settings import Training

    taken = {f.name: given.pop(f.name) for f in fields(Training) if f.name in given}
    return Training(**{name: value for name, value in taken.items() if value is not None})
