"""Writing the weights of a packed component: every offset is known before the first byte."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.metadata import METADATA_KEY, LayerRecord, ShardMetadata
from quantkit.checkpoint.spec import (
    TensorSpec,
    kind_of,
    layer_tensors,
)
from quantkit.checkpoint.tensor_layout import Sink, Slot, encode_header, place
from quantkit.checkpoint.weight_reader import NUMBERS, SourceTensor
from quantkit.device.host import checker
from quantkit.device.host.hashing import run_together
from quantkit.errors import ArtefactError, NonFiniteError
from quantkit.models.source_tensors import read_source
from quantkit.numerics.threads import one_torch_thread
from quantkit.packing.encode import encode_weight, needs_torch
from quantkit.storage.system import open_new, open_to_read, write_at
from quantkit.storage.tensorfile import ITEM_BYTES, Header, TensorInfo

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from quantkit.device.host.hashing import Parts
    from quantkit.models.source import Component
    from quantkit.packing.weight_plan import WeightPlan
    from quantkit.progress import Progress

#: Bytes of a copied tensor that are read, checked, hashed and written at once; a multiple of every
#: item size.
COPY_BYTES = 1 << 20

#: Stands for digests that are not known yet: the header's size depends on their length alone.
_BLANK = "0" * 64


@dataclass(frozen=True)
class PlannedLayer:
    """A layer, with digests of the artefacts that it was planned from."""

    plan: WeightPlan
    #: expected digests of the source weight, and the artefact that has each ("masks")
    expected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ShardPlan:
    """One output file: its source, its tensors, its packed layers."""

    #: of the file
    name: str
    source: Header
    recipe: Mapping[str, Any]
    #: by module path, those whose weight lies in this shard
    layers: Mapping[str, PlannedLayer]
    #: float32 tensors that stand for none of the source, by name
    added: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of the output file."""
        return max((s.stop for s in self.slots.values()), default=len(self.header({}, {})))

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of the output file."""
        added = [TensorSpec(n, "F32", tuple(t.shape)) for n, t in self.added.items()]
        return (*(s for specs in self._specs.values() for s in specs.values()), *added)

    def specs_of(self, info: TensorInfo) -> Mapping[str, TensorSpec]:
        """Return the packed tensors of a source tensor, by the last part of their names."""
        return self._specs[info.name]

    @cached_property
    def _specs(self) -> Mapping[str, Mapping[str, TensorSpec]]:
        """The packed tensors of each source tensor, by its name."""
        return {name: self._made_of(info) for name, info in self.source.tensors.items()}

    def _made_of(self, info: TensorInfo) -> Mapping[str, TensorSpec]:
        layer = self.layer_of(info)
        if layer is None:
            return {"": TensorSpec(info.name, info.dtype, info.shape)}
        name, scheme = layer.plan.layer, layer.plan.scheme
        specs = layer_tensors(name, scheme, kind_of(info.shape), info.shape, bias_dtype=None)
        return {spec.name.removeprefix(f"{name}."): spec for spec in specs}

    def layer_of(self, info: TensorInfo) -> PlannedLayer | None:
        """Return the packed layer whose weight this is."""
        layer = info.name.removesuffix(".weight")
        return None if layer == info.name else self.layers.get(layer)

    @cached_property
    def slots(self) -> Mapping[str, Slot]:
        """The place of every tensor."""
        return place(self.specs, len(self.header({}, {})))

    def header(self, records: Mapping[str, LayerRecord], digests: Mapping[str, str]) -> bytes:
        """Return the header; digests that are not given are zeros of the same length."""
        infos = {name: self.source.tensors[f"{name}.weight"] for name in self.layers}
        layers = {n: records.get(n, LayerRecord(i.shape, _BLANK)) for n, i in infos.items()}
        tensors = {spec.name: digests.get(spec.name, _BLANK) for spec in self.specs}
        metadata = ShardMetadata(dict(self.recipe), layers, tensors)
        text = {"format": "pt", **self.source.metadata, METADATA_KEY: metadata.to_text()}
        return encode_header(self.specs, text)


def plan_shards(
    component: Component,
    recipe: Mapping[str, Any],
    layers: Mapping[str, PlannedLayer],
    added: Mapping[str, Tensor],
) -> tuple[ShardPlan, ...]:
    """Return the output files of a component, cut where the source was cut.

    Args:
        component: the source.
        recipe: JSON for the header.
        layers: by module path.
        added: float32 tensors that the first file gets besides.
    """
    plans = []
    for index, path in enumerate(component.shards):
        header = read_source(path)
        mine = {name: layer for name, layer in layers.items() if f"{name}.weight" in header.tensors}
        own = {} if index else added
        plans.append(ShardPlan(component.name_of(path), header, recipe, mine, own))
    return tuple(plans)


def write_shards(
    plans: Sequence[ShardPlan], folder: Path, *, threads: int, step: str, progress: Progress
) -> None:
    """Write the output files; the bytes do not depend on the number of threads.

    Args:
        plans: from ``plan_shards``.
        folder: where the files go; nothing of their names is there.
        threads: at work; each has two tensors in hand.
        step: what progress calls this.
        progress: called in this thread.

    Raises:
        NonFiniteError: NaN or Inf in a tensor of the source.
        ArtefactError: a mask or statistics for another weight.
        OSError: as no space left; the caller knows the output's name.
    """
    with ExitStack() as stack:
        if _needs_torch(plans):
            stack.enter_context(one_torch_thread())
        files = [_ShardFile(plan, folder, stack) for plan in plans]
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        biases = _corrected_biases(files)
        # The largest first, so that no thread is left alone with one at the end.
        tasks = sorted(
            (
                (file, info)
                for file in files
                for info in file.plan.source.tensors.values()
                if info.name not in biases
            ),
            key=lambda task: -task[1].nbytes,
        )
        pairs = [tasks[first : first + 2] for first in range(0, len(tasks), 2)]
        futures = {pool.submit(_write_together, pair, biases): len(pair) for pair in pairs}
        try:
            _wait(futures, step, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        for file in files:
            file.write_added()
            file.finish()


def _needs_torch(plans: Sequence[ShardPlan]) -> bool:
    """Tell whether PyTorch does any of the work: importing it takes longer than the core does."""
    return bool(checker.why_unavailable()) or any(
        needs_torch(layer.plan, shard.source.tensors[f"{name}.weight"])
        for shard in plans
        for name, layer in shard.layers.items()
    )


class _ShardFile:
    """An output file while its tensors arrive, in any order and from any thread."""

    def __init__(self, plan: ShardPlan, folder: Path, stack: ExitStack) -> None:
        self.plan = plan
        self._slots = plan.slots
        self._records: dict[str, LayerRecord] = {}
        self._digests: dict[str, str] = {}
        self._source = open_to_read(plan.source.path)
        stack.callback(os.close, self._source)
        self._target = open_new(folder / plan.name)
        stack.callback(os.close, self._target)

    def write(self, info: TensorInfo) -> Generator[Parts, None, Tensor | None]:
        """Write the packed tensors of one source tensor; return the correction of its bias, if any.

        Yields:
            what is to be hashed before the next step.
        """
        correction = None
        source = SourceTensor(self.plan.source.path, self._source, info)
        specs = self.plan.specs_of(info)
        sinks = {p: Sink(self._target, self._slots[spec.name]) for p, spec in specs.items()}
        layer = self.plan.layer_of(info)
        if layer is None:
            _copy(source, sinks[""])
        else:
            encoded = yield from encode_weight(layer.plan, source, sinks)
            _check_digests(layer, encoded.record)
            self._records[layer.plan.layer] = encoded.record
            correction = encoded.correction
        for part, spec in specs.items():
            self._digests[spec.name] = sinks[part].close()
        return correction

    def write_bias(self, info: TensorInfo, correction: Tensor) -> None:
        """Write a bias with its correction (N,) added, rounded to its dtype.

        Raises:
            NonFiniteError: the sum is beyond the dtype.
        """
        import torch

        from quantkit.checkpoint.torch_dtypes import FLOAT_DTYPES

        source = SourceTensor(self.plan.source.path, self._source, info)
        sink = Sink(self._target, self._slots[info.name])
        dtype, first = FLOAT_DTYPES[info.dtype], 0
        for chunk in source.chunks(COPY_BYTES):
            source.check_finite(chunk, first)
            bias = torch.frombuffer(chunk, dtype=dtype)
            gain = correction[first : first + len(bias)]
            first += len(bias)
            corrected = (bias.float() + gain).to(dtype)
            if not bool(corrected.isfinite().all()):
                raise NonFiniteError(
                    f"{info.name}: bias_correction overflows {info.dtype}; drop it, or pack from "
                    "wider weights"
                )
            sink.append(corrected.view(torch.uint8).numpy().data)
        self._digests[info.name] = sink.close()

    def write_added(self) -> None:
        """Write what stands for no tensor of the source."""
        for name, tensor in self.plan.added.items():
            sink = Sink(self._target, self._slots[name])
            sink.append(tensor.contiguous().flatten().numpy().data)
            self._digests[name] = sink.close()

    def finish(self) -> None:
        """Write the header, now that every digest is known."""
        write_at(self._target, self.plan.header(self._records, self._digests), 0)


#: A bias by its tensor's name: the file that holds it, and where.
_Biases = Mapping[str, tuple[_ShardFile, TensorInfo]]


def _corrected_biases(files: Sequence[_ShardFile]) -> _Biases:
    """Return the biases that are written once their layer's weight was packed."""
    expected = {
        f"{name}.bias"
        for file in files
        for name, layer in file.plan.layers.items()
        if layer.plan.mean is not None
    }
    return {
        name: (file, info)
        for file in files
        for name, info in file.plan.source.tensors.items()
        if name in expected
    }


def _write_together(tasks: Sequence[tuple[_ShardFile, TensorInfo]], biases: _Biases) -> None:
    """Write tensors in parallel: hashing two takes as long as hashing one."""
    run_together([_write(file, info, biases) for file, info in tasks])


def _write(file: _ShardFile, info: TensorInfo, biases: _Biases) -> Generator[Parts, None, None]:
    correction = yield from file.write(info)
    if correction is not None:
        # It may lie in another shard than the weight.
        other, bias = biases[f"{info.name.removesuffix('.weight')}.bias"]
        other.write_bias(bias, correction)


def _copy(source: SourceTensor, sink: Sink) -> None:
    width = ITEM_BYTES[source.info.dtype] if source.info.dtype in NUMBERS else 0
    for index, chunk in enumerate(source.chunks(COPY_BYTES)):
        if width:
            source.check_finite(chunk, index * COPY_BYTES // width)
        sink.append(chunk)


def _check_digests(layer: PlannedLayer, record: LayerRecord) -> None:
    for who, digest in layer.expected:
        if digest != record.source_sha256:
            raise ArtefactError(
                f"{who}: layer {layer.plan.layer}: made from a weight with SHA-256 {digest}, but "
                f"the model's has {record.source_sha256}; make the {who} from this model"
            )


def _wait(futures: Mapping[Future[None], int], step: str, progress: Progress) -> None:
    """Report the number of finished tensors over all futures."""
    done, total = 0, sum(futures.values())
    progress(step, done, total)
    for future in as_completed(futures):
        future.result()
        done += futures[future]
        progress(step, done, total)
