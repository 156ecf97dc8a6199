"""The file that a card's owner sends: what is in it, and what is not."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from quantkit.bench.kernels.kernel_shapes import AttentionShape, Shape
from quantkit.cli import quantkit
from quantkit.errors import ModelError
from quantkit.workflow import bundle


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bundle, "_OPERATIONS", ("gemm_int8", "attention_int8"))
    shapes = (Shape(16, 16, 64), AttentionShape(1, 1, 16, 32, 64))
    monkeypatch.setattr(bundle, "_shapes_of", lambda _: shapes)


def test_a_bundle_names_no_user_no_host_and_no_folder(small, tmp_path, monkeypatch):
    home = tmp_path / "home" / "planted.user"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "planted_login")
    monkeypatch.setenv("QUANTKIT_CACHE_DIR", str(home / "planted folder" / "cache"))
    monkeypatch.setattr("platform.node", lambda: "planted-host.example")
    path = tmp_path / "card.json"
    result = CliRunner().invoke(quantkit, ["doctor", "--device", "cpu", "--bundle", str(path)])
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert "planted.user" not in text
    assert "planted_login" not in text
    assert "planted-host" not in text
    assert str(tmp_path) not in text
    found = json.loads(text)
    assert [row["verdict"] for row in found["kernels"]["rows"]] == ["timed", "timed"]
    assert found["doctor"]["torch"] == torch.__version__
    assert found["model"] is None
    assert "on a CPU" in found["no_model"]
    again = CliRunner().invoke(quantkit, ["doctor", "--bundle", str(path)])
    assert isinstance(again.exception, Exception)
    assert path.read_text() == text


def test_texts_lose_names_and_keep_figures(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/Ann Lee"))
    values = {
        "ann": ["ann: /home/Ann Lee/.cache/kernels, 3 kernels", 1.5, None, True],
        "why": "open /mnt/ann-data/x.so: no such file; see https://example.org/a/b; 2/3; planner",
    }
    assert bundle._without_names(values, ("ann",)) == {
        "ann": ["...: kernels, 3 kernels", 1.5, None, True],
        "why": "open x.so: no such file; see https://example.org/a/b; 2/3; planner",
    }


@pytest.mark.parametrize(
    "error",
    [torch.cuda.OutOfMemoryError("too large"), ModelError("too large"), OSError("too large")],
)
def test_a_step_that_does_not_fit_is_left_out_with_its_reason(error, monkeypatch):
    def fails(**_):
        raise error

    monkeypatch.setattr(bundle, "bench_model", fails)
    model, why = bundle._time_step(torch.device("cuda"), lambda *_: None)
    assert model is None
    assert "too large" in why
