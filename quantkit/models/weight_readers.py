"""Layers that are never called: their parent module passes their weights to torch functions.

An example is attention that calls ``F.multi_head_attention_forward``. The source of a module and
of its processor shows it: ``self.q_proj.weight`` is read, and ``self.q_proj`` is not used in any
other way. Reading a weight's dtype alone does not count.
"""

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

#: What is asked of a weight without reading it.
_ABOUT = frozenset({"device", "dtype", "ndim", "shape", "size"})
_TENSORS = frozenset({"weight", "bias"})
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


def readers(model: Any) -> dict[str, str]:
    """Return the layers whose weights are read in place of calls, and the class that reads each.

    Args:
        model: a module, on any device.
    """
    owners: list[tuple[str, Any]] = [
        (f"{path}." if path else "", type(owner))
        for path, module in model.named_modules()
        for owner in (module, getattr(module, "processor", None))
    ]
    read = {f"{path}{name}": cls.__name__ for path, cls in owners for name in _read(cls)}
    # Most models have none, and need not be looked through.
    used = {f"{path}{name}" for path, cls in owners for name in _used(cls)} if read else set()
    return {path: name for path, name in read.items() if path not in used}


@cache
def _read(cls: type) -> frozenset[str]:
    """Return the modules whose weights a class reads, as paths from its module."""
    codes = (code for code in _reached(cls) if "weight" in code.co_names)
    parts = (_parts(chain) for code in codes for chain in _chains(code))
    return frozenset(
        path for path, rest in parts if path and rest[:1] == ["weight"] and _ABOUT.isdisjoint(rest)
    )


@cache
def _used(cls: type) -> frozenset[str]:
    """Return the modules that a class uses other than by reading a weight or bias."""
    parts = (_parts(chain) for code in _reached(cls) for chain in _chains(code))
    return frozenset(path for path, rest in parts if not rest)


def _parts(chain: list[str]) -> tuple[str, list[str]]:
    """Return the path of a module, and what is read of it from its weight or bias on."""
    end = next((i for i, name in enumerate(chain) if name in _TENSORS), len(chain))
    return ".".join(chain[:end]), chain[end:]


@cache
def _reached(cls: type) -> tuple[CodeType, ...]:
    """Return the code of a class's call, and of the methods that it names."""
    entry = "forward" if hasattr(cls, "forward") else "__call__"
    waiting, seen, reached = [entry], {entry}, []
    while waiting:
        found = inspect.unwrap(inspect.getattr_static(cls, waiting.pop(), None))
        code = getattr(found, "__code__", None)
        for inner in _with_inner(code) if isinstance(code, CodeType) else ():
            reached.append(inner)
            new = [name for name in inner.co_names if name not in seen and hasattr(cls, name)]
            seen.update(new)
            waiting += new
    return tuple(reached)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _chains(code: CodeType) -> Iterator[list[str]]:
    """Yield names of attributes, and numbers of items, that are read one of another."""
    chain: list[str] | None = None
    index = None
    for step in dis.get_instructions(code):
        if chain is not None and step.opname in _ATTRIBUTES:
            chain.append(step.argval)
        elif chain is not None and step.opname == "LOAD_CONST" and isinstance(step.argval, int):
            index = step.argval
            continue
        elif chain is not None and index is not None and step.opname == "BINARY_SUBSCR":
            chain.append(str(index))
        elif step.opname not in {"EXTENDED_ARG", "CACHE", "PRECALL", "NOP"}:
            if chain:
                yield chain
            chain = [] if step.opname.startswith(_LOADS) else None
        index = None
    if chain:
        yield chain
