"""Commands whose output exists, and commands whose streams are closed."""

import json

from . import binary, places
from .cases import Kind, Scene
from .picking import nothing, on
from .text import HOSTILE, TEXTS

#: What ``--force`` may find in the way.
NAME = "file"


def _put(scene: Scene, data: bytes) -> None:
    binary.replace(scene.folder / NAME, data)
    scene.found = data
    scene.say(f"in the way: {data[:30]!r} of {len(data)} bytes")


def foreign(scene: Scene) -> None:
    """Put somebody else's file in the way."""
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    others = (
        b"It was a dark and stormy night.\n", b"\n", b"\0" * 5000, b"GGUF" + b"\3" + b"\0" * 19,
        len(header).to_bytes(8, "little") + header, b'{"schema": "mine"}', b"name: by hand\n",
        b"<!doctype html><title>mine</title>", b"PK\3\4", b"%PDF-1.4\n", b"quantkit",
        scene.rng.randbytes(scene.rng.choice((1, 100, 100_000))),
        *(t.encode("utf-8", "surrogatepass") for t in HOSTILE if t),
        *(t for t in TEXTS if t),
    )  # fmt: skip
    _put(scene, scene.rng.choice(others))


def place(name: str):
    """Return what puts something that is no ordinary file in the way."""
    return lambda scene: places.PLACES[name](scene, scene.folder / NAME)


FORCE = (
    Kind("nothing", nothing),
    Kind("foreign", foreign, 8, refuse=True),
    Kind("damaged", on(lambda s: s.folder / NAME, binary.any_bytes), 4),
    *(
        Kind(f"place/{name}", place(name), refuse=name not in {"missing", "empty"})
        for name in places.PLACES
    ),
)


def closed(*streams: int):
    """Return what closes some of the streams."""

    def damage(scene: Scene) -> None:
        scene.closed = streams
        scene.say(f"closed: {streams}")

    return damage


STREAMS = tuple(
    Kind(f"closed {' '.join(map(str, streams)) or 'none'}", closed(*streams), 2)
    for streams in ((), (0,), (1,), (2,), (1, 2), (0, 1, 2))
)
