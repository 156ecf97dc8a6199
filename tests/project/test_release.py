"""Releases: one place has the version, and a tag that differs from it is refused."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from quantkit import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def check_tag(folder, tag, newest):
    """Return what .ci/tag says of a tag, in a tree whose changelog begins with a heading."""
    for name in (".ci/tag", "quantkit/_version.py"):
        (folder / name).parent.mkdir()
        shutil.copy(ROOT / name, folder / name)
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{newest}\n\n## [0.0.1] - 2020-01-01\n")
    return subprocess.run(
        ["bash", ".ci/tag", tag], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib comes with Python 3.11")
def test_the_version_is_written_once():
    import tomllib  # type: ignore[import-not-found,unused-ignore]  # mypy checks for 3.10

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["dynamic"] == ["version"]
    assert "version" not in settings["project"]
    attribute = settings["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "quantkit._version.__version__"


def test_the_changelog_begins_with_the_version():
    newest = re.search(r"^## \[(.+?)\] - (unreleased|\d{4}-\d\d-\d\d)$", CHANGELOG, re.MULTILINE)
    assert newest[1] == __version__


def test_a_tag_of_a_dated_version_passes(tmp_path):
    found = check_tag(tmp_path, f"v{__version__}", f"## [{__version__}] - 2026-01-31")
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize(
    ("tag", "newest", "expected"),
    [
        ("v99.0.0", f"## [{__version__}] - 2026-01-31", f"expected v{__version__}"),
        (__version__, f"## [{__version__}] - 2026-01-31", f"expected v{__version__}"),
        (f"v{__version__}", f"## [{__version__}] - unreleased", "date the release"),
        (f"v{__version__}", "## [99.0.0] - 2026-01-31", f"expected '## [{__version__}]"),
    ],
)
def test_another_tag_or_changelog_is_refused(tmp_path, tag, newest, expected):
    found = check_tag(tmp_path, tag, newest)
    assert found.returncode == 1
    assert expected in found.stderr


def commands(workflow):
    """Yield the lines that the jobs of a workflow run."""
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    yield from (step["run"] for job in jobs for step in job["steps"] if "run" in step)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_and_scripts_that_exist(workflow):
    targets = set(
        re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    )
    lines = list(commands(workflow))
    made = {words[1] for words in map(str.split, lines) if words[0] == "make"}
    scripts = {word for line in lines for word in line.split() if word.startswith(".ci/")}
    assert made | scripts
    assert made <= targets
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_every_python_that_is_promised_is_tested():
    (tests,) = (path for path in WORKFLOWS if path.stem == "tests")
    jobs = yaml.safe_load(tests.read_text(encoding="utf-8"))["jobs"]
    promised = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text("utf-8"))
    assert jobs["newest"]["strategy"]["matrix"]["python"] == promised
    assert {promised[0], promised[-1]} == set(jobs["elsewhere"]["strategy"]["matrix"]["python"])
