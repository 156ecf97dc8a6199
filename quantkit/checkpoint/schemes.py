"""A treatment as JSON, and back: one entry of ``schemes`` in the quantization_config."""

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any

from quantkit.errors import CheckpointError, InputError
from quantkit.numerics.formats import find_format
from quantkit.numerics.granularity import PerChannel, PerGroup, parse_granularity
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.storage.jsonfile import DAMAGE, short

_SCHEME_KEYS = ("weight", "granularity", "sparsity", "activation", "buckets", "smooth", "layers")
#: Written where it says something.
_OPTIONAL_KEYS = ("activation_format", "token_below")


def scheme_to_json(scheme: Scheme) -> dict[str, Any]:
    """Return a treatment as FORMAT.md writes it, without its layers."""
    return {
        "weight": scheme.weight.name,
        "granularity": str(scheme.granularity),
        "sparsity": None if scheme.sparsity is None else str(scheme.sparsity),
        "activation": scheme.activation.value,
        "buckets": list(scheme.buckets) or None,
        "smooth": scheme.smooth,
        **({"activation_format": scheme.input.name} if _says_format(scheme) else {}),
        **({} if scheme.token_below is None else {"token_below": scheme.token_below}),
    }


def check_keys(
    found: Mapping[str, Any], expected: tuple[str, ...], where: str, optional: tuple[str, ...] = ()
) -> None:
    """Refuse missing and unknown keys: a reader ignores nothing silently.

    Raises:
        CheckpointError: naming the first key that is missing or unknown.
    """
    for key in expected:
        if key not in found:
            raise CheckpointError(f"{where}: key {key!r} is missing; pack the model again")
    for key in found:
        if key not in expected and key not in optional:
            raise CheckpointError(
                f"{where}: unknown key {key!r:.80}, expected {', '.join(expected)}; "
                "upgrade quantkit"
            )


def parse_scheme(item: object, where: str) -> tuple[Scheme, tuple[str, ...]]:
    """Return a treatment and its layers.

    Args:
        item: the JSON value.
        where: what error messages call it.

    Raises:
        CheckpointError: a missing or unknown key, an unknown value.
    """
    if not isinstance(item, dict):
        raise CheckpointError(f"{where}: found {type(item).__name__}, expected a JSON object")
    check_keys(item, _SCHEME_KEYS, where, _OPTIONAL_KEYS)
    try:
        granularity = parse_granularity(_text(item["granularity"]))
        weight = find_format(_text(item["weight"]))
        activation = Activation(item["activation"])
        buckets = _parse_buckets(item["buckets"], activation)
        token_below = _parse_token_below(item.get("token_below"), activation)
    except (InputError, *DAMAGE) as error:
        raise CheckpointError(f"{where}: {short(error)}") from error
    if item["sparsity"] not in (None, str(TWO_OF_FOUR)):
        raise CheckpointError(f"{where}: sparsity {item['sparsity']!r:.80}, expected null or '2:4'")
    if type(item["smooth"]) is not bool:
        raise CheckpointError(f"{where}: smooth {item['smooth']!r:.80}, expected true or false")
    sparsity = TWO_OF_FOUR if item["sparsity"] else None
    smooth: bool = item["smooth"]
    scheme = Scheme(weight, granularity, sparsity, activation, buckets, smooth, token_below)
    try:
        _check_format(item.get("activation_format"), scheme)
        check_blocks(scheme)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    return scheme, _parse_layers(item["layers"], where)


def check_blocks(scheme: Scheme) -> None:
    """Refuse a format in blocks with scales of another granularity, or with keys of other formats.

    Raises:
        CheckpointError: naming what it has.
    """
    fmt = scheme.weight
    if fmt.subscale_group and scheme.granularity != PerChannel():
        raise CheckpointError(
            f"granularity {scheme.granularity} of weight {fmt.name}, expected channel"
        )
    if not fmt.block:
        return
    if scheme.granularity != PerGroup(fmt.block):
        raise CheckpointError(
            f"granularity {scheme.granularity} of weight {fmt.name}, expected group:{fmt.block}"
        )
    if scheme.sparsity is not None or scheme.activation is not Activation.NONE:
        raise CheckpointError(
            f"sparsity {scheme.sparsity or 'null'} and activation {scheme.activation.value} of "
            f"weight {fmt.name}, expected null and none"
        )


def _says_format(scheme: Scheme) -> bool:
    return scheme.weight.is_integer and scheme.activation is not Activation.NONE


def _check_format(found: object, scheme: Scheme) -> None:
    """Refuse a format of inputs that no kernel multiplies by this weight."""
    expected = scheme.input.name if _says_format(scheme) else None
    if found != expected:
        raise CheckpointError(
            f"activation_format {found!r:.80} of weight {scheme.weight.name} and activation "
            f"{scheme.activation.value}, expected {expected or 'no such key'}"
        )


def _parse_buckets(value: object, activation: Activation) -> tuple[float, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not value or not all(type(v) in (int, float) for v in value):
        raise CheckpointError(f"buckets {value!r:.80}, expected null or a list of timesteps")
    edges = tuple(float(v) for v in value)
    if not all(isfinite(edge) for edge in edges) or list(edges) != sorted(set(edges)):
        raise CheckpointError(
            f"buckets {value!r:.80}, expected ascending, distinct, finite timesteps"
        )
    if activation is not Activation.STATIC:
        raise CheckpointError(f"buckets with activation {activation.value!r}, expected 'static'")
    return edges


def _parse_token_below(value: object, activation: Activation) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not isfinite(value):  # type: ignore[arg-type]  # a number
        raise CheckpointError(f"token_below {value!r:.80}, expected a finite timestep")
    if activation is not Activation.STATIC:
        raise CheckpointError(
            f"token_below with activation {activation.value!r}, expected 'static'"
        )
    return float(value)  # type: ignore[arg-type]  # a number


def _parse_layers(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(n, str) and n for n in value):
        raise CheckpointError(
            f"{where}: layers is not a list of module paths; pack the model again"
        )
    if not value:
        raise CheckpointError(f"{where}: no layers, expected at least one; pack the model again")
    return tuple(value)


def parse_modules(value: object, where: str, taken: Collection[str] = ()) -> tuple[str, ...]:
    """Return the paths of modules, at least one.

    Raises:
        CheckpointError: no list of paths, or one that comes twice, here or among those ``taken``.
    """
    modules = value if isinstance(value, list) else []
    named = modules and all(isinstance(name, str) and name for name in modules)
    if not named or len({*modules, *taken}) < len(modules) + len(set(taken)):
        raise CheckpointError(f"{where}: modules {value!r:.80}, expected paths, each once")
    return tuple(modules)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"found {value!r:.80}, expected text")
    return value
