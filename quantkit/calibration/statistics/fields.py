"""Rows of the tables of tensors that calibration takes, stores, merges, checks and resumes.

A dataclass of tensors is such a table: each of its fields has a row, and the functions here do all
else with it. Sums have the same names, with totals in the place of means.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from quantkit.calibration.statistics.moving_average import continued, without_start

if TYPE_CHECKING:
    from typing_extensions import Self

#: Tensors by the name of their field.
Tensors = Mapping[str, Tensor]


def _first(values: Tensor, by: Tensor) -> Tensor:
    del by
    return values


@dataclass(frozen=True)
class Merge:
    """A rule by which a field of several buckets becomes one, and sums become the field."""

    #: values (n, ...) of n buckets, and their ``by`` (n, ...) -> (...)
    pour: Callable[[Tensor, Tensor], Tensor]
    #: the field that weighs, or tells what was seen; empty: the field itself
    by: str = ""
    #: sums (B, ...) and those of ``by`` -> the field
    finish: Callable[[Tensor, Tensor], Tensor] = _first
    #: of sums; None: the field's
    dtype: torch.dtype | None = None
    #: of two runs, where that is not the same: first, its ``by``, second, its ``by``
    join: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    weights = weights.double().reshape(-1, *[1] * (values.ndim - 1))
    total = (values.double() * weights).sum(dim=0)
    return (total / weights.sum().clamp(min=1)).to(values.dtype)


def _mean_of_total(total: Tensor, count: Tensor) -> Tensor:
    return (total / count.clamp(min=1).reshape(-1, *[1] * (total.ndim - 1))).float()


def _seen(values: Tensor, count: Tensor) -> Tensor:
    """Return the values of buckets that saw any; else the first one's."""
    some = values[count > 0]
    return some if len(some) else values[:1]


TOTAL = Merge(lambda values, _: values.sum(dim=0))
LARGEST = Merge(lambda values, _: values.amax(dim=0))
#: The exponential moving average of values that follow each other.
MOVING = Merge(_mean, "updates", without_start, join=continued)


def mean_over(count: str) -> Merge:
    """Return how means of as many values as ``count`` says become one."""
    return Merge(_mean, count, _mean_of_total, torch.float64)


def largest_seen(count: str) -> Merge:
    """Return how largest values become one, of buckets with a ``count``."""
    return Merge(lambda values, seen: _seen(values, seen).amax(dim=0), count)


def smallest_seen(count: str) -> Merge:
    """Return how smallest values become one, of buckets with a ``count``."""
    return Merge(lambda values, seen: _seen(values, seen).amin(dim=0), count)


@dataclass(frozen=True)
class Field:
    """One tensor of a table."""

    dtype: torch.dtype
    #: a letter each; B: buckets, which a field without stands for
    axes: str
    #: None: nothing merges it
    merge: Merge | None = None
    #: it may be below 0
    signed: bool = False
    #: it may be absent, together with the others that may
    optional: bool = False
    #: the fields of a table -> what is wrong with this one; empty: nothing
    check: Callable[[Tensors], str] | None = None
    #: sums -> the field, which is no sum itself
    derive: Callable[[Tensors], Tensor] | None = None


f32, f64, i64 = torch.float32, torch.float64, torch.int64


def row(dtype: torch.dtype, axes: str, merge: Merge | None = None, **more: Any) -> dict[str, Field]:
    """Return the metadata of a dataclass's field: the ``Field`` of these values."""
    return {"row": Field(dtype, axes, merge, **more)}


def fields_of(kind: type[Any]) -> dict[str, Field]:
    """Return the rows of a dataclass of tensors, by name."""
    return {field.name: field.metadata["row"] for field in fields(kind)}


def sums_of(kind: type[Any]) -> dict[str, Field]:
    """Return the rows of the sums of a dataclass of tensors, by name."""
    return {
        name: replace(field, dtype=(field.merge and field.merge.dtype) or field.dtype, check=None)
        for name, field in fields_of(kind).items()
        if field.derive is None
    }


StatisticsT = TypeVar("StatisticsT", bound="Statistics")


def take(stored: Tensors, counts: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return sums by field, on the CPU.

    Args:
        stored: on a device.
        counts: on the host, by bucket.
    """
    on_host = {name: torch.tensor(found) for name, found in counts.items()}
    return {name: tensor.cpu() for name, tensor in stored.items()} | on_host


def put(sums: Tensors, stored: Tensors, counts: Mapping[str, list[int]]) -> None:
    """Go on from what ``take`` returned, in place."""
    for name, tensor in stored.items():
        tensor.copy_(sums[name])
    for name, found in counts.items():
        found[:] = sums[name].tolist()


def refuse_other_shapes(sums: Tensors, expected: Tensors) -> None:
    """Refuse sums that were taken of something else.

    Raises:
        ValueError: naming the field.
    """
    for name, tensor in expected.items():
        found = sums[name]
        if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            raise ValueError(f"{name}: {found.dtype} {tuple(found.shape)!s:.80}")


class Statistics:
    """A dataclass of tensors over B timestep buckets."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    #: of axes that are alike in all of a kind, by their letter
    SIZES: ClassVar[Mapping[str, int]]

    @classmethod
    def checked(cls, where: str, tensors: Tensors, buckets: int) -> Self:
        """Return statistics of tensors that somebody stored.

        Args:
            where: what messages call their owner.
            tensors: by the name of the field.
            buckets: timestep buckets of the calibration.

        Raises:
            ValueError: as ``check_fields``.
        """
        check_fields(where, tensors, fields_of(cls), {**cls.SIZES, "B": buckets})
        return cls(**tensors)

    @classmethod
    def check_sums(cls, where: str, sums: Tensors, buckets: int) -> None:
        """Hold sums that somebody stored, and what they come to, against the rows.

        Raises:
            ValueError: as ``check_fields``.
        """
        check_fields(where, sums, sums_of(cls), {**cls.SIZES, "B": buckets})
        cls.checked(where, cls.of_sums(sums).tensors(), buckets)

    def tensors(self) -> dict[str, Tensor]:
        """Return every field that is there, by name."""
        found = {name: getattr(self, name) for name in fields_of(type(self))}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @classmethod
    def of_sums(cls, sums: Tensors) -> Self:
        """Return what sums come to."""
        found = {}
        for name, field in fields_of(cls).items():
            if field.derive is not None:
                found[name] = field.derive(sums)
            elif name in sums:
                assert field.merge is not None
                found[name] = field.merge.finish(sums[name], sums[field.merge.by or name])
        return cls(**found)

    def pooled(self) -> Self:
        """Return the statistics of all buckets as one (B = 1)."""
        name = next(iter(fields_of(type(self))))
        return self.regrouped([0] * len(getattr(self, name)))

    def rebucketed(self, stored: Sequence[float], expected: Sequence[float]) -> Self:
        """Return the statistics per bucket of ``expected`` edges, some of the ``stored`` ones."""
        return self.regrouped([bisect_right(expected, start) for start in (-torch.inf, *stored)])

    def regrouped(self, targets: Sequence[int]) -> Self:
        """Return the statistics with bucket b poured into bucket ``targets[b]``.

        All is exact but the moving average, which becomes the mean of those of the buckets, each
        weighing as much as it had calls: one over the whole trajectory would remember its end only.
        """
        places = torch.tensor(targets)
        groups = [(places == target).nonzero().flatten() for target in range(max(targets) + 1)]
        found = self.tensors()
        poured = {
            name: torch.stack(
                [merge.pour(found[name][g], found[merge.by or name][g]) for g in groups]
            )
            for name, field in fields_of(type(self)).items()
            if (merge := field.merge) is not None and field.axes.startswith("B")
        }
        return type(self)(**found | poured)

    def followed_by(self, later: Self) -> Self:
        """Return the statistics of both runs, which have the same shapes, this one's first."""
        first, second = self.tensors(), later.tensors()
        rows = fields_of(type(self))
        bucketed = [name for name, row in rows.items() if row.axes.startswith("B")]
        targets = list(range(len(first[bucketed[0]]))) * 2
        both = type(self)(**{name: torch.cat((first[name], second[name])) for name in bucketed})
        joined = {}
        for name, row in rows.items():
            if name not in bucketed and name in first.keys() & second.keys():
                joined[name] = first[name] + second[name]
            elif row.merge is not None and row.merge.join is not None:
                by = row.merge.by
                joined[name] = row.merge.join(first[name], first[by], second[name], second[by])
        return replace(both.regrouped(targets), **joined)


def check_fields(
    where: str, tensors: Tensors, rows: Mapping[str, Field], sizes: Mapping[str, int]
) -> None:
    """Hold tensors against the rows of their table.

    Args:
        where: what messages call their owner.
        tensors: by the name of the field.
        rows: of all fields.
        sizes: of axes, by their letter; others are those of the first tensor that has them.

    Raises:
        ValueError: a field that is missing or unknown, or of a wrong dtype, shape or value.
    """
    optional = {name for name, row in rows.items() if row.optional}
    absent = set() if optional & set(tensors) else optional
    if odd := set(tensors) ^ (set(rows) - absent):
        raise ValueError(f"{where}/{min(odd)}: {'unknown' if min(odd) in tensors else 'missing'}")
    known = dict(sizes)
    for name, row in rows.items():
        if name in tensors and (wrong := _wrong(tensors[name], row, known)):
            raise ValueError(f"{where}/{name}: {wrong}")
    for name, row in rows.items():
        if name in tensors and row.check is not None and (wrong := row.check(tensors)):
            raise ValueError(f"{where}/{name}: {wrong}")


def _wrong(tensor: Tensor, row: Field, sizes: dict[str, int]) -> str:
    """Return what is wrong with one tensor; sizes of axes that are not known yet are added."""
    found = tuple(tensor.shape)
    if tensor.dtype != row.dtype:
        return f"{tensor.dtype}, expected {row.dtype}"
    if len(found) == len(row.axes):
        sizes |= {axis: n for axis, n in zip(row.axes, found, strict=True) if axis not in sizes}
    expected = tuple(sizes.get(axis, axis) for axis in row.axes)
    if found != expected:
        return f"shape {found}, expected {expected}"
    if not tensor.numel():
        return ""
    low, high = (float(x) for x in tensor.aminmax())
    if not (torch.tensor([low, high]).isfinite().all()):
        return "NaN or Inf"
    return "below 0" if low < 0 and not row.signed else ""
