"""Components as directories of other programs: weights in one file, a config, the rest copied."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.filelist import MADE
from quantkit.interchange.exported import Export, together
from quantkit.interchange.tensor_export import FilePlan, compare_tensors, write_tensors
from quantkit.progress import Progress
from quantkit.storage.copying import copy_files, is_pickle, is_weight, list_files
from quantkit.storage.files import staged_directory

#: What the marker calls the output.
KIND = "export"


@dataclass(frozen=True)
class ComponentFile:
    """One component of the output."""

    #: sub-folder; "" when the output is the component itself
    folder: str
    plan: FilePlan
    #: file name of the weights
    name: str
    #: of config.json
    quantization: Mapping[str, Any]


@dataclass(frozen=True)
class DirectoryPlan:
    """Everything about the directory but its data."""

    #: a pipeline, or a component alone
    model: Path
    components: tuple[ComponentFile, ...]

    @property
    def formats(self) -> tuple[Mapping[str, str], ...]:
        """Of each component, the formats of the weights that are quantized in its file."""
        return tuple(component.plan.formats for component in self.components)

    def summary(self, output: Path, errors: Sequence[Mapping[str, float]] | None = None) -> Export:
        """Return what the directory holds; errors by component."""
        found = errors or [{} for _ in self.components]
        rows = zip(self.components, found, strict=True)
        return together([row.plan.summary(output, mine) for row, mine in rows])

    def write(self, output: Path, *, force: bool, progress: Progress) -> Export:
        """Write the directory: all of it, or nothing; see ``write_directory``."""
        return write_directory(self, output, force=force, progress=progress)


def write_directory(
    plan: DirectoryPlan, output: Path, *, force: bool, progress: Progress
) -> Export:
    """Write the directory: all of it, or nothing.

    Raises:
        NonFiniteError: NaN or infinity in a tensor.
        OutputError: it exists, cannot be written, or does not read as written.
    """
    with staged_directory(output, kind=KIND, force=force) as stage:
        copy_files(plan.model, stage, _others(plan))
        errors = [_write(component, stage, progress) for component in plan.components]
    return plan.summary(output, errors)


def _write(component: ComponentFile, stage: Path, progress: Progress) -> dict[str, float]:
    folder = stage / component.folder
    folder.mkdir(exist_ok=True)
    config = component.plan.source.path / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    values["quantization_config"] = dict(component.quantization)
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    write_tensors(component.plan, folder / component.name, progress)
    return compare_tensors(component.plan, folder / component.name, progress)


def _others(plan: DirectoryPlan) -> list[Path]:
    """Return the files that are copied: neither the weights, which are rewritten, nor lists."""
    folders = {Path(component.folder) for component in plan.components}
    return [
        file
        for file in list_files(plan.model)
        if file.name not in MADE
        and not is_pickle(file)
        and not (is_weight(file) and file.parent in {Path(), *folders})
        and not (file.name == "config.json" and file.parent in folders)
    ]
