"""Installing attention on 8-bit codes in diffusers' models, packed or not."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from torch import nn

from quantkit.checkpoint.packed_attention import PackedAttention
from quantkit.errors import CheckpointError, InputError
from quantkit.inference.attention.attention_call import AttentionSettings, attend
from quantkit.inference.attention.attention_streams import is_reimplemented, with_streams
from quantkit.inference.layers.layer_summary import iterate_packed
from quantkit.models.attention_modules import attention_modules, call_with, why_kept
from quantkit.numerics.formats import E4M3FN
from quantkit.recipe.fields import matches

#: diffusers' methods, which an instance gets some of its own for: what joins projections, or puts
#: an adapter in and takes it out, calls the first; the second knows diffusers' own classes alone.
_SET, _SET_DEFAULT = "set_attn_processor", "set_default_attn_processor"


@dataclass(frozen=True)
class AttentionLayers:
    """The attention modules of a model, quantized or not."""

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
    pv: str | None = E4M3FN.name,
    min_keys: int = AttentionSettings.min_keys,
    exclude: Sequence[str] = (),
) -> AttentionLayers:
    """Let the attention of a pipeline, or of one model, multiply 8-bit codes.

    Args:
        model: a diffusers pipeline (its denoisers), or a denoiser; packed or not.
        qk: format of queries and keys: e4m3fn, or int8, which is nearer where scores are large;
            None gives diffusers' processors back.
        pv: format of probabilities and values: e4m3fn; None leaves them in 16 bit, for values that
            e4m3fn is too coarse for.
        min_keys: attention over fewer keys stays torch's.
        exclude: globs on modules that keep their processors, as ``*.attn2``.

    Returns:
        which modules are quantized, and why others are not.

    Raises:
        InputError: a format that is not known, or nothing that has attention.
    """
    settings = None if qk is None else AttentionSettings(qk, min_keys, pv=pv)
    found = _set_all(model, lambda _: settings, exclude)
    if not (found.quantized or found.kept) and settings:
        raise InputError(
            f"attention: {type(model).__name__} has no attention modules of diffusers; pass a "
            "pipeline, its unet or its transformer"
        )
    return found


def _set_all(
    model: Any, settings_of: Callable[[str], AttentionSettings | None], exclude: Sequence[str]
) -> AttentionLayers:
    """Set the processors of known modules, diffusers' own where there are no settings."""
    quantized: list[str] = []
    kept: dict[str, str] = {}
    packed = next(iterate_packed(model), None) is not None
    for name, module in attention_modules(model):
        plain = _plain(module.processor)
        reason = "excluded" if matches(name, exclude) else why_kept(plain)
        if reason:
            kept[name] = reason
            continue
        settings = settings_of(name)
        module.processor = _with_heads(plain, settings, packed=packed)
        if settings:
            quantized.append(name)
    return AttentionLayers(tuple(quantized), kept)


def _with_heads(plain: Any, settings: AttentionSettings | None, *, packed: bool) -> Any:
    """Return a processor on codes, or a reimplemented one of a packed model."""
    again = packed and is_reimplemented(type(plain))
    return _quantized(plain, settings) if settings or again else plain


def install(model: Any, packed: PackedAttention | None) -> None:
    """Give a packed model the attention that its config asks for; None: its own.

    Raises:
        CheckpointError: a format of a module that the model has not.
    """
    if packed is not None:
        _refuse_unknown(model, packed)
    changed = _quantize(model, packed)
    if (changed or packed is not None) and hasattr(type(model), _SET):
        setattr(model, _SET, partial(_set_attn_processor, model, packed))
        if hasattr(type(model), _SET_DEFAULT):
            setattr(model, _SET_DEFAULT, partial(_set_default_attn_processor, model))


def uninstall(model: nn.Module) -> None:
    """Restore diffusers' processors of a model that is no longer packed."""
    attention(model, qk=None)
    for name in (_SET, _SET_DEFAULT):
        vars(model).pop(name, None)


def _quantize(model: nn.Module, packed: PackedAttention | None) -> bool:
    """Give processors the attention of the config; tell whether one is not diffusers' own."""

    def settings_of(name: str) -> AttentionSettings | None:
        if packed is None or matches(name, packed.exclude):
            return None
        found = packed.format_of(name)
        return AttentionSettings(found.qk, packed.min_keys, found.pv)

    _set_all(model, settings_of, ())
    return any(isinstance(m.processor, _Quantized) for _, m in attention_modules(model))


def _refuse_unknown(model: Any, packed: PackedAttention) -> None:
    for name in packed.formats.keys() - dict(attention_modules(model)).keys():
        raise CheckpointError(
            f"attention: {name:.80}: a format, but no such module; pack the model again"
        )


def _set_attn_processor(
    model: Any, packed: PackedAttention | None, *args: Any, **kwargs: Any
) -> None:
    """Set processors as diffusers does, and quantize those that are known."""
    getattr(type(model), _SET)(model, *args, **kwargs)
    _quantize(model, packed)


def _set_default_attn_processor(model: Any) -> None:
    """Set the processor that diffusers finds to be the default, and quantize it if it is known."""
    for _, module in attention_modules(model):
        module.processor = _plain(module.processor)
    getattr(type(model), _SET_DEFAULT)(model)


def plain_class(processor: Any) -> type:
    """Return diffusers' class of a processor, quantized or not."""
    return type(processor).__mro__[2 if isinstance(processor, _Quantized) else 0]


def _plain(processor: Any) -> Any:
    """Return diffusers' original of a replaced processor."""
    if not isinstance(processor, _Quantized):
        return processor
    cls: Any = plain_class(processor)
    plain = cls.__new__(cls)
    plain.__dict__.update(processor.__dict__)
    return plain


class _Quantized:
    """A marker base of processors that quantkit has replaced."""

    settings: AttentionSettings | None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, AttentionSettings | None]]:
        """Pickle by the class that it is made of."""
        return _quantized, (_plain(self), self.settings)


def _quantized(plain: Any, settings: AttentionSettings | None) -> Any:
    """Return a processor that computes what ``plain`` does, with quantized attention."""
    known: Any = type(plain)
    cls = _quantized_class(known, settings)
    processor = cls.__new__(cls)
    processor.__dict__.update(plain.__dict__)
    return processor


@lru_cache(maxsize=256)
def _quantized_class(plain: Hashable, settings: AttentionSettings | None) -> Any:
    cls: Any = plain
    call = call_with(cls, partial(attend, settings)) if settings else cls.__call__
    body = {
        "__call__": with_streams(cls, call, settings),
        "settings": settings,
        "__module__": cls.__module__,
    }
    return type(cls.__name__, (_Quantized, cls), body)
