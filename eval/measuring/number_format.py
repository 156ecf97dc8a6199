"""Numbers as a report writes them: short, with their unit, intervals in brackets."""

from math import isfinite, isnan

from quantkit.eval.measuring.sample_statistics import Interval, Summary


def show(value: float | None, unit: str = "") -> str:
    """Return a number with four significant digits and its unit; a dash for None."""
    if value is None:
        return "-"
    if not isfinite(value):
        return "not a number" if isnan(value) else "infinite"
    text = f"{value:.4g}"
    return f"{text} {unit}" if unit else text


def show_signed(value: float | None, unit: str = "") -> str:
    """Return a difference with its sign, three significant digits and its unit."""
    if value is None:
        return "-"
    text = f"{value:+.3g}"
    return f"{text} {unit}" if unit else text


def show_interval(interval: Interval | None) -> str:
    """Return an interval as ``[0.9512, 0.9731]``."""
    return "-" if interval is None else f"[{interval.low:.4g}, {interval.high:.4g}]"


def show_mean(summary: Summary | None) -> str:
    """Return a mean with its interval, as ``0.9641 [0.9512, 0.9731]``."""
    if summary is None or summary.mean is None:
        return "-"
    tail = f" {show_interval(summary.interval)}" if summary.interval else ""
    return f"{show(summary.mean)}{tail}"


def show_difference(summary: Summary | None, unit: str = "") -> str:
    """Return a mean difference with its interval, as ``-0.004 [-0.007, -0.001]``."""
    if summary is None or summary.mean is None:
        return "-"
    interval = summary.interval
    tail = f" [{interval.low:+.3g}, {interval.high:+.3g}]" if interval else ""
    return f"{show_signed(summary.mean)}{tail}{' ' if unit else ''}{unit}"


def show_bytes(nbytes: int) -> str:
    """Return a size as ``12.3 MiB``."""
    return f"{nbytes / 2**20:.4g} MiB"
