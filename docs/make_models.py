"""Write reference/models.md: what becomes of every denoiser class of the installed diffusers.

``python docs/make_models.py``. Tuned classes are those of a row of ``FAMILIES``; of general ones it
says which the tests pack, load and compare as tiny models.
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from quantkit.models.families import FAMILIES, is_denoiser

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.denoiser_classes import ROWS

PAGE = Path(__file__).parent / "reference" / "models.md"

TEXT = """\
# Models

Every denoiser class of diffusers {version}. *Tuned* classes have a row in
`quantkit/models/families.py`, tested against the tensors of published models; for all
others what is packed follows from structure, names and shapes
([recipes](../guides/recipes.md#what-stays-in-16-bit)). *Tested* means that a tiny model of the
class is packed, verified, loaded by `from_pretrained`, compared with the original, saved and loaded
again by `tests/models/test_any_denoiser.py`, and that `bench model` knows its inputs. Other classes
of diffusers (ControlNets, adapters, encoders, VAEs without a row in `quantkit/models/vaes.py`) are
refused as MODEL, and copied as they are inside of a pipeline.

Made by `python docs/make_models.py`.

## Tuned and tested

{tuned}
## General, tested

{tested}

## General, not tested

{others}
"""


def classes() -> Iterator[str]:
    """Yield the denoiser classes of the installed diffusers."""
    import diffusers

    for name in sorted(dir(diffusers)):
        found = getattr(diffusers, name, None)
        model = inspect.isclass(found) and issubclass(found, diffusers.ModelMixin)
        if model and found is not diffusers.ModelMixin and is_denoiser(name):
            yield name


def page() -> str:
    """Return the page."""
    import diffusers

    tuned = {name: family.name for family in FAMILIES for name in family.class_names}
    tested = {row.class_name for row in ROWS}
    names = list(classes())
    # The page has no word for one that is tuned and not tested.
    assert tested.issuperset(tuned.keys() & names)
    rows = [f"- {name}: {tuned[name]}\n" for name in names if name in tuned]
    general = [name for name in names if name not in tuned]
    return TEXT.format(
        version=diffusers.__version__,
        tuned="".join(rows),
        tested=", ".join(name for name in general if name in tested) + ".",
        others=", ".join(name for name in general if name not in tested) + ".",
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
