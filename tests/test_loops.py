"""What is counted in a K loop, on disassemblies written by hand and on compiled objects."""

import pytest
from kernel_cases import need

from quantkit.device import compilers
from quantkit.device.archs import ARCHS, MatrixUnit
from quantkit.device.build import build
from quantkit.device.check import check_folder
from quantkit.device.loops import class_of, find_loop, lds_bytes
from quantkit.device.ops import OPS, Variant

UNIT = MatrixUnit(cycles=8, simds=2, lds_rate=79.0)
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
    loop = find_loop(disassembly(lines), "kernel", 2 * 16 * 16 * 16, UNIT)
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
    loop = find_loop(disassembly(lines), "kernel", 4 * 16 * 16 * 16, UNIT)
    assert loop.issued == {"memory": 1, "lds": 4, "matrix": 4, "branch": 5, "barrier": 2}
    assert loop.lds_bytes == 4 * 32 * 8
    assert loop.lds_share == 1


@pytest.mark.parametrize("lines", [[], [WMMA], ["v_add_f32 v0, v0, v0", "s_branch 65533 @0", WMMA]])
def test_no_loop_of_matrix_instructions_is_none(lines):
    assert find_loop(disassembly(lines), "kernel", 4096, UNIT) is None
    assert find_loop(disassembly([WMMA, "s_branch 65533 @0"]), "other", 4096, UNIT) is None


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
    need(compilers.clang)
    need(compilers.objdump)
    words = ("e4m3fn", "e4m3fn", "token", "channel", "f16", tile)
    build(target, folder, [Variant(OPS[name], words) for name in ("gemm_fp8", "gemm_fp8_sparse")])
    return [finding.loop for finding in check_folder(folder).findings]


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
