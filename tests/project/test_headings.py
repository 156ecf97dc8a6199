"""The first line of a docstring names the thing or says what the code does."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted([*ROOT.glob("quantkit/**/*.py"), *ROOT.glob("eval/**/*.py")])
#: Question words that make a heading without a noun: "How weights become codes."
HEADLESS = re.compile(r"\s*(What|Who|Whose|Where|Whether|Which|Why|How|When)\b")
_OWNERS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def headings(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, _OWNERS) and (text := ast.get_docstring(node)):
            yield f"{path.relative_to(ROOT).as_posix()}: {text.splitlines()[0]}", text


def test_headings_name_the_thing():
    assert not [where for path in MODULES for where, text in headings(path) if HEADLESS.match(text)]
