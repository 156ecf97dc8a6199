"""The fuzzer of ``tests/fuzz``: 250 damaged files and not one fault; and that it finds faults."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def fuzz(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_damaged_files_are_refused_in_one_line_or_harmless(tmp_path):
    ran = fuzz("--cases", 250, "--jobs", 2, "--json", tmp_path / "cases.json")
    cases = json.loads((tmp_path / "cases.json").read_text()) if ran.returncode < 2 else []
    assert len(cases) == 250, ran.stderr
    assert not [case for case in cases if case["failed"]], ran.stdout
    # Damage that harms nothing, and damage that is seen, are both among them.
    verdicts = {case["verdict"] for case in cases}
    assert verdicts == {"ok", "refused"}


@pytest.fixture(scope="module")
def judged():
    """What the judge says of commands that end in each of the ways that are faults."""
    code = """
import json, sys, time
from tests.fuzz.running import Ran
from tests.fuzz.judging import judge
rows = json.loads(sys.argv[1])
print(json.dumps([judge(Ran(("verify",), *row))[0].value for row in rows]))
"""
    ends = {
        "refused": (2, "", "quantkit: error: a.json: damaged\n"),
        "ok": (0, "a: ok\n", ""),
        "two lines": (2, "", "quantkit: error: a\nb\n"),
        "too long": (2, "", f"quantkit: error: {'x' * 500}\n"),
        "colour": (2, "", "quantkit: error: \x1b[31m\n"),
        "turned round": (2, "", "quantkit: error: \u202etxt.exe\n"),
        "colour of what is ok": (0, "\x1b[31m: ok\n", ""),
        "something of success": (2, "half of it\n", "quantkit: error: a\n"),
        "warning": (0, "ok\n", "UserWarning: a\n"),
        "traceback": (1, "", "", "Traceback ...\nKeyError: 'a'\n"),
        "other code": (1, "", "quantkit: error: a\n"),
    }
    ran = subprocess.run(
        [sys.executable, "-c", code, json.dumps(list(ends.values()))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(ends, json.loads(ran.stdout), strict=True))


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        ("refused", "refused"),
        ("ok", "ok"),
        ("two lines", "message"),
        ("too long", "message"),
        ("colour", "message"),
        ("turned round", "message"),
        ("colour of what is ok", "message"),
        ("something of success", "message"),
        ("warning", "message"),
        ("traceback", "traceback"),
        ("other code", "exit code"),
    ],
)
def test_judge_tells_faults_from_refusals(judged, end, verdict):
    assert judged[end] == verdict


# Faults put into the process: that they are counted is what makes the zero above mean something.

FAULTS = {
    "hang": "import time; time.sleep(60)",
    "crash": "import os; os.abort()",
    "memory": "x = b'a' * (5 << 28)",
    "traceback": "raise KeyError('a')",
    "another model": "return",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_counted(fault, tmp_path):
    code = f"""
import sys
from pathlib import Path
import quantkit.checkpoint.reader
from tests.fuzz import attempt, cases, families, pool, running

pool.PATIENCE = pool.WALL = {2 if fault == "hang" else 20}

@running.cli.quantkit.command("fault")
def fault():
    {FAULTS[fault]}

family = families.Family(
    "fault", (cases.Kind("all", lambda scene: None),), lambda scene, place: [["fault"]],
    lambda scene, place, whole, refused: (cases.Verdict.ANOTHER, ""),
)
attempt.KINDS["fault/all"] = (family, family.kinds[0])
root = Path(sys.argv[1])
(root / "subjects" / "fault" / "one").mkdir(parents=True)
(root / "subjects" / "whole.json").write_text("{{}}")
some = [cases.Case("fault/all", seed) for seed in range(2)]
print([o.verdict.value for o in pool.run_cases(some, root / "subjects", root / "cases", 1)])
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    # Both: what failed first keeps nothing from being run after it.
    assert ran.stdout.strip() == str([fault] * 2), ran.stderr
