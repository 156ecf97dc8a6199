"""A cache of cross-attention keys and values: they depend on the prompt's embedding only.

UNets pass one embedding to every cross-attention at every step. A layer that gets the same tensor
again returns its previous result. Tensors are compared by identity and by the version that torch
increments at every write, not by value. A result is kept when an embedding comes a second time, so
inputs that are computed again at each step (a projection inside the model) cost no memory.

A compiled or captured step computes them every time: the comparison would run once, while the step
is traced, and never again. A replayed step reads them where ``pipelines.kept_results`` keeps
them.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.device.backends import forced, sums_are_fast
from quantkit.inference.layers.layer_summary import iterate_packed
from quantkit.inference.layers.modules import PackedLinear, is_watched
from quantkit.inference.layers.quantized_input import QuantizedInput
from quantkit.pipelines.kept_results import kept_result
from quantkit.pipelines.versions import Version, same_versions, version_of

#: Embeddings that a layer remembers: guidance may call the model for each of two prompts.
_PROMPTS = 2
#: Layers of a cross-attention module that read the prompt.
_READERS = ("to_k", "to_v")


class _Entry:
    """An embedding, and a layer's result for it, if it came twice."""

    def __init__(self, x: Tensor, how: tuple[Any, ...], gone: Callable[[Any], None]) -> None:
        self.x = version_of(x, gone)
        #: its view, and everything else that the result depends on
        self.how = how
        self.weights: tuple[Version, ...] = ()
        self.result: Tensor | None = None
        self.version = 0

    def is_of(self, x: Tensor, how: tuple[Any, ...]) -> bool:
        """Tell whether this is the entry of ``x`` with the same ``how``."""
        return self.x.is_now(x) and self.how == how

    def found(self, layer: nn.Module) -> Tensor | None:
        """Return the result, if neither it nor the layer changed."""
        result = self.result
        if result is None or result._version != self.version:  # noqa: SLF001  the only counter
            return None
        return result if same_versions(self.weights, _tensors(layer)) else None

    def keep(self, layer: nn.Module, result: Tensor) -> None:
        """Keep a result of the layer as it is now, if torch counts what changes it."""
        now = _tensors(layer)
        if not any(t.is_inference() for t in (*now, result)):
            self.weights = tuple(map(version_of, now))
            self.version, self.result = result._version, result  # noqa: SLF001  as above


class PromptCache:
    """A layer's results for the last prompts; a copy of the layer starts empty."""

    def __init__(self) -> None:
        self.entries: tuple[_Entry, ...] = ()

    def __deepcopy__(self, memo: object) -> "PromptCache":
        return PromptCache()

    def __reduce__(self) -> tuple[type["PromptCache"], tuple[()]]:
        return PromptCache, ()

    def forget(self, gone: object = None) -> None:
        """Free the results; of one embedding alone where it says that it is ``gone``."""
        # One assignment: another thread may read.
        self.entries = tuple(e for e in self.entries if gone is not None and e.x.tensor is not gone)

    def find(self, x: Tensor) -> _Entry | None:
        """Return the entry of an embedding that was seen; None, and remember it, when it is new."""
        how = _how(x)
        if (entry := next((e for e in self.entries if e.is_of(x, how)), None)) is not None:
            return entry
        new = _Entry(x, how, partial(_forget, weakref.ref(self)))
        self.entries = (new, *self.entries[: _PROMPTS - 1])
        return None


class PromptLinear(PackedLinear):
    """A PackedLinear that caches its result for as long as its input is the same."""

    #: None: nothing is kept
    kept: PromptCache | None = None
    # What is kept comes first.
    __call__ = nn.Module.__call__

    def forward(self, input: Tensor | QuantizedInput) -> Tensor:  # noqa: A002  as PackedLinear
        """Return ``input @ weight.T + bias``, computed or kept."""
        kept = self.kept
        if torch.compiler.is_compiling() or kept is None or isinstance(input, QuantizedInput):
            return super().forward(input)
        if not _may_keep(self, input):
            return super().forward(input)
        if (y := kept_result(self, input, partial(super().forward, input))) is not None:
            return y
        if type(input) is not Tensor or _is_recorded(input):
            return super().forward(input)
        entry = kept.find(input)
        y = None if entry is None else entry.found(self)
        if y is None:
            y = super().forward(input)
            if entry is not None:
                entry.keep(self, y)
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  torch's signature
        if self.kept is not None:
            self.kept.forget()
        return super()._apply(fn, recurse)


def install(model: nn.Module) -> None:
    """Let the layers that read the prompt cache their results."""
    for module in model.modules():
        if getattr(module, "is_cross_attention", False):
            for layer in (getattr(module, name, None) for name in _READERS):
                _let_keep(layer)


def _let_keep(layer: Any) -> None:
    # A bucket's scale is another one at another step.
    takes = type(layer) is PackedLinear
    if takes and layer.scheme.schedule is None:
        layer.__class__ = PromptLinear
        layer.kept = PromptCache()


def keep_as(joined: PromptLinear, layers: Iterable[nn.Module]) -> None:
    """Let a joined layer cache its results, if all of its layers do."""
    if all(getattr(layer, "kept", None) is not None for layer in layers):
        joined.kept = PromptCache()


def keep_prompts(model: Any, *, enabled: bool = True) -> int:
    """Let a pipeline, or one model, keep the keys and values of its prompts, or not.

    Args:
        model: a loaded pipeline, or a packed denoiser; they keep them from the start.
        enabled: False frees what is kept, and computes them at every step.

    Returns:
        the number of layers.
    """
    layers = [layer for _, _, layer in iterate_packed(model) if isinstance(layer, PromptLinear)]
    for layer in layers:
        layer.kept = PromptCache() if enabled and layer.scheme.schedule is None else None
    return len(layers)


def is_plain(layer: object) -> bool:
    """Tell whether a call of a layer only multiplies; adapters replace it."""
    return type(layer) in {PackedLinear, PromptLinear} and not is_watched(layer)  # type: ignore[arg-type]  # it is a layer


def _may_keep(layer: PromptLinear, x: Tensor) -> bool:
    """Tell whether this call's result may be cached, or taken from the cache."""
    if layer.training or torch.is_grad_enabled() or is_watched(layer):
        return False
    # An inference tensor counts no versions.
    return not (torch.is_inference_mode_enabled() or x.is_inference() or x.is_meta)


def _is_recorded(x: Tensor) -> bool:
    """Tell whether this call is compiled or captured, so that later ones compare nothing."""
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    traced: bool = torch.jit.is_tracing()  # type: ignore[no-untyped-call, attr-defined]  # untyped
    return captured or traced


def _how(x: Tensor) -> tuple[Any, ...]:
    """Return what a result depends on besides values: the view, the kind of sums, the device."""
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    return x.shape, x.stride(), x.dtype, forced(), sums_are_fast(), stream


def _tensors(layer: nn.Module) -> list[Tensor]:
    own = (*layer._parameters.values(), *layer._buffers.values())  # noqa: SLF001  twice as fast
    return [t for t in own if t is not None]


def _forget(kept: "weakref.ref[PromptCache]", gone: "weakref.ref[Tensor]") -> None:
    if (found := kept()) is not None:
        found.forget(gone)
