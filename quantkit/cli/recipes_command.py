"""``quantkit recipes``: the bundled recipes, and the ones recommended for a model."""

from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, print_table

if TYPE_CHECKING:
    from quantkit.workflow.recipes import ListedRecipe


@click.command(cls=Command, example="quantkit recipes sdxl -r int8")
@options.optional_model
@click.option(
    "-r", "--recipe", metavar="NAME|FILE", help="Print this one, tuned for MODEL's family, as YAML."
)
@options.as_json
def recipes(model: str | None, recipe: str | None, as_json: bool) -> None:
    """List the bundled recipes; with MODEL the recommended ones, and what they make of it.

    The first one is what commands take without --recipe. Only headers are read. Below stands what
    is fastest on the GPUs of this machine. To change a recipe, save what --recipe prints.
    """
    from quantkit.workflow.recipes import formats_here, recipe_text, recipes

    if recipe is not None:
        _print_text(recipe_text(recipe, model), as_json=as_json)
        return
    found = recipes(model)
    if as_json:
        print_json([recipe.to_json() for recipe in found])
    elif model is None:
        rows = [(r.name, r.description, _needs(r)) for r in found]
        print_table("Recipes", ("name", "what it does", "needs"), rows)
    else:
        told = [(r.wish, r.name, _sizes(r), _needs(r), r.cards) for r in found]
        columns = ("you want", "name", "GB of denoisers", "needs", "cards")
        print_table("Recipes", columns, told)
        echo(*formats_here())


def _print_text(text: str, *, as_json: bool) -> None:
    if not as_json:
        echo(*text.splitlines())
        return
    import yaml

    print_json(yaml.safe_load(text))


def _sizes(recipe: "ListedRecipe") -> str:
    return f"{recipe.bytes_before / 1e9:.3g} -> {recipe.bytes_after / 1e9:.3g}"


def _needs(recipe: "ListedRecipe") -> str:
    return ", ".join(f"--{name}" for name in recipe.needs)
