"""``quantkit cache``: what lies in the cache, and deleting it."""

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table


@click.command()
@click.option(
    "--delete",
    "names",
    multiple=True,
    metavar="NAME",
    help="Delete this entry, or all of kernels or single-files; may be given again.",
)
@options.quiet
@options.as_json
def cache(names: tuple[str, ...], quiet: bool, as_json: bool) -> None:
    """Show what quantkit keeps in its cache, and how large it is.

    Compiled kernels, and single files as 16-bit pipelines. What is deleted is made again when it is
    needed. Files that are linked from a pipeline elsewhere take no room and do not count.
    """
    from quantkit.workflow.caches import cache_place, delete_from_cache, list_cache

    found = delete_from_cache(names) if names else list_cache()
    if as_json:
        print_json({"deleted": bool(names), "entries": [kept.to_json() for kept in found]})
        return
    if not quiet and found:
        rows = [(kept.cache, kept.path.name, f"{kept.nbytes:,}") for kept in found]
        print_table("Entries", ("cache", "name", "bytes"), rows)
    total = sum(kept.nbytes for kept in found)
    echo(f"{cache_place()}: {total:,} bytes{' deleted' if names else ''}")
