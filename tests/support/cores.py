"""The compiled core, and a machine that has no compiler: what both do is asked of both."""

from contextlib import contextmanager

import pytest

from quantkit.device import compilers
from quantkit.device.host import core, hashing
from quantkit.errors import KernelError
from tests.support.kernel_cases import need


@contextmanager
def with_core(name):
    """Demand the compiled core, or let every part of it be unavailable."""
    if name == "compiled":
        need(compilers.host_compiler)
        assert not core.why_unavailable()
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "library", _no_library)
        _ask_again()
        yield
    _ask_again()


def _no_library():
    raise KernelError("asked for")


def _ask_again():
    core.why_unavailable.cache_clear()
    hashing.why_unavailable.cache_clear()
