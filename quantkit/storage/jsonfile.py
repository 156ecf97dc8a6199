"""Reading JSON files, of other programs and of our own, within limits.

Limits hold before and while parsing, so that hostile text costs neither memory nor the stack.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import ArtefactError, InputError, ModelError
from quantkit.storage.inputfile import read_file

Result = TypeVar("Result")

#: The largest JSON file that is read; the index of a model of a million tensors is smaller.
MAX_BYTES = 64 * 2**20
#: Values in one text: 90,000 rows of a safetensors header. A million empty lists take 0.1 GB.
MAX_VALUES = 1_000_000
#: Lists and objects inside each other. Real files have ten; Python's stack ends near 1,000.
MAX_DEPTH = 64

#: Digits of a whole number, as of YAML. Beyond 308 it is no float, which arithmetic makes of it.
MAX_DIGITS = 40

#: Looked for first, since nearly no text has one: digits may stand in a string.
_LONG = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
#: Half of a pair that encodes one character: legal in JSON, but no text that can be written.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes) -> Any:
    """Return a JSON value, within the limits of this module.

    Args:
        text: UTF-8 when bytes.

    Raises:
        ValueError: in one short line: not JSON, a key twice, or beyond a limit.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        if sum(text.count(mark) for mark in ",[{") > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values")
        whole = _whole if _LONG.search(text) else None
        value = json.loads(text, object_pairs_hook=_object, parse_int=whole)
    except RecursionError as error:
        raise ValueError(f"more than {MAX_DEPTH} levels of lists and objects") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    _check_depth(value)
    if _SURROGATE.search(text):
        _check_characters(value)
    return value


def read_json(
    path: Path,
    *,
    error: type[InputError] = ModelError,
    cure: str = "download it again",
    limit: int = MAX_BYTES,
) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: the file.
        error: what to raise.
        cure: what the user should do, for the messages.
        limit: the most bytes that it may have.

    Raises:
        InputError: of class ``error``: missing, not a file, not JSON, beyond a limit, no object.
    """
    data = read_file(path, limit, error=error)
    try:
        value = parse_json(data)
    except ValueError as reason:
        raise error(f"{path}: not JSON ({reason}); {cure}") from reason
    if not isinstance(value, dict):
        raise error(f"{path}: found {type(value).__name__}, expected a JSON object; {cure}")
    return value


def read_measured(
    path: Path,
    schema: str,
    version: int,
    parse: Callable[[dict[str, Any]], Result],
    *,
    command: str,
) -> Result:
    """Return what a command of quantkit measured and wrote as JSON.

    Args:
        path: the file.
        schema: the value of its "schema".
        version: the value of its "schema_version".
        parse: makes the result; what ``DAMAGE`` holds means damage.
        command: what writes such a file, for the messages.

    Raises:
        ArtefactError: missing, not such a file, of another version, or damaged.
    """
    values = read_json(path, error=ArtefactError, cure="measure again")
    if values.get("schema") != schema:
        raise ArtefactError(f"{path}: not a {schema} file; make it with {command!r}")
    if values.get("schema_version") != version:
        raise ArtefactError(
            f"{path}: schema_version {values.get('schema_version')!r:.40}, expected {version}; "
            "measure again with this quantkit"
        )
    with parsing(path, cure="measure again"):
        return parse(values)


@contextmanager
def parsing(path: Path, *, cure: str) -> Iterator[None]:
    """Turn errors that the body raises on unexpected entries into an ``ArtefactError``.

    Args:
        path: the file that they are from.
        cure: what the user should do.
    """
    try:
        yield
    except DAMAGE as error:
        raise ArtefactError(f"{path}: damaged ({short(error)}); {cure}") from error


def as_type(kind: type[Result], values: object) -> Result:
    """Return JSON values as a dataclass, each of the type of its field.

    Args:
        kind: the dataclass, of plain types and of other dataclasses.
        values: an object with its fields, and no others.

    Raises:
        ValueError: an entry is absent, unknown, of another type, NaN or infinite.
    """
    from pydantic import TypeAdapter

    unknown = set(values) - {f.name for f in fields(kind)} if isinstance(values, dict) else set()  # type: ignore[arg-type]
    if unknown:
        raise ValueError(f"unknown entry {min(unknown)!r:.80}")
    # Strict as JSON is: lists are tuples, but true is no number and 1.0 no integer.
    return TypeAdapter(kind).validate_json(json.dumps(values, allow_nan=False), strict=True)


#: What parsing raises when entries are missing, of another type, or out of range.
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def short(error: BaseException, length: int = 200) -> str:
    """Return the text of an exception on one line of at most so many characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that stands twice: readers disagree on which of its values counts."""
    values = dict(pairs)
    if len(values) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r:.80} is there twice")
    return values


def _whole(digits: str) -> int:
    if len(digits.removeprefix("-")) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _check_depth(value: object) -> None:
    """Walk level by level: each level is a list, so the walk itself needs no stack."""
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels of lists and objects")
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]


def _check_characters(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair, which is no character") from error
