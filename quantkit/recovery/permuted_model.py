"""Writing a model whose channels moved, one tensor at a time, and the calibration that fits it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from quantkit.calibration.statistics import Calibration, save_calibration
from quantkit.errors import ModelError, NonFiniteError, OutputError
from quantkit.models.source import Component, Model, open_model
from quantkit.models.source_tensors import read_tensor, source_tensors
from quantkit.recovery.distill.recover import Recovered
from quantkit.recovery.recovered_model import refuse_outputs, write_recovered
from quantkit.sparsity.channel_permutation import Moves, Permutation, moves_of, permute_calibration
from quantkit.storage.places import check_file, refuse_overlap


@dataclass(frozen=True)
class Outputs:
    """What is written of a permuted model."""

    #: a pipeline's directory, or a component's as the model was
    pipeline: Path
    masks: Path
    #: None: there was none for the model
    calibration: Path | None


def only_component(model: Model) -> Component:
    """Return the denoiser of a model that has one.

    Raises:
        ModelError: it has more.
    """
    if len(model.components) != 1:
        names = ", ".join(component.name for component in model.components)
        raise ModelError(
            f"{model.path}: found the denoisers {names}; pass the directory of one of them"
        )
    return model.components[0]


def refuse_permuted(model: Model, outputs: Outputs, *, force: bool) -> None:
    """Refuse outputs that cannot be, before anything long begins.

    Raises:
        OutputError: one exists without ``force``, or lies in another or in the model.
    """
    refuse_outputs(model, outputs.pipeline, outputs.masks, force=force)
    if outputs.calibration is None:
        return
    check_file(outputs.calibration, force=force)
    refuse_overlap(outputs.calibration, model.path)
    if outputs.calibration.resolve() == outputs.masks.resolve():
        raise OutputError(
            f"{outputs.masks}: the calibration is written there; choose another path for the masks",
            fields=("masks_output",),
        )


def write_permuted(
    model: Model,
    permutations: Sequence[Permutation],
    calibration: Calibration | None,
    outputs: Outputs,
    *,
    force: bool,
) -> tuple[Model, Calibration | None]:
    """Write the model with its channels moved; it computes what it did.

    Every other file is copied byte for byte.

    Args:
        model: the source, with one denoiser.
        permutations: what moves.
        calibration: of the source; None: none is written.
        outputs: where to.
        force: replace existing outputs.

    Returns:
        the written model, and the calibration for it.

    Raises:
        NonFiniteError: NaN or Inf in a tensor that moves.
        OutputError: an output exists without ``force``, or cannot be written.
    """
    component = only_component(model)
    moves = moves_of(permutations)
    tensors = PermutedTensors(component, moves)
    moved = Recovered(component, tensors, (), trajectories=0, aside=0.0)
    write_recovered(model, None, moved, outputs.pipeline, None, force=force)
    written = open_model(str(outputs.pipeline), family=component.family.name)
    if calibration is None or outputs.calibration is None:
        return written, None
    fitting = permute_calibration(calibration, moves, written.components[0])
    save_calibration(fitting, outputs.calibration, force=force)
    return written, fitting


class PermutedTensors(Mapping[str, Tensor]):
    """What moved, in the files' dtype, by the names of the files."""

    def __init__(self, component: Component, moves: Moves) -> None:
        """Find the tensors; none is read yet."""
        self._moves = moves
        self._shards = {name: shard for name, (shard, _) in source_tensors(component).items()}

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
        tensor = read_tensor(self._shards[name], name)
        if not bool(tensor.isfinite().all()):
            raise NonFiniteError(
                f"{self._shards[name]}: {name}: NaN or Inf; repair or download the model"
            )
        return tensor.index_select(axis, places)
