"""Options of the commands that run pipelines and measure: eval report, eval compare, run, demo."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options

if TYPE_CHECKING:
    from quantkit.workflow.evaluate import Limits

Command = Callable[..., Any]

lpips_weights = click.option(
    "--lpips-weights",
    type=options.PATH,
    metavar="FILE|DIR",
    help="torchvision's AlexNet weights, or a folder with a feature network like the demo's; "
    "default: torchvision's cache, or a download.",
)
clip = click.option(
    "--clip",
    metavar="DIR|HUB-ID",
    help="The model of the CLIP score; default: openai/clip-vit-base-patch32.",
)
without = click.option(
    "--without",
    type=click.Choice(["lpips", "clip"]),
    multiple=True,
    help="Leave a metric out, for example if its network is not available; its gate is then not "
    "judged.",
)
noise_floor = click.option(
    "--noise-floor/--no-noise-floor",
    default=True,
    show_default=True,
    help="Run the original twice more, in another 16-bit dtype and in other batches, and show "
    "beside every metric how much that changes.",
)
pictures = click.option(
    "--pictures",
    type=click.Choice(["inside", "beside"]),
    default="inside",
    show_default=True,
    help="Whether report.html holds its pictures, as WebP and in one file, or shows those in "
    "images/ beside it.",
)
judge = click.option(
    "--judge",
    metavar="NAME[=SOURCE]",
    multiple=True,
    help="Ask another judge: dists, clip-iqa, pickscore, fid, kid; repeatable. SOURCE is a folder "
    "or file with its weights, instead of the library's download.",
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
gate_ssim = click.option(
    "--gate-ssim",
    type=options.NUMBER,
    default=0.95,
    show_default=True,
    help="The mean must be above.",
)
gate_lpips = click.option(
    "--gate-lpips",
    type=options.NUMBER,
    default=0.1,
    show_default=True,
    help="The mean must be below.",
)
gate_clip = click.option(
    "--gate-clip",
    type=options.NUMBER,
    help="CLIP score loss in % must be below; default: 1 for quantized weights, 2 for 4:2, 3 for "
    "both.",
)
gate_broken = click.option(
    "--gate-broken",
    type=options.NUMBER,
    default=0.0,
    show_default=True,
    help="So many of the pictures may be broken (%).",
)

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
    "browser it loads itself again. The worst pair so far is shown on the terminal. With --force, "
    "an earlier report makes room at once.",
)
preview = click.option(
    "--preview/--no-preview",
    default=True,
    show_default=True,
    help="Show the worst pair of pictures on a terminal with colours.",
)

_SAMPLING = (
    options.prompts, count, steps, guidance, seed, batch, lpips_weights, clip, without, noise_floor,
    judge,
)  # fmt: skip
_GATES = (gate_ssim, gate_lpips, gate_clip, gate_broken)


def sampling(command: Command) -> Command:
    """Add what decides which pictures are made, and with what they are measured."""
    return _add(_SAMPLING, command)


def gates(command: Command) -> Command:
    """Add the gates' limits; ``pop_limits`` reads them."""
    return _add(_GATES, command)


def pop_limits(given: dict[str, Any]) -> "Limits":
    """Take the gates' limits out of a command's options."""
    from quantkit.workflow.evaluate import Limits

    limits = {name: given.pop(f"gate_{name}") for name in ("ssim", "lpips", "clip", "broken")}
    return Limits(**{name: limit for name, limit in limits.items() if limit is not None})


def _add(chosen: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(chosen):
        command = option(command)
    return command
