"""Which pairs stand first, and what a page knows of each."""

import pytest
from quantkit.eval.measuring.embedding import Pictures
from quantkit.eval.measuring.pairs import PairView, choose_first, sort_keys

from tests.support.reports import made, made_report


@pytest.mark.parametrize(
    ("count", "worst", "typical"),
    [
        (1, (0,), ()),
        (3, (0, 1, 2), ()),
        (4, (0, 1, 2), (3,)),
        (6, (0, 1, 2), (3, 4, 5)),
        (9, (0, 1, 2), (3, 4, 5)),
        (64, (0, 1, 2), (31, 32, 33)),
    ],
)
def test_the_typical_pairs_stand_around_the_median(count, worst, typical):
    assert choose_first(range(count)) == (worst, typical)


def test_pairs_carry_every_metric_for_people_and_for_the_script():
    pairs = made(sigma=20.0)
    comparison = made_report(pairs).comparison
    view = PairView(pairs, comparison, (5, 6, 7), Pictures.INSIDE)
    pair = view.listed(0)
    original, packed = pair.sides
    assert (pair.name, pair.seed, pair.prompt) == ("000", 5, pairs.prompts[0])
    assert (original.values, original.numbers) == ((), ())
    assert dict(packed.values)["psnr"] == "Infinity"
    assert packed.numbers[0] == ("SSIM", "1")
    assert [key.name for key in sort_keys(comparison)] == ["ssim", "psnr", "mse"]
    assert pair.numbers.startswith("SSIM 1, PSNR infinite")
