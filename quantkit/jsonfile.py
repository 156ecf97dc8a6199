"""JSON objects in files: what somebody else wrote, and measurements of our own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import ArtefactError, ModelError

Result = TypeVar("Result")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ModelError: missing, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: missing; download it again") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: found {type(value).__name__}, wanted a JSON object")
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
        parse: makes the result; KeyError, TypeError, ValueError and AttributeError mean damage.
        command: what writes such a file, for the messages.

    Raises:
        ArtefactError: missing, not such a file, of another version, or damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ArtefactError(f"{path}: not JSON ({error}); measure again") from error
    if not isinstance(values, dict) or values.get("schema") != schema:
        raise ArtefactError(f"{path}: not a {schema} file; make it with {command!r}")
    if values.get("schema_version") != version:
        raise ArtefactError(
            f"{path}: schema_version {values.get('schema_version')}, wanted {version}; measure "
            "again with this quantkit"
        )
    try:
        return parse(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ArtefactError(f"{path}: damaged ({reason}); measure again") from error
