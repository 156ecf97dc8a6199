"""Checking a packed directory: every checksum and every rule of FORMAT.md."""

from pathlib import Path

from quantkit.checkpoint import verification
from quantkit.checkpoint.verification import Verification
from quantkit.progress import Progress, silent


def verify(packed: str | Path, *, progress: Progress = silent) -> Verification:
    """Recompute every checksum of a packed directory and check every rule of the format.

    Args:
        packed: a packed pipeline or component.
        progress: told of tensors done.

    Returns:
        what was checked.

    Raises:
        CheckpointError: the first rule that is broken, or nothing is packed.
    """
    return verification.verify(Path(packed), progress=progress)


def find_breaches(
    packed: str | Path, *, stop_at_first: bool = False, progress: Progress = silent
) -> Verification:
    """Check every rule as ``verify`` does, and collect what is broken.

    Args:
        packed: a packed pipeline or component.
        stop_at_first: end at the first breach.
        progress: told of tensors done.

    Returns:
        what was checked; ``breaches`` has a line for each broken rule.

    Raises:
        CheckpointError: a file that cannot be read at all, or nothing is packed.
    """
    return verification.find_breaches(Path(packed), progress=progress, stop_at_first=stop_at_first)
