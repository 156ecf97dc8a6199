"""Finding the original tensors of a denoiser, and the layout of a file, by names."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from quantkit.errors import ModelError
from quantkit.interchange.layout_rows import Row
from quantkit.interchange.original_layouts import LAYOUTS, Layout

#: What all names of a denoiser begin with in files; AuraFlow's have the last.
_PREFIXES = ("", "model.diffusion_model.", "model.")
_SUFFIX = r"(?P<suffix>(\.weight|\.bias)?)"
_GROUPS = {"{x}": r"(?P<x>\d+)", "{i}": r"(?P<i>\d+)", "{rest}": r"(?P<rest>.+)"}


@dataclass(frozen=True)
class OriginalTensor:
    """A tensor of the original layout and its parts in diffusers."""

    #: without the layout's prefix
    name: str
    #: diffusers' names; their rows lie one after another along dim 0
    parts: tuple[str, ...]
    #: the halves of dim 0 stand the other way round in diffusers
    swapped: bool
    #: rows are columns in diffusers
    transposed: bool = False


def original_tensors(layout: Layout, names: Collection[str]) -> tuple[OriginalTensor, ...]:
    """Return the tensors of the original layout that hold those of a diffusers model.

    Args:
        layout: of the model's class.
        names: of all tensors of the model.

    Raises:
        ModelError: a tensor that no row has, or a part of a joined one without the others.
    """
    numbers = _Numbers.of(names)
    parts: dict[str, dict[int, str]] = {}
    rows: dict[str, Row] = {}
    last = -1
    for name in names:
        row, part, found = _match(layout, name)
        original = numbers.fill(row.original, found) + found["suffix"]
        parts.setdefault(original, {})[part] = name
        rows[original] = row
        last = max(last, int(found["i"])) if row.swapped == "last" else last
    return tuple(
        OriginalTensor(
            name,
            _whole(name, found, rows[name]),
            _is_swapped(rows[name], name, last),
            rows[name].transposed,
        )
        for name, found in parts.items()
    )


def layout_of_names(names: Iterable[str]) -> tuple[Layout, str] | None:
    """Return the layout of a file's tensors and the prefix that they have; None: no known one."""
    there = frozenset(names)
    for layout in LAYOUTS:
        for prefix in _PREFIXES:
            has = [prefix + marker in there for marker in layout.markers]
            if all(has) and not any(prefix + name in there for name in layout.foreign):
                return layout, prefix
    return None


def layout_of_model(class_name: str, names: Collection[str]) -> Layout:
    """Return the layout of a diffusers model.

    Raises:
        ModelError: no row of ``LAYOUTS`` has its class, or its blocks.
    """
    for layout in LAYOUTS:
        if layout.class_name == class_name:
            originals = {tensor.name for tensor in original_tensors(layout, names)}
            if not originals.isdisjoint(layout.foreign) or not originals.issuperset(layout.markers):
                continue
            return layout
    known = ", ".join(sorted({layout.class_name for layout in LAYOUTS}))
    raise ModelError(f"{class_name}: its original layout is not known, expected one of {known}")


@dataclass(frozen=True)
class _Numbers:
    """The numbering of blocks: the original layout numbers all blocks of a UNet in one sequence."""

    #: resnets of a down block
    layers: int
    #: up blocks with attention
    attentive: frozenset[int]
    #: up blocks of a VAE's decoder, which are counted from the last
    ups: int

    @classmethod
    def of(cls, names: Collection[str]) -> "_Numbers":
        pattern = re.compile(r"down_blocks\.0\.resnets\.(\d+)\.")
        layers = {int(found[1]) for name in names if (found := pattern.match(name))}
        pattern = re.compile(r"up_blocks\.(\d+)\.attentions\.")
        attentive = {int(found[1]) for name in names if (found := pattern.match(name))}
        pattern = re.compile(r"decoder\.up_blocks\.(\d+)\.")
        ups = {int(found[1]) for name in names if (found := pattern.match(name))}
        return cls(max(layers, default=-1) + 1, frozenset(attentive), len(ups))

    def fill(self, original: str, found: Mapping[str, str]) -> str:
        """Return a row's original name with its numbers."""
        x, i = int(found.get("x") or 0), int(found.get("i") or 0)
        step = self.layers + 1
        return original.format(
            x=x,
            i=i,
            up=self.ups - 1 - x,
            rest=found.get("rest"),
            input=step * x + i + 1,
            downsampler=step * (x + 1),
            output=step * x + i,
            upsampler=step * x + self.layers,
            after=2 if x in self.attentive else 1,
        )


def _match(layout: Layout, name: str) -> tuple[Row, int, dict[str, str]]:
    for row, part, pattern in _patterns(layout):
        if found := pattern.fullmatch(name):
            return row, part, found.groupdict()
    raise ModelError(
        f"{name}: not in the original layout {layout.architecture} of {layout.class_name}; only "
        "the published architectures have one"
    )


@lru_cache(maxsize=16)
def _patterns(layout: Layout) -> list[tuple[Row, int, re.Pattern[str]]]:
    found = []
    for row in layout.rows:
        for part, name in enumerate(row.parts):
            text = re.escape(name)
            for brace, group in _GROUPS.items():
                text = text.replace(re.escape(brace), group)
            found.append((row, part, re.compile(text + _SUFFIX)))
    return found


def _whole(name: str, found: Mapping[int, str], row: Row) -> tuple[str, ...]:
    if len(found) < len(row.parts):
        missing = next(part for i, part in enumerate(row.parts) if i not in found)
        raise ModelError(
            f"{next(iter(found.values()))}: {name} of the original layout joins it with {missing}, "
            "which the model lacks; only the published architectures have an original layout"
        )
    return tuple(found[i] for i in range(len(row.parts)))


def _is_swapped(row: Row, name: str, last: int) -> bool:
    if row.swapped == "last":
        return name.startswith(row.original.partition("{")[0] + f"{last}.")
    return row.swapped == "always"
