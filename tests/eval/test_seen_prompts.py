"""Prompts that calibration has seen are found by the digest that its file holds."""

import hashlib

import pytest
from quantkit.eval.measuring.seen_prompts import count_seen, find_calibrated

PROMPTS = tuple(f"prompt {i}" for i in range(8))


def digest(prompts):
    return hashlib.sha256("\n".join(prompts).encode()).hexdigest()


@pytest.mark.parametrize(
    ("calibrated", "expected"),
    [
        (PROMPTS, PROMPTS),
        (PROMPTS[:3], PROMPTS[:3]),
        (PROMPTS[5:], PROMPTS[5:]),
        (PROMPTS[::2], None),
        (("other",), None),
        ((*PROMPTS, "one more"), None),
    ],
    ids=["all", "first", "last", "every second", "another", "more than there are"],
)
def test_a_run_of_prompts_is_found(calibrated, expected):
    found = find_calibrated(digest(calibrated), len(calibrated), [("a", "b"), PROMPTS])
    assert found == expected


def test_no_source_holds_anything():
    assert find_calibrated(digest(PROMPTS), 8, []) is None
    assert find_calibrated(digest(PROMPTS), 8, [()]) is None


def test_equal_texts_are_counted_each():
    assert count_seen(("a", "b", "a"), ("a", "c")) == 2
    assert count_seen(("a",), ()) == 0
