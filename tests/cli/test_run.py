"""``quantkit run`` and ``quantkit eval report``: both pipelines, from prompts to the report."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from quantkit.errors import InputError, NonFiniteError, OutputError

NO_NETWORKS = ("--lpips-weights", "none", "--clip", "none", "--quiet")


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("a red ball\na blue box\na tree, 3 cats\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def ran(pipeline_dir, prompt_file, tmp_path_factory):
    """``quantkit run fp8-sparse`` on the tiny pipeline: calibration, masks, packed, report."""
    from quantkit.cli.run_command import run

    folder = tmp_path_factory.mktemp("run") / "out"
    recipe = folder.parent / "quick.yaml"
    recipe.write_text(
        "name: quick\nsparsity: {method: wanda}\ngates: {ssim: -1.0}\n"
        "calibration: {prompts: 2, steps: 2, buckets: 1}\n"
    )
    arguments = (
        recipe,
        pipeline_dir,
        "-o",
        folder,
        "--prompts",
        prompt_file,
        "--steps",
        3,
        "--count",
        3,
        "--json",
    )
    result = CliRunner().invoke(run, [*map(str, arguments), *NO_NETWORKS])
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout)


def test_run_writes_every_artefact_and_the_report_it_prints(ran):
    folder, printed = ran
    assert {path.name for path in folder.iterdir()} == {
        "calibration.safetensors", "masks.safetensors", "packed", "report", "run.json", "run.log",
    }  # fmt: skip
    assert json.loads((folder / "report" / "report.json").read_text()) == printed
    assert printed["compression"] == "quantized and 2:4"
    assert printed["run"]["dtype"] == "float32"
    assert printed["gates"][0]["limit"] == -1.0


def test_run_takes_second_moments_where_the_recipe_needs_them(pipeline_dir, prompt_file, tmp_path):
    """All that is chosen from activations at once: GPTQ, SparseGPT, scales per bucket."""
    from quantkit.cli.run_command import run

    recipe, folder = tmp_path / "all.yaml", tmp_path / "out"
    recipe.write_text(
        "name: all\nweight: {observer: mse, rounding: gptq}\n"
        "activation: {mode: static, buckets: 2}\n"
        'keep: ["*"]\noverrides: [{layers: ["mid_block.attentions.*"], keep: false}]\n'
        "sparsity: {method: sparsegpt}\ngates: {ssim: -1.0}\n"
        "calibration: {prompts: 2, steps: 2, buckets: 2}\n"
    )
    arguments = (recipe, pipeline_dir, "-o", folder, "--prompts", prompt_file, "--steps", 2)
    options = ("--no-noise-floor", "--json")
    result = CliRunner().invoke(run, [*map(str, arguments), *options, *NO_NETWORKS])
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == {
        "calibration.safetensors", "hessians", "masks.safetensors", "packed", "report", "run.json",
        "run.log",
    }  # fmt: skip
    config = json.loads((folder / "packed" / "unet" / "config.json").read_text())
    schemes = config["quantization_config"]["schemes"]
    assert config["quantization_config"]["format_version"] == 1
    assert all(len(s["buckets"]) == 1 for s in schemes)
    assert any(s["sparsity"] == "2:4" for s in schemes)
    # What it was given back through kernels is what reference makes of it.
    assert json.loads(result.stdout)["kernels"]["worst_deviation"] < 1e-4


def test_report_tells_what_ran_every_layer(ran):
    _, printed = ran
    kernels, layers = printed["kernels"], printed["layers"]
    packed = [row for row in layers if row["weight_error"] is not None]
    assert len(packed) > 40
    assert {row["backend"] for row in packed} == set(kernels["calls_by_backend"])
    # Every packed layer multiplies once in each of 3 steps; one batch of 3 prompts. Keys and values
    # of the prompts are kept from the second on.
    kept = [row for row in packed if row["name"].endswith((".attn2.to_k", ".attn2.to_v"))]
    products = 3 * len(packed) - len(kept)
    # Each quantizes its input.
    assert kernels["total_calls"] == 2 * products
    assert kernels["worst_deviation"] == max(row["deviation"] for row in packed)
    assert 0 <= kernels["worst_deviation"] < 1e-4
    assert "were computed again on reference" in kernels["watched"]
    # 2:4 of Gaussian weights loses 0.3 of the norm by magnitude; Wanda and FP8 add to it.
    sparse = [row for row in packed if "2:4" in row["format"]]
    assert all(0.2 < row["weight_error"] < 0.7 for row in sparse)
    assert all(row["output_error"] > 0 for row in packed)
    assert all(row["bytes_after"] < row["bytes_before"] for row in packed)


def test_run_needs_no_force_to_refuse_and_plans_dry(ran, pipeline_dir, tmp_path):
    from quantkit.cli.run_command import run

    folder, _ = ran
    again = CliRunner().invoke(run, ["fp8", str(pipeline_dir), "-o", str(folder), *NO_NETWORKS])
    assert isinstance(again.exception, OutputError)
    dry = CliRunner().invoke(run, ["fp8", str(pipeline_dir), "-o", str(tmp_path / "x"), "-n"])
    assert dry.exit_code == 0, dry.output
    assert "would write packed/, report/, run.log, run.json into" in dry.output
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("count", "given", "compared", "warned"),
    [
        (None, [f"p{i}" for i in range(40)], [f"p{i}" for i in range(24, 40)], None),
        (None, ["p0", "p1", "p2", "p0"], ["p2"], None),
        (None, ["p0", "p1"], ["p0", "p1"], "2 of the 2 prompts"),
        (3, ["p0", "p1", "p2"], ["p0", "p1", "p2"], "2 of the 3 prompts"),
    ],
    ids=["bounded", "repeated", "all seen", "counted"],
)
def test_run_compares_what_calibration_did_not_see(
    pipeline_dir, tmp_path, caplog, count, given, compared, warned
):
    from quantkit.workflow.evaluate import EvaluationSettings
    from quantkit.workflow.run import RunPlan, run

    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "name: r\nactivation: {mode: static}\ncalibration: {prompts: 2, steps: 2, buckets: 1}\n"
    )
    settings = EvaluationSettings(prompts=given, count=count)
    output = tmp_path / "out"
    plan = run(
        pipeline_dir, recipe=recipe, output=output, settings=settings, device="cpu", dry_run=True
    )
    assert isinstance(plan, RunPlan)
    assert list(plan.pictures.prompts) == compared
    assert f"evaluation: {len(compared)} prompts, 20 steps" in repr(plan)
    assert [warned in message for message in caplog.messages] == [True] * (warned is not None)


def test_run_logs_its_steps(ran):
    log = (ran[0] / "run.log").read_text()
    assert re.search(r"INFO pack.*: \d+ done in [0-9.]+ s\n", log)
    assert re.search(r"INFO ended after [0-9.]+ s\n$", log)


@pytest.fixture
def stopped(pipeline_dir, prompt_file, tmp_path, monkeypatch):
    """A run that was stopped after its masks, and what starts it; the cache is the test's own."""
    from quantkit.workflow import build
    from quantkit.workflow.evaluate import EvaluationSettings
    from quantkit.workflow.run import run

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = tmp_path / "quick.yaml"
    recipe.write_text(
        "name: quick\nsparsity: {method: wanda}\ngates: {ssim: -1.0}\n"
        "calibration: {prompts: 2, steps: 2, buckets: 1}\n"
    )
    settings = EvaluationSettings(
        prompts=prompt_file, steps=1, without=("lpips", "clip"), noise_floor=False
    )

    def start(**more):
        told = []
        run(pipeline_dir, recipe=recipe, output=tmp_path / "out", device="cpu",
            **{"settings": settings, **more}, tell=told.append)  # fmt: skip
        return told

    with monkeypatch.context() as patch:
        patch.setattr(build, "pack", lambda *_, **__: sys.exit(143))
        with pytest.raises(SystemExit):
            start()
    return tmp_path / "out", start


def test_a_run_that_was_stopped_goes_on(stopped, monkeypatch):
    from quantkit.workflow import build

    folder, start = stopped
    assert {path.name for path in folder.iterdir()} == {
        "calibration.safetensors", "masks.safetensors", "run.json", "run.log",
    }  # fmt: skip
    assert "SystemExit: 143" in (folder / "run.log").read_text()
    with pytest.raises(OutputError, match="exists already"):
        start()
    monkeypatch.setattr(build, "calibrate", None)
    monkeypatch.setattr(build, "choose_masks", None)
    assert "recipe quick: goes on with" in start(resume=True)[0]
    assert (folder / "report" / "report.html").exists()
    # All is there now: the report alone is made again.
    monkeypatch.setattr(build, "pack", None)
    start(resume=True)


@pytest.mark.parametrize("other", ["prompts", "recipe", "record"])
def test_a_run_goes_on_with_its_own_artefacts_only(stopped, tmp_path, other):
    from quantkit.workflow.evaluate import EvaluationSettings

    folder, start = stopped
    more = {}
    if other == "prompts":
        more["settings"] = EvaluationSettings(prompts=["x", "y", "z"], without=("lpips", "clip"))
    elif other == "recipe":
        recipe = tmp_path / "quick.yaml"
        recipe.write_text(recipe.read_text().replace("wanda", "magnitude"))
    else:
        (folder / "run.json").unlink()
    wanted = "run.json: missing" if other == "record" else f"of another {other}.*; set force"
    with pytest.raises(OutputError, match=wanted):
        start(resume=True, **more)


@pytest.mark.slow
def test_a_run_says_what_it_will_do_and_how_long_it_took(stopped):
    _, start = stopped
    first, second = start(force=True), start(force=True)
    assert first[0].startswith("recipe quick: writes calibration.safetensors, masks.safetensors")
    assert first[-1] == "evaluation: 1 prompts, 1 steps"
    assert second[:-1] == first
    assert re.fullmatch(r"last time all of it took 0:\d\d:\d\d", second[-1])


def test_a_run_that_has_no_room_is_refused_first(stopped, monkeypatch):
    folder, start = stopped
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match=r"1\.00 kB free, expected"):
        start(force=True)
    assert not (folder / "packed").exists()


def eval_report(*arguments):
    from quantkit.cli.evaluate_command import evaluate

    return CliRunner().invoke(evaluate, ["report", *map(str, arguments), *NO_NETWORKS])


@pytest.mark.parametrize(
    "quiet", [(), pytest.param(("-q",), marks=pytest.mark.exhaustive)], ids=["told", "quiet"]
)
def test_a_watched_report_tells_of_the_worst_pair(ran, pipeline_dir, tmp_path, quiet):
    from quantkit.cli.evaluate_command import evaluate

    given = (
        "report", pipeline_dir, ran[0] / "packed", "-o", tmp_path / "out", "--watch", "--count", 2,
        "--batch", 1, "--steps", 1, "--no-noise-floor", "--lpips-weights", "none", "--clip", "none",
    )  # fmt: skip
    result = CliRunner().invoke(evaluate, [*map(str, given), *quiet])
    assert result.exit_code in {0, 1, 3}, result.output
    assert "http-equiv" not in (tmp_path / "out/report.html").read_text(encoding="utf-8").replace(
        'http-equiv="Content-Security-Policy"', ""
    )
    told = [line for line in result.stderr.splitlines() if "so far" in line or "filling" in line]
    if quiet:
        assert told == []
    else:
        assert told[0] == f"filling {tmp_path / 'out/report.html'}"
        assert told[1].startswith("1 of 2 pictures so far; worst pair, 000: SSIM ")


def test_run_measures_noise_floor_and_steps(ran):
    _, printed = ran
    dtype, batch = printed["noise_floor"]
    assert dtype["title"] == "BF16 instead of float32"
    assert batch["title"] == "batches of 1 instead of 3"
    fine, coarse = (f["comparison"]["metrics"]["mse"]["summary"]["mean"] for f in (batch, dtype))
    # other batches change the order of float32 sums only: nothing that 8 bits can show
    assert 0 <= fine < 1e-7 < coarse < 1e-3
    divergence, local = printed["timesteps"]["divergence"], printed["timesteps"]["local"]
    assert len(divergence["mean"]) == len(local["mean"]) == 3
    assert divergence["timesteps"] == local["timesteps"] == sorted(local["timesteps"])[::-1]
    # one-shot 2:4 of random weights: far above BF16, whose unit roundoff squared is 1.5e-5
    assert divergence["mean"][-1] > 10 * dtype["divergence"]["mean"][-1] > 1e-9
    assert all(1e-4 < error < 10 for error in local["mean"])
    assert divergence["count"] == 3
    assert local["count"] == 4


def test_run_says_which_recipe_and_how_sparse(ran):
    packing = ran[1]["packing"]
    assert packing["recipe"] == "quick"
    assert packing["sparse"] <= packing["packed"] < packing["layers"]
    assert 0.3 < packing["pruned"] < 0.5


def original_pipeline(path):
    import torch

    from quantkit.models.source import open_model
    from quantkit.pipelines.running import load_pipeline

    return load_pipeline(open_model(str(path)), torch.device("cpu"))


def test_batch_size_does_not_change_the_noise(pipeline_dir):
    from quantkit.eval.measuring.generation import generate, make_settings

    pipe = original_pipeline(pipeline_dir)
    made_by = {
        batch: generate(
            pipe,
            make_settings(
                ["a ball", "a box", "a cat"], steps=2, guidance=None, seed=7, batch=batch
            ),
            label="original",
        ).pictures
        for batch in (1, 2, 3)
    }
    for batch in (2, 3):
        for one, other in zip(made_by[1], made_by[batch], strict=True):
            # only the rounding of another batch size remains
            assert np.abs(one.astype(int) - other).max() <= 1
    assert np.abs(made_by[1][0].astype(int) - made_by[1][1]).max() > 20


def test_eval_report_fails_with_1_and_warns_of_a_foreign_original(ran, prompt_file, tmp_path):
    from tests.support.pipelines import tiny_pipeline

    other = tiny_pipeline(tmp_path / "other", seed=5)
    result = eval_report(
        other, ran[0] / "packed", "-o", tmp_path / "r", "--prompts", prompt_file,
        "--count", 3, "--steps", 1, "--gate", "ssim=1",
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    assert "SSIM is" in result.output
    found = json.loads((tmp_path / "r" / "report.json").read_text())
    assert found["verdict"]["passed"] is False
    foreign, few = found["warnings"]
    assert "not made from this original" in foreign
    assert "3 prompts are few" in few


def test_eval_report_names_the_reference_when_no_kernel_runs(
    ran, pipeline_dir, prompt_file, tmp_path
):
    from quantkit.device.backends import Backend, use

    with use(Backend.REFERENCE):
        result = eval_report(
            pipeline_dir, ran[0] / "packed", "-o", tmp_path / "r", "--prompts", prompt_file,
            "--count", 1, "--steps", 1, "--gate", "ssim=-1",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "report.html" in result.output
    found = json.loads((tmp_path / "r" / "report.json").read_text())
    assert set(found["kernels"]["calls_by_backend"]) == {"reference"}
    assert any("ran on reference, not on quantkit's kernels" in line for line in found["warnings"])
    assert found["kernels"]["worst_deviation"] == 0.0


def test_eval_report_refuses_what_makes_no_pictures(ran, pipeline_dir, prompt_file, tmp_path):
    common = ("-o", tmp_path / "r", "--prompts", prompt_file)
    alone = eval_report(pipeline_dir / "unet", ran[0] / "packed", *common)
    assert re.search("component alone cannot make pictures", str(alone.exception))
    few = eval_report(pipeline_dir, ran[0] / "packed", *common, "--count", 9)
    assert re.search("3 prompts, expected 9", str(few.exception))
    component = eval_report(pipeline_dir, ran[0] / "packed" / "unet", *common)
    assert isinstance(component.exception, InputError)
    assert not (tmp_path / "r").exists()


def test_pictures_with_nan_name_pipeline_and_prompt(pipeline_dir):
    import torch
    from quantkit.eval.measuring.generation import generate, make_settings

    pipe = original_pipeline(pipeline_dir)
    torch.nn.init.constant_(pipe.vae.decoder.conv_out.bias, float("nan"))
    settings = make_settings(["a ball"], steps=1, guidance=None, seed=0, batch=1)
    with pytest.raises(NonFiniteError, match=r"packed, prompt 0 \('a ball'\): \d+ of \d+ values"):
        generate(pipe, settings, label="packed")


@pytest.mark.parametrize(
    ("prompts", "steps", "wanted"),
    [([], 1, "no prompts"), (["a", " "], 1, "prompt 1: empty"), (["a"], 0, "steps 0")],
)
def test_settings_that_make_no_pictures_are_refused(prompts, steps, wanted):
    from quantkit.eval.measuring.generation import make_settings

    with pytest.raises(InputError, match=wanted):
        make_settings(prompts, steps=steps, guidance=None, seed=0, batch=1)
