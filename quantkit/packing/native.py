"""Encoding a weight with the compiled core: the bytes of ``torch_encode``, several times as fast.

PyTorch does what the core does not take (GPTQ, means for biases, GGML's blocks, small groups), and
everything where there is no compiler.
"""

from __future__ import annotations

import ctypes
from array import array
from math import frexp, prod
from typing import TYPE_CHECKING

from quantkit.checkpoint.metadata import LayerRecord
from quantkit.checkpoint.weight_reader import value_of
from quantkit.device.host import encoder
from quantkit.device.host.encoder import address
from quantkit.device.host.hashing import new_digest
from quantkit.errors import NonFiniteError
from quantkit.numerics.formats import INT4
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.numerics.scale_rules import WEIGHT_SCALES, first_of_least
from quantkit.packing.mask_source import ChosenMask
from quantkit.storage.tensorfile import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from torch import Tensor

    from quantkit.checkpoint.tensor_layout import Sink
    from quantkit.checkpoint.weight_reader import SourceTensor
    from quantkit.device.host.hashing import Digest, Parts
    from quantkit.packing.weight_plan import WeightPlan
    from quantkit.storage.tensorfile import TensorInfo

#: Bytes of the source that are read, hashed, encoded and written at once. Twice as much leaves the
#: cache, half as much costs calls.
CHUNK_BYTES = 1 << 20

#: Columns of a block of the core.
_BLOCK = INT4.subscale_group


def takes(plan: WeightPlan, info: TensorInfo) -> bool:
    """Tell whether the core is available and supports the plan."""
    return (
        plan.mean is None
        and plan.rounder is None
        and plan.blocks is None
        and info.dtype in encoder.SOURCES
        and plan.scheme.weight.name in encoder.FORMATS
        and _knows_mask(plan)
        and _knows_groups(plan, prod(info.shape[1:]))
        and not encoder.why_unavailable()
    )


def encode(
    plan: WeightPlan, source: SourceTensor, sinks: Mapping[str, Sink]
) -> Generator[Parts, None, LayerRecord]:
    """Write the tensors that depend on the weight, of a layer that ``takes`` accepted.

    Yields:
        what is to be hashed before the next step.

    Raises:
        NonFiniteError: NaN or Inf in the weight, or after smoothing.
    """
    return _Core(plan, source).run(sinks)


def _knows_mask(plan: WeightPlan) -> bool:
    mask = plan.mask
    if mask is None:
        return plan.scheme.sparsity is None
    if not isinstance(mask, ChosenMask) or mask.importance is None:
        return isinstance(mask, ChosenMask) and mask.method == "magnitude"
    return bool(mask.importance.isfinite().all())


def _knows_groups(plan: WeightPlan, k: int) -> bool:
    if k == 0 or (plan.mask is not None and k % 8):
        return False
    if plan.scheme.weight.subscale_group:
        return isinstance(plan.scheme.granularity, PerChannel) and k % _BLOCK == 0
    match plan.scheme.granularity:
        case PerGroup(size):
            return size % _BLOCK == 0 and k % size == 0
    return True


class _Core:
    def __init__(self, plan: WeightPlan, source: SourceTensor) -> None:
        self._plan, self._source = plan, source
        shape = source.info.shape
        self._k = prod(shape[1:])
        stored = self._k * ITEM_BYTES[source.info.dtype]
        self._rows = max(1, min(shape[0], CHUNK_BYTES // stored))
        self._chunk = self._rows * stored
        self._importance = plan.mask.importance if isinstance(plan.mask, ChosenMask) else None
        self._rule = WEIGHT_SCALES[plan.observer]
        self._fractions = (ctypes.c_float * len(self._rule.fractions))(*self._rule.fractions)
        self._digest = new_digest()
        #: it, until all of the source was hashed
        self._unhashed: Digest | None = self._digest
        self._columns: Tensor | None = None
        self._job = self._new_job()

    def run(self, sinks: Mapping[str, Sink]) -> Generator[Parts, None, LayerRecord]:
        factor = None
        if self._plan.smooth is not None:
            factor = yield from self._smooth()
            _append(sinks["input_smooth"], factor)
        if self._plan.input_scale is not None:
            _append(sinks["input_scale"], self._plan.input_scale(factor))
        if isinstance(self._plan.scheme.granularity, PerTensor):
            scale = yield from self._tensor_scale()
            sinks["weight_scale"].append(memoryview(scale))
            self._job.scale = address(scale)
        buffers = {part: bytearray(self._rows * n) for part, n in self._row_bytes().items()}
        self._point(buffers)
        for rows, chunk in self._blocks():
            made = {p: memoryview(b)[: rows * len(b) // self._rows] for p, b in buffers.items()}
            yield [*self._source_parts(chunk), *((sinks[p].digest, made[p]) for p in made)]
            for part, data in made.items():
                sinks[part].write(data)
        return LayerRecord(self._source.info.shape, self._digest.hexdigest())

    def _new_job(self) -> encoder.Job:
        plan, shape = self._plan, self._source.info.shape
        match plan.scheme.granularity:
            case PerTensor():
                group = 0
            case PerChannel():
                group = self._k
            case PerGroup(size):
                group = size
        importance = self._importance
        return encoder.Job(
            importance=None if importance is None else importance.data_ptr(),
            channels=shape[1],
            taps=prod(shape[2:]),
            group=group,
            fractions=ctypes.addressof(self._fractions),
            tries=len(self._fractions),
            dtype=encoder.SOURCES.index(self._source.info.dtype),
            format=encoder.FORMATS.index(plan.scheme.weight.name),
            sparse=plan.mask is not None,
            pow2=self._rule.pow2,
        )

    def _row_bytes(self) -> dict[str, int]:
        """Return the bytes of a row of each tensor that the core fills."""
        k, job, fmt = self._k, self._job, self._plan.scheme.weight
        sizes = {"weight": (k // 2 if job.sparse else k) // fmt.codes_per_byte}
        if job.group:
            sizes["weight_scale"] = 4 * (k // job.group)
        if fmt.subscale_group:
            sizes["weight_group"] = k // _BLOCK
        if job.sparse:
            sizes["weight_meta"] = k // 8
        return sizes

    def _point(self, buffers: Mapping[str, bytearray]) -> None:
        job = self._job
        for part, field in _FIELDS.items():
            if part in buffers:
                setattr(job, field, address(buffers[part]))

    def _smooth(self) -> Generator[Parts, None, Tensor]:
        """Let columns be divided by their smoothing factors; return those of channels, (C,)."""
        import torch

        from quantkit.calibration.statistics.layer_statistics import per_column

        assert self._plan.smooth is not None
        amax = torch.zeros(self._k)
        self._job.column_amax = amax.data_ptr()
        yield from self._look()
        self._job.column_amax = None
        factor = self._plan.smooth(amax)
        self._columns = per_column(factor, self._job.taps).contiguous()
        self._job.columns = self._columns.data_ptr()
        return factor

    def _tensor_scale(self) -> Generator[Parts, None, bytearray]:
        """Return the one scale, a float32."""
        if self._plan.scale is not None:
            return bytearray(self._plan.scale.float().numpy().tobytes())
        amax = ctypes.c_float()
        self._job.amax = ctypes.addressof(amax)
        yield from self._look()
        self._job.amax = None
        base = ctypes.c_float(amax.value / self._plan.scheme.weight.max).value or 1.0
        if self._rule.pow2:
            mantissa, exponent = frexp(base)
            base = 2.0 ** (exponent - (mantissa == 0.5))
        tried = [ctypes.c_float(base * fraction) for fraction in self._fractions]
        return bytearray(tried[first_of_least(self._errors(base))] if len(tried) > 1 else tried[0])

    def _errors(self, base: float) -> list[array[float]]:
        """Return the weight's error for each fraction of a scale, by row."""
        tries, scale = len(self._fractions), ctypes.c_float(base)
        found = (ctypes.c_double * (self._rows * tries))()
        self._job.scale, self._job.errors = ctypes.addressof(scale), ctypes.addressof(found)
        errors = [array("d") for _ in range(tries)]
        for rows, _ in self._blocks():
            for place, error in enumerate(errors):
                error.extend(found[place : rows * tries : tries])
        self._job.errors = None
        return errors

    def _look(self) -> Generator[Parts, None, None]:
        """Pass over the source without writing."""
        for _, chunk in self._blocks():
            yield self._source_parts(chunk)
        self._unhashed = None

    def _source_parts(self, chunk: memoryview) -> Parts:
        return [] if self._unhashed is None else [(self._unhashed, chunk)]

    def _blocks(self) -> Iterator[tuple[int, memoryview]]:
        """Yield how many rows were encoded into the buffers, and their source, until its end."""
        job, info = self._job, self._source.info
        first = 0
        for chunk in self._source.chunks(self._chunk):
            job.source = address(chunk)
            job.rows = len(chunk) * self._rows // self._chunk
            found = encoder.encode_rows(job)
            if found == encoder.OVERFLOW:
                raise overflow(self._plan.layer)
            if found != encoder.DONE:
                value = value_of(chunk, info.dtype, found)
                raise self._source.non_finite(first * self._k + found, value)
            yield job.rows, chunk
            first += job.rows


def overflow(layer: str) -> NonFiniteError:
    """Return the error on an infinite quotient."""
    return NonFiniteError(f"{layer}: smoothing overflows the weight; lower smooth")


def _append(sink: Sink, tensor: Tensor) -> None:
    # reshape(-1): a scalar has no last axis.
    sink.append(tensor.contiguous().reshape(-1).numpy().data)


#: The core's names of the tensors that it fills.
_FIELDS = {
    "weight": "codes",
    "weight_scale": "scale",
    "weight_group": "factors",
    "weight_meta": "meta",
}
