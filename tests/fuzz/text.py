"""Damage to JSON: values of the wrong kind, and text that parsers choke on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .binary import any_bytes, replace
from .cases import Scene

#: Stands in a string for text that ``json.dumps`` would not write.
_RAW = "@raw{}@"

#: Control characters, a bell, colours, a cleared screen, a title, line ends that are none of
#: ASCII's, right-to-left marks, a byte order mark.
HOSTILE = (
    "a\nb", "a\r\nquantkit: ok", "\x1b[31mred\x1b[0m", "\x1b[2J\x1b[H", "\x1b]0;title\x07", "a\0b",
    "\x7f\x08\x08", "\x9b31m", "a\u2028b", "a\u0085b", "\u202etxt.exe", "\ufeff", "a\tb",
    "é" * 300, "x" * 5000, "\udcff", "[bold red]markup[/]", "%s%n{0}", "../../etc/passwd", "",
)  # fmt: skip

#: Text of JSON values that Python's parser takes, and more: some of it takes long, or all memory.
RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "-" + "9" * 5000,
    "9" * 20, "1" + "0" * 400, '"\\ud800"', '"\\udcff\\ud800"', "[" * 100_000 + "]" * 100_000,
    '{"a":' * 50_000 + "1" + "}" * 50_000, '"\\u0000"', "0.1e-400", "-0", "-0.0",
)  # fmt: skip

#: Values of the wrong kind.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, 1.0, -1.5, 2**31, 2**63, 2**64, 10**30, "", "1", "auto",
    [], {}, [[]], [None], {"": None}, [1, 2, 3], {"a": {"b": []}}, [0.5, 1.0], 1e308, *HOSTILE,
)  # fmt: skip

#: Those that a file may be called.
FILE_NAMES = tuple(t[:80] for t in HOSTILE if t and "/" not in t and "\0" not in t)


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a JSON value: its container and its key or index."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield value, key
        if isinstance(item, dict | list):
            yield from nodes(item)


def wrong_value(scene: Scene, value: Any) -> dict[str, str]:
    """Put something else at a place of a JSON value; return what stands for raw text."""
    places = list(nodes(value))
    if not places:
        return {}
    container, key = scene.rng.choice(places)
    raw = {}
    if scene.rng.random() < 0.4:
        mark = _RAW.format(0)
        raw[json.dumps(mark)] = scene.rng.choice(RAW)
        container[key] = mark
        scene.say(f"{key!r} is now {raw[json.dumps(mark)][:40]}")
    else:
        container[key] = scene.rng.choice(VALUES)
        scene.say(f"{key!r} is now {container[key]!r:.60}")
    return raw


def lost_key(scene: Scene, value: Any) -> dict[str, str]:
    """Drop a place."""
    places = list(nodes(value))
    if places:
        container, key = scene.rng.choice(places)
        scene.say(f"{key!r} is gone")
        del container[key]
    return {}


def renamed_key(scene: Scene, value: Any) -> dict[str, str]:
    """Give a key another name."""
    places = [(c, k) for c, k in nodes(value) if isinstance(c, dict)]
    if places:
        container, key = scene.rng.choice(places)
        name = scene.rng.choice((*HOSTILE, key.upper(), key + " ", "__metadata__", "quantkit"))
        scene.say(f"{key!r} is now called {name!r:.60}")
        container[name] = container.pop(key)
    return {}


def extra_key(scene: Scene, value: Any) -> dict[str, str]:
    """Add a key nobody asked for."""
    places = [c for c, _ in nodes(value) if isinstance(c, dict)]
    if places:
        name = scene.rng.choice((*HOSTILE, "extra", "__metadata__", "__class__"))
        scene.rng.choice(places)[name] = scene.rng.choice(VALUES)
        scene.say(f"{name!r:.60} added")
    return {}


def exchanged(scene: Scene, value: Any) -> dict[str, str]:
    """Let two places change their values."""
    places = list(nodes(value))
    if len(places) > 1:
        (a, i), (b, j) = scene.rng.sample(places, 2)
        # One may hold the other, which no text can say.
        before = json.dumps(value)
        a[i], b[j] = b[j], a[i]
        try:
            json.dumps(value)
        except ValueError:
            _restore(value, json.loads(before))
        scene.say(f"{i!r} and {j!r} exchanged")
    return {}


def _restore(value: Any, before: Any) -> None:
    if isinstance(value, dict):
        value.clear()
        value.update(before)
    else:
        value[:] = before


def repeated_key(scene: Scene, value: Any) -> dict[str, str]:
    """Let a key stand twice with two values: parsers differ in which they take."""
    places = [(c, k) for c, k in nodes(value) if isinstance(c, dict)]
    if not places:
        return {}
    container, key = scene.rng.choice(places)
    kept = json.dumps(container[key])
    other = json.dumps(scene.rng.choice(VALUES))
    pair = scene.rng.sample((kept, other), 2)
    mark = _RAW.format(0)
    container[key] = mark
    scene.say(f"{key!r} stands twice: {pair[0]:.40}, {pair[1]:.40}")
    return {json.dumps(mark): f"{pair[0]}, {json.dumps(key)}: {pair[1]}"}


MEANINGS = (
    wrong_value, wrong_value, wrong_value, lost_key, renamed_key, extra_key, exchanged, repeated_key
)  # fmt: skip

#: The whole text, in place of the file's.
TEXTS = (
    b"", b"null", b"[]", b"{}", b"0", b'"text"', b"NaN", b"{" * 200_000, b"[" * 200_000,
    b"[" * 100_000 + b"]" * 100_000, b"9" * 5000, b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b"{}{}",
    b'{"a": ', b"'", b"\0" * 64, b'{"a": "\\ud800"}', b"[" * 30_000_000, b'"' + b"a" * 30_000_000,
    b"[" + b"{}," * 8_000_000 + b"{}]",
)  # fmt: skip


def dumped(value: Any, raw: dict[str, str]) -> bytes:
    """Return JSON text with raw text in its places."""
    text = json.dumps(value, indent=2)
    for mark, instead in raw.items():
        text = text.replace(mark, instead)
    return text.encode("utf-8", "surrogatepass")


def any_json(scene: Scene, path: Path) -> None:
    """Damage a JSON file: mostly its meaning, now and then its text or its bytes."""
    scene.say(f"in {path.name}")
    chance = scene.rng.random()
    if chance < 0.1:
        any_bytes(scene, path)
    elif chance < 0.2:
        text = scene.rng.choice(TEXTS)
        scene.say(f"its text is now {text[:20]!r} of {len(text)} bytes")
        replace(path, text)
    else:
        value = json.loads(path.read_text(encoding="utf-8"))
        raw = scene.rng.choice(MEANINGS)(scene, value)
        replace(path, dumped(value, raw))
