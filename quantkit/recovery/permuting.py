"""The tensors of a model whose channels moved, one at a time for the writer."""

from collections.abc import Iterator, Mapping

from safetensors import safe_open
from torch import Tensor

from quantkit.errors import NonFiniteError
from quantkit.models.source import Component
from quantkit.sparsity.permute import Moves
from quantkit.tensorfile import read_header


class PermutedTensors(Mapping[str, Tensor]):
    """What moved, in the files' dtype, by the names of the files."""

    def __init__(self, component: Component, moves: Moves) -> None:
        """Find the tensors; none is read yet."""
        self._moves = moves
        self._shards = {
            name: shard for shard in component.shards for name in read_header(shard).tensors
        }

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._moves)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._moves)

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor.

        Raises:
            KeyError: it stays as it is.
            NonFiniteError: NaN or Inf in it.
        """
        axis, places = self._moves[name]
        with safe_open(self._shards[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if not bool(tensor.isfinite().all()):
            raise NonFiniteError(
                f"{self._shards[name]}: {name}: NaN or Inf; repair or download the model"
            )
        return tensor.index_select(axis, places)
