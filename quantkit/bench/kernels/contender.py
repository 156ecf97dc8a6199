"""Contenders of an operation, and how their results are judged."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan, sqrt
from typing import Any

import torch
from torch import Tensor

#: Fast sums lose bits of all of K: on an H200 the largest error is 4.4e-4 sqrt(K) of the rms for
#: K of 640 to 15360, quantkit's and torch's; twice that.
_FAST = 9e-4


class UnavailableError(Exception):
    """A contender that cannot run here; the text is the reason, in one line."""


@dataclass(frozen=True)
class PreparedCall:
    """A function and what it is called with."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    #: tensors that the function holds itself
    held: tuple[Tensor, ...] = ()

    def __call__(self) -> Any:
        """Run it; timing drops the result."""
        return self.function(*self.operands)

    @property
    def nbytes(self) -> int:
        """Bytes of what it reads, each tensor once."""
        return sum(tensor.nbytes for tensor in tensors(self.operands + self.held))


@dataclass(frozen=True)
class Contender:
    """One way to compute an operation."""

    name: str
    #: True for quantkit's own
    own: bool
    #: makes a call of a problem's operands; may raise UnavailableError, or what torch raises
    prepare: Callable[[Any], PreparedCall]
    #: of what it multiplies, as f16 or fp8 2:4; empty: the operation's
    precision: str = ""
    #: largest error of numbers over their rms. float16 rounds by 2^-12 of a value at most 2^-11,
    #: and values reach 6 rms: 0.003. The rest is for sums in a matrix unit that keeps fewer bits
    #: than float32 (docs/notes/kernels.md). A scale that is 2 % off is 0.06 and more.
    limit: float = 0.02
    #: largest share of codes that differ; None: the problem's
    moved: float | None = None
    #: sums stay in a matrix unit that keeps fewer bits than float32
    fast: bool = False
    #: more that counts as right, over the square root of what a sum has: rounding averages out
    averaged: float = 0.0
    #: brings a result to the operation's, where the contender leaves something undone
    finish: Callable[[Any, Any], object] | None = None
    #: the problem's property that results are compared with
    expected: str = "expected"

    def allowed(self, k: int) -> float:
        """Return the largest error of numbers that counts as right in sums of ``k`` terms."""
        root = sqrt(k)
        return self.limit + (_FAST * root if self.fast else 0.0) + self.averaged / root


@dataclass(frozen=True)
class Judgement:
    """An error, and how large it may be."""

    error: float
    limit: float

    @property
    def right(self) -> bool:
        """Not the other way round: NaN is wrong."""
        return self.error <= self.limit

    @property
    def excess(self) -> float:
        """Distance of the error past the limit; NaN is farthest."""
        return float("inf") if isnan(self.error) else self.error - self.limit


def need_gpu(problem: Any) -> None:
    """Refuse where there is none.

    Raises:
        UnavailableError: on the CPU.
    """
    if problem.device.type != "cuda":
        raise UnavailableError("needs a GPU")


def need_compiler(problem: Any) -> None:
    """Refuse where torch.compile makes no GPU code.

    Raises:
        UnavailableError: on the CPU, and without Triton.
    """
    from torch.utils._triton import has_triton

    need_gpu(problem)
    if not has_triton():
        raise UnavailableError("torch.compile needs Triton, which is missing or has no GPU here")


def judge(contender: Contender, problem: Any, output: object) -> Judgement:
    """Judge a result by the problem's own, and return that of the output that is farthest off."""
    if contender.finish is not None:
        output = contender.finish(problem, output)
    found, expected = tensors(output), tensors(getattr(problem, contender.expected))
    if len(found) != len(expected):
        return Judgement(float("nan"), contender.limit)
    moved = problem.moved if contender.moved is None else contender.moved
    each = (
        Judgement(differing(one, right), moved)
        if right.dtype == torch.uint8
        else Judgement(distance(one, right), contender.allowed(problem.summed))
        for one, right in zip(found, expected, strict=True)
    )
    return max(each, key=lambda judged: judged.excess)


def tensors(values: object) -> tuple[Tensor, ...]:
    """Return the tensors of a result or of operands, in their order."""
    if isinstance(values, Tensor):
        return (values,)
    if isinstance(values, list | tuple):
        return tuple(tensor for value in values for tensor in tensors(value))
    return ()


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest error over the rms of what is finite in the expected result.

    NaN where one is NaN. Infinities are expected where a chunk has no numbers.
    """
    if found.shape != expected.shape:
        return float("nan")
    right, mine = expected.double(), found.double()
    rms = right.where(right.isfinite(), 0).square().mean().sqrt()
    error = torch.where(mine == right, 0, mine - right).abs().max()
    return float(error / rms.clamp(min=torch.finfo(torch.float32).tiny))


def differing(codes: Tensor, expected: Tensor) -> float:
    """Return the share of codes that are not the expected ones."""
    if codes.shape != expected.shape or codes.element_size() != 1:
        return float("nan")
    return float((codes.view(torch.uint8) != expected).double().mean())
