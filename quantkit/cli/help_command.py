"""``quantkit help COMMAND``: the same as ``quantkit COMMAND --help``."""

import click

from quantkit.cli.command import Command
from quantkit.cli.console import echo


@click.command("help", cls=Command, example="quantkit help eval report")
@click.argument("names", metavar="[COMMAND]...", nargs=-1)
@click.pass_context
def help_command(context: click.Context, names: tuple[str, ...]) -> None:
    """Show the help of COMMAND, as 'quantkit help eval report'; of quantkit without one."""
    found = context.find_root()
    for name in names:
        group = found.command
        command = group.get_command(found, name) if isinstance(group, click.Group) else None
        if command is None:
            raise click.UsageError(f"No such command {' '.join(names)!r:.100}.", context)
        found = click.Context(
            command,
            parent=found,
            info_name=name,
            max_content_width=found.max_content_width,
            help_option_names=found.help_option_names,
        )
    echo(*found.get_help().splitlines())
