"""The GPU loader on a stand-in HIP runtime: order, arguments, packing, failures, threads.

What is above the two vendor files is the same for NVIDIA, and runs there in test_gpu.py.
"""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from quantkit.cli.doctor_command import doctor
from quantkit.device import cache, log
from quantkit.device.archs import ARCHS, Toolchain, arch_of_device
from quantkit.device.backends import Backend
from quantkit.device.geometry import compile_expression
from quantkit.device.gpu import devices, driver_hip, selftest
from quantkit.device.gpu import gpu_calls as calls
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.gpu.kernel_choice import choose_kernel, why_detour
from quantkit.device.gpu.launcher import prepare_launch
from quantkit.device.ops.norms.quantize import quantize_token
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError
from quantkit.numerics.conv_windows import ConvShape, Windows
from tests.support.conv_cases import SAME, STRIDED, conv_case
from tests.support.gated_cases import gated_case
from tests.support.kernel_cases import covering_variants, deviation, gemm_case, inputs_of, shapes_of
from tests.support.standin_calls import GEMM, GEMMS, SMALL, prebuilt, quantize
from tests.support.standin_hip import STREAM
from tests.support.threads import run_in_threads

SELF_TEST = [
    Variant(op, (*selftest._words(op), tile))
    for op in GEMMS
    for tile in ("t0", "t1", "t2", "t3", "t4")
]


# ---------------------------------------------------------------------------------- what it does


COMPILE = ["CreateProgram", "CompileProgram", "GetProgramLogSize", "GetProgramLog", "GetCodeSize"]
COMPILE = [f"hiprtc{name}" for name in (*COMPILE, "GetCode", "DestroyProgram")]
LOAD = ["hipSetDevice", "hipModuleLoadData", "hipModuleGetFunction"]


def test_a_kernel_is_compiled_loaded_and_launched_in_order(hip):
    hip.provide(SMALL)
    quantize(hip.device())
    assert hip.names() == [*COMPILE, *LOAD, "hipModuleLaunchKernel"]
    assert "hiprtcCreateProgram quantize_token.hip" in hip.calls()
    # QK_SYMBOL, one macro per axis, threads and LDS
    assert f"hiprtcCompileProgram gfx1201 {SMALL.symbol} macros=6" in hip.calls()


@pytest.mark.parametrize("op", GEMMS, ids=lambda op: op.name)
def test_gemms_through_the_loader_are_exact_up_to_one_rounding(hip, op):
    generator, device = torch.Generator().manual_seed(3), hip.device()
    for variant in covering_variants(op, pairs=False):
        hip.provide(variant)
        for index, (m, n, k) in enumerate(shapes_of(variant)[1:5]):
            case = gemm_case(variant, m, n, k, generator, bias=index % 2 == 0)
            inputs = inputs_of(case)
            sizes = {"m": m, "n": n, "k": k}
            nulls = [i for i, tensor in enumerate(inputs) if tensor is None]
            (y,) = Call(device, variant, sizes, [((m, n), case.dtype)], nulls)(*inputs)
            assert deviation(case, y).within(op.budget), (variant.symbol, sizes)


@pytest.mark.parametrize(
    ("op", "shape", "tile"),
    # Of 64 compute units; outputs alone would take t4 for 300 and t1 for 2048 tokens.
    [
        ("geglu_fp8", (9, 45, 96), "t4"),
        ("geglu_fp8", (300, 131, 64), "t1"),
        ("geglu_fp8_sparse", (9, 45, 96), "t4"),
        ("geglu_fp8_sparse", (2048, 640, 32), "t0"),
    ],
)
def test_gated_products_through_the_loader_have_the_nearest_codes(hip, op, shape, tile):
    m, n, k = shape
    device, words = hip.device(), ("e4m3fn", "e4m3fn", "token", "channel", "f16", "e4m3fn")
    variant = choose_kernel(device, OPS[op], words, {"m": m, "n": n, "k": k})
    assert variant == Variant(OPS[op], (*words, tile))
    hip.provide(variant)
    case = gated_case(variant, m, n, k, torch.Generator().manual_seed(5))
    (y,) = Call(device, variant, case.sizes, [((m, n), torch.uint8)])(*inputs_of(case))
    case.check(y)


@pytest.mark.parametrize(
    ("op", "size", "tile"),
    [("conv_fp8", 7, "t2"), ("conv_fp8", 45, "t1"), ("conv_fp8_sparse", 45, "t1")],
)
def test_convolutions_through_the_loader_are_exact_up_to_one_rounding(hip, op, size, tile):
    device, shape = hip.device(), ConvShape(1, size, size, 64, 80, STRIDED if size < 9 else SAME)
    words = ("e4m3fn", "e4m3fn", "tensor", "channel", "f16")
    assert not why_detour(device, OPS[op], words, shape)
    variant = choose_kernel(device, OPS[op], words, shape)
    assert variant == Variant(OPS[op], (*words, tile))
    hip.provide(variant)
    case = conv_case(variant, shape, torch.Generator().manual_seed(6))
    (y,) = Call(device, variant, shape, [(case.result, torch.float16)])(*inputs_of(case))
    assert deviation(case, y).within(variant.op.budget)


def test_arguments_are_packed_as_the_kernel_declares_them(hip):
    case = gemm_case(GEMM, 9, 70, 48, torch.Generator().manual_seed(4))
    hip.provide(GEMM)
    t = case.tensors
    device = hip.device()
    call = Call(device, GEMM, {"m": 9, "n": 70, "k": 48}, [((9, 70), torch.float16)], [4])
    y = torch.empty(9, 70, dtype=torch.float16)
    call.launch(t["x"], t["x_scale"], t["w"], t["w_scale"], None, y)
    (launch,) = hip.launches()
    operands = (t["x"], t["x_scale"], t["w"], t["w_scale"])
    assert launch["args"].split() == [
        *(str(o.data_ptr()) for o in operands),
        "0",
        str(y.data_ptr()),
        *("9", "70", "48"),
    ]
    assert (launch["grid"], launch["block"], launch["lds"]) == ("2,1,1", "64,1,1", "0")
    assert launch["stream"] == str(STREAM)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_grid_and_numbers_follow_the_launch_file(hip, op):
    hip.monkeypatch.setenv("STANDIN_KERNELS", "")  # nothing runs
    numbered = {a.name: 3 + index for index, a in enumerate(op.args) if not a.is_pointer}
    device, sizes = hip.device(), {**numbered, "m": 1000, "n": 300, "k": 256}
    for variant in covering_variants(op, pairs=False):
        hip.forget_calls()
        pointers = [a for a in op.args if a.is_pointer]
        numbers = {a.name: sizes[a.name] for a in op.args if not a.is_pointer}
        prepare_launch(device, variant, numbers)(*torch.zeros(len(pointers), 16))
        launch = hip.launches()[-1]
        grid = [compile_expression(text)(sizes) for text in variant.geometry.grid]
        assert launch["grid"] == ",".join(map(str, grid))
        assert launch["args"].split()[len(pointers) :] == [str(n) for n in numbers.values()]


def test_a_kernel_is_loaded_once_per_device_and_logged(hip):
    hip.provide(SMALL)
    device = hip.device()
    with log.record() as seen:
        for rows in (1, 2, 3):
            quantize(device, torch.randn(rows, 32))
    assert hip.names().count("hipModuleLoadData") == 1
    assert dict(seen.calls) == {("quantize_fp8_token", "f32_e4m3fn", Backend.GPU): 3}


def test_operands_that_are_not_plain_memory_are_copied(hip):
    hip.provide(SMALL)
    x = torch.randn(6, 40)
    right = quantize_token(x, None, "e4m3fn")
    padded = torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    strided = torch.stack((x, -x), dim=-1)[..., 0]
    assert padded.data_ptr() % 16
    for changed in (padded, strided, x.T.contiguous().T):
        scale, q = quantize(hip.device(), changed)
        assert torch.equal(scale, right[0])
        assert torch.equal(q, right[1])


def test_another_device_is_made_current_for_the_launch(hip):
    hip.provide(SMALL)
    entered = []

    @contextlib.contextmanager
    def guard(index):
        entered.append(index)
        yield
        entered.append("left")

    device = hip.device(index=1, current=lambda: 0, guard=guard, stream=lambda i: 100 + i)
    quantize(device)
    assert entered == [1, "left"] * 2  # loading, launching
    assert "hipSetDevice 1" in hip.calls()
    assert hip.launches()[0]["stream"] == "101"


def test_a_thread_that_torch_has_not_used_is_bound_to_the_device(hip):
    hip.provide(SMALL)
    device = hip.device()
    quantize(device)
    hip.forget_calls()
    hip.set(FAIL="hipModuleLaunchKernel:201:once")
    quantize(device)
    assert hip.names() == ["hipModuleLaunchKernel", "hipSetDevice", "hipModuleLaunchKernel"]


def test_threads_do_not_mix_their_arguments(hip):
    hip.provide(SMALL)
    device, wrong = hip.device(), []
    outputs = [((3,), torch.float32), ((3, 64), torch.uint8)]
    call = Call(device, SMALL, {"m": 3, "k": 64}, outputs, [1])

    def work(seed):
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
        scale, q = quantize_token(x, None, "e4m3fn")
        for _ in range(150):
            found = call(x, None)
            if not (torch.equal(found[1], q) and torch.equal(found[0], scale)):
                wrong.append(seed)

    run_in_threads(work)
    assert not wrong
    assert hip.names().count("hipModuleLoadData") == 1


def test_the_python_part_of_a_launch_is_short(hip):
    """The best of many batches, for a busy machine; ``-s`` shows the figures."""
    hip.monkeypatch.setenv("STANDIN_KERNELS", "")
    hip.monkeypatch.setenv("STANDIN_LOG", "")
    call = Call(hip.device(), GEMM, {"m": 9, "n": 64, "k": 64}, [((9, 64), torch.float16)])
    t = gemm_case(GEMM, 9, 64, 64, torch.Generator().manual_seed(4)).tensors
    operands = (t["x"], t["x_scale"], t["w"], t["w_scale"], t["bias"], torch.empty(9, 64).half())
    batches = []
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(200):
            call.launch(*operands)
        batches.append((time.perf_counter() - start) / 200 * 1e6)
    best, median = min(batches), statistics.median(batches)
    sys.stdout.write(f"\nlaunch: {best:.2f} us in the best batch, {median:.2f} us at the median\n")
    assert min(batches) < 15  # a machine that shares its cores; torch's own loader takes 23 to 41


def test_sizes_beyond_32_bits_are_refused(hip):
    hip.provide(SMALL)
    with pytest.raises(KernelError, match=r"do not fit 32-bit integers"):
        prepare_launch(hip.device(), SMALL, {"m": 2**31, "k": 16})


def test_prepared_calls_do_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(calls, "_MOST_CALLS", 3)
    calls.forget()
    for size in range(7):
        prepared: Any = size
        calls.keep(calls.signature("op", [torch.empty(size), None], ("w",)), prepared)
    assert len(calls._calls) <= 3
    assert calls.find(calls.signature("op", [torch.empty(6), None], ("w",))) == 6
    assert calls.find(calls.signature("op", [torch.empty(6).half(), None], ("w",))) is None
    calls.forget()


# --------------------------------------------------------------------------------- what can fail


FAILURES = [
    ("hiprtcCreateProgram:3", "hiprtcCreateProgram: HIPRTC_ERROR_OTHER"),
    ("hiprtcCompileProgram:6", r"hipRTC failed \(HIPRTC_ERROR_COMPILATION\)"),
    ("hiprtcGetProgramLogSize:11", "hiprtcGetProgramLogSize: HIPRTC_ERROR_OTHER"),
    ("hiprtcGetProgramLog:11", "hiprtcGetProgramLog: HIPRTC_ERROR_OTHER"),
    ("hiprtcGetCodeSize:11", "hiprtcGetCodeSize: HIPRTC_ERROR_OTHER"),
    ("hiprtcGetCode:11", "hiprtcGetCode: HIPRTC_ERROR_OTHER"),
    ("hipSetDevice:101", "hipSetDevice: 101 hipErrorPlanted"),
    ("hipModuleLoadData:2", "HIP cannot load the object: 2 hipErrorPlanted"),
    ("hipModuleGetFunction:500", "HIP cannot find the kernel: 500 hipErrorPlanted"),
    ("hipModuleLaunchKernel:719", "HIP cannot launch the kernel: 719 hipErrorPlanted"),
    ("hipModuleLaunchKernel:201", "HIP cannot launch the kernel: 201 hipErrorPlanted"),
]


@pytest.mark.parametrize(("plan", "text"), FAILURES, ids=[plan for plan, _ in FAILURES])
def test_each_failing_call_is_an_error_that_names_it(hip, plan, text):
    hip.provide(SMALL)
    hip.set(FAIL=plan)
    with pytest.raises(KernelError, match=text):
        quantize(hip.device())
    started = hip.names().count("hiprtcCreateProgram") - plan.startswith("hiprtcCreate")
    assert hip.names().count("hiprtcDestroyProgram") == started
    hip.set(FAIL="")
    quantize(hip.device())


def test_a_compile_error_shows_the_log_and_the_command(hip):
    hip.set(FAIL="hiprtcCompileProgram:6")
    with pytest.raises(KernelError) as info:
        quantize(hip.device())
    text = str(info.value)
    assert "quantize_token.hip:7:1: error: planted" in text
    assert "--offload-arch=gfx1201 -O3 -std=c++17 -ffp-contract=off -mcumode -I" in text
    assert f"-DQK_SYMBOL={SMALL.symbol}" in text
    assert not list(cache.cache_directory().rglob("*.co"))


def test_an_object_for_another_architecture_is_refused(hip):
    hip.set(TARGET="gfx1100")
    with pytest.raises(KernelError, match="cannot load the object: 209 hipErrorNoBinaryForGpu"):
        quantize(hip.device("gfx1201"))
    hip.provide(SMALL)
    quantize(hip.device("gfx1100"))


def test_nothing_is_loaded_while_a_graph_is_captured(hip):
    hip.provide(SMALL)
    device = hip.device(capturing=lambda: True)
    with pytest.raises(KernelError, match="run the model once before capturing"):
        quantize(device)
    loaded = hip.device()
    outputs = [((1,), torch.float32), ((1, 16), torch.uint8)]
    call = Call(loaded, SMALL, {"m": 1, "k": 16}, outputs, [1])
    object.__setattr__(loaded, "capturing", lambda: True)
    call(torch.randn(1, 16), None)


MISSING = """
from quantkit.device.gpu.driver_hip import load_hip
from quantkit.errors import KernelError
try:
    print(load_hip().require_compiler())
except KernelError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("libraries", "text"),
    [
        ((), "KernelError libamdhip64: not in this process.*install PyTorch for ROCm"),
        (("libamdhip64.so",), "CompilerMissingError libhiprtc: .*QUANTKIT_OBJECTS"),
    ],
    ids=["runtime", "compiler"],
)
def test_a_missing_library_says_where_it_was_looked_for(hip, tmp_path, libraries, text):
    root = tmp_path / "partial"
    (root / "lib").mkdir(parents=True)
    for name in libraries:
        (root / "lib" / name).symlink_to(hip.root / "lib" / name)
    environment = {**os.environ, "ROCM_PATH": str(root)}
    command = [sys.executable, "-c", MISSING]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert re.match(text, result.stdout)


def test_the_copy_that_the_process_has_loaded_comes_first(hip, tmp_path):
    driver_hip.load_hip()
    other = tmp_path / "other" / "lib"
    other.mkdir(parents=True)
    (other / "libamdhip64.so").write_bytes(b"")
    hip.monkeypatch.setenv("ROCM_PATH", str(other.parent))
    found = list(driver_hip.candidates("amdhip64"))
    assert found[0] == str(hip.root / "lib" / "libamdhip64.so")
    assert str(other / "libamdhip64.so") in found


def test_a_wheels_folder_is_searched(hip, tmp_path):
    wheel = tmp_path / "site" / "_rocm_sdk_core"
    (wheel / "lib").mkdir(parents=True)
    (wheel / "__init__.py").write_text("")
    for name in ("libhiprtc.so.7", "libamdhip64.so.7"):
        (wheel / "lib" / name).write_bytes(b"")
    hip.monkeypatch.syspath_prepend(str(wheel.parent))
    for stem in ("hiprtc", "amdhip64"):
        assert str(wheel / "lib" / f"lib{stem}.so.7") in driver_hip.candidates(stem)


# ------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda a: a.name)
def test_every_gpu_row_can_be_found_and_has_a_tile_menu(arch):
    if arch.toolchain is Toolchain.HOST:
        assert not arch.devices
        return
    assert arch.devices
    menu = len(GEMM.op.axes[-1].words) if "gfx12" in arch.name else 3
    gated = 2 if arch.toolchain is Toolchain.NVRTC else menu
    tiles = {"gemm": menu, "geglu": gated, "conv": min(menu, 4)}
    menus = {
        f"{name}_{of}": count
        for name, count in tiles.items()
        for of in ("fp8", "fp8_sparse", "int8", "int8_sparse")
    }
    menus |= {f"{name}_w4a8": min(count, 4) for name, count in tiles.items()}
    added = [name for name in menus if name.startswith(("gemm", "conv"))]
    menus |= {f"{name}_residual": menus[name] for name in added}
    menus |= {op.name: 2 for op in OPS.values() if op.family.startswith("project_")}
    if arch.name.startswith("gfx10"):  # int8 alone
        menus = {name: 0 if "fp8" in name else count for name, count in menus.items()}
    assert {op: len(speed) for op, speed in arch.tile_speed} == menus
    for device in arch.devices:
        assert arch_of_device(device).target_for(device) in (device, arch.name)


@pytest.mark.parametrize(
    ("version", "properties", "name"),
    [
        ("7.1", {"gcnArchName": "gfx1201:sramecc-:xnack-", "name": "RX 7900 XTX"}, "gfx1201"),
        ("7.1", {"gcnArchName": "gfx1100"}, "gfx1100"),
        (None, {"gcnArchName": "NVIDIA H200", "major": 9, "minor": 0}, "sm_90"),
        (None, {"major": 12, "minor": 1}, "sm_121"),
    ],
)
def test_the_architecture_is_not_the_marketing_name(monkeypatch, version, properties, name):
    monkeypatch.setattr(torch.version, "hip", version)
    assert devices.device_name(SimpleNamespace(**properties)) == name


# ---------------------------------------------------------------------------------- the self-test


def test_a_sound_device_passes_its_self_test(hip):
    hip.provide(*SELF_TEST)
    selftest.run_self_test(hip.device())
    # Every tile of gfx12 on 19x21 and on a whole tile, dense and sparse.
    blocks = [128, 64, 64, 256, 256]
    launched = [launch["block"] for launch in hip.launches()]
    assert launched == [f"{block},1,1" for block in blocks for _ in range(2)] * 2


def test_every_product_of_the_self_test_is_telling(hip):
    """A matrix in which rows, columns or K positions could be swapped unseen would prove little."""
    cases = list(selftest._cases(hip.device()))
    assert {case.sizes["m"] for case in cases} == {16, 19, 64, 128, 256}
    for case in cases:
        x, one, *weights, _ = case.operands
        double = torch.float64
        how = (one, None, "e4m3fn", "e4m3fn", double)
        exact = OPS[case.kernel.operation].reference(x, one, *weights, *how, precision=double)
        expected = case.expected
        assert torch.equal(exact, expected.double())
        assert len({tuple(row) for row in expected.tolist()}) == case.sizes["m"]
        assert len({tuple(row) for row in expected.T.tolist()}) == case.sizes["n"]
        assert len({tuple(column) for column in x.T.tolist()}) == x.shape[1]
        assert expected.abs().max() < 2048


@pytest.mark.parametrize("broken", SELF_TEST, ids=lambda variant: variant.symbol)
def test_one_wrong_tile_is_found(hip, monkeypatch, broken):
    hip.provide(*SELF_TEST)
    hip.set(CORRUPT=broken.symbol)
    problem = examine(hip, monkeypatch).problem
    assert f"{broken.operation}: the self-test of {broken.name} got" in problem


def examine(hip, monkeypatch, **changes):
    device = hip.device(**changes)
    monkeypatch.setattr(selftest, "find_device", lambda index: device)
    selftest.forget()
    try:
        return selftest.state_of(0)
    finally:
        selftest.forget()


def test_a_device_that_computes_wrongly_is_refused(hip, monkeypatch):
    hip.provide(*SELF_TEST)
    assert examine(hip, monkeypatch).problem == ""
    hip.set(CORRUPT=1)
    problem = examine(hip, monkeypatch).problem
    assert "the self-test of e4m3fn_e4m3fn_tensor_tensor_f16_t0 got" in problem
    assert "wrong on gfx1201" in problem


def test_a_device_whose_kernels_do_not_compile_is_refused(hip, monkeypatch):
    hip.set(FAIL="hiprtcCompileProgram:6")
    assert "error: planted" in examine(hip, monkeypatch).problem


def test_a_self_test_during_capture_is_an_error_and_not_remembered(hip, monkeypatch):
    with pytest.raises(KernelError, match="self-test cannot run while a graph is captured"):
        examine(hip, monkeypatch, capturing=lambda: True)
    hip.provide(*SELF_TEST)
    assert examine(hip, monkeypatch).problem == ""


def test_doctor_names_the_gpu_and_all_about_it(hip, monkeypatch, tmp_path):
    hip.provide(*SELF_TEST)
    prebuilt(hip, tmp_path / "objects", sources="0" * 64)
    hip.monkeypatch.setenv("QUANTKIT_OBJECTS", str(tmp_path / "objects"))
    properties = SimpleNamespace(name="A card", gcnArchName="gfx1201", total_memory=16 * 2**30)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(selftest, "find_device", lambda index: hip.device())
    selftest.forget()
    try:
        text = CliRunner().invoke(doctor, []).stdout
        found = json.loads(CliRunner().invoke(doctor, ["--json"]).stdout)
        selftest.forget()
        hip.set(CORRUPT=1)
        broken = CliRunner().invoke(doctor, []).stdout
    finally:
        selftest.forget()
    for part in (
        "cuda:0: A card, gfx1201, 16 GiB",
        "kernels: gfx1201 policy, compiled for gfx1201; HIP 70152801: ",
        "hipRTC 7.1: ",
        f"objects: 10 cached in {cache.cache_directory()}",
        "built from other sources; build the folder again",
        "self-test: passed in",
    ):
        assert part in text, part
    assert {o["backend"] for o in found["operations"] if o["device"] == "cuda:0"} == {"gpu"}
    assert found["gpus"][0]["cached_objects"] == 10
    assert "self-test: gemm_fp8: the self-test of e4m3fn_e4m3fn_tensor_tensor_f16_t0 got" in broken


@pytest.mark.parametrize("channels", [32, 72])
def test_a_launch_that_would_read_out_of_bounds_is_refused(hip, channels):
    kernel = Variant(OPS["conv_fp8"], ("e4m3fn", "e4m3fn", "tensor", "channel", "f16", "t1"))
    shape = ConvShape(1, 4, 4, channels, 8, Windows((3, 3), padding=(1, 1, 1, 1)))
    with pytest.raises(
        KernelError, match=rf"{channels} channels, expected 64 or more, by 16; unfold"
    ):
        prepare_launch(hip.device(), kernel, shape)
