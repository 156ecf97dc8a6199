"""The targets of the kernels: how each is compiled, and the limits that its objects must keep."""

from dataclasses import dataclass, replace
from enum import Enum

from quantkit.device.tile_speeds import (
    GFX10_MATRIX,
    GFX10_TILES,
    GFX11_MATRIX,
    GFX11_TILES,
    GFX12_MATRIX,
    GFX12_TILES,
    SM89_MATRIX,
    SM89_TILES,
    TileSpeed,
    without_first,
)
from quantkit.errors import KernelError


class Toolchain(Enum):
    """The compiler of a target."""

    #: clang >= 22, ahead of time, to a linked code object
    CLANG = "clang"
    #: NVRTC from the wheels that torch depends on, to a cubin; needs no GPU
    NVRTC = "nvrtc"
    #: the system's C++ compiler, at first use, to a shared library
    HOST = "host"


class OneLaunch(Enum):
    """The operation that makes all codes of an attention call in one launch."""

    #: three projections of an input, which end in them
    PROJECTIONS = "projections"
    #: a pass behind the projections, where 16 bit would take one too: norms, rotation, two streams
    STREAMS = "streams"


@dataclass(frozen=True)
class RegisterFile:
    """Limits on the waves that a SIMD holds at once."""

    #: vector registers per lane in one SIMD
    registers: int
    #: allocation granule
    granule: int
    #: hardware's most waves per SIMD
    waves: int
    #: SIMDs that share ``lds`` bytes
    simds: int
    lds: int

    def occupancy(self, registers: int, lds: int, block: int) -> int:
        """Return the waves per SIMD that fit, for a kernel of ``block`` threads."""
        granules = max(1, -(-registers // self.granule))
        by_registers = min(self.waves, self.registers // (granules * self.granule))
        per_block = -(-block // 32)
        blocks = by_registers * self.simds // per_block
        if lds:
            blocks = min(blocks, self.lds // lds)
        return min(by_registers, blocks * per_block // self.simds)


@dataclass(frozen=True)
class MatrixUnit:
    """Rates that bound a loop of matrix instructions."""

    #: cycles that one instruction on 8-bit codes keeps the matrix unit of a SIMD
    cycles: int
    #: and one on 16-bit numbers
    half_cycles: int
    #: SIMDs of a compute unit, which share its LDS
    simds: int
    #: bytes per cycle that LDS moves for a compute unit
    lds_rate: float

    def busy(self, mnemonic: str) -> int:
        """Return the cycles of a matrix instruction."""
        return self.half_cycles if mnemonic.endswith("f16") else self.cycles


@dataclass(frozen=True)
class Arch:
    """One target."""

    name: str
    toolchain: Toolchain
    description: str
    #: None for what is compiled at first use alone
    register_file: RegisterFile | None = None
    #: operation -> the matrix instruction without which its object is not what it should be
    matrix_instruction: tuple[tuple[str, str], ...] = ()
    #: None where no model of its loop is known
    matrix_unit: MatrixUnit | None = None
    #: a scalar register's new value can stay hidden until s_wait_alu (device/hazards.py)
    hides_scalar_writes: bool = False
    #: static LDS a workgroup may have
    lds_limit: int = 64 * 1024
    #: devices that run its kernels, by the names that torch gives: gcnArchName, or sm_ and the
    #: compute capability
    devices: tuple[str, ...] = ()
    #: compute units in one of torch's multiprocessors
    units: int = 1
    #: operation -> throughput of one compute unit per tile of the menu; only the ratios matter.
    #: Tiles beyond the last are not compiled for it, nor those of 0, which would spill registers
    tile_speed: TileSpeed = ()
    #: families of operations whose kernels here are no variants of the menu
    own: tuple[str, ...] = ()
    #: family of operations -> why torch computes it here, unless its kernels are asked for
    on_request: tuple[tuple[str, str], ...] = ()
    #: where codes are of one launch, columns of the widest head, and from how many keys on
    #: attention is a kernel's after all
    from_keys: tuple[tuple[OneLaunch, tuple[tuple[int, int], ...]], ...] = ()
    #: operations that end a product in codes, and take longer than it and a pass behind it: with
    #: accurate sums
    slow_ends: tuple[str, ...] = ()
    #: family of operations, or a word of their names -> why these have no kernels here
    without: tuple[tuple[str, str], ...] = ()
    #: the fastest formats here, and what stays in 16 bit, for people
    formats: str = ""

    @property
    def ahead_of_time(self) -> bool:
        """True when ``kernels build`` makes objects for it."""
        return self.register_file is not None

    def has_tile(self, op: str, tile: str) -> bool:
        """True when the menu has ``tile`` (``t3``) here, and for operations without tiles."""
        return not tile or any(dict(self.tile_speed).get(op, ())[int(tile[1:]) :][:1])

    def why_on_request(self, family: str, made: tuple[OneLaunch, int, int] | None = None) -> str:
        """Return why a family's kernels run only where asked for; empty when they always do.

        Args:
            family: of operations.
            made: what makes the codes of attention, columns of a head, and keys.
        """
        least = self.least_keys(*made[:2]) if made else None
        if made and least is not None and made[2] >= least:
            return ""
        return dict(self.on_request).get(family, "")

    def least_keys(self, launch: OneLaunch, columns: int) -> int | None:
        """Return the entry of ``from_keys`` for heads of so many columns."""
        found = dict(self.from_keys).get(launch, ())
        return next((keys for widest, keys in found if columns <= widest), None)

    def why_without(self, family: str, op: str = "") -> str:
        """Return why a family, or one operation of it, has no kernels here; empty when it has."""
        words = {family, *op.split("_")}
        return next((why for name, why in self.without if name in words), "")

    def target_for(self, device: str) -> str:
        """Return what the compiler is told for ``device``: itself, unless the row is for one only.

        A cubin runs within one generation alone, so NVIDIA's rows are compiled anew for each.
        """
        family = self.toolchain is Toolchain.NVRTC and not self.name.endswith("a")
        return device if family else self.name


# Sources: RDNA3 and RDNA4 ISA references; occupancies agree with clang's
# -Rpass-analysis=kernel-resource-usage (96 registers: 16 waves, 168: 9, 256: 5). Small chips and
# APUs have two thirds of the registers (96 registers: 10 waves, 168: 5, 256: 4).
_RDNA = RegisterFile(registers=1536, granule=24, waves=16, simds=2, lds=64 * 1024)
_RDNA_SMALL = RegisterFile(registers=1024, granule=16, waves=16, simds=2, lds=64 * 1024)
# Source: CUDA programming guide, compute capability 8.9: 64 K registers and 48 warps per SM,
# 100 KB of shared memory, of which 48 KB static.
_ADA = RegisterFile(registers=512, granule=8, waves=12, simds=4, lds=100 * 1024)

# Sources: cycles from AMD's matrix instruction calculator (fp8 16x16x16 and its sparse 16x16x32,
# f16 16x16x16); LDS read at 14.6 TB/s by 64 CUs of an RX 9070 XT at 2.9 GHz, of 128 bytes nominal,
# as public benchmarks measured it. RDNA3 is taken to have the same LDS.
_RDNA4_MATRIX = MatrixUnit(cycles=8, half_cycles=16, simds=2, lds_rate=79.0)
_RDNA3_MATRIX = MatrixUnit(cycles=32, half_cycles=32, simds=2, lds_rate=79.0)
# dot4 in each lane is one vector instruction like others; the same LDS.
_RDNA2_DOT = MatrixUnit(cycles=1, half_cycles=1, simds=2, lds_rate=79.0)


# int8 attention took 1.05 times as long as torch's on a 7900 XTX (comfy-kitchen, issue 104).
_GFX11_WITHOUT = tuple(
    (family, "RDNA3 has no FP8 matrix instructions, and torch's attention is as fast as int8")
    for family in ("attention", "attention_codes", "attention_f16")
)
_GFX10_WITHOUT = (
    *(
        (name, "RDNA2 multiplies codes by dot4 of int8: int8 and int4 have kernels")
        for name in ("fp8", "attention", "attention_codes", "attention_f16")
    ),
    ("gemm_w16", "RDNA2 has no matrix instructions for 16-bit inputs, so torch multiplies them"),
)
_NVIDIA_WITHOUT = (
    ("attention_f16", "probabilities and values in 16 bit have kernels on RDNA4 and CPUs alone"),
)
# The kernels of attention on int8 codes have probabilities in FP8.
_SM80_WITHOUT = tuple(
    (name, "Ampere has no FP8 instructions: int8 and int4 have kernels")
    for name in ("fp8", "attention", "attention_codes", "attention_f16")
)


# What Radeons of a generation have in common.
_RDNA4 = Arch(
    "",
    Toolchain.CLANG,
    "",
    matrix_instruction=GFX12_MATRIX,
    matrix_unit=_RDNA4_MATRIX,
    hides_scalar_writes=True,
    # torch counts work group processors, of two compute units each, as multiprocessors.
    units=2,
    tile_speed=GFX12_TILES,
    formats="INT8 and FP8 are equally fast, and faster with 2:4; attention has kernels in 8 bits",
)
_RDNA3 = replace(
    _RDNA4,
    matrix_instruction=GFX11_MATRIX,
    matrix_unit=_RDNA3_MATRIX,
    hides_scalar_writes=False,
    tile_speed=GFX11_TILES,
    without=_GFX11_WITHOUT,
    formats="INT8 is the fastest, at the matrix rate of 16 bit, then INT4; FP8 is widened to 16 "
    "bit, 2:4 saves bytes alone, and attention stays in 16 bit",
)
_RDNA2 = replace(
    _RDNA3,
    matrix_instruction=GFX10_MATRIX,
    matrix_unit=_RDNA2_DOT,
    tile_speed=GFX10_TILES,
    without=_GFX10_WITHOUT,
    formats="INT8 is the fastest, by dot products of four, then INT4, not measured; 2:4 saves "
    "bytes and takes longer, FP8 is torch's, from dequantized weights, and attention stays in "
    "16 bit",
)
# 128x128 of widened FP8 codes and 2:4 weights takes 256 registers, and spills five, where the
# compiler may not use more.
_RDNA3_SMALL = replace(_RDNA3, tile_speed=without_first(GFX11_TILES, "conv_fp8_sparse"))

#: Target, generation, register file and cards. Objects of the generic ones run on all of the
#: generation; what is compiled at first use has a device's own name, which older drivers load, too.
_RADEONS = (
    ("gfx1200", _RDNA4, _RDNA, "RDNA4, RX 9060 series"),
    ("gfx1201", _RDNA4, _RDNA, "RDNA4, RX 9070 series, R9700"),
    ("gfx1100", _RDNA3, _RDNA, "RDNA3, RX 7900 series"),
    ("gfx1101", _RDNA3, _RDNA, "RDNA3, RX 7800 XT, RX 7700 series"),
    ("gfx1102", _RDNA3_SMALL, _RDNA_SMALL, "RDNA3, RX 7600 series"),
    ("gfx1103", _RDNA3_SMALL, _RDNA_SMALL, "RDNA3, Radeon 780M, 760M, 740M"),
    ("gfx1150", _RDNA3_SMALL, _RDNA_SMALL, "RDNA3.5, Radeon 890M, 880M"),
    ("gfx1151", _RDNA3, _RDNA, "RDNA3.5, Radeon 8060S, 8050S, 8040S"),
    ("gfx1152", _RDNA3_SMALL, _RDNA_SMALL, "RDNA3.5, Radeon 860M, 840M"),
    ("gfx1153", _RDNA3_SMALL, _RDNA_SMALL, "RDNA3.5, Radeon 840M, 820M"),
    ("gfx1030", _RDNA2, _RDNA_SMALL, "RDNA2, RX 6800 and 6900 series"),
    ("gfx1031", _RDNA2, _RDNA_SMALL, "RDNA2, RX 6700 series"),
    ("gfx1032", _RDNA2, _RDNA_SMALL, "RDNA2, RX 6600 series"),
    ("gfx1033", _RDNA2, _RDNA_SMALL, "RDNA2, Steam Deck"),
    ("gfx1034", _RDNA2, _RDNA_SMALL, "RDNA2, RX 6500 XT, RX 6400"),
    ("gfx1035", _RDNA2, _RDNA_SMALL, "RDNA2, Radeon 680M, 660M"),
    ("gfx1036", _RDNA2, _RDNA_SMALL, "RDNA2, graphics of Ryzen 7000 and 9000 for desktops"),
    ("gfx12-generic", _RDNA4, _RDNA, "all RDNA4 cards, by objects built ahead of time"),
    ("gfx11-generic", _RDNA3_SMALL, _RDNA_SMALL, "all RDNA3 cards, by objects built ahead of time"),
    ("gfx10-3-generic", _RDNA2, _RDNA_SMALL, "all RDNA2 cards, by objects built ahead of time"),
)


def _devices_of(target: str) -> tuple[str, ...]:
    """Return the devices that run the objects of a Radeon's target."""
    generation = target.removesuffix("-generic").replace("-", "")
    return tuple(n for n, *_ in _RADEONS if n.startswith(generation) and not n.endswith("generic"))


# docs/guides/attention.md has the figures.
_HOPPER_ON_REQUEST = (
    ("attention", "on Hopper making codes takes longer than the kernel saves, so torch computes"),
)
# Against cuDNN's attention in float16. Projections: measured with it (docs/measure_projections.py).
# Streams: the sum of launches that were timed alone, with 4250 and 4608 keys; fewer were not.
_HOPPER_FROM_KEYS = (
    (OneLaunch.PROJECTIONS, ((128, 512),)),
    (OneLaunch.STREAMS, ((128, 4096),)),
)
# Tiles of its accurate sums are shared by warpgroups, and end at once: the first product of FLUX's
# network took 742 us with its codes, and both apart 690. int8: SD3's step took 31.98 ms with codes,
# and 31.11 with a product and a row kernel (H200, 20 steps in a row).
_HOPPER_SLOW_ENDS = ("project_gelu_fp8", "project_gelu_int8")
_SM89_ON_REQUEST = (("attention", "its kernel has not run on such a card yet, so torch computes"),)

#: The first row that lists a device runs it.
ARCHS: dict[str, Arch] = {
    a.name: a
    for a in (
        *(
            replace(
                generation,
                name=name,
                description=cards,
                register_file=registers,
                devices=_devices_of(name),
            )
            for name, generation, registers, cards in _RADEONS
        ),
        # GEMMs run as hopper.py says; these tiles where the driver has no tensor maps. Not built
        # ahead of time: mma.sync on FP8, emulated, spills, and wgmma's kernels need more than a
        # manifest says.
        Arch(
            "sm_90a",
            Toolchain.NVRTC,
            "Hopper, H100 and H200: GEMMs and attention with wgmma, compiled at first use",
            devices=("sm_90",),
            tile_speed=SM89_TILES,
            own=("attention", "attention_codes"),
            on_request=_HOPPER_ON_REQUEST,
            from_keys=_HOPPER_FROM_KEYS,
            slow_ends=_HOPPER_SLOW_ENDS,
            without=_NVIDIA_WITHOUT,
            formats="INT8 and FP8 are equally fast, faster with 2:4; attention stays in 16 bit "
            "but for many keys",
        ),
        Arch(
            "sm_89",
            Toolchain.NVRTC,
            "Ada, RTX 40 series; later NVIDIA cards take its instructions too",
            _ADA,
            SM89_MATRIX,
            lds_limit=48 * 1024,
            devices=("sm_89", "sm_100", "sm_103", "sm_120", "sm_121"),
            tile_speed=SM89_TILES,
            on_request=_SM89_ON_REQUEST,
            without=_NVIDIA_WITHOUT,
            formats="INT8 and FP8 have one rate, 2:4 a higher one, not measured; attention stays "
            "in 16 bit",
        ),
        Arch(
            "sm_80",
            Toolchain.NVRTC,
            "Ampere, A100 and RTX 30 series: what multiplies int8, and weights of 16-bit inputs",
            # That of compute capability 8.6, which most of these cards have.
            _ADA,
            SM89_MATRIX,
            lds_limit=48 * 1024,
            devices=("sm_80", "sm_86", "sm_87"),
            tile_speed=SM89_TILES,
            without=_SM80_WITHOUT,
            formats="INT8 is the fastest, then INT4, not measured; FP8 is torch's, from "
            "dequantized weights, and attention stays in 16 bit",
        ),
        Arch("host", Toolchain.HOST, "this CPU, lane by lane"),
    )
}

#: Start of a device's name -> why it has no kernels.
_NO_KERNELS = (
    ("gfx10", "RDNA1 (RX 5000 series) has no matrix instructions, nor has all of it dot4"),
    ("gfx9", "Instinct and Vega run waves of 64 lanes, and kernels take 32"),
    ("sm_7", "Volta and Turing lack what the kernels copy with (cp.async)"),
)

#: Whose fragments the host's products have; the index is QK_HOST_LAYOUT. gfx10: of int8 alone.
HOST_LAYOUTS = ("gfx12", "gfx11", "sm89", "gfx10")


def find_arch(name: str) -> Arch:
    """Return the target called ``name``.

    Raises:
        KernelError: there is none.
    """
    if name not in ARCHS:
        raise KernelError(f"target {name!r}: unknown, expected one of {', '.join(ARCHS)}")
    return ARCHS[name]


def arch_of_device(device: str) -> Arch:
    """Return the target whose kernels run on ``device`` (``gfx1201``, ``sm_90``).

    Raises:
        KernelError: none does.
    """
    for arch in ARCHS.values():
        if device in arch.devices:
            return arch
    known = ", ".join(dict.fromkeys(name for arch in ARCHS.values() for name in arch.devices))
    why = next((why for start, why in _NO_KERNELS if device.startswith(start)), "")
    raise KernelError(
        f"device {device}: no kernels for it, {why or f'expected one of {known}'}; torch computes, "
        "from dequantized weights"
    )


def serves(built: str, target: str) -> bool:
    """Return whether objects built for one target run where another is compiled for."""
    generic = ARCHS[built].devices if built.endswith("-generic") and built in ARCHS else ()
    return built == target or target in generic
