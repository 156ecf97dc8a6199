"""Checksums while loading, computed in threads in parallel with the loader.

Packed tensors are hashed where they were read to (``read_ahead``). The others the loader copies out
of mapped files; threads read the same pages from the cache meanwhile. A stamp file that says "was
checked" would be as easily wrong as the weights.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.contents import expected_digests
from quantkit.checkpoint.filelist import FILE_LIST, FileList, find_file_list
from quantkit.checkpoint.reader import Packed
from quantkit.errors import CheckpointError
from quantkit.models.hub import fetch_missing
from quantkit.storage.digest import ExpectedDigest, Hashing

#: "0" leaves checksums out of ``from_pretrained``; ``load_pipeline`` has an argument instead.
VARIABLE = "QUANTKIT_CHECKSUMS"

_enabled: ContextVar[bool | None] = ContextVar("checksums", default=None)


@contextmanager
def checksums(*, enabled: bool) -> Iterator[None]:
    """Override within the block whether components are hashed."""
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def are_enabled() -> bool:
    """Tell whether components are hashed."""
    enabled = _enabled.get()
    return os.environ.get(VARIABLE) != "0" if enabled is None else enabled


def hash_component(component: PackedComponent, besides: Collection[str] = ()) -> Hashing:
    """Start to hash the tensors of a packed component, and the listed files of its folder.

    Args:
        component: whose headers are sound.
        besides: tensors that somebody else hashes.

    Returns:
        nothing to do where checksums are off.

    Raises:
        CheckpointError: no list; a file of it is missing or of another size, or one too many.
    """
    if not are_enabled():
        return Hashing(())
    # What diffusers and transformers download for themselves lacks it.
    fetch_missing(component.path.parent, FILE_LIST)
    listed = find_file_list(component.path)
    claims = (claim for name, claim in expected_digests(component).items() if name not in besides)
    return Hashing([*_listed(listed), *claims])


def hash_directory(packed: Packed) -> Hashing:
    """Start to hash all files that the list names; the tensors of packed ones are not among them.

    Raises:
        CheckpointError: no list; a file of it is missing or of another size, or one too many.
    """
    return Hashing(_listed(find_file_list(packed.path)))


def _listed(listed: FileList) -> list[ExpectedDigest]:
    """Return expected digests of listed files that exist; unread files may be missing."""
    for breach in listed.broken(only_read=True):
        raise CheckpointError(breach)
    for file in listed.strangers()[0]:
        raise CheckpointError(
            f"{listed.folder / file}: not in {FILE_LIST}, but a loader may read it; remove it, or "
            "load with checksums off"
        )
    return list(listed.claims())
