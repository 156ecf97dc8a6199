"""Batches of prompts, and the number of batches that fit a GPU at once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch

from quantkit.recipe.calibration import CalibrationRecipe

#: Prompts at once, at most: more was not timed, and a run that is killed loses all of them.
_MOST = 64
#: Of a card's memory: a number that does not change with what else runs there, so that a command
#: gives the same bytes each time; and of what is free, so that there is room for it.
_OF_ALL, _OF_FREE = 0.5, 0.8


@dataclass(frozen=True)
class Batch:
    """Prompts that are denoised together."""

    prompts: tuple[str, ...]
    #: of each prompt's noise: its own, so that a batch size changes no statistics but rounding
    seeds: range
    #: prompts of each of the recipe's batches that run at once here
    sizes: tuple[int, ...]


def split_batches(prompts: Sequence[str], settings: CalibrationRecipe) -> tuple[Batch, ...]:
    """Return the batches; prompt i has the noise seed ``settings.seed`` + i."""
    starts = range(0, len(prompts), settings.batch)
    parts = [tuple(prompts[start : start + settings.batch]) for start in starts]
    firsts = [settings.seed + start for start in starts]
    return tuple(
        Batch(part, range(first, first + len(part)), (len(part),))
        for part, first in zip(parts, firsts, strict=True)
    )


def at_once(batches: Sequence[Batch]) -> Batch:
    """Return batches that follow one another as one."""
    first, last = batches[0].seeds, batches[-1].seeds
    return Batch(
        tuple(chain.from_iterable(batch.prompts for batch in batches)),
        range(first.start, last.stop),
        tuple(chain.from_iterable(batch.sizes for batch in batches)),
    )


class GrowingBatches:
    """Batches, of which a GPU runs the first one alone, then as many at once as it has room for."""

    def __init__(
        self,
        batches: Sequence[Batch],
        device: torch.device,
        *,
        users: int = 1,
        count: int | None = None,
    ) -> None:
        """Begin before the first batch.

        Args:
            batches: that follow one another.
            device: where they run; a CPU runs them one by one, as it is no faster with more.
            users: processes that share the device.
            count: of batches at once, in a run that this one goes on with; None: not known yet.
        """
        self._left = list(batches)
        self._device, self._users = device, users
        #: batches at once; None: not known yet
        self.count = 1 if device.type == "cpu" else count

    def __len__(self) -> int:
        """Return how many of the batches did not run yet."""
        return len(self._left)

    @contextmanager
    def next(self) -> Iterator[Batch]:
        """Yield what is to run in the body."""
        count = self.count or 1
        # Of one size, if that can be: steps are recorded for each.
        count = -(-len(self._left) // -(-len(self._left) // count))
        batch = at_once(self._left[:count])
        del self._left[:count]
        if self.count is not None:
            yield batch
            return
        before = _reserved(self._device)
        yield batch
        took = torch.cuda.max_memory_reserved(self._device) - before
        room = _room(self._device) // self._users
        self.count = fitting(took, room, len(batch.prompts))


def fitting(took: int, room: int, prompts: int) -> int:
    """Return how many batches to run at once, a power of two: a little room more changes nothing.

    Args:
        took: bytes that one batch took.
        room: bytes that all may take.
        prompts: of a batch.
    """
    most = min(_MOST // prompts, room // max(took, 1))
    return 1 << max(most.bit_length() - 1, 0)


def _reserved(device: torch.device) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_reserved(device)


def _room(device: torch.device) -> int:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(min(_OF_FREE * free, _OF_ALL * total))
