"""``python -m tests.golden``: write the tables of digests anew, or compare with them."""

import json
import sys

import click

from tests.golden import artefacts, kernels
from tests.golden.table import differences


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def golden() -> None:
    """Digests of all that quantkit writes, and of the instructions of its kernels."""


check = click.option("--check", is_flag=True, help="Compare with the table; 1 where it differs.")


@golden.command("artefacts")
@check
def artefacts_command(check: bool) -> None:
    """Pack, sparsify, export and calibrate tiny models: some minutes."""
    found = artefacts.run()
    if not check:
        artefacts.write(found)
        return
    _end(differences(artefacts.read().rows, found, artefacts.RENEW))


@golden.command("kernels")
@click.argument("targets", nargs=-1, type=click.Choice(kernels.TARGETS))
@click.option("--add", is_flag=True, help="Keep the rows of the table; compile what has none.")
@check
def kernels_command(targets: tuple[str, ...], add: bool, check: bool) -> None:
    """Compile the variants of TARGETS, or of all: a second each."""
    chosen = targets or kernels.TARGETS
    if check:
        _end("\n".join(filter(None, (kernels.changed(t, kernels.read(t).rows) for t in chosen))))
        return
    for target in chosen:
        kernels.write(target, add=add)


@golden.command("rows", hidden=True)
@click.option("--quick", is_flag=True)
def rows_command(quick: bool) -> None:
    """Print rows of artefacts as JSON, of this process and its libraries."""
    click.echo(json.dumps(artefacts.rows_of_this_process(quick=quick)))


def _end(changed: str) -> None:
    if changed:
        click.echo(changed)
        sys.exit(1)


golden()
