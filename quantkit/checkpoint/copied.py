"""Checks of components that are not packed against the models of their configs."""

from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path

from quantkit.errors import CheckpointError, InputError
from quantkit.models.building import SkeletonRequest, build_ahead, read_skeleton
from quantkit.models.pipeline_index import read_models
from quantkit.models.skeleton import Contents, misfits
from quantkit.models.source import WEIGHTS, shards_of, weight_files
from quantkit.models.source_tensors import read_source
from quantkit.storage.tensorfile import read_header


def misfits_of_copies(pipeline: Path, packed: Collection[str]) -> Iterator[str]:
    """Yield a line for everything in which files do not fit their models, as a loader judges.

    Args:
        pipeline: whose model_index.json was looked at.
        packed: names of the components that are packed; they are left out.
    """
    found: list[tuple[SkeletonRequest, Contents]] = []
    for name, (library, class_name) in read_models(pipeline).items():
        if name not in packed and is_known(library):
            try:
                found += _opened(pipeline / name, library, class_name)
            except InputError as error:
                yield str(error)
    build_ahead(asked for asked, _ in found)
    for asked, contents in found:
        yield from _misfits(asked, contents)


def unknown_models(pipeline: Path) -> Iterator[str]:
    """Yield the components of libraries whose models are not built to compare them.

    Raises:
        ModelError: a damaged model_index.json.
    """
    for name, (library, class_name) in read_models(pipeline).items():
        if not is_known(library):
            yield f"{name} ({class_name} of {library})"


def is_known(library: str) -> bool:
    """Tell whether a library of model_index.json is diffusers, a folder of it, or transformers."""
    if library in ("diffusers", "transformers"):
        return True
    spec = find_spec("diffusers")
    places = (spec and spec.submodule_search_locations) or ()
    return library.isidentifier() and any(
        Path(place, "pipelines", library).is_dir() for place in places
    )


def _opened(
    folder: Path, library: str, class_name: str
) -> Iterator[tuple[SkeletonRequest, Contents]]:
    """Yield, for every variant of a component, the request for its model and its tensors."""
    for file in weight_files(folder, library, class_name).values():
        contents = Contents(file, {}, _tensors(file))
        yield (
            SkeletonRequest(folder / "config.json", class_name, contents.tensors, library),
            contents,
        )


def _misfits(asked: SkeletonRequest, contents: Contents) -> Iterator[str]:
    try:
        skeleton = read_skeleton(asked.config, asked.class_name, asked.names, library=asked.library)
    except CheckpointError as error:
        yield str(error)
    else:
        yield from misfits(contents, skeleton)


def _tensors(file: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors in a file, or in the shards of an index."""
    # Diffusers renames tensors of old files, but not of shards.
    is_whole = file.name.startswith(WEIGHTS) and file.suffix == ".safetensors"
    read = read_source if is_whole else read_header
    headers = [read(shard) for shard in shards_of(file)]
    return {name: info.shape for header in headers for name, info in header.tensors.items()}
