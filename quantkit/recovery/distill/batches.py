"""A batch of the teacher's calls, drawn evenly from all of its trajectories."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from quantkit.recovery.denoiser_calls import Chunk, Template
from quantkit.recovery.distill.settings import DistillSettings
from quantkit.recovery.distill.trajectories import Teacher


@dataclass(frozen=True, eq=False)
class Calls:
    """Calls of one row each."""

    template: Template
    #: (B, ...) each: what the template makes arguments of
    leaves: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        """How many."""
        return len(self.leaves[0])

    def first(self, count: int) -> "Calls":
        """Return the first ``count``, or all if there are fewer."""
        return Calls(self.template, tuple(leaf[:count] for leaf in self.leaves))

    def twice(self) -> dict[str, Any]:
        """Return the arguments of a call with every row, and then every row again; in float32."""
        rows = [leaf.float() if leaf.is_floating_point() else leaf for leaf in self.leaves]
        return self.template.arguments([torch.cat([leaf, leaf]) for leaf in rows])


def sample_chunks(
    teacher: Teacher, settings: DistillSettings, steps: Sequence[int], late: Callable[[], bool]
) -> list[Chunk]:
    """Let the teacher denoise its prompts.

    Args:
        teacher: makes the trajectories.
        settings: how many at most, and how much memory they may take.
        steps: denoising steps of the sampling batches, in turn.
        late: asked after every sampling batch whether to stop.

    Raises:
        ModelError: calls that no batch can be made of.
        QuantkitError: out of GPU memory.
    """
    size = min(settings.sampling_batch, settings.trajectories)
    wanted = -(-settings.trajectories // size)
    with teacher.awake():
        chunks = [teacher.sample(size, steps[0])]
        while len(chunks) < wanted and not late():
            chunks.append(teacher.sample(size, steps[len(chunks) % len(steps)]))
            if sum(chunk.nbytes for chunk in chunks) > settings.bank_bytes:
                break
    return chunks


def draw_calls(chunks: list[Chunk], count: int, seed: int) -> Calls:
    """Return ``count`` random calls, none twice, or all if there are fewer."""
    generator = Generator().manual_seed(seed)
    # The same number of every chunk, and all of them mixed, so that the first few are alike.
    share = -(-count // len(chunks))
    parts = [_draw(chunk, share, generator) for chunk in chunks]
    leaves = tuple(torch.cat(values) for values in zip(*parts, strict=True))
    order = torch.randperm(len(leaves[0]), generator=generator)[:count]
    return Calls(chunks[0].template, tuple(leaf[order.to(leaf.device)] for leaf in leaves))


def _draw(chunk: Chunk, count: int, generator: Generator) -> tuple[Tensor, ...]:
    rows, steps = chunk.answers.shape[:2]
    places = torch.randperm(rows * steps, generator=generator)[:count].to(chunk.answers.device)
    row, step = places // steps, places % steps
    return (*(leaf[row, step] for leaf in chunk.moving), *(leaf[row] for leaf in chunk.still))
