"""Stopping a benchmark before its end without losing what is done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def stopping_early() -> Iterator[None]:
    """Leave the block quietly at Ctrl-C, or when the process is asked to end (SIGTERM).

    The latter is what ``timeout`` and job schedulers send before they kill: time enough to write
    the figures. Signals can be handled in the main thread alone; elsewhere SIGTERM is left alone.
    """
    handled = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if handled else None
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        if handled:
            signal.signal(signal.SIGTERM, before)
