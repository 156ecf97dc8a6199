"""``quantkit cache``: list and delete entries of the cache."""

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, print_table
from quantkit.storage.sizes import tell_bytes


@click.command(cls=Command, example="quantkit cache --limit 20")
@click.option(
    "--delete",
    "names",
    multiple=True,
    metavar="NAME",
    help="Delete this entry, or all of kernels or single-files; may be given again.",
)
@click.option(
    "--limit",
    type=options.FiniteRange(min=0),
    metavar="GIB",
    help="Delete single files, those that were not opened for longest, until the others fit.",
)
@options.quiet
@options.as_json
def cache(names: tuple[str, ...], limit: float | None, quiet: bool, as_json: bool) -> None:
    """Show what quantkit keeps in its cache, and how large it is.

    Compiled kernels, and single files as 16-bit pipelines. What is deleted is made again when it is
    needed. Files that are linked from a pipeline elsewhere take no room and do not count.
    """
    from quantkit.workflow.caches import (
        cache_place,
        delete_from_cache,
        list_cache,
        shrink_cache,
    )

    deletes = bool(names) or limit is not None
    found = delete_from_cache(names) if names else ()
    if limit is not None:
        found += shrink_cache(int(limit * 2**30))
    if not deletes:
        found = list_cache()
    if as_json:
        print_json({"deleted": deletes, "entries": [kept.to_json() for kept in found]})
        return
    if not quiet and found:
        rows = [(kept.cache, kept.path.name, tell_bytes(kept.nbytes)) for kept in found]
        print_table("Entries", ("cache", "name", "size"), rows)
    total = sum(kept.nbytes for kept in found)
    echo(f"{cache_place()}: {tell_bytes(total)}{' deleted' if deletes else ''}")
