"""``quantkit verify``: every checksum and every rule of FORMAT.md."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, print_verdict, progress_bar
from quantkit.errors import CheckpointError
from quantkit.storage.sizes import tell_bytes

if TYPE_CHECKING:
    from quantkit.checkpoint.verification import Verification


@click.command(cls=Command, example="quantkit verify sdxl-int8")
@options.packed_directory
@click.option("--all", "list_all", is_flag=True, help="List every broken rule, not the first.")
@options.quiet
@options.as_json
def verify(packed: Path, list_all: bool, quiet: bool, as_json: bool) -> None:
    """Recompute every checksum of PACKED and check every rule of the format.

    Ends with exit code 2 and the first broken rule, or all of them with --all.
    """
    from quantkit.workflow.verify import find_breaches

    with progress_bar(quiet=quiet) as progress:
        result = find_breaches(packed, progress=progress, stop_at_first=not list_all)
    if as_json:
        print_json({"ok": not result.breaches, **asdict(result)})
    elif list_all:
        for breach in result.breaches:
            echo(breach)
    if len(result.breaches) > 1:
        raise CheckpointError(f"{packed}: {len(result.breaches)} rules are broken")
    if result.breaches:
        raise CheckpointError(result.breaches[0])
    if not as_json:
        for line in result.unchecked:
            echo(f"Not checked: {line}")
        print_verdict(
            f"{packed}: ok: {_named(result)}, {result.layers} packed layers, "
            f"{result.tensors} tensors, {tell_bytes(result.nbytes)}: checksums, shapes, dtypes, "
            f"order, scales, codes and metadata, and the models they are for; {result.files} files "
            f"by their digests; {result.opened} copied weight files hold numbers",
            passed=True,
        )


def _named(result: "Verification") -> str:
    """Return the names of the components; a component alone has none."""
    return ", ".join(filter(None, result.components)) or "1 component"
