"""The result of an export, or of its dry run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Export:
    """The files that were written, or would be."""

    output: Path
    #: the layout's name, as sdxl; the class where tensors keep their names
    architecture: str
    #: dtype or GGML type -> number of tensors
    types: Mapping[str, int]
    #: of the tensors
    nbytes: int
    #: names in the output of weights that were packed already and are not rounded again
    copied: tuple[str, ...]
    #: by name, of weights that were quantized, or rounded again: the relative error (root of the
    #: share of power) against what was exported; empty when nothing was written
    errors: Mapping[str, float] = field(default_factory=dict)
    #: differences from the model, a line each
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[float, str] | None:
        """The largest error, and its layer."""
        return max(((error, name) for name, error in self.errors.items()), default=None)

    @property
    def mean(self) -> float | None:
        """The mean error."""
        return fmean(self.errors.values()) if self.errors else None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        worst = None if self.worst is None else {"error": self.worst[0], "tensor": self.worst[1]}
        return {
            "output": str(self.output),
            "architecture": self.architecture,
            "types": dict(self.types),
            "bytes": self.nbytes,
            "copied": list(self.copied),
            "worst": worst,
            "mean_error": self.mean,
            "errors": dict(self.errors),
            "notes": list(self.notes),
        }


def together(parts: Sequence[Export]) -> Export:
    """Return the exports of several components as one."""
    types: Counter[str] = Counter()
    for part in parts:
        types.update(part.types)
    return Export(
        parts[0].output,
        ", ".join(part.architecture for part in parts),
        dict(types),
        sum(part.nbytes for part in parts),
        tuple(name for part in parts for name in part.copied),
        {name: error for part in parts for name, error in part.errors.items()},
        tuple(note for part in parts for note in part.notes),
    )
