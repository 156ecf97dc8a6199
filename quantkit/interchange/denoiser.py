"""A denoiser on disk, in 16 bit or packed, one tensor at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.verification import contents_of
from quantkit.errors import CheckpointError, ModelError, NonFiniteError
from quantkit.interchange.gguf_file import all_finite
from quantkit.models.layers import SOURCE_DTYPES
from quantkit.models.source import Component
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.ggml_blocks import put_together
from quantkit.storage.tensorfile import read_header


@dataclass(frozen=True, eq=False)
class Denoiser:
    """The tensors of a diffusers model as its class names them, dense or in blocks."""

    path: Path
    class_name: str
    #: dense shapes
    shapes: Mapping[str, tuple[int, ...]]
    #: the file that holds a tensor, of those that are not packed
    _places: Mapping[str, Path]
    #: weights that are packed in blocks
    _formats: Mapping[str, NumberFormat]
    _packed: PackedComponent | None = None

    def format(self, name: str) -> NumberFormat | None:
        """Return the format of a weight that is packed in blocks; None: it is dense."""
        return self._formats.get(name)

    def read(self, name: str) -> Tensor:
        """Return a dense tensor in its dtype, float32 for packed ones.

        Raises:
            NonFiniteError: NaN or infinity.
        """
        if name in self._formats:
            assert self._packed is not None
            return self._packed.dequantized(name.removesuffix(".weight"))
        with safe_open(self._places[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if not all_finite(tensor):
            raise NonFiniteError(f"{self._places[name]}: {name}: NaN or infinity")
        return tensor

    def blocks(self, name: str) -> Tensor:
        """Return a packed weight as GGML's blocks, uint8 (N, bytes of a row)."""
        assert self._packed is not None
        layer = name.removesuffix(".weight")
        parts = self._packed.parts(layer)
        return put_together(parts["weight"].flatten(1), parts["weight_scale"], self._formats[name])


def dense_denoiser(component: Component) -> Denoiser:
    """Return a 16-bit component's tensors.

    Raises:
        ModelError: a damaged file, a tensor of a dtype that is no number of a model.
    """
    shapes, places = {}, {}
    for shard in component.shards:
        for name, info in read_header(shard).tensors.items():
            if info.dtype not in SOURCE_DTYPES:
                raise ModelError(
                    f"{shard}: {name}: found {info.dtype}, wanted one of "
                    f"{', '.join(SOURCE_DTYPES)}; start from the 16-bit model"
                )
            shapes[name], places[name] = info.shape, shard
    return Denoiser(component.path, component.class_name, shapes, places, {})


def packed_denoiser(component: PackedComponent) -> Denoiser:
    """Return a packed component's tensors.

    Raises:
        CheckpointError: a layer is packed otherwise than in blocks.
    """
    formats = {}
    for layer, scheme in component.config.layers.items():
        if not scheme.weight.block:
            raise CheckpointError(
                f"{component.path}: {layer}: packed in {scheme.weight.name}, which would be "
                "rounded a second time; export the 16-bit model, or pack it with recipe gguf"
            )
        formats[f"{layer}.weight"] = scheme.weight
    shapes = contents_of(component).tensors
    places = {name: path for name, (path, _) in component.tensors.items()}
    return Denoiser(component.path, component.class_name, shapes, places, formats, component)
