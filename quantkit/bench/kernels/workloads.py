"""What an operation is given: its kind of shapes, their operands, and the work that they are."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from quantkit.bench.kernels.attention_problem import AttentionProblem
from quantkit.bench.kernels.contender import Contender, Problem
from quantkit.bench.kernels.kernel_shapes import AnyShape, AttentionShape, Shape
from quantkit.bench.kernels.problem import BenchProblem
from quantkit.bench.kernels.roofline import Work, attention_work, gemm_work
from quantkit.numerics.attention_limits import LARGEST_HEAD, takes_heads


class Workload(Protocol):
    """One kind of shapes."""

    #: as a table's head names them
    axes: ClassVar[str]
    shape: ClassVar[type[AnyShape]]

    def problem(self, shape: Any, device: torch.device) -> Problem:
        """Return the operands."""

    def why_not(self, shape: Any) -> str:
        """Return why no contender takes a shape; empty when they may."""

    def work(self, shape: Any, contender: Contender) -> Work:
        """Return what a contender cannot avoid."""

    def largest(self, shape: Any) -> int:
        """Return how many values the largest operand or result has."""


@dataclass(frozen=True)
class Products:
    """M x N x K."""

    axes: ClassVar[str] = "M x N x K"
    shape: ClassVar[type[AnyShape]] = Shape

    #: K must be a multiple of this
    k_multiple: int
    #: the input is quantized within
    reads_f16: bool
    #: bytes of the result by M N
    y_bytes: float = 2.0

    def problem(self, shape: Shape, device: torch.device) -> BenchProblem:
        """Return the operands."""
        return BenchProblem(shape, device)

    def why_not(self, shape: Shape) -> str:
        """Return why no contender takes a shape; empty when they may."""
        odd = shape.k % self.k_multiple
        return f"K {shape.k} is not a multiple of {self.k_multiple}" if odd else ""

    def work(self, shape: Shape, contender: Contender) -> Work:
        """Return what a contender cannot avoid."""
        precision = contender.precision
        if precision is None:
            # 16 bit in, a byte out; scales are less than a percent.
            return Work(0.0, 3.0 * shape.m * shape.k)
        wide = self.reads_f16 or "f16" in precision.value
        return gemm_work(shape, precision, x_bytes=2 if wide else 1, y_bytes=self.y_bytes)

    def largest(self, shape: Shape) -> int:
        """Return how many values the largest operand or result has."""
        return shape.m * max(shape.n, shape.k)


@dataclass(frozen=True)
class Attention:
    """B x H x Q x K x D: pictures, heads, queries, keys, columns of a head."""

    axes: ClassVar[str] = "B x H x Q x K x D"
    shape: ClassVar[type[AnyShape]] = AttentionShape

    def problem(self, shape: AttentionShape, device: torch.device) -> AttentionProblem:
        """Return the operands."""
        return AttentionProblem(shape, device)

    def why_not(self, shape: AttentionShape) -> str:
        """Return why no contender takes a shape; empty when they may."""
        taken = takes_heads(shape.head_size)
        wanted = f"wanted a multiple of 8 up to {LARGEST_HEAD}"
        return "" if taken else f"heads of {shape.head_size} columns, {wanted}"

    def work(self, shape: AttentionShape, contender: Contender) -> Work:
        """Return what a contender cannot avoid."""
        read = 2.0 if contender.x_bytes is None else contender.x_bytes
        if contender.precision is not None:
            return attention_work(shape, x_bytes=read)
        # Codes of q, k and v are made, and nothing is multiplied.
        values = shape.queries + 2 * shape.keys
        return Work(0.0, 3.0 * shape.batch * shape.heads * values * shape.head_size)

    def largest(self, shape: AttentionShape) -> int:
        """Return how many values the largest operand or result has."""
        tokens = shape.batch * max(shape.queries, shape.keys)
        return tokens * shape.heads * shape.head_size
