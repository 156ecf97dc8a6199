"""Masks of layers, and their file."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantkit.calibration.statistics.layer_statistics import find_component
from quantkit.errors import ShapeError
from quantkit.models.source import Component
from quantkit.numerics.masks import SPARSEGPT, Pattern, parse_pattern
from quantkit.storage.artefact import pack_name, read_artefact, split_name, write_artefact
from quantkit.storage.jsonfile import as_type, parsing

_KIND = "quantkit_masks"


@dataclass(frozen=True, eq=False)
class LayerMask:
    """The mask of one layer: its kept weights."""

    #: uint8 (N, ceil(K / 8)) over rows as the kernels read them; bit i of a byte is column 8j + i
    bits: Tensor
    pattern: Pattern
    #: SHA-256 of the source weight the mask was chosen for
    source_digest: str
    #: estimated share of the output's power that is lost: sum(E[x^2] dw^2) / sum(E[x^2] w^2)
    error: float

    def dense(self, n: int, k: int) -> Tensor:
        """Return the mask as bool (n, k).

        Raises:
            ShapeError: the mask has another shape.
        """
        if tuple(self.bits.shape) != (n, -(-k // 8)):
            raise ShapeError(
                f"mask of {tuple(self.bits.shape)} bytes does not fit a weight of ({n}, {k})"
            )
        bits = np.unpackbits(self.bits.numpy(), axis=1, count=k, bitorder="little")
        return torch.from_numpy(bits).bool()


def pack_mask(mask: Tensor) -> Tensor:
    """Return a bool (N, K) mask as the bits of ``LayerMask``."""
    return torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little"))


@dataclass(frozen=True)
class Decision:
    """The decision for one layer that the recipe asked to be sparse."""

    component: str
    layer: str
    #: None: it was not measured, because it cannot be sparse
    error: float | None
    chosen: bool
    #: why not; "" when chosen
    reason: str


@dataclass(frozen=True, eq=False)
class MaskSet:
    """The masks of a model, by component and module path."""

    layers: dict[str, dict[str, LayerMask]]
    method: str
    pattern: Pattern
    decisions: tuple[Decision, ...] = ()

    @property
    def counts_on_updates(self) -> bool:
        """True when the kept weights still have to make up for the dropped ones.

        The masks of a recovered model take nothing more away: their errors are 0.
        """
        return self.method == SPARSEGPT and any(
            mask.error > 0 for layers in self.layers.values() for mask in layers.values()
        )

    def of(self, component: Component) -> Mapping[str, LayerMask]:
        """Return the masks of a component's layers.

        Raises:
            ArtefactError: the set has no such component.
        """
        return self.layers[find_component(component.name, tuple(self.layers), "masks")]


def save_masks(masks: MaskSet, path: Path, *, force: bool) -> None:
    """Write the masks to one safetensors file.

    Raises:
        OutputError: the file exists without ``force``, or cannot be written.
    """
    tensors = {
        pack_name(component, layer, "bits"): mask.bits
        for component, layers in masks.layers.items()
        for layer, mask in layers.items()
    }
    about = {
        "method": masks.method,
        "pattern": str(masks.pattern),
        "decisions": [asdict(decision) for decision in masks.decisions],
        "layers": {
            component: {
                layer: {"source_digest": mask.source_digest, "error": mask.error}
                for layer, mask in layers.items()
            }
            for component, layers in masks.layers.items()
        },
    }
    write_artefact(path, _KIND, tensors, about, force=force)


def load_masks(path: Path) -> MaskSet:
    """Read what ``save_masks`` wrote.

    Raises:
        ArtefactError: missing, damaged, or of a newer version.
    """
    tensors, about = read_artefact(path, _KIND)
    with parsing(path, cure="choose the masks again"):
        pattern = parse_pattern(str(about["pattern"]))
        layers: dict[str, dict[str, LayerMask]] = {name: {} for name in about["layers"]}
        for name, bits in tensors.items():
            component, layer, _ = split_name(name)
            entry = about["layers"][component][layer]
            _check_bits(f"{name!r:.80}", bits, pattern)
            layers[component][layer] = LayerMask(
                bits, pattern, str(entry["source_digest"]), _share(entry["error"])
            )
        decisions = tuple(as_type(Decision, entry) for entry in about["decisions"])
        return MaskSet(layers, str(about["method"]), pattern, decisions)


def _check_bits(name: str, bits: Tensor, pattern: Pattern) -> None:
    """Refuse bits of another pattern. Groups that are no part of a byte are checked when packed."""
    if bits.dtype != torch.uint8 or bits.ndim != 2:
        raise ValueError(f"{name}: {bits.dtype} of {bits.ndim} axes, expected uint8 of 2")
    if 8 % pattern.m or not bits.numel():
        return
    groups = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    kept = groups.reshape(256, -1, pattern.m).sum(axis=2)
    whole = (kept == pattern.n).all(axis=1)
    # The last byte of a row may have groups beyond K: after the others, and of zeros.
    full = (kept == pattern.n).cumprod(axis=1).sum(axis=1)
    tail = (full > 0) & (kept.sum(axis=1) == full * pattern.n)
    table = bits.numpy()
    if not (whole[table[:, :-1]].all() and tail[table[:, -1]].all()):
        raise ValueError(f"{name}: does not keep {pattern.n} of every {pattern.m}")


def _share(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < inf:
        raise ValueError(f"error {value!r:.40}, expected a share")
    return float(value)
