"""A run-time compiler by ctypes: NVRTC and hipRTC differ in the prefix of their functions."""

import ctypes
from dataclasses import dataclass

from quantkit.errors import KernelError


@dataclass(frozen=True)
class RuntimeCompiler:
    """A loaded library that compiles C++ from memory."""

    #: NVRTC or hipRTC
    name: str
    path: str
    version: str
    #: of every function: nvrtc or hiprtc
    prefix: str
    #: what ``GetXSize`` and ``GetX`` call the compiled object: CUBIN or Code
    binary: str
    library: ctypes.CDLL

    def compile(self, source: str, name: str, options: list[str]) -> tuple[bytes, str]:
        """Compile a source string.

        Args:
            source: CUDA C++ or HIP; includes are found through ``-I`` options.
            name: what the log calls the source.
            options: as on the compiler's command line.

        Returns:
            the object and the compiler's log.

        Raises:
            KernelError: it does not compile; the text holds the options and the log.
        """
        program = ctypes.c_void_p()
        text, label = source.encode(), name.encode()
        self._call("CreateProgram", ctypes.byref(program), text, label, 0, None, None)
        try:
            array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            status = self._function("CompileProgram")(program, len(options), array)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if status:
                raise KernelError(
                    f"{name}: {self.name} failed ({self._text(status)})\n{' '.join(options)}\n{log}"
                )
            return self._read(program, self.binary), log
        finally:
            self._function("DestroyProgram")(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw[: size.value]

    def _call(self, function: str, *args: object) -> None:
        status = self._function(function)(*args)
        if status:
            raise KernelError(f"{self.prefix}{function}: {self._text(status)}")

    def _function(self, name: str) -> "ctypes._NamedFuncPointer":
        function: ctypes._NamedFuncPointer = getattr(self.library, f"{self.prefix}{name}")
        return function

    def _text(self, status: int) -> str:
        function = self._function("GetErrorString")
        function.restype = ctypes.c_char_p
        text = function(status)
        return text.decode() if isinstance(text, bytes) else f"status {status}"


def open_compiler(name: str, prefix: str, binary: str, path: str) -> RuntimeCompiler:
    """Load the library at ``path``.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it is another library.
    """
    library = ctypes.CDLL(path)
    major, minor = ctypes.c_int(), ctypes.c_int()
    getattr(library, f"{prefix}Version")(ctypes.byref(major), ctypes.byref(minor))
    version = f"{major.value}.{minor.value}"
    return RuntimeCompiler(name, path, version, prefix, binary, library)
