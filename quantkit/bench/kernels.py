"""The kernel benchmark: shapes, operations, contenders; correct first, then timed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from quantkit.bench import geglu, integers, libraries, operators
from quantkit.bench.compiling import compiler_settings_kept
from quantkit.bench.contender import Contender, UnavailableError
from quantkit.bench.machine import describe_machine, read_clocks
from quantkit.bench.problem import BenchProblem
from quantkit.bench.result import BenchResult, BenchRow, Rates, Verdict
from quantkit.bench.roofline import Ceilings, Work, gemm_work, measure_ceilings
from quantkit.bench.shapes import Shape
from quantkit.bench.stopping import stopping_early
from quantkit.bench.timing import Call, Stopwatch, Timing, TimingPlan
from quantkit.device import log
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError, QuantkitError
from quantkit.progress import Progress

#: What torch raises when it cannot do something.
REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError)


@dataclass(frozen=True)
class Operation:
    """What is timed together: contenders that compute the same."""

    name: str
    title: str
    own: tuple[Contender, ...]
    #: of torch and what builds on it
    libraries: tuple[Contender, ...]
    #: K must be a multiple of this
    k_multiple: int
    #: the input is quantized within
    reads_f16: bool
    #: bytes of the result by M N
    y_bytes: float = 2.0


#: The operations of quantkit.device.ops, and what layers make of them.
OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("gemm_fp8", "FP8 product of codes", operators.GEMM, libraries.GEMM, 16, False),
        Operation(
            "gemm_fp8_sparse",
            "FP8 product with 2:4 weights",
            operators.GEMM_SPARSE,
            libraries.GEMM_SPARSE,
            32,
            False,
        ),
        Operation(
            "quantize_fp8_static", "quantize, one scale", operators.QUANTIZE_STATIC, (), 1, True
        ),
        Operation(
            "quantize_fp8_token",
            "quantize, a scale per token",
            operators.QUANTIZE_TOKEN,
            libraries.QUANTIZE_TOKEN,
            1,
            True,
        ),
        Operation(
            "linear_fp8", "quantize and multiply", operators.LINEAR, libraries.LINEAR, 16, True
        ),
        Operation(
            "linear_fp8_sparse",
            "quantize and multiply, 2:4 weights",
            operators.LINEAR_SPARSE,
            libraries.LINEAR_SPARSE,
            32,
            True,
        ),
        Operation(
            "gemm_int8", "int8 product of codes", integers.GEMM, integers.LIBRARIES_GEMM, 32, False
        ),
        Operation(
            "linear_int8",
            "quantize to int8 and multiply",
            integers.LINEAR,
            integers.LIBRARIES_LINEAR,
            32,
            True,
        ),
        # A byte for two outputs.
        Operation(
            "geglu_fp8",
            "product, gated and quantized",
            geglu.OWN,
            geglu.LIBRARIES,
            16,
            False,
            y_bytes=0.5,
        ),
        Operation(
            "geglu_fp8_sparse",
            "product with 2:4 weights, gated and quantized",
            geglu.OWN_SPARSE,
            geglu.LIBRARIES_SPARSE,
            32,
            False,
            y_bytes=0.5,
        ),
    )
}
# Convolutions, attention and its codes are no M x N x K.
_OTHERS = ("conv", "attention", "head", "value", "project")
assert {op for op in OPS if "fp8" in op and not op.startswith(_OTHERS)} <= set(OPERATIONS), (
    "not measured"
)


def run_bench(
    shapes: Sequence[Shape],
    operations: Sequence[Operation],
    device: torch.device,
    plan: TimingPlan,
    *,
    against_torch: bool,
    progress: Progress,
) -> BenchResult:
    """Measure all operations on all shapes, in one run; an interrupt keeps what is done.

    Args:
        shapes: M, N and K; quantize takes M and K.
        operations: rows of OPERATIONS.
        device: where to run.
        plan: rounds and seconds of one operation on one shape.
        against_torch: run the libraries' contenders too.
        progress: told of operations done.
    """
    before, machine = read_clocks(device), describe_machine(device)
    ceilings, watch = measure_ceilings(device), Stopwatch(device)
    rows: list[BenchRow] = []
    done, total = 0, len(shapes) * len(operations)
    # A full run takes minutes, most of them in torch.compile: what was measured is not lost, and
    # the operations that need no compiling come first.
    with torch.no_grad(), stopping_early():
        for operation, shape in product(operations, shapes):
            contenders = operation.own
            if against_torch:
                libraries.forget_compiled()
                contenders += operation.libraries
            rows += _run_operation(
                operation, contenders, BenchProblem(shape, device), (watch, plan, ceilings)
            )
            done += 1
            progress("bench kernels", done, total)
    clocks = (before, read_clocks(device))
    return BenchResult(machine, clocks, ceilings, plan, tuple(rows), complete=done == total)


def _run_operation(
    operation: Operation,
    contenders: Sequence[Contender],
    problem: BenchProblem,
    tools: tuple[Stopwatch, TimingPlan, Ceilings],
) -> list[BenchRow]:
    watch, plan, ceilings = tools
    checked = {c.name: _check(operation, c, problem) for c in contenders}
    problem.forget_exact()
    calls = {name: call for name, (_, call) in checked.items() if call is not None}
    watch.warm_up(calls, plan.warmup)
    samples = watch.rounds(calls, plan)
    rows = []
    for contender in contenders:
        row, _ = checked[contender.name]
        if contender.name in samples:
            timing = samples[contender.name].summary()
            rates = _rates(operation, contender, problem.shape, (timing, ceilings))
            row = replace(row, timing=timing, rates=rates)
        rows.append(row)
    return rows


def _check(
    operation: Operation, contender: Contender, problem: BenchProblem
) -> tuple[BenchRow, Call | None]:
    """Run a contender once and judge the result; return no call where it must not be timed."""
    op, shape = operation.name, problem.shape

    def row(verdict: Verdict, **found: object) -> BenchRow:
        return BenchRow(op, contender.name, contender.own, shape, verdict, **found)  # type: ignore[arg-type]

    if shape.k % operation.k_multiple:
        reason = f"K {shape.k} is not a multiple of {operation.k_multiple}"
        return row(Verdict.CANNOT, reason=reason), None
    try:
        with compiler_settings_kept(), log.record() as seen:
            call = contender.prepare(problem)
            _poison(problem)
            error = contender.judge(problem, call())
    except UnavailableError as refusal:
        return row(Verdict.CANNOT, reason=str(refusal)), None
    except (KernelError, *REFUSALS) as refusal:
        if contender.own and not isinstance(refusal, QuantkitError):
            raise
        return row(Verdict.CANNOT, reason=one_line(refusal)), None
    ran = tuple(f"{name} {variant} {where.value}" for name, variant, where in seen.calls)
    # Not the other way round: NaN is wrong.
    if not error <= (allowed := contender.allowed(problem.shape.k)):
        reason = f"error {error:.3g}, allowed {allowed:.3g}"
        return row(Verdict.WRONG, reason=reason, error=error, kernels=ran), None
    return row(Verdict.TIMED, error=error, kernels=ran), call


def _poison(problem: BenchProblem) -> None:
    """Leave NaN in the memory that the next result is likely to get: what is not written shows."""
    size = (problem.shape.m, max(problem.shape.n, problem.shape.k))
    torch.full(size, torch.nan, dtype=torch.float16, device=problem.device)


def _rates(
    operation: Operation, contender: Contender, shape: Shape, found: tuple[Timing, Ceilings]
) -> Rates:
    (timing, ceilings), precision = found, contender.precision
    if precision is None:
        # 16 bit in, a byte out; scales are less than a percent.
        work = Work(0.0, 3.0 * shape.m * shape.k)
    else:
        wide = operation.reads_f16 or "f16" in precision.value
        work = gemm_work(shape, precision, x_bytes=2 if wide else 1, y_bytes=operation.y_bytes)
    gbs, floor = work.nbytes / timing.p50_us / 1e3, ceilings.floor_us(work, precision)
    return Rates(
        tflops=work.flops / timing.p50_us / 1e6 if work.flops else None,
        gbs=gbs,
        of_copy=gbs / ceilings.copy.rate,
        of_roofline=None if floor is None else floor / timing.p50_us,
    )


def one_line(error: BaseException) -> str:
    """Return what an exception says, in one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
