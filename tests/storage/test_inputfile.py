"""Reading files that somebody else wrote: JSON and headers, whole, damaged and hostile."""

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantkit.errors import ArtefactError, ModelError
from quantkit.storage.inputfile import open_file, read_file, read_text
from quantkit.storage.jsonfile import MAX_DEPTH, MAX_VALUES, parse_json, read_json, read_measured
from quantkit.storage.tensorfile import MAX_HEADER_BYTES, read_header


def folder(path):
    path.mkdir()


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def dangling(path):
    path.symlink_to(path.with_name("nowhere"))


def looping(path):
    path.symlink_to(path.with_name("back"))
    path.with_name("back").symlink_to(path)


NO_FILES = {
    "absent": (lambda path: None, "missing"),
    "folder": (folder, "a folder, expected a file"),
    "dangling": (dangling, "a link to what is missing"),
    "looping": (looping, "cannot be read"),
}
if os.name == "posix":
    NO_FILES["pipe"] = (pipe, "a named pipe, expected a file")
    NO_FILES["device"] = (device, "a device, expected a file")


@pytest.mark.timeout(10)
@pytest.mark.parametrize(("make", "message"), NO_FILES.values(), ids=NO_FILES)
@pytest.mark.parametrize("read", [read_json, read_header], ids=["json", "header"])
def test_what_is_no_file_is_named(tmp_path, read, make, message):
    path = tmp_path / "x"
    make(path)
    with pytest.raises(ModelError, match=rf"x: {message}"):
        read(path)


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="root, and Windows, read everything"
)
def test_unreadable_file(tmp_path):
    path = tmp_path / "x"
    path.touch(mode=0o000)
    with pytest.raises(ModelError, match="cannot be read"):
        open_file(path)


def test_a_name_with_a_null_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no name of a file"):
        open_file(tmp_path / "a\0b")


def test_the_limit_counts_bytes(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_file(tmp_path / "x", 5) == b"12345"
    with pytest.raises(ArtefactError, match="5 bytes, expected at most 4"):
        read_file(tmp_path / "x", 4, error=ArtefactError)


def test_text_is_utf8_with_or_without_a_mark(tmp_path):
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa\xc3\xa4")
    assert read_text(tmp_path / "x", 100) == "aä"
    (tmp_path / "x").write_bytes(b"ab\xff")
    with pytest.raises(ModelError, match=r"not UTF-8 \(byte 2\)"):
        read_text(tmp_path / "x", 100)


GOOD = [
    "[" + "9" * 40 + ", -" + "9" * 40 + "]",
    f'["{"9" * 41}", 1]',
    '{"a": [1, 2.5, null, true, "x"]}',
    "[]",
    '"ä\\ud83d\\ude00"',
    "3",
    '{"a": {"a": 1}}',
]


@pytest.mark.parametrize("text", GOOD)
def test_json_agrees_with_the_library(text):
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


BAD = {
    "cut": ("{", "Expecting"),
    "empty": ("", "Expecting"),
    "twice": ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
    "surrogate": ('{"a": "\\ud800"}', "surrogate"),
    "surrogate-key": ('{"\\udc00": 1}', "surrogate"),
    "digits": ("1" * 5000, "digits"),
    "beyond floats": ('{"bytes": -1' + "0" * 400 + "}", "a number of 402 digits"),
    "bytes": (b'"\xff"', "byte 1 is not UTF-8"),
    "values": ("[" + "[]," * MAX_VALUES + "[]]", "more than 1,000,000 values"),
    "deep": ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "more than 64 levels"),
    "very-deep": ("[" * 400_000, "more than 64 levels"),
    "deep-objects": ('{"a":' * 100_000, "more than 64 levels"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_bad_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)


def test_the_deepest_json_is_read():
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize("error", [KeyError, IndexError, TypeError, ValueError, OverflowError])
def test_what_parsing_raises_is_one_line(tmp_path, error):
    (tmp_path / "x").write_text('{"schema": "s", "schema_version": 1}')

    def parse(values):
        raise error("first\nsecond" + "x" * 1000)

    with pytest.raises(ArtefactError, match=r"damaged .*first.*; measure again") as caught:
        read_measured(tmp_path / "x", "s", 1, parse, command="c")
    assert len(str(caught.value)) < 500 + len(str(tmp_path))
    assert str(caught.value).isprintable()


@pytest.fixture
def tensors(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.float32)}, path)
    return path


def entry(key, value):
    def change(table):
        table["a"][key] = value

    return change


def no_entry(table):
    table["a"] = []


def more(table):
    table["a"]["more"] = 1


def metadata(table):
    table["__metadata__"] = {"a": 1}


HEADERS = {
    "float-shape": entry("shape", [3.0]),
    "bool-shape": entry("shape", [True, 3]),
    "negative-shape": entry("shape", [-1, -3]),
    "huge-shape": entry("shape", [3, 10**30]),
    "text-shape": entry("shape", "3"),
    "float-offset": entry("data_offsets", [0.0, 12.0]),
    "three-offsets": entry("data_offsets", [0, 12, 12]),
    "number-dtype": entry("dtype", 4),
    "list-dtype": entry("dtype", []),
    "unknown-dtype": entry("dtype", "F4"),
    "no-entry": no_entry,
    "more": more,
    "metadata": metadata,
}


def write(path, text, data):
    head = text if isinstance(text, bytes) else json.dumps(text).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def parts(path):
    raw = path.read_bytes()
    length = struct.unpack_from("<Q", raw)[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_damaged_headers_are_refused(tensors, change):
    table, data = parts(tensors)
    change(table)
    write(tensors, table, data)
    with pytest.raises(ModelError, match=r"x\.safetensors: ") as caught:
        read_header(tensors)
    assert str(caught.value).isprintable()


def test_bytes_after_the_end_are_refused(tensors):
    tensors.write_bytes(tensors.read_bytes() + b"\0")
    with pytest.raises(ModelError, match="truncated or padded"):
        read_header(tensors)


def test_what_the_library_refuses_is_refused(tensors):
    table, data = parts(tensors)
    # Nothing to read, so sizes agree; the library counts elements and overflows.
    table["c"] = {"dtype": "F32", "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}
    write(tensors, table, data)
    with pytest.raises(ModelError, match="not safetensors"):
        read_header(tensors)


def test_a_header_beyond_the_limit_is_not_parsed(tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(8 + MAX_HEADER_BYTES + 1)
    with pytest.raises(ModelError, match=r"header of .* bytes, expected at most"):
        read_header(path)
