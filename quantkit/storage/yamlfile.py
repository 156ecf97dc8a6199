"""Reading YAML files within limits; features that recipes do not need are refused.

Anchors and aliases are not read at all: nine lines of them stand for a billion values, and counting
what they expand to would guard only against those that are known. Events come one by one, so all is
looked at before anything is built.
"""

from typing import Any

import yaml

try:
    from yaml import CSafeLoader as _Base
except ImportError:
    # PyYAML without libyaml, ten times slower on the largest recipe.
    from yaml import SafeLoader as _Base  # type: ignore[assignment]

#: The largest text; a recipe with settings for each of 2,000 layers has a third of it.
MAX_BYTES = 2**20
#: Values and keys in it.
MAX_NODES = 100_000
#: Lists and tables inside each other; a recipe has four.
MAX_DEPTH = 16
#: Letters of a number. Digits in base 60, as 1:30:00, take quadratic time to read.
MAX_DIGITS = 40


class _Loader(_Base):
    """The safe loader; it also refuses duplicate keys and numbers that are too large."""


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, within the limits of this module.

    Args:
        text: of at most ``MAX_BYTES``, which the reader of the file checks.

    Raises:
        ValueError: in one line: not YAML, a key twice, an anchor, a tag, or beyond a limit.
    """
    try:
        _check_events(text)
        return yaml.load(text, _Loader)  # noqa: S506  a safe loader
    except yaml.YAMLError as error:
        # Some versions of libyaml read ahead and end at a depth of their own, before ours is met.
        if "maximum nesting depth" in str(error):
            raise ValueError(f"more than {MAX_DEPTH} levels of lists and tables") from error
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error


def _check_events(text: str) -> None:
    depth = nodes = 0
    for event in yaml.parse(text, _Base):
        assert event.start_mark is not None, "a text gives marks"
        line = f"line {event.start_mark.line + 1}"
        if getattr(event, "anchor", None):
            raise ValueError(f"{line}: found an anchor or alias, which recipes cannot have; repeat")
        if tag := getattr(event, "tag", None):
            raise ValueError(f"{line}: found the tag {tag!r:.40}, which recipes cannot have")
        nodes += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"{line}: more than {MAX_DEPTH} levels of lists and tables")
        if nodes > MAX_NODES:
            raise ValueError(f"{line}: more than {MAX_NODES:,} values")


def _table(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        line = f"line {key.start_mark.line + 1}"
        if key.tag != "tag:yaml.org,2002:str":
            kind = key.tag.rpartition(":")[2]
            raise ValueError(f"{line}: found a key of type {kind}, expected a word")
        if key.value in seen:
            raise ValueError(f"{line}: the key {key.value!r:.80} is there twice")
        seen.add(key.value)
    values: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return values


def _number(loader: Any, node: yaml.ScalarNode) -> Any:
    if len(node.value) > MAX_DIGITS:
        line = node.start_mark.line + 1
        raise ValueError(f"line {line}: a number of {len(node.value)} letters")
    kind = node.tag.rpartition(":")[2]
    return getattr(loader, f"construct_yaml_{kind}")(node)


_Loader.add_constructor("tag:yaml.org,2002:map", _table)
_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
