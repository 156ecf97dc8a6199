"""Tests over a package in which one function or one module is changed.

A change inside a function is put into a fork of the process that collected the tests: a trial costs
what its tests cost. What runs while a module is imported is changed before that, in a process that
collects its tests anew. Nothing is written to the checkout, so neither Ctrl-C nor a second trial
meets a changed file; tests that start processes of their own see the package unchanged.
"""

import contextlib
import gc
import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import CodeType, FunctionType


class _Changed(importlib.machinery.SourceFileLoader):
    """Finds and loads one module from another text than its file's; leaves no bytecode behind."""

    def __init__(self, path, text, root):
        super().__init__(module_name(path), str(root / path))
        self._text = text

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname):
        return compile(self._text, self.path, "exec", dont_inherit=True)


def module_name(path):
    """Return what a file is imported as: ``eval`` installs under ``quantkit``."""
    name = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith("quantkit") else f"quantkit.{name}"


def replacements(before, after):
    """Return code -> changed code of a module's functions; None: their closures differ."""
    old, new = ([*_codes(compile(text, "", "exec", dont_inherit=True))] for text in (before, after))
    if [code.co_freevars for code in old] != [code.co_freevars for code in new]:
        return None
    return {a: b for a, b in zip(old, new, strict=True) if a != b}


def _codes(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def start(tests, root, *, seconds, change=None, plugin=None, log=os.devnull):
    """Start a trial and return its process id.

    Args:
        tests: arguments of pytest.
        root: of the repository.
        seconds: after which the process is killed by SIGALRM; 0: never.
        change: (path, text) of a module that is changed before it is imported.
        plugin: what returns a plugin of pytest.
        log: the file that takes what pytest says.
    """
    process = os.fork()
    if process:
        return process
    status = 3
    try:
        said = os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for stream in (0, 1, 2):
            os.dup2(said, stream)
        _limit(seconds)
        status = _run(tests, root, change, plugin)
    except BaseException:  # noqa: BLE001  nothing may run twice: the process is a copy
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _limit(seconds):
    """Bound the time that this process takes; its temporary files are removed after it."""
    _folder(os.getpid()).mkdir()
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_folder(os.getpid()))
    os.setpgid(0, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _folder(process):
    return Path(tempfile.gettempdir()) / f"mutant-{process}"


def _run(tests, root, change, plugin):
    import pytest

    os.chdir(root)
    if change is not None:
        path, text = change
        sys.meta_path.insert(0, _Changed(path, text, root))
    plugins = [plugin()] if plugin else []
    # pytest-timeout would take the alarm; captured output would go to files that forks share.
    options = ["-q", "-s", "-n0", "--timeout=0", "-pno:cacheprovider"]
    options += [] if any(isinstance(x, Recorder) for x in plugins) else ["-x"]
    return int(pytest.main([*options, *tests], plugins=plugins))


def wait(running):
    """Wait for any trial of those that run: (process id, "passed", "failed" or "timeout")."""
    process, status = os.wait()
    while process not in running:  # a helper that some library started
        process, status = os.wait()
    # What a test started, and did not end.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    shutil.rmtree(_folder(process), ignore_errors=True)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return process, "timeout"
    return process, "failed" if status else "passed"


class Forks:
    """A plugin of pytest that runs tests in forks of the process that collected them.

    Args:
        trials: (names of tests, replaced code, seconds after which SIGALRM kills the fork).
        paths: of the changed modules.
        processes: forks at the same time.
        told: the descriptor that takes a line for each trial: its number and what came of it.
    """

    def __init__(self, trials, paths, processes, told):
        self._trials, self._paths, self._processes, self._told = trials, paths, processes, told

    def pytest_runtestloop(self, session):
        """Return True; in a fork None, so that pytest goes on and runs the fork's tests."""
        files = {importlib.import_module(module_name(path)).__file__ for path in self._paths}
        items = {item.nodeid: item for item in session.items}
        functions = [x for x in gc.get_objects() if isinstance(x, FunctionType)]
        functions = [x for x in functions if x.__code__.co_filename in files]
        gc.freeze()
        running = {}
        for number, (tests, codes, seconds) in enumerate(self._trials):
            if len(running) == self._processes:
                self._tell(running)
            sys.stdout.flush()
            process = os.fork()
            if not process:
                _limit(seconds)
                for function in functions:
                    if function.__code__ in codes:
                        function.__code__ = codes[function.__code__]
                session.items = [items[test] for test in tests]
                return None
            running[process] = number
        while running:
            self._tell(running)
        return True

    def _tell(self, running):
        process, outcome = wait(running)
        os.write(self._told, f"{json.dumps([running.pop(process), outcome])}\n".encode())


class Recorder:
    """A plugin of pytest that notes which lines each test runs, and what it takes.

    What a shared fixture runs counts for every test that uses it.
    """

    def __init__(self, paths, root, output):
        import coverage

        self._coverage = coverage.Coverage(
            data_file=None, include=[str(root / path) for path in paths], config_file=False
        )
        self._root, self._output = root, output
        #: test -> seconds, and the fixtures that it uses
        self._seconds, self._fixtures = {}, {}
        self._failed = []
        self._coverage.start()
        self._paths = paths

    def pytest_collection_finish(self):
        # What a module runs while it is imported belongs to no test.
        for path in self._paths:
            importlib.import_module(module_name(path))
        self._switch("between tests")

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._failed.append(report.nodeid)
            # They hold what the failed test held, a model for one.
            sys.last_value = sys.last_traceback = None

    def pytest_runtest_setup(self, item):
        self._fixtures[item.nodeid] = sorted(item.fixturenames)

    def pytest_fixture_setup(self, fixturedef, request):
        shared = fixturedef.scope != "function"
        self._switch(f"fixture:{fixturedef.argname}" if shared else request.node.nodeid)

    def pytest_fixture_post_finalizer(self, fixturedef, request):
        self._switch("between tests")

    def pytest_runtest_call(self, item):
        self._switch(item.nodeid)

    def pytest_runtest_teardown(self, item):
        self._switch("between tests")

    def pytest_sessionfinish(self):
        self._coverage.stop()
        data = self._coverage.get_data()
        # Lines of a function share their thousands of tests: written once, they take no gigabytes.
        groups = {}
        lines = {
            str(Path(file).relative_to(self._root)): {
                line: groups.setdefault(tuple(sorted(names)), len(groups))
                for line, names in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        told = {
            "groups": list(groups),
            "lines": lines,
            "seconds": self._seconds,
            "fixtures": self._fixtures,
            "failed": self._failed,
        }
        Path(self._output).write_text(json.dumps(told), encoding="utf-8")

    def _switch(self, context):
        self._coverage.switch_context(context)
