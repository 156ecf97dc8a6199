"""Attention from projections: quantizing heads to codes for the attention kernel."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from quantkit.device.backends import Backend
from quantkit.device.choosing import choose
from quantkit.device.ops.table import is_operation, name_for
from quantkit.device.torch_operators import OPERATORS
from quantkit.inference.attention.attention_ends import HeadProduct
from quantkit.inference.layers.modules import is_watched
from quantkit.inference.layers.prompts import is_plain
from quantkit.models.attention_modules import Heads
from quantkit.numerics.attention_factors import KEYS, HeadFactors
from quantkit.numerics.formats import E4M3FN, INT8

_Part = TypeVar("_Part")


class Projection(NamedTuple):
    """Heads in adjacent columns of x, (B, T, C), from a column on."""

    x: Tensor
    column: int = 0


class Pending(NamedTuple):
    """A pending projection of x, (B, T, K), which may write codes."""

    layer: nn.Module
    x: Tensor


#: Of heads, side by side in the columns of tokens.
Part = Projection | Pending


class Stream(NamedTuple):
    """The projections of one kind of tokens, and the norms of their heads."""

    q: Part
    k: Part
    v: Part
    norm_q: nn.Module | None = None
    norm_k: nn.Module | None = None


class Rotation(NamedTuple):
    """A rotary embedding of adjacent columns, float32 (T, D) each."""

    cos: Tensor
    sin: Tensor


class Shape(NamedTuple):
    """Heads of a picture, and their columns."""

    heads: int
    head_size: int


def stream_of(heads: Heads) -> tuple[Stream, Shape]:
    """Return heads (B, H, N, D) as a stream, and what a picture of it has.

    Nothing is copied where tokens lie in rows. Where heads do, each is a picture.
    """
    if all(t.is_contiguous() for t in heads):
        q, k, v = (Projection(t.flatten(0, 1)) for t in heads)
        return Stream(q, k, v), Shape(1, heads.q.shape[3])
    # What lies between others is copied once, not by every operation.
    q, k, v = (Projection(t.transpose(1, 2).flatten(2).contiguous()) for t in heads)
    return Stream(q, k, v), Shape(heads.q.shape[1], heads.q.shape[3])


def measured_factors(stream: Stream, shape: Shape, qk_format: str, tau: float) -> HeadFactors:
    """Return the factors of these very numbers, of all pictures' heads.

    Args:
        stream: of projections without norms.
        shape: that a kernel takes.
        qk_format: e4m3fn or int8.
        tau: what products of queries and keys are multiplied by.
    """
    parts = [computed(part) for part in (stream.q, stream.k, stream.v)]
    measured = OPERATORS["head_partials"](
        *(part.x for part in parts), [part.column for part in parts], *shape
    )
    make = OPERATORS[name_for("head_factors", qk_format)]
    return HeadFactors(*make(*measured, parts[1].x.shape[1], tau))


def product_of_streams(
    streams: Sequence[Stream],
    shape: Shape,
    factors: HeadFactors,
    qk_format: str,
    *,
    rotation: Rotation | None = None,
    pv: str | None = E4M3FN.name,
) -> HeadProduct:
    """Return attention over the tokens of one stream, or of two, concatenated.

    Args:
        streams: one or two.
        shape: that a kernel takes.
        factors: of S heads; row n of all pictures' heads has n % S.
        qk_format: e4m3fn or int8.
        rotation: of all tokens.
        pv: of probabilities and values: e4m3fn; None: float16.

    Returns:
        what is left to be computed, in the dtype of the projections.
    """
    qc, kc, vc, q_scale, k_scale = _codes(streams, shape, factors, (qk_format, pv), rotation)
    keys = sum(s.k.x.shape[1] for s in streams)
    return HeadProduct(
        (qc, kc, vc, q_scale, k_scale, factors.value_scale, factors.value_mean),
        (keys, *shape, qk_format, streams[0].q.x.dtype),
        pv,
    )


def computed(part: Part) -> Projection:
    """Return a projection, computed if it was pending."""
    return part if isinstance(part, Projection) else Projection(part.layer(part.x))


class _Codes(NamedTuple):
    """Of queries, keys and values, and the scales of int8 ones."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None


def _codes(
    streams: Sequence[Stream],
    shape: Shape,
    made: HeadFactors,
    formats: tuple[str, str | None],
    rotation: Rotation | None,
) -> _Codes:
    qk_format, pv = formats
    if qk_format == pv == E4M3FN.name and not _some_end_in_codes(streams, rotation):
        streams = [s._replace(q=computed(s.q), k=computed(s.k), v=computed(s.v)) for s in streams]
        if (together := _in_one_launch(streams, shape, made, rotation)) is not None:
            return together
    q = _Side([s.q for s in streams], [s.norm_q for s in streams], None, made.query, 1)
    k = _Side([s.k for s in streams], [s.norm_k for s in streams], made.key_mean, made.key, KEYS)
    qc, q_scale = _head_codes(q, shape, qk_format, rotation)
    kc, k_scale = _head_codes(k, shape, qk_format, rotation)
    vc = _value_codes([s.v for s in streams], shape, made, pv)
    return _Codes(qc, kc, vc, q_scale, k_scale)


def _in_one_launch(
    streams: Sequence[Stream], shape: Shape, made: HeadFactors, rotation: Rotation | None
) -> _Codes | None:
    """Return all codes, of one launch; None where projections or norms differ."""
    norms, x = [norm for s in streams for norm in (s.norm_q, s.norm_k)], streams[0].q.x
    if not are_of_one_launch(norms, x.dtype):
        return None
    found = _norms_of(norms)
    parts = [[computed(part) for part in (s.q, s.k, s.v)] for s in streams]
    if any(len({part.x.shape for part in of_stream}) > 1 for of_stream in parts):
        return None
    first, second = _pair(parts)
    weights = [None if norm is None else norm.weight for norm in found]
    nowhere = [Projection(x)] * 3
    cos, sin = rotation or (None, None)
    q, k, v = OPERATORS[name_for("stream_codes", E4M3FN.name)](
        *(part.x for part in first),
        *((None,) * 3 if second is None else (part.x for part in second)),
        *weights, *(None,) * (4 - len(weights)), cos, sin,
        *made,
        [part.column for part in (*first, *(second or nowhere))], *shape,
        max([0.0, *(norm.eps for norm in found if norm is not None)]),
        "none" if rotation is None else "pairs",
    )  # fmt: skip
    return _Codes(q, k, v)


def are_of_one_launch(norms: Sequence[nn.Module | None], dtype: torch.dtype) -> bool:
    """Tell whether the kernel that makes all codes computes these norms."""
    return all(
        norm is None or (known is not None and known.weight.dtype is dtype)
        for norm, known in zip(norms, _norms_of(norms), strict=True)
    )


def _some_end_in_codes(streams: Sequence[Stream], rotation: Rotation | None) -> bool:
    """Tell whether a projection ends in codes, so that the others' are made separately."""
    stream = streams[0]
    if len(streams) > 1:
        return False
    plain = rotation is None and stream.norm_q is stream.norm_k is None
    families = {"project_values": [stream.v], "project_codes": [stream.q, stream.k] * plain}
    return any(
        isinstance(part, Pending) and _ends_in_codes(part, family)
        for family, parts in families.items()
        for part in parts
    )


class _Side(NamedTuple):
    """Queries or keys, with the factors that quantize them."""

    parts: Sequence[Part]
    norms: Sequence[nn.Module | None]
    mean: Tensor | None
    factor: Tensor
    #: tokens that share a scale, of int8 codes
    group: int


def _head_codes(
    side: _Side, shape: Shape, qk_format: str, rotation: Rotation | None
) -> tuple[Tensor, Tensor | None]:
    """Return codes, and the scales of int8 ones."""
    plain = rotation is None and qk_format == E4M3FN.name and not any(side.norms)
    if plain and (part := _coding(side.parts, "project_codes")):
        mean = None if side.mean is None else side.mean[:, : shape.head_size].flatten()
        factor = side.factor.repeat_interleave(shape.head_size)
        return _projected(part, "project_codes", shape, mean, factor), None
    norms = _norms_of(side.norms)
    first, second = _pair(
        [
            _normed(computed(part), norm, shape) if norm and kernel is None else computed(part)
            for part, norm, kernel in zip(side.parts, side.norms, norms, strict=True)
        ]
    )
    first_norm, second_norm = _pair([None if n is None else n.weight.float() for n in norms])
    # Not max(..., default=): Dynamo of torch 2.11 breaks the graph there.
    eps = max([0.0, *(norm.eps for norm in norms if norm is not None)])
    cos, sin = rotation or (None, None)
    made = OPERATORS[name_for("head_codes", qk_format)](
        first.x, None if second is None else second.x, first_norm, second_norm, cos, sin,
        side.mean, side.factor, first.column, 0 if second is None else second.column, *shape, eps,
        "none" if rotation is None else "pairs", *((side.group,) if qk_format == INT8.name else ()),
    )  # fmt: skip
    return made if isinstance(made, tuple) else (made, None)


def _value_codes(parts: Sequence[Part], shape: Shape, made: HeadFactors, pv: str | None) -> Tensor:
    """Return values in e4m3fn or float16, transposed."""
    if pv is None:
        return _transposed("value_codes_f16", parts, shape, made)
    if part := _coding(parts, "project_values"):
        size = shape.head_size
        mean, scale = (t[:, :size].flatten() for t in (made.value_mean, made.value_scale))
        return _projected(part, "project_values", shape, mean, 1 / scale)
    return _transposed(name_for("value_codes", pv), parts, shape, made)


def _transposed(name: str, parts: Sequence[Part], shape: Shape, made: HeadFactors) -> Tensor:
    first, second = _pair([computed(part) for part in parts])
    y: Tensor = OPERATORS[name](
        first.x, None if second is None else second.x, made.value_mean, made.value_scale,
        first.column, 0 if second is None else second.column, *shape,
    )  # fmt: skip
    return y


def _coding(parts: Sequence[Part], family: str) -> Pending | None:
    """Return the one projection where it writes codes; None for others."""
    part = parts[0]
    if len(parts) > 1 or not isinstance(part, Pending) or not _ends_in_codes(part, family):
        return None
    return part


def _projected(
    part: Pending, family: str, shape: Shape, mean: Tensor | None, factor: Tensor
) -> Tensor:
    """Return the codes that a projection writes."""
    layer: Any = part.layer
    codes: Tensor = layer.head_codes(part.x, family, shape.heads, mean, factor)
    return codes


def _ends_in_codes(part: Pending, family: str) -> bool:
    layer: Any = part.layer
    if not is_plain(layer) or not layer.writes_codes:
        return False
    scheme = layer.scheme
    kinds, sparse = (scheme.input.name, scheme.codes.name), scheme.sparsity is not None
    if not is_operation(family, *kinds, sparse=sparse):
        return False
    found: bool = has_kernel(name_for(family, *kinds, sparse=sparse), str(part.x.device), layer.k)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernel(op: str, device: str, k: int) -> bool:
    """Tell whether a kernel computes an operation on ``device``; constant in compiled graphs."""
    return choose(op, torch.device(device), k=k).backend is not Backend.REFERENCE


class _Norm(NamedTuple):
    """An RMS norm as the kernel computes it."""

    weight: Tensor
    eps: float


def _norms_of(norms: Sequence[nn.Module | None]) -> list[_Norm | None]:
    """Return the norms that the kernel computes; None for none, and for those that torch does."""
    found = [_norm_of(norm) for norm in norms]
    alike = len({norm.eps for norm in found if norm is not None}) <= 1
    return found if alike else [None] * len(found)


def _norm_of(norm: Any) -> _Norm | None:
    if type(norm) not in {RMSNorm, nn.RMSNorm} or getattr(norm, "bias", None) is not None:
        return None
    # What offloads modules brings weights back when they are called.
    if is_watched(norm):
        return None
    return None if norm.weight is None or norm.eps is None else _Norm(norm.weight, norm.eps)


def _normed(part: Projection, norm: nn.Module, shape: Shape) -> Projection:
    """Return heads that torch has normalized."""
    heads, size = shape
    x = part.x[..., part.column : part.column + heads * size]
    return Projection(norm(x.reshape(*x.shape[:2], heads, size)).flatten(2).to(x.dtype))


def _pair(parts: Sequence[_Part]) -> tuple[_Part, _Part | None]:
    return parts[0], parts[1] if len(parts) > 1 else None
