"""Writing a model's tensors in another program's layout, and comparing the file with the model."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quantkit._version import __version__
from quantkit.checkpoint.spec import TensorSpec
from quantkit.checkpoint.tensor_layout import Sink, encode_header, place
from quantkit.checkpoint.torch_dtypes import FLOAT_DTYPES, PACKED_DTYPES
from quantkit.errors import NonFiniteError, OutputError
from quantkit.interchange.denoiser import Denoiser
from quantkit.interchange.exported import Export
from quantkit.interchange.gguf_file import all_finite
from quantkit.interchange.layer_codes import LayerCodes
from quantkit.interchange.targets import Target
from quantkit.interchange.tensor_plan import (
    Entry,
    Treatment,
    codes_of,
    dense_of,
    stored_dtype,
)
from quantkit.numerics.codebook_int4 import GROUP
from quantkit.numerics.formats import INT4, NumberFormat
from quantkit.numerics.scheme import Activation
from quantkit.progress import Progress, tracked
from quantkit.storage.files import staged_file
from quantkit.storage.system import open_new, write_at

#: The key in the header metadata of a safetensors file.
METADATA_KEY = "quantkit"
#: Stands for digests that are not known yet: the header's size depends on their length alone.
_BLANK = "0" * 64
_NAMES = {dtype: name for name, dtype in {**PACKED_DTYPES, **FLOAT_DTYPES}.items()}

#: (name of a layer in the file, its codes) -> the file's tensors of it, except the bias
LayOut = Callable[[str, LayerCodes], dict[str, Tensor]]
#: the file's tensors of a layer, by the last part of their names -> the weight, float32
Read = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class FilePlan:
    """Everything about a file but its data."""

    source: Denoiser
    target: Target
    entries: tuple[Entry, ...]
    lay_out: LayOut
    #: the layout's name, or the class's
    architecture: str
    #: the prefix of all names
    prefix: str = ""
    #: of the file alone
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    #: differences from the model, a line each
    notes: tuple[str, ...] = ()
    #: reads what was laid out; None: codes times the target's scale
    read: Read | None = None

    @property
    def formats(self) -> dict[str, str]:
        """The formats of the model's weights that are quantized in the file."""
        return {
            part: entry.fmt.name
            for entry in self.entries
            if entry.fmt is not None
            for part in entry.original.parts
        }

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the tensors of the file."""
        named = [pair for entry in self.entries for pair in self.outline(entry).items()]
        return tuple(
            TensorSpec(name, _NAMES[tensor.dtype], tuple(tensor.shape))
            for name, tensor in [*named, *self.extra.items()]
        )

    def tensors_of(self, entry: Entry) -> dict[str, Tensor]:
        """Return the file's tensors of an entry.

        Raises:
            NonFiniteError: a value is beyond the dtype.
        """
        name = self.prefix + entry.name
        if entry.fmt is not None:
            codes = codes_of(self.source, entry, self.target)
            return self.lay_out(name.removesuffix(".weight"), codes)
        values = dense_of(self.source, entry)
        stored = values.to(stored_dtype(self.source, entry))
        if not all_finite(stored):
            raise NonFiniteError(f"{self.source.path}: {entry.name}: beyond {stored.dtype}")
        return {name: stored}

    def summary(self, output: Path, errors: Mapping[str, float]) -> Export:
        """Return what the file holds."""
        specs = self.specs()
        copied = (e.name for e in self.entries if e.treatment is Treatment.TAKEN)
        return Export(
            output,
            self.architecture,
            dict(Counter(spec.dtype for spec in specs)),
            sum(spec.nbytes for spec in specs),
            tuple(copied),
            dict(errors),
            (*_notes(self), *self.notes),
        )

    def outline(self, entry: Entry) -> dict[str, Tensor]:
        """Return the file's tensors of an entry without their data."""
        name = self.prefix + entry.name
        if entry.fmt is None:
            dtype = stored_dtype(self.source, entry)
            return {name: torch.empty(entry.shape, dtype=dtype, device="meta")}
        return self.lay_out(name.removesuffix(".weight"), _outline_of(entry, entry.fmt))


def _outline_of(entry: Entry, fmt: NumberFormat) -> LayerCodes:
    """Return the codes of a weight without their data."""
    codes = torch.empty(entry.shape, dtype=fmt.torch_dtype, device="meta")
    scale = torch.empty(entry.shape[0], device="meta")
    groups = None
    if fmt is INT4:
        codes = codes[:, ::2]
        groups = torch.empty(
            entry.shape[0], entry.shape[1] // GROUP, dtype=torch.float8_e4m3fn, device="meta"
        )
    static = 1.0 if entry.static else None
    return LayerCodes(fmt, codes, scale, static, groups, entry.rotation)


@dataclass(frozen=True)
class OneFile:
    """A plan whose output is a file."""

    plan: FilePlan

    @property
    def formats(self) -> tuple[Mapping[str, str], ...]:
        """Of the one component."""
        return (self.plan.formats,)

    def summary(self, output: Path, errors: Mapping[str, float] | None = None) -> Export:
        """Return what the file holds."""
        return self.plan.summary(output, errors or {})

    def write(self, output: Path, *, force: bool, progress: Progress) -> Export:
        """Write the file: all of it, or nothing.

        Raises:
            NonFiniteError: NaN or infinity in a tensor.
            OutputError: it exists, cannot be written, or does not read as written.
        """
        with staged_file(output, force=force) as made:
            write_tensors(self.plan, made, progress)
            errors = compare_tensors(self.plan, made, progress)
        return self.summary(output, errors)


def write_tensors(plan: FilePlan, path: Path, progress: Progress) -> None:
    """Write the file, one tensor in memory at a time.

    Raises:
        NonFiniteError: NaN or infinity in a tensor, or a value beyond its dtype.
        OSError: as no space left; the caller knows the output's name.
    """
    digests: dict[str, str] = {}
    specs = plan.specs()
    blank = _header(plan, {spec.name: _BLANK for spec in specs})
    slots = place(specs, len(blank))
    descriptor = open_new(path)
    try:
        for tensors in _tensors(plan, progress):
            for name, tensor in tensors.items():
                sink = Sink(descriptor, slots[name])
                if tensor.numel():
                    sink.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                digests[name] = sink.close()
        write_at(descriptor, _header(plan, digests), 0)
    finally:
        os.close(descriptor)


def compare_tensors(plan: FilePlan, path: Path, progress: Progress) -> dict[str, float]:
    """Compare a file with its source, layer by layer.

    Args:
        plan: what was written.
        path: the file.
        progress: told of tensors done.

    Returns:
        the relative error of each weight that has codes, or had some, against the 16-bit model
        where it is quantized on the way, else against the source.

    Raises:
        OutputError: a tensor that does not read as the plan says: a broken disk, or program.
    """
    errors = {}
    with safe_open(path, framework="pt") as file:
        for entry in tracked(progress, "read back", plan.entries):
            found = _read(plan, file, entry)
            known = plan.source.reference
            if entry.treatment is Treatment.ROTATED:
                assert known is not None
                errors[entry.name] = _relative(found, dense_of(known.denoiser, entry).float())
                continue
            expected = dense_of(plan.source, entry)
            if entry.treatment is Treatment.COPIED:
                if not torch.equal(found, expected):
                    raise OutputError(f"{path}: {entry.name}: not read back as written; try again")
                continue
            if entry.treatment is Treatment.TAKEN and not _is_taken_over(
                plan, entry, found, expected
            ):
                raise OutputError(f"{path}: {entry.name}: other values than the model's; try again")
            if known is not None:
                expected = dense_of(known.denoiser, entry)
            errors[entry.name] = _relative(found.float(), expected.float())
    return errors


def _tensors(plan: FilePlan, progress: Progress) -> Iterator[Mapping[str, Tensor]]:
    for entry in tracked(progress, "export", plan.entries):
        yield plan.tensors_of(entry)
    yield plan.extra


def _header(plan: FilePlan, digests: Mapping[str, str]) -> bytes:
    told = {
        "version": __version__,
        "recipe": dict(plan.source.recipe),
        "sources": dict(sorted(plan.source.source_digests.items())),
        "tensors": dict(sorted(digests.items())),
    }
    text = json.dumps(told, separators=(",", ":"))
    return encode_header(plan.specs(), {"format": "pt", METADATA_KEY: text})


def _read(plan: FilePlan, file: Any, entry: Entry) -> Tensor:
    """Return the dequantized values of an entry's tensors in the file."""
    name = plan.prefix + entry.name
    stored: Tensor = file.get_tensor(name)
    if entry.fmt is None:
        return stored
    layer = name.removesuffix(".weight")
    if plan.read is not None:
        names = plan.outline(entry)
        return plan.read({n.removeprefix(f"{layer}."): file.get_tensor(n) for n in names})
    scale = file.get_tensor(f"{layer}.{plan.target.scale}")
    values: Tensor = stored.float() * scale.reshape(-1, *[1] * (stored.ndim - 1))
    return values


def _is_taken_over(plan: FilePlan, entry: Entry, found: Tensor, expected: Tensor) -> bool:
    """Tell whether values equal the source's, except for codes that one scale made subnormal."""
    if torch.equal(found, expected):
        return True
    fmt = entry.fmt
    assert fmt is not None
    if fmt not in plan.target.one_scale or fmt.is_integer:
        return False
    scale = codes_of(plan.source, entry, plan.target).scale[0]
    return bool(((found - expected).abs() <= scale * fmt.smallest_subnormal / 2).all())


def _relative(found: Tensor, expected: Tensor) -> float:
    power = float(expected.square().sum(dtype=torch.float64))
    lost = float((found - expected).square().sum(dtype=torch.float64))
    return (lost / power) ** 0.5 if power else 0.0


def _notes(plan: FilePlan) -> Iterator[str]:
    packed = [entry for entry in plan.entries if entry.treatment is not Treatment.COPIED]
    if sparse := sum(entry.sparse for entry in packed):
        yield f"2:4 of {sparse} weights is expanded: they are as large as dense ones"
    for treatment, what in (
        (Treatment.ROTATED, "rotated, and so are their inputs"),
        (Treatment.CONVERTED, "quantized again"),
        (Treatment.DEQUANTIZED, "dequantized, in the model's 16-bit type"),
    ):
        if count := sum(entry.treatment is treatment for entry in packed):
            yield f"{count} weights are {what}"
    coded = [entry for entry in packed if entry.fmt is not None and not entry.static]
    if lost := sum(_was_static(plan.source, entry) for entry in coded):
        yield f"static input scales of {lost} weights are left out: {plan.target.inputs}"


def _was_static(source: Denoiser, entry: Entry) -> bool:
    activations = (source.schemes[part].activation for part in entry.original.parts)
    return Activation.STATIC in activations
