"""Commands that messages advise, in quotes: each is one that there is, with options that it has."""

import ast
import re
import shlex
from pathlib import Path

import click
import pytest

from quantkit.cli import quantkit as group
from quantkit.recipe.schema import Recipe
from tests.project.test_docs import parse

ROOT = Path(__file__).parents[2]
SOURCES = [p for room in ("quantkit", "eval") for p in sorted((ROOT / room).rglob("*.py"))]
#: As messages and help quote a command.
QUOTED = re.compile(r"'((?:quantkit|eval|calibrate|kernels) [^']+)'")
#: Stands for what a message fills in.
FILLED = "FILLED"
#: Keys of recipes that a message names.
KEYS = re.compile(r"(?<![\w./])(?:calibration|activation|weight|sparsity)\.[a-z_]+(?![\w./(])")


def texts(path):
    """Yield the texts of a module, with what is filled in as a word."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (str(v.value) if isinstance(v, ast.Constant) else FILLED for v in node.values)
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and id(node) not in inside:
            yield node.lineno, str(node.value)


def advised():
    """Yield each command that a text of the package quotes, with its place."""
    for path in SOURCES:
        for line, text in texts(path):
            for found in QUOTED.findall(" ".join(text.split())):
                yield pytest.param(found, id=f"{path.relative_to(ROOT)}:{line}:{found[:40]}")


ADVISED = list(advised())


def test_commands_are_found():
    assert len(ADVISED) > 50
    assert len({a.values[0] for a in ADVISED}) > 25


def whole(words):
    """Return a command's words, with one for what a message fills in or leaves to the reader."""
    words = words[1:] if words[0] == "quantkit" else words
    if words[:2] == ["calibrate", FILLED]:
        words = ["calibrate", "model", *words[2:]]
    # "'quantkit pack --masks'" names an option without its value.
    return [*words, "VALUE"] if words[-1].startswith("--") else words


@pytest.mark.parametrize("command", ADVISED)
def test_an_advised_command_parses(command):
    words = whole(shlex.split(command))
    if re.fullmatch("[A-Z]+", words[0]):
        return  # "'quantkit COMMAND'": any
    try:
        parse(words, whole="-o" in words)
    except click.UsageError as error:
        pytest.fail(f"{command}: {error}")


@pytest.mark.parametrize(
    "command", ["quantkit calibrate", "quantkit pack M --bytes 4 -o X", "quantkit packs M"]
)
def test_a_command_that_is_not_there_would_be_noticed(command):
    with pytest.raises((AssertionError, click.UsageError)):
        parse([*command.split()[1:], "--none"], whole=True)


def test_keys_of_recipes_that_messages_name_exist():
    told = (text for path in SOURCES for _, text in texts(path) if " " in text)
    named = {key for text in told for key in KEYS.findall(text)} - {"calibration.safetensors"}
    assert len(named) > 10
    known = {f"{section}.{key}" for section in ("calibration", "activation", "weight", "sparsity")
             for key in _fields(section)}  # fmt: skip
    assert named <= known


def _fields(section):
    annotation = Recipe.model_fields[section].annotation
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next(o.model_fields for o in options if hasattr(o, "model_fields"))


def test_every_example_of_help_is_one_that_parses():
    def walk(command):
        for child in getattr(command, "commands", {}).values():
            yield from walk(child)
        if hasattr(command, "example"):
            yield command

    for command in walk(group):
        parse(shlex.split(command.example)[1:], whole=True)
