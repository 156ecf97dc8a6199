"""Dropping the weights of a whole layer while the kept ones and the bias make up for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantkit.calibration.moments.moment_files import Hessians
from quantkit.calibration.moments.moments import Moments
from quantkit.errors import NonFiniteError
from quantkit.models.component_layers import Layer
from quantkit.models.source import Component
from quantkit.models.source_tensors import read_tensor
from quantkit.numerics.masks import Pattern
from quantkit.numerics.obs import factorize, refit_rows, settle_rows
from quantkit.numerics.packed_2to4 import to_rows

#: What SparseGPT adds to the diagonal, as a share of its mean: of 1e-3, 1e-2, 3e-2 and 1e-1 the one
#: that kept the demo's pictures best.
DAMPING = 1e-2
#: The refit starts from settled weights, so it may trust the moment more.
REFIT_DAMPING = 1e-2
REFIT_STEPS = 30


@dataclass(frozen=True, eq=False)
class UpdatedLayer:
    """One layer with its weights dropped and the others updated."""

    #: float32 (N, K), zero where nothing is kept
    rows: Tensor
    #: bool (N, K)
    mask: Tensor
    #: float32 (N,), the correction of the bias; None for a layer without one
    bias_change: Tensor | None
    #: share of the output's power that is lost, on rows that were held out if there are
    error: float


def target_moment(moments: Moments, *, bias: bool) -> Tensor:
    """Return the moment matrix of the error, (K, K).

    A bias takes up the mean of the error, so that only the covariance is left.
    """
    return moments.covariance if bias else moments.second


def prune_layer(
    rows: Tensor, moments: Moments, mask: Tensor | Pattern, *, bias: bool
) -> UpdatedLayer:
    """Drop weights, and let the kept ones and the bias make up for it.

    Args:
        rows: (N, K) float32.
        moments: of the layer's input, on the same device.
        mask: bool (N, K); or a pattern, whose groups are chosen on the way.
        bias: the layer has one.

    Raises:
        NonFiniteError: the moments are none of any inputs.
    """
    moment = target_moment(moments, bias=bias)
    values, kept = settle_rows(rows, factorize(moment, damping=DAMPING), mask=mask)
    values = refit_rows(rows, values, kept, moment, damping=REFIT_DAMPING, steps=REFIT_STEPS)
    refuse_non_finite(values)
    change = values - rows
    shift = -(change @ moments.mean) if bias else None
    return UpdatedLayer(values, kept, shift, lost_share(rows, change, moments, shift))


def refuse_non_finite(values: Tensor) -> None:
    """Refuse weights that moments of no input have blown up.

    Reading checks what is cheap to check. Whether a matrix is positive definite is not: an
    indefinite one has directions in which the error falls for ever.

    Raises:
        NonFiniteError: NaN or Inf.
    """
    if not bool(values.isfinite().all()):
        raise NonFiniteError(
            "second moments: the weights computed from them are NaN or Inf; collect the hessians "
            "again"
        )


@contextmanager
def naming(layer: str) -> Iterator[None]:
    """Put the layer's name before errors about its moments."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{layer}: {error}") from error


def lost_share(
    rows: Tensor, change: Tensor, moments: Moments, bias_change: Tensor | None = None
) -> float:
    """Return the share of the output's power that a change of the weight takes.

    Args:
        rows: (N, K) float32, as they were.
        change: (N, K) float32.
        moments: of the input; where rows were held out, the share is that on them.
        bias_change: (N,) float32, what the bias gains; None: nothing.
    """
    total = moments.power(rows)
    lost = moments.power(change, bias_change)
    return max(lost, 0.0) / total if total > 0 else 0.0


@dataclass(frozen=True)
class Surgeon:
    """SparseGPT on second moments, with a device and a scratch folder for results."""

    hessians: Hessians
    device: torch.device
    #: a folder for layers whose masks were chosen and whose weights are written later, so that no
    #: layer is operated on twice and none is held meanwhile; None: computed again
    scratch: Path | None = None

    def moments(self, component: Component, layer: Layer, digest: str | None = None) -> Moments:
        """Return the moments of a layer's input, on the device.

        Raises:
            ArtefactError: none, damaged, or of other weights.
        """
        return self.hessians.read(component, layer, digest).to(self.device)

    def leave(self, component: Component, layer: Layer, settled: UpdatedLayer) -> None:
        """Write a settled layer to the scratch folder, if there is one."""
        if self.scratch is None:
            return
        tensors = {"rows": settled.rows, "mask": settled.mask}
        if settled.bias_change is not None:
            tensors["bias_change"] = settled.bias_change
        metadata = {"error": repr(settled.error)}
        save_file(tensors, _place(self.scratch, component, layer), metadata=metadata)

    def find(self, component: Component, layer: Layer, mask: Tensor) -> UpdatedLayer | None:
        """Return what ``leave`` wrote for a layer with this mask, on the CPU; None: nothing."""
        if self.scratch is None or not _place(self.scratch, component, layer).is_file():
            return None
        with safe_open(_place(self.scratch, component, layer), framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
            error = float(file.metadata()["error"])
        if not torch.equal(found["mask"], mask.cpu()):
            return None
        return UpdatedLayer(found["rows"], found["mask"], found.get("bias_change"), error)


def _place(scratch: Path, component: Component, layer: Layer) -> Path:
    return scratch / f"{component.name}.{layer.name}.safetensors"


def read_rows(layer: Layer) -> Tensor:
    """Return a whole weight as float32 rows (N, K)."""
    return to_rows(read_tensor(layer.shard, layer.weight.name)).float().contiguous()
