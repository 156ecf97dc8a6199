"""Encoding a weight of 16 or 32 bit to packed tensors in PyTorch, block by block of rows.

Rows are independent, so blocks of any size give the same bytes. What needs the whole weight (a
scale per tensor, smoothing) takes a pass of its own over it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.calibration.statistics.layer_statistics import per_column
from quantkit.checkpoint.metadata import LayerRecord
from quantkit.checkpoint.tensor_layout import Sink
from quantkit.checkpoint.weight_reader import BLOCK_ELEMENTS, Digest, SourceTensor
from quantkit.errors import ShapeError
from quantkit.models.source import StoredBlocks
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.ggml_blocks import block_bytes, split_blocks
from quantkit.numerics.granularity import PerTensor
from quantkit.numerics.least_error import candidates, choose_tensor_scale
from quantkit.numerics.nibbles import pack_nibbles
from quantkit.numerics.packed_2to4 import pack_two_of_four
from quantkit.numerics.scales import scale_of_amax
from quantkit.numerics.weight_grid import WeightGrid
from quantkit.packing.native import overflow
from quantkit.packing.weight_plan import Encoded, WeightPlan
from quantkit.sparsity.sparsegpt import naming

if TYPE_CHECKING:
    from quantkit.packing.gptq import Rounding


@dataclass(frozen=True, eq=False)
class _RowBlock:
    """Rows as they are cast: smoothed, and zero where nothing is kept."""

    rows: Tensor
    mask: Tensor | None
    #: (R,) mean output of the rows as the source has them
    output: Tensor | None


def copy_blocks(
    plan: WeightPlan, blocks: StoredBlocks, source: SourceTensor, sinks: Mapping[str, Sink]
) -> Encoded:
    """Write blocks of a .gguf file as they are; the arguments are those of ``encode_weight``."""
    digest = sha256()
    for chunk in source.chunks(BLOCK_ELEMENTS):
        digest.update(chunk)
    fmt = plan.scheme.weight
    size = prod(source.info.shape[1:]) // fmt.block * block_bytes(fmt)
    with blocks.path.open("rb") as file:
        for start, stop in blocks.spans:
            file.seek(start)
            while (rest := stop - file.tell()) > 0:
                data = file.read(min(rest, max(BLOCK_ELEMENTS // size, 1) * size))
                rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(-1, size)
                codes, scale = split_blocks(rows, fmt)
                _append(sinks["weight_scale"], scale)
                _append(sinks["weight"], codes)
    return Encoded(LayerRecord(source.info.shape, digest.hexdigest()), None)


class Encoder:
    """Packs one weight, as its plan says."""

    def __init__(self, plan: WeightPlan, source: SourceTensor) -> None:
        self._plan = plan
        self._source = source
        self._digest = sha256()
        self._passes = 0
        #: (C,) and (K,): the smoothing factor by channel and by column
        self._factor: Tensor | None = None
        self._columns: Tensor | None = None
        self._lost: list[Tensor] = []
        self._rounding: Rounding | None = None

    def run(self, sinks: Mapping[str, Sink]) -> Encoded:
        """Write the tensors; arguments and errors are those of ``encode_weight``."""
        if self._plan.smooth is not None:
            self._factor = self._plan.smooth(self._column_amax())
            self._columns = self._per_column(self._factor)
            _append(sinks["input_smooth"], self._factor)
        if self._plan.rounder is not None:
            self._rounding = self._plan.rounder.prepare(self._columns)
        if self._plan.input_scale is not None:
            _append(sinks["input_scale"], self._plan.input_scale(self._factor))
        whole = isinstance(self._plan.scheme.granularity, PerTensor)
        scale = self.tensor_scale() if whole else None
        if scale is not None:
            _append(sinks["weight_scale"], scale)
        for block in self._blocks():
            self._encode(block, scale, sinks)
        record = LayerRecord(self._source.info.shape, self._digest.hexdigest())
        return Encoded(record, torch.cat(self._lost) if self._lost else None)

    def _encode(self, block: _RowBlock, scale: Tensor | None, sinks: Mapping[str, Sink]) -> None:
        rows, fmt = block.rows, self._plan.scheme.weight
        grid = self._grid(rows, scale)
        if scale is None:
            # Those of blocks are float16 values already.
            _append(sinks["weight_scale"], grid.scale.half() if fmt.block else grid.scale)
        if grid.factors is not None:
            _append(sinks["weight_group"], grid.factors)
        steps = grid.steps(rows.shape[1])
        if self._rounding is not None:
            with naming(self._plan.layer):
                rows = self._rounding.round(rows, block.mask, steps, fmt)
        quantized = _quantize_(rows, steps, fmt)
        if block.output is not None:
            self._lost.append(block.output - self._mean_output(quantized, grid))
        codes = quantized.view(torch.uint8)
        if block.mask is not None:
            try:
                codes, meta = pack_two_of_four(codes, block.mask)
            except ShapeError as error:
                raise ShapeError(f"{self._plan.layer}: {error}") from error
            _append(sinks["weight_meta"], meta)
        if fmt.codes_per_byte > 1:
            scales = grid.scale if grid.factors is None else grid.factors
            group = codes.shape[1] // scales.shape[1]
            codes = pack_nibbles(codes.view(torch.int8), group)
        _append(sinks["weight"], codes)

    def _grid(self, rows: Tensor, scale: Tensor | None) -> WeightGrid:
        power = None if self._rounding is None else self._rounding.moment.diagonal()
        scheme, observer = self._plan.scheme, self._plan.observer
        return WeightGrid.choose(rows, scheme, observer, scale=scale, power=power)

    def _mean_output(self, codes: Tensor, grid: WeightGrid) -> Tensor:
        """Return the output of packed rows for the mean input, (R,)."""
        mean = self._plan.mean
        assert mean is not None
        smoothed = mean if self._columns is None else mean * self._columns
        return grid.values(codes) @ smoothed

    def _blocks(self) -> Iterator[_RowBlock]:
        for first, source in self._source_blocks():
            rows = source
            output = None if self._plan.mean is None else rows @ self._plan.mean
            # Chosen before smoothing: |w| is compared with its neighbours as the source has it.
            mask = None if self._plan.mask is None else self._plan.mask(rows, first)
            if self._columns is not None:
                rows.div_(self._columns)
                if not bool(torch.isfinite(rows).all()):
                    raise overflow(self._plan.layer)
            if mask is not None and self._rounding is not None:
                with naming(self._plan.layer):
                    rows = self._rounding.update(rows, mask)
            elif mask is not None:
                rows.mul_(mask)
            yield _RowBlock(rows, mask, output)

    def _source_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows); the first pass hashes the source's bytes."""
        self._passes += 1
        digest: Digest | None = self._digest if self._passes == 1 else None
        elements = BLOCK_ELEMENTS
        if self._rounding is not None:
            elements = max(elements, self._rounding.block_elements)
        return self._source.blocks(digest, elements=elements)

    def _column_amax(self) -> Tensor:
        return reduce(torch.maximum, (rows.abs().amax(dim=0) for _, rows in self._source_blocks()))

    def _per_column(self, factor: Tensor) -> Tensor:
        """Return (..., C) repeated for each tap: columns are channels last."""
        return per_column(factor, prod(self._source.info.shape[2:]))

    def tensor_scale(self) -> Tensor:
        """Return the one scale of the weight, shape []."""
        if self._plan.scale is not None:
            return self._plan.scale
        fmt = self._plan.scheme.weight
        amax = reduce(torch.maximum, (block.rows.abs().amax() for block in self._blocks()))
        tried = candidates(scale_of_amax(amax, fmt), self._plan.observer)
        if len(tried) == 1:
            return tried[0]
        return choose_tensor_scale(tried, (block.rows for block in self._blocks()), fmt)


def _quantize_(rows: Tensor, steps: Tensor, fmt: NumberFormat) -> Tensor:
    """Return the codes of ``WeightGrid.codes``, using ``rows`` up: no fresh memory."""
    rows.div_(steps).clamp_(fmt.min, fmt.max)
    return (rows.round_() if fmt.is_integer else rows).to(fmt.torch_dtype)


def _append(sink: Sink, tensor: Tensor) -> None:
    # reshape(-1) first: a scalar has no last axis to view as bytes.
    sink.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
