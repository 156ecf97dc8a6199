"""Commands whose streams are closed, or cannot be written to, and whose umask forbids nothing."""

import os
import shlex
import subprocess
import sys

import pytest

#: From what is printed at once to what is packed in threads.
COMMANDS = {
    "--version": 0,
    "recipes --json": 0,
    "inspect {pipeline}": 2,
    "verify nowhere": 2,
    "pack {pipeline} -r fp8 -o {output}": 0,
}


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow if "-r" in c else ()) for c in COMMANDS]
)
@pytest.mark.parametrize(
    "streams", [">&-", "2>&-", "<&- >&- 2>&-", "1</dev/null 2</dev/null", "2>/dev/full"]
)
def test_closed_streams_change_no_exit_code(pipeline_dir, tmp_path, command, streams):
    words = command.format(pipeline=pipeline_dir, output=tmp_path / "out").split()
    if "full" in streams:
        words += ["-q"] * (words[0] == "pack")
    line = shlex.join([sys.executable, "-m", "quantkit", *words])
    ran = subprocess.run(
        ["/bin/sh", "-c", f"umask 0; {line} {streams}"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == COMMANDS[command], ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout == "" or "2>" in streams
    for path in tmp_path.rglob("*"):
        assert not path.stat().st_mode & 0o002, path
    assert (tmp_path / "out" / "unet").is_dir() == command.startswith("pack")
    # What is printed must not end in a file that got the number of a closed stream.
    for name in ("model_index.json", "unet/config.json") if command.startswith("pack") else ():
        assert (tmp_path / "out" / name).read_text().startswith("{")


def test_umask_is_given_back():
    from quantkit.cli.standard_streams import closed_to_others

    before = os.umask(0)
    try:
        with closed_to_others():
            assert os.umask(0o002) == 0o002
        assert os.umask(0) == 0
    finally:
        os.umask(before)
