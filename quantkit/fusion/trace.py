"""Recording the operators that a step calls, as a program."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import quantkit.fusion
from quantkit.fusion.program import Call, Layout, Program, Value, given_values, replaced

#: Its argument is a tensor that Python made of numbers, not one of the model.
_LITERAL = torch.ops.aten.lift_fresh.default
#: Give memory that holds no numbers yet.
_EMPTY = frozenset({
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default, torch.ops.aten.empty_permuted.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
})  # fmt: skip
#: Where no model's code is.
_LIBRARIES = (torch.__path__[0], *quantkit.fusion.__path__)
#: Called for ``device`` of tensors without numbers; of others it is no operator.
_DEVICE = torch.ops.prim.device.default
#: Reads a number off a tensor.
_READS_A_NUMBER = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001  an operator's name


class UntraceableError(RuntimeError):
    """A step that is more than its operators."""


def trace(step: Callable[[], Any], inputs: Sequence[Tensor]) -> tuple[Program, Any]:
    """Run a step and record it.

    Args:
        step: a call on ``inputs``, without gradients.
        inputs: its tensors, which are others at the next run.

    Returns:
        the program, and what the step returned.

    Raises:
        UntraceableError: the step draws random numbers, writes to what outlives it, or reads a
            number that depends on its inputs.
    """
    recorder = Recorder(inputs)
    # In inference mode torch hands over operators that are made of others, as linear and dropout.
    with torch.inference_mode(mode=False), torch.no_grad(), recorder:
        answer = step()
    program = recorder.program(answer)
    if recorder.reason:
        raise UntraceableError(recorder.reason)
    return program, answer


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Records the operators that are called while it is entered."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        """Take tensors that are others at the next run."""
        super().__init__()  # type: ignore[no-untyped-call]
        #: why a run of the program is no run of the step; empty where it is one
        self.reason = ""
        self._paused = False
        self._calls: list[Call] = []
        self._count = 0
        #: Weak, so that memory is given back as the step gives it back.
        self._known: Any = WeakIdKeyDictionary()
        self._storages: dict[int, tuple[Any, int]] = {}
        self._numbers = count()
        self._storage_of: dict[Value, int] = {}
        self._layouts: dict[Value, Layout] = {}
        self._constants: dict[Value, Tensor] = {}
        self._literals: set[Value] = set()
        self._written: set[int] = set()
        self._unwritten: set[int] = set()
        self._inputs = tuple(self._new(tensor) for tensor in inputs)
        #: values that depend on the inputs
        self._varying: set[Value] = set(self._inputs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Call an operator and record it."""
        del types
        keywords = kwargs or {}
        if self._paused:
            return func(*args, **keywords)
        values = replaced(args, self._value, Tensor)
        named = {name: replaced(given, self._value, Tensor) for name, given in keywords.items()}
        result = func(*args, **keywords)
        self._record(func, values, named, result)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the block: what it makes is there before the step."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def program(self, answer: Any) -> Program:
        """Return what was recorded, of a step that gave this answer."""
        output = pytree.tree_map_only(Tensor, self._value, answer)
        lasting = {self._storage_of[value] for value in (*self._constants, *self._inputs)}
        own = {self._storage_of[value] for value in self._literals}
        if self._written & (lasting - own):
            self.reason = self.reason or "it writes to a tensor that outlives the step"
        written = frozenset(v for v, at in self._storage_of.items() if at in self._written)
        return Program(
            tuple(self._calls),
            self._inputs,
            self._constants,
            output,
            written,
            frozenset(self._literals & self._constants.keys()),
            self._layouts,
        )

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or f"{reason}{_place()}"

    def _record(self, func: Any, arguments: Any, keywords: Any, result: Any) -> None:
        if func is _DEVICE:
            return
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, arguments, keywords):
            self._refuse(f"{func} draws random numbers")
        reads = [*given_values((*arguments, *keywords.values()))]
        varies = any(value in self._varying for value in reads)
        if func is _READS_A_NUMBER:
            if varies:
                self._refuse("it reads a number off a tensor that depends on its inputs")
            return
        if func is _LITERAL:
            self._literals.update(reads)
        written = _written_by(func, arguments, keywords)
        self._note_memory(func, [value for value in reads if value not in written], written)
        leaves = [result] if isinstance(result, Tensor) else pytree.tree_leaves(result)
        results = tuple(self._result(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves)
        fresh = not {self._storage_of[r] for r in results if r} & {
            self._storage_of[value] for value in reads
        }
        if func in _EMPTY:
            self._unwritten |= {self._storage_of[r] for r in results if r}
        self._varying |= {r for r in results if r is not None and varies}
        writes = func._schema.is_mutable  # noqa: SLF001  the only place that says so
        self._calls.append(Call(func, tuple(arguments), keywords, results, writes, fresh))

    def _note_memory(self, func: Any, read: Sequence[Value], written: Sequence[Value]) -> None:
        """Refuse to read what no operator wrote: a library did, past torch's dispatcher."""
        places = {self._storage_of[value] for value in written}
        self._written |= places
        self._unwritten -= places
        if func in _EMPTY or func._schema.is_mutable:  # noqa: SLF001
            return
        views = not any(argument.alias_info for argument in func._schema.arguments)  # noqa: SLF001
        if views and any(self._storage_of[value] in self._unwritten for value in read):
            self._refuse(f"{func} reads what no operator of torch wrote")

    def _result(self, tensor: Tensor) -> Value:
        known = self._known.get(tensor)
        return self._new(tensor) if known is None else known

    def _value(self, tensor: Tensor) -> Value:
        """Return the value that a tensor is; one that no call gave is the model's."""
        known: Value | None = self._known.get(tensor)
        if known is None:
            known = self._new(tensor)
            self._constants[known] = tensor
        return known

    def _new(self, tensor: Tensor) -> Value:
        value = Value(self._count)
        self._count += 1
        self._known[tensor] = value
        storage = self._storage_of[value] = self._storage(tensor)
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        self._layouts[value] = Layout(
            shape, strides, tensor.dtype, tensor.device, int(tensor.storage_offset()), storage
        )
        return value

    def _storage(self, tensor: Tensor) -> int:
        """Return a number for memory, which addresses are not: they are given out again."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001  as StorageWeakRef
        reference, number = self._storages.get(key, (None, 0))
        if reference is None or reference.expired():
            number = next(self._numbers)
            weak: Any = StorageWeakRef
            self._storages[key] = weak(storage), number
        return number


def _place() -> str:
    """Return the innermost line that is no library's, as " (file.py:12)"."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_LIBRARIES):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


def _given(func: Any, arguments: Sequence[Any], keywords: Any) -> Iterator[tuple[Any, Any]]:
    """Yield an operator's parameters with what was given; None where nothing was."""
    for place, parameter in enumerate(func._schema.arguments):  # noqa: SLF001
        by_place = place < len(arguments) and not parameter.kwarg_only
        yield parameter, arguments[place] if by_place else keywords.get(parameter.name)


def _written_by(func: Any, arguments: Sequence[Any], keywords: Any) -> list[Value]:
    """Return the values that an operator writes to."""
    found = [
        pytree.tree_leaves(given)
        for parameter, given in _given(func, arguments, keywords)
        if parameter.alias_info is not None and parameter.alias_info.is_write
    ]
    return [leaf for leaves in found for leaf in leaves if isinstance(leaf, Value)]


def _draws(func: Any, arguments: Sequence[Any], keywords: Any) -> bool:
    """Tell whether an operator that may draw random numbers does: attention may drop nothing."""
    for parameter, given in _given(func, arguments, keywords):
        if parameter.name == "dropout_p":
            return bool(given)
    return True
