"""Skeletons: names and shapes that a component's files must have, built without weights.

Pack, verify and loading share this check: what the loader refuses, none of them accepts.
``building`` makes a skeleton of a config.json.
"""

import contextlib
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.models.sizes import at_most, most_modules
from quantkit.models.weight_readers import readers

_WHY = "config.json, weights and model class do not belong together"


@dataclass(frozen=True)
class Skeleton:
    """A dense model: its modules, and the tensors that its files must hold."""

    class_name: str
    #: module path -> why it cannot be packed; empty when it can
    modules: Mapping[str, str]
    #: state dict: name -> shape
    tensors: Mapping[str, tuple[int, ...]]
    #: names of the arguments of its forward
    arguments: tuple[str, ...]
    #: attention module of diffusers -> why its processor is kept; empty when it is known
    attention: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """The tensors in the files of a component, with dense shapes for packed ones."""

    #: messages begin with it
    folder: Path
    #: packed layers; true where scales depend on the timestep
    packed: Mapping[str, bool]
    tensors: Mapping[str, tuple[int, ...]]
    #: the cure in messages
    cure: str = "download it or pack the model again"


def misfits(contents: Contents, skeleton: Skeleton) -> Iterator[str]:
    """Yield a line for everything in which the files do not fit the model, as a loader judges."""
    where, model, why = contents.folder, skeleton.class_name, f"{_WHY}; {contents.cure}"
    absent = contents.packed.keys() - skeleton.modules.keys()
    if absent:
        yield f"{where}: the schemes name layers that {model} lacks: {some(absent)}; {why}"
    present = [name for name in contents.packed if name not in absent]
    for name in present:
        if reason := skeleton.modules[name]:
            yield f"{where}: {name}: {reason}; {why}"
        else:
            yield from _layer_misfits(contents, skeleton, name)
    if any(contents.packed.values()) and "timestep" not in skeleton.arguments:
        found = ", ".join(skeleton.arguments)
        yield f"{where}: {without_timestep(model, found)}"
    missing = skeleton.tensors.keys() - contents.tensors.keys()
    # The bias of a packed layer was judged with its layer.
    missing -= {f"{name}.bias" for name in present}
    if missing:
        shapes = {f"{name} {list(skeleton.tensors[name])}" for name in missing}
        yield f"{where}: lacks {some(shapes)}{_unknown(contents, skeleton)}; {why}"
    judged = {f"{name}.{part}" for name in present for part in ("weight", "bias")}
    for name in sorted(contents.tensors.keys() & skeleton.tensors.keys() - judged):
        found_shape, expected = contents.tensors[name], skeleton.tensors[name]
        if found_shape != expected:
            yield (
                f"{where}: {name}: shape {list(found_shape)}, the model has {list(expected)}; {why}"
            )


def _unknown(contents: Contents, skeleton: Skeleton) -> str:
    """Return a part of a message on a tensor that the model does not know; empty without one."""
    known = skeleton.tensors.keys() | {f"{name}.bias" for name in contents.packed}
    unknown = sorted(contents.tensors.keys() - known)
    return f", holds {unknown[0]!r:.80}, which it does not know" if unknown else ""


def without_timestep(model: str, arguments: str) -> str:
    """Return why a model whose forward has these arguments cannot have timestep buckets."""
    return (
        f"{model}: scales per timestep bucket need a forward with 'timestep', found {arguments}; "
        "pack with one bucket"
    )


def some(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return ", ".join(ordered[:8]) + more


def _layer_misfits(contents: Contents, skeleton: Skeleton, name: str) -> Iterator[str]:
    weight, bias = f"{name}.weight", f"{name}.bias"
    found, expected = contents.tensors[weight], skeleton.tensors[weight]
    why = f"{_WHY}; {contents.cure}"
    if found != expected:
        yield (
            f"{contents.folder}: {name}: packed from {list(found)}, the model has "
            f"{list(expected)}; {why}"
        )
    has, should = bias in contents.tensors, bias in skeleton.tensors
    if has != should:
        texts = ("a bias", "none") if has else ("no bias", "one")
        yield f"{contents.folder}: {name}: {texts[0]}, the model has {texts[1]}; {why}"


def skeleton_of(model: Any, names: Collection[str] = ()) -> Skeleton:
    """Return the skeleton of a dense model, on any device; diffusers' files have its own names."""
    del names
    return Skeleton(
        type(model).__name__,
        why_none_packed(model),
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        tuple(inspect.signature(model.forward).parameters),
    )


def why_none_packed(model: Any) -> dict[str, str]:
    """Return of every module of a model why no packed layer can replace it; empty when one can."""
    reasons = {name: why_not_packed(module) for name, module in model.named_modules()}
    for path, reader in readers(model).items():
        if not reasons.get(path, "no module"):
            reasons[path] = f"{reader} reads this weight itself; keep this layer in 16 bit"
    return reasons


def why_not_packed(module: Any) -> str:
    """Return why no packed layer can replace a module; empty when one can."""
    from torch import nn

    if isinstance(module, nn.Conv2d):
        if module.padding_mode == "zeros" and module.groups == 1:
            return ""
        return (
            f"Conv2d with padding_mode {module.padding_mode!r} and groups {module.groups}, "
            "expected 'zeros' and 1; keep this layer in 16 bit"
        )
    if isinstance(module, nn.Linear):
        return ""
    return f"the model has a {type(module).__name__} here, expected Linear or Conv2d"


@contextlib.contextmanager
def on_meta(tensors: int) -> Iterator[None]:
    """Build as the loader does, parameters without memory, and no more than files have tensors.

    Args:
        tensors: of the files.
    """
    from accelerate import init_empty_weights

    with at_most(most_modules(tensors)), init_empty_weights():
        yield
