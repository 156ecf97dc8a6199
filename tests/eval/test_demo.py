"""``quantkit demo`` on small stand-ins for the bundled networks: the whole path in seconds."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from quantkit.eval.demo import commands as demo_commands
from quantkit.eval.demo.commands import FULL, SHORT, DemoPlan
from quantkit.eval.demo.demo_run import CAPTION_SEED, KIND, describe_attention, describe_kernels
from quantkit.eval.world.scenes import captions, draw_scenes

from quantkit.cli import quantkit
from quantkit.cli.demo_command import demo
from quantkit.errors import OutputError, PromptError
from quantkit.storage.files import claimed_directory

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def assets(pipeline_dir, tmp_path_factory):
    """A folder like eval/assets: pipeline, clip, alexnet, prompts.txt; random weights."""
    from quantkit.eval.world.alexnet import FeatureNetwork, save_feature_network

    from tests.support.tiny_clip import tiny_clip

    folder = tmp_path_factory.mktemp("demo") / "assets"
    shutil.copytree(pipeline_dir, folder / "pipeline")
    config = folder / "pipeline" / "unet" / "config.json"
    # Twice the latents: LPIPS wants pictures of 32x32.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sample_size": 16}))
    tiny_clip(folder / "clip")
    torch.manual_seed(0)
    save_feature_network(FeatureNetwork(), folder / "alexnet", {"about": "random"})
    lines = [f"a ball and {number} cats" for number in range(10)]
    (folder / "prompts.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def small_demo(assets, monkeypatch):
    monkeypatch.setattr("quantkit.eval.demo.demo_run.demo_assets", lambda: assets)
    monkeypatch.setattr("quantkit.resources.demo_assets", lambda: assets)
    # As many steps as the recipe has timestep buckets.
    quick: dict[str, Any] = {"captions": 4, "count": 2, "steps": 10, "batch": 2}
    monkeypatch.setattr("quantkit.eval.demo.commands.SHORT", replace(SHORT, **quick))

    def run(*arguments):
        return CliRunner().invoke(demo, ["--prompts", "2", "--steps", "2", *map(str, arguments)])

    return run


@pytest.mark.slow
def test_demo_makes_everything_and_replaces_what_an_earlier_one_made(small_demo, tmp_path):
    output = tmp_path / "demo-output"
    with claimed_directory(output, kind=KIND):
        (output / "stale").write_text("from an earlier demo")
    result = small_demo("-o", output, "--json")
    # Random networks may fail the gates of FP8; that is exit code 1, not an error.
    assert result.exit_code in {0, 1}, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    found = json.loads(result.stdout)
    rows = [row.compared for row in SHORT.rows]
    assert list(found["reports"]) == rows
    fp8, sparse = found["reports"]["fp8-static"], found["reports"]["budget-int8"]
    assert result.exit_code == (1 if fp8["verdict"]["state"] == "failed" else 0)
    assert (fp8["compression"], sparse["compression"]) == ("quantized", "quantized and 2:4")
    calls = {op for call in fp8["kernels"]["calls"] if (op := call["op"]).startswith("attention")}
    assert calls == ({"attention_fp8"} if describe_attention(CPU) == "host" else set())
    assert sparse["packed"]["nbytes"] < fp8["packed"]["nbytes"] < fp8["original"]["nbytes"]
    assert fp8["comparison"]["metrics"]["lpips"]["backbone"] == "quantkit demo AlexNet"
    assert fp8["comparison"]["clip"]["backbone"] == "quantkit demo CLIP"
    assert fp8["comparison"]["clip"]["original"] == sparse["comparison"]["clip"]["original"]
    assert {path.name for path in output.iterdir()} == {
        ".quantkit", "captions.txt", "calibration", "hessians", "budget.masks",
        "index.html", "methods.md", "methods.json", *rows, *(f"report-{row}" for row in rows),
    }  # fmt: skip
    assert [floor["name"] for floor in fp8["noise_floor"]] == ["dtype", "batch"]
    # one run of the original, and of its floors, for all
    assert fp8["noise_floor"][0]["comparison"] == sparse["noise_floor"][0]["comparison"]
    page = (output / "index.html").read_text(encoding="utf-8")
    assert "noise floor: the original with BF16 instead of float32" in page
    for link in ("report-fp8-static/report.html", "report-budget-int8/images/packed/001.png"):
        assert link in page
        assert (output / link).is_file()
    errors = {
        row["name"]: row["local_error"]
        for row in json.loads((output / "methods.json").read_text())["methods"]
    }
    titles = {row.compared: row.title for row in SHORT.rows}
    assert errors[titles["fp8-static"]] is None
    assert 0 <= errors[titles["budget-int8"]] < 0.005
    assert "kernels: " in result.stderr
    assert "pack: budget-int8" in result.stderr


@pytest.mark.parametrize("plan", [SHORT, FULL], ids=["short", "full"])
def test_every_row_is_made_by_commands_that_exist(plan: DemoPlan):
    made = {"captions.txt"}
    for row in plan.rows:
        for command in plan.commands(row, Path("model"), Path("a folder"), "cpu"):
            arguments = shlex.split(command)
            for word in arguments[:-1]:
                if word.startswith("a folder/"):
                    assert word.removeprefix("a folder/") in made, f"{command}: {word} is not there"
            group: click.Command = quantkit
            while isinstance(group, click.Group):
                group = group.commands[arguments.pop(0)]
            # Paths are not there yet, and click would refuse them: only the options are looked at.
            known = {option for parameter in group.params for option in parameter.opts}
            assert {word for word in arguments if word.startswith("-")} <= known, command
            output = Path(arguments[-1]).name
            made |= {output, f"{output}.masks.safetensors"}
        assert row.compared in made
    assert len({row.compared for row in plan.rows}) == len(plan.rows)


def test_no_caption_of_the_calibration_is_compared():
    from quantkit.resources import demo_assets

    compared = set((demo_assets() / "prompts.txt").read_text().splitlines())
    for plan in (SHORT, FULL):
        drawn = captions(draw_scenes(plan.captions, torch.Generator().manual_seed(CAPTION_SEED)))
        assert not compared & set(drawn)


@pytest.mark.exhaustive
def test_demo_without_noise_floor_runs_the_original_once(small_demo, tmp_path, monkeypatch):
    # Floors are the original's, whatever the rows.
    few = replace(demo_commands.SHORT, rows=SHORT.rows[:2])
    monkeypatch.setattr(demo_commands, "SHORT", few)
    result = small_demo("-o", tmp_path / "out", "--json", "--no-noise-floor")
    reports = json.loads(result.stdout)["reports"]
    assert all(report["noise_floor"] == [] for report in reports.values())
    assert all("--no-noise-floor" in report["commands"][-1] for report in reports.values())
    assert "noise floor: the original" not in (tmp_path / "out" / "index.html").read_text()
    assert "original pipeline: 1 x 2 pictures of 2 steps" in result.stderr


def test_demo_leaves_folders_alone_that_it_did_not_make(small_demo, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    result = small_demo("-o", tmp_path / "mine")
    assert isinstance(result.exception, OutputError)
    assert "which quantkit did not write" in str(result.exception)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_demo_has_only_so_many_prompts(small_demo, tmp_path):
    result = small_demo("-o", tmp_path / "x", "--prompts", 99)
    assert isinstance(result.exception, PromptError)
    assert "the demo has only 10" in str(result.exception)
    assert not (tmp_path / "x").exists()


def test_demo_says_why_no_kernel_runs(monkeypatch):
    monkeypatch.setattr(
        "quantkit.device.choosing._why_not_here", lambda *_: "no C++ compiler was found"
    )
    cpu, why = torch.device("cpu"), "because no C++ compiler was found"
    assert describe_kernels(cpu) == f"reference, {why}"
    assert describe_attention(cpu) == f"torch, {why}"
