"""mypy sees every call: into what the wheel maps into quantkit, and from tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WRONG = """
import quantkit
from quantkit.eval.measuring.sample_statistics import summarize
from quantkit.kernels import nonsense
from quantkit.numerics.formats import E4M3FN


def test_wrong(given):
    quantkit.evaluate(1, 2, 3, nonsense=4)
    summarize(nonsense=4)
    E4M3FN.nonsense
"""


@pytest.mark.slow
def test_wrong_calls_are_seen(tmp_path):
    places = (".types/quantkit/eval/__init__.py", "tests/eval/__init__.py")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    shadows = [word for place in places for word in ("--shadow-file", place, str(wrong))]
    command = [sys.executable, "-m", "mypy", *shadows, *places]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    errors = [line.split(":")[:2] for line in out.splitlines() if " error: " in line]
    for place in places:
        assert {4, 9, 10, 11} <= {int(line) for at, line in errors if at == place}, out


def test_everything_that_the_wheel_maps_is_checked():
    links = {path.name: path.resolve() for path in (ROOT / ".types/quantkit").iterdir()}
    assert links == {name: ROOT / name for name in ("eval", "kernels", "recipes")}
