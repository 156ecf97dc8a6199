"""The number of threads that torch may start."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


#: Columns from which factoring and refitting a layer is worth several threads.
_MANY_COLUMNS = 4096


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch from starting threads of its own for small blocks, or inside each of ours.

    Waking others costs more than they do, and idle ones spin: verifying took five times the CPU,
    choosing the masks of 8 million weights 0.9 s on two threads of a busy machine and 0.09 on one.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def surgery_threads(columns: int) -> AbstractContextManager[None]:
    """Let torch have its threads only for layers of many columns.

    Sparsifying 118 layers of up to 2880 columns on a busy machine of two threads took 181 s of CPU
    time with both of them and 35 s with one, most of the difference in waiting for each other.

    Args:
        columns: K of the layer.
    """
    return nullcontext() if columns >= _MANY_COLUMNS else one_torch_thread()
