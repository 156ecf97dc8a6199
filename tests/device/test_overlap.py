"""Launches that start before the kernel ahead has ended: every kernel waits for it, and when."""

import ctypes
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.archs import find_arch
from quantkit.device.gpu import devices, driver_hip, nvrtc
from quantkit.device.gpu import gpu_calls as calls
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.gpu.overlap import LaunchConfig, waits
from quantkit.device.hopper.hopper_attention import HopperAttention
from quantkit.device.hopper.hopper_gemm import TILES, Family, Sums
from quantkit.device.ops.table import OPS, default_variants
from quantkit.device.tile_choice import variants_for
from quantkit.resources import kernel_sources
from tests.support.conv_cases import SAME
from tests.support.hopper_cases import kernel_of, symbol
from tests.support.kernel_cases import need, operate
from tests.support.sampling import one_of_each
from tests.support.standin_calls import SMALL, quantize
from tests.support.standin_hip import STREAM

WAIT = "griddepcontrol.wait;"
#: Memory of the device in PTX: what is not a parameter's or shared memory's. Prefetches may stand
#: before the wait.
TOUCH = re.compile(
    r"\b((ld|st|atom|red)\b(?![\w.]*\.(param|shared|local|const)\b)"
    r"|cp\.(async|reduce\.async)\.(?!(bulk\.)?(commit|wait|prefetch)|wait_|mbarrier))"
)


def _portable():
    """Yield a kernel of every source that any NVIDIA card may run."""
    variants = variants_for(find_arch("sm_89"), default_variants())
    yield from {(variant.op.source, variant.op.weights): variant for variant in variants}.values()


def _hopper():
    """Yield a kernel of every source for Hopper, one for each kind of sums and of what is added."""
    weights = ((Sums.ACCURATE, False), (Sums.FAST, True), (Sums.INT4, False))
    tiles = {
        Family.GEMM: "k64x16",
        Family.CONV: "p128x128",
        Family.GEGLU: "c256x128",
        Family.GELU: "c128x192",
    }
    for family in Family:
        if family not in tiles:
            yield kernel_of(TILES["c128x96"], Sums.ACCURATE, family=family, io="f32")
            continue
        for sums, sparse in weights:
            options = {"activation": "tanh"} if family is Family.GELU else {}
            yield kernel_of(TILES[tiles[family]], sums, sparse=sparse, family=family, **options)
    yield kernel_of(TILES["c128x96"], Sums.ACCURATE, sparse=True, family=Family.HEADS, io="f32")
    yield kernel_of(TILES["c128x160"], Sums.ACCURATE, adds=True)
    attention = HopperAttention(OPS["attention_fp8"], "f16", "e4m3fn", 64)
    yield from (attention, replace(attention, maps=True))


KERNELS = (*_portable(), *_hopper())


# ------------------------------------------------------------------------------ what is compiled


def compile_text(text, name, *options, binary="CUBIN"):
    need(nvrtc.load_nvrtc)
    compiler = replace(nvrtc.load_nvrtc(), binary=binary)
    return compiler.compile(text, name, ["-std=c++17", "-default-device", *options])[0]


def body(kernel, target):
    """Return the lines of a kernel in PTX."""
    sources = kernel_sources()
    text = (sources / kernel.source).read_text(encoding="utf-8")
    options = (f"--gpu-architecture={target}", f"-I{sources / 'include'}", *kernel.defines)
    ptx = compile_text(text, kernel.source, *options, binary="PTX").decode()
    return [line.strip() for line in ptx.partition(".entry")[2].splitlines()]


def test_every_source_is_looked_at():
    sources = {path.name for path in kernel_sources().glob("*.hip")}
    assert {kernel.source for kernel in KERNELS} == sources


#: Sums and weights change what follows the wait.
OF_EACH_SOURCE = one_of_each(KERNELS, lambda k: (k.source, getattr(k, "family", None)))


@pytest.mark.parametrize("kernel", OF_EACH_SOURCE, ids=symbol)
def test_kernels_wait_before_they_touch_memory(kernel):
    lines = body(kernel, "compute_90a" if "_sm90" in kernel.source else "compute_90")
    at = lines.index(WAIT)
    before, after = lines[:at], lines[at:]
    assert not [line for line in before if TOUCH.search(line)]
    assert [line for line in after if TOUCH.search(line)]
    # No way leads around it.
    labels = {line.partition(":")[0] for line in after if line.startswith("$")}
    jumps = [line.rstrip(";").split()[-1] for line in before if "bra" in line.split()]
    assert not labels.intersection(jumps)
    assert "griddepcontrol.launch_dependents;" in lines


@pytest.mark.parametrize("kernel", KERNELS[:1], ids=symbol)
def test_kernels_for_older_cards_have_no_such_instruction(kernel):
    assert not [line for line in body(kernel, "compute_89") if "griddepcontrol" in line]


@pytest.mark.parametrize("target", ["sm_89", "sm_90a", "sm_120"])
def test_the_machine_code_tells_whether_a_kernel_waits(target):
    text = """#include "platform.h"
    QK_KERNEL(32) patient(int* x) { qk::start(); x[0] = 1; }
    QK_KERNEL(32) hasty(int* x) { qk::let_next_start(); x[0] = 1; }"""
    include = f"-I{kernel_sources() / 'include'}"
    cubin = compile_text(text, "x", f"--gpu-architecture={target}", include)
    assert waits(cubin, "patient") == (target != "sm_89")
    assert not waits(cubin, "hasty")
    assert not waits(cubin, "absent")


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(40)])
def test_damaged_objects_are_refused(content):
    with pytest.raises(ValueError, match=r"ELF|cut short"):
        waits(content, "f")


def test_launches_are_laid_out_as_the_drivers_header_says(tmp_path):
    """Outside oracle: cuda.h of the wheel that brings the compiler."""
    library = Path(need(nvrtc.load_nvrtc).path)
    if not (library.parents[1] / "include" / "cuda.h").exists():
        pytest.skip("the wheel has no cuda.h")
    names = ("gridDimX", "blockDimX", "sharedMemBytes", "hStream", "attrs", "numAttrs")
    offsets = ", ".join(f"offsetof(CUlaunchConfig, {name})" for name in names)
    source = tmp_path / "layout.c"
    source.write_text(
        f"""#include <cuda.h>
        #include <stddef.h>
        #include <stdio.h>
        int main(void) {{
          const size_t all[] = {{{offsets}, sizeof(CUlaunchConfig), sizeof(CUlaunchAttribute),
            offsetof(CUlaunchAttribute, value),
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION}};
          for (size_t i = 0; i < sizeof all / sizeof *all; ++i) printf("%zu\\n", all[i]);
        }}"""
    )
    compiler = need(compilers.host_compiler)
    program = tmp_path / "layout"
    include = f"-I{library.parents[1] / 'include'}"
    subprocess.run(
        [*compiler.command, "-x", "c", include, str(source), "-o", str(program)], check=True
    )
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    fields = dict(LaunchConfig._fields_)
    pointer: Any = fields["attributes"]
    attribute = pointer._type_
    mine = [getattr(LaunchConfig, name).offset for name in fields]
    mine += [ctypes.sizeof(LaunchConfig), ctypes.sizeof(attribute), attribute.value.offset, 6]
    assert list(map(int, said.split())) == mine


# ------------------------------------------------------------------------------ what is launched


@pytest.fixture
def overlapping_device(hip, monkeypatch):
    """A device of the stand-in whose kernels wait, and the launches that its driver was given."""
    driver, seen = driver_hip.load_hip(), []

    def launch(config, function, parameters, extra):
        config = ctypes.cast(config, ctypes.POINTER(LaunchConfig)).contents
        attributes = [config.attributes[i] for i in range(config.count)]
        seen.append([(a.id, a.value[0]) for a in attributes])
        numbers = (*config.grid, *config.block, config.shared_bytes)
        function, *rest = map(ctypes.c_void_p, (function, config.stream, parameters, extra))
        return driver.launch_kernel(function, *numbers, *rest)

    entry = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)(launch)
    monkeypatch.setattr(devices, "waits", lambda content, symbol: symbol == SMALL.symbol)
    return hip.device(driver=replace(driver, launch_overlapping=entry)), seen


def test_kernels_that_wait_are_launched_to_overlap(hip, overlapping_device):
    device, seen = overlapping_device
    hip.provide(SMALL)
    x = torch.randn(5, 48)
    wanted = quantize(hip.device(), x)
    found = quantize(device, x)
    assert seen == [[(6, 1)]]
    assert all(map(torch.equal, found, wanted))
    plain, overlapped = (
        {key: launch[key] for key in ("grid", "block", "lds", "stream")}
        for launch in hip.launches()
    )
    assert overlapped == plain
    assert overlapped["stream"] == str(STREAM)


def test_other_kernels_are_launched_as_ever(hip, overlapping_device, monkeypatch):
    device, seen = overlapping_device
    monkeypatch.setattr(devices, "waits", lambda *_: False)
    hip.provide(SMALL)
    quantize(device)
    assert not seen
    assert len(hip.launches()) == 1


def test_an_overlapping_launch_follows_the_stream(hip, overlapping_device):
    device, _ = overlapping_device
    hip.provide(SMALL)
    streams = iter((STREAM, 0, STREAM + 16))
    device = replace(device, stream=lambda _: next(streams))
    sizes, outputs = {"m": 5, "k": 48}, [((5,), torch.float32), ((5, 48), torch.uint8)]
    call = Call(device, SMALL, sizes, outputs, [1])
    for _ in range(3):
        call(torch.randn(5, 48), None)
    assert [launch["stream"] for launch in hip.launches()] == [str(STREAM), "0", str(STREAM + 16)]


# ------------------------------------------------------------------------------ on a GPU

FMT = ("e4m3fn", "e4m3fn", torch.float16)


def drawn_product(n, k):
    """Return operands of a product: codes of weights, their scales, a bias."""
    values = torch.randn(n, k) * 40
    codes = values.clamp(-440, 440).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.full((n,), 1e-3), torch.randn(n).half()


def drawn_weights(k):
    sizes = ((k, k), (8 * k, k), (k, 4 * k), (k, 9 * k))
    return [torch.tensor([0.05]), *(t for n, depth in sizes for t in drawn_product(n, depth))]


def chain(x, operands, turns):
    """Eleven small operations that need each other's results in each turn, one of them torch's."""
    scale, *products = operands
    plain, gated, down, conv = (products[i : i + 3] for i in range(0, 12, 3))

    def norm(pictures, activation):
        parts = operate("group_partials", pictures, None, 8)
        operands = (pictures, None, parts, None, None, None, scale)
        return operate("group_norm_codes_fp8", *operands, 1e-5, activation, "e4m3fn")

    for _ in range(turns):
        pictures = x.view(2, -1, x.shape[1])
        q = norm(pictures, "").view_as(x)
        x = operate("gemm_fp8_residual", q, scale, *plain, x, *FMT)
        s, q = operate("quantize_fp8_token", x, None, "e4m3fn")
        h = operate("geglu_fp8", q, s, *gated, scale, "e4m3fn", *FMT)
        x = operate("gemm_fp8_residual", h, scale, *down, x, *FMT) * 0.5
        pictures = x.view(2, -1, x.shape[1])
        q, shape = norm(pictures, "silu"), (2, 8, -1, x.shape[1])
        added = (pictures.view(shape), SAME.numbers)
        y = operate("conv_fp8_residual", q.view(shape), scale, *conv, *added, *FMT).view_as(x)
        q = operate("quantize_fp8_static", y, None, scale, "e4m3fn")
        x = operate("gemm_fp8_residual", q, scale, *plain, y, *FMT)
    return x


@pytest.fixture
def overlaps(monkeypatch):
    """A call that says whether kernels, loaded anew, overlap."""
    if not torch.cuda.is_available() or torch.version.hip:
        pytest.skip("torch sees no NVIDIA GPU")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels cannot overlap before compute capability 9.0")

    def forget():
        calls.forget()
        devices.find_device(0)._functions.clear()

    def say(on):
        monkeypatch.setattr(devices, "waits", waits if on else lambda *_: False)
        forget()

    yield say
    forget()


@pytest.mark.gpu
@pytest.mark.xdist_group("gpu")
@pytest.mark.parametrize(("rows", "k", "turns"), [(16, 640, 10), (128, 64, 20), (2048, 640, 5)])
def test_overlapping_kernels_compute_the_same(overlaps, rows, k, turns):
    """With new inputs each time: what is read too early is a result of the inputs before."""
    torch.manual_seed(3)
    operands, x = [t.cuda() for t in drawn_weights(k)], torch.empty(rows, k).half().cuda()
    inputs = [torch.randn(rows, k).half().cuda() for _ in range(30)]
    overlaps(False)
    wanted = [chain(given, operands, turns) for given in inputs]
    assert not torch.equal(wanted[0], wanted[1])
    overlaps(True)
    assert all(
        torch.equal(chain(g, operands, turns), w) for g, w in zip(inputs, wanted, strict=True)
    )
    assert any(f.overlaps for f in devices.find_device(0)._functions.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x, operands, turns)
    found = []
    for given in inputs:
        x.copy_(given)
        graph.replay()
        found.append(y.clone())
    assert all(map(torch.equal, found, wanted))
