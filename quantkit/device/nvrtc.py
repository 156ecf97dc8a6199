"""NVRTC by ctypes, from the wheel that torch depends on: compiles for sm_89 without a GPU."""

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quantkit.errors import CompilerMissingError, KernelError


@dataclass(frozen=True)
class Nvrtc:
    """The loaded library."""

    path: str
    version: str
    _library: ctypes.CDLL

    def compile(self, source: str, name: str, options: list[str]) -> tuple[bytes, str]:
        """Compile a source string.

        Args:
            source: CUDA C++; includes are found through ``-I`` options.
            name: what the log calls the source.
            options: as on nvcc's command line.

        Returns:
            the cubin and the compiler's log.

        Raises:
            KernelError: it does not compile; the text holds the options and the log.
        """
        program = ctypes.c_void_p()
        text, label = source.encode(), name.encode()
        created = self._library.nvrtcCreateProgram(
            ctypes.byref(program), text, label, 0, None, None
        )
        self._check(created, "nvrtcCreateProgram")
        try:
            array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            status = self._library.nvrtcCompileProgram(program, len(options), array)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if status:
                raise KernelError(
                    f"{name}: NVRTC failed ({self._text(status)})\n{' '.join(options)}\n{log}"
                )
            return self._read(program, "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        get_size = getattr(self._library, f"nvrtcGet{what}Size")
        self._check(get_size(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
        return buffer.raw[: size.value]

    def _check(self, status: int, call: str) -> None:
        if status:
            raise KernelError(f"{call}: {self._text(status)}")

    def _text(self, status: int) -> str:
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        text = self._library.nvrtcGetErrorString(status)
        return text.decode() if isinstance(text, bytes) else f"status {status}"


@lru_cache(maxsize=1)
def load_nvrtc() -> Nvrtc:
    """Return the newest NVRTC of the installed wheels, else the system's.

    Raises:
        CompilerMissingError: there is none.
    """
    for path in [*_wheel_libraries(), "libnvrtc.so"]:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return Nvrtc(path, f"{major.value}.{minor.value}", library)
    raise CompilerMissingError(
        "sm_89: libnvrtc is neither in an nvidia wheel nor on the library path; "
        "install nvidia-cuda-nvrtc"
    )


def _wheel_libraries() -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    if spec is None or not spec.submodule_search_locations:
        return []
    found = [
        path
        for root in spec.submodule_search_locations
        for path in Path(root).glob("*/lib/libnvrtc.so.*")
        if "alt" not in path.name
    ]
    return [os.fspath(path) for path in sorted(found, reverse=True)]
