"""VAE and text encoders of a whole checkpoint, as the components of a pipeline.

Every tensor of the file has to be known, as a component's or as one that nothing reads. Any other
tensor is refused: it might be what makes the file another model than its base.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, ModelError
from quantkit.interchange.layout_names import original_tensors
from quantkit.interchange.part_layouts import PART_LAYOUTS, PartLayout, is_ignored, unused_pattern
from quantkit.interchange.pieces import (
    ModelShapes,
    Naming,
    Piece,
    describe,
    own_names,
    pieces_of,
)
from quantkit.interchange.stored_file import CHUNK_VALUES, StoredFile
from quantkit.models.pipeline_index import read_pipeline_index, read_transformers_classes
from quantkit.models.source import ENCODER_WEIGHTS, WEIGHTS

#: The source of VAE and text encoders: the file, where it has them, or the config alone.
Encoders: TypeAlias = Literal["file", "config"]
#: transformers reads CLIP's tensors with and without it; published files have it.
_CLIP = "text_model."


@dataclass(frozen=True)
class Part:
    """A component that a file holds."""

    #: its sub-folder; empty for a component's directory
    component: str
    #: the original layout's name, or "diffusers"
    layout: str
    #: the name of its weight file, without the extension
    stem: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class OtherParts:
    """The contents of a checkpoint besides its denoiser."""

    parts: tuple[Part, ...]
    #: of the tensors that no component has, by the prefix of their names
    ignored: Mapping[str, int]
    #: of the tensors that were not looked at: the config has their components
    left: Mapping[str, int]


@dataclass(frozen=True)
class _Identity:
    """A square weight that changes nothing, which the file does not hold."""

    name: str
    size: int
    dtype: None = None
    quantized: bool = False
    block: int = 1
    problem: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size, self.size)

    def read(self, first: int, count: int) -> Iterator[Tensor]:
        for begin in range(first, first + count, CHUNK_VALUES):
            numbers = torch.arange(begin, min(begin + CHUNK_VALUES, first + count))
            yield (numbers % (self.size + 1) == 0).float()


def find_parts(file: StoredFile, names: set[str], config: Path, encoders: Encoders) -> OtherParts:
    """Return the contents of a checkpoint besides the denoiser.

    Args:
        file: the checkpoint.
        names: of its tensors that are not the denoiser's.
        config: the directory of the pipeline, or of the denoiser alone, which has no other part.
        encoders: "config" leaves all parts out.

    Raises:
        ModelError: a part that the config's pipeline lacks, with tensors missing, left over or of
            another shape; a tensor that is no part's.
    """
    ignored = set(filter(is_ignored, names))
    if encoders == "config" or not (config / "model_index.json").is_file():
        return OtherParts((), _counts(ignored), _counts(names - ignored))
    parts: dict[str, Part] = {}
    used: set[str] = set()
    for place in PART_LAYOUTS:
        inside = {name for name in names if name.startswith(place.prefix)}
        if inside <= ignored:
            continue
        try:
            part = _part(file, place, inside, config)
        except (CheckpointError, ModelError) as error:
            raise _refusal(file, config, str(error)) from error
        if part.component in parts:
            raise _refusal(file, config, f"has {part.component} twice")
        parts[part.component] = part
        used |= inside
    if unknown := names - used - ignored:
        raise _refusal(file, config, f"has besides {_first(unknown)}, of which nothing is known")
    read = {piece.tensor.name for part in parts.values() for piece in part.pieces}
    return OtherParts(tuple(parts.values()), _counts(names - read), {})


def _refusal(file: StoredFile, config: Path, what: str) -> ModelError:
    where = str(file.path)
    return ModelError(
        f"{where}: {what.removeprefix(f'{where}: ')}; to take VAE and text encoders of the base "
        f"model instead: quantkit import {where} --config {config} --encoders config -o model16",
        fields=("config",),
    )


def _first(names: Collection[str]) -> str:
    """Return one name, and how many more there are: the cure is long."""
    return min(names) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _counts(names: Iterable[str]) -> Counter[str]:
    return Counter(name.partition(".")[0] for name in names)


def _part(file: StoredFile, place: PartLayout, inside: set[str], config: Path) -> Part:
    component, class_name = _component(place, config)
    there = {name.removeprefix(place.prefix) for name in inside}
    described = _described(config / component, class_name, place, there)
    identities = [name for name in place.identities if name in described.shapes]
    naming = _naming(place, described, there, identities)
    _check_names(naming, place, described, inside)
    pieces = pieces_of(file, naming, described)
    made = tuple(_identity(described, name, pieces[0].dtype) for name in identities)
    stem = ENCODER_WEIGHTS if class_name else WEIGHTS
    return Part(component, naming.layout, stem, pieces + made)


def _component(place: PartLayout, config: Path) -> tuple[str, str]:
    """Return a part's component name, and its class in transformers; "" in diffusers."""
    there, encoders = read_pipeline_index(config), read_transformers_classes(config)
    for name in place.components:
        if name in there and place.class_name in ("", there[name]):
            return name, encoders.get(name, "")
    raise ModelError(
        f"holds {place.prefix}*, but the pipeline of {config} has no "
        f"{' or '.join(place.components)} of {place.class_name or 'any class'}"
    )


def _described(
    folder: Path, class_name: str, place: PartLayout, there: Collection[str]
) -> ModelShapes:
    """Return the model of a component, its tensors in the names of published files."""
    # In the file's own names, where these are the library's.
    own = class_name and not place.layout
    asked = {_published(class_name, name) for name in there} if own else ()
    found = describe(folder, len(there), class_name=class_name, names=asked)
    shapes = {_published(class_name, name): shape for name, shape in found.shapes.items()}
    return ModelShapes(folder, found.class_name, shapes)


def _published(class_name: str, name: str) -> str:
    bare = class_name.startswith("CLIPText") and not name.startswith((_CLIP, "text_projection"))
    return _CLIP * bare + name


def _naming(
    place: PartLayout, described: ModelShapes, there: set[str], identities: Collection[str]
) -> Naming:
    """Return how the file names a part: as most of its tensors are named."""
    own = own_names(described.shapes.keys() - set(identities))
    bare = tuple(replace(tensor, name=tensor.name.removeprefix(_CLIP)) for tensor in own)
    namings = [Naming("diffusers", place.prefix, tensors) for tensors in (own, bare)]
    if place.layout is not None:
        # A model of another class has only its own names.
        with suppress(ModelError):
            original = original_tensors(place.layout, described.shapes)
            namings.insert(0, Naming(place.layout.architecture, place.prefix, original))
    return max(namings, key=lambda naming: sum(tensor.name in there for tensor in naming.tensors))


def _check_names(
    naming: Naming, place: PartLayout, described: ModelShapes, inside: set[str]
) -> None:
    unused = unused_pattern(place, described.shapes)
    more = {
        name for name in inside - naming.names
        if not is_ignored(name) and not unused.fullmatch(name.removeprefix(place.prefix))
    }  # fmt: skip
    for what, names in (("lacks", naming.names - inside), ("has besides", more)):
        if names:
            raise ModelError(f"{what} {_first(names)} for the model of {described.folder}")


def _identity(described: ModelShapes, name: str, dtype: str) -> Piece:
    rows, columns = described.shapes[name]
    if rows != columns:
        raise ModelError(
            f"{name} of {described.folder} is {rows} x {columns}, but files of such pipelines have "
            "none, which is the identity"
        )
    weight = _Identity(name, rows)
    return Piece(name, weight.shape, weight, ((0, prod(weight.shape)),), dtype)
