"""Every command is documented and helps; every snippet, link and table of the docs holds."""

import ast
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from quantkit.cli import quantkit
from quantkit.device.backends import Backend, use

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("docs/**/*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "quantkit" / "checkpoint" / "FORMAT.md",
]
TEXT = "\n".join(p.read_text(encoding="utf-8") for p in PAGES)
#: Widest cell of a table, in characters.
CELL = 120
#: What a console line may begin with, besides quantkit.
PROGRAMS = {"make", "mkdir", "pip", "python", "python3", "source", "tail", "END", "print"}


@dataclass(frozen=True)
class Snippet:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fenced(page):
    """Yield the blocks of a page, with the line on which each begins."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Snippet(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])


SNIPPETS = [snippet for page in PAGES for snippet in fenced(page)]
PYTHON = [s for s in SNIPPETS if s.language == "python"]
CONSOLE = [s for s in SNIPPETS if s.language == "console"]


def shell_lines(text):
    """Return the commands of a console block: continued lines joined, input and output left out."""
    text = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def quantkit_words(words):
    """Return the words after ``quantkit``, or None for another program's line."""
    words = words[: next((i for i, w in enumerate(words) if w in {">", "|"}), len(words))]
    if words[0] == "torchrun":
        return words[words.index("quantkit") + 1 :]
    return words[1:] if Path(words[0]).name == "quantkit" else None


def find_command(words):
    """Return the command that the words name, and what is left of them."""
    command: click.Command = quantkit
    rest = list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"no command {rest[0]!r}"
        command = command.commands[rest.pop(0)]
    return command, rest


def parse(words, *, whole):
    """Parse a command line as click does, without looking for its files.

    Args:
        words: after ``quantkit``.
        whole: whether what is required has to be there.
    """
    command, rest = find_command(words)
    context = click.Context(command, info_name="quantkit")
    values, _, _ = command.make_parser(context).parse_args(rest)
    for parameter in command.params:
        value = values.get(parameter.name)
        missing = value is None or parameter.value_is_missing(value)
        assert not (whole and parameter.required and missing), f"{parameter.name} is missing"
        if not missing and isinstance(parameter.type, click.Choice):
            parameter.type_cast_value(context, value)


def commands(group=quantkit, prefix=("quantkit",)):
    for name, command in sorted(group.commands.items()):
        path = (*prefix, name)
        if isinstance(command, click.Group):
            yield from commands(command, path)
        else:
            yield pytest.param(path, command, id=" ".join(path))


@pytest.mark.parametrize(("path", "command"), commands())
def test_command_is_in_the_docs_and_helps(path, command):
    assert " ".join(path) in TEXT
    assert command.help
    # Click's mark of lines as they are is the character; two letters are printed, lines filled.
    assert "\\b" not in command.help
    undocumented = [
        p.name for p in command.params if isinstance(p, click.Option) and not (p.help or p.hidden)
    ]
    assert not undocumented


@pytest.mark.parametrize(
    ("script", "page"), [("commands", "reference/commands.md"), ("results", "notes/results.md")]
)
def test_pages_that_are_made_are_what_makes_them_says(script, page):
    # In a process of its own: a command keeps the help options of whoever called it first.
    made = subprocess.run(
        [sys.executable, "-c", f"from make_{script} import page; print(page(), end='')"],
        cwd=ROOT / "docs",
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert made == written, f"run: python docs/make_{script}.py"


@pytest.mark.slow
def test_the_page_of_models_is_that_of_the_installed_diffusers():
    import diffusers

    written = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    if f"diffusers {diffusers.__version__}." not in written:
        pytest.skip(f"the page is of another diffusers than {diffusers.__version__}")
    made = subprocess.run(
        [sys.executable, "-c", "from make_models import page; print(page(), end='')"],
        cwd=ROOT / "docs",
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    assert made == written, "run: python docs/make_models.py"


def slug(heading):
    """Return the anchor of a heading, as GitHub and mkdocs make it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", text).strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_inside_the_repository_lead_somewhere(page):
    for path, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)\s]*))?\)", page.read_text("utf-8")):
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor and (source := embedded(target)).suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", source.read_text("utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{path}#{anchor}"


def embedded(page):
    """Return the file whose text the page shows: itself, or the one that it includes."""
    found = re.match(r'--8<-- "(.*)"', page.read_text("utf-8")) if page.suffix == ".md" else None
    return ROOT / found[1] if found else page


#: A path of the repository in a sentence.
NAMED = re.compile(r"`((?:quantkit|kernels|eval|tests|docs|recipes)/[\w./-]+\.[a-z]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page):
    named = [n for n in NAMED.findall(page.read_text("utf-8")) if not re.search("[A-Z]{4}", n)]
    assert not [n for n in named if not (ROOT / n).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_table_cells_are_short(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert not [cell for cell in cells if len(cell) > CELL]


@pytest.mark.parametrize("snippet", CONSOLE, ids=str)
def test_console_lines_are_commands_that_exist(snippet):
    for words in shell_lines(snippet.text):
        mine = quantkit_words(words)
        if mine is not None:
            parse(mine, whole=True)
            continue
        program = Path(words[0]).name
        assert program in PROGRAMS, words
        if program == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


INLINE = sorted(set(re.findall(r"`((?:torchrun [^`]*-m )?quantkit [a-z][^`]*)`", TEXT)))


@pytest.mark.parametrize("text", INLINE)
def test_commands_in_sentences_exist(text):
    words = [w for w in shlex.split(text.split("...")[0].replace("\n", " ")) if w != "-"]
    mine = quantkit_words(words)
    try:
        parse(mine, whole=False)
    except click.BadOptionUsage as error:  # an option that is named without its value
        assert words[-1] == error.option_name  # noqa: PT017


@pytest.mark.parametrize("snippet", PYTHON, ids=str)
def test_python_blocks_compile_and_import_what_exists(snippet):
    tree = ast.parse(snippet.text, str(snippet))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert not [a.name for a in node.names if not hasattr(module, a.name)]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, pipeline_dir):
    """A folder in which the pages' paths exist: the bundled pipeline is a tiny one."""
    import torch

    folder = tmp_path_factory.mktemp("docs")
    assets = folder / "eval" / "assets"
    assets.mkdir(parents=True)
    (assets / "pipeline").symlink_to(pipeline_dir)
    for name in ("alexnet", "clip", "prompts.txt"):
        (assets / name).symlink_to(ROOT / "eval" / "assets" / name)
    with pytest.MonkeyPatch.context() as patch, use(Backend.REFERENCE):
        patch.chdir(folder)
        called("quantkit pack eval/assets/pipeline -o packed --quiet")
        for copy in ("sdxl", "sdxl-static"):
            shutil.copytree("packed" if copy != "sdxl" else pipeline_dir, copy)
        torch._dynamo.reset()
        yield folder


def called(line):
    result = CliRunner().invoke(quantkit, shlex.split(line)[1:])
    # 1 or 3: a gate of the report fails, or is open, as it is for two pictures of random weights.
    judged = " eval " in line and isinstance(result.exception, SystemExit)
    assert result.exit_code == 0 or (judged and result.exit_code in {1, 3}), result.exception


def smaller(line):
    """Return a command of the tutorial as a tiny pipeline can follow it.

    Two pictures of four steps; they have 16 pixels a side, too few for the network of LPIPS.
    """
    line = re.sub(r"(steps[ =])\d+", r"\g<1>4", re.sub(r"--count \d+", "--count 2", line))
    return re.sub(r"--lpips-weights \S+", "--lpips-weights none", line)


@pytest.mark.slow
def test_tutorial_runs_from_its_first_command_to_its_last(workplace):
    page = ROOT / "docs" / "tutorial.md"
    workplace.joinpath("tutorial").mkdir()
    for snippet in (s for s in SNIPPETS if s.page == page):
        if snippet.language == "python":
            run(snippet)
        elif snippet.language == "console":
            for words in shell_lines(snippet.text):
                if words[0] == "quantkit":
                    called(smaller(shlex.join([*words, "--quiet"])))
    for made in ("cross.png", "fp8-report/report.html", "sparse-report/report.html"):
        assert (workplace / "tutorial" / made).is_file()


#: What the tutorial says of a report: the mean SSIM, and the exit code.
VERDICTS = re.compile(r"\b(0\.\d{3})\b(?:[^`]|`[^`]*`)*?exit code (\d)")


@pytest.mark.slow
@pytest.mark.exhaustive  # ten minutes and more
@pytest.mark.timeout(3600)
def test_tutorial_as_it_stands_gives_what_it_says(tmp_path, monkeypatch):
    page = ROOT / "docs" / "tutorial.md"
    text = page.read_text("utf-8")
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    (tmp_path / "tutorial").mkdir()
    monkeypatch.chdir(tmp_path)
    found, output = [], ""
    lines = [line for s in SNIPPETS if s.page == page and s.language == "console"
             for line in shell_lines(s.text) if line[0] == "quantkit"]  # fmt: skip
    for _, *words in lines:
        done = CliRunner().invoke(quantkit, words)
        output += done.stdout
        if words[:2] == ["eval", "report"]:
            file = Path(words[words.index("-o") + 1], "report.json")
            ssim = next(
                g
                for g in json.loads(file.read_text(encoding="utf-8"))["gates"]
                if g["metric"] == "ssim"
            )
            found.append((ssim["found"], done.exit_code))
        else:
            assert done.exit_code == 0, done.output
    told = [(float(ssim), int(code)) for ssim, code in VERDICTS.findall(text)]
    assert [code for _, code in found] == [code for _, code in told]
    # Processors round sums differently, and eight pictures differ by it: 0.818 and 0.824 were seen.
    assert [ssim for ssim, _ in found] == pytest.approx([ssim for ssim, _ in told], abs=1e-2)
    for shown in ("unet: 16.8 MB -> 9.40 MB (55.8%)", "15.7 MB -> 14.1 MB (89.8%)"):
        assert shown in text
        assert shown in output
    assert "30 of 118 layers" in text
    assert "30 of 118 layers masked" in output
    assert "118 packed layers" in output


def test_the_tutorial_tells_two_verdicts():
    text = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
    assert [code for _, code in VERDICTS.findall(text)] == ["0", "1"]


def run(snippet):
    scope = {"__name__": "snippet"}
    exec(compile(snippet.text, str(snippet), "exec"), scope)
    return scope


#: Pages whose Python runs as it stands on a tiny pipeline.
PYTHON_RUNS = {"load.md", "pack.md", "tour.md", "tutorial.md"}
#: Pages whose commands run, and pages whose commands and Python are parsed alone, with the reason.
COMMANDS_RUN = {"tutorial.md"}
NOT_RUN = {
    "README.md": "published models; a card",
    "attention.md": "a published model on a card",
    "benchmark.md": "minutes of timing on a card",
    "calibrate.md": "a published model, for minutes",
    "comfyui.md": "files that are downloaded, and ComfyUI",
    "evaluate.md": "two folders of pictures, other tools' files, LPIPS and CLIP from the network",
    "export.md": "published models; other programs that read what is written",
    "gguf.md": "files that are downloaded",
    "import.md": "files that are downloaded",
    "install.md": "what it installs",
    "pack.md": "published models; its Python runs",
    "python.md": "a published model",
    "sensitivity.md": "a published model, for minutes",
    "recover.md": "minutes of training on a GPU",
    "sparsify.md": "a published model, for minutes",
    "text_encoders.md": "published text encoders",
    "vae.md": "a published pipeline",
    "kernels.md": "compilers and a card",
    "methods.md": "an H200, for hours",
    "results.md": "an H200, for hours",
    "tour.md": "a published model; its Python runs",
}
RUNNABLE = [s for s in PYTHON if s.page.name in PYTHON_RUNS - COMMANDS_RUN]


def test_every_page_with_commands_runs_or_says_why_not():
    lines = [s for s in CONSOLE if any(words[0] == "quantkit" for words in shell_lines(s.text))]
    commands_of, python_of = ({s.page.name for s in found} for found in (lines, PYTHON))
    assert {*commands_of - COMMANDS_RUN, *python_of - PYTHON_RUNS} == NOT_RUN.keys()


@pytest.mark.parametrize("snippet", RUNNABLE, ids=str)
def test_snippets_run_and_print_what_the_page_shows(snippet, workplace, capsys):
    run(snippet)
    printed = capsys.readouterr().out
    following = snippet.page.read_text("utf-8").split(snippet.text)[1]
    shown = re.match(r"```\n+```text\n(.*?)```", following, re.DOTALL)
    if shown:
        assert printed == shown[1]


def test_every_exported_name_has_a_docstring_for_the_reference():
    import quantkit as package

    assert package.__all__
    assert all(getattr(package, name).__doc__ for name in package.__all__)
