"""What may stand in place of a file: other kinds of files, links, and files one may not read."""

import os
import shutil
import socket
from pathlib import Path

from .cases import Scene


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _link(target: str):
    def put(scene: Scene, path: Path) -> None:
        _clear(path)
        path.symlink_to(target)

    return put


def _directory(scene: Scene, path: Path) -> None:
    _clear(path)
    path.mkdir()


def _fifo(scene: Scene, path: Path) -> None:
    _clear(path)
    os.mkfifo(path)


def _socket(scene: Scene, path: Path) -> None:
    _clear(path)
    # A socket's path has 107 bytes at most: bound where it is short, then moved.
    with socket.socket(socket.AF_UNIX) as end:
        short = Path("/tmp") / f"fuzz{os.getpid()}"
        end.bind(str(short))
        shutil.move(short, path)


def _own_loop(scene: Scene, path: Path) -> None:
    _clear(path)
    path.symlink_to(path.name)


def _two_links(scene: Scene, path: Path) -> None:
    _clear(path)
    other = path.with_name(path.name + ".other")
    path.symlink_to(other.name)
    other.symlink_to(path.name)


def _unreadable(scene: Scene, path: Path) -> None:
    if path.is_dir():
        path.chmod(0)
        return
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    path.chmod(0)


def _missing(scene: Scene, path: Path) -> None:
    _clear(path)


def _empty(scene: Scene, path: Path) -> None:
    _clear(path)
    path.write_bytes(b"")


def _huge(scene: Scene, path: Path) -> None:
    _clear(path)
    with path.open("wb") as file:
        file.truncate(1 << scene.rng.choice((33, 40)))


def _outside(scene: Scene, path: Path) -> None:
    # The same bytes, but they lie beside the model.
    if path.is_dir():
        return
    other = scene.folder.parent / "outside"
    other.write_bytes(path.read_bytes())
    _clear(path)
    path.symlink_to(other)


#: name -> what is put there instead
PLACES = {
    "missing": _missing,
    "empty": _empty,
    "directory": _directory,
    "fifo": _fifo,
    "socket": _socket,
    "endless": _link("/dev/zero"),
    "null": _link("/dev/null"),
    "unreadable": _unreadable,
    # Opens and has a size of 0, but reading it is an error of input and output.
    "broken disk": _link("/proc/self/mem"),
    "dangling": _link("nowhere"),
    "loop": _own_loop,
    "two links": _two_links,
    "parent": _link(".."),
    "huge": _huge,
    "outside": _outside,
}
