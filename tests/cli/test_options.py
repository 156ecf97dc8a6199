"""Every option of every command, given nonsense: exit code 2 and one line, and no traceback."""

import os
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from PIL import Image

from quantkit import resources
from quantkit.cli import options, quantkit
from quantkit.cli.command import GROUPS, Command
from quantkit.errors import InputError
from quantkit.packing.pack_model import pack
from quantkit.progress import silent
from quantkit.recipe.load import load_recipe

#: Where commands write; what may lie there is the business of test_files.
OUTPUTS = {"bundle", "output", "masks_output", "plot", "save", "save_baseline", "scratch"}
#: Options without which others are not looked at: (command, parameter) -> more arguments.
NEEDED = {
    **{("calibrate optimize", name): {"set": "budget.ssim=0.9"}
       for name in ("model", "calibration", "hessians", "prompts", "device")},
    **{("sparsify", name): {"recover": "distill"} for name in ("prompts", "device")},
    ("eval images", "clip"): {"prompts": "prompts.txt"},
    ("doctor", "device"): {"packed": "packed"},
    ("kernels check", "compiler"): {"targets": "gfx1201"},
    ("kernels check", "ops"): {"targets": "gfx1201"},
}  # fmt: skip
#: Texts that name a file or a folder.
PATH_TEXTS = {"model", "recipe", "clip", "config", "shapes", "compiler"}


def commands(group, path=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(quantkit))
VALUES = [
    (name, parameter)
    for name, command in COMMANDS.items()
    for parameter in command.params
    if not getattr(parameter, "is_flag", False) and parameter.name not in OUTPUTS
]


def pick(*kinds):
    chosen = [(n, p) for n, p in VALUES if isinstance(p.type, kinds)]
    return pytest.mark.parametrize(
        ("name", "parameter"), chosen, ids=[f"{n}-{p.name}" for n, p in chosen]
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory, pipeline_dir, model):
    """A folder with one of everything that commands read."""
    root = tmp_path_factory.mktemp("place")
    pack(model, load_recipe("fp8"), root / "packed", calibration=None, masks=None,
         threads=1, force=False, progress=silent)  # fmt: skip
    (root / "prompts.txt").write_text("a red ball")
    for folder in ("first", "second"):
        (root / folder).mkdir()
        Image.new("RGB", (64, 64), "red").save(root / folder / "0.png")
    (root / "folder").mkdir()
    (root / "garbage").write_bytes(bytes(range(256)) * 9)
    (root / "empty").touch()
    os.mkfifo(root / "pipe")
    (root / "device").symlink_to("/dev/zero")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    (root / "model").symlink_to(pipeline_dir)
    return root


#: Values that are in order, of parameters that are required and of those that cost a download.
FILES = {
    "model": "model",
    "packed": "packed",
    "first": "first",
    "second": "second",
    "prompts": "prompts.txt",
    "output": "out",
}
USUAL = {
    "lpips_weights": str(resources.demo_assets() / "alexnet"),
    "clip": str(resources.demo_assets() / "clip"),
    "recipe": "fp8",
    "target": "gfx1201",
    "device": "cpu",
}


def arguments(name, place, given):
    """Return a command line in which what is not given is in order, as far as it is required."""
    line, positional = name.split(" "), []
    known = USUAL | {key: str(place / value) for key, value in FILES.items()}
    for parameter in COMMANDS[name].params:
        # A device is refused where nothing is recovered.
        asked = parameter.required or (parameter.name in USUAL and name != "sparsify")
        usual = known.get(parameter.name, str(place / "garbage")) if asked else None
        value = given.get(parameter.name, usual)
        if value is None:
            continue
        if isinstance(parameter, click.Argument):
            positional.append(value)
        else:
            line.append(f"{parameter.opts[-1]}={value}")
    return [*line, "--", *positional]


def refuse(name, place, parameter, value):
    more = NEEDED.get((name, parameter.name), {})
    more = {n: str(place / v) if n in FILES else v for n, v in more.items()}
    given = {**more, parameter.name: value}
    result = CliRunner().invoke(quantkit, arguments(name, place, given))
    said = (
        f"{name} {parameter.name}={value!r:.60}: {result.exception!r:.300} {result.output[-300:]}"
    )
    if isinstance(result.exception, InputError):
        text = str(result.exception).replace(value, "") if value else str(result.exception)
        assert text.isprintable(), said
        assert len(text) < 1000, said
    else:
        assert isinstance(result.exception, SystemExit), said
        assert result.exit_code == 2, said
        assert "Error: " in result.output, said
    assert not (place / "out").exists(), said


PATHS = ("missing", "folder", "garbage", "empty", "pipe", "device", "dangling", "loop", "x" * 5000)


@pytest.mark.timeout(120)
@pick(click.Path)
def test_a_path_that_is_nothing_of_the_kind(place, name, parameter):
    for path in PATHS:
        refuse(name, place, parameter, str(place / path))


@pytest.mark.timeout(120)
@pick(click.types.StringParamType)
def test_a_text_that_means_nothing(place, name, parameter):
    for text in ("", "hip", "cuda:99999999999", "../x", "a\nb", "\x1b[31m", "é", "x" * 5000):
        refuse(name, place, parameter, text)
    if parameter.name in PATH_TEXTS:
        for path in PATHS:
            refuse(name, place, parameter, str(place / path))


@pick(click.IntRange)
def test_a_whole_number_beyond_all_use(place, name, parameter):
    for text in ("", "x", "nan", "1.5", "-1", "9" * 30, "9" * 5000):
        refuse(name, place, parameter, text)


@pick(click.FloatRange, options.Finite)
def test_a_number_that_is_none(place, name, parameter):
    for text in ("", "x", "nan", "inf", "-inf", "1e999"):
        refuse(name, place, parameter, text)


def test_every_number_is_bounded_or_finite():
    plain = [
        f"{name} {parameter.name}"
        for name, parameter in VALUES
        if type(parameter.type) in {click.FloatRange, click.types.FloatParamType}
        or (isinstance(parameter.type, click.IntRange) and parameter.type.max is None)
        or type(parameter.type) is click.types.IntParamType
    ]
    assert not plain


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_is_one_of_it(name):
    command = COMMANDS[name]
    assert isinstance(command, Command)
    program, *words = shlex.split(command.example)
    assert [program, *words[: len(name.split(" "))]] == ["quantkit", *name.split(" ")]
    context = click.Context(command)
    given, rest, _ = command.make_parser(context).parse_args(words[len(name.split(" ")) :])
    assert not rest
    missing = {p.name for p in command.params if p.required} - {n for n, v in given.items() if v}
    assert not missing


def test_headings_name_options_that_there_are():
    known = {parameter.name for command in COMMANDS.values() for parameter in command.params}
    assert {name for names in GROUPS.values() for name in names} <= known


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("calibration.steps", "found no '='"),
        ("calibration.steps=[", "not YAML"),
        ("calibration.stps=1", "did you mean 'steps'"),
        ("weight=fp8", "weight: Input should be"),
        ("weight.format.x=1", "weight.format is no table"),
        ("calibration.steps=0", "calibration.steps: Input should be"),
        ("=1", "unknown key ''"),
    ],
)
def test_a_change_of_a_recipe_that_cannot_be(model, change, words):
    line = ["pack", str(model.path), "-o", "nowhere", "--set", change]
    result = CliRunner().invoke(quantkit, line)
    assert words in f"{result.output} {result.exception}"


def test_changes_of_a_recipe_are_those_of_a_file(model, tmp_path):
    """Written into a copy of the YAML file they give the same bytes."""
    text = (resources.recipes() / "fp8.yaml").read_text(encoding="utf-8")
    (tmp_path / "r.yaml").write_text(f"{text}\nkeep: [conv_in, 'down_blocks.*']\nsmooth: null\n")
    changes = ("--set", "keep=[conv_in, 'down_blocks.*']", "--set", "smooth=")
    for output, how in (("a", ("-r", str(tmp_path / "r.yaml"))), ("b", ("-r", "fp8", *changes))):
        line = ["pack", str(model.path), *how, "-o", str(tmp_path / output), "-q"]
        result = CliRunner().invoke(quantkit, line)
        assert result.exit_code == 0, result.output
    for file in (tmp_path / "a" / "unet").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / "unet" / file.name).read_bytes()


def test_changes_without_a_recipe_are_refused(model):
    line = ["export", str(model.path), "--to", "fp8r", "-o", "x", "--set", "keep=[a]"]
    result = CliRunner().invoke(quantkit, line)
    assert result.exit_code == 2
    assert "--set" in result.output
    assert "needs --recipe" in result.output


@pytest.mark.parametrize("gate", ["ssim", "ssim=", "ssim=nan", "ssim=x", "fid=1", "=1", ""])
def test_a_gate_that_cannot_be(gate):
    result = CliRunner().invoke(quantkit, ["eval", "images", "a", "b", "--gate", gate])
    assert result.exit_code == 2
    assert "expected ssim, lpips, clip, broken, changed" in result.output


def test_paths_of_the_table_are_there():
    assert Path(resources.demo_assets() / "alexnet").is_dir()
    assert {name for name, _ in NEEDED} <= set(COMMANDS)
