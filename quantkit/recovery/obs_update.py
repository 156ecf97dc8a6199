"""Recovery without training: updates of kept weights and biases that make up for dropped weights.

Only the current layer is in memory: the writer asks for one tensor after another. Each is computed
then, from the source, the mask and the second moments, or read from where choosing its mask
stored it.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from quantkit.models.component_layers import Layer, list_layers
from quantkit.models.source import Component
from quantkit.models.source_tensors import read_tensor, source_tensors
from quantkit.numerics.packed_2to4 import from_rows
from quantkit.numerics.threads import surgery_threads
from quantkit.sparsity.maskfile import LayerMask, MaskSet
from quantkit.sparsity.sparsegpt import Surgeon, UpdatedLayer, naming, prune_layer, read_rows


class UpdatedTensors(Mapping[str, Tensor]):
    """The weights of masked layers and their biases, float32, by the names of the files."""

    def __init__(self, component: Component, masks: MaskSet, surgeon: Surgeon) -> None:
        """Find the tensors; nothing is computed yet.

        Raises:
            ArtefactError: the masks are for another component.
        """
        self._component = component
        self._masks = masks.of(component)
        self._surgeon = surgeon
        self._layers = {x.name: x for x in list_layers(component) if x.name in self._masks}
        self._shards = {name: shard for name, (shard, _) in source_tensors(component).items()}
        #: the last layer, whose bias is next to its weight in the file
        self._last: tuple[str, UpdatedLayer] | None = None

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        for layer in self._layers.values():
            yield f"{layer.name}.weight"
            if layer.bias:
                yield f"{layer.name}.bias"

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor, its layer computed if it is not the last one.

        Raises:
            KeyError: it stays as it is.
            ArtefactError: moments of other weights.
        """
        layer_name, _, part = name.rpartition(".")
        layer = self._layers.get(layer_name)
        if layer is None or part not in {"weight", "bias"}:
            raise KeyError(name)
        settled = self._settled(layer, self._masks[layer_name])
        if part == "weight":
            return from_rows(settled.rows, layer.shape).cpu()
        assert settled.bias_change is not None
        bias = read_tensor(self._shards[name], name)
        return bias.float() + settled.bias_change.cpu()

    def _settled(self, layer: Layer, mask: LayerMask) -> UpdatedLayer:
        if self._last is None or self._last[0] != layer.name:
            kept = mask.dense(layer.n, layer.k)
            found = self._surgeon.find(self._component, layer, kept)
            self._last = layer.name, found or self._operate(layer, mask, kept)
        return self._last[1]

    def _operate(self, layer: Layer, mask: LayerMask, kept: Tensor) -> UpdatedLayer:
        moments = self._surgeon.moments(self._component, layer, mask.source_digest)
        rows, kept = read_rows(layer).to(self._surgeon.device), kept.to(self._surgeon.device)
        with surgery_threads(layer.k), naming(layer.name):
            return prune_layer(rows, moments, kept, bias=layer.bias)
