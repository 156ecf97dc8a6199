"""Gates on built objects: no spills, LDS within the limit, the matrix instructions meant.

AMD's also keep all lanes on where those stand, and wait where GFX12 needs it.
"""

import hashlib
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.device.aot.codeobject import (
    ObjectArgument,
    Resources,
    count_matrix_instructions,
    read_amd_kernels,
    read_nvidia_kernels,
)
from quantkit.device.aot.disassembly import Instruction, read_code
from quantkit.device.aot.hazards import unwaited_reads
from quantkit.device.aot.k_loop import Loop, find_loop, find_shortest_loop
from quantkit.device.aot.lane_masks import masked_matrix_instructions
from quantkit.device.aot.manifest import Manifest, ManifestArgument, ManifestKernel, read_manifest
from quantkit.device.aot.silicon import OF_ISSUE
from quantkit.device.aot.whole_block import WholeBlock, find_block
from quantkit.device.archs import Arch, Toolchain, find_arch
from quantkit.device.compilers import CLANG_MINIMUM, objdump
from quantkit.device.geometry import tile_named
from quantkit.errors import ArtefactError
from quantkit.storage.inputfile import read_file
from quantkit.storage.jsonfile import short

#: Bytes of an object; the largest has 0.2 MB.
_LARGEST = 64 * 2**20

_MATRIX_INSTRUCTION = re.compile(r"\bv_(?:s?wmmac?_\w+|dot4c?_i32_i8)")


@dataclass(frozen=True)
class Finding:
    """The resources of one object, and its faults."""

    kernel: ManifestKernel
    #: waves per SIMD that fit at once
    occupancy: int
    #: matrix instruction -> how often it stands in the code
    instructions: dict[str, int]
    #: the K loop; None for kernels without one, and where its target has no model
    loop: Loop | None
    #: of tiled products
    block: WholeBlock | None
    #: bytes of code
    code_bytes: int
    problems: tuple[str, ...]

    def share(self, k: int) -> float | None:
        """Return the share of the matrix peak that issue and LDS allow; None without a K loop.

        Args:
            k: of a tiled product; attention's share is its loop's.
        """
        if self.loop is None or self.block is None:
            return self.loop.share if self.loop else None
        return min(self.block.share(k), self.loop.lds_share)

    def expected(self, k: int) -> tuple[float, float] | None:
        """Return what silicon is expected to reach of the peak, pessimistic and optimistic."""
        share = self.share(k)
        return None if share is None else (share * OF_ISSUE[0], share * OF_ISSUE[1])


@dataclass(frozen=True)
class Report:
    """The findings of one folder."""

    manifest: Manifest
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """True when no object has a problem."""
        return not any(finding.problems for finding in self.findings)


def check_folder(folder: Path) -> Report:
    """Check every object of a folder that ``build`` wrote, reading the objects, not the manifest.

    Raises:
        ArtefactError: the manifest cannot be read.
        CompilerMissingError: llvm-objdump is missing (AMD targets).
    """
    manifest = read_manifest(folder)
    arch = find_arch(manifest.target)
    if arch.register_file is None:
        raise ArtefactError(f"{folder}: target {arch.name} has no objects to check")
    # Looked for before the first object, so that a missing tool is not reported once per kernel.
    tool = objdump() if arch.toolchain is Toolchain.CLANG else ""
    findings = (_check_object(folder / k.file, k, arch, tool) for k in manifest.kernels)
    return Report(manifest, tuple(findings))


def required_instruction(arch: Arch, kernel: ManifestKernel) -> str:
    """Return the matrix instruction that the kernel exists for; empty when it needs none."""
    template = dict(arch.matrix_instruction).get(kernel.op, "")
    codes = {"e4m3fn": "fp8", "e5m2": "bf8"}
    # Weights are the A operand, which the instruction names first.
    return template.format(
        w=codes.get(kernel.choices.get("w_format", ""), ""),
        x=codes.get(kernel.choices.get("x_format", ""), ""),
        io=kernel.choices.get("io", ""),
    )


def _check_object(path: Path, kernel: ManifestKernel, arch: Arch, tool: str) -> Finding:
    try:
        content = read_file(path, _LARGEST, error=ArtefactError)
        resources = _read_resources(content, kernel.symbol, arch)
        text = _disassemble(path, tool) if tool else ""
    except (ArtefactError, ValueError) as error:
        return Finding(kernel, 0, {}, None, None, 0, (f"{kernel.file} cannot be read: {error}",))
    code = read_code(text, kernel.symbol)
    counts = _count(text) if tool else count_matrix_instructions(content, kernel.symbol)
    problems = (
        *_manifest_problems(content, kernel, resources),
        *_resource_problems(resources, arch),
        *_argument_problems(resources.args, kernel.args),
        *_instruction_problems(counts, required_instruction(arch, kernel)),
        *_mask_problems(code),
        *(_wait_problems(code) if arch.hides_scalar_writes else ()),
    )
    assert arch.register_file
    occupancy = arch.register_file.occupancy(resources.vgprs, resources.lds, kernel.block)
    loop = _loop_of(code, kernel, arch)
    block = _block_of(code, loop, kernel)
    size = code[-1].address - code[0].address if code else 0
    return Finding(kernel, occupancy, dict(counts), loop, block, size, problems)


def _read_resources(content: bytes, symbol: str, arch: Arch) -> Resources:
    read = read_amd_kernels if arch.toolchain is Toolchain.CLANG else read_nvidia_kernels
    kernels = {kernel.symbol: kernel for kernel in read(content)}
    if symbol not in kernels:
        raise ValueError(f"it holds {', '.join(kernels) or 'no kernel'}, expected {symbol}")
    return kernels[symbol]


def _disassemble(path: Path, tool: str) -> str:
    result = subprocess.run([tool, "-d", path], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"{tool} failed on it ({short(Exception(result.stderr))})")
    return result.stdout


def _count(text: str) -> Counter[str]:
    return Counter(_MATRIX_INSTRUCTION.findall(text))


def _loop_of(code: Sequence[Instruction], kernel: ManifestKernel, arch: Arch) -> Loop | None:
    if not (code and arch.matrix_unit):
        return None
    if "head" in kernel.choices:
        return find_shortest_loop(code, arch.matrix_unit)
    tile = tile_named(kernel.choices.get("tile", ""))
    if tile is None:
        return None
    work = tile.m * tile.n * tile.k // (tile.block // 32)
    return find_loop(code, work, arch.matrix_unit)


def _block_of(
    code: Sequence[Instruction], loop: Loop | None, kernel: ManifestKernel
) -> WholeBlock | None:
    tile = tile_named(kernel.choices.get("tile", ""))
    return find_block(code, loop, tile.k) if loop and tile else None


def _manifest_problems(content: bytes, kernel: ManifestKernel, found: Resources) -> list[str]:
    if hashlib.sha256(content).hexdigest() != kernel.sha256:
        return ["the file is not the one that the manifest describes (SHA-256 differs)"]
    said = (kernel.vgprs, kernel.spills, kernel.lds_bytes)
    is_so = (found.vgprs, found.spills, found.lds)
    if said != is_so:
        return [f"manifest says VGPRs, spills, LDS {said}, the object {is_so}"]
    return []


def _resource_problems(found: Resources, arch: Arch) -> list[str]:
    problems = []
    if found.spills or found.scratch:
        problems.append(f"{found.spills} registers spilled, {found.scratch} bytes of scratch")
    if found.lds > arch.lds_limit:
        problems.append(f"{found.lds} bytes of LDS, {arch.name} allows {arch.lds_limit}")
    return problems


def _argument_problems(
    found: tuple[ObjectArgument, ...] | None, said: tuple[ManifestArgument, ...]
) -> list[str]:
    if found is None:
        return []
    hidden = [argument.kind for argument in found if argument.kind.startswith("hidden_")]
    if hidden:
        return [f"hidden arguments {', '.join(hidden)}; kernels take what the manifest lists"]
    kinds = [(argument.kind, argument.size) for argument in found]
    pointers = [argument.type.endswith("*") for argument in said]
    expected = [("global_buffer", 8) if pointer else ("by_value", 4) for pointer in pointers]
    return [] if kinds == expected else [f"arguments are {kinds}, the manifest lists {expected}"]


def _instruction_problems(counts: Counter[str], required: str) -> list[str]:
    if not required or counts[required]:
        return []
    instead = ", ".join(counts) or "none"
    return [f"no {required} in the code (matrix instructions: {instead})"]


def _mask_problems(code: Sequence[Instruction]) -> list[str]:
    masked = masked_matrix_instructions(code)
    if not masked:
        return []
    total = sum(instruction.kind == "matrix" for instruction in code)
    return [
        (
            f"{len(masked)} of {total} matrix instructions may run with lanes off, the first at "
            f"{masked[0].address:#x}; they want all"
        )
    ]


def _wait_problems(code: Sequence[Instruction]) -> list[str]:
    stale = unwaited_reads(code)
    if not stale:
        return []
    return [
        (
            f"{len(stale)} scalar registers read without the wait that GFX12 needs, the first at "
            f"{stale[0].address:#x}; compile with clang >= {CLANG_MINIMUM}"
        )
    ]
