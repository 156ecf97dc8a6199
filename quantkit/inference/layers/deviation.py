"""Deviations of kernels from ``reference``, and of packed from 16-bit layers, on a live run.

``watch`` hooks the packed layers of a loaded pipeline. A watched call is computed a second time by
plain PyTorch on the very input it had, and, with the original pipeline at hand, by its dense layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.device.backends import Backend, use
from quantkit.inference.layers.layer_summary import iterate_packed
from quantkit.inference.layers.packed_layer import PackedLayer


@dataclass
class LayerDeviation:
    """The measured deviations of one layer; updated while it is watched."""

    #: calls of the layer
    calls: int = 0
    #: calls that were computed again
    watched: int = 0
    #: worst max |kernel - reference| / rms(reference) over the watched calls
    kernel: float = 0.0
    #: squares of packed - dense and of dense output, summed over the watched calls
    error_energy: float = 0.0
    dense_energy: float = 0.0

    @property
    def dense(self) -> float | None:
        """||packed - dense|| / ||dense|| of the output; None without the dense pipeline."""
        return (self.error_energy / self.dense_energy) ** 0.5 if self.dense_energy else None


@dataclass(frozen=True)
class Deviations:
    """Every packed layer of a pipeline."""

    #: (component, module path) -> deviations
    layers: dict[tuple[str, str], LayerDeviation] = field(default_factory=dict)

    @property
    def worst_kernel(self) -> tuple[tuple[str, str], float]:
        """The layer with the largest deviation from ``reference``, and how large; needs layers."""
        name, layer = max(self.layers.items(), key=lambda item: item[1].kernel)
        return name, layer.kernel


@contextmanager
def watch(pipe: Any, *, dense: Any = None, sample_every: int = 1) -> Iterator[Deviations]:
    """Watch the packed layers of ``pipe`` until the block ends.

    Args:
        pipe: a loaded pipeline, or a packed model.
        dense: the original pipeline or model, same component names, any dtype; its layers run
            on the inputs of the packed ones, in float32.
        sample_every: compute again the first and every n-th call of each layer after it.

    Yields:
        the record, filled as the pipeline runs.
    """
    deviations = Deviations()
    handles = []
    for component, name, layer in iterate_packed(pipe):
        seen = deviations.layers[component, name] = LayerDeviation()
        twin = _twin(dense, component, name)
        handles.append(layer.register_forward_hook(_Watcher(seen, twin, sample_every)))
    try:
        yield deviations
    finally:
        for handle in handles:
            handle.remove()


class _Watcher:
    """The forward hook of one layer."""

    def __init__(self, seen: LayerDeviation, twin: nn.Module | None, sample_every: int) -> None:
        self._seen = seen
        self._twin = twin
        self._sample_every = sample_every

    @torch.no_grad()
    def __call__(self, layer: PackedLayer, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen = self._seen
        seen.calls += 1
        if (seen.calls - 1) % self._sample_every or output.numel() == 0:
            return
        seen.watched += 1
        with use(Backend.REFERENCE):
            reference = layer.forward(*args)
        seen.kernel = max(seen.kernel, _relative(output, reference))
        if self._twin is not None:
            expected = _run_dense(self._twin, args[0])
            seen.error_energy += float(
                (output.float() - expected).square().sum(dtype=torch.float64)
            )
            seen.dense_energy += float(expected.square().sum(dtype=torch.float64))


def _twin(dense: Any, component: str, name: str) -> nn.Module | None:
    if dense is None:
        return None
    root = dense if isinstance(dense, nn.Module) else dense.components[component]
    assert isinstance(root, nn.Module)
    return root.get_submodule(name)


def _relative(output: Tensor, reference: Tensor) -> float:
    """Return max |output - reference| / rms(reference); infinite where only one is finite."""
    error = (output.double() - reference.double()).abs()
    error[(output == reference) | (output.isnan() & reference.isnan())] = 0.0
    worst = float(error.nan_to_num(nan=torch.inf).max())
    rms = float(reference.double().square().mean().sqrt())
    if worst == 0.0:
        return 0.0
    return worst / rms if rms > 0.0 else torch.inf


def _run_dense(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a Linear or Conv2d in float32 on ``x``, wherever and in whatever dtype it is stored."""
    weights = {
        name: p.detach().to(device=x.device, dtype=torch.float32)
        for name, p in layer.named_parameters()
    }
    result = torch.func.functional_call(layer, weights, (x.float(),))
    assert isinstance(result, Tensor)
    return result
