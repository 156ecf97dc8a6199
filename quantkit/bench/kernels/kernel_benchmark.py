"""The kernel benchmark: every contender's result is judged first, then all are timed in turns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quantkit.bench.kernels import libraries
from quantkit.bench.kernels.compiled_blocks import compiler_settings_kept
from quantkit.bench.kernels.contender import (
    Contender,
    PreparedCall,
    UnavailableError,
    judge,
    tensors,
)
from quantkit.bench.kernels.figures import Verdict
from quantkit.bench.kernels.kernel_figures import BenchResult, BenchRow, Rates
from quantkit.bench.kernels.kernel_shapes import AnyShape
from quantkit.bench.kernels.machine import describe_machine, read_clocks
from quantkit.bench.kernels.operations import Operation, cases
from quantkit.bench.kernels.problem import Problem
from quantkit.bench.kernels.roofline import Ceilings, Work, measure_ceilings
from quantkit.bench.kernels.stopping import stopping_early
from quantkit.bench.kernels.timing import Stopwatch, TimingPlan
from quantkit.device import log
from quantkit.device.backends import Backend
from quantkit.errors import KernelError, QuantkitError, ShapeError
from quantkit.progress import Progress

#: What torch raises when it cannot do something.
REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError)


@dataclass(frozen=True)
class _Right:
    """A contender whose result is right."""

    row: BenchRow
    call: PreparedCall
    work: Work


def run_bench(
    shapes: Sequence[AnyShape],
    operations: Sequence[Operation],
    device: torch.device,
    plan: TimingPlan,
    *,
    against_torch: bool,
    progress: Progress,
) -> BenchResult:
    """Measure all operations on all shapes, in one run; an interrupt keeps what is done.

    Args:
        shapes: each operation takes those of its kind; quantize takes M and K.
        operations: rows of OPERATIONS.
        device: where to run.
        plan: rounds and seconds of one operation on one shape.
        against_torch: run the libraries' contenders too.
        progress: told of operations done.
    """
    before, machine = read_clocks(device), describe_machine(device)
    ceilings, watch = measure_ceilings(device), Stopwatch(device)
    rows, finished = list[BenchRow](), 0
    asked = cases(operations, shapes)
    # A full run takes minutes, most of them in torch.compile: what was measured is not lost.
    with torch.no_grad(), stopping_early():
        for done, (operation, shape) in enumerate(asked, 1):
            contenders = operation.own
            if against_torch:
                libraries.forget_compiled()
                contenders += operation.libraries
            rows += _run(operation, shape, contenders, watch, plan, ceilings)
            finished = done
            progress("bench kernels", done, len(asked))
    return BenchResult(
        machine=machine,
        clocks=(before, read_clocks(device)),
        ceilings=ceilings,
        plan=plan,
        rows=tuple(rows),
        complete=finished == len(asked),
    )


def _run(  # noqa: PLR0917  the case, then the tools
    operation: Operation,
    shape: AnyShape,
    contenders: Sequence[Contender],
    watch: Stopwatch,
    plan: TimingPlan,
    ceilings: Ceilings,
) -> list[BenchRow]:
    problem = operation.problem(operation.op, shape, watch.device)
    checked = [_check(operation, contender, problem) for contender in contenders]
    problem.forget_expected()
    calls = {found.row.contender: found.call for found in checked if isinstance(found, _Right)}
    watch.warm_up(calls, plan.warmup)
    samples = watch.rounds(calls, plan)
    rows = []
    for found in checked:
        if isinstance(found, _Right):
            timing = samples[found.row.contender].summary()
            rates = _rates(found.work, timing.p50_us, ceilings)
            rows.append(replace(found.row, timing=timing, rates=rates))
        else:
            rows.append(found)
    return rows


def _check(operation: Operation, contender: Contender, problem: Problem) -> _Right | BenchRow:
    """Run a contender once and judge the result; return a row where it must not be timed."""

    def row(verdict: Verdict, reason: str = "", error: float | None = None) -> BenchRow:
        return BenchRow(
            op=operation.name, contender=contender.name, own=contender.own, shape=problem.shape,
            verdict=verdict, reason=reason, error=error,
        )  # fmt: skip

    if reason := problem.why_not(problem.op, problem.shape):
        return row(Verdict.CANNOT, reason)
    try:
        with compiler_settings_kept(), log.record() as seen:
            call = contender.prepare(problem)
            _poison(problem)
            output = call()
            judged = judge(contender, problem, output)
    except UnavailableError as refusal:
        return row(Verdict.CANNOT, str(refusal))
    except (KernelError, ShapeError, *REFUSALS) as refusal:
        # A device's memory is no mistake of ours.
        if contender.own and not isinstance(refusal, (QuantkitError, torch.cuda.OutOfMemoryError)):
            raise
        return row(Verdict.CANNOT, one_line(refusal))
    # The fallback is not timed under the kernel's name.
    if any(where is Backend.REFERENCE for _, _, where in seen.calls):
        return row(Verdict.CANNOT, "no kernel takes these sizes: reference ran")
    ran = tuple(f"{name} {variant} {where.value}" for name, variant, where in seen.calls)
    if not judged.right:
        reason = f"error {judged.error:.3g}, allowed {judged.limit:.3g}"
        return replace(row(Verdict.WRONG, reason, judged.error), kernels=ran)
    right = replace(row(Verdict.TIMED, error=judged.error), kernels=ran)
    return _Right(right, call, _work(contender, problem, call, output))


def _poison(problem: Problem) -> None:
    """Leave NaN in the memory that results are likely to get: what is not written shows."""
    for result in problem.expected:
        torch.full((result.nbytes // 2 + 1,), torch.nan, dtype=torch.float16, device=result.device)


def _work(contender: Contender, problem: Problem, call: PreparedCall, output: object) -> Work:
    nbytes = call.nbytes + sum(tensor.nbytes for tensor in tensors(output))
    product = problem.product
    if product is None:
        return Work(0.0, nbytes)
    own = f"{product.precision} 2:4" if product.sparse else product.precision
    return Work(product.flops, nbytes, contender.precision or own)


def _rates(work: Work, p50_us: float, ceilings: Ceilings) -> Rates:
    gbs, floor = work.nbytes / p50_us / 1e3, ceilings.floor_us(work)
    return Rates(
        tflops=work.flops / p50_us / 1e6 if work.flops else None,
        gbs=gbs,
        of_copy=gbs / ceilings.copy.rate,
        of_roofline=None if floor is None else floor / p50_us,
    )


def one_line(error: BaseException) -> str:
    """Return what an exception says, in one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
