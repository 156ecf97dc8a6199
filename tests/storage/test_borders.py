"""At the border: the edges of timestep buckets, and the bytes after the end of a file."""

import json
from bisect import bisect_right

import pytest
import torch
from safetensors.torch import save_file

from quantkit.calibration.statistics import Calibration, save_calibration
from quantkit.checkpoint.schemes import parse_scheme, scheme_to_json
from quantkit.errors import ArtefactError, CheckpointError, ModelError
from quantkit.inference.buckets import TimestepBuckets
from quantkit.models.timestep import bucket_of
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.storage.artefact import read_artefact
from quantkit.storage.tensorfile import read_header
from tests.calibration.test_moments import ABOUT, statistics

EDGES = (0.0, 250.5, 500.0, 999.0)


@pytest.mark.parametrize("edge", range(len(EDGES)))
def test_a_bucket_begins_at_its_edge_wherever_it_is_found(edge):
    buckets = TimestepBuckets(EDGES)
    at = torch.tensor(EDGES[edge], dtype=torch.float64)
    below = at.nextafter(torch.tensor(-1e9, dtype=torch.float64))
    above = at.nextafter(torch.tensor(1e9, dtype=torch.float64))
    for value, wanted in ((below, edge), (at, edge + 1), (above, edge + 1)):
        assert bucket_of(float(value), EDGES) == wanted
        for given in (value, value.reshape(1), value.expand(3), float(value)):
            if isinstance(given, float) and given != float(torch.tensor(given).float()):
                continue  # a number becomes float32, as the denoisers' own timesteps are
            buckets.update(given)
            assert int(buckets.index) == wanted


def scheme_with(buckets):
    scheme = Scheme(E4M3FN, PerChannel(), None, Activation.STATIC, (250.0, 500.0))
    return {**scheme_to_json(scheme), "buckets": buckets, "layers": ["a"]}


@pytest.mark.parametrize(
    "buckets",
    [[500.0, 500.0], [1, 1.0], [0.0, -0.0], [2.0, 1.0], [], [True], ["1"], [None], [1e999], 5],
    ids=str,
)
def test_buckets_of_a_file_are_ascending_and_distinct(buckets):
    with pytest.raises(CheckpointError, match="buckets"):
        parse_scheme(scheme_with(buckets), "config.json")


@pytest.mark.parametrize("buckets", [[0], [1, 2.5, 1000], [-1.0, 0.0]], ids=str)
def test_buckets_of_a_file_are_read_as_they_are(buckets):
    scheme, _ = parse_scheme(scheme_with(buckets), "config.json")
    assert scheme.buckets == tuple(map(float, buckets))
    for value in (-2.0, 0.0, 1.0, 2.5, 1e4):
        assert bucket_of(value, scheme.buckets) == bisect_right(buckets, value)


# The end of a file


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


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 64], ids=len)
def test_bytes_after_an_artefact_are_refused(tmp_path, extra):
    path = tmp_path / "c.safetensors"
    save_calibration(Calibration({"unet": {"a": statistics()}}, (500.0,), ABOUT), path, force=False)
    path.write_bytes(path.read_bytes() + extra)
    with pytest.raises(ArtefactError, match="padded") as caught:
        read_artefact(path, "quantkit_calibration", newest=3)
    assert "\n" not in str(caught.value)
