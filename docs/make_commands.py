"""Write docs/reference/commands.md from the commands: ``python docs/make_commands.py``."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import click

from quantkit.cli import quantkit
from quantkit.cli.command import GROUPS

#: An option as help writes it, and what it says of it.
Record = tuple[str, str]

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


def section(name: str, command: click.Command, shared: Mapping[str, Record]) -> str:
    """Return one command's help as a section: its own options, and the names of shared ones."""
    context = _context(command, name)
    left_out = []
    for option, record in options(command, context):
        if shared.get(record[0]) == record:
            option.hidden = True
            left_out.append(option.opts[-1])
    text, _, _ = command.get_help(context).partition("\n\nCommon options:")
    also = f"\nShared options: {', '.join(left_out)}.\n" if left_out else ""
    return f"## {name}\n\n```text\n{text}\n```\n{also}"


def _context(command: click.Command, name: str) -> click.Context:
    return click.Context(
        command, info_name=name, max_content_width=100, help_option_names=["-h", "--help"]
    )


def options(
    command: click.Command, context: click.Context
) -> Iterator[tuple[click.Option, Record]]:
    """Yield the options of a command, with how help writes them and what it says of them."""
    for option in command.params:
        if isinstance(option, click.Option) and option.name not in GROUPS["Common options"]:
            record = option.get_help_record(context)
            if record is not None:
                yield option, record


def shared_options(commands: Collection[tuple[str, click.Command]]) -> dict[str, Record]:
    """Return what help says of options that several commands have in the same words."""
    found = Counter(
        record
        for name, command in commands
        for _, record in options(command, _context(command, name))
    )
    # Two texts of one option: the later one stays, which more commands have.
    return {record[0]: record for record, count in reversed(found.most_common()) if count > 1}


def common(shared: Collection[Record]) -> str:
    """Return the options that commands share, once."""
    context = _context(quantkit.commands["pack"], "quantkit pack")
    _, _, printing = context.get_help().partition("\n\nCommon options:\n")
    formatter = context.make_formatter()
    formatter.indent()
    formatter.write_dl(sorted(shared))
    return (
        "Commands that print a result have these:\n\n"
        f"```text\n{printing}\n```\n\n"
        "## Shared options\n\nEach command below names the ones that it has:\n\n"
        f"```text\n{formatter.getvalue()}```\n"
    )


def page() -> str:
    """Return the whole page."""
    head = "# Commands\n\nMade by `python docs/make_commands.py`; a test holds it to the code.\n"
    commands = list(walk(quantkit, "quantkit"))
    shared = shared_options(commands)
    sections = [section(*found, shared) for found in commands]
    return "\n".join([head + COMPLETION, common(shared.values()), *sections])


if __name__ == "__main__":
    Path(__file__).with_name("reference").joinpath("commands.md").write_text(
        page(), encoding="utf-8"
    )
