"""Models in a single file, unpacked once into the cache as a diffusers directory."""

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import replace

from quantkit.device.cache import cache_directory
from quantkit.errors import OutputError
from quantkit.interchange.gguf_import import blocks_of, open_gguf, unpack
from quantkit.models.source import Model, SingleFile, open_model
from quantkit.progress import Progress, silent
from quantkit.storage.copying import list_files
from quantkit.storage.files import staged_directory

_LOG = logging.getLogger("quantkit")
#: What the marker calls a folder of the cache.
KIND = "unpacked single file"
#: Changes with what is written, so that folders of other versions are not taken for it.
_VERSION = 1


def open_single_file(
    source: SingleFile, *, family: str | None = None, progress: Progress = silent
) -> Model:
    """Return the model of a .gguf file, whose 16-bit weights lie in quantkit's cache.

    Args:
        source: the file and its config.
        family: name of the family that the denoiser is taken for; None: that of its class.
        progress: told of tensors unpacked.

    Returns:
        a model as of a directory, which knows the blocks of the file besides.

    Raises:
        ModelError: the file or the directory with its config cannot be used.
        OutputError: the cache cannot be written.
    """
    checked = open_gguf(source)
    folder = cache_directory() / "single-files" / f"{source.path.stem[:50]}-{_key(source)}"
    if not folder.is_dir():
        _LOG.info("%s: unpacked into %s", source.path, folder)
        # Another process may be first: its folder is the same.
        with suppress(FileExistsError):
            cache_directory().mkdir(mode=0o700, parents=True)
        try:
            with staged_directory(folder, kind=KIND, force=False) as stage:
                unpack(checked, stage, progress=progress)
        except OutputError:
            if not folder.is_dir():
                raise
    model = open_model(folder, family=family)
    blocks = blocks_of(checked)
    components = tuple(replace(component, blocks=blocks) for component in model.components)
    return replace(model, components=components)


def _key(source: SingleFile) -> str:
    """Return what changes when the file or anything in the directory does."""
    files = [source.path.resolve(), *(source.config / f for f in list_files(source.config))]
    facts = [(str(f), (found := f.stat()).st_size, found.st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps([_VERSION, facts]).encode()).hexdigest()[:16]
