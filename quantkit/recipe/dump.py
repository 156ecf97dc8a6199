"""Writing recipes: ``Recipe`` to YAML text, which ``load`` reads again."""

from typing import Any

import yaml

from quantkit.recipe.schema import Recipe


def recipe_text(recipe: Recipe, remarks: dict[str, str]) -> str:
    """Return what the recipe sets, as YAML.

    Args:
        recipe: any.
        remarks: the comment at a layer of its overrides, by module path.
    """
    values = _ordered(recipe.model_dump(mode="json", exclude_none=True, exclude_unset=True))
    overrides: list[dict[str, Any]] = values.pop("overrides", [])
    text = yaml.safe_dump(values, sort_keys=False, width=100)
    if not overrides:
        return text
    lines = ["overrides:"]
    for override in overrides:
        lines.append("- layers:")
        for layer in override.pop("layers"):
            remark = f"  # {remarks[layer]}" if layer in remarks else ""
            lines.append(f"  - {_quoted(layer)}{remark}")
        rest = yaml.safe_dump(override, sort_keys=False, width=100) if override else ""
        lines += [f"  {line}" for line in rest.splitlines()]
    return text + "\n".join(lines) + "\n"


def _ordered(values: dict[str, Any]) -> dict[str, Any]:
    """Put keys in the order that people write them, without empty ones."""
    first = ("name", "description", "weight", "activation", "sparsity")
    return {key: values[key] for key in (*first, *values) if values.get(key) not in (None, [])}


def _quoted(text: str) -> str:
    """Return a YAML scalar that means the text, globs and all."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
