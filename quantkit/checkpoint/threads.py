"""How many threads torch may start while blocks are streamed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch from starting threads of its own inside each of ours.

    Blocks are too small to gain from them, and idle ones spin: verifying took five times the CPU.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
