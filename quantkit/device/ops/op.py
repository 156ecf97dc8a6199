"""The type of an operation: a row with variants, arguments, checks and reference in PyTorch.

A variant is one compile of one source: a word per axis. Its words, joined, are its name; the index
of each word is the value of the axis' macro (kernels/include/config.h holds the same numbers).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from quantkit.device.geometry import Geometry, geometry_of, has_tile, macros
from quantkit.numerics.conv_windows import ConvShape

#: What a kernel reads, in launch order.
Operands = tuple[Tensor | None, ...]
#: What an operation is told beside its operands: formats, dtype, windows.
Options = tuple[Any, ...]
#: Shape and dtype of a result.
Output = tuple[tuple[int, ...], torch.dtype]
#: m, n and k, or those that the operation has; of a convolution all that it is.
Sizes = dict[str, int] | ConvShape


class WeightKind(Enum):
    """The layout of a product's weights in memory, in the order of the macro's values."""

    DENSE = "dense"
    #: two of four are stored, and their positions
    SPARSE = "sparse"
    #: codes of 4 bits, and factors of groups
    INT4 = "int4"

    @property
    def define(self) -> str:
        """The macro of the command line (kernels/include/weights_axis.h)."""
        return f"-DQK_WEIGHTS={list(WeightKind).index(self)}"


@dataclass(frozen=True)
class Axis:
    """One choice made on the compiler's command line."""

    macro: str
    #: in order of the macro's values; an empty word leaves no trace in the name
    words: tuple[str, ...]
    #: value of the macro for the first word
    first: int = 0

    def value(self, word: str) -> int:
        """Return what the macro is for ``word``."""
        return self.first + self.words.index(word)


@dataclass(frozen=True)
class Argument:
    """One kernel argument, in launch order."""

    name: str
    #: element type of a pointer (u8, f32, io), or i32 for a number passed by value
    element: str
    #: empty for numbers
    shape: str = ""
    written: bool = False
    #: what a null pointer means; empty when null is not allowed
    null: str = ""

    @property
    def is_pointer(self) -> bool:
        """True for device memory, False for a number."""
        return bool(self.shape)


@dataclass(frozen=True)
class Budget:
    """The error that a kernel may have against the exact result."""

    #: squared error over squared size, beyond the square of the output dtype's eps
    nmse: float
    #: largest error in spacings of the output, beyond what ``float32`` grants
    ulp: float
    #: granted to each output, in float32 spacings of its sum of sizes: a constant, and a factor of
    #: sqrt(K)
    float32: tuple[float, float]
    reason: str


@dataclass(frozen=True)
class Problem:
    """One call whose operands fit together."""

    #: of the variant, but for the tile's
    words: tuple[str, ...]
    sizes: Sizes
    #: the weight has scales per group along K, which no kernel applies
    group_scales: bool = False

    @property
    def k(self) -> int:
        """Length of the reduction axis."""
        return self.sizes.k if isinstance(self.sizes, ConvShape) else self.sizes["k"]


@dataclass(frozen=True)
class Detour:
    """The same result by another operation."""

    op: "Op"
    operands: Operands
    options: Options
    #: of the result, whose elements the other operation gives in the same order
    shape: tuple[int, ...]


# By identity: a call looks its variant up, and hashing a row field by field takes longer.
@dataclass(frozen=True, eq=False)
class Op:
    """One operation, one source file."""

    name: str
    #: what it does, whatever the formats and the sparsity: gemm, conv, geglu, ...
    family: str
    #: file below ``kernels``, with its launch in the launch.json beside it
    source: str
    formula: str
    #: of the operator, as torch.library takes it: operands in launch order, then options
    schema: str
    axes: tuple[Axis, ...]
    #: in launch order: what is read, what is written, numbers
    args: tuple[Argument, ...]
    #: K must be a multiple of this, else the launcher refuses
    k_multiple: int
    #: refuses operands that do not fit together
    check: Callable[["Op", Operands, Options], Problem]
    #: shapes and dtypes of what is written, in launch order; shapes may be symbolic
    outputs: Callable[[Operands, Options], tuple[Output, ...]]
    #: the same operation in plain PyTorch: operands, then options
    reference: Callable[..., Any]
    budget: Budget
    #: operands and options of a variant, of given m, n and k, for tests of every kernel alike
    sample: Callable[["Variant", tuple[int, int, int], torch.Generator], tuple[Operands, Options]]
    weights: WeightKind = WeightKind.DENSE
    #: rows of w for each column of the result
    rows_per_column: int = 1
    #: integers among the arguments, from sizes; None: sizes are these integers
    numbers: Callable[[ConvShape], dict[str, int]] | None = None
    #: why its kernels would read out of bounds, or another operation is faster; empty when not
    why_not: Callable[["Op", Sizes], str] | None = None
    #: what is run where the kernels do not take the sizes; None: the reference
    detour: Callable[["Op", Operands, Options], Detour] | None = None
    #: what else the kernels rely on, over argument names; a launcher must refuse the rest
    requires: tuple[str, ...] = ()

    @cached_property
    def inputs(self) -> int:
        """The number of operands that it reads."""
        return sum(a.is_pointer and not a.written for a in self.args)

    @property
    def sparse(self) -> bool:
        """True where two of four weights are stored."""
        return self.weights is WeightKind.SPARSE

    @property
    def tiled(self) -> bool:
        """True when its variants differ in the tile of the menu."""
        return any(axis.macro == "QK_TILE" for axis in self.axes)

    def words(self, macro: str) -> tuple[str, ...]:
        """Return the words of an axis; none when there is no such axis."""
        return next((axis.words for axis in self.axes if axis.macro == macro), ())

    def integers(self, sizes: Sizes) -> dict[str, int]:
        """Return the integers among the arguments by name."""
        if isinstance(sizes, dict):
            return sizes
        assert self.numbers is not None
        return self.numbers(sizes)


@dataclass(frozen=True)
class Variant:
    """One compile of an operation."""

    op: Op
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The words that say what was chosen, as ``e4m3fn_e4m3fn_token_channel_f16_t0``."""
        return "_".join(word for word in self.words if word)

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.op.name

    @property
    def source(self) -> str:
        """File below ``kernels``."""
        return self.op.source

    @property
    def symbol(self) -> str:
        """Name of the kernel in the object file."""
        return f"{self.op.name}_{self.name}"

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros of the command line."""
        pairs = zip(self.op.axes, self.words, strict=True)
        values = (f"-D{axis.macro}={axis.value(word)}" for axis, word in pairs)
        launch = macros(self.source, self.tile_word, self.op.weights.value)
        weights = (self.op.weights.define,) if self.op.tiled else ()
        return (f"-DQK_SYMBOL={self.symbol}", *values, *weights, *launch)

    @property
    def geometry(self) -> Geometry:
        """Its launch geometry."""
        return geometry_of(self.source, self.tile_word, self.op.weights.value)

    @property
    def tile_word(self) -> str:
        """The word that says what a block computes."""
        if not self.word("QK_HEAD"):
            return self.word("QK_TILE")
        own = (self.word("QK_HEAD"), self.word("QK_PV"))
        return "_".join(word for word in own if word)

    def word(self, macro: str) -> str:
        """Return the word chosen on the axis of ``macro``; empty when there is no such axis."""
        pairs = zip(self.op.axes, self.words, strict=True)
        return next((word for axis, word in pairs if axis.macro == macro), "")


def all_variants(op: Op) -> Iterator[Variant]:
    """Yield every combination of the operation's axes that its source has a tile for."""
    for words in product(*(axis.words for axis in op.axes)):
        variant = Variant(op, words)
        if has_tile(op.source, variant.tile_word):
            yield variant
