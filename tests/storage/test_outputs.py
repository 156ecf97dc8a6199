"""What --force may delete, who wins a race, what a kill leaves, and where results go that do not
fit.
"""

import errno
import json
import os
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from quantkit.errors import ModelError, OutputError
from quantkit.storage.copying import list_files
from quantkit.storage.files import (
    claimed_directory,
    mark_directory,
    staged_directory,
    staged_file,
    write_or_keep,
)
from quantkit.storage.marker import MARKER
from quantkit.storage.places import check_directory, check_file, check_room, refuse_overlap
from tests.support.sampling import paired


def make(output, *, kind="test", force=False, files=("a", "b/c")):
    with staged_directory(output, kind=kind, force=force) as stage:
        for name in files:
            (stage / name).parent.mkdir(exist_ok=True)
            (stage / name).write_bytes(os.fsencode(name))
    return output


def everything(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def thesis(output):
    output.mkdir()
    (output / "thesis.docx").write_text("three years")


def added(output):
    make(output)
    (output / "b" / "thesis.docx").write_text("three years")


def many(output):
    make(output)
    for letter in "stuvw":
        (output / letter).write_text("mine")


def other_kind(output):
    make(output, kind="report")


def damaged(output):
    make(output)
    (output / MARKER).write_text("{")


def of_the_future(output):
    make(output)
    marker = json.loads((output / MARKER).read_text())
    (output / MARKER).write_text(json.dumps(marker | {"schema_version": 2}))


def linked_marker(output):
    make(output.with_name("other"))
    output.mkdir()
    (output / "a").write_text("mine")
    (output / MARKER).symlink_to(output.with_name("other") / MARKER)


def file(output):
    output.write_text("mine")


def link(output):
    output.symlink_to(make(output.with_name("real")))


def named_pipe(output):
    os.mkfifo(output)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (thesis, r"holds thesis\.docx, which quantkit did not write; force would delete it"),
        (added, r"holds b/thesis\.docx, which quantkit did not write; force would delete it"),
        (many, r"holds s, t, u, \.\.\., which quantkit did not write"),
        (other_kind, "holds a report, and force only replaces it with another test"),
        (damaged, r"holds \.quantkit, a, b, and no sound"),
        (of_the_future, r"holds \.quantkit, a, b, and no sound"),
        (linked_marker, r"holds \.quantkit, a, and no sound"),
        (file, "a file, expected a folder"),
        (link, "a link, expected a folder"),
        (named_pipe, "a named pipe, expected a folder"),
    ],
)
def test_force_deletes_nothing_that_quantkit_did_not_write(tmp_path, before, message):
    output = tmp_path / "out"
    before(output)
    kept = everything(tmp_path)
    with pytest.raises(OutputError, match=message):
        check_directory(output, kind="test", force=True)
    with pytest.raises(OutputError, match=message):
        make(output, force=True)
    assert everything(tmp_path) == kept


def test_force_replaces_an_empty_folder_and_one_with_less_in_it(tmp_path):
    (tmp_path / "out").mkdir()
    make(tmp_path / "out", force=True)
    (tmp_path / "out" / "a").unlink()
    make(tmp_path / "out", force=True, files=("new",))
    assert set(everything(tmp_path)) == {"out/new", f"out/{MARKER}"}


def test_a_file_that_appears_while_the_output_is_made_is_not_lost(tmp_path):
    output = make(tmp_path / "out")
    with (
        pytest.raises(OutputError, match=r"holds thesis\.docx, which quantkit did not write"),
        staged_directory(output, kind="test", force=True) as stage,
    ):
        (stage / "new").write_text("new")
        (output / "thesis.docx").write_text("three years")
    assert set(everything(tmp_path)) == {
        f"out/{name}" for name in ("a", "b/c", "thesis.docx", MARKER)
    }


def test_names_that_are_no_utf8_are_quantkits_own_too(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    make(tmp_path / "out", files=(name,))
    make(tmp_path / "out", force=True)
    assert not (tmp_path / "out" / name).exists()


def test_folders_inside_have_markers_of_their_own(tmp_path):
    output = tmp_path / "out"
    with claimed_directory(output, kind="demo"):
        make(output / "packed")
        (output / "text").write_text("text")
    (output / "packed" / "a").unlink()
    make(output / "packed", force=True, files=("later",))
    check_directory(output, kind="demo", force=True)
    (output / "packed" / "mine").write_text("mine")
    with pytest.raises(OutputError, match="holds packed/mine, which quantkit did not write"):
        check_directory(output, kind="demo", force=True)


def test_a_claimed_folder_is_marked_however_its_body_ends(tmp_path):
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), claimed_directory(output, kind="demo"):
        (output / "half").write_text("half")
        raise KeyboardInterrupt
    with claimed_directory(output, kind="demo"):
        assert set(everything(output)) == {MARKER}
    (output / "more").write_text("more")
    mark_directory(output, kind="demo")
    check_directory(output, kind="demo", force=True)


def test_files_that_come_later_count_as_quantkits(tmp_path):
    with staged_directory(tmp_path / "out", kind="test", force=False, later=["x/y"]):
        pass
    (tmp_path / "out" / "x").mkdir()
    (tmp_path / "out" / "x" / "y").write_text("later")
    check_directory(tmp_path / "out", kind="test", force=True)


@pytest.mark.parametrize("check", [check_file, lambda o, *, force: make(o, force=force)])
@pytest.mark.parametrize("name", [".", "..", "/", "../here", "deep/.."])
@pytest.mark.parametrize("force", [False, True])
def test_the_working_folder_and_those_above_are_no_outputs(
    tmp_path, monkeypatch, check, name, force
):
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputError, match="the folder that you are in, or one above it"):
        check(Path(name), force=force)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (thesis, "a folder, expected a file"),
        (named_pipe, "a named pipe, expected a file"),
        (lambda output: output.symlink_to("/dev/null"), "a link, expected a file"),
    ],
)
def test_force_replaces_files_and_nothing_else_by_a_file(tmp_path, before, message):
    before(tmp_path / "out")
    for attempt in (check_file, lambda o, *, force: staged_file(o, force=force).__enter__()):
        with pytest.raises(OutputError, match=message):
            attempt(tmp_path / "out", force=True)


def test_devices_are_no_outputs():
    with pytest.raises(OutputError, match="/dev/null: a device, expected a file"):
        check_file(Path("/dev/null"), force=True)


def test_a_dangling_link_counts_as_an_output(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "missing")
    for attempt in (make, lambda o: staged_file(o, force=False).__enter__()):
        with pytest.raises(OutputError, match="exists already"):
            attempt(tmp_path / "out")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_the_place_is_tried_before_the_work(tmp_path, monkeypatch, code):
    def refused(*, dir):  # noqa: A002  tempfile's name
        raise OSError(code, os.strerror(code), str(dir / "x.quantkit-stage"))

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    for check in (check_file, lambda o, *, force: check_directory(o, kind="t", force=force)):
        with pytest.raises(OutputError, match=r"out: (cannot be written|no space|the disk quota)"):
            check(tmp_path / "deep" / "out", force=False)
    assert not (tmp_path / "deep").exists()


def test_a_file_where_a_folder_must_be_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"out: cannot be written \(Not a directory\)"):
        check_file(tmp_path / "file" / "out", force=False)
    with pytest.raises(OutputError, match=r"cannot be written \(File name too long\)"):
        check_file(tmp_path / ("x" * 300), force=True)


def test_room_is_asked_for(tmp_path):
    check_room(tmp_path / "deep" / "out", 1)
    with pytest.raises(OutputError, match=r"out: [\d.]+ \w+ free, expected 10+ TB;"):
        check_room(tmp_path / "out", 10**24)


@pytest.mark.parametrize("output", ["model", "model/unet", ".", "link", "model/../model/x"])
def test_an_output_over_under_or_in_its_input_is_refused(tmp_path, output):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    with pytest.raises(OutputError, match=r"overlaps the input .*model; choose another path"):
        refuse_overlap(tmp_path / output, tmp_path / "model")
    refuse_overlap(tmp_path / "models", tmp_path / "model")


#: Runs in a process without torch and threads, so that it may fork. First word: renameat2 or not.
_COMMON = """
import os, sys
from pathlib import Path
import quantkit.storage.renaming
from quantkit.errors import OutputError
from quantkit.storage.files import scratch_directory, staged_directory, staged_file
from quantkit.storage.written import YAML_MARK
if sys.argv[1] == "fallback":
    quantkit.storage.renaming._rename = lambda *_: False
folder = Path(sys.argv[2])

def directory(output, text, force):
    with staged_directory(output, kind="test", force=force) as stage:
        (stage / "sub").mkdir()
        for name in ("a", "sub/b"):
            (stage / name).write_text(text)

def file(output, text, force):
    with staged_file(output, force=force) as stage:
        stage.write_text(YAML_MARK + text)

def content(output):
    if output.is_file():
        return {output.read_text().removeprefix(YAML_MARK)}
    names = {str(p.relative_to(output)) for p in output.rglob("*") if p.is_file()}
    assert names == {"a", "sub/b", ".quantkit"}, names
    return {(output / name).read_text() for name in ("a", "sub/b")}
"""

_RACE = (
    _COMMON
    + """
LOOPS = 25
write = {"directory": directory, "file": file}[sys.argv[3]]
force = sys.argv[4] == "force"
folded = sys.argv[1:4:2] == ["fallback", "directory"]

def work():
    wins = 0
    for loop in range(LOOPS):
        try:
            write(folder / ("out" if force else f"out{loop}"), str(os.getpid()), force)
            wins += 1
            if force:
                # Without renameat2 a folder has no name for a moment.
                assert folded or (folder / "out").exists()
        except OutputError as error:
            assert not force and "exists already" in str(error), error
    return wins

counts = []
pipes = []
for _ in range(8):
    read, written = os.pipe()
    if os.fork() == 0:
        status = 1
        try:
            os.write(written, str(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(written)
    pipes.append(read)
wins = [int(os.read(pipe, 100) or -1000) for pipe in pipes]
statuses = [os.wait()[1] for _ in pipes]
assert not any(statuses), statuses
assert sum(wins) == (8 * LOOPS if force else LOOPS), wins
outputs = sorted(os.listdir(folder))
assert len(outputs) == (1 if force else LOOPS), outputs
for name in outputs:
    assert len(content(folder / name)) == 1, name
"""
)


def run_script(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    "case", paired(product(("renameat2", "fallback"), ("directory", "file"), ("force", "plain")))
)
def test_of_eight_writers_one_wins_and_with_force_all_do(tmp_path, case):
    renaming, what, force = case
    result = run_script(_RACE, renaming, tmp_path, what, force)
    assert result.returncode == 0, result.stderr


#: Kills a child at every line of the modules that write, one after the other.
_KILLS = (
    _COMMON
    + """
import signal, shutil

MODULES = ("files.py", "staging.py", "renaming.py", "system.py")
# What a process wrote outlives it; a power cut is another matter.
os.fsync = lambda descriptor: None
write = {"directory": directory, "file": file}[sys.argv[3]]
output = folder / "out"

def killed_at(line):
    seen = 0
    def trace(frame, event, argument):
        nonlocal seen
        if not frame.f_code.co_filename.endswith(MODULES):
            return None
        seen += event == "line"
        if seen == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    child = os.fork()
    if child == 0:
        sys.settrace(trace)
        write(output, "new", True)
        sys.settrace(None)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL

def finish():
    # What the next command does first.
    with scratch_directory(output):
        pass
    # The lock of a killed process stays until the next one takes it.
    assert set(os.listdir(folder)) <= {"out", ".out.quantkit-lock"}, os.listdir(folder)

write(output, "old", False)
line = seen_new = 0
while killed_at(line := line + 1):
    if sys.argv[1] == "renameat2" or sys.argv[3] == "file":
        assert content(output) in ({"old"}, {"new"}), line
    finish()
    found = content(output)
    assert found in ({"old"}, {"new"}), (line, found)
    if found == {"new"}:
        seen_new += 1
        write(output, "old", True)
assert os.listdir(folder) == ["out"]
assert content(output) == {"new"} and seen_new and line > 50, line
"""
)


@pytest.mark.parametrize("what", ["directory", "file"])
@pytest.mark.parametrize("renaming", ["renameat2", "fallback"])
def test_a_kill_at_any_line_leaves_the_old_output_or_the_new_one(tmp_path, renaming, what):
    result = run_script(_KILLS, renaming, tmp_path, what)
    assert result.returncode == 0, result.stderr


def test_stages_of_the_living_stay(tmp_path):
    with staged_directory(tmp_path / "out", kind="test", force=False) as stage:
        make(tmp_path / "out")
        assert stage.is_dir()
        (tmp_path / "out").rename(tmp_path / "elsewhere")
    assert (tmp_path / "out" / MARKER).is_file()


def test_what_does_not_fit_is_kept_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    def write(path):
        if path.parent == tmp_path:
            raise OutputError(f"{path}: no space left on the device")
        path.write_text("hours of work")

    with pytest.raises(
        OutputError, match=r"no space left.*; the result is kept: move it from"
    ) as e:
        write_or_keep(write, tmp_path / "out")
    kept = Path(str(e.value).partition("move it from ")[2].partition(" to ")[0])
    assert kept.name == "out"
    assert kept.read_text(encoding="utf-8") == "hours of work"


def test_a_result_that_fits_nowhere_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def write(path):
        raise OutputError(f"{path}: no space left on the device")

    with pytest.raises(OutputError, match=r"nor could it be kept in .*: set TMPDIR to a folder"):
        write_or_keep(write, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_files():
    """Let no file grow beyond 64 KiB, as a quota or ``ulimit -f`` does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_file_that_may_not_grow_is_one_line(tmp_path):
    import torch
    from safetensors.torch import save_file

    with (
        pytest.raises(OutputError, match="out: larger than a file may be here"),
        staged_file(tmp_path / "out", force=False) as stage,
    ):
        save_file({"x": torch.zeros(1 << 20)}, stage)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: (m / "notes.txt").symlink_to(m.parent / "key"), "a link out of the model"),
        (lambda m: (m / "up").symlink_to("../key"), "up: a link out of the model"),
        (lambda m: (m / "unet" / "x").symlink_to(m.parent), "x: a link out of the model"),
        (lambda m: (m / "dir").symlink_to("unet"), "dir: a link to a folder, expected files"),
        (lambda m: (m / "loop").symlink_to("loop"), "loop: a link that ends nowhere"),
        (lambda m: (m / "gone").symlink_to("missing"), "gone: a link that ends nowhere"),
        (lambda m: os.mkfifo(m / "pipe"), "pipe: a named pipe, expected files and folders"),
        (lambda m: (m / "null").symlink_to("/dev/null"), "null: a link out of the model"),
    ],
)
def test_what_is_no_file_of_the_model_is_refused(tmp_path, spoil, message):
    model = tmp_path / "model"
    (model / "unet").mkdir(parents=True)
    (tmp_path / "key").write_text("secret")
    (model / "unet" / "a").write_text("a")
    (model / "b").symlink_to("unet/a")
    assert list(map(str, list_files(model))) == ["b", "unet/a"]
    spoil(model)
    with pytest.raises(ModelError, match=message):
        list_files(model)


def test_only_the_blobs_of_the_same_cache_belong_to_a_snapshot(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"models--x--{name}" / "blobs").mkdir(parents=True)
        (tmp_path / f"models--x--{name}" / "blobs" / "1").write_text(name)
    snapshot = tmp_path / "models--x--one" / "snapshots" / "abc"
    (snapshot / "unet").mkdir(parents=True)
    (snapshot / "unet" / "mine").symlink_to("../../../blobs/1")
    for folder in (snapshot, snapshot / "unet"):
        assert [file.name for file in list_files(folder)] == ["mine"]
    (snapshot / "theirs").symlink_to(tmp_path / "models--x--two" / "blobs" / "1")
    with pytest.raises(ModelError, match="theirs: a link out of the model"):
        list_files(snapshot)
