"""The loader's part in Hopper's kernels: the choice, arguments, tensor maps and shared memory.

The driver here is Python functions that record what they are called with; the real one is met in
test_hopper.py.
"""

import contextlib
import ctypes
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.device import survey
from quantkit.device.archs import arch_of_device, find_arch
from quantkit.device.gpu import devices, prepare
from quantkit.device.gpu.devices import Device
from quantkit.device.gpu.driver import Driver, TensorEntries
from quantkit.device.gpu.kernel import plan_of
from quantkit.device.gpu.kernel_choice import choose_kernel, is_hopper, why_not_hopper
from quantkit.device.gpu.launcher import prepare_launch
from quantkit.device.gpu.objects import KernelObject
from quantkit.device.gpu.tensor_maps import MAP_BYTES, encode_map
from quantkit.device.hopper import hopper_geglu as hopper_gated
from quantkit.device.hopper.hopper_gemm import (
    TILES,
    Family,
    HopperKernel,
    Sums,
    arguments,
    plan_launch,
)
from quantkit.device.hopper.tensormap import TensorMap
from quantkit.device.ops.op import Problem, Variant, WeightKind
from quantkit.device.ops.table import OPS, find_op
from quantkit.errors import KernelError
from quantkit.resources import kernel_sources
from tests.support.hopper_cases import kernel_of
from tests.support.standin_memory import Keeper

FUNCTION, STREAM = 0xF00D, 0x57A40
POINTER = ctypes.c_void_p
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, *(ctypes.c_uint,) * 7, POINTER, POINTER, POINTER)
WORDS = ("e4m3fn", "e5m2", "token", "tensor", "bf16")
DENSE = HopperKernel(TILES["c128x128"])
SPARSE = HopperKernel(TILES["c128x128"], sparse=True)
ADDS = HopperKernel(TILES["c128x160"], adds=True)
GATED = HopperKernel(hopper_gated.TILES["c256x96"], family=Family.GEGLU)
GATED_SPARSE = HopperKernel(hopper_gated.TILES["c256x96"], sparse=True, family=Family.GEGLU)


class FakeCuda:
    """Records calls; a map is its matrix's address and then what was said of it."""

    def __init__(self):
        self.launches, self.encoded, self.attributes, self.bound = [], [], [], []
        self.encode_statuses = []
        #: arguments of the kernel
        self.count = len(arguments(DENSE))
        #: of C, as cuLaunchKernel is
        self.entry = LAUNCH(self.launch)

    def encode(  # noqa: PLR0917  the order of cuTensorMapEncodeTiled
        self, place, element, rank, address, sizes, pitches, box, steps, *modes
    ):
        self.encoded.append(address)
        assert place % 64 == 0
        content = [element, rank, *sizes, *pitches, *box, *steps, *modes]
        ctypes.memset(place, 0xEE, MAP_BYTES)
        packed = struct.pack(f"<Q{len(content)}I", address, *content)
        ctypes.memmove(place, packed, len(packed))
        return self.encode_statuses.pop() if self.encode_statuses else 0

    def set_attribute(self, function, attribute, value):
        self.attributes.append((function.value, attribute, value))
        return 0

    def get_function(self, function, _, __):
        function._obj.value = FUNCTION
        return 0

    def launch(self, function, *arguments):
        *shape, stream, params, extra = arguments
        assert (function, extra) == (FUNCTION, None)
        places = list((ctypes.c_void_p * self.count).from_address(params))
        self.launches.append((shape, stream, places))
        self.values = [ctypes.string_at(place, 8) for place in places]
        self.maps = [ctypes.string_at(place, MAP_BYTES) for place in places]
        return 0

    def driver(self, **changes):
        fields = {
            "name": "CUDA",
            "path": "libcuda.so.1",
            "version": "13.0",
            "compiler": "none",
            "options": lambda _: (),
            "suffix": "cubin",
            "module_load_data": lambda _, __: 0,
            "module_get_function": self.get_function,
            "launch_kernel": self.entry,
            "explain": lambda status: f"{status}",
            "bind": self.bound.append,
            "unbound": frozenset({201}),
            "tensors": TensorEntries(self.set_attribute, self.encode),
        }
        return Driver(**{**fields, **changes})


@pytest.fixture
def cuda(monkeypatch):
    found = KernelObject(b"", Path("kernel.cubin"), prebuilt=True)
    monkeypatch.setattr(devices, "read_object", lambda *_: found)
    return FakeCuda()


def h200(cuda, **changes):
    return Device(
        index=0,
        name="sm_90",
        arch=arch_of_device("sm_90"),
        driver=cuda.driver(**changes),
        units=132,
        torch_device=torch.device("cpu"),
        current=lambda: 0,
        stream=lambda _: STREAM,
        capturing=lambda: False,
        guard=contextlib.nullcontext,
        memory=Keeper().memory(),
    )


def operands(kernel, m, n, k):
    """Return tensors in the order of the operands, y last."""
    rows = 2 * n if kernel.gated else n
    w = [torch.zeros(rows, k // 2 if kernel.sparse else k, dtype=torch.uint8)]
    if kernel.sparse:
        w.append(torch.zeros(rows, k // 8, dtype=torch.uint8))
    x, y = torch.zeros(m, k, dtype=torch.uint8), torch.zeros(m, n, dtype=torch.float16)
    given = [x, torch.ones(m), *w, torch.ones(rows), torch.zeros(rows).half()]
    if kernel.adds:
        given.append(torch.zeros_like(y))
    return [*given, torch.ones(1), y.to(torch.uint8)] if kernel.gated else [*given, y]


def map_of(spec, address):
    """What FakeCuda makes of a correct call, by cuda.h's numbers."""
    element, item = {"u8": (0, 1), "f16": (6, 2), "f32": (7, 4), "bf16": (9, 2)}[spec.element]
    swizzle = {64: 2, 128: 3}[spec.swizzle]
    rank = len(spec.sizes)
    pitches = [spec.sizes[0] * item]
    if rank == 3:
        pitches.append(spec.sizes[0] * spec.sizes[1] * item)
    said = (*spec.sizes, *pitches, *spec.box, *(1,) * rank, 0, swizzle, 3, 0)
    return struct.pack(f"<Q{2 + len(said)}I", address, element, rank, *said)


def test_hopper_devices_take_their_own_row():
    assert arch_of_device("sm_90").name == "sm_90a"
    assert arch_of_device("sm_90").target_for("sm_90") == "sm_90a"
    assert arch_of_device("sm_120").target_for("sm_120") == "sm_120"


@pytest.mark.parametrize("io", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("shape", [(300, 200, 640), (1, 8, 32), (40, 75, 2048)])
def test_maps_are_encoded_as_the_driver_wants_them(cuda, shape, sparse, io):
    kernel = HopperKernel(TILES["c128x160"], sparse=sparse, io=io)
    for spec in plan_launch(kernel, *shape).maps:
        if spec is not None:
            status, content = encode_map(cuda.encode, spec, 0x7F0012345670)
            assert status == 0
            assert len(content) == MAP_BYTES
            assert content.startswith(map_of(spec, 0x7F0012345670))


SOURCES = [
    *(DENSE, SPARSE, ADDS, GATED, GATED_SPARSE),
    kernel_of(TILES["c128x160"], Sums.INT4, adds=True),
    kernel_of(TILES["c128x128"], Sums.INT8, family=Family.CONV, adds=True),
    kernel_of(TILES["c128x128"], Sums.ACCURATE, sparse=True, family=Family.CONV),
    kernel_of(TILES["c128x128"], Sums.ACCURATE, family=Family.GELU, activation="tanh"),
    *(
        kernel_of(TILES["c128x96"], Sums.ACCURATE, family=family, io="f32")
        for family in (Family.CODES, Family.VALUES, Family.HEADS)
    ),
    kernel_of(TILES["c128x96"], Sums.ACCURATE, sparse=True, family=Family.HEADS, io="f32"),
]


@pytest.mark.parametrize("kernel", SOURCES, ids=lambda k: k.symbol)
def test_arguments_are_those_of_the_source(kernel):
    source = (kernel_sources() / kernel.source).read_text(encoding="utf-8")
    source = re.sub(r"QK_IF_RESIDUAL\(([^)]*)\)", r"\1" if kernel.adds else "", source)
    behind = {WeightKind.SPARSE: "_meta", WeightKind.INT4: "_group"}.get(kernel.op.weights)
    meta = rf"const u8* \1{behind}," if behind else ""
    source = re.sub(r"QK_META_PARAMETER\((\w+)\)", meta, source)
    parameters = re.search(r"QK_SYMBOL\(([^)]*)\)", source)[1].split(",")
    assert tuple(text.split()[-1].lstrip("*") for text in parameters) == arguments(kernel)


@pytest.mark.parametrize(
    "kernel", [DENSE, SPARSE, ADDS, GATED, GATED_SPARSE], ids=lambda k: k.operation
)
def test_arguments_are_packed_as_the_kernel_declares_them(cuda, kernel):
    m, n, k = 300, 208, 640
    device, tensors = h200(cuda), operands(kernel, m, n, k)
    cuda.count = len(arguments(kernel))
    prepare_launch(device, kernel, {"m": m, "n": n, "k": k})(*tensors)
    plan = (hopper_gated.plan_gated if kernel.gated else plan_launch)(kernel, m, n, k)
    by_name = dict(zip(operand_names(kernel), tensors, strict=True))
    names = arguments(kernel)
    ((shape, stream, places),) = cuda.launches
    assert shape == [*plan.grid, plan.block, 1, 1, kernel.shared_bytes]
    assert stream == STREAM
    assert len(places) == len(names)
    numbers = dict(zip(("m", "n", "k", "group"), plan.numbers, strict=True))
    maps = [name for name in names if name.endswith("_map")]
    specs = dict(zip(maps, plan.maps, strict=True))
    for name, value, content in zip(names, cuda.values, cuda.maps, strict=True):
        if name in specs:
            wanted = map_of(specs[name], by_name[name.removesuffix("_map")].data_ptr())
            assert content.startswith(wanted), name
        elif name in numbers:
            assert struct.unpack("<q", value) == (numbers[name],), name
        else:
            assert struct.unpack("<Q", value) == (by_name[name].data_ptr(),), name
    assert cuda.attributes == [(FUNCTION, 8, kernel.shared_bytes)]


def operand_names(kernel):
    meta, y = ["w_meta"] if kernel.sparse else [], ["y_scale", "y"] if kernel.gated else ["y"]
    added = ["residual"] if kernel.adds else []
    return ["x", "x_scale", "w", *meta, "w_scale", "bias", *added, *y]


def test_a_missing_bias_is_null_and_rows_that_cannot_be_copied_have_an_empty_map(cuda):
    x, x_scale, w, w_scale, _, _ = operands(DENSE, 4, 75, 64)
    y = torch.zeros(4, 75, dtype=torch.float16)
    prepare_launch(h200(cuda), DENSE, {"m": 4, "n": 75, "k": 64}, [4])(
        x, x_scale, w, w_scale, None, y
    )
    names = arguments(DENSE)
    assert cuda.values[names.index("bias")] == bytes(8)
    assert cuda.maps[names.index("y_map")] == bytes(MAP_BYTES)
    assert struct.unpack("<Q", cuda.values[names.index("y")]) == (y.data_ptr(),)


def test_maps_follow_the_operands_and_are_made_once_per_address(cuda):
    launcher = prepare_launch(h200(cuda), DENSE, {"m": 8, "n": 16, "k": 64})
    first, second = operands(DENSE, 8, 16, 64), operands(DENSE, 8, 16, 64)
    for tensors in (first, second, first, second):
        launcher(*tensors)
        for name, operand in (("x_map", 0), ("w_map", 2), ("y_map", -1)):
            content = cuda.maps[arguments(DENSE).index(name)]
            assert struct.unpack_from("<Q", content) == (tensors[operand].data_ptr(),)
    wanted = [
        t.data_ptr() for tensors in (first, second) for t in (tensors[0], tensors[2], tensors[-1])
    ]
    assert cuda.encoded == wanted


def test_copied_operands_are_described_where_the_copy_lies(cuda):
    tensors = operands(DENSE, 8, 16, 64)
    tensors[0] = torch.zeros(64, 8, dtype=torch.uint8).T
    prepare_launch(h200(cuda), DENSE, {"m": 8, "n": 16, "k": 64})(*tensors)
    assert cuda.encoded[0] not in (0, tensors[0].data_ptr())
    assert cuda.encoded[1:] == [tensors[2].data_ptr(), tensors[-1].data_ptr()]


def test_a_thread_without_a_context_is_bound_before_its_maps_are_made(cuda):
    cuda.encode_statuses = [201]
    prepare_launch(h200(cuda), DENSE, {"m": 8, "n": 16, "k": 64})(*operands(DENSE, 8, 16, 64))
    assert cuda.bound == [0, 0]  # loading, encoding
    assert len(cuda.encoded) == 4


def test_a_map_that_the_driver_refuses_is_an_error(cuda):
    cuda.encode_statuses = [1]
    launcher = prepare_launch(h200(cuda), DENSE, {"m": 8, "n": 16, "k": 64})
    with pytest.raises(KernelError, match="cannot describe x to the copy engine: 1"):
        launcher(*operands(DENSE, 8, 16, 64))
    assert not cuda.launches


def test_kept_maps_are_bounded(cuda, monkeypatch):
    monkeypatch.setattr("quantkit.device.gpu.launcher._MOST_MAPS", 2)
    launcher = prepare_launch(h200(cuda), DENSE, {"m": 8, "n": 16, "k": 64})
    kept = [operands(DENSE, 8, 16, 64) for _ in range(5)]
    for tensors in kept:
        launcher(*tensors)
        content = cuda.maps[0]
        assert struct.unpack_from("<Q", content) == (tensors[0].data_ptr(),)
    kept_by: list[Any] = [launcher._known, *(m.known for m in launcher._maps)]
    assert all(len(known) <= 2 for known in kept_by)


# ------------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize("op", ["gemm_fp8", "gemm_fp8_sparse"])
def test_gemms_of_hopper_run_its_kernels(cuda, op):
    device = h200(cuda)
    kernel = choose_kernel(device, OPS[op], WORDS, {"m": 2048, "n": 1280, "k": 1280})
    assert isinstance(kernel, HopperKernel)
    assert kernel.operation == op
    assert kernel.accurate
    assert kernel.name == f"e4m3fn_e5m2_token_tensor_bf16_accurate_{kernel.tile.name}"
    few = choose_kernel(device, OPS[op], WORDS, {"m": 3, "n": 1280, "k": 5120})
    assert isinstance(few, HopperKernel)
    assert few.tile.m == 16
    assert few.tile.team > 1


@pytest.mark.parametrize("op", ["gemm_fp8", "gemm_fp8_sparse"])
def test_fast_sums_are_taken_where_they_are_asked_for_and_faster(cuda, op):
    device = h200(cuda)
    fast = choose_kernel(device, OPS[op], WORDS, {"m": 8192, "n": 8192, "k": 8192}, accurate=False)
    assert isinstance(fast, HopperKernel)
    assert not fast.accurate
    assert "_fast_" in fast.name
    few = {"m": 3, "n": 1280, "k": 5120}
    assert choose_kernel(device, OPS[op], WORDS, few, accurate=False) == choose_kernel(
        device, OPS[op], WORDS, few
    )


def test_fast_sums_hold_inside_their_block(cuda, monkeypatch):
    asked = []

    def choose(*arguments, accurate):
        asked.append(accurate)
        return choose_kernel(*arguments, accurate=accurate)

    monkeypatch.setattr(prepare, "choose_kernel", choose)
    monkeypatch.setattr(prepare, "find_device", lambda _: h200(cuda))
    x, x_scale, w, w_scale, _, _ = operands(DENSE, 8, 16, 64)
    words = ("e4m3fn", "e4m3fn", "token", "channel", "f16")
    given = (x, x_scale, w, w_scale, None)
    problem = Problem(words, {"m": 8, "n": 16, "k": 64})
    prepared = (OPS["gemm_fp8"], problem, given, (((8, 16), torch.float16),), ())
    for block in (contextlib.nullcontext, quantkit.fast_sums):
        with block():
            prepare.prepare(*prepared)
    prepare.prepare(*prepared)
    assert asked == [True, False, True]


@pytest.mark.parametrize("op", ["geglu_fp8", "geglu_fp8_sparse"])
def test_geglu_is_one_kernel(cuda, op, monkeypatch):
    device, sizes = h200(cuda), {"m": 2048, "n": 5120, "k": 1280}
    assert is_hopper(device)
    words = (*WORDS, "e5m2")
    kernel, fast = (choose_kernel(device, OPS[op], words, sizes, accurate=a) for a in (True, False))
    assert isinstance(kernel, HopperKernel)
    assert kernel.operation == fast.operation == op
    assert kernel.name == f"e4m3fn_e5m2_token_tensor_bf16_e5m2_accurate_{kernel.tile.name}"
    assert "_fast_" in fast.name
    gated = GATED_SPARSE if op.endswith("sparse") else GATED
    x, x_scale, *weights, y_scale, _ = operands(gated, 8, 16, 64)
    monkeypatch.setattr(prepare, "find_device", lambda _: device)
    words = ("e4m3fn", "e4m3fn", "token", "channel", "f16", "e4m3fn")
    problem = Problem(words, {"m": 8, "n": 16, "k": 64})
    outputs = (((8, 16), torch.uint8),)
    call = prepare.prepare(OPS[op], problem, (x, x_scale, *weights, y_scale), outputs, ())
    cuda.count = len(arguments(gated))
    (codes,) = call(x, x_scale, *weights, y_scale)
    assert (codes.shape, codes.dtype) == ((8, 16), torch.uint8)
    assert len(cuda.launches) == 1


def test_other_devices_and_old_drivers_take_a_tile_of_the_menu(cuda):
    sizes = {"m": 2048, "n": 1280, "k": 1280}
    old = h200(cuda, tensors=None, version="11.8")
    assert "driver 11.8 has no tensor maps" in why_not_hopper(old)
    assert isinstance(choose_kernel(old, OPS["gemm_fp8"], WORDS, sizes), Variant)
    assert "sm_89 policy (mma.sync), compiled for sm_90a: driver 11.8" in survey._kernels_of(old)
    assert survey._kernels_of(h200(cuda)) == "wgmma and wgmma.sp, compiled for sm_90a"
    ada = Device(**{**vars(h200(cuda)), "name": "sm_89", "arch": find_arch("sm_89")})
    assert isinstance(choose_kernel(ada, OPS["gemm_fp8"], WORDS, sizes), Variant)


@pytest.mark.parametrize("op", ["geglu_fp8", "geglu_fp8_sparse"])
def test_columns_that_no_piece_of_16_codes_holds_are_gated_by_the_menu(cuda, op):
    words, sizes = (*WORDS, "e4m3fn"), {"m": 300, "n": 45, "k": 64}
    kernel = choose_kernel(h200(cuda), OPS[op], words, sizes)
    assert kernel == Variant(find_op(op), (*words, "t1"))
    assert isinstance(choose_kernel(h200(cuda), OPS[op], words, {**sizes, "n": 48}), HopperKernel)


@pytest.mark.parametrize("k", [16, 32, 48, 128, 384, 512, 5120])
@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 4096])
def test_every_k_that_the_operations_take_has_a_hopper_kernel(cuda, m, k):
    device = h200(cuda)
    for op, multiple in (("gemm_fp8", 16), ("gemm_fp8_sparse", 32)):
        if k % multiple == 0:
            sizes = {"m": m, "n": 75, "k": k}
            plan = plan_of(choose_kernel(device, OPS[op], WORDS, sizes), sizes, device.units)
            assert all(spec is None or spec.pitches[0] % 16 == 0 for _, spec in plan.maps)


def test_sizes_beyond_32_bits_are_refused():
    with pytest.raises(KernelError, match="do not fit 32-bit integers"):
        plan_of(DENSE, {"m": 2**31, "n": 16, "k": 64}, 132)


def test_a_spec_names_its_bytes():
    assert TensorMap("y", "f32", (72, 4), (32, 32)).pitches == (288,)
    assert TensorMap("x", "bf16", (48, 5, 4, 3), (64, 8, 4, 1)).pitches == (96, 480, 1920)


def test_a_map_of_pictures_says_what_it_leaves_out(cuda):
    spec = TensorMap("x", "u8", (48, 9, 7, 3), (128, 32, 4, 1), steps=(1, 2, 3, 1))
    status, content = encode_map(cuda.encode, spec, 0x7F0012345670)
    assert status == 0
    # element, rank, sizes, pitches, boxes with what steps leave out, steps, modes
    said = (0, 4, 48, 9, 7, 3, 48, 432, 3024, 128, 64, 12, 1, 1, 2, 3, 1, 0, 3, 3, 0)
    assert content.startswith(struct.pack("<Q21I", 0x7F0012345670, *said))
