"""What a worker may take, and what it took."""

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Address space that a case may add, in bytes: what asks for more gets MemoryError.
SPACE = 4 << 30
#: Memory that a case may touch, in bytes; subjects have less than 10 MB.
MEMORY = 1 << 30
#: Bytes of a file that a command may write: what copies /dev/zero is not to fill the disk.
FILE = 1 << 28

#: linux/capability.h: the header's version, and what lets root read what its mode forbids.
_VERSION = 0x20080522
_OVERRIDES = 1 << 1 | 1 << 2


def confine() -> None:
    """Limit the address space of this process, and give up root's right to read anything."""
    used = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPACE, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets) == 0:
        sets[0] &= ~_OVERRIDES
        libc.capset(header, sets)


@contextmanager
def small_files() -> Iterator[None]:
    """Let files grow no further than ``FILE``; damage may make larger ones, of holes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def reset_peak() -> int:
    """Forget the peak of touched memory; return what is touched now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def peak() -> int:
    """Return the most that was touched since ``reset_peak``, in bytes."""
    return _status("VmHWM")


def processor_time(process: int) -> float:
    """Return the seconds that a process has run, on all its threads."""
    # The second field, in parentheses, may hold blanks.
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)
