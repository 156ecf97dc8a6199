"""The operations that are measured: the rows of ``OPS``, and what layers make of their products."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from quantkit.bench.kernels.attention_libraries import ATTENTION
from quantkit.bench.kernels.contender import Contender
from quantkit.bench.kernels.kernel_shapes import AnyShape
from quantkit.bench.kernels.libraries import library_contenders
from quantkit.bench.kernels.own_contenders import own_contenders
from quantkit.bench.kernels.problem import AttentionProblem, LinearProblem, Problem
from quantkit.device.ops.op import Op
from quantkit.device.ops.table import OPS


@dataclass(frozen=True)
class Operation:
    """Contenders that compute the same, timed together."""

    name: str
    op: Op
    #: what its contenders are given
    problem: type[Problem]
    own: tuple[Contender, ...]
    #: of torch and what builds on it
    libraries: tuple[Contender, ...]

    @property
    def title(self) -> str:
        """The formula that is computed."""
        formula = self.op.formula.partition(";")[0]
        return f"quantize x, then {formula}" if self.problem is LinearProblem else formula


def _measured(name: str, op: Op, problem: type[Problem]) -> Operation:
    linear = problem is LinearProblem
    own = own_contenders(op, linear=linear)
    others = ATTENTION if op.family == "attention" else library_contenders(op, linear=linear)
    return Operation(name, op, problem, own, others)


def _problem_of(op: Op) -> type[Problem]:
    return AttentionProblem if op.family in {"attention", "attention_f16"} else Problem


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        *(_measured(op.name, op, _problem_of(op)) for op in OPS.values()),
        *(
            _measured(op.name.replace("gemm", "linear"), op, LinearProblem)
            for op in OPS.values()
            if op.family == "gemm"
        ),
    )
}


def cases(
    operations: Sequence[Operation], shapes: Sequence[AnyShape]
) -> tuple[tuple[Operation, AnyShape], ...]:
    """Return what is measured: every operation on the shapes of its kind."""
    return tuple(
        (operation, shape)
        for operation, shape in product(operations, shapes)
        if isinstance(shape, operation.problem.kind)
    )
