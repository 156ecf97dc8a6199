"""Parallel checks of SHA-256 digests: two streams take as long as one."""

import os
from collections.abc import Generator, Iterator, Sequence

from quantkit.device.host.hashing import Parts, new_digest, run_together
from quantkit.storage.digest import ExpectedDigest, chunks_of_range
from quantkit.storage.parallel_checks import in_threads
from quantkit.storage.system import open_to_read

#: Claims that a thread takes: enough to find each another of much the same size.
_TAKEN = 8


def breaches_of(claims: Sequence[ExpectedDigest]) -> Iterator[str]:
    """Yield a line for each expected digest, in order; empty where the bytes match."""
    groups = [claims[first : first + _TAKEN] for first in range(0, len(claims), _TAKEN)]
    for lines in in_threads(_breaches_of_some, groups):
        yield from lines


def _breaches_of_some(claims: Sequence[ExpectedDigest]) -> list[str]:
    lines: dict[ExpectedDigest, str] = {}
    by_size = sorted(claims, key=lambda claim: claim.stop - claim.start)
    for first in range(0, len(by_size), 2):
        pair = by_size[first : first + 2]
        lines |= zip(pair, run_together([_breach(claim) for claim in pair]), strict=True)
    return [lines[claim] for claim in claims]


def _breach(claim: ExpectedDigest) -> Generator[Parts, None, str]:
    try:
        digest = new_digest()
        descriptor = open_to_read(claim.path)
        try:
            for chunk in chunks_of_range(descriptor, claim.start, claim.stop):
                yield [(digest, chunk)]
        finally:
            os.close(descriptor)
    except (OSError, EOFError) as error:
        return claim.unreadable(error)
    return claim.judged(digest.hexdigest())
