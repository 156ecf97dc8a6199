"""Damage to the headers of safetensors files."""

import json
from math import prod
from pathlib import Path
from typing import Any

from .binary import replace
from .cases import Scene
from .text import HOSTILE, RAW, TEXTS, VALUES, dumped

#: Dtypes of the format, and some that are none.
DTYPES = (
    "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL",
    "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F4", "F6_E2M3", "C64", "f32", "", "F32 ",
)  # fmt: skip

#: What a shape or an offset may be instead of a number.
NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 0.5, 16.0, 1e300, 2**31, 2**53, 2**63, 2**64, 10**40, True, None, "16", [], [16], {},
)  # fmt: skip


def load_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the table of a file and its data."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def store_header(path: Path, table: Any, data: bytes, raw: dict[str, str] | None = None) -> None:
    """Write a file with this table, sound or not."""
    text = dumped(table, raw or {})
    text += b" " * (-len(text) % 8)
    replace(path, len(text).to_bytes(8, "little") + text + data)


def tensors(table: dict[str, Any]) -> list[str]:
    """Return the names of tensors."""
    return [name for name in table if name != "__metadata__"]


def _entry(scene: Scene, table: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name = scene.rng.choice(tensors(table))
    scene.say(f"tensor {name}")
    return name, table[name]


def swapped_tensors(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Let two tensors of one size change their data."""
    groups: dict[str, list[str]] = {}
    for name in tensors(table):
        entry = table[name]
        groups.setdefault(f"{entry['dtype']} {entry['shape']}", []).append(name)
    a, b = scene.rng.sample(scene.rng.choice([g for g in groups.values() if len(g) > 1]), 2)
    scene.say(f"{a} and {b} exchanged")
    table[a], table[b] = table[b], table[a]
    return {}


def other_shape(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Give a tensor another shape, mostly of as many elements."""
    _, entry = _entry(scene, table)
    shape, size = entry["shape"], prod(entry["shape"])
    entry["shape"] = scene.rng.choice(
        (shape[::-1], [size], [*shape, 1], [1, *shape], [size // 2, 2], [], [0], shape[:-1], [[]])
    )
    return {}


def wrong_number(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Put something that is no number, or too large a one, into a shape or an offset."""
    _, entry = _entry(scene, table)
    row = entry[scene.rng.choice(("shape", "data_offsets"))]
    if not row:
        row.append(0)
    place = scene.rng.randrange(len(row))
    if scene.rng.random() < 0.3:
        mark = "@raw@"
        row[place] = mark
        return {json.dumps(mark): scene.rng.choice(RAW)}
    row[place] = scene.rng.choice(NUMBERS)
    scene.say(f"{place} of {entry}")
    return {}


def fractional(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Write whole numbers as fractions: 16.0 for 16."""
    for name in tensors(table):
        for key in scene.rng.choice((("shape",), ("data_offsets",), ("shape", "data_offsets"))):
            table[name][key] = [float(number) for number in table[name][key]]
    return {}


def other_dtype(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Give a tensor another dtype, the shape changed to fit where it can be."""
    _, entry = _entry(scene, table)
    entry["dtype"] = scene.rng.choice((*DTYPES, *VALUES))
    if scene.rng.random() < 0.5 and entry["shape"]:
        entry["shape"][-1] *= 2
    return {}


def moved_offsets(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Shift, turn round or overlap the places of tensors."""
    names = tensors(table)
    by = scene.rng.choice((-8, -1, 1, 2, 8, 10**6, -(10**6)))
    for name in scene.rng.choice((names, names[-1:], scene.rng.sample(names, min(2, len(names))))):
        start, stop = table[name]["data_offsets"]
        table[name]["data_offsets"] = scene.rng.choice(
            ([start + by, stop + by], [stop, start], [start, stop + by], [0, stop - start])
        )
    return {}


def wrong_entry(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Put something in place of an entry or of a field of it; or drop or add a field."""
    name, entry = _entry(scene, table)
    field = scene.rng.choice(("dtype", "shape", "data_offsets"))
    match scene.rng.randrange(4):
        case 0:
            table[name] = scene.rng.choice(VALUES)
        case 1:
            entry[field] = scene.rng.choice(VALUES)
        case 2:
            del entry[field]
        case 3:
            entry[scene.rng.choice(HOSTILE)] = scene.rng.choice(VALUES)
    return {}


def wrong_metadata(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Put something in place of the metadata, or of an entry of it."""
    if scene.rng.random() < 0.5:
        table["__metadata__"] = scene.rng.choice(VALUES)
    else:
        key = scene.rng.choice((*table.get("__metadata__", {}), "more"))
        table.setdefault("__metadata__", {})[key] = scene.rng.choice(VALUES)
    return {}


def hostile_name(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Rename a tensor so that it harms a terminal; its layer or its part."""
    name, entry = _entry(scene, table)
    layer, _, part = name.rpartition(".")
    text = scene.rng.choice(HOSTILE)
    del table[name]
    table[
        scene.rng.choice((text, f"{text}.{part}", f"{layer}.{text}", f"{layer}{text}.{part}"))
    ] = entry
    return {}


def reserved_name(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Give a tensor a name that the format or Python keeps for itself."""
    name, entry = _entry(scene, table)
    del table[name]
    reserved = (
        "__metadata__",
        "",
        ".",
        "..",
        "weight",
        ".weight",
        "a.",
        "__class__",
        "self",
        "..a",
    )
    table[scene.rng.choice(reserved)] = entry
    return {}


def stray_tensor(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Add an empty tensor that no module has."""
    stop = max(table[name]["data_offsets"][1] for name in tensors(table))
    name = scene.rng.choice(("stray.weight", "conv_in.weight_scale", "zz", "unet.conv_in.weight"))
    shape = scene.rng.choice(([0, 4], [0], [4, 0, 1, 1]))
    table[name] = {"dtype": "F16", "shape": shape, "data_offsets": [stop, stop]}
    return {}


def lost_tensor(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Drop an entry; its data stays."""
    name, _ = _entry(scene, table)
    del table[name]
    return {}


def repeated_name(scene: Scene, table: dict[str, Any]) -> dict[str, str]:
    """Let a tensor stand twice, at two places."""
    name, entry = _entry(scene, table)
    other = table[scene.rng.choice(tensors(table))]
    pair = [json.dumps(entry), json.dumps(other)]
    scene.rng.shuffle(pair)
    mark = "@raw@"
    table[name] = mark
    return {json.dumps(mark): f"{pair[0]}, {json.dumps(name)}: {pair[1]}"}


#: name -> what happens to the table
MEANINGS = {
    "swapped tensors": swapped_tensors,
    "other shape": other_shape,
    "wrong number": wrong_number,
    "fractional": fractional,
    "other dtype": other_dtype,
    "moved offsets": moved_offsets,
    "wrong entry": wrong_entry,
    "wrong metadata": wrong_metadata,
    "hostile name": hostile_name,
    "reserved name": reserved_name,
    "stray tensor": stray_tensor,
    "lost tensor": lost_tensor,
    "repeated name": repeated_name,
}


def spaced(scene: Scene, path: Path) -> None:
    """Write the same table in a form that libraries differ about."""
    table, data = load_header(path)
    text = json.dumps(table).encode()
    forms = (
        b" " + text, b"\n" + text, text + b"\n", text + b"\0", text + b"\t", b"\xef\xbb\xbf" + text,
        text.decode().encode("utf-16"), text + b"{}", text.replace(b'"', b"'"), text[:-1] + b",}",
        json.dumps(table, indent=1).encode(), text + b" " * 3, b"{}" + text,
        text.replace(b'"F', b'"\\u0046'), b"//x\n" + text,
    )  # fmt: skip
    form = scene.rng.choice(forms)
    scene.say(f"{path.name}: header begins {form[:8]!r}, ends {form[-8:]!r}")
    replace(path, len(form).to_bytes(8, "little") + form + data)


def other_text(scene: Scene, path: Path) -> None:
    """Put other text where the header stands, its length told rightly."""
    _, data = load_header(path)
    text = scene.rng.choice((*TEXTS, *(raw.encode() for raw in RAW)))
    scene.say(f"{path.name}: header is {text[:20]!r} of {len(text)} bytes")
    replace(path, len(text).to_bytes(8, "little") + text + data)


def other_length(scene: Scene, path: Path) -> None:
    """Tell a wrong length of the header."""
    data = path.read_bytes()
    true = int.from_bytes(data[:8], "little")
    told = scene.rng.choice(
        (0, 1, 2, true - 1, true + 1, true - 8, len(data), len(data) - 8, 10**8, 2**63, 2**64 - 1)
    )
    scene.say(f"{path.name}: header of {true} bytes said to have {told}")
    replace(path, told.to_bytes(8, "little") + data[8:])


def many(scene: Scene, path: Path) -> None:
    """Write a header of a million entries: keys of metadata, axes, empty tensors."""
    table, data = load_header(path)
    stop = len(data)
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [stop, stop]}
    match scene.rng.randrange(4):
        case 0:
            table.setdefault("__metadata__", {}).update((f"k{i}", "") for i in range(400_000))
        case 1:
            table["zz"] = {**entry, "shape": [2**62] * 400_000}
        case 2:
            table["zz"] = {**entry, "shape": [0] + [1] * 400_000}
        case 3:
            table.update((f"zz{i}", entry) for i in range(20_000))
    scene.say(f"{path.name}: header of many entries")
    text = json.dumps(table).encode()
    replace(path, len(text).to_bytes(8, "little") + text + data)


#: name -> what happens to the file
FORMS = {"spaced": spaced, "other text": other_text, "other length": other_length, "many": many}


def change_table(scene: Scene, path: Path, name: str) -> None:
    """Damage the table of a file by a row of ``MEANINGS``."""
    table, data = load_header(path)
    scene.say(f"{path.parent.name}/{path.name}: {name}")
    raw = MEANINGS[name](scene, table)
    store_header(path, table, data, raw)
