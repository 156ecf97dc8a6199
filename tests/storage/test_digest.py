"""Digests of parts of a file."""

from hashlib import sha256

import pytest
import torch
from safetensors.torch import save_file

from quantkit.storage.digest import CHUNK_BYTES, sha256_of
from quantkit.storage.tensorfile import read_header

pytestmark = pytest.mark.usefixtures("any_model")


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 7])
def test_digest_is_that_of_the_bytes(tmp_path, size):
    tensor = torch.arange(size).to(torch.uint8)
    save_file({"a": torch.zeros(3), "x": tensor}, tmp_path / "x.safetensors")
    info = read_header(tmp_path / "x.safetensors").tensors["x"]
    digest = sha256_of(tmp_path / "x.safetensors", info)
    assert digest == sha256(tensor.numpy().tobytes()).hexdigest()


def test_digest_of_a_file_that_ends_early_raises(tmp_path):
    save_file({"x": torch.zeros(64)}, tmp_path / "x.safetensors")
    info = read_header(tmp_path / "x.safetensors").tensors["x"]
    with (tmp_path / "x.safetensors").open("r+b") as file:
        file.truncate(info.stop - 8)
    with pytest.raises(EOFError, match="the file ends at"):
        sha256_of(tmp_path / "x.safetensors", info)
