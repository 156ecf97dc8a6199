"""``quantkit export``, and .gguf files as MODEL."""

import json

import pytest
from click.testing import CliRunner

from quantkit.cli import main, quantkit
from quantkit.cli.console import printable


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*arguments, code=0):
    result = CliRunner().invoke(quantkit, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.stdout


def failed(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def exported(transformer_pipeline_dir, tmp_path):
    path = tmp_path / "m.gguf"
    said = json.loads(
        run("export", transformer_pipeline_dir, "--to", "gguf:Q8_0", "-o", path, "--json", "-q")
    )
    assert said["written"]
    assert said["types"]["Q8_0"] == 13
    assert 0 < said["worst"]["error"] < 0.01
    return path


def test_a_file_is_packed_reported_and_written_again(exported, transformer_pipeline_dir, tmp_path):
    packed, config = tmp_path / "packed", ("--config", transformer_pipeline_dir)
    said = json.loads(run("pack", exported, *config, "-r", "gguf", "-o", packed, "--json", "-q"))
    assert said["written"]
    assert "ok" in run("verify", packed, "-q")
    report = json.loads(
        run(
            "eval", "report", exported, packed, *config, "-o", tmp_path / "report", "--count", 1,
            "--steps", 1, "--lpips-weights", "none", "--clip", "none", "--no-noise-floor",
            "--device", "cpu", "--json", "-q", code=3,
        )
    )  # fmt: skip
    # One picture decides no gate.
    assert report["verdict"]["state"] == "undecided"
    # 16-bit weights of the cache were rounded to float16, blocks were not.
    assert report["comparison"]["metrics"]["ssim"]["summary"]["mean"] > 0.999
    text = run("export", packed, "--to", "gguf:Q8_0", "-o", tmp_path / "again.gguf", "-q")
    assert "not rounded again: 13 weights" in text
    assert (tmp_path / "again.gguf").read_bytes() == exported.read_bytes()


def test_other_commands_take_the_file(exported, transformer_pipeline_dir, tmp_path):
    config = ("--config", transformer_pipeline_dir)
    output = tmp_path / "calibration.safetensors"
    run("calibrate", "model", exported, *config, "-o", output, "--count", 1,
        "--set", "calibration.steps=4", "--device", "cpu", "-q")  # fmt: skip
    said = run("pack", exported, *config, "-r", "fp8-static", "-c", output, "-o", tmp_path / "p")
    assert "e4m3fn" in said


def test_mistakes_are_said_in_one_line_with_the_option(exported, pipeline_dir, tmp_path, capsys):
    output = tmp_path / "out"
    text = failed(capsys, "pack", exported, "-o", output)
    assert "give the pipeline that the file belongs to" in text
    assert text.rstrip().endswith("(--config)")
    text = failed(capsys, "pack", pipeline_dir, "--config", pipeline_dir, "-o", output)
    assert "no file, and config goes with one" in text
    text = failed(capsys, "pack", exported, "--config", pipeline_dir, "-o", output)
    assert "holds sd3 (SD3Transformer2DModel), but" in text
    assert "(--config)" in text
    text = failed(capsys, "export", pipeline_dir, "--to", "gguf:F16", "-o", output)
    assert "expected one of comfyui, " in text
    assert "gguf:Q8_0, gguf:Q4_0 (--to)" in text
    exported.write_bytes(exported.read_bytes()[:5000])
    text = failed(capsys, "pack", exported, "--config", pipeline_dir, "-o", output)
    assert "truncated or damaged GGUF file" in text
    assert text.count("\n") == 1
    assert text == printable(text.rstrip("\n")) + "\n"
    assert not output.exists()


def test_a_dry_run_writes_no_file(pipeline_dir, tmp_path):
    text = run("export", pipeline_dir, "--to", "gguf:Q4_0", "-o", tmp_path / "m.gguf", "-n", "-q")
    assert "nothing written" in text
    assert not (tmp_path / "m.gguf").exists()
