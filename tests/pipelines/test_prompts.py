"""Prompts: those that are bundled, and files of them."""

import pytest

from quantkit.errors import PromptError
from quantkit.pipelines.running import read_prompts


def test_bundled_prompts_are_128_different_ones():
    prompts = read_prompts(None)
    assert len(prompts) == len(set(prompts)) == 128


def test_prompt_file_is_read_line_by_line(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbfa cat\r\n\r\n  caf\xc3\xa9, # not a comment \n")
    assert read_prompts(path) == ("a cat", "café, # not a comment")


@pytest.mark.parametrize("sign", ["\u2028", "\u2029"])
def test_separators_that_no_editor_shows_end_no_prompt(tmp_path, sign):
    path = tmp_path / "p.txt"
    path.write_bytes(f"a red cat,{sign}studio light\ra dog\r\na bird".encode())
    assert read_prompts(path) == (f"a red cat,{sign}studio light", "a dog", "a bird")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty, expected one prompt a line"),
        (b" \n\n", "empty"),
        (b"caf\xe9\n", r"not UTF-8 \(byte 3\)"),
        (None, "missing"),
        ("a cat\na red\x85dog\n".encode(), "line 2: holds the control character U\\+0085"),
        (b"a red\x0cdog\na cat\n", "line 1: holds the control character U\\+000C"),
        (b"a red\x1cdog\n", r"control character U\+001C, expected text; delete it"),
    ],
    ids=["empty", "blank", "latin-1", "missing", "next line", "form feed", "file separator"],
)
def test_bad_prompt_file_is_refused(tmp_path, content, message):
    path = tmp_path / "p.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PromptError, match=message):
        read_prompts(path)
