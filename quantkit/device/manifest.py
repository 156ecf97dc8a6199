"""manifest.json: what another program needs to launch the objects beside it."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.device.codeobject import Resources
from quantkit.device.geometry import geometry_of
from quantkit.device.ops import Argument, Variant
from quantkit.errors import ArtefactError

MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class ManifestArgument:
    """One kernel argument, in launch order."""

    name: str
    #: u8*, f16*, bf16*, f32* (device pointers) or i32 (by value)
    type: str
    #: over the other arguments' names; empty for numbers
    shape: str
    #: read or write
    access: str
    #: what a null pointer means; empty when it is not allowed
    null: str


@dataclass(frozen=True)
class ManifestKernel:
    """One object file with one kernel."""

    op: str
    variant: str
    #: macro name without QK_, lower case -> word chosen
    choices: dict[str, str]
    file: str
    symbol: str
    #: threads of a block, all along x
    block: int
    #: blocks along x, y, z: expressions over the argument names with + - * // and ceil_div(a, b)
    grid: tuple[str, str, str]
    args: tuple[ManifestArgument, ...]
    #: k must be a multiple of this
    k_multiple: int
    #: what else must hold, over the argument names; else the kernel reads out of bounds
    requires: tuple[str, ...]
    #: static; nothing dynamic is asked for
    lds_bytes: int
    vgprs: int
    sgprs: int
    spills: int
    scratch_bytes: int
    formula: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything in a folder of objects."""

    target: str
    compiler: str
    options: tuple[str, ...]
    kernels: tuple[ManifestKernel, ...]
    #: SHA-256 over the sources compiled; empty in folders that are older than this entry
    sources_sha256: str = ""
    quantkit_version: str = __version__
    manifest_version: int = MANIFEST_VERSION


def describe_kernel(variant: Variant, path: Path, resources: Resources) -> ManifestKernel:
    """Return the manifest entry of a variant compiled to ``path``."""
    geometry, io = geometry_of(variant), variant.word("QK_IO")
    pairs = zip(variant.op.axes, variant.words, strict=True)
    return ManifestKernel(
        op=variant.op.name,
        variant=variant.name,
        choices={axis.macro.removeprefix("QK_").lower(): word or "no" for axis, word in pairs},
        file=path.name,
        symbol=variant.symbol,
        block=geometry.block,
        grid=geometry.grid,
        args=tuple(_describe_argument(argument, io) for argument in variant.op.args),
        k_multiple=variant.op.k_multiple,
        requires=variant.op.requires,
        lds_bytes=resources.lds,
        vgprs=resources.vgprs,
        sgprs=resources.sgprs,
        spills=resources.spills,
        scratch_bytes=resources.scratch,
        formula=variant.op.formula,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write ``manifest.json`` into ``folder``."""
    text = json.dumps(asdict(manifest), indent=1)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read ``manifest.json`` of ``folder``.

    Raises:
        ArtefactError: it is missing, damaged, or of a newer version.
    """
    path = folder / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtefactError(
            f"{path}: cannot be read ({error.strerror}); pass a folder that "
            "'quantkit kernels build' wrote"
        ) from error
    except ValueError as error:
        raise ArtefactError(f"{path}: is not JSON ({error}); build the folder again") from error
    version = content.get("manifest_version") if isinstance(content, dict) else None
    if version != MANIFEST_VERSION:
        raise ArtefactError(
            f"{path}: has manifest_version {version!r}, this quantkit reads {MANIFEST_VERSION}"
        )
    return _parse(content, path)


def _parse(content: dict[str, Any], path: Path) -> Manifest:
    try:
        kernels = tuple(_parse_kernel(kernel) for kernel in content["kernels"])
        return Manifest(
            target=str(content["target"]),
            compiler=str(content["compiler"]),
            options=tuple(content["options"]),
            kernels=kernels,
            sources_sha256=str(content.get("sources_sha256", "")),
            quantkit_version=str(content["quantkit_version"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtefactError(
            f"{path}: an entry is missing or malformed ({error}); build the folder again"
        ) from error


def _parse_kernel(entry: dict[str, Any]) -> ManifestKernel:
    # Folders that are older than this entry say nothing.
    entry = {"requires": (), **entry}
    values = {field.name: entry[field.name] for field in fields(ManifestKernel)}
    x, y, z = values["grid"]
    values["grid"] = (x, y, z)
    values["requires"] = tuple(entry["requires"])
    values["args"] = tuple(ManifestArgument(**argument) for argument in entry["args"])
    return ManifestKernel(**values)


def _describe_argument(argument: Argument, io: str) -> ManifestArgument:
    element = io if argument.element == "io" else argument.element
    return ManifestArgument(
        name=argument.name,
        type=f"{element}*" if argument.is_pointer else element,
        shape=argument.shape,
        access="write" if argument.written else "read",
        null=argument.null,
    )
