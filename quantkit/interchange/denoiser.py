"""Reading a denoiser on disk, in 16 bit or packed, one tensor at a time."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.torch_dtypes import FLOAT_DTYPES
from quantkit.checkpoint.verification import contents_of
from quantkit.errors import ModelError, NonFiniteError
from quantkit.interchange.gguf_file import all_finite
from quantkit.interchange.layer_codes import LayerCodes, read_codes
from quantkit.models.component_layers import SOURCE_DTYPES
from quantkit.models.families import find_family
from quantkit.models.source import Component
from quantkit.models.source_tensors import read_tensor, source_tensors
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.ggml_blocks import join_blocks
from quantkit.numerics.scheme import Scheme
from quantkit.recipe.fields import matches

if TYPE_CHECKING:
    from quantkit.interchange.reference import Reference


@dataclass(frozen=True, eq=False)
class Denoiser:
    """The tensors of a diffusers model as its class names them, dense or in blocks."""

    path: Path
    class_name: str
    #: dense shapes
    shapes: Mapping[str, tuple[int, ...]]
    #: the file that holds a tensor, of those that are not packed
    _places: Mapping[str, Path]
    #: of packed weights, by the name of the dense tensor
    schemes: Mapping[str, Scheme]
    #: of the file, of tensors that are not packed: as F16
    dtypes: Mapping[str, str]
    _packed: PackedComponent | None = None
    #: placeholders of scales of weights that are not packed yet, by the tensor's name
    _stand_ins: Mapping[str, Tensor] = field(default_factory=dict)
    #: the 16-bit model, of one that is packed on the way; None: this is what the user has
    reference: "Reference | None" = None

    def format(self, name: str) -> NumberFormat | None:
        """Return the format of a weight that is packed in blocks; None: it is not."""
        scheme = self.schemes.get(name)
        return scheme.weight if scheme is not None and scheme.weight.block else None

    @property
    def is_packed(self) -> bool:
        """True of a packed model, whatever of it is packed."""
        return self._packed is not None

    def keeps(self, name: str) -> bool:
        """Tell whether a weight stays as it is: a packed model says so, else the family does."""
        if self.is_packed:
            return name not in self.schemes
        family, layer = find_family(self.class_name), name.removesuffix(".weight")
        is_layer = not matches(layer, family.not_layers)
        return not is_layer or family.keep_reason(layer, self.shapes[name]) is not None

    @property
    def dtype(self) -> str:
        """The dtype of most tensors that are not packed: that of the 16-bit model."""
        found = Counter(dtype for dtype in self.dtypes.values() if dtype in FLOAT_DTYPES)
        return max(found, key=lambda dtype: (found[dtype], dtype), default="F16")

    def read(self, name: str) -> Tensor:
        """Return a dense tensor in its dtype, float32 for packed ones, smoothing undone.

        Raises:
            NonFiniteError: NaN or infinity.
        """
        if name in self.schemes:
            assert self._packed is not None
            return self._packed.dequantized(name.removesuffix(".weight"))
        tensor = read_tensor(self._places[name], name)
        if not all_finite(tensor):
            raise NonFiniteError(f"{self._places[name]}: {name}: NaN or infinity")
        return tensor

    def codes(self, name: str) -> LayerCodes:
        """Return a packed weight's codes and scales, one for the tensor or for each channel."""
        assert self._packed is not None
        return read_codes(self._packed, name.removesuffix(".weight"))

    def part(self, name: str, part: str) -> Tensor:
        """Return another tensor of a packed weight's layer, as weight_scale or input_scale."""
        stored = f"{name.removesuffix('.weight')}.{part}"
        if stored in self._stand_ins:
            return self._stand_ins[stored]
        assert self._packed is not None
        return self._packed.read(stored)

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe that a packed model records; empty for others."""
        return {} if self._packed is None else self._packed.metadata[0].recipe

    @property
    def source_digests(self) -> Mapping[str, str]:
        """SHA-256 of the weights that packed layers were made from, by layer."""
        if self._packed is None:
            return {}
        return {name: record.source_sha256 for name, record in self._packed.records.items()}

    def blocks(self, name: str) -> Tensor:
        """Return a packed weight as GGML's blocks, uint8 (N, bytes of a row)."""
        assert self._packed is not None
        layer = name.removesuffix(".weight")
        parts = self._packed.parts(layer)
        return join_blocks(
            parts["weight"].flatten(1), parts["weight_scale"], self.schemes[name].weight
        )


def dense_denoiser(component: Component) -> Denoiser:
    """Return a 16-bit component's tensors.

    Raises:
        ModelError: a damaged file, a tensor of a dtype that is no number of a model.
    """
    shapes, places, dtypes = {}, {}, {}
    for name, (shard, info) in source_tensors(component).items():
        if info.dtype not in SOURCE_DTYPES:
            raise ModelError(
                f"{shard}: {name}: found {info.dtype}, expected one of "
                f"{', '.join(SOURCE_DTYPES)}; start from the 16-bit model"
            )
        shapes[name], places[name], dtypes[name] = info.shape, shard, info.dtype
    return Denoiser(component.path, component.class_name, shapes, places, {}, dtypes)


def packed_denoiser(component: PackedComponent) -> Denoiser:
    """Return a packed component's tensors."""
    schemes = {f"{layer}.weight": scheme for layer, scheme in component.config.layers.items()}
    shapes = contents_of(component).tensors
    places = {name: path for name, (path, _) in component.tensors.items()}
    dtypes = {n: component.tensors[n][1].dtype for n in shapes if n not in schemes}
    return Denoiser(
        component.path, component.class_name, shapes, places, schemes, dtypes, component
    )


def planned_denoiser(
    component: Component, schemes: Mapping[str, Scheme], stand_ins: Mapping[str, Tensor]
) -> Denoiser:
    """Return a 16-bit component as if it were packed already, for plans alone.

    Args:
        component: 16-bit.
        schemes: of the layers that will be packed.
        stand_ins: scales like those that they will have, as ``conv_in.weight_scale``.
    """
    dense = dense_denoiser(component)
    packed = {f"{layer}.weight": scheme for layer, scheme in schemes.items()}
    dtypes = {name: dtype for name, dtype in dense.dtypes.items() if name not in packed}
    return replace(dense, schemes=packed, dtypes=dtypes, _stand_ins=stand_ins)
