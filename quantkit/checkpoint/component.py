"""A packed component as a value: its headers, its tensors, its dense weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from quantkit.checkpoint.spec import PACKED_PARTS, PackedConfig, rows_of
from quantkit.storage.system import open_to_read, read_at

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from quantkit.checkpoint.metadata import LayerRecord, ShardMetadata
    from quantkit.checkpoint.validate import Index, Shard
    from quantkit.storage.tensorfile import Header, TensorInfo


@dataclass(frozen=True)
class PackedComponent:
    """A packed component whose rules were checked."""

    #: sub-folder of the pipeline; "" when the component was opened itself
    name: str
    path: Path
    class_name: str
    config: PackedConfig
    shards: tuple[Shard, ...]
    index: Index | None

    @property
    def headers(self) -> tuple[Header, ...]:
        """Headers of the weight files."""
        return tuple(shard.header for shard in self.shards)

    @property
    def metadata(self) -> tuple[ShardMetadata, ...]:
        """The header metadata of the weight files."""
        return tuple(shard.metadata for shard in self.shards)

    @cached_property
    def records(self) -> Mapping[str, LayerRecord]:
        """Dense shape and source digest of every packed layer."""
        return {name: record for m in self.metadata for name, record in m.layers.items()}

    @cached_property
    def tensors(self) -> Mapping[str, tuple[Path, TensorInfo]]:
        """Every tensor and the file that holds it."""
        return {
            name: (header.path, info)
            for header in self.headers
            for name, info in header.tensors.items()
        }

    def read_bytes(self, name: str) -> bytearray:
        """Return the data of a tensor as it is stored.

        Args:
            name: as ``conv_in.weight_scale``.
        """
        path, info = self.tensors[name]
        descriptor = open_to_read(path)
        try:
            return bytearray(read_at(descriptor, info.nbytes, info.start))
        finally:
            os.close(descriptor)

    def read(self, name: str) -> Tensor:
        """Return a tensor of a packed layer as it is stored, by its name."""
        import torch

        from quantkit.checkpoint.torch_dtypes import PACKED_DTYPES

        info = self.tensors[name][1]
        return torch.frombuffer(self.read_bytes(name), dtype=PACKED_DTYPES[info.dtype]).reshape(
            info.shape
        )

    def parts(self, layer: str) -> dict[str, Tensor]:
        """Return the packed tensors of a layer by part: weight, weight_scale, ..."""
        names = {part: f"{layer}.{part}" for part in PACKED_PARTS}
        return {part: self.read(name) for part, name in names.items() if name in self.tensors}

    def dequantized(self, layer: str) -> Tensor:
        """Return the dequantized weight, with smoothing undone.

        Returns:
            float32, the module's dense shape: (N, K) or (N, C, kh, kw).
        """
        from quantkit.numerics.packed_2to4 import from_rows
        from quantkit.numerics.scales import dequantize

        scheme, shape = self.config.layers[layer], self.records[layer].shape
        parts, (_, k) = self.parts(layer), rows_of(shape)
        rows = dequantize(self.code_rows(layer), parts["weight_scale"], scheme.granularity)
        if scheme.smooth:
            factor = parts["input_smooth"]
            rows = rows * factor.repeat(k // factor.numel())
        return from_rows(rows, shape)

    def code_rows(self, layer: str) -> Tensor:
        """Return the codes of a layer that its scales are multiplied by, 2:4 expanded.

        Returns:
            (N, K) float8 or int8, channels last; factors of int4 are multiplied in.
        """
        from quantkit.numerics.packed_2to4 import unpack_two_of_four

        scheme, parts = self.config.layers[layer], self.parts(layer)
        codes = stored_codes(parts).reshape(self.records[layer].shape[0], -1)
        if scheme.sparsity is not None:
            codes = unpack_two_of_four(codes, parts["weight_meta"])
        return codes.view(scheme.weight.torch_dtype)

    def layer_bytes(self, layer: str) -> tuple[int, int]:
        """Return the bytes of a layer's weight before and after packing, without its bias.

        Before is two bytes a weight: what the 16-bit model takes, even when it was packed from
        float32.
        """
        n, k = rows_of(self.records[layer].shape)
        names = (f"{layer}.{part}" for part in PACKED_PARTS)
        after = sum(self.tensors[name][1].nbytes for name in names if name in self.tensors)
        return 2 * n * k, after


def stored_codes(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the codes of a packed weight as kernels multiply them, uint8, those kept alone."""
    import torch

    from quantkit.numerics.nibbles import integer_codes, unpack_nibbles

    if "weight_group" in parts:
        return integer_codes(parts["weight"], parts["weight_group"]).view(torch.uint8)
    if parts["weight"].dtype is torch.uint8:
        return unpack_nibbles(parts["weight"]).view(torch.uint8)
    return parts["weight"].view(torch.uint8)
