"""Write docs/reference/commands.md from the commands: ``python docs/make_commands.py``."""

from collections.abc import Iterator
from pathlib import Path

import click

from quantkit.cli import quantkit

#: How shells learn the commands: click's own.
COMPLETION = """
`quantkit help eval report` shows a command's help, too, and `quantkit -v` before a command says
more on the way, such as why a kernel was refused. One of these lines teaches a shell to complete
commands and options:

```sh
echo 'eval "$(_QUANTKIT_COMPLETE=bash_source quantkit)"' >> ~/.bashrc
echo 'eval "$(_QUANTKIT_COMPLETE=zsh_source quantkit)"' >> ~/.zshrc
_QUANTKIT_COMPLETE=fish_source quantkit > ~/.config/fish/completions/quantkit.fish
```
"""


def walk(group: click.Group, prefix: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command below ``group`` with its full name."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from walk(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def section(name: str, command: click.Command) -> str:
    """Return one command's help as a section."""
    context = click.Context(
        command, info_name=name, max_content_width=100, help_option_names=["-h", "--help"]
    )
    text, _, _ = command.get_help(context).partition("\n\nCommon options:")
    return f"## {name}\n\n```text\n{text}\n```\n"


def common() -> str:
    """Return the options that commands share, once."""
    context = click.Context(quantkit.commands["pack"], help_option_names=["-h", "--help"])
    _, _, options = context.get_help().partition("\n\nCommon options:\n")
    return f"Commands that print a result share these:\n\n```text\n{options}\n```\n"


def page() -> str:
    """Return the whole page."""
    head = "# Commands\n\nMade by `python docs/make_commands.py`; a test holds it to the code.\n"
    return "\n".join(
        [head + COMPLETION, common(), *(section(*found) for found in walk(quantkit, "quantkit"))]
    )


if __name__ == "__main__":
    Path(__file__).with_name("reference").joinpath("commands.md").write_text(
        page(), encoding="utf-8"
    )
