"""Early refusal of unusable paths, before the imports that reading them takes."""

from pathlib import Path

from quantkit.models.location import refuse_no_directory, refuse_nowhere
from quantkit.storage.inputfile import open_file

__all__ = ["refuse_missing", "refuse_no_directory", "refuse_nowhere"]


def refuse_missing(path: Path) -> None:
    """Refuse a file that cannot be opened.

    Args:
        path: of the file.

    Returns:
        nothing.

    Raises:
        InputError: missing, not a file, or not readable.
    """
    open_file(path).close()
