"""Damage to .gguf files: counts, lengths, offsets and types of their headers, and their numbers."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import binary
from .artefacts import placed
from .cases import Kind, Scene
from .picking import files, nothing, on
from .places import PLACES
from .text import HOSTILE

_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
#: type of a field -> how struct calls it
_PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_F32, _F16, _Q4_0, _Q8_0 = 0, 1, 2, 8
#: type -> bytes of a block that has a float16 scale first
_BLOCKS = {_Q4_0: 18, _Q8_0: 34}
_HUGE = (2**16, 2**20, 10**6 + 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)


@dataclass
class _Tensor:
    name: bytes
    shape: list[int]
    type: int
    offset: int


@dataclass
class _File:
    #: key -> type and the bytes of its value
    fields: list[tuple[bytes, int, bytes]]
    tensors: list[_Tensor]
    data: bytes
    #: what the header claims, where it claims otherwise
    counts: dict[str, int] = field(default_factory=dict)


def gguf_file(scene: Scene) -> Path:
    """Return the file."""
    return scene.folder / "file.gguf"


def _parsed(data: bytes) -> _File:
    place = 8

    def take(kind: str) -> Any:
        nonlocal place
        (value,) = struct.unpack_from(f"<{kind}", data, place)
        place += struct.calcsize(f"<{kind}")
        return value

    def text() -> bytes:
        nonlocal place
        size = take("Q")
        place += size
        return data[place - size : place]

    def skip(kind: int) -> None:
        if kind == _ARRAY:
            inner, count = take("I"), take("Q")
            for _ in range(count):
                skip(inner)
        elif kind == _STRING:
            text()
        else:
            take(_PLAIN[kind])

    count, keys = take("Q"), take("Q")
    fields = []
    for _ in range(keys):
        key, kind = text(), take("I")
        start = place
        skip(kind)
        fields.append((key, kind, data[start:place]))
    tensors = []
    for _ in range(count):
        name = text()
        shape = [take("Q") for _ in range(take("I"))]
        tensors.append(_Tensor(name, shape, take("I"), take("Q")))
    place += -place % _ALIGNMENT
    return _File(fields, tensors, data[place:])


def _written(file: _File) -> bytes:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    counts = (
        file.counts.get("tensors", len(file.tensors)),
        file.counts.get("fields", len(file.fields)),
    )
    parts = [b"GGUF", struct.pack("<IQQ", 3, *counts)]
    parts += [text(key) + struct.pack("<I", kind) + value for key, kind, value in file.fields]
    for t in file.tensors:
        sizes = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape)
        parts.append(text(t.name) + sizes + struct.pack("<IQ", t.type % 2**32, t.offset % 2**64))
    head = b"".join(parts)
    return head + bytes(-len(head) % _ALIGNMENT) + file.data


def _count(scene: Scene, file: _File) -> None:
    """Claim other numbers of fields or tensors than there are."""
    name = scene.rng.choice(("tensors", "fields"))
    true = len(getattr(file, name))
    file.counts[name] = scene.rng.choice((0, 1, true - 1, true + 1, *_HUGE))
    scene.say(f"{file.counts[name]} {name} for {true}")


def _length(scene: Scene, file: _File) -> None:
    """Claim a long list or text: more than there is, or lists inside of each other."""
    size = scene.rng.choice(_HUGE)
    values = (
        (_ARRAY, struct.pack("<IQ", 4, size)),
        (_ARRAY, struct.pack("<IQ", 0, 3_000_000) + bytes(3_000_000)),
        (_ARRAY, struct.pack("<IQ", 8, 400_000) + bytes(8 * 400_000)),
        (_ARRAY, struct.pack("<IQ", 9, 1) * 2000 + struct.pack("<IQ", 4, 0)),
        (_STRING, struct.pack("<Q", size)),
        (scene.rng.choice((13, 99, 2**31)), b""),
    )
    kind, value = scene.rng.choice(values)
    place = scene.rng.randrange(len(file.fields) + 1)
    file.fields.insert(place, (b"more", kind, value))
    scene.say(f"a field of type {kind} and {len(value)} bytes at {place}")


def _offset(scene: Scene, file: _File) -> None:
    """Let tensors overlap, lie apart, out of order, unaligned or beyond the end."""
    one, other = scene.rng.sample(file.tensors, 2)
    by = scene.rng.choice((1, 16, 32, -32, 2**20, 2**32, 2**63, -1))
    changed = scene.rng.choice(("same", "exchanged", "moved", "all moved"))
    if changed == "same":
        one.offset = other.offset
    elif changed == "exchanged":
        one.offset, other.offset = other.offset, one.offset
    else:
        for tensor in [one] if changed == "moved" else file.tensors:
            tensor.offset += by
    scene.say(f"{one.name!r}: offset {changed} by {by}")


def _shape(scene: Scene, file: _File) -> None:
    """Give a tensor another shape or type."""
    tensor = scene.rng.choice(file.tensors)
    if scene.rng.random() < 0.4:
        tensor.type = scene.rng.choice((*range(42), 2**31, 2**32 - 1))
    elif scene.rng.random() < 0.3:
        size = scene.rng.choice((0, 5, 64, 4000))
        tensor.shape = [1] * size
    elif tensor.shape:
        place = scene.rng.randrange(len(tensor.shape))
        tensor.shape[place] = scene.rng.choice((0, 1, tensor.shape[place] // 2, *_HUGE))
    scene.say(f"{tensor.name!r}: shape {tensor.shape[:8]}, type {tensor.type}")


def _name(scene: Scene, file: _File) -> None:
    """Give a tensor a name that is another's, or that harms a terminal."""
    tensor = scene.rng.choice(file.tensors)
    names = [text.encode("utf-8", "surrogatepass") for text in HOSTILE]
    names += [b"", b"\xff\xfe", b"a" * 100_000, scene.rng.choice(file.tensors).name]
    tensor.name = scene.rng.choice(names)
    scene.say(f"now called {tensor.name[:40]!r}")


def _true_shape(scene: Scene, file: _File) -> None:
    """Say that a tensor truly has another shape, as ComfyUI-GGUF's files do."""
    tensor = scene.rng.choice(file.tensors)
    sizes = scene.rng.choice(
        ([], [0], [2**31 - 1] * 4, [-1], tensor.shape, tensor.shape[::-1], [1, *tensor.shape[::-1]])
    )
    value = struct.pack(f"<IQ{len(sizes)}q", 11, len(sizes), *sizes)
    key = b"comfy.gguf.orig_shape." + tensor.name
    file.fields.append((key, _ARRAY, value))
    scene.say(f"{tensor.name!r}: true shape {sizes}")


def _headed(change: Any) -> Any:
    def damage(scene: Scene) -> None:
        path = gguf_file(scene)
        file = _parsed(path.read_bytes())
        change(scene, file)
        binary.replace(path, _written(file))

    return damage


def not_finite(scene: Scene, file: _File) -> None:
    """Put NaN or an infinity into a number or into a block's scale."""
    tensor = scene.rng.choice([t for t in file.tensors if t.type in {_F32, _F16, *_BLOCKS}])
    step = {_F32: 4, _F16: 2, **_BLOCKS}[tensor.type]
    values = {"NaN": 0x7E00, "Inf": 0x7C00, "-Inf": 0xFC00}
    name, bits = scene.rng.choice(sorted(values.items()))
    value = struct.pack("<H", bits)
    if tensor.type == _F32:
        value = struct.pack("<f", float(name))
    place = tensor.offset + step * scene.rng.randrange(4)
    scene.say(f"{tensor.name!r}: {name} at {place}")
    file.data = file.data[:place] + value + file.data[place + len(value) :]


KINDS = (
    Kind("nothing", nothing),
    Kind("bytes", lambda s: binary.any_bytes(s, s.rng.choice(files(s))), 6),
    Kind("bytes/header", on(gguf_file, lambda s, p: binary.flip(s, p, p.read_bytes(), 0, 2000)), 4),
    Kind("count", _headed(_count), 2),
    Kind("length", _headed(_length), 3),
    Kind("offset", _headed(_offset), 4),
    Kind("shape", _headed(_shape), 6),
    Kind("name", _headed(_name), 2),
    Kind("true shape", _headed(_true_shape), 2),
    Kind("not finite", _headed(not_finite), 4, refuse=True),
    *(Kind(f"place/{name}", placed(name)) for name in PLACES),
)
