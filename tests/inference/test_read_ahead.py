"""Packed tensors that threads read: the bytes of the files, or a refusal by name."""

import os

import pytest
import torch
from safetensors.torch import load_file

from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.spec import PACKED_PARTS
from quantkit.errors import CheckpointError
from quantkit.inference.loading import read_ahead as module
from quantkit.inference.loading.checksums import checksums
from quantkit.inference.loading.read_ahead import read_ahead
from tests.support.loading import same_bytes

CPU = torch.device("cpu")


def opened(folder):
    (component,) = open_packed(folder / "unet").components
    return component


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("chunk", [96, 1 << 20])
def test_tensors_are_those_that_the_library_reads(sharded_dir, chunk, wanted, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    component = opened(sharded_dir)
    stored = {n: t for h in component.headers for n, t in load_file(h.path).items()}
    with checksums(enabled=wanted), torch.device("meta"):
        ahead = read_ahead(component, CPU)
    packed = {f"{layer}.{part}" for layer in component.config.layers for part in PACKED_PARTS}
    assert ahead.names == packed & stored.keys()
    for name in ahead.names:
        found = ahead.take(name)
        assert found.dtype == stored[name].dtype
        assert same_bytes(found, stored[name])
        assert found.data_ptr() % 64 == 0
        assert ahead.take(name) is None


@pytest.mark.parametrize("wanted", [True, False])
def test_a_file_that_was_cut_meanwhile_is_refused(broken, wanted):
    component = opened(broken)
    path = component.headers[0].path
    last = max(component.tensors, key=lambda name: component.tensors[name][1].stop)
    os.truncate(path, path.stat().st_size - 1)
    with checksums(enabled=wanted), pytest.raises(CheckpointError, match="the file ends at byte"):
        read_ahead(component, CPU).take(last)


def test_other_devices_and_given_up_loads_get_nothing(packed_dir):
    component = opened(packed_dir)
    assert not read_ahead(component, torch.device("cuda")).names
    ahead = read_ahead(component, CPU)
    ahead.cancel()
    assert all(ahead.take(name) is None for name in ahead.names)
