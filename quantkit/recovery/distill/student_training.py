"""Training a student on its teacher's outputs."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from quantkit.errors import NonFiniteError, QuantkitError
from quantkit.recovery.denoiser_calls import Chunk, Template
from quantkit.recovery.distill.distributed import Ranks
from quantkit.recovery.distill.optimizer import Stepper
from quantkit.recovery.distill.settings import DistillSettings
from quantkit.recovery.distill.training_progress import (
    Clock,
    ScoredStep,
    TrainingProgress,
    ValidationScore,
)
from quantkit.recovery.distill.trajectories import Teacher, TrajectoryStore

#: Steps after which the loss is read, which waits for the device.
READ_EVERY = 25


class Watcher(Protocol):
    """A validation that runs now and then during training."""

    def look(self, average: dict[str, Tensor]) -> ValidationScore:
        """Measure the denoiser of these weights."""


class Saver(Protocol):
    """A store of a training's state, to resume from."""

    def due(self) -> bool:
        """Tell whether it is time."""

    def save(self, trainer: "Trainer") -> None:
        """Keep it."""


class _StudentCall(nn.Module):
    """The student as a function of rows."""

    def __init__(self, denoiser: nn.Module, template: Template) -> None:
        super().__init__()
        self.denoiser = denoiser
        self._template = template

    def forward(self, *rows: Tensor) -> Tensor:
        answer: Tensor = self.denoiser(**self._template.arguments(rows))[0]
        return answer


class Trainer:
    """One student and the state of its training."""

    def __init__(
        self,
        student: nn.Module,
        stepper: Stepper,
        teacher: Teacher,
        settings: DistillSettings,
        ranks: Ranks | None = None,
    ) -> None:
        """Prepare the training.

        Args:
            student: a copy of the teacher's denoiser; changed in place.
            stepper: made for this student.
            teacher: makes the trajectories.
            settings: how long and how fast.
            ranks: the processes that train together; None: this one alone.
        """
        self.stepper = stepper
        self.teacher = teacher
        self.clock = Clock()
        #: steps done
        self.step = 0
        #: the loss on the way
        self.points: list[TrainingProgress] = []
        #: the pictures before the first step; None: not looked at
        self.first_look: ScoredStep | None = None
        #: trajectory batches that the store was given, and the first of those that it holds
        self.chunks = self.oldest = 0
        self._student = student
        self._device = next(student.parameters()).device
        self._settings = settings
        self._ranks = ranks or Ranks()

    def run(
        self,
        watch: Callable[[TrainingProgress], None],
        watcher: Watcher | None = None,
        saver: Saver | None = None,
    ) -> dict[str, Tensor]:
        """Train to the end of the steps or of the time.

        Args:
            watch: told of the loss.
            watcher: looks at the pictures; None: nobody does.
            saver: keeps the training now and then; None: nobody does.

        Returns:
            the averaged weights.

        Raises:
            NonFiniteError: the loss is NaN or Inf.
            QuantkitError: out of GPU memory.
        """
        try:
            with warnings.catch_warnings():
                # Graphs are captured on a stream of their own, once; the wait costs nothing.
                warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
                self._run(watch, watcher, saver)
        except torch.OutOfMemoryError as error:
            raise QuantkitError(
                f"out of GPU memory at a batch of {self._settings.batch}; take a smaller one, "
                "checkpointing or offload",
                fields=("batch", "checkpointing", "offload"),
            ) from error
        return self.stepper.average

    @property
    def written_look(self) -> ScoredStep | None:
        """The look at the weights that ``run`` returned; None: there was none."""
        last = self.points[-1]
        if last.look is None or last.step != self.step:
            return None
        return ScoredStep(last.step, last.look)

    def _run(
        self,
        watch: Callable[[TrainingProgress], None],
        watcher: Watcher | None,
        saver: Saver | None,
    ) -> None:
        store = self._refill() if self.chunks else self._fill()
        call = self._make_call(store)
        losses: list[Tensor] = []
        while True:
            fraction = self._ranks.agree(self._fraction())
            # A run whose time is over before it began still takes one step.
            if fraction >= 1 and self.step:
                break
            if self.step and self.step % self._settings.refresh == 0:
                store.put(self._sample())
                self.oldest = max(self.oldest, self.chunks - store.capacity)
            losses.append(self._train(call, store, fraction))
            self.step += 1
            # The same in all processes: they average what is read.
            looking = self._look_is_due()
            if looking or self.step % READ_EVERY == 0 or self.step in (1, self._settings.steps):
                self._read(losses, watcher if looking else None)
                watch(self.points[-1])
                self._save(saver)
        if losses:
            self._read(losses, None)
            watch(self.points[-1])

    def _look_is_due(self) -> bool:
        every = self._settings.watch_every
        return every is not None and self.step % every == 0

    def _save(self, saver: Saver | None) -> None:
        if saver is not None and saver.due():
            with self.clock.paused():
                saver.save(self)

    def _sample(self) -> Chunk:
        chunk = self.teacher.sample(self._sampling_batch)
        self.chunks += 1
        return chunk

    @property
    def _sampling_batch(self) -> int:
        return min(self._settings.sampling_batch, self._settings.trajectories)

    def _fill(self) -> TrajectoryStore:
        """Sample until the store is full, or a fifth of the time is over."""
        limit = self._settings.seconds
        with self.teacher.awake():
            store = self._new_store(self._sample())
            for _ in range(store.capacity - 1):
                late = limit is not None and self.clock.elapsed > limit / 5
                if self._ranks.agree(float(late)):
                    break
                store.put(self._sample())
        return store

    def _refill(self) -> TrajectoryStore:
        """Sample the trajectories again that the store held when the training was saved."""
        expected, self.chunks = self.chunks, self.oldest
        self.teacher.go_to(self.oldest, self._sampling_batch)
        with self.clock.paused(), self.teacher.awake():
            store = self._new_store(self._sample())
            while self.chunks < expected:
                store.put(self._sample())
        return store

    def _new_store(self, first: Chunk) -> TrajectoryStore:
        device = torch.device("cpu") if self._settings.offload else self._device
        return TrajectoryStore(first, self._capacity(first), device)

    def _capacity(self, first: Chunk) -> int:
        expected = -(-self._settings.trajectories // self._sampling_batch)
        largest = first.nbytes * self.teacher.most_steps // first.steps
        return max(1, min(expected, self._settings.bank_bytes // largest))

    def _make_call(self, store: TrajectoryStore) -> Callable[..., Tensor]:
        call = _StudentCall(self._student, store.template)
        settings = self._settings
        if self._device.type != "cuda" or not settings.graphs:
            return call
        if settings.checkpointing or settings.offload:
            return call
        rows = self._floats(store.draw(settings.batch, self._generator())[0])
        with self._autocast():
            graphed: Any = torch.cuda.make_graphed_callables(
                call, tuple(rows), allow_unused_input=True
            )
        replay: Callable[..., Tensor] = graphed
        return replay

    def _generator(self) -> Generator:
        """Return the generator of this step: of the step alone, so that no state is to be kept."""
        ranks = self._ranks
        seed = self._settings.seed * 1_000_003 + self.step * ranks.world + ranks.rank
        return Generator().manual_seed(seed)

    def _autocast(self) -> torch.autocast:
        # Without its cache, because casts that are cached outside of a graph are lost to it.
        on_gpu = self._device.type == "cuda"
        return torch.autocast(
            self._device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False
        )

    def _train(
        self, call: Callable[..., Tensor], store: TrajectoryStore, fraction: float
    ) -> Tensor:
        """Take one step and return its loss, without waiting for the device."""
        rows, expected = store.draw(self._settings.batch, self._generator())
        # A young average forgets faster, or it would remember the weights of one shot.
        decay = min(self._settings.average, (1 + self.step) / (10 + self.step))
        self.stepper.begin(self._settings.rate * self._schedule(fraction), decay)
        with self._autocast():
            answer = call(*self._floats(rows))
        loss = functional.mse_loss(answer.float(), expected.to(self._device).float())
        loss.backward()  # type: ignore[no-untyped-call]
        self.stepper.finish()
        return loss.detach()

    def _schedule(self, fraction: float) -> float:
        warm = min(1.0, (self.step + 1) / max(1, self._settings.warm_up))
        return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))

    def _fraction(self) -> float:
        steps, seconds = self._settings.steps, self._settings.seconds
        return max(
            0.0 if steps is None else self.step / steps,
            0.0 if seconds is None else self.clock.elapsed / seconds,
        )

    def _read(self, losses: list[Tensor], watcher: Watcher | None) -> None:
        """Add a point, with a look where a watcher is given."""
        mean = torch.stack(losses).mean()
        losses.clear()
        self._ranks.average_([mean])
        loss = float(mean)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"recovery: the loss is {loss} at step {self.step}; take a lower rate",
                fields=("rate",),
            )
        seconds, look = self.clock.elapsed, None
        if watcher is not None:
            with self.clock.paused():
                look = watcher.look(self.stepper.average)
        fraction = min(1.0, self._fraction())
        self.points.append(TrainingProgress(self.step, loss, seconds, fraction, look))

    def _floats(self, rows: list[Tensor]) -> list[Tensor]:
        moved = [value.to(self._device) for value in rows]
        return [value.float() if value.is_floating_point() else value for value in moved]
