"""Writing the weights of a packed component: every offset is known before the first byte."""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.encode import WeightPlan, encode_weight
from quantkit.checkpoint.layout import Sink, Slot, encode_header, place, write_at
from quantkit.checkpoint.metadata import METADATA_KEY, LayerRecord, ShardMetadata
from quantkit.checkpoint.rows import FLOAT_DTYPES, SourceTensor
from quantkit.checkpoint.spec import (
    CONFIG_KEY,
    PackedConfig,
    TensorSpec,
    kind_of,
    layer_tensors,
    needed_version,
)
from quantkit.checkpoint.threads import one_torch_thread
from quantkit.errors import ArtefactError
from quantkit.progress import Progress
from quantkit.tensorfile import Header, TensorInfo, read_header

#: Bytes of a copied tensor that are read, checked, hashed and written at once; a multiple of every
#: item size.
COPY_BYTES = 1 << 20

#: Stands for digests that are not known yet: the header's size depends on their length alone.
_BLANK = "0" * 64


@dataclass(frozen=True)
class PackedLayer:
    """A layer and what ties it to the artefacts it was planned from."""

    plan: WeightPlan
    #: what the source weight must hash to, and who says so ("masks")
    expected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ShardPlan:
    """One output file: its source, its tensors, its packed layers."""

    source: Header
    recipe: Mapping[str, Any]
    #: by module path, those whose weight lies in this shard
    layers: Mapping[str, PackedLayer]

    @property
    def name(self) -> str:
        """File name, as the source's."""
        return self.source.path.name

    @property
    def nbytes(self) -> int:
        """Size of the output file."""
        return max((s.stop for s in self.slots().values()), default=len(self.header({}, {})))

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the tensors of the output file."""
        return tuple(
            spec for info in self.source.tensors.values() for spec in self.specs_of(info).values()
        )

    def specs_of(self, info: TensorInfo) -> dict[str, TensorSpec]:
        """Return what a source tensor becomes, by the last part of the names."""
        layer = self.layer_of(info)
        if layer is None:
            return {"": TensorSpec(info.name, info.dtype, info.shape)}
        name, scheme = layer.plan.layer, layer.plan.scheme
        specs = layer_tensors(name, scheme, kind_of(info.shape), info.shape, bias_dtype=None)
        return {spec.name.removeprefix(f"{name}."): spec for spec in specs}

    def layer_of(self, info: TensorInfo) -> PackedLayer | None:
        """Return the packed layer whose weight this is."""
        layer = info.name.removesuffix(".weight")
        return None if layer == info.name else self.layers.get(layer)

    def slots(self) -> dict[str, Slot]:
        """Return the place of every tensor."""
        return place(self.specs(), len(self.header({}, {})))

    def header(self, records: Mapping[str, LayerRecord], digests: Mapping[str, str]) -> bytes:
        """Return the header; what is not given stands there as zeros of the same length."""
        infos = {name: self.source.tensors[f"{name}.weight"] for name in self.layers}
        layers = {n: records.get(n, LayerRecord(i.shape, _BLANK)) for n, i in infos.items()}
        tensors = {spec.name: digests.get(spec.name, _BLANK) for spec in self.specs()}
        version = needed_version(layer.plan.scheme for layer in self.layers.values())
        metadata = ShardMetadata(version, dict(self.recipe), layers, tensors)
        text = {"format": "pt", **self.source.metadata, METADATA_KEY: metadata.to_text()}
        return encode_header(self.specs(), text)


def plan_shards(
    paths: Sequence[Path], recipe: Mapping[str, Any], layers: Mapping[str, PackedLayer]
) -> tuple[ShardPlan, ...]:
    """Return the output files of a component, cut where the source was cut.

    Args:
        paths: the source's shards.
        recipe: JSON for the header.
        layers: by module path.
    """
    plans = []
    for path in paths:
        header = read_header(path)
        mine = {name: layer for name, layer in layers.items() if f"{name}.weight" in header.tensors}
        plans.append(ShardPlan(header, recipe, mine))
    return tuple(plans)


def write_shards(
    plans: Sequence[ShardPlan], folder: Path, *, threads: int, step: str, progress: Progress
) -> None:
    """Write the output files; the bytes do not depend on the number of threads.

    Args:
        plans: from ``plan_shards``.
        folder: where the files go; nothing of their names is there.
        threads: tensors in work at the same moment.
        step: what progress calls this.
        progress: called in this thread.

    Raises:
        NonFiniteError: NaN or Inf in a tensor of the source.
        ArtefactError: a mask or statistics for another weight.
        OSError: as no space left; the caller knows the output's name.
    """
    with ExitStack() as stack, one_torch_thread():
        files = [_ShardFile(plan, folder, stack) for plan in plans]
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        # The largest first, so that no thread is left alone with one at the end.
        tasks = sorted(
            ((file, info) for file in files for info in file.plan.source.tensors.values()),
            key=lambda task: -task[1].nbytes,
        )
        futures = [pool.submit(file.write, info) for file, info in tasks]
        try:
            _wait(futures, step, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        for file in files:
            file.finish()


def write_index(index: Path, plans: Sequence[ShardPlan], target: Path) -> None:
    """Write the index of the packed shards, in the form diffusers gives it.

    Args:
        index: the source's.
        plans: the shards.
        target: the file to make.
    """
    table = json.loads(index.read_text(encoding="utf-8"))
    specs = {spec.name: plan for plan in plans for spec in plan.specs()}
    size = sum(slot.stop - slot.start for plan in plans for slot in plan.slots().values())
    table["metadata"] = {**(table.get("metadata") or {}), "total_size": size}
    table["weight_map"] = {name: plan.name for name, plan in specs.items()}
    target.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_config(source: Path, config: PackedConfig, target: Path) -> None:
    """Write config.json with the quantization_config: the same keys in the same order and one more.

    Args:
        source: the component's config.json.
        config: the schemes.
        target: the file to make.
    """
    values: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    # diffusers sorts keys; so written, what it saves of a loaded model is the same file again.
    is_sorted = list(values) == sorted(values)
    values[CONFIG_KEY] = dict(sorted(config.to_json().items()))
    values[CONFIG_KEY]["schemes"] = [
        dict(sorted(scheme.items())) for scheme in values[CONFIG_KEY]["schemes"]
    ]
    text = json.dumps(values, indent=2, sort_keys=is_sorted) + "\n"
    target.write_text(text, encoding="utf-8")


class _ShardFile:
    """An output file while its tensors arrive, in any order and from any thread."""

    def __init__(self, plan: ShardPlan, folder: Path, stack: ExitStack) -> None:
        self.plan = plan
        self._slots = plan.slots()
        self._records: dict[str, LayerRecord] = {}
        self._digests: dict[str, str] = {}
        self._source = _opened(plan.source.path, os.O_RDONLY, stack)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._target = _opened(folder / plan.name, flags, stack)

    def write(self, info: TensorInfo) -> None:
        """Write what one source tensor becomes."""
        source = SourceTensor(self.plan.source.path, self._source, info)
        specs = self.plan.specs_of(info)
        sinks = {p: Sink(self._target, self._slots[spec.name]) for p, spec in specs.items()}
        layer = self.plan.layer_of(info)
        if layer is None:
            _copy(source, sinks[""])
        else:
            record = encode_weight(layer.plan, source, sinks)
            _check_digests(layer, record)
            self._records[layer.plan.layer] = record
        for part, spec in specs.items():
            self._digests[spec.name] = sinks[part].close()

    def finish(self) -> None:
        """Write the header, now that every digest is known."""
        write_at(self._target, self.plan.header(self._records, self._digests), 0)


def _copy(source: SourceTensor, sink: Sink) -> None:
    width = FLOAT_DTYPES[source.info.dtype].itemsize if source.info.dtype in FLOAT_DTYPES else 0
    for index, chunk in enumerate(source.chunks(COPY_BYTES)):
        if width:
            source.check_finite(chunk, index * COPY_BYTES // width)
        sink.append(chunk)


def _check_digests(layer: PackedLayer, record: LayerRecord) -> None:
    for who, digest in layer.expected:
        if digest != record.source_sha256:
            raise ArtefactError(
                f"{who}: layer {layer.plan.layer}: for a weight with SHA-256 {digest}, found "
                f"{record.source_sha256}; make the {who} from this model"
            )


def _wait(futures: Sequence[Future[None]], step: str, progress: Progress) -> None:
    progress(step, 0, len(futures))
    for done, future in enumerate(as_completed(futures), 1):
        future.result()
        progress(step, done, len(futures))


def _opened(path: Path, flags: int, stack: ExitStack) -> int:
    descriptor = os.open(path, flags, 0o644)
    stack.callback(os.close, descriptor)
    return descriptor
