"""Every command is documented, helps, and is documented as it is."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from quantkit.cli import quantkit

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("docs/*.md"))
TEXT = "\n".join(p.read_text(encoding="utf-8") for p in [*PAGES, ROOT / "README.md"])


def commands(group=quantkit, prefix=("quantkit",)):
    for name, command in sorted(group.commands.items()):
        path = (*prefix, name)
        if isinstance(command, click.Group):
            yield from commands(command, path)
        else:
            yield pytest.param(path, command, id=" ".join(path))


@pytest.mark.parametrize(("path", "command"), commands())
def test_command_is_in_the_docs_and_helps(path, command):
    assert " ".join(path) in TEXT
    assert command.help
    undocumented = [
        p.name for p in command.params if isinstance(p, click.Option) and not (p.help or p.hidden)
    ]
    assert not undocumented


@pytest.mark.parametrize("page", ["commands", "results"])
def test_pages_that_are_made_are_what_makes_them_says(page):
    # In a process of its own: a command keeps the help options of whoever called it first.
    made = subprocess.run(
        [sys.executable, "-c", f"from make_{page} import page; print(page(), end='')"],
        cwd=ROOT / "docs",
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    written = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert made == written, f"run: python docs/make_{page}.py"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: p.name)
def test_links_inside_the_repository_lead_somewhere(page):
    import re

    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [t for t in targets if "://" not in t]
    assert not [t for t in local if not (page.parent / t).exists()]
