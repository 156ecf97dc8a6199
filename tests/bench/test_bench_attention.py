"""Attention in the kernel benchmark: shapes, exact results, what counts as right, libraries."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch.nn.functional import scaled_dot_product_attention

from quantkit.bench.kernels import attention_libraries
from quantkit.bench.kernels.attention_libraries import ATTENTION
from quantkit.bench.kernels.contender import UnavailableError, judge
from quantkit.bench.kernels.kernel_figures import load_baseline
from quantkit.bench.kernels.kernel_shapes import AttentionShape
from quantkit.bench.kernels.operations import OPERATIONS
from quantkit.bench.kernels.problem import AttentionProblem
from quantkit.cli.bench_command import bench as command
from quantkit.device.backends import Backend, use
from quantkit.device.ops.table import OPS
from quantkit.errors import ArtefactError

CPU = torch.device("cpu")
SMALL = AttentionShape(2, 3, 37, 101, 40)
OWN = {c.name: c for c in OPERATIONS["attention_fp8"].own}
LIBRARY = {c.name: c for c in ATTENTION}
BOTH = pytest.mark.parametrize("name", ["attention_fp8", "attention_int8"])


@pytest.fixture
def problem():
    return AttentionProblem(OPS["attention_fp8"], SMALL, CPU)


@BOTH
def test_work_is_two_products(name):
    problem = AttentionProblem(OPS[name], AttentionShape(2, 3, 100, 50, 8), CPU)
    assert problem.product.flops == 4.0 * 2 * 3 * 100 * 50 * 8


@pytest.mark.parametrize("size", [12, 168])
def test_heads_that_no_kernel_takes_are_named(size):
    found = AttentionProblem.why_not(OPS["attention_fp8"], AttentionShape(1, 1, 8, 8, size))
    assert found == f"heads of {size} columns, expected a multiple of 8 up to 160"


# ------------------------------------------------------------------------------- right, then fast


@BOTH
def test_expected_results_are_near_torchs(name):
    problem = AttentionProblem(OPS[name], SMALL, CPU)
    q, k, v = (t.double() for t in (problem.q, problem.k, problem.v))
    right = scaled_dot_product_attention(q, k, v).transpose(1, 2)
    (y,) = problem.expected
    # Codes of q, k and v are 0.026 of each off, and the mean of a hundred a tenth of that.
    assert 1e-4 < float((y.double() - right).norm() / right.norm()) < 0.02


def judged(contender, problem, y):
    found = judge(contender, problem, y)
    return found.error, found.limit


@pytest.mark.usefixtures("_host")
@BOTH
@pytest.mark.parametrize("keys", [77, 1024])
def test_right_results_are_told_from_wrong_ones(name, keys):
    problem = AttentionProblem(OPS[name], AttentionShape(1, 1, 64, keys, 64), CPU)
    for contender in OPERATIONS[name].own[:3]:
        right = contender.prepare(problem)()
        error, allowed = judged(contender, problem, right)
        assert error < allowed
        for wrong in (
            right * 1.06,  # a scale, or probabilities that sum to more than one
            torch.where(torch.arange(64) == 3, right * 1.2, right),
            right.roll(1, dims=3),
            torch.zeros_like(right),
            torch.full_like(right, torch.nan),
            right[..., 1:],
        ):
            assert not judged(contender, problem, wrong)[0] <= allowed


def test_the_fallback_is_not_timed_as_a_kernel(problem):
    with use(Backend.REFERENCE):
        for name in OWN.keys() - {"quantkit, scales of each call, compiled"}:
            with pytest.raises(UnavailableError, match="no kernel: asked for"):
                OWN[name].prepare(problem)


# -------------------------------------------------------------------------------------- libraries


@pytest.mark.parametrize("name", ["SDPA, torch's choice", "SDPA, flash", "SDPA, math"])
def test_torchs_are_right(problem, name):
    error, allowed = judged(LIBRARY[name], problem, LIBRARY[name].prepare(problem)())
    assert 0 < error < allowed


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("SDPA, cuDNN", "needs a GPU"),
        ("SageAttention", "SageAttention is not installed"),
        ("cuDNN, fp8, codes given", "cuDNN's front end is not installed"),
    ],
)
def test_what_is_missing_says_so(problem, monkeypatch, name, match):
    for module in ("sageattention", "cudnn"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnavailableError, match=match):
        LIBRARY[name].prepare(problem)


def test_sage_attention_is_called_by_heads(problem, monkeypatch):
    fake = ModuleType("sageattention")

    def sageattn(q, k, v, *, tensor_layout, is_causal):
        assert (tensor_layout, is_causal) == ("HND", False)
        return scaled_dot_product_attention(q, k, v)

    fake.__dict__["sageattn"] = sageattn
    monkeypatch.setitem(sys.modules, "sageattention", fake)
    monkeypatch.setattr(attention_libraries, "need_gpu", lambda problem: None)
    sage = LIBRARY["SageAttention"]
    error, allowed = judged(sage, problem, sage.prepare(problem)())
    assert error < allowed
    # Version 1.0.6 counts keys that only fill up a tile, as zeros.
    padded = torch.nn.functional.pad
    k, v = (padded(t, (0, 0, 0, 27)) for t in (problem.k, problem.v))
    assert judged(sage, problem, scaled_dot_product_attention(problem.q, k, v))[0] > allowed


class FakeGraph:
    """What cuDNN's graph is told; computes it in float32 when it is executed."""

    def __init__(self, **types):
        self.types = types

    def tensor(self, **told):
        return Told(told)

    def sdpa_fp8(self, *, is_inference, attn_scale, **named):
        assert is_inference
        self.scale, self.named = attn_scale, named
        self.out = Told({})
        return self.out, None, Told({}), Told({})

    def get_workspace_size(self):
        return 1

    def execute(self, pack, workspace, *, handle):
        given = {name: pack[told].float() for name, told in self.named.items()}
        for name, told in self.named.items():
            assert list(pack[told].shape) == told.values["dim"], name
            assert list(pack[told].stride()) == told.values["stride"], name
        q, k, v = (given[name] * given[f"descale_{name}"] for name in "qkv")
        p = torch.softmax(q @ k.transpose(2, 3) * self.scale, dim=3)
        p = (p * given["scale_s"]).to(torch.float8_e4m3fn).float() * given["descale_s"]
        pack[self.out].copy_((p @ v * given["scale_o"]).to(torch.float8_e4m3fn))

    def __getattr__(self, name):
        return lambda *arguments: None


class Told:
    def __init__(self, values):
        self.values = values

    def __getattr__(self, name):
        return lambda *arguments: self


def test_cudnn_is_given_scales_that_make_it_right(problem, monkeypatch):
    fake = ModuleType("cudnn")
    fake.__dict__.update(
        data_type=SimpleNamespace(FP8_E4M3="e4m3", FLOAT="float"),
        heur_mode=SimpleNamespace(A=0, FALLBACK=1),
        pygraph=FakeGraph,
        create_handle=lambda: None,
        set_stream=lambda **options: None,
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(attention_libraries, "need_gpu", lambda problem: None)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    contender = LIBRARY["cuDNN, fp8, codes given"]
    error, allowed = judged(contender, problem, contender.prepare(problem)())
    assert 0.01 < error < allowed


# ------------------------------------------------------------------------------------ the command


def run(*arguments):
    return CliRunner().invoke(command, ["--device", "cpu", "--repeats", "5", *arguments])


@pytest.mark.usefixtures("_host")
def test_the_command_times_it_apart_and_saves_it(tmp_path):
    shapes, saved = tmp_path / "s.csv", tmp_path / "b.json"
    shapes.write_text("1,2,5,7,24\n")
    common = ("--op", "attention_fp8", "--op", "attention_int8", "--shapes", str(shapes))
    done = run(*common, "--against", "torch", "--save-baseline", str(saved))
    assert done.exit_code == 0, done.output
    rows = json.loads(saved.read_text())["rows"]
    timed = {(row["op"], row["contender"]) for row in rows if row["timing"]}
    own = [name for name in OWN if "compiled" not in name]
    assert {(op, c) for op in ("attention_fp8", "attention_int8") for c in own} <= timed
    assert "B x H x Q x K x D" in done.output
    assert ("attention_int8", "quantkit, static scales", "1x2x5x7x24") in load_baseline(
        saved
    ).p50_us
    again = run(*common, "--compare", str(saved), "--threshold", "1000")
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(
    ("op", "shapes"), [("gemm_fp8", "sd15"), ("attention_fp8", "other")], ids=str
)
def test_groups_without_shapes_of_the_operation_are_refused(op, shapes):
    done = run("--op", op, "--shapes", shapes)
    assert isinstance(done.exception, ArtefactError)
    axes = OPERATIONS[op].problem.kind.axes
    assert str(done.exception) == f"shapes '{shapes}': none of {op}, expected {axes}"
