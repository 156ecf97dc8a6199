"""Objects built ahead of time: the manifest, the gates, and the command over both."""

import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from quantkit.cli.doctor_command import doctor
from quantkit.cli.kernels_command import kernels
from quantkit.device import compilers
from quantkit.device.aot.check import check_folder, required_instruction
from quantkit.device.aot.codeobject import read_amd_kernels, read_nvidia_kernels
from quantkit.device.aot.elf import read_sections, unpack_message
from quantkit.device.aot.manifest import describe_kernel, read_manifest
from quantkit.device.aot.object_build import build
from quantkit.device.archs import ARCHS
from quantkit.device.geometry import compile_expression
from quantkit.device.gpu import nvrtc
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS
from quantkit.errors import (
    ArtefactError,
    CheckpointError,
    CompilerMissingError,
    KernelError,
    OutputError,
)
from quantkit.inference.layers.layer_choices import op_of
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.kernel_cases import need

WORDS = ("e4m3fn", "e4m3fn", "token", "channel", "f16", "t1")
VARIANTS = (
    Variant(OPS["gemm_fp8"], WORDS),
    Variant(OPS["gemm_fp8_sparse"], WORDS),
    Variant(OPS["quantize_fp8_token"], ("bf16", "e4m3fn", "smooth")),
)
TYPES = {"u8*", "f16*", "bf16*", "f32*", "i32"}


@pytest.fixture(scope="module")
def amd(tmp_path_factory):
    """A folder of gfx1201 objects; read-only."""
    need(compilers.clang)
    need(compilers.objdump)
    folder = tmp_path_factory.mktemp("objects") / "gfx1201"
    build("gfx1201", folder, VARIANTS)
    return folder


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory):
    """A folder of sm_89 cubins; read-only."""
    need(nvrtc.load_nvrtc)
    folder = tmp_path_factory.mktemp("objects") / "sm_89"
    build("sm_89", folder, VARIANTS)
    return folder


@pytest.fixture
def broken(amd, tmp_path):
    return shutil.copytree(amd, tmp_path / "broken")


def edit(folder, **changes):
    """Change the first kernel's entry in the manifest."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["kernels"][0].update(changes)
    path.write_text(json.dumps(content))


def problems(folder):
    return [text for finding in check_folder(folder).findings for text in finding.problems]


# ---------------------------------------------------------------------------------- the manifest


@pytest.mark.parametrize("folder", ["amd", "nvidia"])
def test_manifest_tells_everything_that_a_launch_needs(folder, request):
    folder = request.getfixturevalue(folder)
    content = json.loads((folder / "manifest.json").read_text())
    for kernel, variant in zip(content["kernels"], VARIANTS, strict=True):
        assert (kernel["op"], kernel["variant"]) == (variant.op.name, variant.name)
        assert (folder / kernel["file"]).is_file()
        assert kernel["symbol"] == variant.symbol
        assert [argument["name"] for argument in kernel["args"]] == [
            argument.name for argument in variant.op.args
        ]
        assert {argument["type"] for argument in kernel["args"]} <= TYPES
        names = {argument["name"]: 100 for argument in kernel["args"]}
        assert all(compile_expression(text)(names) >= 1 for text in kernel["grid"])
        assert kernel["spills"] == kernel["scratch_bytes"] == 0
        assert 0 < kernel["vgprs"] <= 256
        assert kernel["formula"] == variant.op.formula


def names_of(kernel):
    return " ".join(argument.name for argument in kernel.args)


def test_manifest_names_the_operands_as_promised(amd):
    dense, sparse, quantize = read_manifest(amd).kernels
    assert names_of(dense) == "x x_scale w w_scale bias y m n k"
    assert names_of(sparse) == "x x_scale w w_meta w_scale bias y m n k"
    assert names_of(quantize) == "x smooth scale q m k"
    assert {a.name: a.type for a in quantize.args}["x"] == "bf16*"
    assert [a.name for a in dense.args if a.access == "write"] == ["y"]
    assert [a.name for a in quantize.args if a.access == "write"] == ["scale", "q"]
    assert [a.name for a in dense.args if a.null] == ["bias"]


def test_reading_a_manifest_gives_what_was_written(amd):
    (resources,) = read_amd_kernels((amd / f"{VARIANTS[0].symbol}.co").read_bytes())
    written = describe_kernel(VARIANTS[0], amd / f"{VARIANTS[0].symbol}.co", resources)
    assert read_manifest(amd).kernels[0] == written


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not JSON"),
        ("[]", "found list, expected a JSON object"),
        ('{"manifest_version": 2}', "has manifest_version 2, this quantkit reads 1"),
        ('{"manifest_version": 1, "kernels": [{}]}', "damaged .*build the folder again"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, text, match):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ArtefactError, match=match):
        read_manifest(tmp_path)


def test_a_missing_manifest_says_what_makes_one(tmp_path):
    with pytest.raises(ArtefactError, match=r"missing; .*'quantkit kernels build'"):
        read_manifest(tmp_path)


# ---------------------------------------------------------------------------------- the building


def test_an_output_that_exists_is_kept_without_force(amd):
    before = sorted(path.name for path in amd.iterdir())
    with pytest.raises(OutputError, match="exists already; set force to replace it"):
        build("gfx1201", amd, VARIANTS[:1])
    assert sorted(path.name for path in amd.iterdir()) == before


def test_a_build_elsewhere_has_the_same_bytes(amd, tmp_path):
    (again,) = build("gfx1201", tmp_path / "a" / "gfx1201", VARIANTS[:1]).kernels
    assert (tmp_path / "a" / "gfx1201" / again.file).read_bytes() == (amd / again.file).read_bytes()


def test_a_build_that_fails_leaves_nothing(tmp_path, monkeypatch):
    need(compilers.clang)
    sources = tmp_path / "kernels"
    sources.mkdir()
    (sources / VARIANTS[0].op.source).write_text("this is no HIP\n")
    monkeypatch.setattr("quantkit.device.aot.object_build.kernel_sources", lambda: sources)
    with pytest.raises(KernelError, match=r"(?s)for gfx1201: clang failed.*-mcumode.*error:"):
        build("gfx1201", tmp_path / "out", VARIANTS[:1])
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]


def test_nvrtc_errors_show_the_log():
    library = need(nvrtc.load_nvrtc)
    with pytest.raises(KernelError, match=r'(?s)x\.hip: NVRTC failed.*identifier "nothing"'):
        library.compile("__global__ void f() { nothing(); }", "x.hip", [])


def test_targets_without_objects_are_refused(tmp_path):
    with pytest.raises(KernelError, match="target host: is compiled at first use"):
        build("host", tmp_path / "out", VARIANTS)
    with pytest.raises(KernelError, match="target 'gfx90a': unknown, expected one of gfx1200"):
        build("gfx90a", tmp_path / "out", VARIANTS)


# ------------------------------------------------------------------------------------- the gates


def test_resources_agree_with_llvm(amd):
    """Outside oracle: llvm-readelf prints the same note."""
    tool = shutil.which("llvm-readelf-22") or shutil.which("llvm-readelf")
    if tool is None:
        need(lambda: _missing("llvm-readelf (llvm-22)"))
    for kernel in read_manifest(amd).kernels:
        command = [tool, "--notes", str(amd / kernel.file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        note = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        note = {key.strip(): value.strip() for key, value in note.items()}
        assert int(note[".vgpr_count"]) == kernel.vgprs
        assert int(note[".sgpr_count"]) == kernel.sgprs
        assert int(note[".group_segment_fixed_size"]) == kernel.lds_bytes
        assert int(note[".max_flat_workgroup_size"]) == kernel.block


def _missing(what):
    raise CompilerMissingError(what)


def test_nvidia_resources_agree_with_the_compilers_log(nvidia):
    """Outside oracle: what ptxas prints for the same options."""
    from quantkit.resources import kernel_sources

    variant, entry = VARIANTS[0], read_manifest(nvidia).kernels[0]
    text = (kernel_sources() / variant.op.source).read_text()
    options = ["--gpu-architecture=sm_89", "-std=c++17", "-default-device", "--ptxas-options=-v"]
    include = f"-I{kernel_sources() / 'include'}"
    cubin, said = nvrtc.load_nvrtc().compile(text, "g", [*options, include, *variant.defines])
    assert f"Used {entry.vgprs} registers" in said
    assert f"{entry.lds_bytes} bytes smem" in said
    (read,) = read_nvidia_kernels(cubin)
    assert f"{read.scratch} bytes stack frame" in said


def test_nvidia_spills_are_seen():
    library = need(nvrtc.load_nvrtc)
    source = """extern "C" __global__ void f(float* x, int n) {
      float v[64];
      for (int i = 0; i < 64; ++i) v[i] = x[i * n];
      for (int i = 0; i < n; ++i) v[i % 64] += v[(i * 7) % 64];
      for (int i = 0; i < 64; ++i) x[i] = v[i];
    }"""
    (read,) = read_nvidia_kernels(library.compile(source, "f", ["--gpu-architecture=sm_89"])[0])
    assert read.scratch == 256
    assert read.spills == 64


def test_amd_spills_fail_the_gate(amd, tmp_path):
    """A real object whose registers do not suffice, under the name of a kernel of ours."""
    kernel = read_manifest(amd).kernels[0]
    source = tmp_path / "spill.hip"
    source.write_text(
        'extern "C" __attribute__((global, amdgpu_num_vgpr(24))) void '
        # volatile: else the compiler loads again behind the barrier
        f"{kernel.symbol}(volatile float* x, int n) {{\n"
        "  float v[64];\n"
        "  for (int i = 0; i < 64; ++i) v[i] = x[i * n];\n"
        "  __builtin_amdgcn_s_barrier();\n"
        "  for (int i = 0; i < 64; ++i) x[i] = v[i] * v[63 - i];\n}\n"
    )
    folder = shutil.copytree(amd, tmp_path / "objects")
    options = [*compilers.clang().command, "-x", "hip", "--offload-arch=gfx1201", "-O3"]
    options += ["--cuda-device-only", "-nogpulib", "-nogpuinc", "--no-gpu-bundle-output"]
    subprocess.run([*options, "-o", str(folder / kernel.file), str(source)], check=True)
    found = "; ".join(problems(folder))
    assert re.search(r"[1-9]\d* registers spilled, [1-9]\d+ bytes of scratch", found)
    assert "SHA-256 differs" in found
    assert "no v_wmma_f32_16x16x16_fp8_fp8 in the code (matrix instructions: none)" in found
    assert "arguments are" in found


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sha256": "0" * 64}, "SHA-256 differs"),
        ({"vgprs": 1}, "manifest says VGPRs, spills, LDS (1, 0, 20480)"),
        ({"symbol": "other"}, "expected other"),
        ({"file": "nothing.co"}, "nothing.co cannot be read"),
        ({"file": "manifest.json"}, "not a little-endian 64-bit ELF file"),
        ({"op": "gemm_fp8_sparse"}, "no v_swmmac_f32_16x16x32_fp8_fp8 in the code"),
        ({"args": []}, "arguments are"),
    ],
)
def test_the_gates_close(broken, changes, problem):
    edit(broken, **changes)
    assert problem in "; ".join(problems(broken))


def test_a_truncated_object_fails_the_gate(broken):
    path = broken / f"{VARIANTS[0].symbol}.co"
    path.write_bytes(path.read_bytes()[:3000])
    assert "cannot be read" in "; ".join(problems(broken))


def test_lds_over_the_limit_fails_the_gate(amd, monkeypatch):
    from quantkit.device.aot import check

    small = {**vars(ARCHS["gfx1201"]), "lds_limit": 1024}
    monkeypatch.setattr(check, "find_arch", lambda name: type(ARCHS["gfx1201"])(**small))
    assert "20480 bytes of LDS, gfx1201 allows 1024" in "; ".join(problems(amd))


@pytest.mark.parametrize(
    ("arch", "op", "formats", "instruction"),
    [
        ("gfx1200", "gemm_fp8", ("e4m3fn", "e4m3fn"), "v_wmma_f32_16x16x16_fp8_fp8"),
        ("gfx1201", "gemm_fp8", ("e4m3fn", "e5m2"), "v_wmma_f32_16x16x16_bf8_fp8"),
        ("gfx1201", "gemm_fp8_sparse", ("e4m3fn", "e4m3fn"), "v_swmmac_f32_16x16x32_fp8_fp8"),
        ("gfx1201", "gemm_fp8_sparse", ("e5m2", "e4m3fn"), "v_swmmac_f32_16x16x32_fp8_bf8"),
        ("gfx1100", "gemm_fp8", ("e4m3fn", "e4m3fn"), "v_wmma_f32_16x16x16_f16"),
        ("sm_89", "gemm_fp8_sparse", ("e4m3fn", "e4m3fn"), "QMMA"),
    ],
)
def test_which_matrix_instruction_is_meant(amd, arch, op, formats, instruction):
    words = dict(zip(("x_format", "w_format"), formats, strict=True))
    (kernel,) = (k for k in read_manifest(amd).kernels if k.op == op)
    kernel.choices.update(words)
    assert required_instruction(ARCHS[arch], kernel) == instruction


# ---------------------------------------------------------------------------- ELF and MessagePack


@pytest.mark.parametrize(
    ("data", "value"),
    # Golden bytes by hand from the MessagePack specification, 2017 edition.
    [
        (b"\x07", 7),
        (b"\xff", -1),
        (b"\xcd\x01\x00", 256),
        (b"\xd3" + struct.pack(">q", -5), -5),
        (b"\xcb" + struct.pack(">d", 0.5), 0.5),
        (b"\xa2hi", "hi"),
        (b"\xd9\x02hi", "hi"),
        (b"\xc4\x01\x00", b"\x00"),
        (b"\x93\x01\xc0\xc3", [1, None, True]),
        (b"\x82\xa1a\x01\xa1b\x90", {"a": 1, "b": []}),
        (b"\xdc\x00\x01\xc2", [False]),
        (b"\xde\x00\x01\xa1k\xce\x00\x01\x00\x00", {"k": 65536}),
    ],
)
def test_messagepack(data, value):
    assert unpack_message(data) == value


@pytest.mark.parametrize("data", [b"", b"\xcd\x01", b"\xa5hi", b"\x92\x01", b"\xd9"])
def test_messagepack_that_is_cut_short_is_refused(data):
    with pytest.raises(ValueError, match="cut short"):
        unpack_message(data)


def test_messagepack_extensions_are_refused():
    with pytest.raises(ValueError, match="type 0xc7"):
        unpack_message(b"\xc7\x00\x00")


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"MZ" + bytes(100), b"\x7fELF\x01\x01" + bytes(90)]
)
def test_what_is_no_elf_is_refused(data):
    with pytest.raises(ValueError, match="not a little-endian 64-bit ELF file"):
        read_sections(data)


# ------------------------------------------------------------------------------------ the command


def invoke(*arguments, command=kernels):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_list_as_json_holds_both_tables():
    content = json.loads(invoke("list", "--json").stdout)
    assert [op["name"] for op in content["operations"]] == list(OPS)
    assert content["targets"] == list(ARCHS)


def test_list_shows_the_formulas():
    assert "w[j, k]" in invoke("list").stdout


def test_build_and_check_from_the_command_line(tmp_path):
    need(nvrtc.load_nvrtc)
    out = tmp_path / "objects"
    built = invoke("build", "--target", "sm_89", "--op", "quantize_fp8_token", "-o", out, "-q")
    assert (built.exit_code, built.stdout) == (
        0,
        f"{out}: 4 kernels for sm_89, NVRTC {nvrtc.load_nvrtc().version}\n",
    )
    checked = invoke("check", out, "--json")
    assert checked.exit_code == 0
    (report,) = json.loads(checked.stdout)
    assert report["passed"]
    assert len(report["kernels"]) == 4


def test_check_fails_with_exit_code_one(broken):
    edit(broken, vgprs=1)
    result = invoke("check", broken)
    assert result.exit_code == 1
    assert "1 with problems" in result.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"choices": {"tile": word}}, f"tile '{word}', which is not on the menu")
          for word in ("tx", "t99", "t-1", "t", "no", "1")),
        *(({"block": block}, "expected 1 to 1024") for block in (0, -1, 1025, 10**39)),
    ],
)  # fmt: skip
def test_check_refuses_a_manifest_of_no_kernel(broken, changes, message):
    edit(broken, **changes)
    with pytest.raises(ArtefactError, match=message):
        check_folder(broken)


def test_check_may_build_by_itself():
    need(nvrtc.load_nvrtc)
    result = invoke("check", "--target", "sm_89", "--op", "quantize_fp8_static", "--quiet")
    assert result.exit_code == 0
    assert "sm_89: 4 kernels, 0 with problems" in result.stdout


def test_dry_run_writes_nothing(tmp_path):
    result = invoke("build", "--target", "gfx1201", "--all", "-o", tmp_path / "out", "-n", "--json")
    every = len(json.loads(result.stdout)["kernels"])
    result = invoke("build", "--target", "gfx1201", "-o", tmp_path / "out", "-n", "--json")
    usual = len(json.loads(result.stdout)["kernels"])
    page = Path(__file__).parents[2] / "docs/reference/kernels.md"
    assert f"# {usual} objects; --all for {every}\n" in page.read_text(encoding="utf-8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("build", "--target", "gfx9", "-o", "x"), "'gfx9' is unknown, expected one of gfx1200"),
        (("build", "--target", "host", "-o", "x"), "'host' is unknown"),
        (("build", "--target", "sm_89", "--op", "conv", "-o", "x"), "'conv' is unknown"),
        (("check",), "expected either DIR or --target"),
        (("check", "DIR", "--target", "sm_89"), "expected either DIR or --target"),
    ],
)
def test_wrong_usage_ends_with_exit_code_two(arguments, text):
    result = invoke(*arguments)
    assert getattr(result.exception, "exit_code", result.exit_code) == 2
    assert text in f"{result.stderr} {result.exception}"


def test_doctor_names_tools_and_back_ends():
    content = json.loads(invoke("--json", command=doctor).stdout)
    assert [row["op"] for row in content["operations"] if row["device"] == "cpu"] == list(OPS)
    assert all(bool(tool["found"]) != bool(tool["problem"]) for tool in content["tools"])
    assert content["layers"] == []
    assert "kernel cache" in invoke(command=doctor).stdout


def test_doctor_says_what_would_run_each_packed_layer(pipeline_dir, tmp_path):
    from quantkit.models.source import open_model
    from quantkit.packing.pack_model import pack
    from quantkit.progress import silent
    from quantkit.recipe.load import load_recipe

    need(compilers.host_compiler)
    model, recipe, out = open_model(str(pipeline_dir)), load_recipe("fp8"), tmp_path / "packed"
    nothing: dict[str, Any] = {"calibration": None, "masks": None, "threads": 1, "force": False}
    pack(model, recipe, out, **nothing, progress=silent)
    layers = json.loads(invoke(out, "--device", "cpu", "--json", command=doctor).stdout)["layers"]
    assert len(layers) > 10
    names = {(layer["component"], layer["op"]) for layer in layers}
    assert names == {("unet", "gemm_fp8"), ("unet", "conv_fp8")}
    assert {layer["backend"] for layer in layers if not layer["reason"]} == {"host"}
    shown = invoke(out, "--device", "cpu", "--quiet", command=doctor).stdout
    kernels_run = sum(not layer["reason"] for layer in layers)
    assert f"{kernels_run} of {len(layers)} packed layers run on a kernel" in shown


@pytest.mark.parametrize(
    ("weight", "sparse", "op"),
    [
        ((8, 64), False, "gemm_fp8"),
        ((8, 64), True, "gemm_fp8_sparse"),
        ((8, 64, 3, 3), False, "conv_fp8"),
        ((8, 64, 3, 3), True, "conv_fp8_sparse"),
        # unfolded: pixels, few channels, channels that the metadata does not divide, many taps
        ((8, 64, 1, 1), False, "gemm_fp8"),
        ((8, 32, 3, 3), False, "gemm_fp8"),
        ((8, 80, 3, 3), False, "conv_fp8"),
        ((8, 80, 3, 3), True, "gemm_fp8_sparse"),
        ((8, 64, 7, 7), False, "gemm_fp8"),
    ],
)
def test_doctor_names_the_kernel_of_a_convolution(weight, sparse, op):
    scheme = Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR if sparse else None, Activation.STATIC)
    assert op_of(weight, scheme, torch.device("cpu")) == op


def test_the_manifest_says_what_a_convolution_relies_on(tmp_path):
    need(compilers.clang)
    words = ("e4m3fn", "e4m3fn", "tensor", "channel", "f16", "t2")
    names = ("conv_fp8", "conv_fp8_sparse", "gemm_fp8")
    build("gfx1201", tmp_path / "out", [Variant(OPS[name], words) for name in names])
    dense, sparse, gemm = (k.requires for k in read_manifest(tmp_path / "out").kernels)
    assert gemm == ()
    assert dense[:4] == (
        *("channels >= 64", "channels % 16 == 0", "k % channels == 0", "k // channels <= 32"),
    )
    # Offsets into a picture are 32-bit integers.
    assert dense[4].endswith(f" <= {2**31 - 1}")
    shape = {"m": 16, "k": 9 * 64, "height": 4, "width": 4, "out_height": 4, "out_width": 4}
    for channels, taken in ((64, True), (32, False), (72, False)):
        known = {**shape, "channels": channels, "k": 9 * channels}
        assert all(eval(rule, {}, known) for rule in dense) is taken
    assert all(eval(rule, {}, {**shape, "channels": 80, "k": 720}) for rule in dense)
    assert not all(eval(rule, {}, {**shape, "channels": 80, "k": 720}) for rule in sparse)


def test_doctor_refuses_what_is_not_packed(pipeline_dir):
    result = invoke(pipeline_dir, command=doctor)
    assert isinstance(result.exception, CheckpointError)
    assert "nothing in it is packed" in str(result.exception)


def test_every_object_target_has_limits():
    for arch in ARCHS.values():
        assert arch.ahead_of_time == (arch.name not in {"host", "sm_90a"})
