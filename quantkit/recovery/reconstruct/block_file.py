"""Blocks that a reconstruction has left behind, kept on disk: it goes on after the last of them."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.recovery.distill.resume import refuse_others
from quantkit.storage.artefact import read_artefact, write_artefact
from quantkit.storage.jsonfile import as_type, parsing

_KIND = "quantkit_reconstruction"


@dataclass(frozen=True)
class ReconstructedBlock:
    """One block that the pass has left behind."""

    #: module path
    block: str
    #: share of the power of the teacher's answers that the block missed, and misses
    before: float
    after: float
    #: gradient steps taken
    steps: int


@dataclass(frozen=True)
class SavedBlocks:
    """What was saved."""

    #: parameter name -> float32
    tensors: Mapping[str, Tensor]
    blocks: tuple[ReconstructedBlock, ...]
    #: that it took
    seconds: float
    #: mean squared error of the denoiser's answers before anything was fitted
    loss: float


class BlockFile:
    """One file with all blocks so far, written again now and then."""

    def __init__(self, path: Path, identity: Mapping[str, Any], every: float) -> None:
        """Prepare to save.

        Args:
            path: the file.
            identity: of ``identify``.
            every: seconds after which it is written again.
        """
        self._path = path
        self._identity = dict(identity)
        self._every = every
        self._saved = time.monotonic()

    def load(self) -> SavedBlocks:
        """Return what was saved.

        Raises:
            ArtefactError: no such file, a damaged one, or one of another reconstruction.
        """
        tensors, about = read_artefact(self._path, _KIND)
        with parsing(self._path, cure="do not resume, and begin again"):
            refuse_others(self._path, about["identity"], self._identity)
            blocks = tuple(as_type(ReconstructedBlock, values) for values in about["blocks"])
            return SavedBlocks(tensors, blocks, float(about["seconds"]), float(about["loss"]))

    def due(self) -> bool:
        """Tell whether it is time to save."""
        return time.monotonic() - self._saved >= self._every

    def save(self, kept: SavedBlocks) -> None:
        """Write the blocks.

        Raises:
            OutputError: the file cannot be written.
        """
        about = {
            "identity": self._identity,
            "blocks": [asdict(block) for block in kept.blocks],
            "seconds": kept.seconds,
            "loss": kept.loss,
        }
        write_artefact(self._path, _KIND, kept.tensors, about, force=True)
        self._saved = time.monotonic()
