"""The model card, README.md: what was packed and how, and metadata that the hub reads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.filelist import CARD
from quantkit.errors import ModelError
from quantkit.models.hub import repository_of
from quantkit.storage.inputfile import read_text
from quantkit.storage.jsonfile import DAMAGE
from quantkit.storage.sizes import tell_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from quantkit.packing.summary import PackSummary
    from quantkit.recipe.schema import Recipe

#: Begins and ends what an evaluation replaces.
MARKS = ("<!-- quantkit: evaluation -->", "<!-- quantkit: end of evaluation -->")

#: Begins what the card says after the command that packed, and what it says there of a training.
_RECIPE = "The header of every packed file"
_TRAINED = "Its codes were trained then: `quantkit recover MODEL --packed OUTPUT -o THIS`.\n\n"

#: What a packed model has of its base's metadata.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
#: Bytes of a base's card; published ones have at most some hundred thousand.
_LIMIT = 1 << 20

_TEXT = """
# {title}

The weights of {base} as codes with scales, packed by quantkit in the layout of diffusers.

| component | class | layers packed | formats | 16 bit | packed |
|---|---|---|---|---|---|
{rows}

All files, with what is copied as it is: {before} before, {after} packed.

## Loading

```python
import quantkit

pipe = quantkit.load_pipeline("PATH_OF_THIS_DIRECTORY")
```

- diffusers reads this directory where `import quantkit` came first.
- ComfyUI and others do not: some load the file without an error, drop the scales and draw noise.
  `quantkit export THIS --to comfyui -o model.safetensors` writes a file for them.

## Evaluation

{start}
Not measured yet. `{evaluate}` writes the figures here.
{end}

## Making

```console
{pack}
```

{recipe} has the whole recipe, and `quantkit.files.json` the digests.

## Licence

{licence}
"""


def write_card(folder: Path, base: Path, recipe: Recipe, summary: PackSummary) -> None:
    """Write the card of a packed directory.

    Args:
        folder: gets README.md, and has none.
        base: the 16-bit model; its own README.md says which licence holds.
        recipe: that was applied.
        summary: of packing; its files' sizes and layers are told.
    """
    from huggingface_hub import ModelCard, ModelCardData

    repository = repository_of(base)
    inherited = _inherited(base / CARD)
    data = ModelCardData(
        base_model=repository or None,
        base_model_relation="quantized" if repository else None,
        library_name="diffusers",
        tags=["quantkit", *sorted({s.weight.name for s in summary.by_scheme()})],
        **inherited,
    )
    name = _plain(repository or base.name)
    text = _TEXT.format(
        title=f"{name}, recipe {_plain(recipe.name)}",
        base=name,
        rows="\n".join(_rows(summary)),
        before=tell_bytes(summary.bytes_before),
        after=tell_bytes(summary.bytes_after),
        start=MARKS[0],
        end=MARKS[1],
        evaluate=f"quantkit eval report {repository or 'MODEL'} THIS -o REPORT",
        recipe=_RECIPE,
        pack=_command(repository or "MODEL", recipe),
        licence=_licence(inherited),
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{text}").save(folder / CARD)


def trained_card(text: str) -> str:
    """Return the card of a packed model after its codes were trained.

    Args:
        text: the card before; figures of an evaluation are taken out, and one that its author wrote
            otherwise stays.
    """
    before, first, rest = text.replace(_RECIPE, _TRAINED + _RECIPE, 1).partition(MARKS[0])
    _, last, after = rest.partition(MARKS[1])
    if not last:
        return text
    untold = (
        "Trained after it was packed, and not measured since. `quantkit eval report MODEL THIS -o "
        "REPORT` writes the figures here."
    )
    return f"{before}{first}\n{untold}\n{last}{after}"


def _rows(summary: PackSummary) -> list[str]:
    rows = []
    for component in summary.components:
        mine = [layer for layer in summary.layers if layer.component == component.name]
        schemes = [layer.scheme for layer in mine if layer.scheme is not None]
        formats = {f"{s.weight.name}{', 2:4' * (s.sparsity is not None)}" for s in schemes}
        sizes = map(tell_bytes, (component.bytes_before, component.bytes_after))
        layers = f"{len(schemes)} of {len(mine)}"
        cells = (component.name or "-", component.class_name, layers, "; ".join(sorted(formats)))
        rows.append(f"| {' | '.join((*cells, *sizes))} |")
    return rows


def _command(model: str, recipe: Recipe) -> str:
    options = {
        "-c CALIBRATION": recipe.needs_calibration,
        "--hessians HESSIANS": recipe.needs_hessians,
    }
    given = "".join(f" {option}" for option, needed in options.items() if needed)
    return f"quantkit pack {model} -r {_plain(recipe.name)}{given} -o OUTPUT"


def _licence(inherited: dict[str, Any]) -> str:
    name = inherited.get("license_name") or inherited.get("license")
    if not isinstance(name, str):
        return "That of the base model, whose files do not name it: look at its page."
    link = inherited.get("license_link")
    return f"That of the base model: {_plain(name)}{f' (<{link}>)' if link else ''}."


def _inherited(card: Path) -> dict[str, Any]:
    """Return the metadata that the base's card has; none where there is no card that can be read.

    A card is for people: one that is damaged is no reason not to pack.
    """
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        text = read_text(card, _LIMIT)
        if not text.startswith("---"):
            return {}
        data = ModelCard(text, ignore_metadata_errors=True).data
    except (ModelError, YAMLError, RecursionError, *DAMAGE):
        return {}
    return {key: data[key] for key in _INHERITED if key in data and _is_plain(data[key])}


def _is_plain(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(v, str) and v.isprintable() and len(v) < 200 for v in values)


def _plain(text: str) -> str:
    """Return a name without what Markdown or a shell reads as more than a letter."""
    return re.sub(r"[^\w ./:-]", "-", text)
