"""The shape of the code: imports go one way, the package list is whole, modules stay small."""

import ast
import graphlib
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]

#: A module may import from its own layer and from those before it.
LAYERS = (
    ("_version", "errors", "resources", "progress"),
    ("storage",),
    ("numerics",),
    ("device",),
    ("recipe",),
    ("models",),
    ("fusion",),
    ("pipelines",),
    ("calibration",),
    ("sparsity",),
    ("checkpoint",),
    ("interchange",),
    ("packing",),
    ("inference",),
    ("recovery",),
    ("sensitivity",),
    ("bench",),
    ("eval",),
    ("workflow",),
    ("comfyui",),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MODULES = sorted([*ROOT.glob("quantkit/**/*.py"), *ROOT.glob("eval/**/*.py")])


def layer_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "eval" if parts[0] == "eval" else parts[1] if len(parts) > 1 else ""


def imported_layers(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom | ast.Import):
            continue
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "quantkit" and len(parts) > 1 and parts[1] in RANK:
                yield parts[1], node.lineno


def test_every_module_has_a_layer():
    layers = {layer_of(path) for path in MODULES}
    assert layers - RANK.keys() <= {"__init__", "__main__"}


def test_imports_go_one_way():
    late = [
        f"{path}:{line} imports {other}"
        for path in MODULES
        if layer_of(path) in RANK
        for other, line in imported_layers(path)
        if RANK[other] > RANK[layer_of(path)]
    ]
    assert not late


def test_modules_stay_under_300_lines_of_code():
    """Docstrings, comments and blank lines do not count: to explain costs nothing."""
    texts = {path: path.read_text(encoding="utf-8") for path in MODULES}
    assert not [p for p, text in texts.items() if text.count("\n") > 300 < len(code_lines(text))]


#: Folders of tests that are not named like a package.
OTHER_FOLDERS = {"project", "fuzz", "mutation", "support", "golden", "standin"}
TESTS = sorted(ROOT.glob("tests/**/*.py"))


def test_tests_stand_in_the_folder_of_a_package():
    paths = [path.relative_to(ROOT / "tests") for path in TESTS]
    folders = {path.parent for path in paths} - {Path()}
    assert not {str(folder) for folder in folders} - RANK.keys() - OTHER_FOLDERS
    alone = {path.name for path in paths if path.parent == Path()}
    assert alone == {"__init__.py", "conftest.py"}


def test_folders_of_tests_are_packages():
    """Without __init__.py, mypy finds two modules of one name, and pytest helpers of others."""
    assert not {path.parent for path in TESTS} - {
        path.parent for path in TESTS if path.name == "__init__.py"
    }


def test_test_files_stay_under_600_lines():
    assert not [p for p in TESTS if p.read_text(encoding="utf-8").count("\n") > 600]


def test_property_tests_are_the_same_in_every_run_and_know_no_clock():
    from hypothesis import settings

    for name in ("repeatable", "drawn"):
        assert settings.get_profile(name).deadline is None
        assert settings.get_profile(name).derandomize == (name == "repeatable")
    assert settings().deadline is None
    said = subprocess.run(
        ["make", "--dry-run", "nightly"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--hypothesis-profile drawn --hypothesis-seed 20" in said.stdout


def test_mutants_are_shown_to_tests_that_are_there():
    table = yaml.safe_load((ROOT / "tests/mutation/table.yaml").read_text(encoding="utf-8"))
    for group in table["groups"].values():
        assert all((ROOT / "tests" / path).exists() for path in group["tests"])
        assert all(any(ROOT.glob(modules)) for modules in group["modules"])
    assert all((ROOT / change["path"]).exists() for change in table["equivalent"])


def code_lines(text):
    """Return the numbers of the lines that hold code."""
    tree = ast.parse(text)
    explained = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    aside = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    spans = (t for t in tokens if t.type not in aside | {tokenize.ENDMARKER})
    return {n for t in spans for n in range(t.start[0], t.end[0] + 1)} - explained


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(("quantkit", *parts) if parts[0] == "eval" else parts)
    return name.removesuffix(".__init__")


NAMES = {name_of(path): path for path in MODULES}
#: The demo runs the other commands: no import at its top could.
LATE = {("quantkit.cli.demo_command", "quantkit.cli")}


def imported_modules(name):
    """Yield the modules that one imports, in its functions too, but not for type checkers alone."""
    todo: list[ast.AST] = [ast.parse(NAMES[name].read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom):
            is_package = NAMES[name].stem == "__init__"
            above = name.split(".")[: 1 - node.level or None] if is_package else name.split(".")
            above = above if is_package else above[: -node.level]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in NAMES else base


def floors(names):
    """Return the longest chain of imports among modules that ends in each of them."""
    graph = {name: set(imported_modules(name)) & set(names) - {name} for name in names}
    found: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        found[name] = 1 + max((found[below] for below in graph[name]), default=0)
    return found


#: Rooms of rooms; what is higher than six floors is read top down by nobody.
ROOMED = ("inference", "calibration", "bench", "eval")
OPERATION = re.compile(r"quantkit\.device\.ops\.\w+\.\w+")


def test_rooms_have_at_most_six_floors_and_stand_in_one_order():
    rooms: dict[str, list[str]] = {}
    for name in NAMES:
        if name.split(".")[1:2] in [[room] for room in ROOMED] or OPERATION.match(name):
            rooms.setdefault(name.rpartition(".")[0], []).append(name)
    heights = {room: max(floors(names).values()) for room, names in rooms.items()}
    assert {room: height for room, height in heights.items() if height > 6} == {}
    graph = {}
    for room, names in rooms.items():
        below = {module.rpartition(".")[0] for name in names for module in imported_modules(name)}
        graph[room] = below & set(rooms) - {room}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_no_module_imports_itself_by_way_of_others():
    graph = {
        name: {m for m in imported_modules(name) if m in NAMES and (name, m) not in LATE} - {name}
        for name in NAMES
    }
    list(graphlib.TopologicalSorter(graph).static_order())


#: What the command line may import when it runs: jobs, and words and cells for its tables.
FOR_THE_COMMAND_LINE = (
    "quantkit.cli",
    "quantkit.workflow",
    "quantkit.errors",
    "quantkit.progress",
    "quantkit.storage.limits",
    "quantkit.storage.sizes",
    "quantkit.recipe.recommended",
    "quantkit._version",
    "quantkit.bench.kernels.operations.OPERATIONS",
    "quantkit.bench.kernels.figures.Verdict",
    "quantkit.eval.pages.methods_table",
    "quantkit.eval.pages.sentences.kernel_sentence",
    "quantkit.eval.measuring.number_format",
    "quantkit.eval.pages.tables",
    "quantkit.eval.judging.verdict.headline",
)


def imported_at_run_time(tree):
    """Yield what a module imports of quantkit, but not for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module.startswith("quantkit"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imported_at_run_time(node)


def test_the_command_line_only_parses_and_prints():
    deeper = [
        f"{path.name}: {name}"
        for path in sorted(ROOT.glob("quantkit/cli/*.py"))
        for name in imported_at_run_time(ast.parse(path.read_text(encoding="utf-8")))
        if not any(f"{name}.".startswith(f"{top}.") for top in FOR_THE_COMMAND_LINE)
    ]
    assert not deeper


def test_every_package_is_in_the_wheel():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib comes with Python 3.11")
    import tomllib  # type: ignore[import-not-found,unused-ignore]  # mypy checks for 3.10

    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = {
        ".".join(p.parent.relative_to(ROOT).parts)
        for top in ("quantkit", "kernels", "recipes", "eval")
        for p in (ROOT / top).glob("**/__init__.py")
    }
    assert {n if n.startswith("quantkit") else f"quantkit.{n}" for n in found} == listed


def test_the_mapped_folders_do_not_stand_twice():
    assert not [d for d in ("kernels", "recipes", "eval") if (ROOT / "quantkit" / d).exists()]


def test_importing_the_command_line_loads_nothing_heavy():
    heavy = {"torch", "numpy", "diffusers", "transformers", "rich", "pydantic"}
    code = f"import sys, quantkit.cli; print(*{heavy} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


def test_help_answers_at_once():
    # 0.2 s is the promise on an idle machine. One that is busy takes longer for everything: click
    # alone is what it is measured by there.
    assert cpu_seconds("-m", "quantkit", "--help") < max(0.2, 3 * cpu_seconds("-c", "import click"))


def cpu_seconds(*arguments):
    """CPU time of a Python process, the best of five."""
    seconds = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = os.times()
        spent = after.children_user + after.children_system
        seconds.append(spent - before.children_user - before.children_system)
    return min(seconds)
