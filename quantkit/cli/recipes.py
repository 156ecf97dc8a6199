"""``quantkit recipes``: the bundled recipes, and which of them is for a model."""

from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table

if TYPE_CHECKING:
    from quantkit.workflow.recipes import Listed


@click.command()
@options.optional_model
@options.as_json
def recipes(model: str | None, as_json: bool) -> None:
    """List the bundled recipes; with MODEL those that are made for it, and what they make of it.

    The first one is recommended: it is what commands take without --recipe. Only headers are read.
    """
    from quantkit.workflow.recipes import recipes

    found = recipes(model)
    if as_json:
        print_json([recipe.to_json() for recipe in found])
    elif model is None:
        rows = [(r.name, r.family or "any", r.description, _needs(r)) for r in found]
        columns = ("name", "family", "what it does", "needs")
        print_table("Recipes", columns, rows)
    else:
        rows = [(r.name, _sizes(r), r.why, _needs(r)) for r in found]
        columns = ("name", "GB of denoisers", "why", "needs")
        print_table("Recipes", columns, rows)
        echo(f"recommended: {found[0].name}: {found[0].description}")


def _sizes(recipe: "Listed") -> str:
    return f"{recipe.bytes_before / 1e9:.3g} -> {recipe.bytes_after / 1e9:.3g}"


def _needs(recipe: "Listed") -> str:
    return ", ".join(f"--{name}" for name in recipe.needs)
