"""From a kernel to the bytes of its object: built ahead of time, cached on disk, or compiled now.

Folders that ``quantkit kernels build`` wrote are looked at first: those of $QUANTKIT_OBJECTS, then
``objects`` in the cache folder, then those of the wheel quantkit-kernels. They match when target,
sources and checksum are right. Objects of a generic target (gfx12-generic) serve all of its
devices; where the driver refuses one, as HIP before 6.4 does, the folder is passed over and kernels
are compiled under the device's own name.
"""

import hashlib
import importlib.util
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quantkit.device import cache
from quantkit.device.aot.manifest import MANIFEST_NAME, ManifestKernel, read_manifest
from quantkit.device.archs import serves
from quantkit.device.gpu.driver import Driver
from quantkit.device.gpu.kernel import GeneratedKernel, Kernel
from quantkit.errors import ArtefactError, KernelError
from quantkit.resources import kernel_sources

_VARIABLE = "QUANTKIT_OBJECTS"
#: What the wheel installs: a folder for each target.
_PACKAGE = "quantkit_kernels"
_AGAIN = "build the folder again"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObjectFolder:
    """A folder of prebuilt objects, and whether it serves a target."""

    path: Path
    #: symbol -> its entry; empty when the folder does not match
    kernels: dict[str, ManifestKernel]
    #: why it does not match; empty when it does
    problem: str


@dataclass(frozen=True)
class KernelObject:
    """The object of one kernel."""

    content: bytes
    path: Path
    #: by ``kernels build``, not by the cache
    prebuilt: bool


#: Folders of generic objects that the driver has refused in this process.
_refused: dict[Path, ObjectFolder] = {}


def read_object(driver: Driver, target: str, kernel: Kernel) -> KernelObject:
    """Return the object of a kernel, compiled now if need be.

    Raises:
        CompilerMissingError: it is not prebuilt, and there is no compiler.
        KernelError: it does not compile; the text has the compiler's log and the command.
    """
    for folder in object_folders(target):
        if found := _prebuilt(folder, kernel.symbol):
            return found
    path = cached_path(driver, target, kernel)
    if (content := cache.read_whole(path)) is None:
        with cache.building(path) as stage:
            if stage:
                stage.write_bytes(_compile(driver, target, kernel))
        content = cache.read_whole(path)
    if content is None:
        raise KernelError(f"{path}: was deleted or changed while it was built; try again")
    return KernelObject(content, path, prebuilt=False)


def cached_path(driver: Driver, target: str, kernel: Kernel) -> Path:
    """Return where the cache keeps a kernel, built or not."""
    # The symbol stands for the macros.
    return cache_folder(driver, target) / f"{kernel.symbol}.{driver.suffix}"


def cache_folder(driver: Driver, target: str) -> Path:
    """Return the cache's folder for a target; its key is sources, options, target and compiler.

    Raises:
        CompilerMissingError: there is no compiler.
    """
    return _folder(driver.name, driver.compiler_identity, *driver.options(target))


def object_folders(target: str) -> tuple[ObjectFolder, ...]:
    """Return the folders of prebuilt objects of this machine, those for other targets aside."""
    text = os.environ.get(_VARIABLE, "")
    named = tuple(Path(part) for part in text.split(os.pathsep) if part.strip())
    usual = tuple(sorted((cache.cache_directory() / "objects").glob("*")))
    digest = cache.device_sources_digest()
    found = [_read_folder(path, target, digest) for path in named]
    found += [_read_private(path, target, digest) for path in usual]
    upgrade = "pip install --upgrade 'quantkit[radeon]'"
    found += [_read_folder(path, target, digest, upgrade) for path in _packaged()]
    return tuple(_refused.get(folder.path, folder) for folder in found if folder)


def pass_over(found: KernelObject, target: str, why: str) -> bool:
    """Pass over the folder of an object that the driver refuses, if it is a generic target's.

    Returns:
        False where the object was built for the very device, which is the user's to mend.
    """
    folder = found.path.parent
    built = read_manifest(folder).target if found.prebuilt else target
    if built == target:
        return False
    problem = f"{folder}: {why}; build it for {target} instead of {built}, or let it be compiled"
    _refused[folder] = ObjectFolder(folder, {}, problem)
    _logger.info("%s", problem)
    return True


def _packaged() -> tuple[Path, ...]:
    """Return the folders of the installed wheel; its files are as much ours as these sources."""
    spec = importlib.util.find_spec(_PACKAGE)
    roots = (spec and spec.submodule_search_locations) or ()
    return tuple(
        file.parent for root in roots for file in sorted(Path(root).glob(f"*/{MANIFEST_NAME}"))
    )


def _read_private(path: Path, target: str, sources: str) -> ObjectFolder | None:
    # Nobody named it, so what others put there must not run.
    for folder in (cache.cache_directory(), path.parent, path):
        if problem := cache.why_not_private(folder):
            return ObjectFolder(path, {}, f"{folder}: {problem}, so nothing in it is loaded")
    return _read_folder(path, target, sources)


@lru_cache(maxsize=64)
def _read_folder(path: Path, target: str, sources: str, cure: str = _AGAIN) -> ObjectFolder | None:
    try:
        manifest = read_manifest(path)
    except ArtefactError as error:
        return ObjectFolder(path, {}, str(error))
    if not serves(manifest.target, target):
        return None
    if manifest.sources_sha256 != sources:
        problem = f"{path / MANIFEST_NAME}: built from other sources; {cure}"
        return ObjectFolder(path, {}, problem)
    return ObjectFolder(path, {kernel.symbol: kernel for kernel in manifest.kernels}, "")


def _prebuilt(folder: ObjectFolder, symbol: str) -> KernelObject | None:
    kernel = folder.kernels.get(symbol)
    if kernel is None:
        return None
    path = folder.path / kernel.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise KernelError(f"{path}: cannot be read ({error}); {_AGAIN}") from error
    if hashlib.sha256(content).hexdigest() != kernel.sha256:
        raise KernelError(
            f"{path}: is not the file that its manifest describes (SHA-256 differs); {_AGAIN}"
        )
    return KernelObject(content, path, prebuilt=True)


def _compile(driver: Driver, target: str, kernel: Kernel) -> bytes:
    compiler, sources = driver.require_compiler(), kernel_sources()
    if isinstance(kernel, GeneratedKernel):
        text = kernel.text
    else:
        text = (sources / kernel.source).read_text(encoding="utf-8")
    options = [*driver.options(target), f"-I{sources / 'include'}", *kernel.defines]
    content, _ = compiler.compile(text, kernel.source, options)
    return content


@lru_cache(maxsize=16)
def _folder(*parts: str) -> Path:
    return cache.build_folder(*parts)
