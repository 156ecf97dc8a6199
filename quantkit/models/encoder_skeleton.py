"""The skeleton of a text encoder, in the names of its files: transformers renames while it loads.

It also ties weights that files hold once: an embedding that two modules share, or an output layer.
"""

import contextlib
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quantkit.models.skeleton import Skeleton, on_meta, why_none_packed


def build_encoder(
    config: Mapping[str, Any],
    class_name: str,
    names: Collection[str],
    *,
    tensors: int,
    place: str = "",
) -> Skeleton:
    """Return the skeleton of a transformers model that a config describes.

    Args:
        config: config.json, its quantization_config left out.
        class_name: as model_index.json has it.
        names: tensors of the files.
        tensors: how many they are.
        place: the folder of ``diffusers.pipelines`` that has the class; empty for transformers.

    Raises:
        ValueError: there is no such model.
    """
    import transformers

    found = find_class(transformers, class_name, place)
    if not (inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(
            f"{class_name!r:.80} is no model of transformers {transformers.__version__}; upgrade "
            "transformers, or download it again"
        )
    cls: Any = found
    with _quiet(), on_meta(tensors), _untied():
        model = cls(cls.config_class.from_dict(_without_dtype(config)))
        return encoder_skeleton(model, names)


def find_class(library: Any, name: str, place: str) -> Any:
    """Return the class of a name in a library or a folder of ``diffusers.pipelines``, or None."""
    if not place:
        return getattr(library, name, None)
    from diffusers import pipelines

    return getattr(getattr(pipelines, place, None), name, None)


def _without_dtype(value: Any) -> Any:
    """Return a config without dtypes: transformers makes them torch's default, in all threads."""
    if isinstance(value, Mapping):
        return {k: _without_dtype(v) for k, v in value.items() if k not in ("dtype", "torch_dtype")}
    return value


def encoder_skeleton(model: Any, names: Collection[str]) -> Skeleton:
    """Return the skeleton of a dense transformers model in the names of its files.

    Args:
        model: on any device.
        names: tensors of the files; the model's own stand for those that no file has.
    """
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    reasons = why_none_packed(model)
    loaded = {name: found for name, found in loaded_names(model, names).items() if found in state}
    there = {*loaded.values(), *converted_names(model, names)}
    tied = dict(model.all_tied_weights_keys)
    missing = state.keys() - there - _stand_ins(tied, there)
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    tensors = {name: state[found] for name, found in loaded.items()}
    tensors |= {n: state[n] for n in missing if not any(re.search(i, n) for i in ignored)}
    shared = set(tied) | set(tied.values())
    # A bias that no file has is named by its own name, next to the weight's name in the file.
    biases = {
        f"{name.removesuffix('weight')}bias": bias
        for name, found in loaded.items()
        if name.endswith(".weight") and (bias := f"{found.removesuffix('weight')}bias") in missing
    }
    for name, bias in biases.items():
        tensors[name] = tensors.pop(bias)
    return Skeleton(
        type(model).__name__,
        {
            name.rpartition(".")[0]: _why_not_packed(reasons, found, shared)
            for name, found in loaded.items()
        },
        tensors,
        tuple(inspect.signature(model.forward).parameters),
    )


def loaded_names(model: Any, names: Collection[str]) -> dict[str, str]:
    """Return transformers' names of tensors, by their names in the files.

    Args:
        model: a transformers model, on any device.
        names: tensors of the files. Those that are joined while loading are left out.
    """
    return {name: found for name, found, parts in _renamed(model, names) if not parts}


def converted_names(model: Any, names: Collection[str]) -> set[str]:
    """Return the tensors of a model that transformers makes of others: joined, or cut in parts."""
    return {part for _, _, parts in _renamed(model, names) for part in parts}


def _renamed(model: Any, names: Collection[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield a name, its name in the model, and the names of its parts or of its whole."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if not isinstance(entry, WeightRenaming)]
    targets = {pattern: c.target_patterns for c in converters for pattern in c.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    for name in names:
        renamed, joined = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, joined = rename_source_key(name, [], [], prefix, state)
        first, *others = targets.get(joined, [""])
        parts = [renamed, *(renamed.replace(first, other) for other in others)]
        yield name, renamed, [] if joined is None else parts


def _stand_ins(tied: Mapping[str, str], loaded: set[str]) -> set[str]:
    """Return the weights that tying fills from one that is loaded."""
    filled: set[str] = set()
    for source in set(tied.values()):
        group = {source, *(name for name, other in tied.items() if other == source)}
        if group & loaded:
            filled |= group
    return filled


def _why_not_packed(reasons: Mapping[str, str], tensor: str, shared: Collection[str]) -> str:
    if tensor in shared:
        return "its weight is that of another module, too; keep this layer in 16 bit"
    return reasons[tensor.rpartition(".")[0]]


@contextlib.contextmanager
def _untied() -> Iterator[None]:
    """Build as the loader does: tied weights are separate, and nothing is initialised."""
    from transformers import initialization

    with initialization.no_init_weights(), initialization.no_tie_weights():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
