"""``quantkit calibrate``: its file, and its dry run."""

import json

import torch
from click.testing import CliRunner

from quantkit.calibration.statistics.layer_statistics import load_calibration
from quantkit.cli.calibrate_command import calibrate as calibrate_command
from quantkit.cli.inspect_command import inspect as inspect_command
from quantkit.errors import OutputError


def run(*arguments):
    return CliRunner().invoke(calibrate_command, ["model", *map(str, arguments)])


def test_command_writes_a_calibration(pipeline_dir, tmp_path):
    output, prompts = tmp_path / "c.safetensors", tmp_path / "p.txt"
    prompts.write_text("a\nb\n")
    changes = ("--set", "calibration.steps=4", "--set", "calibration.seed=3")
    options = ("--prompts", prompts, *changes, "--device", "cpu", "--json", "-q")
    result = run(pipeline_dir, "-o", output, *options)
    assert result.exit_code == 0, result.output
    said, stored = json.loads(result.stdout), load_calibration(output)
    assert (said["prompts"], said["steps"], said["edges"]) == (2, 4, list(stored.edges))
    assert set(said["components"]["unet"]["layers"]) == set(stored.layers["unet"])
    assert stored.metadata.seed == 3
    shown = CliRunner().invoke(inspect_command, [str(output)])
    assert shown.exit_code == 0, shown.output
    for name, statistics in stored.attention["unet"].items():
        assert f"unet/{name}" in shown.stdout
        assert f"{float(statistics.q_amax.amax()):.4g}" in shown.stdout
    (row, *rest) = json.loads(CliRunner().invoke(inspect_command, [str(output), "--json"]).stdout)[
        "attention"
    ]
    statistics = stored.attention["unet"][row["name"]]
    assert len(rest) + 1 == len(stored.attention["unet"])
    assert (row["heads"], row["columns"]) == tuple(statistics.k_mean.shape[1:])
    assert row["q_amax"] == statistics.q_amax.amax(0).tolist()
    spread = torch.maximum(statistics.k_high, -statistics.k_low)
    assert row["k_amax"] == spread.amax((0, 2)).tolist()
    assert isinstance(run(pipeline_dir, "-o", output).exception, OutputError)


def test_dry_run_writes_nothing(pipeline_dir, tmp_path):
    output = tmp_path / "c.safetensors"
    result = run(pipeline_dir, "-o", output, "--dry-run", "--count", 5)
    assert result.exit_code == 0, result.output
    assert "nothing written" in result.stdout
    assert "82" in result.stdout
    assert not list(tmp_path.iterdir())
