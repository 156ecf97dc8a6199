"""Damage to bytes, whatever they mean."""

from pathlib import Path

from .cases import Scene


def replace(path: Path, data: bytes) -> None:
    """Write a file anew: the old one is a hard link to the subject's."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def flip(scene: Scene, path: Path, data: bytes, low: int, high: int) -> None:
    """Flip one to four bits between two offsets."""
    changed = bytearray(data)
    for _ in range(scene.rng.choice((1, 1, 1, 2, 4))):
        place = scene.rng.randrange(8 * low, max(8 * high, 8 * low + 1))
        if place // 8 < len(changed):
            changed[place // 8] ^= 1 << place % 8
            scene.say(f"{path.name}: flipped bit {place % 8} of byte {place // 8}")
    replace(path, bytes(changed))


def flipped(scene: Scene, path: Path) -> None:
    """Flip bits anywhere."""
    data = path.read_bytes()
    flip(scene, path, data, 0, len(data))


def truncated(scene: Scene, path: Path) -> None:
    """Cut the end off: much, or a few bytes."""
    data = path.read_bytes()
    keep = scene.rng.choice((scene.rng.randrange(len(data) or 1), len(data) - 1, 0, 7, 8, 9))
    scene.say(f"{path.name}: cut from {len(data)} to {keep} bytes")
    replace(path, data[: max(keep, 0)])


def appended(scene: Scene, path: Path) -> None:
    """Put bytes behind the end."""
    more = scene.rng.randbytes(scene.rng.choice((1, 8, 4096)))
    scene.say(f"{path.name}: {len(more)} bytes appended")
    replace(path, path.read_bytes() + more)


def inserted(scene: Scene, path: Path) -> None:
    """Put bytes in between."""
    data = path.read_bytes()
    place = scene.rng.randrange(len(data) + 1)
    more = scene.rng.choice((b"\0", b"[" * 9, b'"', b"\r\n", b"\x1b[2J", b"\xff\xfe", b"}" * 3))
    scene.say(f"{path.name}: {more!r} put in at {place}")
    replace(path, data[:place] + more + data[place:])


def erased(scene: Scene, path: Path) -> None:
    """Set a stretch to zero or to ones, as a lost page does."""
    data = bytearray(path.read_bytes())
    start = scene.rng.randrange(len(data) or 1)
    stop = min(len(data), start + scene.rng.choice((1, 16, 512, 4096)))
    data[start:stop] = scene.rng.choice((b"\0", b"\xff")) * (stop - start)
    scene.say(f"{path.name}: bytes {start} to {stop} erased")
    replace(path, bytes(data))


def moved(scene: Scene, path: Path) -> None:
    """Exchange two stretches."""
    data = path.read_bytes()
    size = scene.rng.choice((1, 4, 64, 512))
    a, b = sorted(scene.rng.randrange(max(len(data) - size, 1)) for _ in range(2))
    b = max(b, a + size)
    scene.say(f"{path.name}: {size} bytes at {a} and {b} exchanged")
    between = data[a + size : b]
    replace(path, data[:a] + data[b : b + size] + between + data[a : a + size] + data[b + size :])


def emptied(scene: Scene, path: Path) -> None:
    """Leave nothing."""
    scene.say(f"{path.name}: emptied")
    replace(path, b"")


#: What may happen to any file.
ANY_BYTES = (flipped, flipped, truncated, appended, inserted, erased, moved, emptied)


def any_bytes(scene: Scene, path: Path) -> None:
    """Damage a file in one of these ways."""
    scene.rng.choice(ANY_BYTES)(scene, path)
