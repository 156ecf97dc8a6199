"""What can be timed: an operation's contenders, and how a result is judged."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.bench.kernels.kernel_shapes import AnyShape
from quantkit.bench.kernels.roofline import Precision
from quantkit.bench.kernels.timing import Call


class Problem(Protocol):
    """Operands of one shape; each is made when it is first asked for."""

    @property
    def shape(self) -> AnyShape:
        """What it was made of."""

    @property
    def device(self) -> torch.device:
        """Where the operands lie."""

    def forget_exact(self) -> None:
        """Free the float64 results."""


#: The error of a result on a problem, which is of the kind that the operation has.
Judge = Callable[[Any, object], float]


class UnavailableError(Exception):
    """A contender that cannot run here; the text is the reason, in one line."""


#: Fast sums lose bits of all of K: on an H200 the largest error is 4.4e-4 sqrt(K) of the rms for
#: K of 640 to 15360, quantkit's and torch's; twice that.
_FAST = 9e-4


@dataclass(frozen=True)
class Contender:
    """One way to compute an operation."""

    name: str
    #: True for quantkit's own
    own: bool
    #: what it multiplies; None: nothing
    precision: Precision | None
    #: makes a call of a problem's operands; may raise UnavailableError, or what torch raises
    prepare: Callable[[Any], Call]
    judge: Judge
    #: largest error that counts as right
    limit: float
    #: sums stay in a matrix unit that keeps fewer bits than float32
    fast: bool = False
    #: more that counts as right, over the square root of what a sum has: rounding averages out
    averaged: float = 0.0
    #: of an input value; None: what the operation's contenders mostly read
    x_bytes: float | None = None

    def renamed(self, name: str) -> "Contender":
        """Return the same under another name, among contenders of other operations."""
        return replace(self, name=name)

    def allowed(self, k: int) -> float:
        """Return the largest error that counts as right where sums have ``k`` terms."""
        root = sqrt(k)
        return self.limit + (_FAST * root if self.fast else 0.0) + self.averaged / root


def worst_of(exact: str, finish: Callable[[Any, Tensor], Tensor] | None = None) -> Judge:
    """Return a judge: largest error over the rms of the exact result; NaN where one is NaN.

    Args:
        exact: the Problem's property that has the exact result.
        finish: brings an output to its shape, where the contender leaves something undone.
    """

    def judge(problem: Any, output: object) -> float:
        assert isinstance(output, Tensor)
        right: Tensor = getattr(problem, exact)
        found: Tensor = (finish(problem, output) if finish else output).double()
        if found.shape != right.shape:
            return float("nan")
        return float((found - right).abs().max() / right.square().mean().sqrt())

    return judge


def differing_codes(codes: Tensor, right: Tensor) -> float:
    """Return the share of codes that are not the reference's."""
    if codes.shape != right.shape:
        return float("nan")
    return float((codes.view(torch.uint8) != right).double().mean())
