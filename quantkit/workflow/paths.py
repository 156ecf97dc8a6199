"""Early refusal of unusable paths, before the imports that reading them takes."""

import os
from pathlib import Path

from quantkit.models import location
from quantkit.models.location import refuse_no_directory
from quantkit.storage.inputfile import open_file

__all__ = ["refuse_missing", "refuse_no_directory", "refuse_nowhere"]


def refuse_nowhere(model: str | Path) -> None:
    """Refuse what is neither a directory nor a hub id; say what a single file is.

    Args:
        model: as the user gave it.

    Returns:
        nothing.

    Raises:
        ModelError: an empty name, a single file that needs a config, no such directory.
    """
    # Not Path's own, which raises for names that are too long or hold a null.
    if os.path.isfile(model):  # noqa: PTH113
        from quantkit.interchange.file_contents import refuse_bare_file

        refuse_bare_file(Path(model))
        return
    location.refuse_nowhere(model)


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
