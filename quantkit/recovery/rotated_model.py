"""Writing a model whose queries and keys have another basis, and the calibration that fits it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from quantkit.calibration.attention_statistics import AttentionStatistics
from quantkit.calibration.rotation import Rotation
from quantkit.calibration.statistics import Calibration, find_component, save_calibration
from quantkit.errors import ArtefactError, NonFiniteError
from quantkit.models.layers import Layer, list_layers
from quantkit.models.source import Component, Model, open_model
from quantkit.models.source_tensors import read_tensor, source_tensors
from quantkit.numerics.attention_basis import turned
from quantkit.recovery.distill.recover import Recovered
from quantkit.recovery.recovered_model import refuse_outputs, write_recovered
from quantkit.storage.digest import sha256_of
from quantkit.storage.places import check_file


@dataclass(frozen=True)
class RotatedOutputs:
    """What is written of a model with other bases."""

    pipeline: Path
    calibration: Path

    def refuse(self, model: Model, *, force: bool) -> None:
        """Refuse outputs that cannot be, before anything long begins.

        Raises:
            OutputError: one exists without ``force``, or lies in the model.
        """
        refuse_outputs(model, self.pipeline, self.calibration, force=force)
        check_file(self.calibration, force=force)


def refuse_other_weights(
    component: Component, rotation: Rotation, calibration: Calibration
) -> None:
    """Refuse a calibration of other projections than the model's.

    Raises:
        ArtefactError: naming one.
    """
    digests = calibration.digests_of(component)
    for layer in _turned_layers(component, rotation):
        if digests.get(layer.name, "") not in ("", sha256_of(layer.shard, layer.weight)):
            raise ArtefactError(
                f"calibration: the weight of {layer.name} is not that of {component.path}; "
                "calibrate this model",
                fields=("calibration",),
            )


def write_rotated(
    model: Model,
    rotation: Rotation,
    calibration: Calibration,
    measured: Mapping[str, AttentionStatistics],
    outputs: RotatedOutputs,
    *,
    force: bool,
) -> Calibration:
    """Write the model with its bases; it computes what it did, up to rounding.

    Its config.json names the modules; every other tensor and file is copied byte for byte.

    Args:
        model: the source, with one denoiser.
        rotation: the bases.
        calibration: of the source.
        measured: statistics of the modules that have a basis, in it.
        outputs: where to.
        force: replace existing outputs.

    Returns:
        the calibration of what was written.

    Raises:
        NonFiniteError: NaN or Inf in a projection, or one that its dtype does not hold.
        OutputError: an output exists without ``force``, or cannot be written.
    """
    (component,) = model.components
    tensors = RotatedTensors(component, rotation)
    found = Recovered(component, tensors, (), trajectories=0, aside=0.0)
    write_recovered(
        model, None, found, outputs.pipeline, None, force=force, rotated=rotation.bases.keys()
    )
    (written,) = open_model(str(outputs.pipeline), family=component.family.name).components
    name = find_component(component.name, tuple(calibration.layers), "calibration")
    digests = dict(calibration.metadata.digests[name])
    for layer in _turned_layers(written, rotation):
        if layer.name in digests:
            digests[layer.name] = sha256_of(layer.shard, layer.weight)
    about = replace(calibration.metadata, digests={**calibration.metadata.digests, name: digests})
    attention = {**calibration.attention, name: {**calibration.attention[name], **measured}}
    fitting = replace(calibration, metadata=about, attention=attention)
    save_calibration(fitting, outputs.calibration, force=force)
    return fitting


def _turned_layers(component: Component, rotation: Rotation) -> Iterator[Layer]:
    turned_names = rotation.weights()
    return (layer for layer in list_layers(component) if layer.name in turned_names)


class RotatedTensors(Mapping[str, Tensor]):
    """What changes, in the files' dtype, by the names of the files."""

    def __init__(self, component: Component, rotation: Rotation) -> None:
        """Find the tensors; none is read yet."""
        bases = rotation.weights()
        self._found = {
            name: (shard, bases[name.rpartition(".")[0]])
            for name, (shard, _) in source_tensors(component).items()
            if name.rpartition(".")[0] in bases
        }

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._found)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._found)

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor.

        Raises:
            KeyError: it stays as it is.
            NonFiniteError: NaN or Inf in it, before or after.
        """
        shard, basis = self._found[name]
        before = read_tensor(shard, name)
        after = turned(before, basis).to(before.dtype)
        if not bool(before.isfinite().all() and after.isfinite().all()):
            raise NonFiniteError(
                f"{shard}: {name}: NaN, Inf, or too large for {before.dtype} in another basis; "
                "repair or download the model"
            )
        return after
