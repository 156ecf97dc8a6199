"""Commands whose help has an example, and options under headings."""

from typing import Any

import click

#: The heading in help, and the names of options under it; others stand under "Options".
GROUPS = {
    "Model": (
        "config", "variant", "recipe", "set", "calibration", "hessians", "masks", "packed",
        "sensitivity", "model",
    ),
    "Pictures": ("prompts", "count", "steps", "guidance", "seed", "batch"),
    "Measures": ("lpips_weights", "clip", "judges", "noise_floor", "gates"),
    "Output": (
        "output", "masks_output", "save", "save_baseline", "plot", "beside", "watch", "preview",
        "force", "resume", "dry_run",
    ),
    "Common options": ("quiet", "as_json"),
}  # fmt: skip
OTHERS = "Options"


class Command(click.Command):
    """A command with an example of its use, and what it leaves when it is stopped."""

    def __init__(
        self, *arguments: Any, example: str, kept: str = "", left: str = "", **settings: Any
    ) -> None:
        """Take what click takes, and more.

        Args:
            arguments: click's.
            example: a line for a shell.
            kept: files that --resume goes on with, a pattern in which {} is the output's name.
            left: files that only --force replaces, such a pattern.
            settings: click's.
        """
        super().__init__(*arguments, **settings)
        self.example, self.kept, self.left = example, kept, left

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does, and the example."""
        super().format_help_text(ctx, formatter)
        with formatter.section("Example"):
            # As it stands: wrapped, it could not be copied.
            formatter.write(f"  {self.example}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section for each heading."""
        shown: dict[str, list[tuple[str, str]]] = {name: [] for name in (OTHERS, *GROUPS)}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                heading = "Common options" if "--help" in option.opts else _heading(option.name)
                shown[heading].append(record)
        # Those that are a command's own stand between its model and its output.
        first, *rest = GROUPS
        for name in (first, OTHERS, *rest):
            if shown[name]:
                with formatter.section(name):
                    formatter.write_dl(shown[name])


def _heading(name: str | None) -> str:
    return next((heading for heading, names in GROUPS.items() if name in names), OTHERS)


class Group(click.Group):
    """A group of such commands."""

    command_class = Command
    group_class = type
