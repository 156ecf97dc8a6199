"""manifest.json: the data that another program needs to launch the objects next to it."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from quantkit._version import __version__
from quantkit.device.aot.codeobject import Resources
from quantkit.device.geometry import tile_named
from quantkit.device.ops.op import Argument, Variant
from quantkit.errors import ArtefactError
from quantkit.storage.jsonfile import as_type, parsing, read_json

MANIFEST_VERSION = 1
#: Threads of a block on every GPU.
MAX_BLOCK = 1024
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
    #: static; nothing dynamic is asked for
    lds_bytes: int
    vgprs: int
    sgprs: int
    spills: int
    scratch_bytes: int
    formula: str
    sha256: str
    #: what else must hold, over the argument names; else the kernel reads out of bounds. Empty in
    #: folders that are older than this entry
    requires: tuple[str, ...] = ()


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
    geometry, io = variant.geometry, variant.word("QK_IO")
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
    cure = "pass a folder that 'quantkit kernels build' wrote"
    if not os.path.lexists(path):
        raise ArtefactError(f"{path}: missing; {cure}")
    content = read_json(path, error=ArtefactError, cure=cure)
    version = content.get("manifest_version")
    if version != MANIFEST_VERSION:
        raise ArtefactError(
            f"{path}: has manifest_version {version!r:.40}, this quantkit reads {MANIFEST_VERSION}"
        )
    with parsing(path, cure="build the folder again"):
        manifest = as_type(Manifest, content)
        for kernel in manifest.kernels:
            _check(kernel)
        return manifest


def _check(kernel: ManifestKernel) -> None:
    if Path(kernel.file).name != kernel.file:
        raise ValueError(f"file {kernel.file!r:.80}, which is not in the folder")
    if not 0 < kernel.block <= MAX_BLOCK:
        raise ValueError(f"{kernel.file}: block {kernel.block!s:.20}, expected 1 to {MAX_BLOCK}")
    tile = kernel.choices.get("tile")
    if tile is not None and tile_named(tile) is None:
        raise ValueError(f"{kernel.file}: tile {tile!r:.40}, which is not on the menu")


def _describe_argument(argument: Argument, io: str) -> ManifestArgument:
    element = io if argument.element == "io" else argument.element
    return ManifestArgument(
        name=argument.name,
        type=f"{element}*" if argument.is_pointer else element,
        shape=argument.shape,
        access="write" if argument.written else "read",
        null=argument.null,
    )
