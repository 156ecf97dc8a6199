"""What is checked whenever a packed component is loaded: files against schemes against the model.

Checksums take a pass over all bytes and are left to ``quantkit verify`` and to
``load_pipeline(..., checksums=True)``.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.spec import layer_tensors
from quantkit.errors import CheckpointError
from quantkit.inference.modules import PARTS, PackedLayer
from quantkit.numerics.packing import metadata_is_legal
from quantkit.tensorfile import TensorInfo, read_header

_CURE = "pack the model again"


def check_files(files: Iterable[Path], layers: Mapping[str, PackedLayer]) -> None:
    """Compare the headers of a component with the packed layers of its model.

    Args:
        files: the component's safetensors files.
        layers: module path to the empty packed layer that stands there.

    Raises:
        CheckpointError: tensors that are missing, extra, or of another dtype or shape.
    """
    found = dict(_tensors(files))
    expected = {}
    for name, layer in layers.items():
        bias = found.get(f"{name}.bias")
        # The bias keeps its source's dtype, so the file says which.
        dtype = None if layer.bias is None else (bias.info.dtype if bias else "F16")
        specs = layer_tensors(name, layer.scheme, layer.kind, layer.dense_shape, bias_dtype=dtype)
        expected.update({spec.name: spec for spec in specs})
    where = next(iter(files)).parent
    missing = expected.keys() - found.keys()
    if missing:
        raise CheckpointError(f"{where}: lacks {some(missing)}; {_CURE}")
    extra = [n for n, f in found.items() if n not in expected and _looks_packed(f.info, layers)]
    if extra:
        raise CheckpointError(f"{where}: no scheme has {some(extra)}; {_CURE}")
    for name, spec in expected.items():
        info = found[name].info
        if (info.dtype, info.shape) != (spec.dtype, spec.shape):
            raise CheckpointError(
                f"{found[name].file}: {name}: {info.dtype} {list(info.shape)}, wanted "
                f"{spec.dtype} {list(spec.shape)}; {_CURE}"
            )


def check_values(where: Path, name: str, value: Tensor) -> None:
    """Refuse scales that are no scales and positions that a kernel must not follow.

    Args:
        where: for the message.
        name: the tensor; its last part says what it is.
        value: on the CPU.

    Raises:
        CheckpointError: a scale that is not finite and positive, an illegal nibble.
    """
    part = name.rpartition(".")[2]
    if part in ("weight_scale", "input_scale", "input_smooth"):
        bad = ~(torch.isfinite(value) & (value > 0))
        if bool(bad.any()):
            raise CheckpointError(
                f"{where}: {name}: {int(bad.sum())} of {value.numel()} values are not finite and "
                f"positive; {_CURE}"
            )
    elif part == "weight_meta" and not metadata_is_legal(value):
        raise CheckpointError(
            f"{where}: {name}: a nibble names no two distinct ascending positions; {_CURE}"
        )


def some(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return ", ".join(ordered[:8]) + more


class _Found:
    def __init__(self, file: Path, info: TensorInfo) -> None:
        self.file = file
        self.info = info


def _tensors(files: Iterable[Path]) -> Iterator[tuple[str, _Found]]:
    for file in files:
        for name, info in read_header(file).tensors.items():
            yield name, _Found(file, info)


def _looks_packed(info: TensorInfo, layers: Mapping[str, PackedLayer]) -> bool:
    layer, _, part = info.name.rpartition(".")
    if part in PARTS and part != "weight":
        return True
    return info.dtype.startswith("F8_") or (layer in layers and part in ("weight", "bias"))
