"""The layout of files against the safetensors library."""

import json

import pytest
import torch
from safetensors.torch import save

from quantkit.checkpoint.metadata import METADATA_KEY
from quantkit.checkpoint.spec import TensorSpec
from quantkit.checkpoint.tensor_layout import DTYPE_ORDER, encode_header, place
from quantkit.storage.tensorfile import read_header

pytestmark = pytest.mark.usefixtures("any_model")


#: Dtypes of torch in the library's names; FNUZ and E8M0 are only ever copied.
TORCH_DTYPES = {
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "F32": torch.float32,
    "U32": torch.uint32, "I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16,
    "U16": torch.uint16, "I16": torch.int16, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def library_header(tensors, metadata):
    data = save(tensors, metadata=metadata)
    return data[: 8 + int.from_bytes(data[:8], "little")]


def test_header_is_the_librarys_for_every_dtype():
    tensors = {
        f"{letter}.{name}": torch.zeros(2, 3, dtype=torch.uint8).to(dtype)
        for letter in "bzaB"
        for name, dtype in TORCH_DTYPES.items()
    }
    specs = [TensorSpec(n, n.partition(".")[2], tuple(t.shape)) for n, t in tensors.items()]
    metadata = {"format": "pt"}
    assert encode_header(specs, metadata) == library_header(tensors, metadata)
    assert set(DTYPE_ORDER) == set(TORCH_DTYPES)


@pytest.mark.parametrize(
    "name", ["a", 'quo"te', "back\\slash", "tab\t", "\x01", "\x7f", "é中", "\U0001f600", ""]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3, 4, 5)])
def test_header_is_the_librarys_for_odd_names_and_shapes(name, shape):
    tensors = {name: torch.zeros(shape), "\uffee": torch.zeros(1), "plain": torch.zeros(2)}
    specs = [TensorSpec(n, "F32", tuple(t.shape)) for n, t in tensors.items()]
    metadata = {METADATA_KEY: json.dumps({"é": '"\\'})}
    assert encode_header(specs, metadata) == library_header(tensors, metadata)


def test_header_metadata_ascends():
    text = encode_header([], {"quantkit": "1", "format": "pt"})[8:].decode()
    assert list(json.loads(text)["__metadata__"]) == ["format", "quantkit"]
    assert len(text) % 8 == 0


def test_slots_are_where_the_header_says(tmp_path):
    specs = [TensorSpec("b", "U8", (5,)), TensorSpec("a", "U8", (3,)), TensorSpec("s", "F32", ())]
    header = encode_header(specs, {})
    slots = place(specs, len(header))
    data = bytearray(header) + bytes(max(s.stop for s in slots.values()) - len(header))
    (tmp_path / "x.safetensors").write_bytes(data)
    found = read_header(tmp_path / "x.safetensors").tensors
    assert {n: (i.start, i.stop) for n, i in found.items()} == {
        n: (s.start, s.stop) for n, s in slots.items()
    }
