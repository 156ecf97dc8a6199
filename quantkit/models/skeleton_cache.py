"""A cache of skeletons: building one imports diffusers, which takes seconds.

A skeleton follows from its config, the libraries and the code that builds it: these are the key. It
lies among the compiled kernels, under the same rules: private, sealed, the oldest deleted first.
"""

import hashlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from quantkit.device import cache
from quantkit.errors import KernelError

#: Whose versions and places decide what is built.
_LIBRARIES = ("diffusers", "transformers", "accelerate", "torch")


def recall(asked: str) -> str | None:
    """Return the answer to what was asked once; None when it never was, or the cache is closed."""
    try:
        found = cache.read_whole(_place(asked))
    except (KernelError, OSError):
        return None
    return None if found is None else found.decode()


def remember(asked: str, answer: str) -> None:
    """Keep an answer, if the cache can be written."""
    try:
        with cache.building(_place(asked)) as stage:
            if stage:
                stage.write_text(answer, encoding="utf-8")
    except (KernelError, OSError):
        return


def _place(asked: str) -> Path:
    folder = cache.build_folder("skeletons", *map(_identity, _LIBRARIES), _code())
    return folder / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"


def _identity(library: str) -> str:
    spec = find_spec(library)
    try:
        return f"{library} {version(library)} {spec and spec.origin}"
    except PackageNotFoundError:
        return f"{library} {spec and spec.origin}"


@lru_cache(maxsize=1)
def _code() -> str:
    """Return the SHA-256 of the modules that build skeletons."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
