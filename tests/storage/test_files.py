"""Staged writes and safetensors headers, with everything that can be wrong with them."""

import errno
import json
import os
import struct

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from quantkit.errors import ModelError, OutputError
from quantkit.storage.files import scratch_directory, staged_directory, staged_file
from quantkit.storage.tensorfile import read_bytes, read_header


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def staged(output, *, force):
    return staged_directory(output, kind="test", force=force)


def made(output, *files):
    with staged(output, force=False) as stage:
        for file in files:
            (stage / file).write_text(file)
    return output


def test_staged_directory_appears_only_when_complete(tmp_path):
    output = tmp_path / "deep" / "out"
    with staged(output, force=False) as stage:
        (stage / "a").write_text("1")
        assert not output.exists()
    assert names(tmp_path / "deep") == ["out"]
    assert (output / "a").read_text() == "1"


def test_failed_directory_leaves_the_old_one_and_no_rubbish(tmp_path):
    output = made(tmp_path / "out", "old")
    with (
        pytest.raises(RuntimeError, match="half way"),
        staged(output, force=True) as stage,
    ):
        (stage / "new").write_text("x")
        raise RuntimeError("half way")
    assert names(tmp_path) == ["out"]
    assert names(output) == [".quantkit", "old"]


def test_force_replaces_a_directory(tmp_path):
    output = made(tmp_path / "out", "old")
    with staged(output, force=True) as stage:
        (stage / "new").write_text("x")
    assert names(output) == [".quantkit", "new"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("stage", [staged, staged_file], ids=["directory", "file"])
def test_existing_output_is_refused_without_force(tmp_path, stage):
    output = tmp_path / "out"
    output.mkdir()
    with (
        pytest.raises(OutputError, match=r"out: exists already; set force to replace it"),
        stage(output, force=False),
    ):
        pass


@pytest.mark.parametrize("stage", [staged, staged_file], ids=["directory", "file"])
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "no space left on the device"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EFBIG, "larger than a file may be here"),
    ],
)
@pytest.mark.parametrize("library", [False, True], ids=["python", "safetensors"])
def test_full_disk_is_one_line_and_leaves_nothing(tmp_path, stage, code, words, library):
    with (
        pytest.raises(OutputError, match=f"out: {words}.*; free some or choose another path"),
        stage(tmp_path / "out", force=False),
    ):
        if library:
            raise SafetensorError(f"I/O error: {os.strerror(code)} (os error {code})")
        raise OSError(code, os.strerror(code))
    assert names(tmp_path) == []


def test_an_error_about_another_file_is_not_blamed_on_the_output(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match="missing"),
        staged(tmp_path / "out", force=False),
    ):
        (tmp_path / "missing").read_text()


def test_a_scratch_directory_is_beside_the_output_and_gone_afterwards(tmp_path):
    output = tmp_path / "new" / "out"
    with scratch_directory(output) as scratch:
        assert scratch.parent == output.parent
        (scratch / "file").write_text("text")
    assert names(tmp_path / "new") == []
    with pytest.raises(OutputError, match="no space left"), scratch_directory(output) as scratch:
        (scratch / "file").write_text("text")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path / "new") == []


def test_staged_file_replaces_a_file_at_once(tmp_path):
    output = tmp_path / "out.json"
    old, new = (f'{{"schema": "quantkit.test", "is": "{text}"}}' for text in ("old", "new"))
    output.write_text(old)
    with staged_file(output, force=True) as stage:
        stage.write_text(new)
        assert output.read_text() == old
    assert output.read_text() == new
    assert names(tmp_path) == ["out.json"]


def test_staged_file_is_as_readable_as_any_other(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    with staged_file(tmp_path / "out", force=False) as stage:
        stage.touch(mode=0o600)
    assert (tmp_path / "out").stat().st_mode == plain.stat().st_mode


@pytest.fixture
def tensors(tmp_path):
    path = tmp_path / "x.safetensors"
    data = {"b": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.ones(3, np.float32)}
    save_file(data, path, metadata={"k": "v"})
    return path


def test_header_agrees_with_the_library(tensors):
    header = read_header(tensors)
    assert header.metadata == {"k": "v"}
    assert header.tensors["b"].shape == (2, 3)
    with tensors.open("rb") as file:
        raw = read_bytes(header.tensors["b"], file.fileno())
    assert raw == np.arange(6, dtype=np.float16).tobytes()


def rewrite(path, change):
    raw = path.read_bytes()
    length = struct.unpack_from("<Q", raw)[0]
    table = json.loads(raw[8 : 8 + length])
    change(table)
    head = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + raw[8 + length :])


def shift(table):
    table["a"]["data_offsets"] = [4, 16]


def wrong_shape(table):
    table["b"]["shape"] = [2, 4]


def no_dtype(table):
    del table["a"]["dtype"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shift, "data starts at"),
        (wrong_shape, r"'b': 12 bytes, F16 \[2, 4\]"),
        (no_dtype, "damaged"),
    ],
)
def test_contradicting_headers_are_refused(tensors, change, message):
    rewrite(tensors, change)
    with pytest.raises(ModelError, match=message):
        read_header(tensors)


@pytest.mark.parametrize("keep", [0, 4, 9, 100], ids=lambda n: f"{n}-bytes")
def test_truncated_files_are_refused(tensors, keep):
    tensors.write_bytes(tensors.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"x\.safetensors: (truncated|damaged)"):
        read_header(tensors)


def test_lost_tail_and_missing_file_are_refused(tensors):
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated or padded"):
        read_header(tensors)
    tensors.unlink()
    with pytest.raises(ModelError, match="missing"):
        read_header(tensors)


@pytest.mark.parametrize(("umask", "most"), [(0, 0o775), (0o002, 0o775), (0o077, 0o700)])
def test_nothing_is_writable_for_all(tmp_path, umask, most):
    before = os.umask(umask)
    try:
        with staged_directory(tmp_path / "new" / "out", kind="test", force=False) as stage:
            (stage / "sub").mkdir()
            (stage / "sub" / "file").touch()
        with staged_file(tmp_path / "one" / "file", force=False) as made:
            made.touch()
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert len(found) == 7
    for path, mode in found.items():
        assert mode == most if path.is_dir() else most & 0o666
