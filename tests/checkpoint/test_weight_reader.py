"""Weights as they are read and copied: in blocks of whole rows, NaN named wherever it lies."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint import contents, weight_reader
from quantkit.checkpoint.tensor_layout import Sink
from quantkit.checkpoint.weight_reader import SourceTensor
from quantkit.errors import NonFiniteError
from quantkit.packing import writer
from quantkit.packing.config_files import write_index
from quantkit.storage.system import read_into
from quantkit.storage.tensorfile import read_header


@pytest.fixture
def opened(tmp_path):
    """Return what opens a tensor as the only one of a file."""
    descriptors = []

    def open_tensor(tensor):
        path = tmp_path / "m.safetensors"
        save_file({"w": tensor}, path)
        descriptors.append(os.open(path, os.O_RDONLY))
        return SourceTensor(path, descriptors[-1], read_header(path).tensors["w"])

    yield open_tensor
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("elements", "counts"),
    [(1, [1] * 7), (47, [2, 2, 2, 1]), (48, [3, 3, 1]), (63, [3, 3, 1]), (112, [7]), (9999, [7])],
)
def test_blocks_are_as_many_rows_as_fit(opened, elements, counts):
    weight = torch.arange(7 * 16).reshape(7, 16).float()
    blocks = [(i, rows.clone()) for i, rows in opened(weight).blocks(elements=elements)]
    assert [len(rows) for _, rows in blocks] == counts
    assert [first for first, _ in blocks] == [sum(counts[:i]) for i in range(len(counts))]
    assert torch.equal(torch.cat([rows for _, rows in blocks]), weight)


def test_a_read_that_gives_less_than_asked_goes_on(opened, monkeypatch):
    monkeypatch.setattr(
        weight_reader, "read_into", lambda file, view, at: read_into(file, view[:20], at)
    )
    weight = torch.arange(7 * 16).reshape(7, 16).float()
    blocks = [rows.clone() for _, rows in opened(weight).blocks(elements=48)]
    assert torch.equal(torch.cat(blocks), weight)


@pytest.mark.parametrize("place", [0, 3, 4, 39])
def test_a_copied_tensor_is_searched_to_its_end(tmp_path, monkeypatch, place):
    monkeypatch.setattr(contents, "_CHUNK_BYTES", 8)
    tensor = torch.zeros(4, 10, dtype=torch.float16)
    save_file({"w": tensor}, path := tmp_path / "m.safetensors")
    info = read_header(path).tensors["w"]
    assert list(contents.broken_numbers(path, info)) == []
    tensor.view(-1)[place] = torch.nan
    save_file({"w": tensor}, path)
    (told,) = contents.broken_numbers(path, info)
    assert f"w[{place // 10}, {place % 10}]: found nan" in told


class Bytes(Sink):
    def __init__(self):
        self.data = b""

    def append(self, chunk):
        self.data += bytes(chunk)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("place", "value"),
    [((0, 0), torch.nan), ((0, 39), torch.inf), ((1, 3), -torch.inf), ((2, 39), torch.nan)],
    ids=str,
)
def test_no_number_is_copied_whatever_chunk_it_lies_in(opened, monkeypatch, dtype, place, value):
    monkeypatch.setattr(writer, "COPY_BYTES", 64)
    values = torch.randn(3, 40).to(dtype)
    sink = Bytes()
    writer._copy(opened(values), sink)
    assert sink.data == values.numpy().tobytes()
    values[place] = value
    with pytest.raises(NonFiniteError, match=rf"w\[{place[0]}, {place[1]}\]: found {value}"):
        writer._copy(opened(values), Bytes())


def test_the_index_has_its_keys_in_order(tmp_path):
    (tmp_path / "old.json").write_text(
        '{"weight_map": {"z": "old.safetensors"}, "metadata": {"b": 1}}'
    )

    def plan(file, *names):
        slots = {name: SimpleNamespace(start=10, stop=14) for name in names}
        specs = tuple(SimpleNamespace(name=name) for name in names)
        return SimpleNamespace(name=file, specs=specs, slots=slots)

    write_index(tmp_path / "old.json", [plan("2", "z", "c"), plan("1", "d")], tmp_path / "new.json")
    text = (tmp_path / "new.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert json.loads(text) == {
        "metadata": {"b": 1, "total_size": 12},
        "weight_map": {"c": "2", "d": "1", "z": "2"},
    }
