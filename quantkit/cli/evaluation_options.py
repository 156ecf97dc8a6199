"""Options of the commands that run pipelines and measure: eval report, eval compare, run, demo."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options

if TYPE_CHECKING:
    from quantkit.workflow.evaluate import EvaluationSettings, Limits

Command = Callable[..., Any]

lpips_weights = click.option(
    "--lpips-weights",
    type=options.PATH,
    metavar="FILE|DIR",
    help="torchvision's AlexNet weights, or a folder with a feature network like the demo's; "
    "default: torchvision's cache, or a download. none leaves LPIPS and its gate out.",
)
clip = click.option(
    "--clip",
    metavar="DIR|HUB-ID",
    help="The model of the CLIP score; default: openai/clip-vit-base-patch32. none leaves the "
    "score and its gates out.",
)
noise_floor = click.option(
    "--noise-floor/--no-noise-floor",
    default=True,
    show_default=True,
    help="Run the original twice more, in another 16-bit dtype and in other batches, and show "
    "how much that changes every metric.",
)
pictures = click.option(
    "--pictures",
    "beside",
    callback=lambda _, __, value: value == "beside",
    type=click.Choice(["inside", "beside"]),
    default="inside",
    show_default=True,
    help="Whether report.html holds its pictures, as WebP and in one file, or shows those in "
    "images/ next to it.",
)
judge = click.option(
    "--judge",
    "judges",
    metavar="NAME[=SOURCE]",
    multiple=True,
    help="Ask another judge: dists, clip-iqa, pickscore, fid, kid; repeatable. SOURCE is a folder "
    "or file with its weights, instead of the library's download.",
)
card = click.option(
    "--card",
    is_flag=True,
    help="Also measure what tables of other tools print, FID and PickScore, and print their row. "
    "Without --count 256 pictures or more: prompts come again, with other seeds.",
)
count = click.option(
    "--count",
    type=options.COUNT,
    help="Number of prompts; default: all of FILE, or 64 of the bundled set on a GPU and 16 on a "
    "CPU. Of 'run': at most that, of those that calibration did not see.",
)
steps = click.option(
    "--steps", type=options.STEPS, default=20, show_default=True, help="Denoising steps."
)
guidance = click.option(
    "--guidance", type=options.NUMBER, help="Guidance scale; default: the pipeline's own."
)
seed = click.option(
    "--seed",
    type=options.SEED,
    default=0,
    show_default=True,
    help="Seed of the first prompt; each further prompt has the next.",
)
batch = click.option(
    "--batch", type=options.COUNT, default=4, show_default=True, help="Prompts at a time."
)
#: Metrics that a gate may be on.
_GATES = ("ssim", "lpips", "clip", "broken", "changed")


def _parse_gates(
    context: click.Context, parameter: click.Parameter, value: tuple[str, ...]
) -> dict[str, float]:
    found = {}
    for text in value:
        name, _, told = text.partition("=")
        try:
            limit = float(told)
        except ValueError:
            limit = math.nan
        if name not in _GATES or not math.isfinite(limit):
            raise click.BadParameter(
                f"{text!r:.80}: expected {', '.join(_GATES)} with =LIMIT, as ssim=0.9.",
                context,
                parameter,
            )
        found[name] = limit
    return found


def _gates(text: str) -> Callable[[Command], Command]:
    return click.option(
        "--gate",
        "gates",
        multiple=True,
        callback=_parse_gates,
        metavar="NAME=LIMIT",
        help=f"{text} ssim (the mean is above), lpips (below), clip (loss of the score in %, "
        "below), broken and changed (% of the pictures, at most); repeatable.",
    )


gates = _gates(
    "A limit other than the usual: 0.95, 0.1, 1 (of 2:4 2, of both 3), 0 and none. Names are"
)
#: Of pictures of unknown origin, which have no usual limits.
asked_gates = _gates("Fail unless the limit is kept. Names are")
calibration = click.option(
    "-c",
    "--calibration",
    type=options.PATH,
    help="What PACKED was calibrated with: compared prompts that it has seen are noticed.",
)
sensitivity = click.option(
    "--sensitivity",
    type=options.PATH,
    help="Of 'calibrate sensitivity': says which layers to treat better, and how, if gates fail.",
)
watch = click.option(
    "--watch",
    is_flag=True,
    help="Write report.html from the beginning and fill it while the pipelines run: opened in a "
    "browser it loads itself again.",
)
preview = click.option(
    "--preview/--no-preview",
    default=True,
    show_default=True,
    help="Show the worst pair of pictures on a terminal with colours.",
)

_SAMPLING = (
    options.prompts, count, steps, guidance, seed, batch, lpips_weights, clip, noise_floor, judge,
    card, pictures,
)  # fmt: skip


def sampling(command: Command) -> Command:
    """Add the options of pictures, their metrics, and pages."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def take_settings(given: dict[str, Any]) -> "EvaluationSettings":
    """Take the options of ``sampling`` out of a command's options."""
    from quantkit.workflow.evaluate import EvaluationSettings

    take_networks(given)
    names = {field.name for field in fields(EvaluationSettings)} & given.keys()
    return EvaluationSettings(**{name: given.pop(name) for name in names})


def take_networks(given: dict[str, Any]) -> None:
    """Turn ``none`` for a network into a metric to leave out, as jobs take it."""
    left_out = {"lpips": "lpips_weights", "clip": "clip"}
    given["without"] = tuple(n for n, option in left_out.items() if str(given[option]) == "none")
    given |= {left_out[name]: None for name in given["without"]}


def take_limits(given: dict[str, Any]) -> "Limits":
    """Take the gates' limits out of a command's options; others are the usual."""
    from quantkit.workflow.evaluate import Limits

    return Limits(**given.pop("gates"))
