"""Headers of .gguf files: hostile and damaged ones end at once, in one line."""

import shutil
import struct
import time

import gguf
import numpy as np
import pytest

from quantkit.errors import ModelError
from quantkit.interchange.gguf_file import read_gguf
from quantkit.interchange.gguf_header import walk_header

ARRAY, STRING, UINT8, UINT32, INT32, FLOAT32, UINT64 = 9, 8, 0, 4, 5, 6, 10
F32, Q8_0 = 0, 8


def text(value):
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def entry(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def array(kind, count, items):
    return struct.pack("<IQ", kind, count) + items


def info(name, sizes, kind, offset):
    """A row of the table; sizes in GGML's order."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def header(entries=(), tensors=(), *, version=3, counts=None):
    count = counts or (len(tensors), len(entries))
    return b"".join([b"GGUF", struct.pack("<IQQ", version, *count), *entries, *tensors])


def whole(head, nbytes, alignment=32):
    return head + bytes(-len(head) % alignment) + bytes(nbytes)


TWO = (info("a", (32,), F32, 0), info("b", (8,), F32, 128))


def refused(path, data, match):
    path.write_bytes(data)
    begun = time.process_time()
    with pytest.raises(ModelError, match=match) as caught:
        read_gguf(path)
    assert time.process_time() - begun < 1
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


#: what a file holds that is refused, and what is said of it
DAMAGED = {
    "elements of one list": (
        header([entry("k", ARRAY, array(UINT8, 1 << 22, bytes(1 << 22)))]),
        r"4194304 elements of a list, expected at most 1000000",
    ),
    "elements of all lists": (
        header([entry(f"k{i}", ARRAY, array(UINT8, 600_000, bytes(600_000))) for i in range(7)]),
        "more than 1000000 elements of lists",
    ),
    "lists of lists": (
        header([entry("k", ARRAY, array(ARRAY, 300_000, array(UINT8, 0, b"") * 300_000))]),
        "a list of metadata of type 9",
    ),
    "texts that end early": (
        header([entry("k", ARRAY, array(STRING, 900_000, text("") * 500_000))]),
        "4000049 bytes, expected 4000057",
    ),
    "a text beyond all sizes": (
        header([entry("k", ARRAY, array(STRING, 2, struct.pack("<Q", (1 << 64) - 1)))]),
        "bytes, expected",
    ),
    "entries": (header(counts=(0, 300_000)), "300000 entries of metadata, expected at most 100000"),
    "tensors": (header(counts=(1 << 60, 0)), "1152921504606846976 tensors, expected at most"),
    "rows of the table": (header(counts=(90_000, 0)), "bytes, expected"),
    "a long name": (
        header([entry("k" * 70_000, UINT8, b"\0")]),
        "70000 bytes of a name, expected at most 65535",
    ),
    "a value of no type": (header([entry("k", 13, b"")]), "metadata of type 13"),
    "a list of no type": (header([entry("k", ARRAY, array(13, 1, b""))]), "of type 13"),
    "an entry twice": (header([entry("k", UINT8, b"\0")] * 2), "'k' stands twice"),
    "a tensor twice": (whole(header([], TWO[:1] * 2), 256), "tensor 'a' stands twice"),
    "sizes of a tensor": (
        header([], [info("a", (1,) * 9, F32, 0)]),
        "'a': 9 sizes, expected at most 8",
    ),
    "sizes beyond all files": (
        whole(header([], [info("a", ((1 << 64) - 1,) * 8, F32, 0)]), 64),
        "truncated or damaged",
    ),
    "a version": (header(version=1), "version 1: expected 2 or 3"),
    "another byte order": (header(version=3 << 24), "big-endian, expected little-endian"),
    "alignment": (
        header([entry("general.alignment", UINT32, struct.pack("<I", 24))]),
        "general.alignment 24, expected a power of two",
    ),
    "no alignment": (
        header([entry("general.alignment", UINT32, bytes(4))]),
        "general.alignment 0, expected a power of two",
    ),
    "alignment below zero": (
        header([entry("general.alignment", INT32, struct.pack("<i", -32))]),
        "general.alignment -32, expected a power of two",
    ),
    "alignment by a list": (
        header([entry("general.alignment", ARRAY, array(UINT32, 1, struct.pack("<I", 32)))]),
        r"general.alignment \(32,\), expected a power of two",
    ),
    "one element more than all lists may have": (
        header([entry("k", ARRAY, array(UINT8, 999_999, bytes(999_999))),
                entry("l", ARRAY, array(UINT8, 2, bytes(2)))]),
        "more than 1000000 elements of lists",
    ),
    "true shapes of nine sizes": (
        whole(header([entry("comfy.gguf.orig_shape.a", ARRAY, array(INT32, 9, bytes(36)))],
                     TWO), 160),
        "'comfy.gguf.orig_shape.a': expected at most 8 integers",
    ),
    "alignment by a text": (
        header([entry("general.alignment", STRING, text("32"))]),
        "general.alignment b'32', expected a power of two",
    ),
    "data that overlap": (
        whole(header([], [TWO[0], info("b", (8,), F32, 64)]), 160),
        "b begins at byte 64, expected 128",
    ),
    "data in another order": (
        whole(header([], [info("a", (8,), F32, 128), info("b", (32,), F32, 0)]), 160),
        "a begins at byte 128, expected 0",
    ),
    "a gap": (
        whole(header([], [TWO[0], info("b", (8,), F32, 160)]), 192),
        "b begins at byte 160, expected 128",
    ),
    "data that are not aligned": (
        whole(header([], [info("a", (1,), F32, 0), info("b", (8,), F32, 4)]), 64),
        "b begins at byte 4, expected 32",
    ),
    "a type smaller than its place": (
        whole(header([], [info("a", (32,), Q8_0, 0), info("b", (8,), F32, 128)]), 160),
        "b begins at byte 128, expected 64",
    ),
    "a type larger than its place": (
        whole(header([], [info("a", (32,), Q8_0, 0), info("b", (8,), F32, 32)]), 64),
        "b begins at byte 32, expected 64",
    ),
    "rows that cut blocks": (
        whole(header([], [info("a", (16, 2), Q8_0, 0)]), 64),
        r"a: rows of \(16,\) cut blocks of 32",
    ),
    "an early end": (whole(header([], TWO), 159), "bytes, expected"),
    "a late end": (whole(header([], TWO), 161), "1 bytes after the last tensor"),
    "true shapes that are none": (
        whole(header([entry("comfy.gguf.orig_shape.a", ARRAY, array(FLOAT32, 1, bytes(4)))],
                     TWO), 160),
        "'comfy.gguf.orig_shape.a': expected at most 8 integers",
    ),
    "true shapes below zero": (
        whole(header([entry("comfy.gguf.orig_shape.a", ARRAY,
                            array(INT32, 2, struct.pack("<2i", -4, -8)))], TWO), 160),
        r"a: comfy.gguf.orig_shape\.\* says \[-4, -8\], which is not its size",
    ),
    "a name that is no text": (whole(header([], [info(b"\xff", (8,), F32, 0)]), 32), "dotted path"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_header_that_lies_is_refused_at_once(name, tmp_path):
    data, match = DAMAGED[name]
    refused(tmp_path / "m.gguf", data, match)


def at_bounds(version):
    """A header that has all that a header may have, but for numbers of entries and tensors."""
    entries = [
        entry("k" * 65_535, UINT8, b"\0"),
        entry("l", ARRAY, array(UINT8, 999_990, bytes(999_990))),
        entry("comfy.gguf.orig_shape.a", ARRAY, array(INT32, 8, struct.pack("<8i", *range(8)))),
    ]
    # The last text ends where the bytes do.
    words = entry("m", ARRAY, array(STRING, 2, text("x") + text("")))
    return header([*entries, words], version=version)


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_may_have_what_the_bounds_say(version):
    found = walk_header(at_bounds(version))
    assert found.true_shapes == {"a": tuple(range(8))}
    assert found.stop == len(at_bounds(version))
    assert (found.architecture, found.alignment, found.tensors) == ("", 32, ())
    row = info("t", (1,) * 8, F32, 0)
    assert walk_header(header([], [row])).tensors[0].shape == (1,) * 8


def test_a_header_beyond_its_limit_is_refused(tmp_path):
    """The table is said to begin behind more metadata than any model has."""
    entries = [entry(f"k{i}", STRING, text(bytes(9 << 20))) for i in range(4)]
    refused(tmp_path / "m.gguf", header(entries, TWO), "expected at most 33554432")


def test_every_cut_of_a_sound_file_is_refused(tmp_path):
    entries = [
        entry("general.architecture", STRING, text("sd3")),
        entry("k", ARRAY, array(STRING, 2, text("x") + text("yz"))),
        entry("l", ARRAY, array(UINT64, 1, bytes(8))),
    ]
    data = whole(header(entries, TWO), 160)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert read_gguf(path).tensors.keys() == {"a", "b"}
    for size in range(len(data)):
        refused(path, data[:size], "not a GGUF file|truncated or damaged")


@pytest.mark.parametrize("alignment", [None, 1, 64, 4096])
def test_tensors_lie_where_the_package_puts_them(alignment, tmp_path):
    """All kinds of metadata, odd sizes, and no tensors: each as gguf's own reader has it."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "sd3")
    for number, kind in enumerate(("uint8", "int16", "float32", "bool", "uint64", "float64")):
        getattr(writer, f"add_{kind}")(f"n.{kind}", number)
    writer.add_array("words", ["", "ä", "x" * 300])
    writer.add_array("floats", [0.5] * 20)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for name, shape in (("a", (3, 5)), ("b", (1,)), ("c", (7, 1, 2)), ("d", (0, 4)), ("e", ())):
        writer.add_tensor(name, np.ones(shape, "f4"))
    writer.add_tensor("f", np.ones((2, 34), "u1"), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(path)
    assert found.architecture == "sd3"
    wanted = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert found.tensors.keys() == wanted.keys()
    for name, tensor in found.tensors.items():
        assert tensor.start == wanted[name].data_offset
        assert tensor.nbytes == wanted[name].n_bytes
        assert tensor.type == wanted[name].tensor_type.name
        assert tensor.shape == tuple(reversed(wanted[name].shape.tolist()))


def test_a_file_without_padding_at_its_end_is_read(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(whole(header([], [info("a", (3,), F32, 0)]), 12))
    padded = tmp_path / "n.gguf"
    shutil.copy(path, padded)
    padded.write_bytes(path.read_bytes() + bytes(20))
    assert read_gguf(path).tensors == read_gguf(padded).tensors
