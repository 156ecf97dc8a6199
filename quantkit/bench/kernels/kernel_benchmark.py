"""The kernel benchmark: shapes, operations, contenders; correct first, then timed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from quantkit.bench.kernels import (
    attention_contenders,
    attention_libraries,
    geglu_contenders,
    integer_contenders,
    libraries,
    own_contenders,
)
from quantkit.bench.kernels.compiled_blocks import compiler_settings_kept
from quantkit.bench.kernels.contender import Contender, Problem, UnavailableError
from quantkit.bench.kernels.kernel_figures import BenchResult, BenchRow, Rates, Verdict
from quantkit.bench.kernels.kernel_shapes import AnyShape
from quantkit.bench.kernels.machine import describe_machine, read_clocks
from quantkit.bench.kernels.roofline import Ceilings, measure_ceilings
from quantkit.bench.kernels.stopping import stopping_early
from quantkit.bench.kernels.timing import Call, Stopwatch, Timing, TimingPlan
from quantkit.bench.kernels.workloads import Attention, Products, Workload
from quantkit.device import log
from quantkit.device.ops.residual import SUFFIX
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
    #: what its shapes are
    workload: Workload


_CODES, _F16 = partial(Products, reads_f16=False), partial(Products, reads_f16=True)
# A byte for two outputs.
_GATED = partial(_CODES, y_bytes=0.5)

#: The operations of quantkit.device.ops, and what layers make of them.
OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(
            "gemm_fp8", "FP8 product of codes", own_contenders.GEMM, libraries.GEMM, _CODES(16)
        ),
        Operation(
            "gemm_fp8_sparse",
            "FP8 product with 2:4 weights",
            own_contenders.GEMM_SPARSE,
            libraries.GEMM_SPARSE,
            _CODES(32),
        ),
        Operation(
            "quantize_fp8_static",
            "quantize, one scale",
            own_contenders.QUANTIZE_STATIC,
            (),
            _F16(1),
        ),
        Operation(
            "quantize_fp8_token",
            "quantize, a scale per token",
            own_contenders.QUANTIZE_TOKEN,
            libraries.QUANTIZE_TOKEN,
            _F16(1),
        ),
        Operation(
            "linear_fp8", "quantize and multiply", own_contenders.LINEAR, libraries.LINEAR, _F16(16)
        ),
        Operation(
            "linear_fp8_sparse",
            "quantize and multiply, 2:4 weights",
            own_contenders.LINEAR_SPARSE,
            libraries.LINEAR_SPARSE,
            _F16(32),
        ),
        Operation(
            "gemm_int8",
            "int8 product of codes",
            integer_contenders.GEMM,
            integer_contenders.LIBRARIES_GEMM,
            _CODES(32),
        ),
        Operation(
            "linear_int8",
            "quantize to int8 and multiply",
            integer_contenders.LINEAR,
            integer_contenders.LIBRARIES_LINEAR,
            _F16(32),
        ),
        Operation(
            "geglu_fp8",
            "product, gated and quantized",
            geglu_contenders.OWN,
            geglu_contenders.LIBRARIES,
            _GATED(16),
        ),
        Operation(
            "geglu_fp8_sparse",
            "product with 2:4 weights, gated and quantized",
            geglu_contenders.OWN_SPARSE,
            geglu_contenders.LIBRARIES_SPARSE,
            _GATED(32),
        ),
        Operation(
            "attention_fp8",
            "attention, queries and keys in e4m3fn",
            attention_contenders.FP8,
            attention_libraries.LIBRARIES,
            Attention(),
        ),
        Operation(
            "attention_int8",
            "attention, queries and keys in int8",
            attention_contenders.INT8_QK,
            attention_libraries.LIBRARIES,
            Attention(),
        ),
    )
}
# A convolution has a picture, a window and a stride; codes of heads, norms and activations are no
# product.
# With values in 16 bit no kernel runs where libraries do.
_OTHERS = (
    *("conv", "head", "value", "stream", "project", "layer_norm", "sum_norm", "group_norm", "gelu"),
    *("attention_fp8_f16", "attention_int8_f16", "attention_fp8_codes"),
)
# Products that are added to something are measured in models, and so is attention that ends in
# codes.
assert {
    op for op in OPS if "fp8" in op and not op.startswith(_OTHERS) and not op.endswith(SUFFIX)
} <= set(OPERATIONS), "not measured"


def cases(
    operations: Sequence[Operation], shapes: Sequence[AnyShape]
) -> tuple[tuple[Operation, AnyShape], ...]:
    """Return what is measured: every operation on the shapes of its kind."""
    return tuple(
        (operation, shape)
        for operation, shape in product(operations, shapes)
        if isinstance(shape, operation.workload.shape)
    )


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
    # A full run takes minutes, most of them in torch.compile: what was measured is not lost, and
    # the operations that need no compiling come first.
    with torch.no_grad(), stopping_early():
        for done, (operation, shape) in enumerate(asked, 1):
            contenders = operation.own
            if against_torch:
                libraries.forget_compiled()
                contenders += operation.libraries
            problem = operation.workload.problem(shape, device)
            rows += _run_operation(operation, contenders, problem, (watch, plan, ceilings))
            finished = done
            progress("bench kernels", done, len(asked))
    clocks = (before, read_clocks(device))
    return BenchResult(
        machine, clocks, ceilings, plan, tuple(rows), complete=finished == len(asked)
    )


def _run_operation(
    operation: Operation,
    contenders: Sequence[Contender],
    problem: Problem,
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
    operation: Operation, contender: Contender, problem: Problem
) -> tuple[BenchRow, Call | None]:
    """Run a contender once and judge the result; return no call where it must not be timed."""
    op, shape = operation.name, problem.shape

    def row(verdict: Verdict, **found: object) -> BenchRow:
        return BenchRow(op, contender.name, contender.own, shape, verdict, **found)  # type: ignore[arg-type]

    if reason := operation.workload.why_not(shape):
        return row(Verdict.CANNOT, reason=reason), None
    try:
        with compiler_settings_kept(), log.record() as seen:
            call = contender.prepare(problem)
            _poison(operation.workload.largest(shape), problem.device)
            error = contender.judge(problem, call())
    except UnavailableError as refusal:
        return row(Verdict.CANNOT, reason=str(refusal)), None
    except (KernelError, *REFUSALS) as refusal:
        if contender.own and not isinstance(refusal, QuantkitError):
            raise
        return row(Verdict.CANNOT, reason=one_line(refusal)), None
    ran = tuple(f"{name} {variant} {where.value}" for name, variant, where in seen.calls)
    # Not the other way round: NaN is wrong.
    if not error <= (allowed := contender.allowed(shape.summed)):
        reason = f"error {error:.3g}, allowed {allowed:.3g}"
        return row(Verdict.WRONG, reason=reason, error=error, kernels=ran), None
    return row(Verdict.TIMED, error=error, kernels=ran), call


def _poison(count: int, device: torch.device) -> None:
    """Leave NaN in the memory that the next result is likely to get: what is not written shows."""
    torch.full((count,), torch.nan, dtype=torch.float16, device=device)


def _rates(
    operation: Operation, contender: Contender, shape: AnyShape, found: tuple[Timing, Ceilings]
) -> Rates:
    (timing, ceilings), precision = found, contender.precision
    work = operation.workload.work(shape, contender)
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
