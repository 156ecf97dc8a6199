"""What is read from machine code, written by hand and compiled: K loops, masked lanes, hazards."""

import gzip
from pathlib import Path

import pytest

from quantkit.device import compilers
from quantkit.device.aot.check import check_folder
from quantkit.device.aot.disassembly import class_of, read_code
from quantkit.device.aot.hazards import unwaited_reads
from quantkit.device.aot.k_loop import find_loop, lds_bytes
from quantkit.device.aot.lane_masks import masked_matrix_instructions
from quantkit.device.aot.object_build import build
from quantkit.device.archs import ARCHS, MatrixUnit
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS
from tests.support.kernel_cases import need

GOLDEN = Path(__file__).parents[1] / "golden" / "gemm_fp8_sparse_t2_clang19.s.gz"
UNIT = MatrixUnit(cycles=8, half_cycles=16, simds=2, lds_rate=79.0)
WMMA = "v_wmma_f32_16x16x16_fp8_fp8 v[1:8], v[9:10], v[11:12], v[1:8]"
BARRIER = ["s_barrier_signal -1", "s_barrier_wait 0xffff"]


def disassembly(lines, symbol="kernel"):
    """Return text as llvm-objdump prints it, eight bytes a line; ``@n`` is line n's address."""
    text = [f"0000000000001800 <{symbol}>:"]
    for index, line in enumerate(lines):
        code, _, target = line.partition(" @")
        goal = f" <{symbol}+0x{8 * int(target):x}>" if target else ""
        text.append(f"\t{code:<58} // {0x1800 + 8 * index:012X}: BF800000{goal}")
    return "\n".join(text)


def test_a_loop_is_what_its_backward_branch_encloses():
    lines = [
        "v_mov_b32_e32 v0, 0",
        "ds_load_b128 v[9:12], v0",
        "s_cbranch_execz 1 @3",
        WMMA,
        WMMA,
        "ds_store_b128 v0, v[9:12]",
        *BARRIER,
        "s_cbranch_scc1 65528 @1",
        WMMA,
        WMMA,
        WMMA,
    ]
    loop = find_loop(read_code(disassembly(lines), "kernel"), 2 * 16 * 16 * 16, UNIT)
    assert loop.issued == {"lds": 2, "branch": 2, "matrix": 2, "barrier": 2}
    assert loop.lds_bytes == 2 * 32 * 16
    assert loop.issue_share == 16 / (16 + 6)
    assert loop.lds_rate == 2 * 1024 / 16
    assert loop.share == loop.lds_share == 79 / 128


def test_chunks_in_a_loop_of_their_own_count_once_per_turn():
    chunk = ["ds_load_b64 v[9:10], v0", WMMA, "s_cbranch_scc1 65533 @{}"]
    lines = [
        "global_load_b128 v[20:23], v0, s[0:1]",
        *(line.format(1) for line in chunk),
        *BARRIER,
        "s_cbranch_scc0 65500 @0",
        # the last step, after the loop
        *(line.format(7) for line in chunk),
    ]
    loop = find_loop(read_code(disassembly(lines), "kernel"), 4 * 16 * 16 * 16, UNIT)
    assert loop.issued == {"memory": 1, "lds": 4, "matrix": 4, "branch": 5, "barrier": 2}
    assert loop.lds_bytes == 4 * 32 * 8
    assert loop.lds_share == 1


@pytest.mark.parametrize("lines", [[], [WMMA], ["v_add_f32 v0, v0, v0", "s_branch 65533 @0", WMMA]])
def test_no_loop_of_matrix_instructions_is_none(lines):
    assert find_loop(read_code(disassembly(lines), "kernel"), 4096, UNIT) is None
    assert read_code(disassembly([WMMA, "s_branch 65533 @0"]), "other") == ()


@pytest.mark.parametrize(
    ("mnemonic", "kind", "moved"),
    [
        ("ds_load_b128", "lds", 512),
        ("ds_store_b32", "lds", 128),
        ("ds_load_u16", "lds", 64),
        ("ds_load_u8_d16_hi", "lds", 32),
        ("ds_load_2addr_b32", "lds", 256),
        ("ds_store_2addr_stride64_b64", "lds", 512),
        ("ds_bpermute_b32", "lds", 0),
        ("v_swmmac_f32_16x16x32_fp8_bf8", "matrix", 0),
        ("v_dual_mov_b32", "vector", 0),
        ("s_wait_dscnt", "wait", 0),
        ("s_delay_alu", "wait", 0),
        ("s_barrier_wait", "barrier", 0),
        ("s_add_nc_u64", "scalar", 0),
        ("global_load_b128", "memory", 0),
    ],
)
def test_classes_and_bytes(mnemonic, kind, moved):
    assert (class_of(mnemonic), lds_bytes(mnemonic)) == (kind, moved)


def loops_of(target, tile, folder):
    """Build the two GEMMs with ``tile``; return their K loops, dense first."""
    return [finding.loop for finding in findings_of(target, tile, folder)]


def findings_of(target, tile, folder):
    need(compilers.clang)
    need(compilers.objdump)
    words = ("e4m3fn", "e4m3fn", "token", "channel", "f16", tile)
    build(target, folder, [Variant(OPS[name], words) for name in ("gemm_fp8", "gemm_fp8_sparse")])
    return check_folder(folder).findings


@pytest.mark.parametrize(("tile", "tokens", "waves"), [("t0", 128, 4), ("t3", 256, 8)])
def test_the_large_tiles_leave_the_matrix_unit_busy(tile, tokens, waves, tmp_path):
    dense, sparse = loops_of("gfx1201", tile, tmp_path / "objects")
    # 64x64x64 by every wave: 64 products of 16x16x16, half as many sparse ones.
    assert (dense.matrix, sparse.matrix) == (64, 32)
    # What a wave multiplies is read, its share of the tile stored.
    assert dense.lds_bytes == 2 * 64 * 64 + (tokens + 128) * 64 // waves
    assert sparse.lds_bytes == 64 * 64 + 64 * 40 + (tokens * 64 + 128 * 40) // waves
    assert dense.share >= 0.85
    assert sparse.share >= 0.75


def test_the_tile_of_16_rows_reads_no_operand_from_lds(tmp_path):
    dense, sparse = loops_of("gfx1200", "t4", tmp_path / "objects")
    assert dense.lds_bytes == sparse.lds_bytes == 0
    assert "barrier" not in dense.issued | sparse.issued
    # A fragment takes one load; sparse ones two, of tokens by halves and of weights for nibbles.
    assert (dense.matrix, dense.issued["memory"]) == (8, 6)
    assert (sparse.matrix, sparse.issued["memory"]) == (4, 6)


def test_chunks_of_gfx1100_are_a_loop_within_the_step(tmp_path):
    dense, sparse = loops_of("gfx1100", "t0", tmp_path / "objects")
    assert dense.matrix == sparse.matrix == 64
    assert (dense.issued["barrier"], sparse.issued["barrier"]) == (1, 1)
    assert dense.issued["memory"] == 8
    assert dense.unit == ARCHS["gfx1100"].matrix_unit


def test_a_kernel_without_matrix_instructions_has_no_loop(tmp_path):
    need(compilers.clang)
    need(compilers.objdump)
    variant = Variant(OPS["quantize_fp8_static"], ("f16", "e4m3fn", ""))
    build("gfx1201", tmp_path / "objects", [variant])
    (finding,) = check_folder(tmp_path / "objects").findings
    assert finding.loop is None
    assert not finding.problems


# ------------------------------------------------------------------------------- lanes and waits


def code_of(lines):
    return read_code(disassembly(lines), "kernel")


SAVE, RESTORE = "s_and_saveexec_b32 s4, vcc_lo", "s_or_b32 exec_lo, exec_lo, s4"
# How compilers write branches: condition, body, and what puts the lanes back.
ALL_LANES = {
    "straight": [WMMA],
    "behind a branch": [SAVE, "s_cbranch_execz 1 @3", "v_nop", RESTORE, WMMA],
    "behind both sides": [
        *(SAVE, "s_xor_b32 s4, exec_lo, s4", "s_cbranch_execz 1 @4", "v_nop"),
        *("s_or_saveexec_b32 s4, s4", "s_xor_b32 exec_lo, exec_lo, s4", "v_nop", RESTORE, WMMA),
    ],
    "behind two": [
        *(SAVE, "s_and_saveexec_b32 s5, s6", "v_nop", "s_or_b32 exec_lo, exec_lo, s5"),
        *(RESTORE, WMMA),
    ],
    "mask moved": [
        *("s_mov_b32 s7, exec_lo", "v_cmpx_gt_i32_e32 s2, v0", "v_nop"),
        *("s_or_b32 exec_lo, exec_lo, s7", WMMA),
    ],
    "behind a loop that lanes leave": [
        *("s_mov_b32 s4, 0", "s_or_b32 s4, vcc_lo, s4", "s_and_not1_b32 exec_lo, exec_lo, s4"),
        *("s_cbranch_execnz 65533 @1", RESTORE, WMMA),
    ],
    # The body of the branch stands behind the kernel's end.
    "rotated": [SAVE, "s_cbranch_execnz 3 @5", RESTORE, WMMA, "s_endpgm", "v_nop", "s_branch @2"],
    "wave by wave": ["s_cbranch_vccz 1 @2", WMMA, "s_endpgm"],
    "set": [SAVE, "s_mov_b32 exec_lo, -1", WMMA],
}
MASKED = {
    "in a branch": [SAVE, "s_cbranch_execz 1 @3", WMMA, RESTORE],
    "in the other side": [
        *(SAVE, "s_xor_b32 s4, exec_lo, s4", "s_or_saveexec_b32 s4, s4"),
        *("s_xor_b32 exec_lo, exec_lo, s4", WMMA, RESTORE),
    ],
    "wrong mask put back": [SAVE, "s_or_b32 exec_lo, exec_lo, s5", WMMA],
    "mask overwritten": [SAVE, "s_mov_b32 s4, 0", RESTORE, WMMA],
    "mask overwritten by a vector": [SAVE, "v_cmp_gt_i32_e64 s4, s2, v0", RESTORE, WMMA],
    "mask loaded over": [SAVE, "s_load_b128 s[4:7], s[0:1], 0x0", RESTORE, WMMA],
    "one way round": ["s_cbranch_scc0 1 @2", SAVE, WMMA],
    "inner restored, outer not": [
        *(SAVE, "s_and_saveexec_b32 s5, s6", "v_nop", "s_or_b32 exec_lo, exec_lo, s5", WMMA),
    ],
    "compared into exec": ["v_cmpx_gt_i32_e32 s2, v0", WMMA],
    "masked by and": ["s_and_b32 exec_lo, exec_lo, s2", WMMA],
    "unknown saveexec": ["s_xor_saveexec_b32 s4, s2", RESTORE, WMMA],
}


@pytest.mark.parametrize("lines", ALL_LANES.values(), ids=list(ALL_LANES))
def test_matrix_instructions_with_all_lanes_on_pass(lines):
    assert masked_matrix_instructions(code_of(lines)) == ()


@pytest.mark.parametrize("lines", MASKED.values(), ids=list(MASKED))
def test_matrix_instructions_that_may_miss_lanes_are_found(lines):
    (found,) = masked_matrix_instructions(code_of(lines))
    assert found.address == 0x1800 + 8 * lines.index(WMMA)


READ, ADD = "v_add_nc_u32_e32 v0, s2, v0", "s_add_co_i32 s2, s2, 1"
WAIT = "s_wait_alu depctr_sa_sdst(0)"
WAITED = {
    "no read before": [ADD, READ],
    "waited": [READ, ADD, WAIT, READ],
    "waited, as clang 19 prints it": [READ, ADD, "s_wait_alu 0xfffe", READ],
    "loaded between": [READ, ADD, "s_load_b32 s9, s[0:1], 0x0", READ],
    "an address of a load": [READ, ADD, "s_load_b32 s9, s[2:3], 0x0"],
    "another pair": [READ, "s_mov_b32 s4, 0", "v_mov_b32_e32 v1, s4"],
    "scalar reads of vector writes": [READ, "v_readfirstlane_b32 s2, v0", "s_mov_b32 s7, s2"],
    "vector waited": [
        *(READ, "v_readfirstlane_b32 s2, v0", "s_wait_alu depctr_va_sdst(0)", READ),
    ],
    "compared by lanes": ["v_mov_b32_e32 v1, s4", "v_cmpx_gt_i32_e64 s4, v0", "v_mov_b32 v1, s4"],
}
STALE = {
    "by a vector": [READ, ADD, READ],
    "by a scalar": [READ, ADD, "s_mov_b32 s7, s2"],
    "its neighbour": [READ, "s_mov_b32 s3, 0", "s_mov_b32 s7, s3"],
    "the other counter": [READ, ADD, "s_wait_alu depctr_va_sdst(0)", READ],
    "of a vector": [READ, "v_readfirstlane_b32 s2, v0", READ],
    "of a carry": [READ, "v_add_co_u32 v1, s2, v0, v0", "v_cndmask_b32_e64 v1, v2, v3, s2"],
    "of vcc": ["v_mov_b32_e32 v1, vcc_lo", "s_mov_b32 vcc_lo, 0", "s_cbranch_vccz 0 @3"],
    "of vcc by fmas": [
        *("v_mov_b32_e32 v1, vcc_lo", "v_div_scale_f32 v0, vcc_lo, v1, v2, v3"),
        "v_div_fmas_f32 v0, v1, v2, v3",
    ],
    "around a loop": [READ, ADD, "s_cbranch_scc1 65534 @0", "s_endpgm"],
    "in half of a pair": [READ, "s_mov_b32 s3, 0", "v_mul_lo_u32 v0, s[2:3], v1"],
}


@pytest.mark.parametrize("lines", WAITED.values(), ids=list(WAITED))
def test_scalar_registers_that_are_waited_for_pass(lines):
    assert unwaited_reads(code_of(lines)) == ()


@pytest.mark.parametrize("lines", STALE.values(), ids=list(STALE))
def test_stale_scalar_registers_are_found(lines):
    (found,) = unwaited_reads(code_of(lines))
    assert found.address >= 0x1800


def test_what_clang_19_made_of_the_unfinished_tile_is_found():
    code = read_code(gzip.decompress(GOLDEN.read_bytes()).decode(), "kt2")
    masked = masked_matrix_instructions(code)
    # The last K step, half of all; it was sunk into the epilogue's `if (token >= m ...)`.
    assert len(masked) == 8
    assert sum(i.kind == "matrix" for i in code) == 16
    assert len(unwaited_reads(code)) == 183
