"""What a command's end means: a refusal in one line, a success, or a fault of quantkit's."""

import unicodedata

from .cases import Verdict
from .running import Ran

#: Characters of an error, its prefix included, and of a line.
LONGEST = 500
PREFIX = "quantkit: error: "

#: Categories of Unicode that a terminal obeys rather than prints: control, format (right-to-left
#: marks among them), surrogates, line and paragraph separators.
_OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def judge(ran: Ran) -> tuple[Verdict, str]:
    """Return what a command's end means, and why in one line."""
    if ran.escaped:
        verdict = Verdict.MEMORY if ran.raised is MemoryError else Verdict.TRACEBACK
        return verdict, ran.escaped.strip().splitlines()[-1][:200]
    if hostile := obeyed(ran.out.replace("\n", "")) or obeyed(ran.err.replace("\n", "")):
        return Verdict.MESSAGE, f"control characters: {hostile}"
    if ran.code == 2:
        return _judge_refusal(ran)
    return _judge_success(ran)


def _judge_success(ran: Ran) -> tuple[Verdict, str]:
    # 1 is a gate that failed, as of 'kernels check', which prints what it found.
    if ran.code not in {0, 1} or (ran.code == 1 and not ran.out):
        return Verdict.EXIT, f"exit code {ran.code}: {ran.err[:200]!r}"
    if ran.err:
        return Verdict.MESSAGE, f"on stderr beside success: {ran.err[:200]!r}"
    return Verdict.OK, ""


def _judge_refusal(ran: Ran) -> tuple[Verdict, str]:
    lines = ran.err.split("\n")
    if len(lines) != 2 or lines[1]:
        return Verdict.MESSAGE, f"{len(lines) - 1} lines: {ran.err[:200]!r}"
    if not lines[0].startswith(PREFIX):
        return Verdict.MESSAGE, f"no {PREFIX!r}: {ran.err[:200]!r}"
    if len(lines[0]) > LONGEST:
        return Verdict.MESSAGE, f"{len(lines[0])} characters: {lines[0][:160]!r}"
    if ran.out and not {"--all", "--json"} & set(ran.arguments):
        return Verdict.MESSAGE, f"on stdout beside an error: {ran.out[:200]!r}"
    return Verdict.REFUSED, lines[0].removeprefix(PREFIX)


def obeyed(text: str) -> str:
    """Return the characters of a text that a terminal obeys, as escapes."""
    if text.isascii() and text.isprintable():
        return ""
    found = {c for c in text if unicodedata.category(c) in _OBEYED}
    return " ".join(sorted(c.encode("unicode_escape").decode() for c in found))
