"""The command line: one module per command; importing it loads nothing heavy."""

import atexit
import errno
import gc
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click

from quantkit._version import __version__
from quantkit.cli import (
    bench_command,
    bench_model_command,
    cache_command,
    calibrate_command,
    demo_command,
    doctor_command,
    evaluate_command,
    export_command,
    help_command,
    hessian_command,
    import_command,
    inspect_command,
    kernels_command,
    optimize_command,
    pack_command,
    recipes_command,
    recover_command,
    run_command,
    sensitivity_command,
    sparsify_command,
    verify_command,
)
from quantkit.cli.console import ReaderGoneError, Warnings, print_error, printable
from quantkit.cli.library_noise import without_noise
from quantkit.cli.standard_streams import closed_to_others, drop_output, open_streams
from quantkit.cli.stopping import goes_on, has_kept
from quantkit.errors import QuantkitError

_STDOUT_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
#: Windows has neither.
_SIGPIPE, _SIGHUP = getattr(signal, "SIGPIPE", 13), getattr(signal, "SIGHUP", None)
_CURES = {
    errno.ENOSPC: "free some space, or choose another path",
    errno.EDQUOT: "free some space, or choose another path",
    errno.EFBIG: "raise 'ulimit -f', or choose another path",
    errno.EMFILE: "raise 'ulimit -n'",
    errno.ENFILE: "close other programs",
    errno.EACCES: "change its permissions, or choose another path",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="quantkit")
@click.option(
    "-v", "--verbose", is_flag=True, help="Say more: why a kernel was refused, what was cached."
)
def quantkit(verbose: bool) -> None:
    """Pack diffusers pipelines to FP8, INT8, INT4 and 2:4 sparsity, and prove what it cost."""
    if verbose:
        logging.getLogger("quantkit").setLevel(logging.INFO)


calibrate_command.calibrate.add_command(sensitivity_command.sensitivity)
calibrate_command.calibrate.add_command(optimize_command.optimize)
calibrate_command.calibrate.add_command(hessian_command.hessian)
quantkit.add_command(calibrate_command.calibrate)
quantkit.add_command(sparsify_command.sparsify)
quantkit.add_command(recover_command.recover)
quantkit.add_command(pack_command.pack)
quantkit.add_command(export_command.export)
quantkit.add_command(import_command.import_)
quantkit.add_command(inspect_command.inspect)
quantkit.add_command(verify_command.verify)
quantkit.add_command(evaluate_command.evaluate)
quantkit.add_command(run_command.run)
kernels_command.kernels.add_command(bench_command.bench)
quantkit.add_command(kernels_command.kernels)
quantkit.add_command(bench_model_command.bench)
quantkit.add_command(recipes_command.recipes)
quantkit.add_command(doctor_command.doctor)
quantkit.add_command(cache_command.cache)
quantkit.add_command(demo_command.demo)
quantkit.add_command(help_command.help_command)


def options_of(error: QuantkitError) -> str:
    """Return the options that would cure an error, in brackets."""
    known: dict[str | None, str] = {}
    for command in walk(quantkit):
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                told = "/".join((parameter.opts[-1], *parameter.secondary_opts))
                known[parameter.name] = told
                known[parameter.opts[-1].strip("-").replace("-", "_")] = told
    keys = {name: f"--set {name}=..." for name in error.fields if "." in name}
    named = [(known | keys)[name] for name in error.fields if name in known or name in keys]
    return f" ({', '.join(named)})" if named else ""


def walk(group: click.Group) -> Iterator[click.Command]:
    """Yield every command below a group."""
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from walk(command)
        else:
            yield command


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.

    With 0; 1 for work that failed; 2 for bad input, or a file that cannot be read or written; 130
    after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP; 141 when nobody reads the output any more.
    """
    open_streams()
    atexit.register(_leave_the_rest)
    warnings, logger = Warnings(), logging.getLogger("quantkit")
    level = logger.level
    logger.addHandler(warnings)
    try:
        with _ended_by_signals(), without_noise(), closed_to_others():
            code = _run(arguments)
    finally:
        logger.removeHandler(warnings)
        logger.setLevel(level)
    sys.exit(code)


def _leave_the_rest() -> None:
    """Let what is left die with the process: looking through it for cycles would take longer."""
    # Triton's binding would report what nobody looked through as leaks, in 30 lines.
    if "triton" not in sys.modules:
        gc.freeze()


def _run(arguments: list[str] | None) -> int:
    """Return the exit code; print an error on one line."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = quantkit(args=arguments, prog_name="quantkit", standalone_mode=False)
        sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt):
        again = goes_on(quantkit, words)
        text = f"stopped; continue with: {again}" if again else "interrupted"
        click.echo(f"quantkit: {printable(text)}", err=True)
        return 128 + signal.SIGINT
    except (ReaderGoneError, BrokenPipeError):
        drop_output()
        return 128 + _SIGPIPE
    except (QuantkitError, click.ClickException, OSError, RecursionError, MemoryError) as error:
        code = _explain(error)
        _say_kept(words)
        return code
    except Exception:
        _say_kept(words)
        raise
    return code if isinstance(code, int) else 0


def _say_kept(words: list[str]) -> None:
    """Say how to go on after an error, where something was kept for that."""
    again = goes_on(quantkit, words)
    if has_kept(again):
        click.echo(f"quantkit: stopped; continue with: {printable(again)}", err=True)


def _explain(error: BaseException) -> int:
    """Print an error and return its exit code."""
    context: click.Context | None = getattr(error, "ctx", None)
    # Newer than the oldest click that serves.
    if context and isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        click.echo(context.get_help(), err=True)
        return 2
    code = 2
    if isinstance(error, QuantkitError):
        text, code = f"{error}{options_of(error)}", error.exit_code
    elif isinstance(error, click.ClickException):
        text, code = _usage(error), error.exit_code
    elif isinstance(error, OSError):
        text = _of_system(error)
        if error.errno in _STDOUT_FULL:
            drop_output()
    elif isinstance(error, RecursionError):
        text = "the input is nested too deep for Python; simplify it"
    else:
        text, code = "out of memory; take a smaller batch or fewer threads", 1
    print_error(text)
    return code


def _usage(error: click.ClickException) -> str:
    text, context = error.format_message(), getattr(error, "ctx", None)
    return text if context is None else f"{text} See '{context.command_path} --help'."


def _of_system(error: OSError) -> str:
    """Return the system's message, its file, and the cure where there is one."""
    if error.errno is None:
        return " ".join(str(error).split())
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    where = f"{' -> '.join(names)}: " if names else ""
    cure = _CURES.get(error.errno, "")
    return f"{where}{error.strerror or error}{f'; {cure}' if cure else ''}"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let signals that end the process unwind it, so that nothing half written stays."""

    def end(number: int, frame: object) -> None:
        del frame
        # The next one ends it at once.
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, _SIGHUP):
            # nohup and launchers have their own wishes.
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
