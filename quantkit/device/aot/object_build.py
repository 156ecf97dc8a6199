"""Ahead-of-time builds: linked code objects for AMD, cubins for NVIDIA, and their manifest."""

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from quantkit.device.aot.codeobject import Resources, read_amd_kernels, read_nvidia_kernels
from quantkit.device.aot.manifest import Manifest, ManifestKernel, describe_kernel, write_manifest
from quantkit.device.archs import Arch, Toolchain, find_arch
from quantkit.device.cache import device_sources_digest
from quantkit.device.compilers import Compiler, clang
from quantkit.device.gpu import nvrtc
from quantkit.device.ops.op import Variant
from quantkit.errors import KernelError
from quantkit.progress import Progress, silent
from quantkit.resources import kernel_sources
from quantkit.storage.files import staged_directory
from quantkit.storage.system import cores

_CLANG_OPTIONS = (
    "-x",
    "hip",
    "--cuda-device-only",
    "-nogpulib",
    "-nogpuinc",
    "--no-gpu-bundle-output",
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    # One workgroup stays on one compute unit, as hipRTC compiles by default.
    "-mcumode",
    # Else a symbol is named after the path of the output, and two builds differ.
    "-fuse-cuid=none",
)


@dataclass(frozen=True)
class _Builder:
    """The builder of one target's variants."""

    compiler: str
    options: tuple[str, ...]
    suffix: str
    compile: Callable[[Variant, Path], None]
    read: Callable[[bytes], tuple[Resources, ...]]


def build(
    target: str,
    output: Path,
    variants: Sequence[Variant],
    *,
    compiler: str | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Manifest:
    """Compile ``variants`` for ``target`` and write the objects and ``manifest.json``.

    Args:
        output: the folder to make; complete or absent, never half written.
        compiler: clang to use for AMD targets; None looks for it.

    Returns:
        the manifest.

    Raises:
        CompilerMissingError: no clang >= 22, or no NVRTC.
        KernelError: an unknown target, the host, or a source that does not compile.
        OutputError: ``output`` exists without ``force``, or cannot be written.
    """
    arch = find_arch(target)
    builder = _builder_of(arch, compiler)
    with staged_directory(output, kind="kernel folder", force=force) as stage:
        kernels = _compile_all(builder, variants, stage, f"compile {target}", progress)
        digest = device_sources_digest()
        manifest = Manifest(target, builder.compiler, builder.options, kernels, digest)
        write_manifest(manifest, stage)
    return manifest


def clang_command(compiler: Compiler, arch: Arch, variant: Variant, output: Path) -> list[str]:
    """Return the command that compiles and links a variant for an AMD target."""
    sources = kernel_sources()
    return [
        *compiler.command,
        *_clang_options(arch),
        "-I",
        str(sources / "include"),
        *variant.defines,
        "-o",
        str(output),
        str(sources / variant.op.source),
    ]


def _compile_all(
    builder: _Builder, variants: Sequence[Variant], stage: Path, step: str, progress: Progress
) -> tuple[ManifestKernel, ...]:
    def compile_one(variant: Variant) -> ManifestKernel:
        path = stage / f"{variant.symbol}.{builder.suffix}"
        builder.compile(variant, path)
        return describe_kernel(variant, path, _resources(builder, path, variant.symbol))

    with ThreadPoolExecutor(max_workers=cores()) as pool:
        futures = [pool.submit(compile_one, variant) for variant in variants]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                progress(step, done, len(futures))
        finally:
            pool.shutdown(cancel_futures=True)
    return tuple(future.result() for future in futures)


def _resources(builder: _Builder, path: Path, symbol: str) -> Resources:
    kernels = builder.read(path.read_bytes())
    found = next((kernel for kernel in kernels if kernel.symbol == symbol), None)
    if found is None:
        names = ", ".join(kernel.symbol for kernel in kernels) or "none"
        raise KernelError(f"{path.name}: holds kernels {names}, expected {symbol}")
    return found


def _builder_of(arch: Arch, compiler: str | None) -> _Builder:
    if not arch.ahead_of_time:
        raise KernelError(
            f"target {arch.name}: is compiled at first use and cached; expected one that is built "
            "ahead of time"
        )
    if arch.toolchain is Toolchain.CLANG:
        return _clang_builder(arch, clang(compiler))
    return _nvrtc_builder(arch)


def _clang_builder(arch: Arch, compiler: Compiler) -> _Builder:
    def compile_variant(variant: Variant, output: Path) -> None:
        command = clang_command(compiler, arch, variant, output)
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise KernelError(
                f"{variant.symbol} for {arch.name}: clang failed with status {result.returncode}\n"
                f"{' '.join(command)}\n{result.stderr.strip()}"
            )

    options = _clang_options(arch)
    return _Builder(compiler.version, options, "co", compile_variant, read_amd_kernels)


def _clang_options(arch: Arch) -> tuple[str, ...]:
    return (*_CLANG_OPTIONS, f"--offload-arch={arch.name}")


def _nvrtc_builder(arch: Arch) -> _Builder:
    library, sources = nvrtc.load_nvrtc(), kernel_sources()
    options = nvrtc.nvrtc_options(arch.name)

    def compile_variant(variant: Variant, output: Path) -> None:
        text = (sources / variant.op.source).read_text(encoding="utf-8")
        flags = [*options, f"-I{sources / 'include'}", *variant.defines]
        cubin, _ = library.compile(text, variant.op.source, flags)
        output.write_bytes(cubin)

    version = f"NVRTC {library.version}"
    return _Builder(version, options, "cubin", compile_variant, read_nvidia_kernels)
