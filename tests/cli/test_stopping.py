"""The line after Ctrl-C or a crash: a command that goes on, as it stands."""

import os
import shlex

import pytest

from quantkit import cli
from quantkit.cli.stopping import goes_on
from quantkit.workflow import calibrate
from tests.project.test_docs import parse

LINES = [
    ("calibrate model m -r int8 -o {}", ".out.part-1-of-1", "--resume"),
    ("run int8 m -o {}", "out/run.json", "--resume"),
    ("recover m --masks k -o {}", "out.recovery.safetensors", "--resume"),
    ("recover m --masks k -o {}", "out.recovery.html", "--force"),
    ("eval report m packed --watch -o {}", "out/report.html", "--force"),
    ("-v pack m --set 'calibration.steps=8' -o {}", "out.other", ""),
    ("run int8 m --resume -o {}", "out/run.json", ""),
    ("recover m --force --output={}", "out.recovery.html", ""),
    ("sparsify m -o {}", "", ""),
]


@pytest.mark.parametrize(("line", "file", "more"), LINES)
def test_a_stopped_run_goes_on_as_it_stands(line, file, more, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = shlex.split(line.format(tmp_path / "out"))
    assert goes_on(cli.quantkit, words) == shlex.join(["quantkit", *words])
    if not file:
        return
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    told = shlex.split(goes_on(cli.quantkit, words))
    assert sorted(told) == sorted(["quantkit", *words, *([more] if more else [])])
    parse([word for word in told[1:] if word != "-v"], whole=True)
    # What an earlier run left is none of this one's.
    os.utime(path, (1e9, 1e9))
    assert goes_on(cli.quantkit, words) == shlex.join(["quantkit", *words])


@pytest.mark.parametrize("line", ["", "packs m -o x", "inspect x", "pack m -o", "pack m --no -o x"])
def test_nothing_is_told_where_no_command_goes_on(line):
    assert goes_on(cli.quantkit, shlex.split(line)) == ""


def test_processes_of_a_launcher_tell_nothing(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert goes_on(cli.quantkit, ["pack", "m", "-o", "x"]) == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom"), MemoryError()])
def test_the_line_is_printed(error, tmp_path, monkeypatch, capsys, pipeline_dir):
    def stopped(*_, output, **__):
        (tmp_path / f".{output.name}.part-1-of-1").touch()
        raise error

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(calibrate, "calibrate", stopped)
    output = tmp_path / "a b.safetensors"
    crashed = RuntimeError if isinstance(error, RuntimeError) else SystemExit
    with pytest.raises(crashed) as caught:
        cli.main(["calibrate", "model", str(pipeline_dir), "-o", str(output)])
    told = f"calibrate model --resume {pipeline_dir} -o '{output}'"
    assert capsys.readouterr().err.endswith(f"quantkit: stopped; continue with: quantkit {told}\n")
    code = getattr(caught.value, "code", None)
    assert code == {KeyboardInterrupt: 130, MemoryError: 1}.get(type(error))
