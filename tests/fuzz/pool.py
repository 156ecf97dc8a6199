"""Cases in processes: one that hangs or dies is replaced, and its case counted."""

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from . import limits
from .attempt import attempt
from .cases import Case, Outcome, Verdict

#: Seconds of the processor that a case may take, and by the clock, of one that sleeps: on a machine
#: that others use, too, the clock says nothing of what runs.
PATIENCE, WALL = 10.0, 60.0
#: Seconds between two looks at what runs.
_LOOK = 0.5
#: Cases after which a worker is replaced, so that nothing gathers in it.
SHIFT = 200


@dataclass
class _Worker:
    process: int
    pipe: Connection
    case: Case | None = None
    deadline: float = 0.0
    #: seconds of the processor when the case began
    before: float = 0.0
    done: int = 0

    def give(self, case: Case) -> None:
        self.case, self.deadline = case, time.monotonic() + WALL
        self.before = limits.processor_time(self.process)
        self.pipe.send(case)

    @property
    def hangs(self) -> bool:
        """Whether its case takes longer than it may."""
        spent = limits.processor_time(self.process) - self.before
        return spent > PATIENCE or time.monotonic() > self.deadline

    def end(self) -> int:
        """End it; return its exit status as ``waitpid`` tells it."""
        self.pipe.close()
        os.kill(self.process, signal.SIGKILL)
        return os.waitpid(self.process, 0)[1]


def run_cases(cases: Sequence[Case], subjects: Path, scratch: Path, jobs: int) -> Iterator[Outcome]:
    """Yield what comes out of the cases, in the order in which they end."""
    waiting = list(reversed(cases))
    workers = [_start(subjects, scratch) for _ in range(min(jobs, len(cases)))]
    try:
        while workers:
            for worker in [w for w in workers if w.case is None]:
                if not waiting:
                    worker.end()
                    workers.remove(worker)
                elif worker.done >= SHIFT:
                    worker.end()
                    workers[workers.index(worker)] = _start(subjects, scratch)
                else:
                    worker.give(waiting.pop())
            yield from _ended(workers, subjects, scratch)
    finally:
        for worker in workers:
            worker.end()


def _ended(workers: list[_Worker], subjects: Path, scratch: Path) -> Iterator[Outcome]:
    """Wait for the next to end; yield what came out of those that did."""
    busy = [worker for worker in workers if worker.case is not None]
    ready = wait([worker.pipe for worker in busy], _LOOK) if busy else []
    for worker in busy:
        case = worker.case
        assert case is not None
        if worker.pipe in ready:
            try:
                outcome = worker.pipe.recv()
                worker.case, worker.done = None, worker.done + 1
            except EOFError:
                status = os.waitstatus_to_exitcode(os.waitpid(worker.process, 0)[1])
                outcome = Outcome(case, Verdict.CRASH, f"the process died, exit status {status}")
                workers[workers.index(worker)] = _start(subjects, scratch)
            yield outcome
        elif worker.hangs:
            worker.end()
            workers[workers.index(worker)] = _start(subjects, scratch)
            yield Outcome(case, Verdict.HANG, f"no end after {PATIENCE:g} s of the processor")


def _start(subjects: Path, scratch: Path) -> _Worker:
    ours, theirs = Pipe()
    process = os.fork()
    if process:
        theirs.close()
        return _Worker(process, ours)
    ours.close()
    try:
        _work(theirs, subjects, scratch / str(os.getpid()))
    finally:
        # Nothing of the parent's is to be finished here.
        os._exit(0)


def _work(pipe: Connection, subjects: Path, scratch: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    limits.confine()
    try:
        while True:
            case = pipe.recv()
            folder = scratch / "x"
            folder.mkdir(parents=True)
            pipe.send(_measured(case, subjects, folder))
            drop(scratch)
    except EOFError:
        pass


def _measured(case: Case, subjects: Path, folder: Path) -> Outcome:
    before = limits.reset_peak()
    outcome = attempt(case, subjects, folder)
    grown = limits.peak() - before
    if grown > limits.MEMORY:
        return replace(outcome, verdict=Verdict.MEMORY, note=f"{grown >> 20} MB; {outcome.note}")
    return outcome


def drop(folder: Path) -> None:
    """Delete a folder, whatever modes a case has left in it."""
    for path, names, _ in os.walk(folder):
        for name in names:
            inner = Path(path, name)
            if not inner.is_symlink():
                inner.chmod(0o700)
    shutil.rmtree(folder)
