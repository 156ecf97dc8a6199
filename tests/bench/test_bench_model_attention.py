"""The model benchmark with attention on codes: twins of contenders, and why one has none."""

import json
from collections import Counter

import pytest
import torch
from click.testing import CliRunner

from quantkit.bench.kernels import timing
from quantkit.bench.kernels.figures import Verdict
from quantkit.bench.models.judging import Eager, judge_attention
from quantkit.bench.models.model_attention import why_not_used
from quantkit.bench.models.model_contenders import MODEL_CONTENDERS
from quantkit.cli.bench_model_command import model_command
from quantkit.device.backends import Backend, use
from quantkit.device.log import KernelLog
from quantkit.workflow.bench import ModelBenchSettings
from quantkit.workflow.bench import bench_model as run_bench
from tests.support.pipelines import tiny_unet


@pytest.fixture(autouse=True)
def _once(monkeypatch):
    """Measure one round: times are not under test."""
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 1)


def run(folder, *names, attention, min_keys=1, static_scales=False):
    settings = ModelBenchSettings(
        batch=1, size=8, attention=attention, min_keys=min_keys, static_scales=static_scales
    )
    result = run_bench(
        str(folder), settings=settings, contenders=names, device="cpu", repeats=5, seconds=0
    )
    return {row.contender: row for row in result.rows}


@pytest.mark.usefixtures("_host")
def test_contenders_run_with_attention_and_without(unet_dir):
    rows = run(unet_dir, "f16", "fp8", attention=("e4m3fn", "int8"))
    assert list(rows) == [
        "f16", "f16-e4m3fn-attention", "f16-int8-attention",
        "fp8", "fp8-e4m3fn-attention", "fp8-int8-attention",
    ]  # fmt: skip
    assert all(row.timing for row in rows.values()), rows
    modules = sum(n.endswith(("attn1", "attn2")) for n, _ in tiny_unet().named_modules())
    calls = {name: row.calls for name, row in rows.items()}
    assert calls["f16"] == {}
    codes = {"head_codes_int8 host": 2 * modules, "value_codes_fp8 host": modules}
    scales = {"head_partials host": modules, "head_factors_int8 host": modules}
    assert calls["f16-int8-attention"] == {"attention_int8 host": modules, **scales, **codes}
    # Queries of the picture and keys of the text are not as many.
    own = modules // 2
    codes = {"stream_codes_fp8 host": own, "head_codes_fp8 host": modules}
    scales = {"head_partials host": modules, "head_factors_fp8 host": modules}
    mine = {"attention_fp8 host": modules, "value_codes_fp8 host": own, **scales, **codes}
    assert calls["fp8-e4m3fn-attention"] == {**mine, **calls["fp8"]}
    assert 0 < rows["f16-int8-attention"].error < rows["f16-e4m3fn-attention"].error < 0.03
    # Weights are shared, and no less than the others'.
    assert rows["fp8-e4m3fn-attention"].of_f16 == rows["fp8"].of_f16


@pytest.mark.usefixtures("_host")
def test_static_scales_let_packed_projections_end_in_codes(unet_dir):
    row = run(unet_dir, "fp8", attention=("e4m3fn",), static_scales=True)["fp8-e4m3fn-attention"]
    assert row.timing, row
    selves = sum(n.endswith("attn1") for n, _ in tiny_unet().named_modules())
    calls = {name.partition(" ")[0]: count for name, count in row.calls.items()}
    assert calls["project_heads_fp8"] == calls["project_values_fp8"] == selves
    assert calls["attention_fp8"] == 2 * selves
    assert not {"head_codes_fp8", "value_codes_fp8"} & set(calls)


@pytest.mark.usefixtures("_host")
def test_static_scales_let_sparse_projections_end_in_codes(unet_dir):
    row = run(unet_dir, "sparse", attention=("e4m3fn",), static_scales=True)
    row = row["sparse-e4m3fn-attention"]
    assert row.timing, row
    selves = sum(n.endswith("attn1") for n, _ in tiny_unet().named_modules())
    calls = {name.partition(" ")[0]: count for name, count in row.calls.items()}
    assert calls["project_heads_fp8_sparse"] == selves
    assert calls["attention_fp8"] == 2 * selves
    # Values of the text have no kernel that ends in codes.
    assert calls["value_codes_fp8"] == selves


@pytest.mark.parametrize("fmt", ["e4m3fn", "int8"])
def test_attention_that_ends_in_codes_is_attention(fmt):
    kind = "fp8" if fmt == "e4m3fn" else fmt
    for op in (f"attention_{kind}", f"attention_{kind}_codes"):
        assert not why_not_used(fmt, 512, KernelLog(Counter({(op, "", Backend.GPU): 1})))
    others = KernelLog(Counter({("stream_codes_fp8", "", Backend.GPU): 1}))
    assert "no processor" in why_not_used(fmt, 512, others)


def test_where_there_is_no_kernel_nothing_is_timed_twice(unet_dir):
    with use(Backend.REFERENCE):
        plain, twin = run(unet_dir, "f16", attention=("int8",)).values()
    assert plain.timing
    assert (twin.verdict, twin.timing) == (Verdict.CANNOT, None)
    assert twin.reason == "attention is torch's: asked for"


@pytest.mark.usefixtures("_host")
def test_where_no_module_uses_the_kernel_nothing_is_timed_twice(unet_dir):
    plain, twin = run(unet_dir, "f16", attention=("int8",), min_keys=4096).values()
    assert plain.timing
    assert twin.verdict is Verdict.CANNOT
    assert "no processor had 4096 keys or more" in twin.reason


def test_torchao_has_no_twin(unet_dir, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "quantkit.workflow.bench.run_model_bench",
        lambda denoiser, contenders, *_, **__: seen.extend(c.name for c in contenders),
    )
    run_bench(
        str(unet_dir),
        settings=ModelBenchSettings(batch=1, size=4, attention=("int8",)),
        contenders=("torchao-compiled", "int8"),
    )
    assert seen == ["torchao-compiled", "int8", "int8-int8-attention"]


@pytest.mark.usefixtures("_host")
@pytest.mark.parametrize("name", ["f16", "fp8"])
def test_wrong_attention_is_not_timed(unet_dir, monkeypatch, name):
    from quantkit.inference.attention.attention_ends import HeadProduct

    right = HeadProduct.wide
    monkeypatch.setattr(HeadProduct, "wide", lambda product: -3 * right(product))
    plain, twin = run(unet_dir, name, attention=("e4m3fn",)).values()
    assert plain.timing
    assert twin.verdict is Verdict.WRONG


def test_attention_may_cost_what_the_noise_of_layers_costs():
    generator = torch.Generator().manual_seed(0)
    original, noise, other = (torch.randn(1000, generator=generator) for _ in range(3))
    plain = Eager(original + 0.2 * noise, 0.0)
    near, far = (Eager(plain.output + part * other, 0.0) for part in (0.25, 0.4))
    assert judge_attention(near, plain, Eager(original, 0.0)).right
    assert not judge_attention(far, plain, Eager(original, 0.0)).right
    assert not judge_attention(far, Eager(original, 0.0), Eager(original, 0.0)).right


@pytest.mark.usefixtures("_host")
def test_the_command_records_it_by_name(unet_dir, tmp_path):
    saved = tmp_path / "m.json"
    done = CliRunner().invoke(
        model_command,
        [
            "--config", str(unet_dir), "--size", "8", "--device", "cpu", "--contenders", "f16",
            "--attention", "int8", "--min-keys", "1", "--repeats", "5", "--seconds", "0",
            "--save", str(saved),
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    values = json.loads(saved.read_text())
    assert [row["contender"] for row in values["rows"]] == ["f16", "f16-int8-attention"]
    assert (values["settings"]["attention"], values["settings"]["min_keys"]) == (["int8"], 1)


def test_names_stay_apart():
    names = [
        c.with_attention(f).name for c in MODEL_CONTENDERS.values() for f in ("e4m3fn", "int8")
    ]
    assert len({*names, *MODEL_CONTENDERS}) == 3 * len(MODEL_CONTENDERS)
