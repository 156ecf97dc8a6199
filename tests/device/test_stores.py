"""How a tile's threads share LDS and memory: the addresses are those of the kernels' own code.

A GPU moves 16 bytes for each of 8 neighbouring lanes in one cycle, or 4 for each of 32, if no two
of them want different words of one of LDS's 32 banks; else it takes a cycle for each such word.
"""

import ctypes
import subprocess
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from quantkit.device.archs import HOST_LAYOUTS
from quantkit.device.compilers import host_compiler
from quantkit.device.geometry import tiles
from quantkit.device.host import library as host
from quantkit.device.ops.op import all_variants
from quantkit.device.ops.table import OPS
from quantkit.resources import kernel_sources
from tests.support.kernel_cases import need

PROBE = Path(__file__).with_name("store_probe.cc")
UNTOUCHED = 0xAA
#: long enough that no row of memory ends where the next one begins
K = 4096


def _probed():
    """Yield a variant of each loop and tile that passes through LDS; GEGLU's loop is GEMM's."""
    plain = (op for op in OPS.values() if op.family in ("gemm", "conv"))
    for op in {(op.source, op.weights): op for op in plain}.values():
        for word in op.words("QK_TILE"):
            if tiles()[int(word[1:])].waves[2] == 1:
                yield next(v for v in all_variants(op) if v.word("QK_TILE") == word)


VARIANTS = list(_probed())


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    need(host_compiler)
    folder = tmp_path_factory.mktemp("probes")

    @cache
    def probe(variant):
        source = str(kernel_sources() / variant.op.source)
        target = folder / f"{variant.symbol}.so"
        command = host.compile_command(variant, HOST_LAYOUTS[0], target)
        command = [str(PROBE) if word == source else word for word in command]
        subprocess.run([*command, "-O0", f'-DQK_PROBED="{source}"'], check=True)
        return Probe(ctypes.CDLL(str(target)), tiles()[int(variant.word("QK_TILE")[1:])].block)

    return probe


class Probe:
    """The compiled probe of a variant."""

    def __init__(self, library, threads):
        self.library, self.threads = library, threads
        layout = (ctypes.c_int * 5).in_dll(library, "probe_layout")
        self.bytes, self.x_bytes, self.x_pitch, self.w_pitch, self.w_codes = layout

    def stores(self):
        """Return the tokens', weights' and positions' addresses: by store, then by thread."""
        buffers = np.full((self.threads, self.bytes), UNTOUCHED, np.uint8)
        for thread, buffer in enumerate(buffers):
            self.library.probe_stores(ctypes.c_void_p(buffer.ctypes.data), thread)
        at = np.arange(0, self.bytes, 4)
        is_x, is_code = at < self.x_bytes, (at - self.x_bytes) % self.w_pitch < self.w_codes
        zeros = buffers.view(np.uint32) == 0
        assert zeros.sum() * 4 == (buffers != UNTOUCHED).sum()
        kinds = is_x, ~is_x & is_code, ~is_x & ~is_code
        words = [[at[row & kind].tolist() for row in zeros] for kind in kinds]
        each = ([row[::4] for row in words[0]], [row[::4] for row in words[1]], words[2])
        return [list(zip(*kind, strict=True)) for kind in each]

    def loads(self):
        """Return the offsets in memory of the tokens' and weights' vectors, as ``stores``."""
        x, w = (ctypes.c_uint * 64)(), (ctypes.c_uint * 64)()
        rows = []
        for thread in range(self.threads):
            counts = self.library.probe_loads(x, w, K, thread)
            rows.append((x[: counts & 255], w[: counts >> 8]))
        return [list(zip(*kind, strict=True)) for kind in zip(*rows, strict=True)]


def cycles(stores, lanes, size):
    """Return the cycles that LDS takes, for each ``lanes`` neighbours that store ``size`` bytes."""
    phases = [row[i : i + lanes] for row in stores for i in range(0, len(row), lanes)]
    banks = [Counter(at // 4 % 32 for a in p for at in range(a, a + size, 4)) for p in phases]
    return [max(counts.values()) for counts in banks]


def runs(addresses):
    """Return in how many runs of memory a wave's lanes read 16 bytes each."""
    return 1 + sum(b != a + 16 for a, b in pairwise(addresses))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.symbol)
def test_no_stores_of_codes_meet_in_a_bank(variant, probes):
    probe = probes(variant)
    x, w, positions = probe.stores()
    every = sorted(at for kind in (x, w) for row in kind for at in row)
    assert len(every) == len({*every})
    tile = tiles()[int(variant.word("QK_TILE")[1:])]
    assert len(every) * 16 == tile.m * tile.k + tile.n * probe.w_codes
    assert {*cycles(x, 8, 16)} == {1}
    assert {*cycles(w, 8, 16)} == {1}
    # 12 words from row to row lead to 8 places alone, of 2 words each: no order of rows has less.
    assert {*cycles(positions, 32, 4)} <= {2 if probe.w_pitch == 48 else 1}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.symbol)
def test_lanes_of_a_row_read_one_run_of_memory(variant, probes):
    probe = probes(variant)
    tile = tiles()[int(variant.word("QK_TILE")[1:])]
    per_byte = 2 if variant.op.sparse or variant.word("QK_W_FORMAT") == "int4" else 1
    for loads, row in zip(probe.loads(), (tile.k, tile.k // per_byte), strict=True):
        for instruction in loads:
            for wave in range(0, probe.threads, 32):
                assert runs(instruction[wave : wave + 32]) == 32 * 16 // row
