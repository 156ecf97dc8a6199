"""Pictures with channels last in memory, where packed convolutions read their pixels.

torch's operators keep the channels first that a model is given, so every packed convolution copies
a picture before it quantizes it, and copies its answer. A step with such convolutions is run once
more, with these in place of torch's calls:

    convolution              the same of a picture with channels last: so is its answer
    clone to channels first  the picture as it is
    cat of channels          cat of the last axis of pixels, for which torch has a faster kernel
    nearest upsampling by 2  a copy of pixels, which a row kernel makes of codes
    add, group norm, silu    group_partials and group_norm
    the same, then quantize  group_partials and group_norm_codes
    split of a convolution   parts that the bias is added to, which row kernels do where they read
    clone or pad, then bmm   a copy whose rows stay rows, seen as the transposed one
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantkit.device.backends import Backend
from quantkit.device.choosing import choose
from quantkit.device.ops.checks import IO_DTYPES
from quantkit.device.ops.table import OPS
from quantkit.device.torch_operators import OVERLOADS
from quantkit.fusion.patterns.codes_of_products import QUANTIZE
from quantkit.fusion.patterns.picture_operators import (
    PictureNorm,
    SummedConvolution,
    cloned_rows,
    convolved_parts,
    padded_rows,
)
from quantkit.fusion.program import Call, Layout, Program, Value
from quantkit.fusion.rows.access import Access, Dim, is_identity, merged
from quantkit.fusion.simplify import simplify, without_unread
from quantkit.fusion.sources import Sources
from quantkit.fusion.trace import trace
from quantkit.numerics.norms import MAX_CHANNELS

_ATEN = torch.ops.aten
_LAST = torch.channels_last
#: Convolutions of ours, and the names of those that add their product.
_CONVOLUTIONS = {
    OVERLOADS[op.name]: f"{op.name}_residual" for op in OPS.values() if op.family == "conv"
}
_GROUP_NORM, _SILU = _ATEN.native_group_norm.default, _ATEN.silu.default
_ADD, _SPLIT = _ATEN.add.Tensor, _ATEN.split.Tensor
_CONVOLUTION, _CLONE = _ATEN.convolution.default, _ATEN.clone.default
_PAD = _ATEN.constant_pad_nd.default


def reads_pixels(program: Program) -> bool:
    """Tell whether a convolution of ours is in a program."""
    return any(call.operator in _CONVOLUTIONS for call in program.calls)


def with_picture_calls(program: Program) -> Program:
    """Return a program with calls that give pictures with channels last.

    Layouts are those of the program: only ``laid_out`` knows the new ones.
    """
    pictures = _Pictures(Sources(program))
    return without_unread(replace(program, calls=tuple(map(pictures.call_for, program.calls))))


def laid_out(program: Program, inputs: Sequence[Tensor]) -> tuple[Program, Any]:
    """Run a program ``with_picture_calls``, and return it as it is recorded, and its answer.

    Args:
        program: of a step.
        inputs: of the step.

    Raises:
        RuntimeError: a call does not take a picture with channels last.
    """
    found, answer = trace(partial(_run_as_laid_out, program, inputs), inputs)
    return simplify(found), answer


def _run_as_laid_out(program: Program, inputs: Sequence[Tensor]) -> Any:
    """Return the answer of a step, with channels where its caller expects them."""

    def as_before(value: Any, found: Any) -> Any:
        first = isinstance(value, Value) and _has_channels_first(program.layouts[value])
        return found.contiguous() if first else found

    return pytree.tree_map(as_before, program.output, program.run(inputs))


@dataclass(frozen=True, eq=False)
class _Pictures:
    sources: Sources

    def call_for(self, call: Call) -> Call:
        """Return the call in the place of another, which may be itself."""
        if call.writes or not self.sources.program.written.isdisjoint(call.results):
            return call
        found = self._pattern_of(call)
        instead = _INSTEAD.get(call.operator)
        return found or (call if instead is None else replace(call, operator=instead))

    def _pattern_of(self, call: Call) -> Call | None:
        """Return the call that does what a call and those before it do; None: there is none."""
        if call.operator in QUANTIZE:
            return self._codes(call)
        if call.operator is _GROUP_NORM:
            return self._normed(call, call, "")
        patterns = {
            _SILU: self._activated, _ADD: self._added, _SPLIT: self._parted, _CLONE: self._turned,
            _PAD: self._padded,
        }  # fmt: skip
        pattern = patterns.get(call.operator)
        return pattern(call) if pattern else None

    def _activated(self, call: Call) -> Call | None:
        """Return the norm with its activation; None where no norm is before it."""
        maker = self.sources.maker_for(call.arguments[0], call)
        return self._normed(maker, call, "silu")

    def _codes(self, call: Call) -> Call | None:
        """Return the norm that writes the codes of a quantization; None where there is none."""
        x, smooth, scale, fmt = call.arguments
        last, activation = self._maker_of_pixels(x, call), ""
        if last is not None and last.operator is _SILU:
            last, activation = self.sources.maker_for(last.arguments[0], last), "silu"
        return self._normed(last, call, activation, (smooth, scale), fmt)

    def _added(self, call: Call) -> Call | None:
        """Return the convolution that adds its product to a picture; None where none is added."""
        if call.keywords or not all(isinstance(x, Value) for x in call.arguments):
            return None
        for picture, product in (call.arguments, call.arguments[::-1]):
            conv = self._maker_of_picture(product, call)
            if conv is not None and self._takes(conv, picture, call):
                operator = SummedConvolution(_CONVOLUTIONS[conv.operator])
                return replace(call, operator=operator, arguments=(picture, *conv.arguments))
        return None

    def _parted(self, split: Call) -> Call | None:
        """Return a convolution that ends in parts of its channels; None where it has no bias."""
        picture, size, axis = (*split.arguments, 0)[:3]
        conv = self.sources.makers.get(picture)
        if conv is None or conv.operator is not _CONVOLUTION or axis != 1:
            return None
        seen = [call for call in self.sources.program.calls if picture in call.reads]
        if conv.arguments[2] is None or seen != [split] or not self._is_picture(picture):
            return None
        arguments = (size, *conv.arguments)
        return replace(split, operator=convolved_parts, arguments=arguments, fresh=True)

    def _is_picture(self, value: Value) -> bool:
        return len(self.sources.program.layouts[value].shape) == 4

    def _turned(self, clone: Call) -> Call | None:
        """Return a copy that keeps its columns side by side; None where others read rows."""
        if not self._is_multiplied(clone):
            return None
        return replace(clone, operator=cloned_rows, keywords={})

    def _padded(self, pad: Call) -> Call | None:
        """Return a pad of rows at their end, as ``cloned_rows``; None where it is another one."""
        x, sides, value = (*pad.arguments, 0)[:3]
        if [*sides[:3]] != [0, 0, 0] or len(sides) != 4 or not self._is_multiplied(pad):
            return None
        return replace(pad, operator=padded_rows, arguments=(x, sides[3], value))

    def _is_multiplied(self, copy: Call) -> bool:
        """Tell whether batched products alone read a copy of matrices that lie transposed."""
        *_, rows, _ = (0, 0, *self.sources.program.layouts[copy.arguments[0]].strides)
        readers = {call.operator for call in self.sources.readers.get(copy.result, ())}
        return rows == 1 and readers == {_ATEN.bmm.default}

    def _takes(self, conv: Call, picture: Value, add: Call) -> bool:
        layouts = self.sources.program.layouts
        *_, w_scale, _, _, _, _, dtype = conv.arguments
        mine, made = layouts[picture], layouts[add.result]
        return (
            (mine.shape, mine.dtype, made.dtype) == (made.shape, dtype, dtype)
            and len(layouts[w_scale].shape) < 2
            and dtype in IO_DTYPES.values()
        )

    def _maker_of_picture(self, picture: Value, reader: Call) -> Call | None:
        """Return the convolution of ours whose pixels a picture has, perhaps copied."""
        copy = self.sources.maker_for(picture, reader)
        if copy is not None and copy.operator is _CLONE:
            picture, reader = copy.arguments[0], copy
        conv = self.sources.only_maker(picture, reader)
        if conv is None or conv.operator not in _CONVOLUTIONS:
            return None
        layouts = self.sources.program.layouts
        mine, pixels = layouts[picture], layouts[conv.result]
        return conv if len(mine.shape) == 4 and _pixels(mine) == pixels else None

    def _maker_of_pixels(self, rows: Value, reader: Call) -> Call | None:
        """Return the call that made a picture whose pixels are rows that one call alone reads."""
        maker = self.sources.only_maker(rows, reader)
        if maker is None or not self._are_pixels(rows, maker.results[0]):
            copy = maker if maker and maker.operator is _CLONE else None
            pixels = copy.arguments[0] if copy else rows
            picture = self.sources.base(pixels)
            if copy is None or not self._are_pixels(pixels, picture):
                return None
            return self.sources.only_maker(pixels, copy)
        return maker

    def _are_pixels(self, rows: Value, picture: Value | None) -> bool:
        """Tell whether a view has all pixels of a picture, in their order."""
        layouts = self.sources.program.layouts
        assert picture is not None
        mine, whole = layouts[rows], layouts[picture]
        if len(whole.shape) != 4 or mine.shape[-1] != whole.shape[1] or mine.offset:
            return False
        return mine.numel == whole.numel and _order(mine) == _order(_pixels(whole))

    def _normed(
        self,
        norm: Call | None,
        last: Call,
        activation: str,
        more: tuple[Value | None, ...] = (),
        fmt: str = "",
    ) -> Call | None:
        """Return one call from a group norm to the last of several; None where no kernel is.

        Args:
            norm: perhaps a group norm.
            last: the call that gives the result.
            activation: between them.
            more: smoothing and scale of codes.
            fmt: of codes.
        """
        if norm is None or norm.operator is not _GROUP_NORM or not self._has_kernel(norm):
            return None
        x, weight, bias, *_, groups, eps = norm.arguments
        operator = PictureNorm(groups, eps, activation, fmt)
        arguments = (*self._sum(x, norm), weight, bias, *more)
        return replace(last, operator=operator, arguments=arguments, results=last.results[:1])

    def _has_kernel(self, norm: Call) -> bool:
        layouts, (y, *moments) = self.sources.program.layouts, norm.results
        picture = layouts[norm.arguments[0]]
        if len(picture.shape) != 4 or not 0 < picture.shape[1] <= MAX_CHANNELS:
            return False
        dtypes = {layouts[v].dtype for v in (y, *norm.reads) if v is not None}
        if len(dtypes) > 1 or not dtypes <= {*IO_DTYPES.values()} or not picture.numel:
            return False
        if not self.sources.read.isdisjoint(v for v in moments if v is not None):
            return False
        chosen = choose("group_norm", picture.device, k=picture.shape[1])
        return chosen.backend is not Backend.REFERENCE

    def _sum(self, x: Value, norm: Call) -> tuple[Value, Value | None]:
        """Return a picture and what is added to all of its pixels: an embedding of time."""
        layouts, maker = self.sources.program.layouts, self.sources.maker_for(x, norm)
        if maker is None or maker.operator is not _ADD or maker.keywords:
            return x, None
        for picture, added in (maker.arguments, maker.arguments[::-1]):
            if not (isinstance(picture, Value) and isinstance(added, Value)):
                continue
            row = (*layouts[x].shape[:2], 1, 1)
            same = layouts[picture].dtype is layouts[added].dtype is layouts[x].dtype
            if same and (layouts[picture].shape, layouts[added].shape) == (layouts[x].shape, row):
                return picture, added
        return x, None


def _convolved(x: Tensor, *options: Any) -> Tensor:
    last = x.contiguous(memory_format=_LAST) if x.ndim == 4 else x
    y: Tensor = _ATEN.convolution.default(last, *options)
    return y


def _cloned(x: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    to_first = memory_format is torch.contiguous_format and x.ndim == 4
    if to_first and x.is_contiguous(memory_format=_LAST):
        return x
    return x.clone(memory_format=memory_format or torch.preserve_format)


def _joined(pictures: Sequence[Tensor], axis: int = 0) -> Tensor:
    if axis != 1 or not all(x.ndim == 4 and x.is_contiguous(memory_format=_LAST) for x in pictures):
        return torch.cat(list(pictures), axis)
    return torch.cat([x.permute(0, 2, 3, 1) for x in pictures], 3).permute(0, 3, 1, 2)


def _upsampled(x: Tensor, size: Sequence[int], *factors: float | None) -> Tensor:
    b, c, h, w = x.shape
    if [*size] != [2 * h, 2 * w]:
        y: Tensor = _ATEN.upsample_nearest2d.default(x, size, *factors)
        return y
    pixels = x.permute(0, 2, 3, 1).reshape(b, h, 1, w, 1, c).expand(b, h, 2, w, 2, c)
    doubled: Tensor = pixels.reshape(b, 2 * h, 2 * w, c)
    return doubled.permute(0, 3, 1, 2)


#: In place of torch's operators: with the same arguments.
_INSTEAD: dict[Any, Callable[..., Any]] = {
    _CONVOLUTION: _convolved,
    _CLONE: _cloned,
    _ATEN.cat.default: _joined,
    _ATEN.upsample_nearest2d.default: _upsampled,
    # A picture with other strides may have no such view.
    _ATEN.view.default: Tensor.reshape,
    _ATEN._unsafe_view.default: Tensor.reshape,  # noqa: SLF001  an operator's name
}


def _pixels(picture: Layout) -> Layout:
    """Return the layout (B, H, W, C) of a picture (B, C, H, W)."""
    order = (0, 2, 3, 1)
    shape, strides = ([axes[i] for i in order] for axes in (picture.shape, picture.strides))
    return replace(picture, shape=tuple(shape), strides=tuple(strides))


def _order(layout: Layout) -> Access:
    """Return where elements lie, one after the other."""
    return merged([Dim(*pair) for pair in zip(layout.shape, layout.strides, strict=True)])


def _has_channels_first(layout: Layout) -> bool:
    return len(layout.shape) == 4 and is_identity(_order(layout))
