"""JSON objects in files that somebody else wrote: config.json, indexes."""

import json
from pathlib import Path
from typing import Any

from quantkit.errors import ModelError


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
