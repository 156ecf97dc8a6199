"""Parsing the untrusted header of a .gguf file within bounds.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, which do not
differ in what is read here.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"GGUF"
#: A header of 100,000 tensors with names of 200 letters has 25 MB.
MAX_HEADER_BYTES = 32 * 2**20
#: Of all arrays of the metadata together. The largest vocabularies have 260,000 words, and three
#: arrays of that length.
MAX_ELEMENTS = 1_000_000
#: The largest denoisers have some thousands.
MAX_TENSORS = 100_000
#: Of the specification.
_MAX_NAME_BYTES = 65_535
#: GGML has 4; ComfyUI-GGUF writes 5 for 3-D convolutions.
_MAX_SIZES = 8
#: ComfyUI-GGUF's true shape of a tensor that was cut into rows of another length.
SHAPE_KEY = "comfy.gguf.orig_shape."

#: Numbers of metadata by the type's number, as struct names them.
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_INTEGERS = frozenset("BbHhIiQq")
_UINT32, _STRING, _ARRAY = 4, 8, 9
_VERSIONS = (2, 3)
_ALIGNMENT = 32

#: What is kept of a value: an integer, a text, a short list of integers; None: anything else
Value = int | bytes | tuple[int, ...] | None


@dataclass(frozen=True)
class HeaderTensor:
    """One row of the table of tensors."""

    name: str
    #: as torch has it: the header's order is the other one
    shape: tuple[int, ...]
    #: GGML's number of the type
    type: int
    #: of its first byte, from where the data begins
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """The contents of a header."""

    #: general.architecture; empty when the file does not say
    architecture: str
    #: of tensors that were cut into other rows, by name
    true_shapes: dict[str, tuple[int, ...]]
    tensors: tuple[HeaderTensor, ...]
    #: where the table of tensors ends
    stop: int
    #: every tensor begins at a multiple of it, counted from where the data begins
    alignment: int

    @property
    def data_start(self) -> int:
        """The offset at which the data begins."""
        return self.aligned(self.stop)

    def aligned(self, place: int) -> int:
        """Return the next place at which a tensor may begin."""
        return -(-place // self.alignment) * self.alignment


def walk_header(data: bytes) -> GgufHeader:
    """Return the header that a file begins with.

    Args:
        data: the first ``MAX_HEADER_BYTES`` of the file, from the magic on; fewer if it has fewer.

    Raises:
        ValueError: it ends early, is of another version or byte order, or goes beyond a bound.
    """
    walk = _Walk(data, len(MAGIC))
    version = walk.number("I")
    if version not in _VERSIONS:
        other = "big-endian, expected little-endian" if not version & 0xFFFF else "expected 2 or 3"
        raise ValueError(f"version {version}: {other}")
    tensors = walk.count("tensors", MAX_TENSORS)
    values = _walk_values(walk, walk.count("entries of metadata", MAX_TENSORS))
    found = tuple(_walk_tensor(walk) for _ in range(tensors))
    architecture = values.get("general.architecture")
    return GgufHeader(
        architecture.decode(errors="replace") if isinstance(architecture, bytes) else "",
        dict(_true_shapes(values)),
        found,
        walk.place,
        _alignment(values.get("general.alignment", _ALIGNMENT)),
    )


class _Walk:
    """A forward cursor over the bytes of a header."""

    def __init__(self, data: bytes, place: int) -> None:
        self.data = data
        self.place = place
        #: of all arrays so far
        self.elements = 0

    def skip(self, count: int) -> int:
        """Pass so many bytes; return where they begin."""
        start, stop = self.place, self.place + count
        if stop > len(self.data):
            if len(self.data) >= MAX_HEADER_BYTES:
                raise ValueError(f"a header of {stop} bytes, expected at most {MAX_HEADER_BYTES}")
            raise ValueError(f"{len(self.data)} bytes, expected {stop}")
        self.place = stop
        return start

    def numbers(self, code: str, count: int) -> tuple[int, ...]:
        """Return numbers of a type of struct's."""
        form = struct.Struct(f"<{count}{code}")
        return form.unpack_from(self.data, self.skip(form.size))

    def number(self, code: str) -> int:
        """Return one number of a type of struct's."""
        return self.numbers(code, 1)[0]

    def count(self, what: str, limit: int) -> int:
        """Return a count."""
        found = self.number("Q")
        if found > limit:
            raise ValueError(f"{found} {what}, expected at most {limit}")
        return found

    def text(self) -> bytes:
        """Return a text of any length."""
        start = self.skip(self.number("Q"))
        return self.data[start : self.place]

    def name(self) -> str:
        """Return the name of a tensor or a value."""
        start = self.skip(self.count("bytes of a name", _MAX_NAME_BYTES))
        return self.data[start : self.place].decode(errors="backslashreplace")


def _walk_values(walk: _Walk, count: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for _ in range(count):
        name = walk.name()
        if name in values:
            raise ValueError(f"{name!r:.80} stands twice")
        values[name] = _walk_value(walk, walk.number("I"))
    return values


def _walk_value(walk: _Walk, kind: int) -> Value:
    if kind == _ARRAY:
        return _walk_array(walk, walk.number("I"))
    if kind == _STRING:
        return walk.text()
    if kind not in _NUMBERS:
        raise ValueError(f"metadata of type {kind}")
    value = walk.number(_NUMBERS[kind])
    return value if _NUMBERS[kind] in _INTEGERS else None


def _walk_array(walk: _Walk, kind: int) -> Value:
    count = walk.count("elements of a list", MAX_ELEMENTS)
    walk.elements += count
    if walk.elements > MAX_ELEMENTS:
        raise ValueError(f"more than {MAX_ELEMENTS} elements of lists")
    if kind == _STRING:
        _skip_texts(walk, count)
        return None
    # A list of lists is none of the specification's.
    if kind not in _NUMBERS:
        raise ValueError(f"a list of metadata of type {kind}")
    code = _NUMBERS[kind]
    if code in _INTEGERS and count <= _MAX_SIZES:
        return walk.numbers(code, count)
    walk.skip(count * struct.calcsize(f"<{code}"))
    return None


def _skip_texts(walk: _Walk, count: int) -> None:
    """Skip texts; an inlined loop, because there may be a million."""
    unpack, data, place = struct.Struct("<Q").unpack_from, walk.data, walk.place
    last = len(data) - 8
    for _ in range(count):
        if place > last:
            break
        place += 8 + unpack(data, place)[0]
    else:
        walk.skip(place - walk.place)
        return
    walk.skip(place + 8 - walk.place)


def _walk_tensor(walk: _Walk) -> HeaderTensor:
    name = walk.name()
    sizes = walk.number("I")
    if sizes > _MAX_SIZES:
        raise ValueError(f"{name!r:.80}: {sizes} sizes, expected at most {_MAX_SIZES}")
    shape = walk.numbers("Q", sizes)[::-1]
    return HeaderTensor(name, shape, walk.number("I"), walk.number("Q"))


def _true_shapes(values: dict[str, Value]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, value in values.items():
        if name.startswith(SHAPE_KEY):
            if not isinstance(value, tuple):
                raise ValueError(f"{name!r:.80}: expected at most {_MAX_SIZES} integers")
            yield name.removeprefix(SHAPE_KEY), value


def _alignment(value: Value) -> int:
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise ValueError(f"general.alignment {value!r:.80}, expected a power of two")
    return value
