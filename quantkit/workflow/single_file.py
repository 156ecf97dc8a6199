"""Models in a single file: unpacked once into the cache, or imported as a diffusers directory."""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.device.cache import cache_directory
from quantkit.errors import ModelError, OutputError
from quantkit.interchange.checkpoint_parts import Encoders
from quantkit.interchange.derived_config import config_text, derived_config
from quantkit.interchange.file_contents import refuse_bare_file, refuse_underived
from quantkit.interchange.gguf_import import blocks_of, open_gguf
from quantkit.interchange.safetensors_import import open_safetensors
from quantkit.interchange.sdnq_import import open_sdnq
from quantkit.interchange.single_file_model import SingleFileModel, fit
from quantkit.interchange.single_file_unpack import link, specs_of, unpack
from quantkit.interchange.stored_file import StoredFile
from quantkit.models.hub import fetch_config
from quantkit.models.location import HUB_ID
from quantkit.models.source import Model, SingleFile, open_model
from quantkit.progress import Progress, silent
from quantkit.storage.copying import is_weight, list_files
from quantkit.storage.files import staged_directory
from quantkit.storage.inputfile import open_file
from quantkit.storage.places import check_directory, refuse_overlap
from quantkit.storage.sizes import tell_bytes
from quantkit.workflow.paths import refuse_nowhere

_LOG = logging.getLogger("quantkit")
#: What the marker calls a folder of the cache, and an imported one.
KIND, IMPORTED = "unpacked single file", "imported model"
#: The folder of the cache.
SINGLE_FILES = "single-files"
#: Version of the folder's contents, so that folders of other versions are not reused.
_VERSION = 3


@dataclass(frozen=True)
class Imported:
    """A single file and its import."""

    output: Path
    #: of the file, in words
    format: str
    #: the original layout, or "diffusers"
    layout: str
    #: the denoiser's sub-folder; empty for a component alone
    component: str
    #: the other sub-folders whose weights are the file's: VAE and text encoders
    others: tuple[str, ...]
    #: dtype -> number of tensors of the denoiser
    types: dict[str, int]
    #: of the denoiser's tensors
    nbytes: int
    #: other contents of the file, and losses, a line each
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        """Return it in a line."""
        return (
            f"{self.format}, {self.layout}: {sum(self.types.values())} tensors, "
            f"{tell_bytes(self.nbytes)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "output": str(self.output),
            "format": self.format,
            "layout": self.layout,
            "component": self.component,
            "others": list(self.others),
            "types": self.types,
            "bytes": self.nbytes,
            "notes": list(self.notes),
        }


def single_file(path: str | Path, config: str | Path) -> SingleFile:
    """Return a model in one file.

    Args:
        path: a .safetensors or .gguf file.
        config: the directory of the pipeline or the component that it belongs to, or a hub id.

    Returns:
        what functions take as a model.

    Raises:
        ModelError: not a file; a hub id that cannot be fetched.
    """
    file, folder = Path(path), Path(config)
    # Not Path's own, which raise for names that are too long or hold a null.
    if not os.path.isfile(path):  # noqa: PTH113
        raise ModelError(
            f"{path!s:.200}: no file, and config goes with one; drop it for a directory or a hub "
            "id, or look at the name",
            fields=("config",),
        )
    if not os.path.isdir(config) and HUB_ID.fullmatch(str(config)):  # noqa: PTH112
        folder = fetch_config(str(config))
    return SingleFile(file, folder)


def bare_file(path: str | Path) -> SingleFile:
    """Return a denoiser in one file, with a config that follows from its tensors.

    Args:
        path: a .safetensors or .gguf file in the layout of the model's authors.

    Returns:
        the denoiser alone; its config lies in quantkit's cache.

    Raises:
        ModelError: no denoiser, or one whose tensors do not say its config.
        OutputError: the cache cannot be written.
    """
    file = Path(path)
    refuse_bare_file(file)
    shapes = {name: tensor.shape for name, tensor in _opened(file).tensors.items()}
    config = derived_config(shapes)
    if config is None:
        refuse_underived(file, shapes)
    text = config_text(config)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = cache_directory() / SINGLE_FILES / f"{config['_class_name']}-{key}"
    if not folder.is_dir():
        with _cached(folder) as stage:
            stage.joinpath("config.json").write_text(text, encoding="utf-8")
    _LOG.warning(
        "%s: the denoiser alone, %s, its config from its tensors; for a whole pipeline name the "
        "one that it belongs to (--config)",
        file,
        config["_class_name"],
    )
    return SingleFile(file, folder)


def import_file(
    file: str | Path,
    *,
    config: str | Path | None = None,
    output: str | Path,
    encoders: Encoders = "file",
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
) -> Imported:
    """Write a single file, or a directory that SDNQ wrote, as a 16-bit diffusers directory.

    Args:
        file: .safetensors or .gguf: in the layout of the model's authors or in diffusers' names,
            in 16 bit, FP8 (ComfyUI's scaled, fp8r, plain), ComfyUI's int8, or GGUF; or the
            directory of a pipeline or of a component with codes of SDNQ.
        config: a pipeline's directory or hub id, which gives what the file lacks; a component's
            directory, as its unet, makes a component alone. A directory has its own. None, of a
            file: its tensors say it, and the denoiser is made alone.
        encoders: whose VAE and text encoders are taken where the file has them: "file", or
            "config".
        output: the directory to make.
        force: replace an existing output.
        dry_run: check the file, and write nothing.
        progress: told of tensors written.

    Returns:
        what was in the file, and what was left out.

    Raises:
        ModelError: a file that is not understood, damaged, or of another model than config.
        NonFiniteError: NaN or infinity, or numbers that the dtype does not hold.
        OutputError: ``output`` exists, or cannot be written.
    """
    place = Path(output)
    source = _source(file, config)
    check_directory(place, kind=IMPORTED, force=force)
    for given in (source.path, source.config):
        refuse_overlap(place, given)
    if encoders not in ("file", "config"):
        raise ModelError(
            f"encoders {encoders!r:.80}: expected file or config", fields=("encoders",)
        )
    model = _checked(source, encoders) if source.path.is_file() else open_sdnq(source.path)
    if not dry_run:
        with staged_directory(place, kind=IMPORTED, force=force) as stage:
            unpack(model, stage, progress=progress)
    return _summary(model, place)


def _source(path: str | Path, config: str | Path | None) -> SingleFile:
    """Return a single file and its config; a directory is both."""
    if config is not None:
        return single_file(path, config)
    if os.path.isfile(path):  # noqa: PTH113
        return bare_file(path)
    if not os.path.isdir(path):  # noqa: PTH112
        refuse_nowhere(path)
        raise ModelError(f"{path!s:.200}: a hub id, expected a file or a directory; download it")
    return SingleFile(Path(path), Path(path))


def open_single_file(source: SingleFile, *, progress: Progress = silent) -> Model:
    """Return the model of a single file, whose 16-bit weights lie in quantkit's cache.

    Args:
        source: the file and its config.
        progress: told of tensors unpacked.

    Returns:
        a model as of a directory, which knows the blocks of a .gguf file besides.

    Raises:
        ModelError: the file or the directory with its config cannot be used.
        OutputError: the cache cannot be written.
    """
    checked = _checked(source)
    folder = cache_directory() / SINGLE_FILES / f"{source.path.stem[:50]}-{_key(source)}"
    if not folder.is_dir():
        _LOG.info("%s: unpacked into %s", source.path, folder)
        for note in _summary(checked, folder).notes:
            _LOG.info("%s: %s", source.path, note)
        with _cached(folder) as stage:
            unpack(checked, stage, take=link, progress=progress)
    # The time of last use, for making room; a read-only cache does without.
    with suppress(OSError):
        os.utime(folder)
    model = open_model(folder)
    blocks = blocks_of(checked)
    components = tuple(replace(component, blocks=blocks) for component in model.components)
    return replace(model, components=components)


@contextmanager
def _cached(folder: Path) -> Iterator[Path]:
    """Yield a folder that becomes one of the cache; another process may be first, with the same."""
    with suppress(FileExistsError):
        cache_directory().mkdir(mode=0o700, parents=True)
    try:
        with staged_directory(folder, kind=KIND, force=False) as stage:
            yield stage
    except OutputError:
        if not folder.is_dir():
            raise


def _checked(source: SingleFile, encoders: Encoders = "file") -> SingleFileModel:
    """Return the file, of whatever format, fitted to its config."""
    return fit(_opened(source.path), source.config, encoders)


def _opened(path: Path) -> StoredFile:
    with open_file(path) as file:
        is_gguf = file.read(4) == b"GGUF"
    return open_gguf(path) if is_gguf or path.suffix == ".gguf" else open_safetensors(path)


def _summary(model: SingleFileModel, output: Path) -> Imported:
    specs = specs_of(model.denoiser)
    types = dict(sorted(Counter(spec.dtype for spec in specs).items()))
    return Imported(
        output,
        model.file.format,
        model.denoiser.layout,
        model.denoiser.component,
        tuple(part.component for part in model.rest.parts),
        types,
        sum(spec.nbytes for spec in specs),
        tuple(_notes(model)),
    )


def _notes(model: SingleFileModel) -> list[str]:
    """Return remarks on the file, a line each."""
    notes = []
    coded = [piece for part in model.parts for piece in part.pieces if piece.quantized]
    if coded:
        dtypes = " and ".join(sorted({piece.dtype for piece in coded}))
        notes.append(
            f"{len(coded)} weights were quantized before ({model.file.format}) and are dequantized "
            f"to {dtypes}: what they lost stays lost, so prefer a 16-bit file where there is one"
        )
    notes.extend(model.file.notes)
    if others := [part.component for part in model.rest.parts]:
        notes.append(f"from the file besides: {', '.join(others)}")
    if completing := _from_config(model):
        notes.append(f"from config: {', '.join(completing)}")
    for why, counts in (
        ("left out", model.rest.left),
        ("left out, for no pipeline reads it", model.rest.ignored),
    ):
        if counts:
            notes.append(f"{why}: {_largest(counts)}")
    return notes


def _from_config(model: SingleFileModel) -> list[str]:
    """Return the components of a pipeline whose weights the file does not hold."""
    if not model.denoiser.component:
        return []
    weights = (file for file in list_files(model.config) if is_weight(file))
    folders = {file.parts[0] for file in weights if len(file.parts) > 1}
    return sorted(folders - {part.component for part in model.parts})


def _largest(counts: Mapping[str, int]) -> str:
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{name} ({count} tensors)" for name, count in largest[:4])
    return named + (f" and {len(largest) - 4} others" if len(largest) > 4 else "")


def _key(source: SingleFile) -> str:
    """Return a key that changes with the file or anything in the directory."""
    files = [source.path.resolve(), *(source.config / f for f in list_files(source.config))]
    facts = [(str(f), (found := f.stat()).st_size, found.st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps([_VERSION, facts]).encode()).hexdigest()[:16]
