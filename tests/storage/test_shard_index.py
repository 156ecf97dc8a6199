"""Indexes of shards, which strangers wrote."""

import json
import time

import pytest

from quantkit.errors import ModelError
from quantkit.storage.shard_index import read_shard_index

SHARD = "diffusion_pytorch_model-00001-of-00001.safetensors"


def write(folder, **values):
    path = folder / "x.safetensors.index.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("metadata", [{}, None, {"total_size": 3, "more": "x"}])
def test_an_index_names_files_beside_it(tmp_path, metadata):
    table = {"a": "two", "b": "one", "c": "two"}
    found = read_shard_index(write(tmp_path, metadata=metadata, weight_map=table))
    assert found.shards == (tmp_path / "one", tmp_path / "two")
    assert found.metadata == (metadata or {})
    assert found.weight_map == table


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"metadata": "x", "weight_map": {"a": SHARD}}, "metadata is 'x', expected an object"),
        ({"metadata": [1], "weight_map": {"a": SHARD}}, r"metadata is \[1\], expected"),
        ({"metadata": {}}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": [SHARD]}, "no weight_map"),
        ({"weight_map": {"a": 3}}, "names the file 3, expected the plain name"),
        ({"weight_map": {"a": ["x"]}}, "names the file"),
        ({"weight_map": {"a": "../x"}}, "names the file '../x', expected the plain name"),
        ({"weight_map": {"a": "./x"}}, "names the file './x'"),
        ({"weight_map": {"a": "/etc/x"}}, "names the file"),
        ({"weight_map": {"a": ""}}, "names the file ''"),
        ({"weight_map": {"a": "x\u202ey"}}, "names the file"),
    ],
    ids=str,
)
def test_entries_of_other_types_are_refused(tmp_path, values, match):
    with pytest.raises(ModelError, match=match) as caught:
        read_shard_index(write(tmp_path, **values))
    assert str(caught.value).startswith(str(tmp_path))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("count", "name", "match"),
    [
        (500_000, SHARD, "bytes, expected at most"),
        (100_001, "x", "100,001 tensors, expected at most 100,000"),
        (10_001, "{}", "10,001 files, expected at most 10,000"),
    ],
)
def test_an_endless_index_is_refused_at_once(tmp_path, count, name, match):
    path = write(tmp_path, weight_map={f"t{i}": name.format(i) for i in range(count)})
    before = time.process_time()
    with pytest.raises(ModelError, match=match):
        read_shard_index(path)
    assert time.process_time() - before < 5
