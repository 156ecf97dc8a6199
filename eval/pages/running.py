"""Notes of pages whose job still runs, or ended early."""

from time import time

from quantkit.eval.pages.page import Running

#: Seconds after which a page that is open loads itself again.
RELOAD_SECONDS = 3


def running(note: str, *, ended: bool) -> Running:
    """Return what a page says of its job, at this moment."""
    return Running(note, round(1000 * time()), None if ended else RELOAD_SECONDS)


def reason_of(error: BaseException) -> str:
    """Return in words what ended an evaluation."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"ended by an error: {error}" if str(error) else "ended by an error"
