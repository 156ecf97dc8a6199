"""What reaches the terminal: one printable line for every error, and the exit code of every end."""

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import time
import unicodedata
import warnings
from pathlib import Path

import click
import pytest

from quantkit import cli
from quantkit.cli import options
from quantkit.cli.console import (
    echo,
    one_line,
    print_error,
    print_table,
    print_verdict,
    printable,
    progress_bar,
)
from quantkit.cli.library_noise import NOISE, without_noise
from quantkit.cli.rate_column import show_rate
from quantkit.errors import KernelError, ModelError

FULL = Path("/dev/full")
HOSTILE = "a\x1b[31m\nquantkit: ok\r\x07\x9b2J\u202egnp.\ud800\u2028[/red] :smile: é 日本"


def test_names_are_escaped_and_letters_are_not():
    assert printable(HOSTILE) == (
        r"a\x1b[31m\nquantkit: ok\r\x07\x9b2J\u202egnp.\ud800\u2028[/red] :smile: é 日本"
    )


def test_no_control_character_survives():
    everything = "".join(map(chr, range(0x3000)))
    kept = printable(everything)
    assert not {unicodedata.category(c) for c in kept} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@pytest.mark.parametrize("length", [0, 1, 499, 500, 501, 10_000])
def test_messages_keep_their_beginning_and_their_end(length):
    text = ("/path: what " + "x" * length + " cure")[-length:] if length else ""
    line = one_line(text)
    assert len(line) == min(length, 500)
    assert line[:300] == text[:300]
    assert line[-190:] == text[-190:]


def test_escapes_count_as_letters():
    assert len(one_line("\0" * 400)) == 500


def test_tables_and_progress_take_names_as_they_are(capsys):
    print_table(HOSTILE, ("name", "[bold]"), [(HOSTILE, 1.0)])
    with progress_bar(quiet=False) as progress:
        progress(HOSTILE, 0, 1)
        progress(HOSTILE, 1, 1)
    echo(HOSTILE, HOSTILE)
    print_error(HOSTILE)
    captured = capsys.readouterr()
    assert captured.out.count(printable(HOSTILE)) == 4
    for text in captured:
        assert all(c.isprintable() or c == "\n" for c in text)
    assert len(captured.err.splitlines()[-1:]) == 1
    assert captured.err.splitlines()[-1].startswith(r"quantkit: error: a\x1b[31m\nquantkit: ok")


@pytest.mark.parametrize(
    ("speed", "told"),
    [(None, ""), (0.0, ""), (12.34, "12.3/s"), (1.0, "1.0/s"), (0.04, "25.0 s each")],
)
def test_rates_are_told_in_the_unit_that_reads_well(speed, told):
    assert show_rate(speed) == told


def test_a_bar_shows_rate_and_time(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar(quiet=False) as progress:
        for done in range(5):
            progress("pack", done, 4)
    last = click.unstyle(capsys.readouterr().err).splitlines()[-1]
    assert re.search(r"pack .* 4/4 +[0-9.]+(/s| s each) +0:00:0", last)


def test_a_row_is_one_line_where_nobody_sees_a_width(capsys):
    name = "down_blocks.0.attentions.0." * 20
    print_table("Layers", ("layer", "why"), [(name, "its error reaches every layer, " * 10)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert name in lines[-1]


def test_quiet_prints_no_table_and_what_came_of_it(command):
    @click.command("test")
    @options.quiet
    def body(quiet):
        del quiet
        print_table("Layers", ("layer",), [("conv_in",)])
        print_verdict("PASS: all", passed=True)

    assert command(body, "-q") == (0, "PASS: all\n", "")
    assert "conv_in" in command(body)[1]


@pytest.mark.parametrize(("passed", "colour"), [(True, "32"), (False, "31"), (None, "33")])
def test_verdict_is_one_line_in_colour_on_a_terminal(monkeypatch, capsys, passed, colour):
    print_verdict("x" * 200, passed=passed)
    assert capsys.readouterr().out == "x" * 200 + "\n"
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    print_verdict(f"[red]\x1b{passed}", passed=passed)
    shown = capsys.readouterr().out
    assert f"{colour}m[red]\\x1b{passed}" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("name", NOISE)
def test_only_the_known_lines_of_other_libraries_are_held_back(name, caplog):
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)
    try:
        with without_noise():
            logger.warning("%s and what follows", NOISE[name][0])
            logger.warning("the checkpoint is damaged")
        logger.warning(NOISE[name][0])
    finally:
        logger.removeHandler(caplog.handler)
    assert set(caplog.messages) == {"the checkpoint is damaged", NOISE[name][0]}


def test_deprecations_inside_other_libraries_are_held_back_and_others_are_not():
    modules = ("diffusers.models.unet", "transformers", "diffusersx", "quantkit.cli")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with without_noise():
            for module in modules:
                warnings.warn_explicit(module, FutureWarning, "file.py", 1, module=module)
    assert [str(warning.message) for warning in caught] == ["diffusersx", "quantkit.cli"]


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command of the test's own through ``main``; return exit code, stdout and stderr."""

    def run(body, *arguments):
        made = body if isinstance(body, click.Command) else click.command("test")(body)
        monkeypatch.setitem(cli.quantkit.commands, "test", made)
        with pytest.raises(SystemExit) as caught:
            cli.main(["test", *arguments])
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return run


def nested(depth=0):
    return nested(depth + 1)


def failing(error):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (failing(ModelError("x: no\nmodel")), 2, r"x: no\nmodel"),
        (failing(KernelError("no compiler")), 1, "no compiler"),
        (failing(click.UsageError("no \x1b[31m")), 2, r"no \x1b[31m"),
        (failing(FileNotFoundError(2, "No such file", "a\nb")), 2, r"a\nb: No such file"),
        (failing(OSError("We could\nnot connect")), 2, "We could not connect"),
        (failing(OSError(errno.ENOSPC, "No space left")), 2, "No space left; free some space"),
        (failing(OSError(errno.EDQUOT, "Quota", "x")), 2, "x: Quota; free some space"),
        (failing(OSError(errno.EFBIG, "Too large", "x")), 2, "x: Too large; raise 'ulimit -f'"),
        (failing(OSError(errno.EMFILE, "Too many", "x")), 2, "x: Too many; raise 'ulimit -n'"),
        (nested, 2, "nested too deep"),
        (failing(MemoryError()), 1, "out of memory"),
        (failing(ModelError("x" * 10_000)), 2, "x ... x"),
    ],
)
def test_errors_are_one_line(command, body, code, words):
    found, out, err = command(body)
    assert (found, out) == (code, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("quantkit: error: ")
    assert words in err
    assert len(err) <= 500 + len("quantkit: error: \n")


def test_a_typing_error_is_one_line_too(capsys):
    for arguments in (
        ["pack"],
        ["pakc"],
        ["pack", "x", "--bad\n"],
        ["verify"],
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        captured = capsys.readouterr()
        assert caught.value.code == 2
        assert len(captured.err.splitlines()) == 1, captured.err
        assert "--help'." in captured.err


def test_without_a_command_the_commands_are_listed(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code in {0, 2}
    assert "Commands:" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "names", [(), ("pack",), ("eval",), ("eval", "report"), ("calibrate", "model"), ("help",)]
)
def test_help_command_prints_what_the_option_prints(capsys, names):
    shown = []
    for arguments in (["help", *names], [*names, "--help"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


@pytest.mark.parametrize("names", [("pakc",), ("pack", "x"), ("eval", "repo")])
def test_help_of_no_command_is_a_line(capsys, names):
    with pytest.raises(SystemExit) as caught:
        cli.main(["help", *names])
    assert caught.value.code == 2
    assert f"No such command '{' '.join(names)}'" in capsys.readouterr().err


def test_verbose_shows_what_is_logged_at_info(monkeypatch, capsys):
    body = click.command("test")(lambda: logging.getLogger("quantkit.x").info("why"))
    monkeypatch.setitem(cli.quantkit.commands, "test", body)
    for options_given, told in ((["-v"], "quantkit: info: why\n"), ([], "")):
        with pytest.raises(SystemExit):
            cli.main([*options_given, "test"])
        assert capsys.readouterr().err == told


def test_exit_codes_of_commands_are_passed_on(command):
    assert command(lambda: None)[0] == 0
    assert command(lambda: sys.exit(1))[0] == 1
    assert command(failing(KeyboardInterrupt())) == (130, "", "\nquantkit: interrupted\n")


def test_what_the_library_warns_of_is_a_line(command):
    code, out, err = command(lambda: logging.getLogger("quantkit.x").warning("a\x1b%s", "b"))
    assert (code, out, err) == (0, "", "quantkit: warning: a\\x1bb\n")
    assert not logging.getLogger("quantkit").handlers


WORKER = """
import signal, sys, time
from pathlib import Path
import click
from quantkit import cli
from quantkit.cli.console import echo
from quantkit.storage.files import staged_directory

# Under nohup the one, in a shell's background the other is ignored, and stays so in what is started
# there.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

@cli.quantkit.command("wait")
@click.argument("output", type=click.Path(path_type=Path))
def wait(output):
    with staged_directory(output, kind="test", force=False) as stage:
        (stage / "half").write_text("half")
        echo("ready")
        sys.stdout.flush()
        time.sleep(60)

@cli.quantkit.command("lines")
def lines():
    for _ in range(20_000):
        echo("x" * 50)

cli.main(sys.argv[1:])
"""


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, *map(str, arguments)], text=True, stderr=subprocess.PIPE,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_drop_what_is_half_written(tmp_path, number, code):
    with start("wait", tmp_path / "out", stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == code
        # click leaves the line of ^C.
        assert process.stderr.read().strip() == ("quantkit: interrupted" if code == 130 else "")
    assert not list(tmp_path.iterdir())


def test_a_reader_that_has_enough_ends_it_quietly():
    read, write = os.pipe()
    with start("lines", stdout=write) as process:
        os.close(write)
        os.read(read, 10)
        os.close(read)
        assert process.wait(60) == 141
        assert process.stderr.read() == ""


@pytest.mark.skipif(not FULL.exists(), reason="Linux's device that is always full")
def test_a_full_disk_behind_stdout_is_one_line():
    with FULL.open("w", encoding="utf-8") as full, start("lines", stdout=full) as process:
        assert process.wait(60) == 2
        assert process.stderr.read().splitlines() == [
            "quantkit: error: No space left on device; free some space, or choose another path"
        ]
