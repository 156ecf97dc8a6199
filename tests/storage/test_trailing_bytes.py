"""Bytes after the end of a file, and between its tensors."""

import json
import time

import pytest
import torch
from safetensors.torch import save_file

from quantkit.calibration.statistics.layer_statistics import Calibration, save_calibration
from quantkit.errors import ArtefactError, ModelError
from quantkit.storage.artefact import read_artefact
from quantkit.storage.tensorfile import read_header
from tests.support.artefacts import ABOUT, statistics


@pytest.mark.parametrize("extra", [b"\0", b"x", b"\0" * 8, b"{}" * 4096], ids=len)
def test_bytes_after_the_last_tensor_are_refused(tmp_path, extra):
    path = tmp_path / "t.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.zeros(3, dtype=torch.uint8)}, path)
    read_header(path)
    path.write_bytes(path.read_bytes() + extra)
    with pytest.raises(ModelError, match=str(path)):
        read_header(path)


def test_bytes_between_tensors_are_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    table = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [5, 9]},
    }
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 9)
    with pytest.raises(ModelError, match=str(path)):
        read_header(path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        # Multiplied out, a number of 25 million bits: minutes.
        (
            {"a": {"dtype": "U8", "shape": [2**62] * 400_000, "data_offsets": [0, 0]}},
            "header entry",
        ),
        (
            {"__metadata__": {str(i): "" for i in range(10_001)}},
            "10,001 keys, expected at most",
        ),
    ],
    ids=["axes", "metadata"],
)
def test_headers_beyond_all_use_are_refused_at_once(tmp_path, table, message):
    path = tmp_path / "t.safetensors"
    text = json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    start = time.process_time()
    with pytest.raises(ModelError, match=message):
        read_header(path)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 64], ids=len)
def test_bytes_after_an_artefact_are_refused(tmp_path, extra):
    path = tmp_path / "c.safetensors"
    save_calibration(Calibration({"unet": {"a": statistics()}}, (500.0,), ABOUT), path, force=False)
    path.write_bytes(path.read_bytes() + extra)
    with pytest.raises(ArtefactError, match="padded") as caught:
        read_artefact(path, "quantkit_calibration")
    assert "\n" not in str(caught.value)
