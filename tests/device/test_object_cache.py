"""Where the loader finds its objects: the cache and its key, prebuilt folders, pruning."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.device import cache
from quantkit.device.gpu import objects
from quantkit.device.gpu.launcher import prepare_launch
from quantkit.errors import CompilerMissingError, KernelError
from tests.support.standin_calls import GEMM, SMALL, prebuilt, quantize


def test_an_object_is_compiled_once(hip):
    hip.provide(SMALL)
    quantize(hip.device())
    quantize(hip.device())  # a new device loads, and does not compile
    assert hip.names().count("hiprtcCompileProgram") == 1
    assert hip.names().count("hipModuleLoadData") == 2


@pytest.mark.parametrize("change", ["sources", "target", "compiler", "runtime", "options"])
def test_the_key_has_everything_that_the_object_depends_on(hip, change):
    device = hip.device()
    before = objects.cached_path(device.driver, "gfx1201", SMALL)
    target, driver = "gfx1201", device.driver
    if change == "sources":
        hip.monkeypatch.setattr(cache, "sources_digest", lambda: "other")
        objects._folder.cache_clear()
    elif change == "target":
        target = "gfx1200"
    else:
        compiler = driver.require_compiler()
        changes: Any = {
            "compiler": {"compiler": SimpleNamespace(name="hipRTC", version="9.9")},
            "runtime": {"version": "1"},
            "options": {"options": lambda target: (f"--offload-arch={target}", "-O2")},
        }[change]
        assert compiler.version == "7.1"
        driver = SimpleNamespace(**{**vars(driver), **changes})
        driver.compiler_identity = type(device.driver).compiler_identity.fget(
            SimpleNamespace(
                require_compiler=lambda: driver.compiler, name="HIP", version=driver.version
            )
        )
    assert objects.cached_path(driver, target, SMALL) != before


RACE = """
import contextlib, sys, torch
from quantkit.device.archs import find_arch
from quantkit.device.gpu.driver_hip import load_hip
from quantkit.device.gpu.objects import read_object
from quantkit.device.ops.op import all_variants
from quantkit.device.ops.table import OPS
driver = load_hip()
print("ready", flush=True)
input()
for variant in list(all_variants(OPS["gemm_fp8"]))[:20]:
    found = read_object(driver, "gfx1201", variant)
    assert found.content.endswith(b"ppppppiii\\n"), found
print("whole")
"""


def test_processes_that_start_together_share_one_build(hip):
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([sys.executable, "-c", RACE], stdin=pipe, stdout=pipe, text=True)
        for _ in range(2)
    ]
    assert {process.stdout.readline().strip() for process in started} == {"ready"}
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    assert {process.communicate(timeout=120)[0].strip() for process in started} == {"whole"}
    assert hip.names().count("hiprtcCompileProgram") == 20
    assert len(list(cache.cache_directory().rglob("*.co"))) == 20


def test_a_damaged_object_is_compiled_again(hip):
    hip.provide(SMALL)
    quantize(hip.device())
    path = objects.cached_path(hip.device().driver, "gfx1201", SMALL)
    whole = path.read_bytes()
    path.write_bytes(whole[:5])
    quantize(hip.device())
    assert path.read_bytes() == whole


def test_prebuilt_objects_are_preferred(hip, tmp_path):
    prebuilt(hip, tmp_path / "objects")
    hip.monkeypatch.setenv("QUANTKIT_OBJECTS", str(tmp_path / "objects"))
    quantize(hip.device())
    assert "hiprtcCompileProgram" not in " ".join(hip.calls())


def test_prebuilt_objects_in_the_cache_folder_need_no_compiler(hip):
    prebuilt(hip, cache.cache_directory() / "objects" / "gfx1201")
    device = hip.device()
    object.__setattr__(device.driver, "compiler", "libhiprtc: not here")
    quantize(device)
    with pytest.raises(CompilerMissingError, match="libhiprtc: not here"):
        prepare_launch(device, GEMM, {"m": 1, "n": 1, "k": 16})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"target": "gfx1200"}, None), ({"sources": "0" * 64}, "built from other sources")],
    ids=["target", "sources"],
)
def test_prebuilt_objects_that_do_not_match_are_not_used(hip, tmp_path, changes, problem):
    prebuilt(hip, tmp_path / "objects", **changes)
    hip.monkeypatch.setenv("QUANTKIT_OBJECTS", str(tmp_path / "objects"))
    quantize(hip.device())
    assert hip.names().count("hiprtcCompileProgram") == 1
    folders = objects.object_folders("gfx1201")
    assert [bool(f.problem) for f in folders] == ([True] if problem else [])
    assert all(problem in f.problem for f in folders)


def install_kernels(hip, tmp_path, **changes):
    """Put the wheel's package, with the stand-in's objects, where Python looks for packages."""
    package = tmp_path / "site" / "quantkit_kernels"
    prebuilt(hip, package / "gfx12-generic", **{"target": "gfx12-generic", **changes})
    (package / "__init__.py").touch()
    hip.monkeypatch.syspath_prepend(tmp_path / "site")


def test_installed_kernels_need_no_compiler(hip, tmp_path):
    install_kernels(hip, tmp_path)
    device = hip.device()
    object.__setattr__(device.driver, "compiler", "libhiprtc: not here")
    hip.monkeypatch.setenv("PATH", "")
    quantize(device)
    assert "hiprtcCompileProgram" not in " ".join(hip.calls())
    (folder,) = objects.object_folders("gfx1201")
    assert (folder.path.name, len(folder.kernels), folder.problem) == ("gfx12-generic", 1, "")
    assert objects.object_folders("gfx1100") == ()


def test_installed_kernels_of_other_sources_are_not_used(hip, tmp_path):
    install_kernels(hip, tmp_path, sources="0" * 64)
    quantize(hip.device())
    assert hip.names().count("hiprtcCompileProgram") == 1
    (folder,) = objects.object_folders("gfx1201")
    assert folder.kernels == {}
    assert "other sources; pip install --upgrade 'quantkit[radeon]'" in folder.problem


def test_a_damaged_prebuilt_object_is_an_error(hip, tmp_path):
    path = prebuilt(hip, tmp_path / "objects")
    path.write_bytes(b"damaged")
    hip.monkeypatch.setenv("QUANTKIT_OBJECTS", str(tmp_path / "objects"))
    with pytest.raises(KernelError, match=r"SHA-256 differs\); build the folder again"):
        quantize(hip.device())
    path.unlink()
    with pytest.raises(KernelError, match=r"cannot be read.*build the folder again"):
        quantize(hip.device())


def builds(sizes):
    """Make build folders of so many bytes, the first used longest ago."""
    folders = []
    for index, size in enumerate(sizes):
        folder = cache._builds() / f"{index:024}"
        folder.mkdir(parents=True)
        (folder / "kernel.so").write_bytes(bytes(size))
        os.utime(folder, (1000 + index, 1000 + index))
        folders.append(folder)
    return folders


@pytest.mark.parametrize(
    ("sizes", "limit", "keep", "left"),
    [
        ([10, 10, 10], 30, 2, [0, 1, 2]),
        ([10, 10, 10], 29, 2, [1, 2]),
        ([10, 10, 10], 10, 0, [0]),
        ([10, 10, 10], 0, 1, [1]),
        ([5, 50, 5], 12, 2, [2]),
    ],
)
def test_what_was_not_used_for_longest_is_deleted(hip, sizes, limit, keep, left):
    folders = builds(sizes)
    kept_objects = cache.cache_directory() / "objects" / "gfx1201" / "kernel.co"
    kept_objects.parent.mkdir(parents=True)
    kept_objects.write_bytes(bytes(100))
    deleted = cache.prune(folders[keep], limit)
    assert [i for i, folder in enumerate(folders) if folder.exists()] == left
    assert set(deleted) == {f for i, f in enumerate(folders) if i not in left}
    assert kept_objects.exists()


def test_a_build_prunes_the_cache(hip):
    hip.monkeypatch.setenv("QUANTKIT_CACHE_MB", "1")
    old, new = builds([2**20, 1000])
    hip.provide(SMALL)
    quantize(hip.device())
    assert not old.exists()
    assert new.exists()
    assert list(cache._builds().rglob(f"{SMALL.symbol}.co"))


def test_a_folder_that_another_process_deleted_is_made_again(hip):
    hip.provide(SMALL)
    device = hip.device()
    quantize(device)
    cache.prune(Path("/nowhere"), 0)
    quantize(hip.device())
    assert list(cache._builds().rglob("*.co"))


def test_pruning_a_cache_that_does_not_exist_does_nothing(hip):
    assert cache.prune(Path("/nowhere"), 0) == ()


def test_a_limit_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("QUANTKIT_CACHE_MB", "1G")
    with pytest.raises(KernelError, match="QUANTKIT_CACHE_MB='1G': expected a whole number"):
        cache.cache_limit()
