"""Attention of diffusers' models on 8-bit codes, packed or not."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.attention import PackedAttention
from quantkit.device.backends import Backend, forced
from quantkit.device.choosing import choose
from quantkit.device.ops.attention import LARGEST_HEAD
from quantkit.device.ops.checks import IO_DTYPES
from quantkit.device.ops.table import name_for
from quantkit.errors import InputError
from quantkit.inference.operators import OPERATORS
from quantkit.models.attention import (
    AttentionCall,
    Heads,
    attention_modules,
    call_with,
    why_kept,
)
from quantkit.numerics.attention import QK_FORMATS, attention_codes, padded
from quantkit.numerics.formats import E4M3FN
from quantkit.recipe.schema import matches

#: diffusers' method, which an instance gets one of its own for.
_FUSE = "fuse_qkv_projections"


@dataclass(frozen=True)
class AttentionSettings:
    """How attention is computed; factors are those of each call's own numbers."""

    #: of queries and keys: e4m3fn or int8; probabilities and values are e4m3fn
    qk_format: str = E4M3FN.name
    #: with fewer keys torch's attention is used: making codes would cost more than they save
    min_keys: int = 512

    def __post_init__(self) -> None:
        """Refuse what no kernel takes.

        Raises:
            InputError: a format, or a number of keys.
        """
        if self.qk_format not in QK_FORMATS:
            wanted = ", ".join(QK_FORMATS)
            raise InputError(f"attention: qk {self.qk_format!r:.40}, wanted one of {wanted}")
        if self.min_keys < 1:
            raise InputError(f"attention: min_keys {self.min_keys}, wanted 1 or more")


@dataclass(frozen=True)
class AttentionLayers:
    """Which attention modules of a model are quantized."""

    quantized: tuple[str, ...] = ()
    #: module -> why it keeps its processor
    kept: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a line for people."""
        reasons = ", ".join(sorted(set(self.kept.values())))
        rest = f", {len(self.kept)} keep theirs ({reasons})" if self.kept else ""
        return f"attention: {len(self.quantized)} modules on 8-bit codes{rest}"


def attention(
    model: Any,
    *,
    qk: str | None = E4M3FN.name,
    min_keys: int = AttentionSettings.min_keys,
    exclude: Sequence[str] = (),
) -> AttentionLayers:
    """Let the attention of a pipeline, or of one model, multiply 8-bit codes.

    Args:
        model: a diffusers pipeline (its denoisers), or a denoiser; packed or not.
        qk: format of queries and keys: e4m3fn, or int8, which is nearer where scores are large;
            None gives diffusers' processors back.
        min_keys: attention over fewer keys stays torch's.
        exclude: globs on modules that keep their processors, as ``*.attn2``.

    Returns:
        which modules are quantized, and why others are not.

    Raises:
        InputError: a format that is not known, or nothing that has attention.
    """
    settings = None if qk is None else AttentionSettings(qk, min_keys)
    quantized: list[str] = []
    kept: dict[str, str] = {}
    for name, module in attention_modules(model):
        plain = _plain(module.processor)
        reason = "excluded" if matches(name, exclude) else why_kept(plain)
        if reason:
            kept[name] = reason
            continue
        module.processor = _quantized(plain, settings) if settings else plain
        if settings:
            quantized.append(name)
    if not (quantized or kept) and settings:
        raise InputError(
            f"attention: {type(model).__name__} has no attention modules of diffusers; pass a "
            "pipeline, its unet or its transformer"
        )
    return AttentionLayers(tuple(quantized), kept)


def install(model: Any, packed: PackedAttention | None) -> None:
    """Give a packed model the attention that its config asks for; None: its own."""
    if packed is None:
        return
    _quantize(model, packed)
    if hasattr(type(model), _FUSE):
        setattr(model, _FUSE, partial(_fuse_qkv_projections, model, packed))


def uninstall(model: nn.Module) -> None:
    """Give a model that is packed no more diffusers' processors back."""
    attention(model, qk=None)
    vars(model).pop(_FUSE, None)


def _quantize(model: nn.Module, packed: PackedAttention) -> None:
    attention(model, qk=packed.qk, min_keys=packed.min_keys, exclude=packed.exclude)


def _fuse_qkv_projections(model: Any, packed: PackedAttention) -> None:
    """Join projections as diffusers does, which sets other processors."""
    getattr(type(model), _FUSE)(model)
    _quantize(model, packed)


def _plain(processor: Any) -> Any:
    """Return diffusers' processor of a quantized one."""
    if not isinstance(processor, _Quantized):
        return processor
    cls: Any = type(processor).__mro__[2]
    plain = cls.__new__(cls)
    plain.__dict__.update(processor.__dict__)
    return plain


class _Quantized:
    """What marks a processor as quantized."""

    settings: AttentionSettings

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, AttentionSettings]]:
        """Pickle by the class that it is made of."""
        return _quantized, (_plain(self), self.settings)


def _quantized(plain: Any, settings: AttentionSettings) -> Any:
    """Return a processor that computes what ``plain`` does, with quantized attention."""
    known: Any = type(plain)
    cls = _quantized_class(known, settings)
    processor = cls.__new__(cls)
    processor.__dict__.update(plain.__dict__)
    return processor


@lru_cache(maxsize=256)
def _quantized_class(plain: Hashable, settings: AttentionSettings) -> Any:
    cls: Any = plain
    body = {
        "__call__": call_with(cls, partial(_attend, settings)),
        "settings": settings,
        "__module__": cls.__module__,
    }
    return type(cls.__name__, (_Quantized, cls), body)


def _why_not(settings: AttentionSettings, heads: Heads, call: AttentionCall) -> str:
    """Return why a call is torch's; empty when it is quantized."""
    if call.more:
        return call.more
    keys, columns = heads.k.shape[2:]
    if keys < settings.min_keys:
        return f"{keys} keys, fewer than min_keys"
    op = name_for("attention", settings.qk_format)
    return _why_no_operands(heads) or _why_no_kernel(op, str(heads.q.device), padded(columns))


def _why_no_operands(heads: Heads) -> str:
    """Return why no kernel takes these numbers; empty when one does."""
    q, k, v = heads
    columns = q.shape[3]
    if columns % 8 or columns > LARGEST_HEAD or v.shape[3] != columns:
        return f"heads of {columns} columns"
    if k.shape[1] != q.shape[1]:
        return "heads share keys"
    if torch.is_grad_enabled() and any(t.requires_grad for t in heads):
        return "gradients are wanted"
    return "" if q.dtype in IO_DTYPES.values() else f"{q.dtype} is not computed"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _why_no_kernel(op: str, device: str, columns: int) -> str:
    choice = choose(op, torch.device(device), k=columns)
    # Unasked, the reference would be slower than torch's attention, and no nearer.
    unasked = choice.backend is Backend.REFERENCE and forced() is None
    reason: str = choice.reason if unasked else ""
    return reason


def _attend(settings: AttentionSettings, heads: Heads, call: AttentionCall) -> Tensor | None:
    if _why_not(settings, heads, call):
        return None
    rows = (t.flatten(0, 1) for t in heads)
    codes = attention_codes(*rows, scale=call.scale, qk_format=settings.qk_format)
    operator = OPERATORS[name_for("attention", settings.qk_format)]
    _, count, keys, columns = heads.k.shape
    y: Tensor = operator(
        codes.q, codes.k, codes.v, codes.q_scale, codes.k_scale, codes.v_scale, codes.v_mean,
        keys, count, columns, settings.qk_format, heads.q.dtype,
    )  # fmt: skip
    return y.transpose(1, 2)
