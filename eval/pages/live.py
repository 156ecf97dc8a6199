"""The page of an evaluation that still runs: its pictures so far, written anew as more come."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.eval.judging.noise_floor import picture_names
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import Comparison, compare, join
from quantkit.eval.measuring.embedding import Pictures, Store
from quantkit.eval.measuring.generation import GenerationSettings
from quantkit.eval.measuring.number_format import show
from quantkit.eval.measuring.pairs import Pair, PairView, Side, look_first
from quantkit.eval.measuring.pictures import Pairs, Pixels, save_png
from quantkit.eval.pages.page import Figures, Page, Section, Tile
from quantkit.eval.pages.rendering import to_html
from quantkit.eval.pages.report import KIND
from quantkit.eval.pages.running import reason_of, running
from quantkit.eval.pages.sections import made_section, pictures_section
from quantkit.eval.pages.tiles import comparison_tiles

from quantkit._version import __version__
from quantkit.progress import Progress
from quantkit.storage.files import mark_directory, rewritten_file, staged_directory

_PAGE = "report.html"


@dataclass(frozen=True)
class SoFar:
    """Progress of an evaluation, and its worst pair so far."""

    done: int
    total: int
    name: str
    ssim: float
    #: the pair's files
    original: Path
    packed: Path
    #: another pair was the worst when this was told last
    new: bool

    @property
    def words(self) -> str:
        """All of it in a line."""
        worst = f"worst pair, {self.name}: SSIM {show(self.ssim)}"
        return f"{self.done} of {self.total} pictures so far; {worst}"


#: Told after every few pictures of the packed pipeline.
Watcher = Callable[[SoFar], None]


def unwatched(found: SoFar) -> None:
    """Watch nothing: the page alone fills."""
    del found


@dataclass(frozen=True)
class LiveFacts:
    """Facts of the page that do not change while an evaluation runs."""

    title: str
    settings: GenerationSettings
    commands: tuple[str, ...]


class LivePage:
    """A folder with report.html and images/, which the finished report replaces."""

    def __init__(self, folder: Path, facts: LiveFacts, watch: Watcher) -> None:
        """Begin with no pictures.

        Args:
            folder: exists, and is quantkit's own.
            facts: of the evaluation.
            watch: told of the worst pair.
        """
        self._folder, self._facts, self._watch = folder, facts, watch
        self._names = picture_names(len(facts.settings.prompts))
        self._originals: list[Pixels] = []
        self._packed: list[Pixels] = []
        self._measured: list[Comparison] = []
        self._worst: str | None = None
        self._step = "loading"

    def original(self, start: int, pictures: Sequence[Pixels]) -> None:
        """Take pictures of the original."""
        self._save("original", start, pictures)
        self._originals += pictures
        self.write()

    def packed(self, start: int, pictures: Sequence[Pixels]) -> None:
        """Take pictures of the packed pipeline, and measure them."""
        self._save("packed", start, pictures)
        self._packed += pictures
        self._measured.append(compare(self._pairs(start), Backbones()))
        self.write()
        self._watch(self._so_far())

    def under(self, progress: Progress) -> Progress:
        """Return a progress that the page follows: it names the step that is in work."""

        def report(step: str, done: int, total: int) -> None:
            progress(step, done, total)
            if step != self._step:
                self._step = step
                self.write()

        return report

    def write(self, ended: str = "") -> None:
        """Write the page as it stands, in one step.

        Args:
            ended: why nothing more will come; empty: it goes on.
        """
        with rewritten_file(self._folder / _PAGE) as stage:
            stage.write_text(to_html(self._page(ended)), encoding="utf-8")

    def _save(self, side: str, start: int, pictures: Sequence[Pixels]) -> None:
        for name, picture in zip(self._names[start:], pictures, strict=False):
            save_png(picture, self._folder / "images" / side / f"{name}.png")

    def _pairs(self, start: int) -> Pairs:
        """Return the pairs from ``start`` on that are there."""
        chosen = slice(start, len(self._packed))
        return Pairs(
            self._names[chosen], tuple(self._originals[chosen]), tuple(self._packed[chosen]),
            self._facts.settings.prompts[chosen],
        )  # fmt: skip

    def _so_far(self) -> SoFar:
        comparison = join(self._measured)
        worst = comparison.worst_first()[0]
        name = comparison.names[worst]
        self._worst, new = name, name != self._worst
        original, packed = (
            self._folder / "images" / side / f"{name}.png" for side in ("original", "packed")
        )
        ssim = comparison.scores["ssim"].values[worst]
        return SoFar(len(comparison.names), len(self._names), name, ssim, original, packed, new)

    def _page(self, ended: str) -> Page:
        done, total, view = len(self._packed), len(self._names), self._view()
        lead = f"{done} of {total} pictures so far; the verdict comes with the last."
        note = f"Now: {self._step}. This page loads itself again while the evaluation runs."
        if ended:
            lead = f"Not finished ({ended}): {done} of {total} pictures, and no verdict."
            note = "This page will not change: run the command again."
        order = view.comparison.worst_first() if view else []
        return Page(
            title=f"{done} of {total}: {self._facts.title} - quantkit report",
            heading=self._facts.title,
            lead=lead,
            state="not-judged",
            tiles=self._tiles(),
            groups=look_first(order, view.first) if view else (),
            sections=tuple(self._sections(view, order)),
            running=running(note, ended=bool(ended)),
        )

    def _sections(self, view: PairView | None, order: Sequence[int]) -> Iterator[Section]:
        if view is not None:
            section = pictures_section(view, order, Store(), note=False)
            digest = f"{len(order)} of {len(self._names)}"
            link = f"{len(order)} pairs so far"
            yield replace(section, title="Pairs so far", digest=digest, link=link)
        settings = self._facts.settings
        if waiting := range(len(self._packed), len(self._originals)):
            yield Section(
                "waiting",
                "Of the original alone",
                (Figures(tuple(self._alone(index) for index in waiting)),),
                f"{len(waiting)}, whose packed pictures are not made yet",
                link=f"{len(waiting)} of the original alone",
                open=True,
            )
        digest = f"quantkit {__version__}, {settings.steps} steps"
        yield made_section(self._facts.commands, digest, over=False)

    def _alone(self, index: int) -> Pair:
        (height, width, _), name = self._originals[index].shape, self._names[index]
        prompt, file = self._facts.settings.prompts[index], f"images/original/{name}.png"
        alt = f"Original, pair {name}: {prompt}"
        return Pair(index, name, None, prompt, (Side("original", file, "", (width, height), alt),))

    def _tiles(self) -> tuple[Tile, ...]:
        total = len(self._names)
        first = Tile(
            "Pictures",
            f"{len(self._packed)} of {total}",
            (f"of the original {len(self._originals)} of {total}",),
        )
        return (first, *comparison_tiles(join(self._measured))[1:]) if self._measured else (first,)

    def _view(self) -> PairView | None:
        """Return the pairs so far; None before the first."""
        if not self._measured:
            return None
        # The files themselves: nothing is encoded again for every page.
        comparison, seeds = join(self._measured), self._facts.settings.seeds
        return PairView(self._pairs(0), comparison, seeds, Pictures.BESIDE)


@contextmanager
def open_live(folder: Path, facts: LiveFacts, *, force: bool, watch: Watcher) -> Iterator[LivePage]:
    """Yield a page that is there until the body writes its report over it.

    A body that fails leaves the page with the pictures so far, and it says why they are all.

    Args:
        folder: of the report, made here.
        facts: of the evaluation.
        force: replace a report that exists.
        watch: told of the worst pair.

    Raises:
        OutputError: the folder exists without ``force``, or cannot be written.
    """
    names = [f"{name}.png" for name in picture_names(len(facts.settings.prompts))]
    later = [f"images/{side}/{name}" for side in ("original", "packed") for name in names]
    # Listed now: a process that is killed leaves a folder that is known for quantkit's.
    with staged_directory(folder, kind=KIND, force=force, later=[*later, _PAGE]):
        pass
    page = LivePage(folder, facts, watch)
    page.write()
    try:
        yield page
    except BaseException as error:
        page.write(ended=reason_of(error))
        mark_directory(folder, kind=KIND)
        raise
