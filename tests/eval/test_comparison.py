"""The spread of single prompts' losses, and progress that reaches its total."""

import numpy as np
import pytest
import torch
from quantkit.eval.measuring.backbones import Backbones, ClipBackbone
from quantkit.eval.measuring.comparison import _summarize_loss, compare, join
from quantkit.eval.measuring.pictures import Pairs
from quantkit.eval.measuring.sample_statistics import summarize

from quantkit.errors import InputError
from tests.support.pictures import fake_clip, made_pairs, small_lpips

BEFORE, AFTER = (20.0, 30.0, 25.0, 10.0), (19.0, 30.3, 20.0, 9.9)


def test_losses_of_single_prompts_are_shares_of_their_own_score():
    found = _summarize_loss(BEFORE, AFTER)
    single = 100 * (1 - np.array(AFTER) / np.array(BEFORE))
    assert found.mean == pytest.approx(100 * (1 - sum(AFTER) / sum(BEFORE)))
    assert found.std == pytest.approx(single.std(ddof=1))
    assert (found.minimum, found.maximum) == pytest.approx((single.min(), single.max()))
    assert found.median == pytest.approx(np.median(single))
    assert found.interval.low < found.mean < found.interval.high


def test_prompts_without_a_positive_score_have_no_share():
    found = _summarize_loss((0.0, -1.0, 20.0), (5.0, 5.0, 10.0))
    assert (found.minimum, found.maximum, found.median) == (50.0, 50.0, 50.0)
    assert _summarize_loss((0.0, 0.0), (1.0, 1.0)).mean is None


class Length(ClipBackbone):
    def score(self, picture, prompt):
        return float(len(prompt))


PICTURES = tuple(np.zeros((16, 16, 3), np.uint8) for _ in "ab")
CLIP = Backbones(clip=Length("length", None, None, torch.device("cpu")))


@pytest.mark.parametrize(
    ("backbones", "prompts", "scored"),
    [
        (CLIP, ("a", "bb"), True),
        (CLIP, None, False),
        (Backbones(), ("a", "bb"), False),
        (Backbones(), None, False),
    ],
    ids=["both", "no-prompts", "no-clip", "neither"],
)
def test_clip_wants_a_network_and_prompts(backbones, prompts, scored):
    found = compare(Pairs(("a", "b"), PICTURES, PICTURES, prompts), backbones)
    assert (found.clip is not None) == scored


def test_progress_goes_up_to_its_total():
    told = []
    generator = np.random.default_rng(0)
    pictures = tuple(generator.integers(0, 256, (64, 64, 3), np.uint8) for _ in "ab")
    pairs = Pairs(("a", "b"), pictures, pictures)
    result = compare(pairs, Backbones(), progress=lambda *about: told.append(about))
    count = len(result.scores)
    assert told == [("metrics", done, count + 1) for done in (*range(count), count + 1)]


def test_comparison_measures_what_it_has_backbones_for():
    found = compare(made_pairs(), Backbones())
    assert list(found.scores) == ["mse", "psnr", "ssim"]
    assert found.clip is None
    full = compare(made_pairs(prompts=("a",) * 4), Backbones(small_lpips(), fake_clip()))
    assert list(full.scores) == ["mse", "psnr", "ssim", "lpips"]
    assert full.scores["lpips"].backbone == "two stages"
    assert full.scores["ssim"].backbone == ""
    assert full.clip.backbone == "means"
    assert full.worst_first() == (3, 2, 1, 0)


@pytest.mark.parametrize("prompts", [("a", "b", "c", "d"), None], ids=["prompts", "no-prompts"])
def test_joined_comparisons_are_those_of_all_their_pairs(prompts):
    whole = made_pairs(prompts=prompts)

    def part(*places):
        columns = (whole.names, whole.original, whole.packed, prompts)
        return Pairs(*(column and tuple(column[i] for i in places) for column in columns))

    parts = [compare(part(*places), Backbones(small_lpips())) for places in ((0,), (1, 2, 3))]
    assert join(parts) == compare(whole, Backbones(small_lpips()))


def test_clip_loss_is_the_loss_of_the_means():
    pairs = made_pairs(prompts=("a", "bb", "ccc", "dddd"))
    clip = compare(pairs, Backbones(clip=fake_clip())).clip
    before, after = np.mean(clip.original.values), np.mean(clip.packed.values)
    assert clip.loss.mean == pytest.approx(100 * (before - after) / before)
    assert clip.loss.interval.low <= clip.loss.mean <= clip.loss.interval.high
    changes = np.subtract(clip.packed.values, clip.original.values)
    assert clip.change == summarize(changes.tolist())


def test_comparison_of_nothing_is_refused():
    with pytest.raises(InputError, match="no pictures to compare"):
        compare(Pairs((), (), ()), Backbones())
