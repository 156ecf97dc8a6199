"""``quantkit demo`` on small stand-ins for the bundled networks: the whole path in seconds."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from quantkit.eval.demo import MARK, describe_kernels

from quantkit.cli.demo import demo
from quantkit.errors import OutputError, PromptError


@pytest.fixture(scope="module")
def assets(pipeline_dir, tmp_path_factory):
    """A folder like eval/assets: pipeline, clip, alexnet, prompts.txt; random weights."""
    from quantkit.eval.world.alexnet import FeatureNetwork, save_feature_network
    from tiny_clip import tiny_clip

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
    monkeypatch.setattr("quantkit.eval.demo.demo_assets", lambda: assets)
    monkeypatch.setattr("quantkit.resources.demo_assets", lambda: assets)
    # Two steps instead of twelve, and so fewer timestep buckets than the recipes' four.
    quick = {"prompts": 2, "steps": 2, "batch": 2, "guidance": 4.0, "buckets": 1}
    monkeypatch.setattr("quantkit.eval.demo.CALIBRATION_RUN", quick)

    def run(*arguments):
        return CliRunner().invoke(demo, ["--prompts", "2", "--steps", "2", *map(str, arguments)])

    return run


def test_demo_makes_everything_and_replaces_what_an_earlier_one_made(small_demo, tmp_path):
    output = tmp_path / "demo-output"
    output.mkdir()
    for name in (MARK, "stale"):
        (output / name).write_text("from an earlier demo")
    result = small_demo("-o", output, "--json")
    # Random networks may fail the gates of FP8; that is exit code 1, not an error.
    assert result.exit_code in {0, 1}, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    found = json.loads(result.stdout)
    assert set(found["reports"]) == {"fp8-static", "fp8-sparse"}
    fp8, sparse = found["reports"]["fp8-static"], found["reports"]["fp8-sparse"]
    assert result.exit_code == (0 if fp8["verdict"]["passed"] else 1)
    assert (fp8["compression"], sparse["compression"]) == ("FP8", "FP8 and 4:2")
    assert sparse["packed"]["nbytes"] < fp8["packed"]["nbytes"] < fp8["original"]["nbytes"]
    assert fp8["comparison"]["metrics"]["lpips"]["backbone"] == "quantkit demo AlexNet"
    assert fp8["comparison"]["clip"]["backbone"] == "quantkit demo CLIP"
    assert fp8["comparison"]["clip"]["original"] == sparse["comparison"]["clip"]["original"]
    assert {path.name for path in output.iterdir()} == {
        ".quantkit-demo", "calibration.safetensors", "masks.safetensors", "index.html",
        "packed-fp8-static", "packed-fp8-sparse", "report-fp8-static", "report-fp8-sparse",
    }  # fmt: skip
    assert [floor["name"] for floor in fp8["noise_floor"]] == ["dtype", "batch"]
    # one run of the original, and of its floors, for both
    assert fp8["noise_floor"][0]["comparison"] == sparse["noise_floor"][0]["comparison"]
    page = (output / "index.html").read_text(encoding="utf-8")
    assert "noise floor: the original with BF16 instead of float32" in page
    for link in ("report-fp8-static/report.html", "report-fp8-sparse/images/packed/001.png"):
        assert link in page
        assert (output / link).is_file()
    assert "kernels: " in result.stderr
    assert "pack and verify: 4:2 and FP8" in result.stderr


def test_demo_without_noise_floor_runs_the_original_once(small_demo, tmp_path):
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
    assert "was not made by the demo" in str(result.exception)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_demo_has_only_so_many_prompts(small_demo, tmp_path):
    result = small_demo("-o", tmp_path / "x", "--prompts", 99)
    assert isinstance(result.exception, PromptError)
    assert "the demo has 10" in str(result.exception)
    assert not (tmp_path / "x").exists()


def test_demo_says_why_no_kernel_runs(monkeypatch):
    monkeypatch.setattr(
        "quantkit.device.backends._why_not_here", lambda device: "no C++ compiler was found"
    )
    assert describe_kernels() == "reference, because no C++ compiler was found"
