"""RDNA2's kernels: which there are, exact sums by dot4, and objects that pass the gates."""

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.aot.check import check_folder
from quantkit.device.aot.object_build import build
from quantkit.device.archs import ARCHS
from quantkit.device.backends import Backend
from quantkit.device.choosing import Choice, choose, supposing
from quantkit.device.geometry import tiles
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS, default_variants
from quantkit.device.tile_choice import choose_tile, variants_for
from quantkit.numerics.packed_2to4 import unpack_two_of_four
from tests.support.kernel_cases import gemm_case, need

RDNA2 = ARCHS["gfx1030"]
CUDA = torch.device("cuda")
NO_FP8 = "RDNA2 multiplies codes by dot4 of int8: int8 and int4 have kernels"
NO_HALF = "RDNA2 has no matrix instructions for 16-bit inputs, so torch multiplies them"


def test_rdna2_has_what_multiplies_int8():
    names = {v.op.name for v in variants_for(RDNA2, default_variants())}
    without = {name for name in OPS if "fp8" in name or OPS[name].family.startswith("attention")}
    assert names == OPS.keys() - without - {"gemm_w16"}
    products = ("gemm", "geglu", "project_gelu", "conv")
    assert {f"{p}_{k}" for p in products for k in ("int8", "int8_sparse", "w4a8")} <= names


def test_what_it_lacks_is_refused_with_the_reason():
    with supposing(RDNA2):
        for name in ("gemm_fp8", "conv_fp8_sparse", "quantize_fp8_static", "attention_int8"):
            assert choose(name, CUDA, k=64) == Choice(Backend.REFERENCE, NO_FP8)
        assert choose("gemm_w16", CUDA, k=64) == Choice(Backend.REFERENCE, NO_HALF)
        for name in ("gemm_int8", "conv_w4a8", "geglu_int8_sparse", "conv_int8_residual"):
            assert choose(name, CUDA, k=64) == Choice(Backend.GPU, "")


@pytest.mark.parametrize("op", ["gemm_int8_sparse", "conv_int8_sparse", "geglu_int8_sparse"])
def test_the_tile_of_2to4_weights_that_spills_is_never_chosen(op):
    speed = dict(RDNA2.tile_speed)[op]
    assert not RDNA2.has_tile(op, "t0")
    chosen = {choose_tile(m, n, 36, speed) for m in (1, 16, 4096, 65536) for n in (64, 4096)}
    assert chosen == {"t1", "t2"}


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        *(("gemm_int8", t) for t in ("t0", "t1", "t2")),
        ("gemm_int8_sparse", "t1"),
        ("gemm_int8_sparse", "t2"),
    ],
)
def test_sums_are_those_of_integers(name, tile):
    """At tails of every tile, against torch's products of int64."""
    need(compilers.host_compiler)
    variant = Variant(OPS[name], ("int8", "int8", "tensor", "tensor", "f32", tile))
    at = tiles()[int(tile[1:])]
    generator = torch.Generator().manual_seed(10)
    for m, n, k in ((1, 1, 32), (at.m - 1, at.n + 3, at.k + 32), (at.m + 9, 33, 2 * at.k)):
        case = gemm_case(variant, m, n, k, generator, bias=False)
        one = torch.ones(1)
        case = case.changed(x_scale=one, w_scale=one)
        w = case.tensors["w"]
        if variant.op.sparse:
            w = unpack_two_of_four(w, case.tensors["w_meta"])
        x, w = (codes.view(torch.int8).long() for codes in (case.tensors["x"], w))
        exact = x @ w.T
        assert exact.abs().max() < 2**24
        assert torch.equal(case.run("gfx10").long(), exact), (m, n, k)


#: One of each kind of loop.
COMPILED = [
    ("gemm_int8", ("int8", "int8", "token", "channel", "f16", "t0")),
    ("gemm_int8_sparse", ("int8", "int8", "token", "channel", "f16", "t1")),
    ("conv_w4a8", ("int8", "int4", "tensor", "channel", "f16", "t1")),
    ("quantize_int8_token", ("f16", "int8", "")),
]


def test_its_objects_pass_the_gates(tmp_path):
    need(compilers.clang)
    need(compilers.objdump)
    kernels = [Variant(OPS[op], words) for op, words in COMPILED]
    build("gfx10-3-generic", tmp_path / "objects", kernels)
    report = check_folder(tmp_path / "objects")
    assert report.passed
    loops = {f.kernel.op: (f.loop, f.instructions) for f in report.findings if f.loop}
    assert len(loops) == 3
    dense, instructions = loops["gemm_int8"]
    assert set(instructions) == {"v_dot4c_i32_i8"}
    # 64x64 outputs by 64 of K in a wave: 2048 dot4, and 24 loads of 16 bytes in four turns and 8
    # stores.
    assert dense.matrix == 64 * 64 * 64 // (4 * 32)
    assert dense.lds_bytes == (24 * 4 + 8) * 16 * 32
    assert dense.issue_share > 0.85
