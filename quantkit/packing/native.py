"""One weight through the compiled core: the bytes of ``encode``, several times as fast.

What it does not take (smoothing, GPTQ, moments, searched scales, other formats) PyTorch does, and
everything where no compiler is.
"""

import ctypes
from collections.abc import Generator, Iterator, Mapping
from math import prod

from quantkit.checkpoint.layout import Sink
from quantkit.checkpoint.metadata import LayerRecord
from quantkit.checkpoint.weight_reader import SourceTensor, value_of
from quantkit.device.host import encoder
from quantkit.device.host.encoder import address
from quantkit.device.host.hashing import Digest, Parts, new_digest
from quantkit.numerics.formats import INT4
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.packing.masks import ChosenMask
from quantkit.packing.weight_plan import WeightPlan
from quantkit.storage.tensorfile import ITEM_BYTES, TensorInfo

#: Bytes of the source that are read, hashed, encoded and written at once. Twice as much leaves the
#: cache, half as much costs calls.
CHUNK_BYTES = 1 << 20

#: Columns of a block of the core.
_BLOCK = INT4.subscale_group


def takes(plan: WeightPlan, info: TensorInfo) -> bool:
    """Tell whether the core does all that a plan asks for, and is there."""
    plain = plan.smooth is None and plan.mean is None and plan.shift is None
    nearest = plan.rounder is None and plan.blocks is None and plan.observer == "amax"
    return (
        plain
        and nearest
        and info.dtype in encoder.SOURCES
        and plan.scheme.weight.name in encoder.FORMATS
        and _knows_mask(plan)
        and _knows_groups(plan, prod(info.shape[1:]))
        and not encoder.why_unavailable()
    )


def encode(
    plan: WeightPlan, source: SourceTensor, sinks: Mapping[str, Sink]
) -> Generator[Parts, None, LayerRecord]:
    """Write what depends on the weight, of a layer that ``takes`` was asked about.

    Yields:
        what is to be hashed before the next step.

    Raises:
        NonFiniteError: NaN or Inf in the weight.
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
        self._job = self._new_job()

    def run(self, sinks: Mapping[str, Sink]) -> Generator[Parts, None, LayerRecord]:
        digest = new_digest()
        buffers = {part: bytearray(self._rows * n) for part, n in self._row_bytes().items()}
        if isinstance(self._plan.scheme.granularity, PerTensor):
            first, scale = yield from self._tensor_scale(digest)
            sinks["weight_scale"].append(memoryview(scale))
            self._job.scale = address(scale)
        else:
            first = digest
        self._point(buffers)
        for rows, chunk in self._blocks():
            made = {p: memoryview(b)[: rows * len(b) // self._rows] for p, b in buffers.items()}
            parts = [(sinks[part].digest, data) for part, data in made.items()]
            yield parts if first is None else [(first, chunk), *parts]
            for part, data in made.items():
                sinks[part].write(data)
        return LayerRecord(self._source.info.shape, digest.hexdigest())

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
            dtype=encoder.SOURCES.index(self._source.info.dtype),
            format=encoder.FORMATS.index(plan.scheme.weight.name),
            sparse=plan.mask is not None,
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

    def _tensor_scale(
        self, digest: Digest
    ) -> Generator[Parts, None, tuple[Digest | None, bytearray]]:
        """Return who is still to hash the source, and the one scale."""
        if self._plan.scale is not None:
            return digest, bytearray(self._plan.scale.float().numpy().tobytes())
        amax, largest = ctypes.c_float(), 0.0
        self._job.amax = ctypes.addressof(amax)
        for _, chunk in self._blocks():
            yield [(digest, chunk)]
            largest = max(largest, amax.value)
        scale = ctypes.c_float(largest / self._plan.scheme.weight.max)
        return None, bytearray(scale if scale.value > 0 else ctypes.c_float(1.0))

    def _blocks(self) -> Iterator[tuple[int, memoryview]]:
        """Yield how many rows were encoded into the buffers, and their source, until its end."""
        job, info = self._job, self._source.info
        first = 0
        for chunk in self._source.chunks(self._chunk):
            job.source = address(chunk)
            job.rows = len(chunk) * self._rows // self._chunk
            found = encoder.encode_rows(job)
            if found != encoder.DONE:
                value = value_of(chunk, info.dtype, found)
                raise self._source.non_finite(first * self._k + found, value)
            yield job.rows, chunk
            first += job.rows


#: The core's names of the tensors that it fills.
_FIELDS = {
    "weight": "codes",
    "weight_scale": "scale",
    "weight_group": "factors",
    "weight_meta": "meta",
}
