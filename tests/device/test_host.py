"""Compiling for the host: the cache, its races and its damage, and machines without a compiler."""

import logging
import os
import re
import shutil

import pytest
import torch

from quantkit.device import cache, compilers, log
from quantkit.device.backends import Backend, use
from quantkit.device.host import compiling
from quantkit.device.host import library as host
from quantkit.device.ops import call as execute
from quantkit.device.ops.norms.quantize import quantize_token
from quantkit.device.ops.op import Variant, all_variants
from quantkit.device.ops.table import OPS
from quantkit.errors import CompilerMissingError, KernelError
from quantkit.resources import kernel_sources
from tests.support.kernel_cases import need, operate

SMALL = Variant(OPS["quantize_fp8_static"], ("f32", "e4m3fn", ""))


@pytest.fixture(scope="module")
def _host():
    need(compilers.host_compiler)


@pytest.fixture
def fresh_host(tmp_path, monkeypatch):
    """An empty cache, and nothing remembered of compilers and libraries."""
    functions = (
        compilers.host_compiler,
        cache.sources_digest,
        host.why_unavailable,
        host._load,
        host._runtime_object,
        compiling._folder,
        execute._say,
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for function in functions:
        function.cache_clear()
    yield tmp_path / "cache"
    for function in functions:
        function.cache_clear()


@pytest.mark.usefixtures("_host")
def test_a_damaged_library_is_built_again(fresh_host):
    # Not loaded before it is damaged: the loader would answer from memory.
    path = host._library(SMALL, "gfx12")
    assert path.is_relative_to(fresh_host)
    path.write_bytes(b"not a library")
    assert host.load(SMALL).variant == SMALL
    assert path.read_bytes().startswith(b"\x7fELF")


@pytest.mark.usefixtures("_host")
def test_prebuild_compiles_once(fresh_host):
    variants = [v for v in all_variants(OPS["quantize_fp8_static"]) if v.word("QK_IO") == "f32"]
    host.prebuild(variants)
    built = {path: path.stat().st_mtime_ns for path in fresh_host.rglob("*.so")}
    host.prebuild(variants)
    assert len(built) == len(variants)
    assert all(path.stat().st_mtime_ns == time for path, time in built.items())


@pytest.mark.usefixtures("_host")
def test_a_compile_error_shows_the_command_and_the_log(fresh_host, monkeypatch, tmp_path):
    broken = shutil.copytree(kernel_sources(), tmp_path / "kernels")
    with (broken / SMALL.op.source).open("a") as source:
        source.write("this is no C++\n")
    monkeypatch.setattr(host, "kernel_sources", lambda: broken)
    with pytest.raises(KernelError, match=r"host compiler failed with status 1\n.*-O1") as info:
        host.load(SMALL)
    assert re.search(r"quantize_static\.hip:\d+:\d+: error", str(info.value))
    assert not list(fresh_host.rglob("*.so"))
    assert not list(fresh_host.rglob(".*.so"))


def test_the_key_depends_on_what_is_compiled_and_how(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = {cache.build_folder(*parts) for parts in (("a",), ("b",), ("a", "b"), ("ab",))}
    assert len(folders) == 4


@pytest.mark.parametrize("file", ["include/fp8.h", "launch.json"])
@pytest.mark.parametrize("digest", [cache.sources_digest, cache.device_sources_digest])
def test_the_key_changes_with_a_source(tmp_path, monkeypatch, digest, file):
    sources = shutil.copytree(kernel_sources(), tmp_path / "kernels")
    monkeypatch.setattr(cache, "kernel_sources", lambda: sources)
    before = digest.__wrapped__()
    assert digest.__wrapped__() == before
    with (sources / file).open("a") as source:
        source.write("\n")
    assert digest.__wrapped__() != before


def test_a_cache_that_cannot_be_made_says_what_to_set(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(KernelError, match=r"cannot be made.*set XDG_CACHE_HOME"):
        cache.build_folder("a")


def test_the_cache_is_open_to_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache.build_folder("a")
    for path in (folder, folder.parent, cache.cache_directory()):
        assert path.stat().st_mode & 0o777 == 0o700


def linked(path, elsewhere):
    elsewhere.mkdir()
    path.symlink_to(elsewhere)


def open_to_all(path, _):
    path.mkdir(parents=True)
    path.chmod(0o777)


def of_another_user(path, _):
    path.mkdir(parents=True)
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (linked, "is a link or a file"),
        (open_to_all, "can be written by others"),
        pytest.param(
            of_another_user,
            "belongs to another user",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away"),
        ),
    ],
)
def test_a_cache_that_others_may_have_filled_is_refused(tmp_path, monkeypatch, make, reason, depth):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache.build_folder("a")
    shutil.rmtree(cache.cache_directory())
    path = (cache.cache_directory(), folder.parent, folder)[depth]
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path, tmp_path / "elsewhere")
    with pytest.raises(KernelError, match=f"{reason}.*set XDG_CACHE_HOME"):
        cache.build_folder("a")


def test_no_link_in_the_cache_is_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, thesis = cache.build_folder("a") / "x.so", tmp_path / "thesis"
    thesis.write_text("mine")
    lock = target.with_name("x.so.lock")
    lock.symlink_to(thesis)
    with pytest.raises(KernelError, match="cannot be locked"), cache.building(target):
        pass
    lock.unlink()
    target.symlink_to(thesis)
    with cache.building(target) as stage:
        stage.write_bytes(b"code")
    assert thesis.read_text() == "mine"
    assert not target.is_symlink()
    assert cache.read_whole(target) == b"code"


@pytest.mark.parametrize("length", [0, 1, 31, 32, 4000])
def test_a_file_cut_short_is_built_again(tmp_path, monkeypatch, length):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = cache.build_folder("a") / "x.so"
    for content in (bytes(range(256)) * 20, b"again"):
        with cache.building(target) as stage:
            stage.write_bytes(content)
        assert cache.read_whole(target) == content
        os.truncate(target, min(length, target.stat().st_size - 1))
        assert cache.read_whole(target) is None


def test_a_library_cut_short_does_not_crash_the_next_process(fresh_host):
    """The loader maps a file without asking for its length: SIGBUS, at every start."""
    path = host._library(SMALL, "gfx12")
    os.truncate(path, path.stat().st_size // 2)
    host._load.cache_clear()
    assert host.load(SMALL).variant == SMALL


def test_a_kernel_error_becomes_an_exception():
    def broken(grid, args, threads, error, size):
        error.value = b"gemm: block (0, 0, 0): divergent barrier"
        return 1

    kernel = host.HostKernel(SMALL, host.HostFunction(broken), lambda m, n, k: (m, n, k))
    with pytest.raises(KernelError, match="divergent barrier"):
        kernel.launch([None, 1], 1, 1, 1, 1)


def test_without_a_compiler_the_reference_runs_and_says_so(fresh_host, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/nowhere/c++ -O2")
    x = torch.randn(3, 16)
    with caplog.at_level(logging.INFO), log.record() as seen:
        _, q = operate("quantize_fp8_token", x, None, "e4m3fn")
    assert torch.equal(q, quantize_token(x, None, "e4m3fn")[1])
    assert list(seen.calls) == [("quantize_fp8_token", "f32_e4m3fn", Backend.REFERENCE)]
    assert "runs on the reference: host kernels: CXX='/nowhere/c++ -O2' does not run" in caplog.text
    assert not fresh_host.exists()
    with pytest.raises(CompilerMissingError, match=r"install one \(Debian: g\+\+\)"):
        host.load(SMALL)


@pytest.mark.usefixtures("fresh_host")
def test_cxx_may_hold_options(monkeypatch):
    found = need(compilers.host_compiler)
    compilers.host_compiler.cache_clear()
    monkeypatch.setenv("CXX", f"{found.command[0]} -DNOTHING")
    assert compilers.host_compiler().command == (found.command[0], "-DNOTHING")


def test_a_library_that_does_not_load_names_its_compiler(fresh_host, monkeypatch):
    need(compilers.host_compiler)
    compilers.host_compiler.cache_clear()
    monkeypatch.setenv("CXX", "gcc")

    def command(output):
        # A function would be looked for when it is called, or found in what other tests loaded.
        source = output.parent / "lacks.cpp"
        source.write_text("extern int nowhere; int* f() { return &nowhere; }")
        return [*compiling.base_command(), "-shared", "-o", str(output), str(source)]

    with pytest.raises(KernelError, match=r"what 'gcc' built does not load.*set CXX to a C\+\+"):
        compiling.open_library("lacks.so", command)


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("Debian clang version 18.1.8", "is 'Debian clang version 18.1.8'"),
        ("gcc 14", "is 'gcc 14'"),
    ],
)
def test_an_old_clang_is_refused_with_what_it_is(tmp_path, version, text):
    program = tmp_path / "clang++"
    program.write_text(f"#!/bin/sh\necho {version}\n")
    program.chmod(0o755)
    with pytest.raises(
        CompilerMissingError, match=r"expected clang >= 22.*install clang-22"
    ) as info:
        compilers.clang(str(program))
    assert text in str(info.value)


THREADED = ("gemm_fp8", "gemm_fp8_sparse", "gemm_int8", "conv_fp8", "geglu_fp8", "attention_fp8",
            "quantize_fp8_token", "group_norm")  # fmt: skip


@pytest.mark.parametrize("name", THREADED)
def test_threads_change_nothing(name):
    op = OPS[name]
    generator = torch.Generator().manual_seed(1)
    operands, options = op.sample(next(iter(all_variants(op))), (96, 64, 64), generator)
    made, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with use(Backend.HOST):
                found = need(lambda: execute.call(op, *operands, *options))
            made.append(found if isinstance(found, tuple) else (found,))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *made))
