"""Digests of what commands write: tensors by bytes, descriptions without versions and recipes.

Versions of files, of quantkit and of libraries may change, and so may what recipes are called.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Keys whose values say nothing of what was computed.
_ASIDE = {
    "format_version", "quantkit_version", "schema_version", "version", "versions", "recipe",
    "model", "calibration_digest", "sha256", "tensors", "_diffusers_version",
}  # fmt: skip


def of_files(*files: Path) -> str:
    """Return 16 hex digits over tensors and descriptions of safetensors files, as of one file."""
    total = hashlib.sha256()
    described: dict[str, Any] = {}
    tensors = []
    for file in files:
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        described |= _parsed(header.pop("__metadata__", {}))
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            head = f"{name} {entry['dtype']} {entry['shape']}".encode()
            tensors.append((head, content[start + first : start + last]))
    for head, data in sorted(tensors):
        total.update(head + b"\n" + data)
    total.update(_canonical(described))
    return total.hexdigest()[:16]


def of_json(values: Any) -> str:
    """Return 16 hex digits over JSON values."""
    return hashlib.sha256(_canonical(values)).hexdigest()[:16]


def of_folder(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (component, digest) of a written model, "" for one alone.

    A component is a folder with safetensors files; of its config.json, quantization counts.
    """
    for place in sorted({file.parent for file in folder.rglob("*.safetensors")}):
        files = sorted(place.glob("*.safetensors"))
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        said = of_json(config.get("quantization_config", {}))
        name = "" if place == folder else place.relative_to(folder).as_posix()
        yield name, f"{of_files(*files)}-{said}"


def of_file(path: Path) -> str:
    """Return 16 hex digits over a file: one of safetensors as ``of_files``, else all its bytes."""
    if path.read_bytes()[:4] == b"GGUF":
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return of_files(path)


def _parsed(metadata: dict[str, str]) -> dict[str, Any]:
    """Return the entries of a header, those that are JSON as values."""
    return {key: _value(text) for key, text in metadata.items()}


def _value(text: str) -> Any:
    if not text.startswith("{"):
        return text
    return {key: _value(v) if isinstance(v, str) else v for key, v in json.loads(text).items()}


def _canonical(values: Any) -> bytes:
    return json.dumps(_kept(values), sort_keys=True, separators=(",", ":")).encode()


def _kept(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _kept(value) for key, value in values.items() if key not in _ASIDE}
    return [_kept(value) for value in values] if isinstance(values, list | tuple) else values
