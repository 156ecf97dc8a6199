"""The loop's cycles with latencies: by hand, for loops that are short enough."""

from itertools import pairwise

import pytest

from quantkit.device.aot.cycles import (
    OPTIMISTIC,
    PESSIMISTIC,
    Assumptions,
    Residents,
    latency_share,
)
from quantkit.device.aot.disassembly import Instruction
from quantkit.device.archs import MatrixUnit

UNIT = MatrixUnit(cycles=8, half_cycles=16, simds=2, lds_rate=64.0)
ONE, TWO = Residents(1, 2, 2), Residents(2, 2, 4)
NOBODY = Residents(0, 2, 4)
BRANCH = ("s_cbranch_scc1", "0")


def wmma(sums=0):
    register = f"v[{8 * sums}:{8 * sums + 7}]"
    return "v_wmma_f32_16x16x16_fp8_fp8", f"{register}, v[90:91], v[92:93], {register}"


def code(*lines):
    return tuple(Instruction(8 * n, name, rest, None) for n, (name, rest) in enumerate(lines))


def share(*lines, residents=ONE, assumed=OPTIMISTIC):
    return latency_share(code(*lines), residents, UNIT, assumed)


@pytest.mark.parametrize("residents", [ONE, TWO], ids=str)
def test_independent_products_keep_the_unit_busy(residents):
    assert share(*map(wmma, range(16)), BRANCH, residents=residents) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("residents", "chains"), [(ONE, 1), (TWO, 2)], ids=str)
def test_dependent_products_wait_for_their_sums(residents, chains):
    found = share(*[wmma()] * 8, residents=residents)
    assert found == pytest.approx(8 * chains / 27, rel=0.05)


def test_an_instruction_costs_a_cycle_where_nothing_is_issued_beside_products():
    lines = [*map(wmma, range(8)), *[("s_add_co_i32", "s0, s0, 1")] * 16]
    assert share(*lines, assumed=PESSIMISTIC) == pytest.approx(64 / 80, rel=0.03)
    assert share(*lines) > 64 / 80


@pytest.mark.parametrize("cycles", [0, 64, 200])
def test_a_wave_alone_waits_for_lds(cycles):
    assumed = Assumptions(co_issue=True, lds_load=cycles, lds_store=0, memory=0)
    load = ("ds_load_b128", "v[90:93], v0")
    found = share(load, ("s_wait_dscnt", "0x0"), wmma(), wmma(1), assumed=assumed)
    # 512 bytes of two waves at 64 a cycle, then the latency, then two products.
    assert found == pytest.approx(16 / (8 + cycles + 16), rel=0.25)
    assert found <= 16 / (8 + cycles)


def test_lds_bounds_all_waves_of_a_compute_unit():
    lines = [*[("ds_load_b128", "v[90:93], v0")] * 8, ("s_wait_dscnt", "0x0"), *map(wmma, range(8))]
    found = share(*lines, residents=TWO)
    # 8 x 512 bytes of 4 waves at 64 a cycle: 256 cycles for 128 of products on each SIMD.
    assert found == pytest.approx(0.5, abs=0.03)


def test_waits_count_what_may_still_be_under_way():
    assumed = Assumptions(co_issue=True, lds_load=0, lds_store=0, memory=1000)
    load = ("global_load_b128", "v[60:63], v0, s[0:1]")
    products = [*map(wmma, range(8))]
    waits = share(load, ("s_wait_loadcnt", "0x0"), *products, assumed=assumed)
    ahead = share(load, ("s_wait_loadcnt", "0x1"), *products, assumed=assumed)
    both = share(load, ("s_wait_loadcnt_dscnt", "0x100"), *products, assumed=assumed)
    assert waits < 0.08 < ahead
    assert both == ahead


def test_a_barrier_keeps_the_waves_of_a_block_together():
    barrier = [("s_barrier_signal", "-1"), ("s_barrier_wait", "0xffff")]
    lines = [("ds_load_b128", "v[90:93], v0"), ("s_wait_dscnt", "0x0"), *map(wmma, range(8))]
    one_block = share(*lines, *barrier, residents=TWO)
    # Two blocks come to their barriers at times of their own, and hide each other's.
    two_blocks = share(*lines, *barrier, residents=Residents(2, 2, 2))
    assert 0.5 < one_block < two_blocks


def test_longer_latencies_leave_less():
    lines = [
        ("global_load_b128", "v[60:63], v0, s[0:1]"),
        ("ds_load_b128", "v[90:93], v0"),
        ("s_wait_dscnt", "0x0"),
        *map(wmma, range(8)),
        ("s_wait_loadcnt", "0x0"),
        ("ds_store_b128", "v0, v[60:63]"),
    ]
    every = [Assumptions(True, 20 * n, 10 * n, 100 * n) for n in range(6)]
    found = [share(*lines, assumed=assumed) for assumed in every]
    assert all(more > less for more, less in pairwise(found))
    assert share(*lines, assumed=PESSIMISTIC) < share(*lines)


@pytest.mark.parametrize(
    ("lines", "residents"),
    [
        ([], ONE),
        ([BRANCH], ONE),
        ([wmma()], NOBODY),
        ([wmma(), ("s_barrier", "")], ONE),
    ],
)
def test_what_is_no_loop_of_products_has_no_share(lines, residents):
    assert share(*lines, residents=residents) is None
