"""The HIP source of a row kernel."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from quantkit.fusion.program import Value
from quantkit.fusion.rows.access import Access
from quantkit.fusion.rows.lowering import Rows
from quantkit.fusion.rows.row_geometry import geometry_of
from quantkit.fusion.rows.row_nodes import (
    Codes,
    Concatenated,
    Joined,
    Level,
    Load,
    Map,
    Node,
    Reduce,
    Reduction,
    Second,
)
from quantkit.fusion.rows.schedule import Schedule

_IO = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
_FORMATS = {"e4m3fn": "E4M3FN", "e5m2": "E5M2", "int8": "Int8"}
_REDUCTIONS = {Reduction.SUM: "Sum", Reduction.AMAX: "Largest"}
_INT_MAX = 2**31 - 1
_WORD, _WAVE = 4, 32


@dataclass(frozen=True)
class RowSource:
    """One generated kernel: its text and its launch."""

    symbol: str
    text: str
    blocks: int
    threads: int


def source_of(
    rows: Rows, outputs: Mapping[Value, Node], aligned: Callable[[Value], bool]
) -> RowSource:
    """Return the kernel that computes some of the nodes of rows.

    Args:
        rows: of a group of calls.
        outputs: what is written, by the value that reads it.
        aligned: whether a tensor starts on 16 bytes.
    """
    schedule = Schedule(tuple(outputs.values()))
    reads = tuple(dict.fromkeys(load.value for load in schedule.loads))
    writer = _Writer(rows, schedule, outputs, reads, aligned)
    body = "\n".join(writer.lines())
    symbol = f"rows_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    text = f"#define QK_SYMBOL {symbol}\n{body}\n"
    geometry = writer.geometry
    return RowSource(symbol, text, geometry.blocks, geometry.threads)


class _Writer:
    def __init__(
        self,
        rows: Rows,
        schedule: Schedule,
        outputs: Mapping[Value, Node],
        reads: Sequence[Value],
        aligned: Callable[[Value], bool],
    ) -> None:
        self._rows, self._schedule, self._outputs = rows, schedule, outputs
        self._reads, self._aligned = reads, aligned
        joined = (node for node in schedule.nodes if isinstance(node, Concatenated))
        parts = (piece.columns for node in joined for piece in node.pieces)
        self.geometry = geometry_of(rows.numel, rows.columns, parts)
        self._names = {node: f"v{number}" for number, node in enumerate(schedule.everything)}

    def lines(self) -> Iterator[str]:
        """Yield the source."""
        g, schedule = self.geometry, self._schedule
        reductions = [node for node in schedule.nodes if isinstance(node, Reduce)]
        lds = max(16, len(reductions) * g.threads // _WAVE * _WORD)
        arguments = [f"const void* in{i}" for i, _ in enumerate(self._reads)]
        arguments += [f"void* out{i}" for i, _ in enumerate(self._outputs)]
        yield '#include "rows.h"'
        yield f"using Index = {self._index};"
        yield f"QK_KERNEL({g.threads})"
        yield f"QK_SYMBOL({', '.join(arguments)}) {{"
        yield f"QK_SHARED(lds, {lds});"
        yield "qk::start();"
        yield from self._place()
        yield from (f"float {self._names[node]} = 0.0f;" for node in reductions)
        for node in schedule.everything:
            if isinstance(node, Load) and node.level is not Level.ROW and _is_one(node.access):
                yield f"const float {self._names[node]} = {self._read_one(node, '0')};"
            elif node in schedule.held:
                yield f"float {self._names[node]}[{g.steps}][{self._count(node)}];"
        for number in schedule.passes:
            yield from self._pass(number)
        yield from self._row_stores()
        yield "}"
        yield f"QK_HOST_ENTRY({g.threads}, {lds})"

    @property
    def _index(self) -> str:
        return "qk::u32" if self._largest() <= _INT_MAX else "qk::i64"

    def _largest(self) -> int:
        """Return the largest number of a place, or of an element."""
        accesses = (load.access for load in self._schedule.loads)
        extents = (sum((d.size - 1) * d.stride for d in access) for access in accesses)
        return max(self.geometry.blocks * self.geometry.threads * 8, self._rows.numel, *extents, 0)

    def _place(self) -> Iterator[str]:
        g = self.geometry
        if g.flat:
            yield f"const Index lane = Index(qk::block_x()) * {g.threads} + qk::thread_index();"
            return
        yield f"const int lane = qk::thread_index() % {g.lanes};"
        own = f"Index(qk::block_x()) * {g.threads // g.lanes} + qk::thread_index() / {g.lanes}"
        yield f"const Index mine = {own};"
        yield f"const bool exists = mine < {g.rows};"
        yield f"const Index row = exists ? mine : {g.rows - 1};"

    def _pass(self, number: int) -> Iterator[str]:
        schedule, g = self._schedule, self.geometry
        for node in schedule.of_rows(number):
            if not isinstance(node, Reduce):
                yield f"const float {self._names[node]} = {self._scalar(node)};"
        columns = schedule.of_columns(number)
        for node in columns:
            if isinstance(node, Codes):
                yield self._reciprocal(node)
        reductions = schedule.reductions(number)
        yield f"QK_UNROLL for (int s = 0; s < {g.steps}; ++s) {{"
        yield from self._run_place()
        for node in columns:
            yield from self._statement(node)
        for node in reductions:
            yield from self._reduced(node)
        yield "}"
        for node in reductions:
            yield self._over_row(node)

    def _run_place(self) -> Iterator[str]:
        g = self.geometry
        shared = f"lane * {g.run}" if g.steps == 1 else f"(s * {g.lanes} + lane) * {g.run}"
        yield f"const Index column = {shared};"
        inside = "true" if g.lanes * g.steps * g.run == g.columns else f"column < {g.columns}"
        if g.flat:
            inside = f"column < {g.columns}"
        yield f"const bool inside = {inside};"
        start = "0" if g.flat else f"row * {g.columns}"
        yield f"const Index at = {start} + (inside ? column : 0);"

    def _statement(self, node: Node) -> Iterator[str]:
        """Yield what computes a node of columns, and writes it where it is an output."""
        if isinstance(node, Load) and _is_one(node.access):
            return
        if isinstance(node, Codes):
            yield from self._write_codes(node)
            return
        if isinstance(node, Load) and self._is_scalar(node):
            yield f"const float {self._names[node]} = {self._read_one(node, self._at(node))};"
            return
        if node not in self._schedule.held:
            yield f"float {self._names[node]}[{self._count(node)}];"
        if isinstance(node, Concatenated):
            yield from self._concatenated(node)
        else:
            yield self._computed(node)
        for place, (_, output) in enumerate(self._outputs.items()):
            if output is node:
                yield self._written(node, place)

    def _computed(self, node: Node) -> str:
        target, count = self._name(node), self._count(node)
        each = f"QK_UNROLL for (int e = 0; e < {count}; ++e)"
        match node:
            case Load():
                return self._loaded(node, each)
            case Map():
                return f"{each} {target}[e] = {self._expression(node)};"
            case Second(odd=odd, of=of):
                return f"{each} {target}[e] = {self._element(of, f'2 * e + {int(odd)}')};"
            case Joined(even=even, odd=odd):
                each = f"QK_UNROLL for (int e = 0; e < {count // 2}; ++e)"
                first = f"{target}[2 * e] = {self._element(even)};"
                return f"{each} {{ {first} {target}[2 * e + 1] = {self._element(odd)}; }}"
            case _:
                raise AssertionError(node)

    def _concatenated(self, node: Concatenated) -> Iterator[str]:
        """Yield a branch for each piece, with the places of that in ``at``."""
        row, column = f"{self._names[node]}_row", f"{self._names[node]}_column"
        yield f"const Index {row} = at / {node.columns}, {column} = at % {node.columns};"
        each = f"QK_UNROLL for (int e = 0; e < {self.geometry.run}; ++e)"
        for piece in node.pieces:
            if not piece.columns:
                continue
            last = piece.first + piece.columns
            yield f"if ({column} >= {piece.first} && {column} < {last}) {{"
            yield f"const Index at = {row} * {piece.columns} + {column} - {piece.first};"
            for inner in Schedule((piece.node,)).nodes:
                yield from self._statement(inner)
            yield f"{each} {self._name(node)}[e] = {self._element(piece.node)};"
            yield "}"

    def _loaded(self, node: Load, each: str) -> str:
        source, at, io = f"in{self._reads.index(node.value)}", self._at(node), _IO[node.dtype]
        if self._is_contiguous(node):
            offset = _offset(node.access, at)
            return f"qk::rows::read<qk::Io::k{io}>({self._name(node)}, {source}, {offset});"
        element = self._read_one(node, f"({at} + e)")
        return f"{each} {self._name(node)}[e] = {element};"

    def _read_one(self, node: Load, at: str) -> str:
        source = f"in{self._reads.index(node.value)}"
        return (
            f"qk::rows::read_one<qk::Io::k{_IO[node.dtype]}>({source}, {_offset(node.access, at)})"
        )

    def _written(self, node: Node, place: int) -> str:
        value = [*self._outputs][place]
        call = f"write<qk::Io::k{_IO[self._dtype(value)]}>({self._name(node)}, out{place}, "
        return f"if ({self._guard}) qk::rows::{call}{self._at(node)});"

    def _dtype(self, value: Value) -> torch.dtype:
        dtype = self._rows.layout(value).dtype
        return torch.float32 if dtype is torch.complex64 else dtype

    @property
    def _guard(self) -> str:
        return "inside" if self.geometry.flat else "inside && exists"

    def _write_codes(self, node: Codes) -> Iterator[str]:
        place = next(i for i, one in enumerate(self._outputs.values()) if one is node)
        values = f"{self._names[node]}_values"
        yield f"float {values}[{self.geometry.run}];"
        each = f"QK_UNROLL for (int e = 0; e < {self.geometry.run}; ++e)"
        yield f"{each} {values}[e] = {self._element(node.of)};"
        call = f"qk::rows::write_codes({values}, {self._names[node]}, out{place}, at)"
        yield f"if ({self._guard}) {call};"

    def _reciprocal(self, node: Codes) -> str:
        kind = f"qk::Reciprocal<qk::Format::k{_FORMATS[node.format_name]}>"
        return f"const {kind} {self._names[node]}({self._names[node.scale]});"

    def _reduced(self, node: Reduce) -> Iterator[str]:
        name, count = self._names[node], self.geometry.run
        values = f"{name}_values"
        yield f"float {values}[{count}];"
        yield f"QK_UNROLL for (int e = 0; e < {count}; ++e) {values}[e] = {self._element(node.of)};"
        if node.how is Reduction.SUM:
            yield f"{name} += inside ? qk::rows::sum_of({values}) : 0.0f;"
        else:
            largest = f"Largest::of(qk::float_bits({name}), qk::amax_bits_of({values}))"
            yield f"{name} = qk::bits_float(qk::rows::{largest});"

    def _over_row(self, node: Reduce) -> str:
        reductions = [n for n in self._schedule.nodes if isinstance(n, Reduce)]
        at = reductions.index(node) * self.geometry.threads // _WAVE * _WORD
        name = self._names[node]
        kind = f"qk::rows::{_REDUCTIONS[node.how]}, {self.geometry.lanes}"
        return f"{name} = qk::rows::over_row<{kind}>(qk::float_bits({name}), lds + {at});"

    def _row_stores(self) -> Iterator[str]:
        for place, (value, node) in enumerate(self._outputs.items()):
            if node.level is Level.ROW:
                io = _IO[self._dtype(value)]
                own = f"const float one[1] = {{{self._names[node]}}};"
                write = f"qk::rows::write<qk::Io::k{io}>(one, out{place}, row);"
                yield f"if (exists && lane == 0) {{ {own} {write} }}"

    def _scalar(self, node: Node) -> str:
        return self._read_one(node, "row") if isinstance(node, Load) else self._expression(node)

    def _expression(self, node: Node) -> str:
        assert isinstance(node, Map)
        return node.text.format(*(self._element(argument) for argument in node.of))

    def _element(self, node: Node, at: str = "e") -> str:
        return self._names[node] if self._is_scalar(node) else f"{self._name(node)}[{at}]"

    def _name(self, node: Node) -> str:
        return f"{self._names[node]}[s]" if node in self._schedule.held else self._names[node]

    def _at(self, node: Node) -> str:
        return "at / 2" if node.level is Level.HALF else "at"

    def _count(self, node: Node) -> int:
        return self.geometry.run // 2 if node.level is Level.HALF else self.geometry.run

    def _is_scalar(self, node: Node) -> bool:
        """Tell whether all numbers of a run are one."""
        if node.level is Level.ROW:
            return True
        if not isinstance(node, Load) or node in self._schedule.held:
            return isinstance(node, Load) and _is_one(node.access)
        last = node.access[-1] if node.access else None
        return last is None or (last.stride == 0 and last.size % self._count(node) == 0)

    def _is_contiguous(self, node: Load) -> bool:
        """Tell whether the elements of each run lie side by side, and are aligned."""
        count, (*outer, last) = self._count(node), node.access
        aligned = all(dim.stride % count == 0 for dim in outer) and self._aligned(node.value)
        return last.stride == 1 and last.size % count == 0 and aligned


def _is_one(access: Access) -> bool:
    """Tell whether all places have one element."""
    return all(dim.stride == 0 for dim in access)


def _offset(access: Access, at: str) -> str:
    """Return the address of the element of a place, from the tensor's first one."""
    terms, inner = [], 1
    for number, dim in enumerate(reversed(access)):
        index = at if inner == 1 else f"({at}) / {inner}"
        if number < len(access) - 1:
            index = f"({index}) % {dim.size}"
        if dim.stride:
            terms.append(index if dim.stride == 1 else f"({index}) * {dim.stride}")
        inner *= dim.size
    return " + ".join(terms) or "0"
