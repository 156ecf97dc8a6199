"""The cards that people own: what `doctor` and `recipes` say of each, and the objects for them."""

import json
import struct
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from quantkit.cli.doctor_command import doctor
from quantkit.cli.recipes_command import recipes
from quantkit.device import compilers
from quantkit.device.aot import object_build
from quantkit.device.aot.check import check_folder
from quantkit.device.aot.object_build import build
from quantkit.device.archs import ARCHS, Toolchain, arch_of_device
from quantkit.device.gpu import objects, selftest
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS, default_variants
from quantkit.device.tile_choice import choose_tile, variants_for
from quantkit.errors import KernelError
from tests.support.kernel_cases import need
from tests.support.standin_calls import SMALL, prebuilt, quantize

RADEONS = [a for a in ARCHS.values() if a.toolchain is Toolchain.CLANG]
#: gcnArchName -> a card of it, from public lists (docs.kernel.org, TheRock), and its generation.
CARDS = {
    "gfx1200": ("AMD Radeon RX 9060 XT", 4),
    "gfx1201": ("AMD Radeon RX 9070 XT", 4),
    "gfx1100": ("AMD Radeon RX 7900 XTX", 3),
    "gfx1101": ("AMD Radeon RX 7800 XT", 3),
    "gfx1102": ("AMD Radeon RX 7600", 3),
    "gfx1103": ("AMD Radeon 780M Graphics", 3),
    "gfx1150": ("AMD Radeon 890M Graphics", 3),
    "gfx1151": ("AMD Radeon 8060S Graphics", 3),
    "gfx1152": ("AMD Radeon 860M Graphics", 3),
    "gfx1153": ("AMD Radeon 820M Graphics", 3),
    "gfx1030": ("AMD Radeon RX 6800 XT", 2),
    "gfx1031": ("AMD Radeon RX 6700 XT", 2),
    "gfx1032": ("AMD Radeon RX 6600", 2),
    "gfx1033": ("AMD Custom GPU 0405", 2),
    "gfx1034": ("AMD Radeon RX 6500 XT", 2),
    "gfx1035": ("AMD Radeon 680M", 2),
    "gfx1036": ("AMD Radeon Graphics", 2),
}


def plug(monkeypatch, card, architecture):
    """Make torch see one card of AMD's."""
    seen = SimpleNamespace(name=card, gcnArchName=architecture, total_memory=16 * 2**30)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    selftest.forget()
    monkeypatch.setattr(selftest, "_states", {})


def told(command, *arguments):
    done = CliRunner().invoke(command, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("architecture", CARDS)
def test_doctor_and_recipes_know_the_card(hip, monkeypatch, pipeline_dir, architecture):
    card, generation = CARDS[architecture]
    device = hip.device(architecture)
    tested = selftest._OPS if generation > 2 else selftest._OPS_WITHOUT_FP8
    ops = [OPS[name] for name in tested]
    every = [Variant(op, (*selftest._words(op), f"t{i}")) for op in ops for i in range(5)]
    hip.provide(*variants_for(device.arch, every))
    hip.set(TARGET=architecture)  # refuses objects for another name, as the driver does
    plug(monkeypatch, card, architecture)
    monkeypatch.setattr(selftest, "find_device", lambda index: hip.device(architecture))
    text = told(doctor)
    assert text.startswith(f"cuda:0: {card} runs quantkit's kernels\n")
    assert f"compiled for {architecture}; HIP" in text
    found = {o["op"]: o for o in json.loads(told(doctor, "--json"))["operations"][len(OPS) :]}
    kernels = {name for name, o in found.items() if o["backend"] == "gpu"}
    assert {"gemm_int8", "gemm_int8_sparse", "gemm_w4a8", "conv_int8", "geglu_int8"} <= kernels
    attention = {name for name, op in OPS.items() if op.family.startswith("attention")}
    fp8 = {name for name in OPS if "fp8" in name}
    without = {4: set(), 3: attention, 2: attention | fp8 | {"gemm_w16"}}[generation]
    assert kernels == OPS.keys() - without
    best = {
        2: "INT8 is the fastest, by dot products of four, then INT4",
        3: "INT8 is the fastest, at the matrix rate of 16 bit, then INT4; FP8 is widened",
        4: "INT8 and FP8 are e",
    }
    stays = {2: "FP8 is torch's, from dequantized weights, and attention stays in 16 bit"}
    stays |= {3: "attention stays in 16 bit", 4: "attention has kernels in 8 bits"}
    for answer in (text, told(recipes, pipeline_dir)):
        assert best[generation] in answer
        assert stays[generation] in answer
    assert f"cuda:0: {card}, {architecture}: INT8" in told(recipes, pipeline_dir)


@pytest.mark.parametrize(
    ("card", "architecture", "why"),
    [
        ("AMD Radeon RX 5700 XT", "gfx1010", r"RDNA1 \(RX 5000 series\) has no matrix instr"),
        ("AMD Radeon RX 5500 XT", "gfx1012", r"RDNA1 \(RX 5000 series\) has no matrix instr"),
        ("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", "Instinct and Vega run waves of 64 lan"),
        ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", "Instinct and Vega run waves of 64 lan"),
        ("AMD Radeon VII", "gfx906", "Instinct and Vega run waves of 64 lanes, and kernels take"),
        ("A card of tomorrow", "gfx1310", "expected one of gfx1200, gfx1201, gfx1100, gfx1101, g"),
    ],
)
def test_cards_without_kernels_are_told_why(monkeypatch, pipeline_dir, card, architecture, why):
    plug(monkeypatch, card, architecture)
    name = architecture.partition(":")[0]
    with pytest.raises(KernelError, match=rf"{name}: no kernels for it, {why}.*; torch computes"):
        arch_of_device(name)
    text = told(doctor)
    assert text.startswith(f"cuda:0: {card} runs no kernels: device {name}: no kernels for it, ")
    assert "; torch computes, from dequantized weights" in text.splitlines()[0]
    assert "formats:" not in text
    assert f"cuda:0: {card}, {name}: device {name}: no kernels" in told(recipes, pipeline_dir)


def test_older_cards_of_nvidia_are_told_why():
    with pytest.raises(KernelError, match="device sm_75: no kernels for it, Volta and Turing lack"):
        arch_of_device("sm_75")


# ------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("registers", "waves"),
    # Measured: clang 22 -Rpass-analysis=kernel-resource-usage, gfx1102.
    [(36, 16), (71, 12), (80, 12), (94, 10), (97, 9), (138, 7), (171, 5), (211, 4), (256, 4)],
)
def test_small_register_files_agree_with_clang(registers, waves):
    assert ARCHS["gfx1102"].register_file.occupancy(registers, 0, 32) == waves


@pytest.mark.parametrize("op", ["conv_fp8_sparse", "conv_fp8_sparse_residual"])
def test_tiles_that_spill_are_left_out(op):
    """Where the compiler may use 1024 registers a lane; found by compiling all of them."""
    small = {a.name for a in RADEONS if a.register_file.registers == 1024}
    rdna2 = {"gfx10-3-generic", *ARCHS["gfx10-3-generic"].devices}
    small -= rdna2
    assert small == {"gfx1102", "gfx1103", "gfx1150", "gfx1152", "gfx1153", "gfx11-generic"}
    for arch in (a for a in RADEONS if a.name not in rdna2):
        kept = {
            v.word("QK_TILE") for v in variants_for(arch, default_variants()) if v.op.name == op
        }
        assert ("t0" in kept) is (arch.name not in small)
        assert {"t1", "t2"} <= kept
        speed = dict(arch.tile_speed)[op]
        chosen = {choose_tile(m, n, 12, speed) for m in (1, 16, 4096, 65536) for n in (64, 4096)}
        assert chosen <= kept


def test_generic_targets_have_what_their_devices_have():
    for name in ("gfx10-3-generic", "gfx11-generic", "gfx12-generic"):
        generation = name.removesuffix("-generic").replace("-", "")
        generic = ARCHS[name]
        members = [a for a in RADEONS if a.name.startswith(generation) and a is not generic]
        assert generic.devices == tuple(a.name for a in members)
        assert all(arch_of_device(a.name) is a for a in members)
        assert all(generic.matrix_instruction == a.matrix_instruction for a in members)


# --------------------------------------------------------------------------------------- objects


def test_generic_objects_serve_all_of_a_generation_and_no_other(hip, tmp_path):
    prebuilt(hip, tmp_path / "objects", target="gfx11-generic")
    hip.monkeypatch.setenv("QUANTKIT_OBJECTS", str(tmp_path / "objects"))
    for name in ARCHS["gfx11-generic"].devices:
        quantize(hip.device(name))
    assert "hiprtcCompileProgram" not in hip.names()
    quantize(hip.device("gfx1201"))
    assert hip.names().count("hiprtcCompileProgram") == 1


def test_generic_objects_that_the_driver_refuses_are_compiled_by_name(hip, tmp_path):
    """HIP before 6.4 knows no generic objects, nor does it load those of another card."""
    prebuilt(hip, tmp_path / "objects", target="gfx12-generic")
    hip.monkeypatch.setenv("QUANTKIT_OBJECTS", str(tmp_path / "objects"))
    hip.set(TARGET="gfx1201")
    quantize(hip.device("gfx1201"))
    assert f"hiprtcCompileProgram gfx1201 {SMALL.symbol} macros=6" in hip.calls()
    (folder,) = objects.object_folders("gfx1201")
    assert folder.problem.startswith(f"{tmp_path / 'objects'}: {SMALL.symbol}: HIP cannot load the")
    assert folder.problem.endswith(
        "209 hipErrorNoBinaryForGpu: a stand-in's error; build it for gfx1201 instead of "
        "gfx12-generic, or let it be compiled"
    )


def test_objects_for_another_card_are_not_passed_over(hip, tmp_path):
    prebuilt(hip, tmp_path / "objects")
    hip.monkeypatch.setenv("QUANTKIT_OBJECTS", str(tmp_path / "objects"))
    hip.set(TARGET="gfx1100")
    with pytest.raises(KernelError, match="209 hipErrorNoBinaryForGpu"):
        quantize(hip.device("gfx1201"))


#: EF_AMDGPU_MACH and the generic version, from LLVM's AMDGPU usage guide.
FLAGS = {
    "gfx1101": (0x46, 0),
    "gfx1151": (0x4A, 0),
    "gfx11-generic": (0x54, 1),
    "gfx12-generic": (0x59, 1),
    "gfx1032": (0x38, 0),
    "gfx10-3-generic": (0x53, 1),
}


@pytest.mark.parametrize("target", FLAGS)
def test_objects_say_what_they_run_on(tmp_path, target):
    need(compilers.clang)
    (kernel,) = build(target, tmp_path / "objects", [SMALL]).kernels
    content = (tmp_path / "objects" / kernel.file).read_bytes()
    (flags,) = struct.unpack_from("<I", content, 48)
    assert (flags & 0xFF, flags >> 24) == FLAGS[target]
    # ELF's ABI version: 4 is code object v6, which generic ones take.
    assert content[8] == 4


@pytest.mark.parametrize("io", ["f16", "bf16"])
def test_what_fills_all_registers_does_not_spill(tmp_path, io):
    """It spilled 1 and 29 registers where the compiler tried for more waves than fit."""
    need(compilers.clang)
    need(compilers.objdump)
    build("gfx11-generic", tmp_path / "objects", [Variant(OPS["gemm_w16"], (io, "q8_0", "m64"))])
    (finding,) = check_folder(tmp_path / "objects").findings
    assert not finding.problems
    assert finding.kernel.vgprs > 250


@pytest.mark.parametrize("lanes", ["--offload-arch=gfx942", "--offload-arch=gfx906"])
def test_waves_of_64_lanes_do_not_compile(tmp_path, monkeypatch, lanes):
    need(compilers.clang)
    options = (*object_build._CLANG_OPTIONS, lanes)
    monkeypatch.setattr(object_build, "_clang_options", lambda arch: options)
    with pytest.raises(KernelError, match="kernels take waves of 32 lanes"):
        build("gfx1100", tmp_path / "objects", [SMALL])
