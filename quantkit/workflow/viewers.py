"""Viewers of a running evaluation: none, or a live page."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.eval.measuring.generation import Viewer, unseen
from quantkit.eval.pages.live import LiveFacts, Watcher, open_live
from quantkit.progress import Progress


@dataclass(frozen=True)
class Viewers:
    """The viewers of pictures and steps of a running evaluation."""

    original: Viewer
    packed: Viewer
    progress: Progress
    #: the output is there, or may be replaced
    force: bool


@contextmanager
def watched(
    path: Path | None, facts: LiveFacts, watch: Watcher | None, progress: Progress, *, force: bool
) -> Iterator[Viewers]:
    """Yield the viewers: a live page where ``watch`` is given."""
    if watch is None:
        yield Viewers(unseen, unseen, progress, force)
        return
    assert path is not None, "refused before"
    with open_live(path, facts, force=force, watch=watch) as page:
        yield Viewers(page.original, page.packed, page.under(progress), force=True)
