"""Who sees an evaluation on the way: nobody, or a page that fills while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.eval.measuring.generation import Viewer, unseen
from quantkit.eval.pages.live import LiveFacts, Watcher, open_live
from quantkit.progress import Progress


@dataclass(frozen=True)
class Onlooker:
    """Who sees pictures and steps of an evaluation on the way."""

    original: Viewer
    packed: Viewer
    progress: Progress
    #: the output is there, or may be replaced
    force: bool


@contextmanager
def watched(
    path: Path | None, facts: LiveFacts, watch: Watcher | None, progress: Progress, *, force: bool
) -> Iterator[Onlooker]:
    """Yield who looks on: the page that fills, where somebody watches."""
    if watch is None:
        yield Onlooker(unseen, unseen, progress, force)
        return
    assert path is not None, "refused before"
    with open_live(path, facts, force=force, watch=watch) as page:
        yield Onlooker(page.original, page.packed, page.under(progress), force=True)
