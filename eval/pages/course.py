"""The page of a recovery: the student's pictures at every watch point, and the curves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from quantkit.eval.judging.noise_floor import picture_names
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import Comparison, compare
from quantkit.eval.measuring.embedding import FIRST_SIDE, LIST_SIDE, preview
from quantkit.eval.measuring.number_format import show
from quantkit.eval.measuring.pairs import Pair, Side, pair_numbers, pair_values, sort_keys
from quantkit.eval.measuring.pictures import Pairs, Pixels, to_pixels
from quantkit.eval.pages.page import Gallery, Page, Plot, Plots, Section, Tile
from quantkit.eval.pages.plots import plot_course
from quantkit.eval.pages.rendering import to_html
from quantkit.eval.pages.running import reason_of, running
from quantkit.eval.pages.sections import made_section

from quantkit._version import __version__
from quantkit.recovery.distill.distillation import Look
from quantkit.recovery.distill.score_change import ScoreChange
from quantkit.recovery.distill.training_progress import TrainingProgress, ValidationScore
from quantkit.storage.files import rewritten_file

#: Pictures up to which a page has them large: these are some 20 MB.
_LARGE = 300
#: Seconds after which losses are shown that came without pictures.
_EVERY = 10.0


@dataclass(frozen=True)
class CourseFacts:
    """Facts of the page that do not change while a recovery runs."""

    #: the pipeline that becomes
    name: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class _Seen:
    """One look: where it was, what it measured, and its pictures as the page holds them."""

    step: int
    score: ValidationScore
    comparison: Comparison
    sides: tuple[Side, ...]


class CoursePage:
    """One HTML file, written anew as the training goes on; there is none before the first news."""

    def __init__(self, path: Path, facts: CourseFacts) -> None:
        """Begin with nothing.

        Args:
            path: of the page.
            facts: of the recovery.
        """
        self._path, self._facts = path, facts
        self._points: list[TrainingProgress] = []
        self._seen: list[_Seen] = []
        self._teacher: tuple[Side, ...] = ()
        self._prompts: tuple[str, ...] = ()
        self._written: float | None = None
        #: whose weights the recovery wrote; None: those of the last look
        self._chosen: int | None = None

    def show(self, look: Look) -> None:
        """Take the pictures of a look."""
        pictures, expected = _pixels(look.found), _pixels(look.expected)
        names = picture_names(len(look.prompts))
        comparison = compare(Pairs(names, expected, pictures, look.prompts), Backbones())
        self._prompts = look.prompts
        # The first looks large: a page of hundreds must stay one that a browser opens.
        side = FIRST_SIDE if len(self._seen) * len(names) <= _LARGE else LIST_SIDE
        self._teacher = self._teacher or _sides("original", expected, look.prompts, side)
        sides = _sides(f"step {look.step:,}", pictures, look.prompts, side, comparison)
        self._seen.append(_Seen(look.step, look.score, comparison, sides))
        self.write()

    def follow(self, point: TrainingProgress) -> None:
        """Take a loss; it is shown with the next pictures, or after ten seconds."""
        self._points.append(point)
        if self._written is None or monotonic() - self._written >= _EVERY:
            self.write()

    def name_written(self, step: int) -> None:
        """Take the step whose weights are written: with patience not the last."""
        self._chosen = step

    @property
    def _result(self) -> _Seen:
        """The look at the weights that are written."""
        return next((seen for seen in self._seen if seen.step == self._chosen), self._seen[-1])

    def write(self, *, ended: str = "", done: bool = False) -> None:
        """Write the page as it stands, in one step.

        Args:
            ended: why the training ended before its end; empty: it did not.
            done: the training is over and its result is written.
        """
        with rewritten_file(self._path) as stage:
            stage.write_text(to_html(self._page(ended, done=done)), encoding="utf-8")
        self._written = monotonic()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Say at the end of the body that the recovery is over, or why it is not."""
        try:
            yield
        except BaseException as error:
            if self._written is not None:
                self.write(ended=reason_of(error))
            raise
        if self._written is not None:
            self.write(done=True)

    def _page(self, ended: str, *, done: bool) -> Page:
        note = "This page loads itself again while the recovery runs."
        if ended:
            note = "This page will not change. A saved training goes on with `--resume`."
        return Page(
            title=f"Recovery of {self._facts.name} - quantkit",
            heading=f"Recovery of {self._facts.name}",
            lead=self._lead(ended, done=done),
            state="not-judged",
            tiles=self._tiles(),
            sections=tuple(self._sections()),
            running=None if done else running(note, ended=bool(ended)),
        )

    def _sections(self) -> Iterator[Section]:
        if self._seen:
            pairs, keys = self._pairs(), sort_keys(self._result.comparison)
            yield Section(
                "pictures",
                "Pictures at every look",
                (Gallery(pairs, keys, wide=True, course=True),),
                f"{len(pairs)} prompts, the worst of the last look first; click one to compare it "
                "with the original",
                link=f"Pictures at {len(self._seen)} looks",
                open=True,
            )
        if plots := tuple(self._plots()):
            yield Section("curves", "Curves", (Plots(plots),), open=True)
        yield made_section(self._facts.commands, f"quantkit {__version__}", over=False)

    def _lead(self, ended: str, *, done: bool) -> str:
        words = "Recovered" if done else f"Not finished ({ended})" if ended else "Recovering"
        if not self._seen:
            return f"{words}: no pictures were looked at."
        first, last = self._seen[0], self._result
        if first is last:
            score = first.score
            return f"{words}: {score.metric} {show(score.value)} at step {first.step:,}."
        return f"{words}: {self._change}, from step {first.step:,} to {last.step:,}."

    @property
    def _change(self) -> ScoreChange:
        """The change from the first look to the weights that are written."""
        return ScoreChange.between(self._seen[0].score, self._result.score)

    def _tiles(self) -> tuple[Tile, ...]:
        tiles = []
        if self._seen:
            best = max(self._seen, key=lambda seen: seen.score.value)
            metric = best.score.metric
            change = str(self._change).removeprefix(f"{metric} ")
            notes = (f"best {show(best.score.value)}, at step {best.step:,}",)
            tiles.append(Tile(metric, change, notes))
        if self._points:
            losses = self._points[0].loss, self._points[-1].loss
            tiles.append(Tile("Loss", " -> ".join(f"{loss:.3g}" for loss in losses)))
            last = self._points[-1]
            tiles.append(Tile("Training", f"{last.step:,} steps", (f"{last.seconds:.0f} s",)))
        return tuple(tiles)

    def _plots(self) -> Iterator[Plot]:
        """Yield the curves of loss and pictures that have more than a point."""
        if len(self._seen) > 1:
            title = self._seen[0].score.metric
            values = [seen.score.value for seen in self._seen]
            steps = [seen.step for seen in self._seen]
            svg = plot_course(steps, values, title=title, name="metric", log=False)
            yield Plot(svg, f"{title} of the pictures against the original's, at every look.")
        if len(self._points) > 1:
            losses = [point.loss for point in self._points]
            steps = [point.step for point in self._points]
            svg = plot_course(steps, losses, title="loss", name="loss", log=True)
            yield Plot(svg, "Loss: mean squared error of the denoiser's answers.")

    def _pairs(self) -> tuple[Pair, ...]:
        """Return a row for every prompt, the worst of the written look first."""
        last = self._result.comparison
        return tuple(
            Pair(index, last.names[index], None, self._prompts[index], self._sides(index))
            for index in last.worst_first()
        )

    def _sides(self, index: int) -> tuple[Side, ...]:
        return (self._teacher[index], *(seen.sides[index] for seen in self._seen))


def _pixels(pictures: Any) -> tuple[Pixels, ...]:
    # A student that broke is shown, not refused: its numbers say what it is.
    return tuple(
        to_pixels(np.nan_to_num(picture), name=f"picture {index}")
        for index, picture in enumerate(pictures)
    )


def _sides(
    label: str,
    pictures: Sequence[Pixels],
    prompts: Sequence[str],
    side: int,
    comparison: Comparison | None = None,
) -> tuple[Side, ...]:
    return tuple(
        Side(
            label, preview(picture, side), "", (picture.shape[1], picture.shape[0]),
            f"{label.capitalize()}: {prompt}",
            pair_values(comparison, index) if comparison else (),
            pair_numbers(comparison, index) if comparison else (),
        )
        for index, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True))
    )  # fmt: skip
