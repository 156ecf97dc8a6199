"""Issue slots of a whole block: by hand, on code that is short enough, and of compiled kernels."""

import pytest

from quantkit.device.aot.disassembly import read_code
from quantkit.device.aot.k_loop import find_loop
from quantkit.device.aot.whole_block import WholeBlock, find_block
from tests.device.test_loops import UNIT, WMMA, disassembly, findings_of

STORE = "global_store_b128 v0, v[1:4], s[0:1]"
LOOP = [WMMA, WMMA, "ds_load_b128 v[9:12], v0", "s_cbranch_scc1 65533 @{}"]
PLAIN = ["v_nop", "v_nop"]


def loop_at(place):
    return [line.format(place) for line in LOOP]


def block_of(lines):
    code = read_code(disassembly(lines), "kernel")
    loop = find_loop(code, 2 * 16 * 16 * 16, UNIT)
    return find_block(code, loop, 64)


# What stands around the loop, and the cycles of it: a pass has two products and two others.
CODES = {
    "straight": ([*PLAIN, *loop_at(2), STORE, "s_endpgm"], 3),
    "the last step behind the loop": ([*loop_at(0), WMMA, WMMA, STORE, "s_endpgm"], 1 - 2),
    "a transcendental takes four": ([*loop_at(0), "v_exp_f32 v1, v2", STORE, "s_endpgm"], 5),
    "the shorter side of a branch": (
        [*loop_at(0), "s_cbranch_scc0 2 @7", *PLAIN, STORE, "s_endpgm"],
        2,
    ),
    "not past the loop": (["s_cbranch_scc0 5 @7", *PLAIN, *loop_at(3), STORE, "s_endpgm"], 4),
    "no wave that writes nothing": (
        [*loop_at(0), "s_cbranch_scc0 3 @8", *PLAIN, STORE, "s_endpgm"],
        4,
    ),
    "no lanes left out": ([*loop_at(0), "s_cbranch_execz 2 @7", *PLAIN, STORE, "s_endpgm"], 4),
    "what stands behind the end for some lanes": (
        [*loop_at(0), "s_cbranch_execnz 2 @7", STORE, "s_endpgm", *PLAIN, "s_branch @5"],
        5,
    ),
    "a loop of lanes once": ([*loop_at(0), *PLAIN, "s_cbranch_execnz 2 @4", STORE, "s_endpgm"], 4),
}


@pytest.mark.parametrize("name", CODES)
def test_what_stands_around_the_loop_is_counted(name):
    lines, rest = CODES[name]
    assert block_of(lines) == WholeBlock(64, 16, 2, rest)


def test_the_share_grows_with_k_to_the_loops():
    block = WholeBlock(64, 512, 78, 1000.0)
    assert block.share(640) == 5120 / (5120 + 780 + 1000)
    assert block.share(640) < block.share(1280) < 512 / 590
    assert block.share(10**9) == pytest.approx(512 / 590)


def test_code_without_an_end_has_no_block():
    assert block_of([*loop_at(0), STORE, "s_branch @4"]) is None
    assert block_of([*loop_at(0), *PLAIN, "s_endpgm"]) is None


def test_every_tile_of_a_gemm_has_a_block(tmp_path):
    for tile in ("t0", "t4"):
        for finding in findings_of("gfx1201", tile, tmp_path / tile):
            loop, block = finding.loop, finding.block
            assert block.busy / (block.busy + block.others) == loop.issue_share
            assert 0 < block.share(640) < block.share(1280) < loop.issue_share
            assert finding.code_bytes > 4000
