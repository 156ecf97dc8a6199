"""The command line that goes on after an interrupt or a crash."""

import os
import shlex
import time
from collections.abc import Sequence
from glob import escape
from pathlib import Path

import click

from quantkit.cli.command import Command

#: When this process began: what is older is an earlier run's.
_STARTED = time.time()


def goes_on(group: click.Group, words: Sequence[str]) -> str:
    """Return the command that goes on with what these words began; empty where none would.

    With --resume where the run has kept something, and with --force where it left what it would
    refuse to replace.

    Args:
        group: of all commands.
        words: after ``quantkit``.
    """
    # torchrun's own words are not known here.
    if "WORLD_SIZE" in os.environ:
        return ""
    try:
        command, rest = _find(group, words)
        output = _given(command, rest).get("output")
    except click.UsageError:
        return ""
    if not isinstance(command, Command) or output is None:
        return ""
    more = _more(command, Path(str(output)), rest)
    try:
        _given(command, [*more, *rest])
    except click.UsageError:
        return ""
    begin = words[: len(words) - len(rest)]
    return shlex.join(["quantkit", *begin, *more, *rest])


def has_kept(command_line: str) -> bool:
    """Return whether a line goes on with what a run has kept."""
    return "--resume" in shlex.split(command_line)


def _more(command: Command, output: Path, rest: Sequence[str]) -> list[str]:
    """Return the option that a run needs which follows on this one."""
    if "--resume" in rest:
        return []
    if _is_there(output, command.kept):
        return ["--resume"]
    return ["--force"] if _is_there(output, command.left) and "--force" not in rest else []


def _is_there(output: Path, pattern: str) -> bool:
    """Return whether this process wrote such a file next to the output, or in it."""
    found = output.parent.glob(pattern.format(escape(output.name))) if pattern else ()
    return any(path.is_file() and path.stat().st_mtime >= _STARTED for path in found)


def _find(group: click.Group, words: Sequence[str]) -> tuple[click.Command, list[str]]:
    command: click.Command = group
    rest = list(words)
    while isinstance(command, click.Group):
        while rest and rest[0].startswith("-"):
            rest.pop(0)
        found = command.commands.get(rest[0]) if rest else None
        if found is None:
            raise click.UsageError("no command")
        command = found
        rest.pop(0)
    return command, rest


def _given(command: click.Command, rest: Sequence[str]) -> dict[str, object]:
    """Return the values of options, parsed as click does; files are not looked at.

    Raises:
        click.UsageError: they do not parse.
    """
    context = click.Context(command, info_name="quantkit")
    values, _, _ = command.make_parser(context).parse_args(list(rest))
    return dict(values)
