"""A bounded store of the teacher's trajectories, and the teacher that fills it."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from quantkit.errors import QuantkitError
from quantkit.pipelines.calling import Call, rehearse, step_range
from quantkit.pipelines.replay import replayed
from quantkit.recovery.denoiser_calls import Chunk, Recording, Template, recording
from quantkit.recovery.distill.distributed import Ranks
from quantkit.recovery.distill.settings import DistillSettings


class Teacher:
    """A pipeline that denoises prompts from noise while its denoiser's calls are recorded."""

    def __init__(
        self,
        pipe: Any,
        denoiser: nn.Module,
        prompts: Sequence[str],
        settings: DistillSettings,
        ranks: Ranks | None = None,
    ) -> None:
        """Prepare to sample; prompts are taken in turn, each time with a new seed.

        Several processes take turns, batch by batch: no two sample the same.
        """
        self.pipe = pipe
        self._denoiser = denoiser
        self._prompts = prompts
        self._settings = settings
        self._ranks = ranks or Ranks()
        self._device = next(denoiser.parameters()).device
        self._woken = 0
        #: trajectories that this process made so far
        self.made = 0
        self._batches = 0
        seeds = tuple(range(settings.seed, settings.seed + len(prompts)))
        call = Call(tuple(prompts), seeds, settings.sampling_steps, settings.guidance)
        self._call = replace(call, inputs=rehearse(pipe, call))
        self._fewest, self.most_steps = step_range(pipe, self._call)

    def go_to(self, batch: int, count: int) -> None:
        """Sample the batch of this number next, as after ``batch`` batches of ``count``."""
        self._batches, self.made = batch, batch * count

    def sample(self, count: int) -> Chunk:
        """Denoise the next ``count`` prompts; a run's counts are all the same.

        Args:
            count: how many.

        Raises:
            ModelError: calls that no batch can be made of.
            RecipeError: a scheduler whose steps cannot be weighed.
            QuantkitError: out of GPU memory.
        """
        first = (self._batches * self._ranks.world + self._ranks.rank) * count
        indices = range(first, first + count)
        prompts = [self._prompts[i % len(self._prompts)] for i in indices]
        call = self.call(prompts, [self._settings.seed + i for i in indices])
        call = replace(call, steps=self._steps())
        try:
            with self.awake(), self._recording() as record, torch.no_grad():
                self.pipe(**call.arguments(self.pipe))
        except torch.OutOfMemoryError as error:
            raise QuantkitError(
                f"out of GPU memory while denoising {count} prompts; take a smaller "
                "sampling batch, or the device cpu",
                fields=("sampling_batch", "device"),
            ) from error
        self._batches += 1
        self.made += count
        return record.chunk()

    def _recording(self) -> AbstractContextManager[Recording]:
        weighs = self._settings.weighting == "schedule"
        return recording(self._denoiser, self.pipe.scheduler if weighs else None)

    def _steps(self) -> int:
        """Return the steps of this batch: drawn evenly by their logarithm, by the batch alone."""
        seed = self._settings.seed * 1_000_003 + self._batches
        place = float(torch.rand((), generator=Generator().manual_seed(seed)))
        steps: float = self._fewest * (self.most_steps / self._fewest) ** place
        return round(steps)

    def call(self, prompts: Sequence[str], seeds: Sequence[int]) -> Call:
        """Return the call of the pipeline that denoises these prompts to their latents."""
        return replace(self._call, prompts=tuple(prompts), seeds=tuple(seeds))

    def rest(self) -> None:
        """Leave the device to the student, where the pipeline is offloaded."""
        if self._settings.offload:
            self.pipe.to("cpu")

    @contextmanager
    def awake(self, *, replays: bool = True) -> Iterator[None]:
        """Hold an offloaded pipeline on its device during the body; blocks may nest.

        Args:
            replays: on a GPU steps are recorded and replayed meanwhile.
        """
        if self._settings.offload and not self._woken:
            self.pipe.to(self._device)
        self._woken += 1
        try:
            with replayed(self.pipe) if replays else nullcontext():
                yield
        finally:
            self._woken -= 1
            if not self._woken:
                self.rest()


class TrajectoryStore:
    """The last chunks of trajectories."""

    def __init__(self, first: Chunk, chunks: int, device: torch.device | None = None) -> None:
        """Put the first chunk in.

        Args:
            first: what all others are like, but for the number of steps.
            chunks: how many fit in.
            device: where they are kept; None for the chunk's own.
        """
        self.template: Template = first.template
        self.capacity = chunks
        self._device = device or first.answers.device
        self._chunks: deque[Chunk] = deque(maxlen=chunks)
        self.put(first)

    def put(self, chunk: Chunk) -> None:
        """Add a chunk, in place of the oldest one when the store is full."""
        self._chunks.append(chunk.to(self._device))

    def draw(self, batch: int, generator: Generator) -> tuple[list[Tensor], Tensor]:
        """Return the leaves of ``batch`` random calls of one row, and the teacher's answers.

        Args:
            batch: how many; of every chunk alike, however many steps it has.
            generator: on the CPU.
        """
        chosen = torch.randint(len(self._chunks), (batch,), generator=generator)
        counts = torch.bincount(chosen, minlength=len(self._chunks)).tolist()
        parts = [
            chunk.draw(count, generator)
            for chunk, count in zip(self._chunks, counts, strict=True)
            if count
        ]
        *leaves, answers = (torch.cat(values) for values in zip(*parts, strict=True))
        return leaves, answers
