"""Threads that read packed tensors ahead while a library builds the model.

Bytes are hashed in the memory that the model gets. Copies out of a mapped file take longer, because
torch's threads wait for each other when cores are busy, and a file may be truncated while it is
mapped.
"""

import os
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.contents import expected_digests, packed_names
from quantkit.checkpoint.torch_dtypes import PACKED_DTYPES
from quantkit.device.host.hashing import Parts, new_digest, run_together
from quantkit.errors import CheckpointError
from quantkit.inference.loading.checksums import are_enabled
from quantkit.storage.digest import CHUNK_BYTES, ExpectedDigest, read_whole
from quantkit.storage.system import cores, open_to_read
from quantkit.storage.tensorfile import TensorInfo


class ReadAhead:
    """Tensors by name, that threads are reading."""

    def __init__(self, pending: Mapping[str, Future[dict[str, Tensor]]]) -> None:
        self._pending = dict(pending)
        self.names = frozenset(pending)

    def take(self, name: str) -> Tensor | None:
        """Return a tensor, once; None where it is not read ahead.

        Raises:
            CheckpointError: it, or one read with it, cannot be read or has another digest.
        """
        future = self._pending.pop(name, None)
        return None if future is None else future.result()[name]

    def cancel(self) -> None:
        """Drop tensors that were read and not taken, and reads that have not started."""
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()


def read_ahead(component: PackedComponent, device: torch.device) -> ReadAhead:
    """Start to read the tensors of packed layers, and to hash them where asked for.

    Args:
        component: whose headers are sound.
        device: of the model. One with memory of its own is better copied to from mapped files: they
            take none of the host's.

    Returns:
        nothing but for the CPU.
    """
    if device.type != "cpu":
        return ReadAhead({})
    checked, claims = are_enabled(), expected_digests(component)
    packed = packed_names(component)
    # In the order of the files, as a disk reads them best and the loader asks for them.
    names = [name for name in claims if name in packed]
    pool = ThreadPoolExecutor(cores())
    pending: dict[str, Future[dict[str, Tensor]]] = {}
    for first in range(0, len(names), 2):
        pair = names[first : first + 2]
        # Made here: memory that threads allocate is freed each time and paged in again.
        made = {name: _empty(component.tensors[name][1]) for name in pair}
        future = pool.submit(_read_together, made, claims, checked=checked)
        pending |= dict.fromkeys(pair, future)
    pool.shutdown(wait=False)
    return ReadAhead(pending)


def _empty(info: TensorInfo) -> Tensor:
    # transformers asks with the meta device as the default.
    return torch.empty(info.shape, dtype=PACKED_DTYPES[info.dtype], device="cpu")


def _read_together(
    made: dict[str, Tensor], claims: Mapping[str, ExpectedDigest], *, checked: bool
) -> dict[str, Tensor]:
    """Fill tensors in parallel: hashing two takes as long as hashing one."""
    run_together([_read(claims[name], made[name], checked=checked) for name in made])
    return made


def _read(claim: ExpectedDigest, made: Tensor, *, checked: bool) -> Generator[Parts, None, None]:
    """Fill a tensor from its file; the caller hashes each yielded part before the next step."""
    # numpy knows no 8-bit floats.
    data, digest = made.reshape(-1).view(torch.uint8).numpy().data, new_digest()
    try:
        for chunk in _filled(claim, data):
            yield [(digest, chunk)] if checked else []
    except (OSError, EOFError) as error:
        raise CheckpointError(claim.unreadable(error)) from error
    if checked and (breach := claim.judged(digest.hexdigest())):
        raise CheckpointError(breach)


def _filled(claim: ExpectedDigest, data: memoryview) -> Iterator[memoryview]:
    """Fill memory with the bytes of an expected digest; yield it in chunks."""
    descriptor = open_to_read(claim.path)
    try:
        for first in range(0, len(data), CHUNK_BYTES):
            chunk = data[first : first + CHUNK_BYTES]
            read_whole(descriptor, chunk, claim.start + first)
            yield chunk
    finally:
        os.close(descriptor)
