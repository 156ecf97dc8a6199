"""The page of families by target: complete, as its script writes it, and some of it made anew."""

import importlib
import re

import pytest

from quantkit.interchange.layout_names import layout_of_model
from quantkit.interchange.original_layouts import LAYOUTS
from quantkit.workflow.export import targets

script = importlib.import_module("docs.make_targets")
COMMAND = "run: python docs/make_targets.py"
#: Read in this process; SDNQ's reader takes another, and 10 s to import.
HERE = [to for to in script.TARGETS if to != "sdnq"]


def family(title):
    return next(row for row in script.FAMILIES if row.title == title)


@pytest.fixture(scope="module")
def written():
    return script.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def cells(written):
    """The cells of the page: title -> target -> text."""
    table = re.search(r"^\| family .*?\n\n", written, re.DOTALL | re.MULTILINE)[0].rstrip()
    (_, *columns), _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines())
    names = [column.strip("`") for column in columns]
    return {title: dict(zip(names, row, strict=True)) for title, *row in rows}


def without_versions(text):
    return re.sub(r"\d+(\.\d+)+", "VERSION", text)


def test_the_page_is_what_its_script_writes_of_its_cells(written, cells):
    made = script.page([list(row.values()) for row in cells.values()])
    assert without_versions(made) == without_versions(written), COMMAND


def test_every_target_and_every_original_layout_has_its_place():
    assert set(script.TARGETS) == set(targets()), COMMAND
    tensors = [(row.class_name, row.make().state_dict()) for row in script.FAMILIES]
    known = {layout.class_name for layout in LAYOUTS}
    found = {layout_of_model(*pair) for pair in tensors if pair[0] in known}
    assert found == set(LAYOUTS), COMMAND


def equal(found, page):
    """Whether a cell is that of the page, up to the rounding of another CPU."""
    error, _, share = page.partition(", ")
    if found.error is None or not share:
        return str(found) == page
    return found.error == pytest.approx(float(error), rel=0.1) and str(found).endswith(share)


def test_a_cell_is_compared_with_its_figures():
    cell = script.Cell(0.8821, 0.02623)
    assert equal(cell, "0.026, 88 %")
    assert not equal(cell, "0.022, 88 %")
    assert not equal(cell, "0.026, 87 %")
    assert not equal(cell, "no names")
    assert not equal(script.Cell(refused="no names"), "no GGUF")


@pytest.mark.filterwarnings("ignore")  # of compressed-tensors, about itself
@pytest.mark.parametrize("title", ["Wan", "FLUX.1", "PixArt", "T5"])
def test_rows_are_what_the_readers_find(title, cells):
    (row,) = script.measure([family(title)], HERE)
    found = dict(zip(HERE, row, strict=True))
    wrong = {to: str(cell) for to, cell in found.items() if not equal(cell, cells[title][to])}
    assert not wrong, COMMAND


@pytest.mark.slow
def test_a_cell_of_sdnq_is_what_its_reader_finds(cells):
    ((found,),) = script.measure([family("Wan")], ["sdnq"])
    assert equal(found, cells["Wan"]["sdnq"]), found
