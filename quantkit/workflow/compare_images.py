"""Comparing two folders of pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.eval.judging.gates import Compression, Gate, Limits, State, judge, state_of
from quantkit.eval.judging.serialize import comparison_json, gates_json
from quantkit.eval.measuring.backbones import load_backbones
from quantkit.eval.measuring.comparison import Comparison
from quantkit.eval.measuring.comparison import compare as measure
from quantkit.eval.measuring.embedding import Pictures
from quantkit.eval.measuring.pictures import match_folders
from quantkit.eval.pages.images_page import KIND, write_images_page
from quantkit.pipelines.running import choose_device
from quantkit.progress import Progress, silent
from quantkit.storage.places import check_directory, refuse_overlap
from quantkit.workflow.arguments import PromptsLike, as_path, as_prompts

#: No gates: none is judged unless it is asked for.
NO_LIMITS = Limits(None, None, None, None)


@dataclass(frozen=True, eq=False)
class ComparedImages:
    """The metrics of every pair of pictures, and the gates."""

    comparison: Comparison
    #: those that were asked for
    gates: tuple[Gate, ...]

    @property
    def state(self) -> State:
        """The state of the gates: passed, failed, or undecided; not judged where there is none."""
        return state_of(self.gates)

    @property
    def passed(self) -> bool:
        """True when every gate that was asked for passes."""
        return not self.gates or self.state is State.PASSED

    def __repr__(self) -> str:
        """Return the mean of every metric in a line."""
        means = ", ".join(
            f"{name} {score.summary.mean:.4g}" for name, score in self.comparison.scores.items()
        )
        return f"{len(self.comparison.names)} pairs: {means}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values = comparison_json(self.comparison)
        about = {"schema": "quantkit.images", "schema_version": 1}
        return {**about, **values, "state": self.state.value, "gates": gates_json(self.gates)}


def compare_images(
    first: str | Path,
    second: str | Path,
    *,
    prompts: PromptsLike | None = None,
    lpips_weights: str | Path | None = None,
    clip: str | None = None,
    without: tuple[str, ...] = (),
    limits: Limits = NO_LIMITS,
    output: str | Path | None = None,
    beside: bool = False,
    force: bool = False,
    commands: Sequence[str] = (),
    device: str = "auto",
    progress: Progress = silent,
) -> ComparedImages:
    """Measure every pair of pictures with one name in two folders.

    Args:
        first: the folder of the original's pictures.
        second: the folder of the others.
        prompts: one per picture, in the order of the names: adds CLIP score.
        lpips_weights: torchvision's AlexNet weights, or a folder with a feature network; None:
            torchvision's cache.
        clip: directory or hub id of the CLIP score's model.
        without: metrics to leave out: lpips, clip.
        limits: of the gates.
        output: the folder for report.html, report.json and the pictures as PNG; None: nothing is
            written.
        beside: report.html shows the files in images/ and holds no pictures.
        force: replace an existing output.
        commands: what a reader types to make the page again.
        device: auto, cpu or cuda[:N].
        progress: told of pairs done.

    Returns:
        every metric of every pair, and the gates that were asked for.

    Raises:
        InputError: pictures without a partner, of other sizes, networks that cannot be had, or a
            gate on a metric that is not measured.
        OutputError: the output exists, or lies in one of the folders.
    """
    path = as_path(output)
    if path is not None:
        check_directory(path, kind=KIND, force=force)
        for folder in (first, second):
            refuse_overlap(path, Path(folder))
    _refuse_unmeasured(limits, without, prompts=prompts is not None)
    texts = None if prompts is None else as_prompts(prompts)
    pairs = match_folders(Path(first), Path(second), texts)
    left_out = without if prompts is not None else (*without, "clip")
    place = choose_device(device)
    backbones = load_backbones(as_path(lpips_weights), clip, left_out, device=place)
    comparison = measure(pairs, backbones, progress=progress)
    found = ComparedImages(comparison, judge(comparison, limits, Compression.QUANTIZED))
    if path is not None:
        write_images_page(
            comparison,
            found.gates,
            pairs,
            path,
            force=force,
            pictures=Pictures.BESIDE if beside else Pictures.INSIDE,
            title=f"{second} against {first}",
            commands=commands,
            values=found.to_json(),
        )
    return found


def _refuse_unmeasured(limits: Limits, without: tuple[str, ...], *, prompts: bool) -> None:
    """Refuse a gate on a metric that will not be measured: it would pass unseen."""
    for metric, limit in (
        ("lpips", limits.lpips),
        ("clip", limits.clip),
        ("clip", limits.broken),
    ):
        if limit is not None and metric in without:
            raise InputError(
                f"the gate on {metric}: this metric is left out; drop the gate, or measure it",
                fields=("gates", "lpips_weights", "clip"),
            )
    for name, limit in (("clip", limits.clip), ("broken", limits.broken)):
        if limit is not None and not prompts:
            raise InputError(
                f"the gate on {name}: CLIP needs the prompts; give them", fields=("prompts",)
            )
