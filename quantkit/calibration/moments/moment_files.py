"""The artefact of second moments: a directory with an index and one file per layer.

The name is that of the mask literature: E[x x^T] is, up to a factor, the Hessian of a layer's
output error in each row of its weight. Layers' files appear one by one, each whole, so that a run
that was killed goes on where it stopped.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from quantkit.calibration.moments.moment_fields import FIELDS
from quantkit.calibration.moments.moments import Moments
from quantkit.calibration.statistics.fields import check_fields
from quantkit.calibration.statistics.layer_statistics import find_component
from quantkit.errors import ArtefactError, OutputError
from quantkit.models.component_layers import Layer
from quantkit.models.source import Component
from quantkit.storage.artefact import read_about, read_artefact, write_artefact
from quantkit.storage.files import staged_directory
from quantkit.storage.jsonfile import as_type, parsing, read_json

INDEX = "index.json"
#: What the marker calls the directory.
KIND = "directory of second moments"
_KIND = "quantkit_hessian"
_FORMAT = "quantkit.hessians"
_VERSION = 1


@dataclass(frozen=True)
class HessianIndex:
    """Settings that the moments were taken with, and checksums of the weights."""

    #: SHA-256 of each layer's source weight, by component and layer
    digests: dict[str, dict[str, str]]
    #: name of the recipe
    recipe: str
    prompts: int
    #: the last ones, of which rows are kept and no moments taken; of text encoders, none
    held_out: int
    #: SHA-256 of the prompts, one a line
    prompts_digest: str
    steps: int
    guidance: float | None
    #: of the first prompt's noise
    seed: int
    #: prompts per run; it changes sums by rounding alone
    batch: int
    #: of the timesteps
    weighting: str
    #: of each call's rows, drawn at random; of text encoders, all
    row_share: float
    #: of quantkit, torch and diffusers
    versions: dict[str, str]

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield (component, layer) in the order of the files."""
        for component, layers in self.digests.items():
            for layer in layers:
                yield component, layer


@dataclass(frozen=True)
class Hessians:
    """The directory."""

    path: Path
    index: HessianIndex

    @cached_property
    def missing(self) -> tuple[tuple[str, str], ...]:
        """Layers that have no file yet."""
        return tuple(name for name in self.index.names() if not self.file_of(*name).is_file())

    def file_of(self, component: str, layer: str) -> Path:
        """Return where a layer's moments are."""
        return self.path / _name_of(component, layer)

    def write(self, component: str, layer: str, moments: Moments) -> None:
        """Store one layer, whole or not at all.

        Raises:
            OutputError: it cannot be written.
        """
        about = {
            "component": component,
            "layer": layer,
            "rows": moments.rows,
            "source_digest": self.index.digests[component][layer],
        }
        # A file of the same name is one that a killed run left with a flipped bit, or nothing.
        file = self.file_of(component, layer)
        write_artefact(file, _KIND, moments.tensors(), about, force=True)

    def read(self, component: Component, layer: Layer, digest: str | None = None) -> Moments:
        """Return the moments of a layer.

        Args:
            component: the layer's; a denoiser alone finds those of its pipeline.
            layer: any that the run observed.
            digest: SHA-256 of its weight, when it was computed; checked against the stored one.

        Raises:
            ArtefactError: not there, damaged, or of another model.
        """
        stored = find_component(component.name, tuple(self.index.digests), "hessians")
        expected = self.index.digests[stored].get(layer.name)
        if expected is None:
            raise ArtefactError(
                f"{self.path}: no layer {layer.name}; collect the hessians with the same recipe"
            )
        if digest is not None and digest != expected:
            raise ArtefactError(
                f"{self.path}: {layer.name} had other weights (checksum {digest[:12]} now, "
                f"{expected[:12]} then); collect the hessians of this model"
            )
        file = self.file_of(stored, layer.name)
        tensors, about = read_artefact(file, _KIND)
        with parsing(file, cure="delete it and collect the hessians of this model again"):
            then, rows = str(about["source_digest"]), about["rows"]
            if then != expected:
                raise ValueError(f"of weights {then[:12]}, expected {expected[:12]}")
            if type(rows) is not int or rows < 1:
                raise ValueError(f"rows {rows!r:.40}, expected the number of rows seen, at least 1")
            check_fields(layer.name, tensors, FIELDS, {"K": layer.k})
            return Moments.of(tensors, rows)

    def is_unseen(self, component: Component, layer: Layer) -> bool:
        """Return whether the run listened to a layer that no prompt called; its header tells.

        Raises:
            ArtefactError: damaged.
        """
        stored = find_component(component.name, tuple(self.index.digests), "hessians")
        return layer.name in self.index.digests[stored] and self._is_empty(stored, layer.name)

    @property
    def unseen(self) -> dict[str, tuple[str, ...]]:
        """The layers that no prompt called, by component."""
        found = {
            component: tuple(layer for layer in layers if self._is_empty(component, layer))
            for component, layers in self.index.digests.items()
        }
        return {component: layers for component, layers in found.items() if layers}

    def _is_empty(self, component: str, layer: str) -> bool:
        rows = read_about(self.file_of(component, layer), _KIND).get("rows")
        return type(rows) is int and rows == 0

    def has(self, component: Component) -> bool:
        """Return whether there are moments of the component."""
        try:
            return bool(self.digests_of(component))
        except ArtefactError:
            return False

    def digests_of(self, component: Component) -> Mapping[str, str]:
        """Return the SHA-256 of the source weights that the moments belong to."""
        table = self.index.digests
        return table[find_component(component.name, tuple(table), "hessians")]


def _name_of(component: str, layer: str) -> str:
    return f"{component or 'model'}/{layer}.safetensors"


def create_hessians(path: Path, index: HessianIndex, *, force: bool = False) -> Hessians:
    """Begin a directory, or go on with one that was begun alike, or that has no layer yet.

    Args:
        path: the directory.
        index: how the moments are taken.
        force: begin again where there is one.

    Raises:
        OutputError: ``path`` holds something else, or moments taken otherwise.
    """
    if force or not path.exists():
        names = [_name_of(component, layer) for component, layer in index.names()]
        with staged_directory(path, kind=KIND, force=force, later=names) as stage:
            entry = {"format": _FORMAT, "format_version": _VERSION, **asdict(index)}
            (stage / INDEX).write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
        return Hessians(path, index)
    try:
        begun = _read_index(path)
    except ArtefactError as error:
        raise OutputError(
            f"{path}: exists already and is not a directory of hessians; choose another path"
        ) from error
    if Hessians(path, begun).missing == tuple(begun.names()):
        # As after a scheduler that cannot be weighed: the cure is another setting.
        return create_hessians(path, index, force=True)
    for name, value in asdict(index).items():
        before = getattr(begun, name)
        if before != value:
            said = "" if isinstance(value, dict) else f" ({before} then, {value} now)"
            raise OutputError(
                f"{path}: started with another {name}{said}; choose another path, or set force to "
                "replace it",
                fields=("force",),
            )
    return Hessians(path, begun)


def load_hessians(path: Path) -> Hessians:
    """Return a finished directory; the moments are read layer by layer.

    Raises:
        ArtefactError: missing, damaged, of a newer version, or unfinished.
    """
    hessians = Hessians(path, _read_index(path))
    if hessians.missing:
        component, layer = hessians.missing[0]
        raise ArtefactError(
            f"{path}: unfinished: {len(hessians.missing)} layers have no file, the first is "
            f"{component}/{layer}; run 'quantkit calibrate hessian' again to finish it"
        )
    return hessians


def _read_index(path: Path) -> HessianIndex:
    if not (path / INDEX).exists():
        raise ArtefactError(
            f"{path}: not a directory of hessians; make one with 'quantkit calibrate hessian'"
        )
    entry = read_json(path / INDEX, error=ArtefactError, cure="collect the hessians again")
    if entry.pop("format", None) != _FORMAT:
        raise ArtefactError(f"{path / INDEX}: not an index of hessians")
    version = entry.pop("format_version", None)
    if version != _VERSION:
        raise ArtefactError(
            f"{path / INDEX}: format_version {version!r:.40}, expected {_VERSION}: made by a "
            "development version or a newer quantkit; take them again, or upgrade"
        )
    with parsing(path / INDEX, cure="take them again"):
        index = as_type(HessianIndex, entry)
        for names in index.names():
            for name in names:
                _refuse_path(name)
    return index


def _refuse_path(name: str) -> None:
    """Refuse a name that would lead out of the directory: names are parts of paths."""
    if "/" in name or "\0" in name or name in {".", ".."}:
        raise ValueError(f"the name {name!r:.80}, which is a path")
