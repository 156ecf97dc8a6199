"""What operating systems lack: the same bytes without pread, owners, folder syncs and locks."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from quantkit.storage import system
from quantkit.workflow.pack import pack

ROOT = Path(__file__).parents[2]
#: What Python has on Linux and not on Windows, of all that quantkit might use.
HIDDEN = {
    "os": (
        "pread", "preadv", "pwrite", "pwritev", "sched_getaffinity", "geteuid", "getuid", "getgid",
        "getegid", "fork", "statvfs", "mkfifo", "fchmod", "fchown", "O_NOFOLLOW", "O_NONBLOCK",
        "O_CLOEXEC", "O_DIRECTORY", "posix_fadvise", "posix_fallocate", "sendfile", "getpgid",
        "killpg", "setsid", "copy_file_range",
    ),
    "signal": ("SIGHUP", "SIGPIPE", "SIGKILL", "SIGUSR1", "alarm", "pthread_sigmask"),
}  # fmt: skip
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")

SCRIPT = """
import sys
import importlib, os, pkgutil, signal
import torch, diffusers.quantizers, transformers.quantizers, quantkit.eval.judging.evaluation
from transformers import CLIPTextModel; from diffusers import StableDiffusionPipeline
for name in {modules}: sys.modules[name] = None
for module, names in {hidden}.items():
    for name in names: vars(sys.modules[module]).pop(name, None)
import quantkit, pytest
from tests.support import fake_comfy
fake_comfy.install(pytest.MonkeyPatch(), {{}})
for found in pkgutil.walk_packages(quantkit.__path__, "quantkit."):
    if not found.name.endswith("__main__"): importlib.import_module(found.name)
from quantkit.cli import main
"""


def without_posix(code, *args):
    """Run code in a Python that lacks what Windows lacks, all of quantkit imported."""
    script = SCRIPT.format(modules=MODULES, hidden=HIDDEN) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_model_is_packed_verified_and_loaded_without_posix(transformer_dir, tmp_path):
    packed = tmp_path / "packed"
    without_posix(
        """
        source, packed = sys.argv[1:]
        for command in (["pack", source, "-r", "fp8", "-o", packed, "-q"], ["verify", packed],
                        ["inspect", packed], ["pack", source, "-r", "fp8", "-o", packed, "-f"]):
            code = main(command)
            assert code in (0, None), (command, code)
        model = diffusers.PixArtTransformer2DModel.from_pretrained(packed)
        assert quantkit.packed_layers(model)
        """,
        transformer_dir,
        packed,
    )
    again = tmp_path / "again"
    pack(transformer_dir, output=again, recipe="fp8")
    for file in sorted(again.rglob("*.safetensors")):
        assert file.read_bytes() == (packed / file.relative_to(again)).read_bytes()


@pytest.fixture(params=["as it is", "without"])
def offsets(request, monkeypatch):
    """With and without reads and writes at an offset."""
    if request.param == "without":
        for name in ("pread", "preadv", "pwrite"):
            monkeypatch.delattr(os, name)


@pytest.mark.usefixtures("offsets")
def test_bytes_are_read_and_written_at_offsets(tmp_path):
    path = tmp_path / "file"
    target = system.open_new(path)
    system.write_at(target, b"world", 6)
    system.write_at(target, b"hello\n", 0)
    os.close(target)
    source = system.open_to_read(path)
    assert system.read_at(source, 100, 6) == b"world"
    assert system.read_at(source, 5, 0) == b"hello"
    buffer = bytearray(8)
    assert system.read_into(source, buffer, 5) == 6
    assert bytes(buffer[:6]) == b"\nworld"
    assert system.read_into(source, buffer, 50) == 0
    os.close(source)


def test_a_new_file_is_new(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        system.open_new(tmp_path / "file")


def test_a_lock_follows_no_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        system.open_lock(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_owners_and_modes_are_looked_at_where_there_are_any(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    found = tmp_path.stat()
    assert system.is_mine(found)
    assert system.is_writable_by_others(found)
    monkeypatch.setattr(os, "geteuid", lambda: found.st_uid + 1)
    assert not system.is_mine(found)
    monkeypatch.delattr(os, "geteuid")
    assert system.is_mine(found)
    assert not system.is_writable_by_others(found)


def test_cores_are_those_of_the_process(monkeypatch):
    assert system.cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert system.cores() == os.cpu_count()
