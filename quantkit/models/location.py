"""Early checks that a MODEL or packed directory can exist, before heavy imports."""

import os
import re
from pathlib import Path

from quantkit.errors import CheckpointError, ModelError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def refuse_nowhere(model: str | Path) -> None:
    """Refuse what is neither a directory nor a hub id; the directory is not opened.

    Raises:
        ModelError: an empty name, a single file without its config, no such directory.
    """
    text = str(model)
    if not text:
        raise ModelError("no model: the name is empty; give a directory or a hub id")
    # Not Path's own, which raise for names that are too long or hold a null.
    if os.path.isdir(model):  # noqa: PTH112
        return
    if os.path.lexists(model):
        raise ModelError(
            f"{text}: a single file has no config; give the directory or the hub id of the "
            "pipeline that it belongs to as config, too",
            fields=("config",),
        )
    if not HUB_ID.fullmatch(text):
        raise ModelError(f"{text!s:.200}: no such directory, and not a hub id (owner/name)")


def refuse_no_directory(path: Path) -> None:
    """Refuse what is no directory of diffusers, from the names of its files.

    Raises:
        CheckpointError: neither a pipeline nor a component.
    """
    if not any((path / name).is_file() for name in ("model_index.json", "config.json")):
        raise CheckpointError(
            f"{path}: not a diffusers directory: found neither model_index.json nor config.json"
        )
