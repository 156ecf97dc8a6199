"""The kernel benchmark: statistics, correctness before time, baselines, files, the command."""

import json
import os
import signal
import statistics
import threading
import time
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from quantkit.bench.kernels import timing
from quantkit.bench.kernels.compare import compare
from quantkit.bench.kernels.contender import Contender, PreparedCall, UnavailableError, judge
from quantkit.bench.kernels.figures import Verdict, save_figures
from quantkit.bench.kernels.kernel_benchmark import run_bench
from quantkit.bench.kernels.kernel_figures import BenchResult, BenchRow, load_baseline
from quantkit.bench.kernels.kernel_shapes import AttentionShape, Shape
from quantkit.bench.kernels.machine import Machine
from quantkit.bench.kernels.operations import OPERATIONS, Operation
from quantkit.bench.kernels.problem import LinearProblem, Problem
from quantkit.bench.kernels.roofline import Ceilings, Work
from quantkit.bench.kernels.stopping import stopping_early
from quantkit.bench.kernels.timing import Samples, Stopwatch, Timing, TimingPlan
from quantkit.cli.bench_command import bench as command
from quantkit.device.backends import Backend, use
from quantkit.device.ops.table import OPS
from quantkit.errors import ArtefactError, OutputError
from tests.support.ceilings import CEILINGS

CPU = torch.device("cpu")
SHORT = TimingPlan(warmup=0, repeats=5, seconds=0)
SMALL = Shape(33, 40, 64)
#: A row of every family, and what layers make of a product.
ONE_A_FAMILY = {(o.op.family, o.problem): o.name for o in OPERATIONS.values()}.values()


def quiet(step, done, total):
    pass


def bench(operation, shape=SMALL, *, against_torch=False):
    return run_bench([shape], [operation], CPU, SHORT, against_torch=against_torch, progress=quiet)


# ------------------------------------------------------------------------------------ statistics


def test_percentiles_are_linear_between_neighbours():
    generator = torch.Generator().manual_seed(1)
    times = (torch.rand(101, generator=generator) * 100).tolist()
    found = Samples(times, times[::-1]).summary()
    # The standard library's inclusive method is the same definition, by other code.
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    assert (found.p50_us, found.p95_us, found.p99_us) == pytest.approx(
        (cuts[49], cuts[94], cuts[98])
    )
    assert found.host_us == pytest.approx(statistics.median(times))
    assert found.rounds == 101


def test_contenders_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    samples = Stopwatch(CPU).rounds(calls, TimingPlan(0, 6, 100))
    assert order == list("abcbcacababcbcacab")
    assert {name: len(s.device) for name, s in samples.items()} == dict.fromkeys("abc", 6)


@pytest.mark.parametrize(("seconds", "rounds"), [(0, timing.LEAST_ROUNDS), (100, 9)])
def test_rounds_end_by_time_or_by_number(seconds, rounds):
    samples = Stopwatch(CPU).rounds({"a": lambda: None}, TimingPlan(0, 9, seconds))
    assert len(samples["a"].device) == rounds


def test_steps_in_a_row_are_waited_for_once(monkeypatch):
    """A device of its own: calls are queued, and a wait takes 2 ms for each."""
    queue, seen = [], []

    def wait(_):
        time.sleep(2e-3 * len(queue))
        seen.append(tuple(queue))
        queue.clear()

    monkeypatch.setattr(Stopwatch, "_wait", wait)
    calls = {name: partial(queue.append, name) for name in "ab"}
    found = Stopwatch(CPU).in_a_row(calls, 4, TimingPlan(0, 5, 100))
    assert [row for row in seen if row] == [(name,) * 4 for name in "abbaabbaab"]
    for samples in found.values():
        assert len(samples.device) == 5
        assert min(samples.device) >= 2e3
        # The host queued four before it waited.
        assert max(samples.host) < min(samples.device)


def test_warm_up_runs_do_not_count():
    seen = []
    watch = Stopwatch(CPU)
    watch.warm_up({"a": lambda: seen.append(1)}, 4)
    assert len(seen) == 4
    assert watch.rounds({}, SHORT) == {}


# --------------------------------------------------------------------------- exact results, rates


def decoded(codes, scale, dtype=ml_dtypes.float8_e4m3fn):
    values = codes.numpy().view(dtype).astype(np.float64)
    return values * scale.double().numpy()[:, None]


def product_of(problem, dtype=ml_dtypes.float8_e4m3fn):
    x = decoded(problem.operand("x"), problem.operand("x_scale"), dtype)
    return x @ decoded(problem.weights, problem.operand("w_scale"), dtype).T


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gemm_fp8", ml_dtypes.float8_e4m3fn),
        ("gemm_fp8_sparse", ml_dtypes.float8_e4m3fn),
        ("gemm_int8", np.int8),
        ("gemm_w4a8", np.int8),
    ],
)
def test_expected_products_are_those_of_numpy(name, dtype):
    problem = Problem(OPS[name], SMALL, CPU)
    (y,) = problem.expected
    right = product_of(problem, dtype)
    # float16 rounds once.
    assert np.allclose(y.double().numpy(), right, rtol=2**-11, atol=2**-24)
    # What libraries multiply in 16 bit is the same.
    f16 = problem.x16.double().numpy() @ problem.w16.double().numpy().T
    assert np.abs(f16 - right).max() < 0.004 * np.sqrt(np.square(right).mean())
    assert problem.call[0][-1] is None, "a bias"


def test_layers_are_judged_by_what_they_quantize():
    problem = LinearProblem(OPS["gemm_fp8"], SMALL, CPU)
    x = problem.x16.float().numpy()
    w = decoded(problem.weights, problem.operand("w_scale"))
    for (y,), amax in (
        (problem.expected, np.abs(x).max(axis=1, keepdims=True)),
        (problem.expected_static, np.abs(x).max()),
    ):
        scale = (amax / 448).astype(np.float32)
        codes = (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        right = codes * scale @ w.T
        assert np.abs(y.double().numpy() - right).max() < 0.002 * np.sqrt(np.square(right).mean())


def test_rooflines_are_the_slower_of_bytes_and_products():
    # 1000 GB/s and 100 TFLOP/s: a microsecond moves 1e6 bytes, or multiplies 1e8.
    assert CEILINGS.floor_us(Work(3e8, 1e6, "fp8")) == pytest.approx(3)
    assert CEILINGS.floor_us(Work(1e8, 5e6, "fp8")) == pytest.approx(5)
    assert CEILINGS.floor_us(Work(0, 5e6)) == pytest.approx(5)
    assert Ceilings(CEILINGS.copy, {}).floor_us(Work(1, 1, "fp8")) is None


@pytest.mark.parametrize(
    ("name", "contender", "nbytes"),
    [
        ("gemm_fp8", 0, 8 * 64 + 16 * 64 + 2 * 8 * 16 + 4 * (8 + 16)),
        ("gemm_fp8_sparse", 0, 8 * 64 + 16 * (32 + 8) + 2 * 8 * 16 + 4 * (8 + 16)),
        ("gemm_w4a8", 0, 8 * 64 + 16 * (32 + 2) + 2 * 8 * 16 + 4 * (8 + 16)),
        ("gemm_fp8", 2, 2 * (8 * 64 + 16 * 64 + 8 * 16)),
        ("quantize_fp8_token", 0, 3 * 8 * 64 + 4 * 8),
    ],
)
@pytest.mark.usefixtures("_host")
def test_work_counts_operands_and_results_once(name, contender, nbytes):
    rows = bench(OPERATIONS[name], Shape(8, 16, 64), against_torch=True).rows
    row = rows[contender]
    assert row.rates.gbs * row.timing.p50_us * 1e3 == pytest.approx(nbytes)
    flops = None if name.startswith("quantize") else 2 * 8 * 16 * 64
    found = row.rates.tflops and row.rates.tflops * row.timing.p50_us * 1e6
    assert found == (flops if flops is None else pytest.approx(flops))


# ------------------------------------------------------------------------------- right, then fast


def made_by(change, *, own=True, **options):
    """Return an operation whose only contender has the expected result, and ``change``s it."""

    def prepare(problem):
        y = change(problem.expected[0].clone())
        return PreparedCall(lambda *_: y, problem.call[0])

    one = Contender("it", own, prepare, **options)
    row = OPERATIONS["gemm_fp8"]
    return Operation(row.name, row.op, Problem, (one,) if own else (), () if own else (one,))


def one_channel(y):
    y[:, 7] *= 1.03
    return y


def one_element(y):
    y[5, 7] += y.square().mean().sqrt() / 10
    return y


def unwritten(y):
    y[-1, -1] = torch.nan
    return y


def zeros(y):
    return torch.zeros_like(y)


def transposed(y):
    return y.T


@pytest.mark.parametrize("change", [one_channel, one_element, unwritten, zeros, transposed])
@pytest.mark.parametrize("own", [True, False])
def test_wrong_results_are_not_timed(change, own):
    (row,) = (result := bench(made_by(change, own=own), against_torch=True)).rows
    assert row.verdict is Verdict.WRONG
    assert row.timing is None
    assert "allowed 0.02" in row.reason
    assert result.wrong == (row,)


@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda scale, codes: (scale, codes), True),
        (lambda scale, codes: (scale, codes ^ (torch.arange(64) == 3)), False),
        (lambda scale, codes: (1.03 * scale, codes), False),
        (lambda scale, codes: codes, False),
        (lambda scale, codes: (codes, scale), False),
        (lambda scale, codes: (scale, codes.int()), False),
        (lambda scale, codes: (scale, codes[:, 1:]), False),
    ],
)
def test_every_result_of_an_operation_is_judged(change, right):
    problem = Problem(OPS["quantize_fp8_token"], SMALL, CPU)
    found = judge(Contender("it", True, None), problem, change(*problem.expected))
    assert found.right is right


def test_fast_sums_may_be_further_off_the_more_they_add():
    exact = Contender("it", True, None)
    fast = replace(exact, fast=True)
    assert exact.allowed(16) == exact.allowed(16384) == 0.02
    assert 0.02 < fast.allowed(16) < fast.allowed(4096) < 0.1 < fast.allowed(16384) < 0.2


def test_right_results_are_timed():
    (row,) = (result := bench(made_by(lambda y: y))).rows
    assert row.verdict is Verdict.TIMED
    assert row.error == 0
    assert row.timing.rounds == timing.LEAST_ROUNDS
    assert row.rates.tflops == pytest.approx(2 * 33 * 40 * 64 / row.timing.p50_us / 1e6)
    assert row.rates.of_copy == pytest.approx(row.rates.gbs / 1000)
    assert result.complete


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnavailableError("needs a GPU"), "needs a GPU"),
        (RuntimeError("no\n  such thing"), "RuntimeError: no such thing"),
        (ImportError("gone"), "ImportError: gone"),
    ],
)
def test_contenders_that_cannot_run_say_why(error, reason):
    def refuse(y):
        raise error

    (row,) = bench(made_by(refuse, own=False), against_torch=True).rows
    assert (row.verdict, row.reason) == (Verdict.CANNOT, reason)


@pytest.mark.parametrize("error", [None, RuntimeError("a library's")])
def test_what_one_contender_sets_for_the_compiler_reaches_no_other(error):
    from torch._inductor import config

    before = config.get_config_copy()

    def tune(y):
        config.coordinate_descent_tuning = not before["coordinate_descent_tuning"]
        config.triton.unique_kernel_names = not before["triton.unique_kernel_names"]
        if error:
            raise error
        return y.half()

    (row,) = bench(made_by(tune, own=False), against_torch=True).rows
    assert row.verdict is (Verdict.CANNOT if error else Verdict.TIMED)
    assert config.get_config_copy() == before


def test_crashes_of_our_own_are_not_hidden():
    def crash(y):
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        bench(made_by(crash))


def test_interrupted_runs_keep_what_is_done():
    def interrupt(y):
        raise KeyboardInterrupt

    operations = [made_by(lambda y: y), made_by(interrupt)]
    result = run_bench([SMALL], operations, CPU, SHORT, against_torch=False, progress=quiet)
    assert len(result.rows) == 1
    assert not result.complete


def test_a_request_to_end_keeps_what_is_done_too():
    def ask(y):
        os.kill(os.getpid(), signal.SIGTERM)
        return y

    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread handles signals")
    before = signal.getsignal(signal.SIGTERM)
    operations = [made_by(lambda y: y), made_by(ask)]
    result = run_bench([SMALL], operations, CPU, SHORT, against_torch=False, progress=quiet)
    assert len(result.rows) == 1
    assert not result.complete
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_signals_are_left_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with stopping_early():
            seen.append(signal.getsignal(signal.SIGTERM))
            raise KeyboardInterrupt
        seen.append("went on")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, "went on"]


def test_every_row_of_operations_is_measured():
    assert OPS.keys() <= OPERATIONS.keys()
    assert {"linear_fp8", "linear_int8_sparse", "linear_w4a8"} <= OPERATIONS.keys() - OPS.keys()


@pytest.mark.usefixtures("_host")
@pytest.mark.parametrize("name", ONE_A_FAMILY)
def test_operations_are_right_and_timed_on_the_host(name):
    operation = OPERATIONS[name]
    heads = AttentionShape(1, 2, 33, 40, 24)
    shape = SMALL if operation.problem.kind is Shape else heads
    rows = bench(operation, shape, against_torch=True).rows
    assert [row.contender for row in rows] == [c.name for c in operation.own + operation.libraries]
    for row in rows:
        ours = row.own and not {"fast", "compiled"} & set(row.contender.split())
        assert row.reason if row.verdict is Verdict.CANNOT else row.timing
        assert row.verdict is Verdict.TIMED if ours else row.verdict is not Verdict.WRONG
        assert not ours or {name.split()[-1] for name in row.kernels} == {"host"}


def test_the_fallback_is_not_timed_as_a_kernel():
    with use(Backend.REFERENCE):
        rows = bench(OPERATIONS["gemm_fp8"]).rows
    assert {(row.verdict, row.reason) for row in rows} == {(Verdict.CANNOT, "no kernel: asked for")}


@pytest.mark.usefixtures("_host")
def test_a_call_that_falls_back_is_not_timed():
    row = OPERATIONS["gemm_fp8"]

    def prepare(problem):
        call = row.own[0].prepare(problem)

        def fall_back(*arguments):
            with use(Backend.REFERENCE):
                return call.function(*arguments)

        return PreparedCall(fall_back, call.operands)

    (found,) = bench(replace(row, own=(Contender("it", True, prepare),))).rows
    assert (found.verdict, found.timing) == (Verdict.CANNOT, None)
    assert found.reason == "no kernel takes these sizes: reference ran"


def test_a_full_device_ends_no_run():
    def fill(y):
        raise torch.cuda.OutOfMemoryError("out of memory")

    (row,) = bench(made_by(fill)).rows
    assert (row.verdict, row.reason) == (Verdict.CANNOT, "OutOfMemoryError: out of memory")


def test_shapes_that_an_operation_does_not_take_are_named():
    (row, *_) = bench(OPERATIONS["gemm_fp8_sparse"], Shape(4, 4, 48)).rows
    assert row.reason == "K 48 is not a multiple of 32"
    (row, *_) = bench(OPERATIONS["geglu_fp8"], Shape(4, 5, 48)).rows
    assert row.reason == "N 5 is odd, and outputs have a gate each"


# -------------------------------------------------------------------------------------- baselines

MACHINE = Machine("Card", "gfx1201", "", "", "", "", "3.12", {}, "", "")


def timed(op, contender, us, *, own=True):
    timing, verdict = Timing(5, us, us, us, us), Verdict.TIMED
    return BenchRow(
        op=op, contender=contender, own=own, shape=SMALL, verdict=verdict, timing=timing
    )


def run_of(*rows):
    return BenchResult(machine=MACHINE, clocks=({}, {}), ceilings=CEILINGS, plan=SHORT, rows=rows)


@pytest.fixture
def baseline(tmp_path):
    path = tmp_path / "baseline.json"
    rows = (timed("gemm_fp8", "it", 10.0), timed("gemm_fp8", "lib", 10.0, own=False))
    save_figures(run_of(*rows), path, force=False)
    return path


@pytest.mark.parametrize(("us", "slower"), [(5.0, 0), (10.9, 0), (11.1, 1), (100.0, 1)])
def test_ratios_past_the_threshold_are_regressions(baseline, us, slower):
    found = compare(run_of(timed("gemm_fp8", "it", us)), load_baseline(baseline), 1.10)
    assert [change.ratio for change in found.changes] == pytest.approx([us / 10])
    assert len(found.regressions) == slower


def test_kernels_that_are_not_timed_any_more_are_regressions(baseline):
    wrong = replace(timed("gemm_fp8", "it", 1.0), verdict=Verdict.WRONG, timing=None)
    found = compare(run_of(wrong), load_baseline(baseline), 2.0)
    assert [change.after_us for change in found.regressions] == [None]


def test_libraries_are_shown_and_not_judged(baseline):
    rows = (timed("gemm_fp8", "it", 10.0), timed("gemm_fp8", "lib", 99.0, own=False))
    found = compare(run_of(*rows), load_baseline(baseline), 1.10)
    assert [change.row.contender for change in found.changes] == ["lib", "it"]
    assert not found.regressions


def test_baselines_of_other_devices_are_refused(baseline):
    other = replace(run_of(timed("gemm_fp8", "it", 1.0)), machine=replace(MACHINE, device="Other"))
    with pytest.raises(ArtefactError, match=r"measured on Card \(gfx1201\), this is Other"):
        compare(other, load_baseline(baseline), 1.1)
    with pytest.raises(ArtefactError, match="no operation and shape"):
        compare(run_of(timed("quantize", "it", 1.0)), load_baseline(baseline), 1.1)


def spoiled(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda v: v.update(schema="other"), "not a quantkit.kernels.bench file"),
        (lambda v: v.update(schema_version=9), "schema_version 9, expected 1"),
        (lambda v: v.pop("machine"), "damaged"),
        (lambda v: v["rows"][0].pop("shape"), "damaged"),
        (lambda v: v["rows"][0].update(timing=[1]), "damaged"),
        (lambda v: v["rows"][0]["timing"].update(p50_us=-1), "damaged .*expected a time"),
        (lambda v: v["rows"][0]["timing"].update(p50_us="fast"), "damaged"),
    ],
)
def test_damaged_baselines_are_named(baseline, change, match):
    spoiled(baseline, change)
    with pytest.raises(ArtefactError, match=match):
        load_baseline(baseline)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_files_that_are_no_baseline_are_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ArtefactError, match=r"a\.json: (not|found)"):
        load_baseline(tmp_path / "a.json")
    with pytest.raises(ArtefactError, match="missing"):
        load_baseline(tmp_path / "absent.json")


# ---------------------------------------------------------------------------------- the command


def run(*arguments):
    return CliRunner().invoke(command, ["--device", "cpu", *arguments])


@pytest.mark.usefixtures("_host")
def test_the_command_saves_compares_and_fails_past_the_threshold(tmp_path):
    shapes, saved = tmp_path / "s.csv", tmp_path / "b.json"
    shapes.write_text("16,16,32\n")
    common = ("--op", "gemm_fp8", "--shapes", str(shapes), "--repeats", "5")
    done = run(*common, "--against", "torch", "--save-baseline", str(saved))
    assert done.exit_code == 0, done.output
    assert "F.linear, f16" in done.output
    assert "_scaled_mm, per row: cannot run (16x16x32): needs a GPU" in done.output
    values = json.loads(saved.read_text())
    assert (values["schema"], values["schema_version"]) == ("quantkit.kernels.bench", 1)
    assert values["machine"]["versions"]["torch"] == torch.__version__
    assert len(values["machine"]["kernel_sources"]) == 64
    assert isinstance(run(*common, "--save-baseline", str(saved)).exception, OutputError)
    same = run(*common, "--compare", str(saved), "--threshold", "1000")
    assert same.exit_code == 0, same.output
    spoiled(saved, lambda v: v["rows"][0]["timing"].update(p50_us=1e-3))
    slower = run(*common, "--compare", str(saved), "--json")
    assert slower.exit_code == 1
    (change,) = json.loads(slower.stdout)["comparison"]["changes"]
    assert change["regression"]
    spoiled(saved, lambda v: v["machine"].update(device="Other"))
    refused = run(*common, "--compare", str(saved))
    assert isinstance(refused.exception, ArtefactError)


def test_the_command_fails_on_wrong_kernels(monkeypatch, tmp_path):
    monkeypatch.setitem(OPERATIONS, "gemm_fp8", made_by(zeros))
    (tmp_path / "s.json").write_text("[[16, 16, 32]]")
    done = run("--op", "gemm_fp8", "--shapes", str(tmp_path / "s.json"))
    assert done.exit_code == 1
    assert "wrong (16x16x32): error" in done.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--op", "attention"), "expected one of quantize_fp8_static"),
        (("--repeats", "2"), "not in the range"),
        (("--threshold", "0.5"), "not in the range"),
    ],
)
def test_bad_options_are_refused(arguments, text):
    done = run(*arguments)
    assert getattr(done.exception, "exit_code", done.exit_code) == 2
    assert text in f"{done.output} {done.exception}"
