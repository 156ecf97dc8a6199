"""``quantkit export`` to other programs than those of GGUF, for which see test_gguf."""

import json

import pytest
from click.testing import CliRunner

from quantkit.cli import main, quantkit


def run(*arguments):
    result = CliRunner().invoke(quantkit, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def packed(transformer_pipeline_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "p"
    run("pack", transformer_pipeline_dir, "-r", "fp8", "-o", folder, "-q")
    return folder


def test_what_a_conversion_costs_is_said_for_each_layer(packed, tmp_path, capsys):
    output = tmp_path / "m.safetensors"
    with pytest.raises(SystemExit) as end:
        main(["export", str(packed), "--to", "comfyui", "-o", str(output)])
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert "which ComfyUI's FP8 does not hold; pack with recipe comfyui" in text
    assert text.rstrip().endswith("(--requantize)")
    assert not output.exists()
    command = ("export", packed, "--to", "comfyui", "-o", output, "--requantize", "-q")
    said = json.loads(run(*command, "--json"))
    assert said["written"]
    assert said["worst"]["error"] == max(said["errors"].values())
    assert said["mean_error"] == pytest.approx(sum(said["errors"].values()) / len(said["errors"]))
    text = run(*command, "--force")
    assert "weights are quantized again" in text
    assert "Relative error of a weight: mean 0.0" in text


def test_codes_that_are_taken_over_are_counted(packed, tmp_path):
    text = run("export", packed, "--to", "sdnq", "-o", tmp_path / "out", "-q")
    assert "As they were packed, not rounded again: 25 weights" in text
    assert "Relative error" not in text
    assert "nothing written" in run("export", packed, "--to", "fp8r", "-o", tmp_path / "m", "-n")
    assert not (tmp_path / "m").exists()
