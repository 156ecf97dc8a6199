"""Choices and limits in the code are those that the pages promise.

Tests of a search that take its grid from the code would not notice a smaller one.
"""

import re
from itertools import pairwise
from math import isclose
from pathlib import Path

import pytest
from quantkit.eval.judging.gates import CLIP_LOSS, LEAST_PROMPTS, Limits
from quantkit.eval.measuring import composition, equivalence, sample_statistics

from quantkit.calibration.moments.held_out_rows import held_count
from quantkit.calibration.statistics.observers import (
    AUTO_TOLERANCE,
    CLIP_GRID,
    INTEGER_CLIP_GRID,
    clip_grid,
)
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.histogram import BINS, bin_edges
from quantkit.packing.smoothing_strength import ALPHAS
from quantkit.storage import yamlfile

DOCS = Path(__file__).parents[2] / "docs"

#: page, what it says, and the numbers that the code has in their places
PROMISES = [
    (
        "guides/calibrate.md",
        r"tries none, (.*), (.*), (.*), (.*) and (.*) in each layer",
        ALPHAS[1:],
    ),
    (
        "guides/calibrate.md",
        r"try (\d+) clips, .* steps of 2\^\(1/(\d)\); of integers (\d+) clips, .* 2\^\(1/(\d+)\)",
        (len(CLIP_GRID), 8, len(INTEGER_CLIP_GRID), 16),
    ),
    ("guides/calibrate.md", r"within a factor of 2\^\(1/4\) \((.*)\) of", (AUTO_TOLERANCE,)),
    ("guides/calibrate.md", r"\[buckets, (\d+)\] \| how many", (BINS,)),
    (
        "guides/evaluate.md",
        r"the (\d+) % bootstrap interval of .*BCa, (\d+) resamples",
        (100 * sample_statistics.CONFIDENCE, sample_statistics.RESAMPLES),
    ),
    (
        "guides/evaluate.md",
        r"t-test \((.*) %\) and the 95 % .* from (\d+) prompts on",
        (100 * equivalence.ALPHA, LEAST_PROMPTS),
    ),
    (
        "guides/evaluate.md",
        r"SSIM \| mean > (\S+) \|.*\n.* mean < (\S+) ",
        (Limits().ssim, Limits().lpips),
    ),
    (
        "guides/evaluate.md",
        r"quantized \| < (.*) % .*\n.* < (.*) % .*\n.* < (.*) % ",
        tuple(CLIP_LOSS.values())[:3],
    ),
    (
        "guides/evaluate.md",
        r"SSIM is at most (\S*), and its .* at most (\d.\d+)\.",
        (composition.DISSIMILARITY, composition.DISTANCE),
    ),
    ("guides/evaluate.md", r"match with the prompt is below (\d\.\d+)\.", (composition.MATCH,)),
    ("guides/recipes.md", r"A file has at most (\d) MiB", (yamlfile.MAX_BYTES / 2**20,)),
]


@pytest.mark.parametrize(("page", "said", "numbers"), PROMISES, ids=lambda value: str(value)[:40])
def test_the_code_has_the_numbers_of_the_page(page, said, numbers):
    text = (DOCS / page).read_text(encoding="utf-8")
    # Sentences in one line; rows of tables in their own.
    found = re.search(said, re.sub(r"(?<![|\n])\n(?![|\n])", " ", text))
    assert found
    told = [float(text) for text in found.groups()]
    assert len(told) == len(numbers)
    assert all(isclose(a, b, rel_tol=5e-3) for a, b in zip(told, numbers, strict=True)), told


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_clips_lie_as_far_apart_as_the_page_says(fmt):
    first, *_, last = grid = clip_grid(fmt)
    step, least = (1 / 16, 1 / 32) if fmt.is_integer else (1 / 8, 1 / 4)
    assert (first, last) == (1.0, least)
    assert all(isclose(b / a, 2.0**-step) for a, b in pairwise(grid))


def test_bins_lie_as_the_page_says():
    """16 bins a binade from 2^-24 to 2^17, one below, one above."""
    edges = bin_edges().tolist()
    assert edges[0] == 0.0
    assert edges[1::16] == [2.0**power for power in range(-24, 18)]
    assert edges[-1] == float("inf")


@pytest.mark.parametrize(
    ("prompts", "held"), [(1, 0), (3, 0), (4, 2), (16, 2), (23, 2), (24, 3), (80, 10)]
)
def test_the_last_eighth_is_held_out_with_four_prompts_or_more(prompts, held):
    assert held_count(prompts) == held
