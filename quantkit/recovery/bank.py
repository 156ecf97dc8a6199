"""A bounded store of the teacher's trajectories, and the teacher that fills it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from quantkit.errors import QuantkitError
from quantkit.recovery.calls import Chunk, Template, recording
from quantkit.recovery.settings import Settings


class Teacher:
    """A pipeline that denoises prompts from noise, while what its denoiser is asked is recorded."""

    def __init__(
        self, pipe: Any, denoiser: nn.Module, prompts: Sequence[str], settings: Settings
    ) -> None:
        """Prepare to sample; prompts are taken in turn, each time with a new seed."""
        self._pipe = pipe
        self._denoiser = denoiser
        self._prompts = prompts
        self._settings = settings
        #: trajectories made so far, which is also the offset of the next one's seed
        self.made = 0

    def sample(self, count: int) -> Chunk:
        """Denoise the next ``count`` prompts.

        Raises:
            ModelError: calls that no batch can be made of.
            QuantkitError: out of GPU memory.
        """
        indices = range(self.made, self.made + count)
        guidance = self._settings.guidance
        try:
            with recording(self._denoiser) as record, torch.no_grad():
                self._pipe(
                    prompt=[self._prompts[i % len(self._prompts)] for i in indices],
                    num_inference_steps=self._settings.sampling_steps,
                    generator=[
                        Generator("cpu").manual_seed(self._settings.seed + i) for i in indices
                    ],
                    output_type="latent",
                    **({} if guidance is None else {"guidance_scale": guidance}),
                )
        except torch.OutOfMemoryError as error:
            raise QuantkitError(
                f"out of GPU memory while denoising {count} prompts; take a smaller "
                "--sampling-batch, or --device cpu"
            ) from error
        self.made += count
        return record.chunk()


class Bank:
    """Chunks of trajectories in one block of memory; the oldest is overwritten."""

    def __init__(self, first: Chunk, chunks: int) -> None:
        """Make room for ``chunks`` like the first, and put it in."""
        self.template: Template = first.template
        self._rows, self._calls = first.answers.shape[:2]
        self._stores = [
            torch.empty((chunks * self._rows, *value.shape[1:]), dtype=value.dtype,
                        device=value.device)
            for value in _tensors(first)
        ]  # fmt: skip
        self._capacity = chunks
        self._put = 0
        self.put(first)

    def put(self, chunk: Chunk) -> None:
        """Add a chunk, over the oldest one when the bank is full."""
        start = self._put % self._capacity * self._rows
        for store, value in zip(self._stores, _tensors(chunk), strict=True):
            store[start : start + self._rows] = value
        self._put += 1

    def draw(self, batch: int, generator: Generator) -> tuple[list[Tensor], Tensor]:
        """Return the leaves of ``batch`` random calls of one row, and the teacher's answers."""
        answers = self._stores[-1]
        filled = min(self._put, self._capacity) * self._rows
        rows = torch.randint(filled, (batch,), generator=generator, device=answers.device)
        calls = torch.randint(self._calls, (batch,), generator=generator, device=answers.device)
        moving = len(self.template.moving)
        leaves = [store[rows, calls] for store in self._stores[:moving]]
        leaves += [store[rows] for store in self._stores[moving:-1]]
        return leaves, answers[rows, calls]


def _tensors(chunk: Chunk) -> tuple[Tensor, ...]:
    return (*chunk.moving, *chunk.still, chunk.answers)
