"""The Linear and Conv2d layers of a component, from safetensors headers alone."""

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from quantkit.errors import CheckpointError, ModelError
from quantkit.models.building import read_skeleton
from quantkit.models.source import Component
from quantkit.models.source_tensors import source_tensors
from quantkit.recipe.fields import matches
from quantkit.storage.tensorfile import TensorInfo

#: Dtypes that weights are packed from.
SOURCE_DTYPES = ("F16", "BF16", "F32")
#: Bytes of a tensor's name; the longest of published models has 80.
MAX_NAME = 200
#: Tensors of packed layers besides weight and bias: a model with such a tensor cannot be packed.
RESERVED = (
    "weight_meta", "weight_group", "weight_scale", "input_scale", "input_smooth", "input_shift",
    "output_shift",
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer that could be packed."""

    #: module path inside the component
    name: str
    kind: Literal["linear", "conv2d"]
    weight: TensorInfo
    #: the file that holds the weight
    shard: Path
    bias: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the module's weight: (N, K), or (N, C, kh, kw)."""
        return self.weight.shape

    @property
    def n(self) -> int:
        """Output channels."""
        return self.shape[0]

    @property
    def k(self) -> int:
        """Length of the reduction: K, or kh * kw * C."""
        return prod(self.shape[1:])

    @property
    def channels(self) -> int:
        """Input channels: C of a convolution, K of a Linear."""
        return self.shape[1]

    @property
    def area(self) -> int:
        """Taps of the convolution's window; 1 for a Linear."""
        return prod(self.shape[2:])


def list_layers(component: Component) -> tuple[Layer, ...]:
    """Return the layers in the order of the files.

    A 2-D weight is a Linear's and a 4-D one a Conv2d's, except where the family says otherwise. Of
    the general family, diffusers says which modules are: it builds the model without weights.

    Raises:
        ModelError: a damaged file, a tensor in two files, a weight of a dtype that is not packed;
            of the general family, a class that the installed diffusers lacks or cannot build.
    """
    tensors = source_tensors(component)
    for name, (shard, _) in tensors.items():
        _refuse_name(shard, name)
    others = _other_modules(component, tensors)
    return tuple(
        _layer(name.removesuffix(".weight"), shard, info, bias=_bias_of(name) in tensors)
        for name, (shard, info) in tensors.items()
        if _is_layer(component, info) and name.removesuffix(".weight") not in others
    )


def _refuse_name(shard: Path, name: str) -> None:
    """Refuse a tensor that no module of diffusers can have: names become parts of files and paths.

    An artefact's names have ``/`` between component and layer, and a layer's moments lie in a file
    of its name, which the system allows 255 bytes.
    """
    words = name.split(".")
    if not all(words) or not name.isprintable() or "/" in name or len(name.encode()) > MAX_NAME:
        raise ModelError(
            f"{shard}: tensor {name!r:.80}, expected the dotted path of a parameter, of at most "
            f"{MAX_NAME} bytes; save the model again with diffusers"
        )
    if words[-1] in RESERVED:
        raise ModelError(
            f"{shard}: tensor {name}: only packed layers have a {words[-1]}; start from the "
            "16-bit model"
        )


def _bias_of(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.bias"


def _other_modules(component: Component, tensors: Collection[str]) -> frozenset[str]:
    """Return the modules that cannot be packed, where the model itself is asked for them."""
    if not component.family.by_structure:
        return frozenset()
    try:
        skeleton = read_skeleton(component.path / "config.json", component.class_name, tensors)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    return frozenset(name for name, reason in skeleton.modules.items() if reason)


def _is_layer(component: Component, info: TensorInfo) -> bool:
    name = info.name.removesuffix(".weight")
    return (
        name != info.name
        and len(info.shape) in (2, 4)
        and not matches(name, component.family.not_layers)
    )


def _layer(name: str, shard: Path, info: TensorInfo, *, bias: bool) -> Layer:
    if info.dtype.endswith("FNUZ"):
        raise ModelError(
            f"{shard}: {info.name}: found {info.dtype}, the FP8 of MI300 (max 240, another bias), "
            f"expected one of {', '.join(SOURCE_DTYPES)}; pack from the 16-bit model"
        )
    if info.dtype not in SOURCE_DTYPES:
        raise ModelError(
            f"{shard}: {info.name}: found {info.dtype}, expected one of "
            f"{', '.join(SOURCE_DTYPES)}; pack from the 16-bit model"
        )
    if 0 in info.shape:
        raise ModelError(f"{shard}: {info.name}: shape {info.shape} holds no weights")
    return Layer(name, "linear" if len(info.shape) == 2 else "conv2d", info, shard, bias)
