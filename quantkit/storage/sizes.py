"""Sizes in words, in decimal units as disks and model pages have them."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def tell_bytes(nbytes: int) -> str:
    """Return a number of bytes in three digits; JSON has them all.

    >>> tell_bytes(889_297_912)
    '889 MB'
    """
    size, unit = float(nbytes), 0
    # 999.5 would be rounded to a thousand.
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if size >= 99.95 or not unit else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {_UNITS[unit]}"


def tell_sizes(before: int, after: int) -> str:
    """Return sizes before and after, and the share that is left."""
    share = f" ({after / before:.1%})" if before else ""
    return f"{tell_bytes(before)} -> {tell_bytes(after)}{share}"
