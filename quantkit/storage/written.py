"""Recognising files that quantkit wrote: ``--force`` replaces no others."""

import os
import re
from pathlib import Path
from typing import BinaryIO

from quantkit.errors import OutputError
from quantkit.storage.inputfile import open_file

#: What a recipe that quantkit wrote begins with.
YAML_MARK = "# Written by quantkit.\n"
#: What names the program in the metadata of a drawing.
PROGRAM = "quantkit"

#: What is looked at of each end: marks stand within the first lines; a PDF's stands in its last.
_SEEN = 16_384
#: One for each kind of file: its magic, then a mark that files of other programs lack.
_OWN = re.compile(
    rb"""
    .{8}\{"__metadata__":\{("format":"pt",)?"quantkit   # safetensors
    | GGUF .{,4096}? quantkit\.version
    | \{\s*"schema":\s"quantkit\.                       # JSON
    | \#\ Written\ by\ quantkit\.\n                     # YAML
    | <!doctype\ html>.{,4096}?<title>[^<]*quantkit     # a page
    | \x89PNG\r\n .{,256}? Software\0quantkit
    | <\?xml .{,4096}? <svg .{,4096}? <dc:title>quantkit</dc:title>
    | %PDF- .* /Creator\ \(quantkit\)
    """,
    re.DOTALL | re.VERBOSE,
)


def refuse_foreign_file(path: Path) -> None:
    """Refuse to replace a file that has content and that quantkit did not write.

    Raises:
        OutputError: it is such a file, or cannot be read.
    """
    with open_file(path, error=OutputError) as file:
        seen = _ends(file)
    if seen and not _OWN.match(seen):
        raise OutputError(
            f"{path}: a file that quantkit did not write; force would delete it: move it away, or "
            "choose another path"
        )


def _ends(file: BinaryIO) -> bytes:
    """Return the beginning and the end of a file; a small one's whole."""
    head = file.read(_SEEN)
    file.seek(max(os.fstat(file.fileno()).st_size - _SEEN, len(head)))
    return head + file.read(_SEEN)
