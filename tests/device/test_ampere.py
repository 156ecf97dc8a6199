"""Ampere's kernels: which there are, that they compile, and the same PTX on a later card."""

import threading
from dataclasses import replace

import pytest
import torch

from quantkit.device.aot.check import check_folder
from quantkit.device.aot.object_build import build
from quantkit.device.archs import ARCHS, arch_of_device
from quantkit.device.backends import Backend, use
from quantkit.device.choosing import Choice, choose, supposing
from quantkit.device.gpu import nvrtc, selftest
from quantkit.device.gpu.devices import find_device
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.ops import call as execute
from quantkit.device.ops.op import Variant, all_variants
from quantkit.device.ops.table import OPS, default_variants
from quantkit.device.tile_choice import variants_for
from quantkit.errors import KernelError
from tests.device.test_conformance import SIZES, each, near
from tests.support.kernel_cases import need
from tests.support.sampling import cover

AMPERE = ARCHS["sm_80"]
CUDA = torch.device("cuda")
REASON = "Ampere has no FP8 instructions: int8 and int4 have kernels"


def test_ampere_has_what_needs_no_fp8():
    names = {v.op.name for v in variants_for(AMPERE, default_variants())}
    without = {name for name in OPS if "fp8" in name or OPS[name].family.startswith("attention")}
    assert names == OPS.keys() - without
    products = ("gemm", "geglu", "project_gelu", "conv")
    assert {f"{p}_{k}" for p in products for k in ("int8", "int8_sparse", "w4a8")} <= names
    assert {"gemm_w16", "quantize_int8_static", "quantize_int8_token", "group_norm"} <= names
    assert all(arch_of_device(name) is AMPERE for name in ("sm_80", "sm_86", "sm_87"))
    assert AMPERE.target_for("sm_86") == "sm_86"


def test_fp8_is_refused_with_the_reason():
    with supposing(AMPERE):
        for name in ("gemm_fp8", "conv_fp8_sparse", "quantize_fp8_static", "attention_int8"):
            assert choose(name, CUDA, k=64) == Choice(Backend.REFERENCE, REASON)
        for name in ("gemm_int8", "conv_w4a8", "geglu_int8_sparse", "gemm_w16"):
            assert choose(name, CUDA, k=64) == Choice(Backend.GPU, "")
    with supposing(ARCHS["sm_89"]):
        assert choose("gemm_fp8", CUDA, k=64).backend is Backend.GPU


#: One of each kind of loop, and codes and rows.
COMPILED = [
    ("gemm_int8", ("int8", "int8", "token", "channel", "f16", "t0")),
    ("gemm_int8_sparse", ("int8", "int8", "token", "channel", "f16", "t1")),
    ("conv_w4a8", ("int8", "int4", "tensor", "channel", "f16", "t1")),
    ("gemm_w16", ("bf16", "e4m3fn", "m16")),
    ("quantize_int8_token", ("f16", "int8", "")),
]


def test_its_objects_pass_the_gates(tmp_path):
    need(nvrtc.load_nvrtc)
    build("sm_80", tmp_path / "objects", [Variant(OPS[op], words) for op, words in COMPILED])
    report = check_folder(tmp_path / "objects")
    assert len(report.findings) == len(COMPILED)
    assert report.passed


def test_the_self_test_multiplies_int8_where_there_is_no_fp8(hip):
    device = hip.device(arch=replace(ARCHS["gfx1201"], without=AMPERE.without))
    tiles = [f"t{index}" for index in range(5)]
    gemms = [OPS["gemm_int8"], OPS["gemm_int8_sparse"]]
    words = ("int8", "int8", "tensor", "tensor", "f16")
    kernels = [Variant(op, (*words, tile)) for op in gemms for tile in tiles]
    hip.provide(*kernels)
    selftest.run_self_test(device)
    assert {case.kernel for case in selftest._cases(device)} == {*kernels}
    for case in selftest._cases(device):
        x, one, *weights, _ = case.operands
        how = (one, None, "int8", "int8", torch.float64)
        exact = OPS[case.kernel.operation].reference(x, one, *weights, *how)
        assert torch.equal(exact, case.expected.double())
        assert case.expected.abs().max() < 2048
    hip.set(CORRUPT=kernels[-1].symbol)
    with pytest.raises(KernelError, match=r"the self-test of int8_int8_.*_t4 got"):
        selftest.run_self_test(device)


@pytest.fixture(scope="module")
def ampere():
    """This machine's GPU with Ampere's kernels: the driver compiles their PTX for it."""
    if not torch.cuda.is_available() or torch.version.hip:
        pytest.skip("torch sees no GPU of NVIDIA's")
    device = find_device(torch.cuda.current_device())
    compiler = replace(device.driver.require_compiler(), binary="PTX")
    return replace(
        device,
        name="compute_80",
        arch=AMPERE,
        driver=replace(device.driver, compiler=compiler, launch_overlapping=None),
        _functions={},
        _lock=threading.Lock(),
    )


@pytest.mark.gpu
@pytest.mark.xdist_group("gpu")
def test_its_self_test_passes_on_a_later_card(ampere):
    selftest.run_self_test(ampere)


@pytest.mark.gpu
@pytest.mark.xdist_group("gpu")
@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_its_kernels_agree_with_the_reference_on_a_later_card(ampere, op):
    found = variants_for(AMPERE, list(all_variants(op)))
    if not found:
        pytest.skip(AMPERE.why_without(op.family, op.name))
    for variant in cover(found, lambda v: set(enumerate(v.words))):
        for sizes in SIZES:
            operands, options = op.sample(variant, sizes, torch.Generator().manual_seed(sum(sizes)))
            problem, outputs = op.check(op, operands, options), op.outputs(operands, options)
            if op.why_not and op.why_not(op, problem.sizes):
                continue
            if variant.words[-1] == "m16" and problem.words[-1] == "m64":
                continue  # a call of so many rows does not choose it
            nulls = [index for index, tensor in enumerate(operands) if tensor is None]
            call = Call(ampere, variant, problem.sizes, outputs, nulls)
            made = call(*(t if t is None else t.contiguous().cuda() for t in operands))
            with use(Backend.REFERENCE):
                right = each(execute.call(op, *operands, *options))
            for mine, expected in zip(made, right, strict=True):
                near(op, mine.cpu(), expected)
