"""Which files ``--force`` replaces: those that quantkit wrote, whatever writes them."""

import json
import struct

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file

from quantkit.errors import OutputError
from quantkit.recipe.load import load_recipe
from quantkit.sensitivity.plot import SUFFIXES, save_plot
from quantkit.sensitivity.recipe_writer import save_recipe
from quantkit.sensitivity.sensitivity_file import save_sensitivity
from quantkit.storage.artefact import write_artefact
from quantkit.storage.files import staged_file
from quantkit.storage.places import check_file
from tests.support.sensitivities import three_layers

WRITERS = {
    "artefact": lambda path: write_artefact(
        path, "quantkit_masks", {"a": torch.ones(2)}, {}, force=True
    ),
    "sensitivity.json": lambda path: save_sensitivity(three_layers(), path, force=True),
    "recipe.yaml": lambda path: save_recipe(load_recipe("fp8"), {}, path, force=True),
    **{
        f"plot{suffix}": lambda path: save_plot(three_layers(), path, force=True)
        for suffix in SUFFIXES
    },
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_quantkit_wrote_is_replaced(tmp_path, name):
    for _ in range(2):
        WRITERS[name](tmp_path / name)
        check_file(tmp_path / name, force=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def drawn(path):
    figure = Figure()
    figure.subplots().plot([1, 2])
    figure.savefig(path)


def gguf(path):
    import gguf

    writer = gguf.GGUFWriter(path, "sd3")
    writer.add_tensor("a", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FOREIGN = {
    "novel.txt": lambda path: path.write_text("It was a dark and stormy night.\n"),
    "blank": lambda path: path.write_text("\n"),
    "about.md": lambda path: path.write_text("quantkit.version # Written by quantkit.\n"),
    "zip": lambda path: path.write_bytes(b"PK\3\4" + bytes(40_000)),
    "short": lambda path: path.write_bytes(b"GGUF"),
    "model.safetensors": lambda path: save_file({"a": torch.ones(2)}, path),
    "noted.safetensors": lambda path: save_file(
        {"quantkit": torch.ones(2)}, path, metadata={"note": '{"quantkit": "no"}'}
    ),
    "model.gguf": gguf,
    "package.json": lambda path: path.write_text(json.dumps({"name": "quantkit"}, indent=2)),
    "other.json": lambda path: path.write_text(json.dumps({"schema": "other", "a": "quantkit."})),
    "recipe.yaml": lambda path: path.write_text("name: by hand\nkeep: []\n"),
    "page.html": lambda path: path.write_text("<!doctype html><title>a</title>quantkit"),
    "a.png": drawn,
    "a.svg": drawn,
    "a.pdf": drawn,
    "header": lambda path: path.write_bytes(struct.pack("<Q", 2**63) + b'{"__metadata__":{}}'),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_others_wrote_is_not(tmp_path, name):
    path = tmp_path / name
    FOREIGN[name](path)
    before = path.read_bytes()
    for attempt in (check_file, lambda o, *, force: staged_file(o, force=force).__enter__()):
        with pytest.raises(OutputError, match="a file that quantkit did not write; force would"):
            attempt(path, force=True)
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_empty_file_is_replaced(tmp_path):
    (tmp_path / "out").touch()
    with staged_file(tmp_path / "out", force=True) as made:
        made.write_text("new")
    assert (tmp_path / "out").read_text() == "new"


def test_a_file_that_came_meanwhile_stays(tmp_path):
    with (
        pytest.raises(OutputError, match="a file that quantkit did not write"),
        staged_file(tmp_path / "out", force=True) as made,
    ):
        made.write_text("new")
        (tmp_path / "out").write_text("mine")
    assert (tmp_path / "out").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
