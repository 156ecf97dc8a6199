"""Size limits of a packed pipeline for ``from_pretrained``: models no larger than their files.

A component that is loaded alone has no such limit: diffusers and transformers build it before they
tell a quantizer where it lies.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quantkit.checkpoint.reader import find_components
from quantkit.errors import CheckpointError
from quantkit.models.sizes import (
    at_most,
    most_modules,
    refuse_oversized,
    tensors_below,
)

#: How often loading registers a module or parameter: built, replaced by a packed one, filled.
_REGISTERED = 4


@contextmanager
def limited_to_files(pipeline: object) -> Iterator[None]:
    """Let the body load a pipeline, nothing larger than its files where one of them is packed.

    Args:
        pipeline: what ``from_pretrained`` is given; an id of the hub says nothing of files yet.

    Raises:
        CheckpointError: a config.json asks for more.
    """
    folder = Path(str(pipeline))
    if not _has_packed(folder):
        yield
        return
    for config in sorted(folder.glob("*/config.json")):
        refuse_oversized(config)
    with at_most(_REGISTERED * most_modules(tensors_below(folder)), of=folder):
        yield


def _has_packed(folder: Path) -> bool:
    # What is wrong with it diffusers tells.
    with suppress(CheckpointError, OSError):
        if (folder / "model_index.json").is_file():
            return next(find_components(folder), None) is not None
    return False
