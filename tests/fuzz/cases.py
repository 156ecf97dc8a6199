"""What a case is, what may come out of it, and which cases a run has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from random import Random


class Verdict(Enum):
    """What a case ended in; all but the first two are failures."""

    REFUSED = "refused"
    OK = "ok"
    TRACEBACK = "traceback"
    CRASH = "crash"
    HANG = "hang"
    MEMORY = "memory"
    MESSAGE = "message"
    EXIT = "exit code"
    ACCEPTED = "accepted"
    ANOTHER = "another model"
    UNLOADABLE = "unloadable"
    CODE = "code ran"
    FUZZER = "fuzzer"

    @property
    def failed(self) -> bool:
        """Whether quantkit is at fault."""
        return self not in {Verdict.REFUSED, Verdict.OK}


@dataclass
class Scene:
    """What damage works on: a copy of a subject, made for one case."""

    #: the copy, a directory; its files are hard links, so they are replaced and never written to
    folder: Path
    #: the undamaged one
    subject: Path
    rng: Random
    #: the bytes of what was in the way of an output
    found: bytes | None = None
    #: the streams that are closed when a command begins
    closed: tuple[int, ...] = ()
    #: what was done, for whoever repeats the case
    done: list[str] = field(default_factory=list)

    @property
    def outside(self) -> Path:
        """A place beside the copy, for what lies elsewhere."""
        return self.folder.parent

    @property
    def marker(self) -> Path:
        """A file that code in a damaged model would make if somebody ran it."""
        return self.outside / "code-ran"

    def say(self, text: str) -> None:
        """Note what was done."""
        self.done.append(text)


#: Changes the files of a scene.
Damage = Callable[[Scene], None]


@dataclass(frozen=True)
class Kind:
    """One way to damage the subjects of a family."""

    name: str
    damage: Damage
    #: how many cases it gets for one of another kind: more where the seed decides more
    weight: int = 1
    #: whether "ok" is wrong, whatever was read
    refuse: bool = False
    #: whether checksums were redone, so that "ok" of another content is no fault
    resealed: bool = False
    #: whether what was refused is loaded, too, to see that loading refuses it
    load: bool = True
    #: the subjects it makes sense for; empty: all of the family
    subjects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A kind and a seed: everything that happens follows from them."""

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}"

    @property
    def rng(self) -> Random:
        """A fresh source of this case's choices."""
        return Random(str(self))


def parse_case(text: str) -> Case:
    """Undo ``str``."""
    kind, _, seed = text.rpartition(":")
    return Case(kind, int(seed))


@dataclass(frozen=True)
class Outcome:
    """What came out of a case."""

    case: Case
    verdict: Verdict
    #: one line: what was found
    note: str = ""
    #: what was done, what was run and what it printed
    detail: str = ""


def deal(kinds: Sequence[tuple[str, int]], count: int, seed: int) -> list[Case]:
    """Return ``count`` cases: laps over the kinds, each as often as it weighs, in mixed order.

    Args:
        kinds: names and weights.
        count: how many.
        seed: the first of every kind's seeds; two runs share no case when theirs lie apart.
    """
    cases: list[Case] = []
    lap = 0
    while len(cases) < count:
        every = [Case(n, seed + lap * weight + i) for n, weight in kinds for i in range(weight)]
        Random(f"{seed}/{lap}").shuffle(every)
        cases += every
        lap += 1
    return cases[:count]
