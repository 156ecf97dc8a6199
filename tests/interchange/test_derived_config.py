"""Configs that follow from tensors: against those that their authors publish."""

import gzip
import json
from pathlib import Path

import diffusers
import pytest
import torch

from quantkit.interchange.derived_config import DERIVED, derived_config
from quantkit.interchange.layout_names import layout_of_model, original_tensors
from quantkit.interchange.original_layouts import LAYOUTS

GOLDEN = Path(__file__).parents[1] / "golden"
#: What shapes do not say where no pos_embed is: no file of PixArt lacks it.
UNUSED = {"PixArtTransformer2DModel": {"pos_embed": (1, 4096, 1152)}}


def published(name):
    return json.loads(gzip.decompress((GOLDEN / f"keys_{name}.json.gz").read_bytes()))


def original_shapes(class_name, shapes):
    """The shapes of a published model in its authors' layout."""
    layout = layout_of_model(class_name, shapes)
    found = dict(UNUSED.get(class_name, {}))
    for tensor in original_tensors(layout, shapes):
        first = shapes[tensor.parts[0]]
        rows = sum(shapes[part][0] for part in tensor.parts) if first else 0
        shape = (rows, *first[1:]) if first else ()
        found[tensor.name] = shape[::-1] if tensor.transposed else shape
    return layout, found


def effective(class_name, config):
    """A config with the class's defaults, as the published one differs from them, too."""
    with torch.device("meta"):
        model = getattr(diffusers, class_name)(**config)
    told = {k: v for k, v in model.config.items() if not k.startswith("_")}
    return json.loads(json.dumps(told))


NAMES = sorted(
    name for path in GOLDEN.glob("keys_*.json.gz")
    if (name := path.name[5:-8]) != "sana_1600m"
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_published_model_has_the_config_that_its_authors_publish(name):
    row = published(name)
    layout, shapes = original_shapes(row["class_name"], row["tensors"])
    named = {layout.prefix + key: shape for key, shape in shapes.items()}
    config = derived_config({**named, "first_stage_model.decoder.conv_in.weight": (1, 1, 1, 1)})
    assert config.pop("_class_name") == row["class_name"]
    assert effective(row["class_name"], config) == effective(row["class_name"], row["config"])


@pytest.mark.parametrize(
    ("name", "change", "key", "value"),
    [
        ("sd15", {"input_blocks.0.0.weight": (320, 9, 3, 3)}, "in_channels", 9),
        ("flux1_dev", {"guidance_in.in_layer.weight": None}, "guidance_embeds", False),
        ("flux1_dev", {"img_in.weight": (3072, 384)}, "out_channels", 64),
        ("pixart_sigma", {"pos_embed": (1, 1024, 1152)}, "interpolation_scale", 1),
    ],
)
def test_variants_show_in_their_tensors(name, change, key, value):
    row = published(name)
    _, shapes = original_shapes(row["class_name"], row["tensors"])
    shapes = {n: s for n, s in {**shapes, **change}.items() if s is not None}
    assert derived_config(shapes)[key] == value


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda row: row.class_name)
def test_every_layout_has_a_row_and_markers_alone_say_nothing_wrong(layout):
    assert layout.class_name in DERIVED
    found = derived_config(dict.fromkeys(layout.markers, (8, 8)))
    assert found is None or found["_class_name"] == layout.class_name


@pytest.mark.parametrize("shapes", [{}, {"a.weight": ()}, {"decoder.conv_in.weight": (1, 2, 3, 3)}])
def test_what_is_no_denoiser_has_none(shapes):
    assert derived_config(shapes) is None
