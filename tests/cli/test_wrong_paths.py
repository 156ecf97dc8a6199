"""A path that is not there is refused before anything heavy is imported."""

import subprocess
import sys

import pytest

#: Runs a command and says what it has imported.
CODE = """
import sys
from quantkit.cli import main
try:
    main(sys.argv[1:])
finally:
    print(*{"torch", "numpy", "diffusers", "transformers", "pydantic", "rich"} & set(sys.modules))
"""
NOWHERE = "no such directory, and not a hub id"
NO_DIRECTORY = "found neither model_index.json nor config.json"
WRONG = [
    *(
        (f"{command} {{}} -o out", NOWHERE)
        for command in (
            "pack", "sparsify", "recover", "calibrate model",
            "calibrate hessian", "calibrate sensitivity", "export", "run fp8",
        )
    ),
    ("eval report {} packed -o out", NOWHERE),
    ("recipes {}", NOWHERE),
    ("inspect {}", NO_DIRECTORY),
    ("verify {}", NO_DIRECTORY),
    ("doctor {}", NO_DIRECTORY),
    ("pack . -o out --calibration {}", "missing"),
    ("pack . -o out --masks {}", "missing"),
    ("calibrate model . -o out --prompts {}", "missing"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[words for words, _ in WRONG])
def test_a_wrong_path_is_refused_at_once(tmp_path, arguments, message):
    wrong = str(tmp_path / "nowhere")
    command = [sys.executable, "-c", CODE, *arguments.format(wrong).split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"quantkit: error: {wrong}: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout.strip() == ""
