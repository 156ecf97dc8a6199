"""Tests in a process of their own, over a package in which one module may be changed.

The process is a fork of one that has torch loaded: a trial costs what its tests cost. Nothing is
written to the checkout, so neither Ctrl-C nor a second trial meets a changed file; tests that start
processes of their own see the package unchanged.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

#: Bytes that a trial may allocate: a change that asks for more is noticed. Files that are mapped do
#: not count.
_MEMORY = 8 << 30


class _Changed(importlib.machinery.SourceFileLoader):
    """Loads a module from another text than its file's, and leaves no bytecode behind."""

    def __init__(self, name, path, text):
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname):
        return compile(self._text, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name, path, text):
        self._name, self._path, self._text = name, path, text

    def find_spec(self, fullname, path, target=None):
        if fullname != self._name:
            return None
        loader = _Changed(fullname, self._path, self._text)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


def module_name(path):
    """Return what a file is imported as: ``eval`` installs under ``quantkit``."""
    name = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith("quantkit") else f"quantkit.{name}"


def start(tests, root, *, seconds, change=None, plugin=None, log=os.devnull):
    """Start a trial and return its process id.

    Args:
        tests: arguments of pytest.
        root: of the repository.
        seconds: after which the process is killed by SIGALRM.
        change: (path, text) of the changed module.
        plugin: what returns a plugin of pytest.
        log: the file that takes what pytest says.
    """
    process = os.fork()
    if process:
        return process
    status = 3
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        said = os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for stream in (0, 1, 2):
            os.dup2(said, stream)
        status = _run(tests, root, change, plugin)
    except BaseException:  # noqa: BLE001  nothing may run twice: the process is a copy
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(tests, root, change, plugin):
    import pytest

    os.chdir(root)
    if change is not None:
        path, text = change
        sys.meta_path.insert(0, _Finder(module_name(path), str(root / path), text))
    # pytest-timeout would take the alarm.
    options = ["-q", "-n0", "--timeout=0", "-pno:cacheprovider"]
    options += [] if plugin else ["-x"]
    # Of plugins that the parent has loaded.
    options += ["-Wignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *tests], plugins=[plugin()] if plugin else []))


def wait(running):
    """Wait for any trial of those that run: (process id, "passed", "failed" or "timeout")."""
    process, status = os.wait()
    while process not in running:  # a helper that some library started
        process, status = os.wait()
    # What a test started, and did not end.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return process, "timeout"
    return process, "failed" if status else "passed"


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

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_runtest_setup(self, item):
        self._fixtures[item.nodeid] = sorted(item.fixturenames)

    def pytest_fixture_setup(self, fixturedef, request):
        shared = fixturedef.scope != "function"
        self._switch(f"fixture:{fixturedef.argname}" if shared else request.node.nodeid)

    def pytest_fixture_post_finalizer(self, fixturedef, request):
        self._switch("")

    def pytest_runtest_call(self, item):
        self._switch(item.nodeid)

    def pytest_runtest_teardown(self, item):
        self._switch("")

    def pytest_sessionfinish(self):
        self._coverage.stop()
        data = self._coverage.get_data()
        lines = {
            str(Path(file).relative_to(self._root)): data.contexts_by_lineno(file)
            for file in data.measured_files()
        }
        loaded = [name for name in sys.modules if "quantkit" not in name]
        told = {
            "lines": lines,
            "seconds": self._seconds,
            "fixtures": self._fixtures,
            "failed": self._failed,
            "loaded": loaded,
        }
        Path(self._output).write_text(json.dumps(told), encoding="utf-8")

    def _switch(self, context):
        self._coverage.switch_context(context)
