"""Reading compilers' metadata of kernels from ELF and MessagePack."""

import struct
from dataclasses import dataclass

#: What the metadata of a code object is made of.
Value = None | bool | int | float | str | bytes | list["Value"] | dict[str, "Value"]

_HEADER_SIZE = 64
_NOTE = 7
_NOBITS = 8


@dataclass(frozen=True)
class Section:
    """One section; ``info`` means what the section's type says."""

    name: str
    kind: int
    size: int
    info: int
    content: bytes


def read_sections(content: bytes) -> tuple[Section, ...]:
    """Return the sections of a little-endian 64-bit ELF file.

    Raises:
        ValueError: it is no such file, or is cut short.
    """
    if len(content) < _HEADER_SIZE or content[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a little-endian 64-bit ELF file")
    try:
        (offset,) = struct.unpack_from("<Q", content, 40)
        entry, count, names = struct.unpack_from("<HHH", content, 58)
        rows = [
            struct.unpack_from("<IIQQQQIIQQ", content, offset + i * entry) for i in range(count)
        ]
    except struct.error as error:
        raise ValueError("the section table is cut short") from error
    return tuple(_section(content, row, rows[names][4]) for row in rows)


def read_notes(section: Section) -> dict[tuple[str, int], bytes]:
    """Return the notes of a section by owner and type."""
    assert section.kind == _NOTE
    notes, at, data = {}, 0, section.content
    while at + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<III", data, at)
        at += 12
        owner = data[at : at + name_size].rstrip(b"\0").decode()
        at += -(-name_size // 4) * 4
        notes[owner, kind] = data[at : at + size]
        at += -(-size // 4) * 4
    return notes


def is_note(section: Section) -> bool:
    """Tell whether ``read_notes`` can read the section."""
    return section.kind == _NOTE


def unpack_message(data: bytes) -> Value:
    """Return the value that a MessagePack document holds.

    Raises:
        ValueError: an extension type, or the document is cut short.

    Source: the MessagePack specification, 2017 edition.
    """
    try:
        value, _ = _unpack(data, 0)
    except (IndexError, struct.error) as error:
        raise ValueError("the MessagePack document is cut short") from error
    return value


def _section(content: bytes, row: tuple[int, ...], names: int) -> Section:
    name, kind, _, _, offset, size, _, info, *_ = row
    start = names + name
    text = content[start : content.index(b"\0", start)].decode()
    body = b"" if kind == _NOBITS else content[offset : offset + size]
    return Section(text, kind, size, info, body)


#: first byte -> (struct format of the value)
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
#: first byte -> (what, struct format of the length)
_SIZED = {
    0xC4: ("bytes", ">B"),
    0xC5: ("bytes", ">H"),
    0xC6: ("bytes", ">I"),
    0xD9: ("text", ">B"),
    0xDA: ("text", ">H"),
    0xDB: ("text", ">I"),
    0xDC: ("list", ">H"),
    0xDD: ("list", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}
_CONSTANTS: dict[int, Value] = {0xC0: None, 0xC2: False, 0xC3: True}


def _unpack(data: bytes, at: int) -> tuple[Value, int]:
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 256, at
    if first < 0xC0:
        what = "map" if first < 0x90 else "list" if first < 0xA0 else "text"
        return _unpack_sized(data, at, what, first & (0x1F if what == "text" else 0x0F))
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _NUMBERS:
        (number,) = struct.unpack_from(_NUMBERS[first], data, at)
        return number, at + struct.calcsize(_NUMBERS[first])
    if first in _SIZED:
        what, size_format = _SIZED[first]
        (size,) = struct.unpack_from(size_format, data, at)
        return _unpack_sized(data, at + struct.calcsize(size_format), what, size)
    raise ValueError(f"MessagePack type 0x{first:02x} has no place in kernel metadata")


def _unpack_sized(data: bytes, at: int, what: str, size: int) -> tuple[Value, int]:
    if what in {"text", "bytes"}:
        if at + size > len(data):
            raise IndexError
        body = data[at : at + size]
        return (body.decode() if what == "text" else body), at + size
    items = []
    for _ in range(size * (2 if what == "map" else 1)):
        item, at = _unpack(data, at)
        items.append(item)
    if what == "list":
        return items, at
    return {str(key): value for key, value in zip(items[::2], items[1::2], strict=True)}, at
