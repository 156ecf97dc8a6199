"""``quantkit cache``: what is shown, what is deleted, what is left alone."""

import json
import os

import pytest
from click.testing import CliRunner

from quantkit.cli import quantkit as command
from quantkit.errors import InputError
from quantkit.workflow.caches import delete_from_cache, list_cache


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "quantkit"
    for name, size in (("single-files/a", 7), ("single-files/b", 100), ("kernels/c", 20)):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_bytes(bytes(size))
    (tmp_path / "elsewhere").write_bytes(bytes(1000))
    os.link(tmp_path / "elsewhere", root / "single-files" / "a" / "linked")
    (tmp_path / "folder").mkdir()
    (root / "single-files" / "link").symlink_to(tmp_path / "folder")
    return root


def test_entries_are_shown_with_the_room_that_they_take():
    shown = [(kept.cache, kept.path.name, kept.nbytes) for kept in list_cache()]
    assert shown == [("single-files", "b", 100), ("kernels", "c", 20), ("single-files", "a", 7)]
    done = CliRunner().invoke(command, ["cache", "--json"])
    assert [entry["bytes"] for entry in json.loads(done.stdout)["entries"]] == [100, 20, 7]
    assert "127 bytes" in CliRunner().invoke(command, ["cache"]).stdout


@pytest.mark.parametrize(
    ("name", "left"),
    [("single-files", ["kernels/c"]), ("b", ["kernels/c", "single-files/a"])],
)
def test_what_is_named_is_deleted(name, left, cache, tmp_path):
    done = CliRunner().invoke(command, ["cache", "--delete", name])
    assert done.exit_code == 0
    assert "deleted" in done.stdout
    assert sorted(f"{k.cache}/{k.path.name}" for k in list_cache()) == left
    # What was linked from outside, or to it, is not quantkit's.
    assert (tmp_path / "elsewhere").exists()
    assert (tmp_path / "folder").exists()


@pytest.mark.parametrize("name", ["", "..", "link", "elsewhere", "../elsewhere"])
def test_other_names_are_refused(name):
    with pytest.raises(InputError, match=r"not in .* expected one of kernels, single-files"):
        delete_from_cache([name])


def test_an_empty_cache_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    assert list_cache() == ()
    assert CliRunner().invoke(command, ["cache"]).exit_code == 0


@pytest.mark.parametrize(
    ("gib", "left"),
    [(200 / 2**30, ["a", "b"]), (107 / 2**30, ["a", "b"]), (50 / 2**30, ["a"]), (0, [])],
)
def test_single_files_that_were_not_opened_for_longest_go_first(gib, left, cache):
    os.utime(cache / "single-files" / "b", (1, 1))
    os.utime(cache / "kernels" / "c", (0, 0))
    done = CliRunner().invoke(command, ["cache", "--limit", str(gib), "--json"])
    assert done.exit_code == 0, done.output
    deleted = {entry["path"].rpartition("/")[2] for entry in json.loads(done.stdout)["entries"]}
    there = {kept.path.name for kept in list_cache()}
    assert there == {*left, "c"}
    assert deleted == {"a", "b"} - set(left)
