"""What became of pictures, told on pictures of the demo's world that are drawn, not generated.

The drawing is the oracle: the same scene and layout is the same picture, another layout is a
variant, and another scene has nothing to do with the prompt.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from quantkit.eval.judging.gates import Compression, Limits, State, judge
from quantkit.eval.measuring.backbones import Backbones, load_clip
from quantkit.eval.measuring.comparison import Comparison, Score, compare
from quantkit.eval.measuring.composition import (
    DISSIMILARITY,
    DISTANCE,
    MATCH,
    Bounds,
    Kind,
    find_bounds,
    sort_pictures,
)
from quantkit.eval.measuring.metrics import METRICS
from quantkit.eval.measuring.pictures import Pairs
from quantkit.eval.measuring.resemblance import LEAST_OTHERS, Resemblance
from quantkit.eval.measuring.sample_statistics import summarize
from quantkit.eval.world.scenes import captions, draw_distinct_scenes

from docs.training.render import render
from docs.training.scene_layout import lay_out
from quantkit.resources import demo_assets
from tests.support.pictures import CPU, fake_clip, made_pairs, noisy

COUNT = 12
ONLY_BROKEN = Limits(None, None, None, 0.0)


def drawn(scenes, seed):
    pictures = render(scenes, lay_out(scenes, torch.Generator().manual_seed(seed)))
    values = (pictures.permute(0, 2, 3, 1).numpy() * 255).round().astype(np.uint8)
    return tuple(np.ascontiguousarray(value) for value in values)


@pytest.fixture(scope="module")
def world():
    """Pictures of scenes, of the same in another layout, and of other scenes."""
    scenes = draw_distinct_scenes(2 * COUNT, torch.Generator().manual_seed(5))
    first, others = scenes[:COUNT], scenes[COUNT:]
    clip = load_clip(str(demo_assets() / "clip"), device=CPU)
    return (
        Pairs(tuple(f"{i:03d}" for i in range(COUNT)), drawn(first, 0), drawn(first, 0),
              tuple(captions(first))),
        drawn(first, 1), drawn(others, 2), Backbones(clip=clip),
    )  # fmt: skip


def test_drawn_pictures_are_told_apart(world):
    pairs, moved, foreign, backbones = world
    packed = (
        *(noisy(picture, 1) for picture in pairs.original[:4]), *moved[4:8], *foreign[8:],
    )  # fmt: skip
    found = compare(replace(pairs, packed=packed), backbones)
    pictures = sort_pictures(found, find_bounds([]))
    assert pictures.kinds == (Kind.SAME,) * 4 + (Kind.VARIANT,) * 4 + (Kind.BROKEN,) * 4
    assert list(pictures.counts.values()) == [4, 4, 4]
    assert set(pictures.order[:4]) == set(range(8, 12))
    assert set(pictures.order[4:8]) == set(range(4, 8))
    ssim = found.scores["ssim"].values
    assert [ssim[i] for i in pictures.order[8:]] == sorted(ssim[:4])
    # On its own scale an unrelated picture is about as far as unrelated pictures are.
    assert np.mean(found.resemblance.distances[8:]) == pytest.approx(1.0, abs=0.2)
    assert np.mean(found.resemblance.matches[8:]) == pytest.approx(0.0, abs=0.25)
    (gate,) = judge(found, ONLY_BROKEN, Compression.QUANTIZED)
    assert (gate.state, gate.found, gate.expected) == (
        State.FAILED,
        pytest.approx(100 / 3),
        "<= 0 %",
    )
    assert gate.note == "4 of 12; of all prompts up to 65.1 %"
    assert judge(found, replace(ONLY_BROKEN, broken=20.0), Compression.BOTH)[0].state is (
        State.UNDECIDED
    )


def test_changed_pictures_are_counted_beyond_those_of_the_noise_floor(world):
    pairs, moved, foreign, backbones = world

    def with_changed(count):
        packed = (*moved[:1], *foreign[1:count], *pairs.original[count:])
        return compare(replace(pairs, packed=packed), backbones)

    found = with_changed(6)
    limits = Limits(None, None, None, None, changed=25.0)
    (gate,) = judge(found, limits, Compression.QUANTIZED)
    assert (gate.title, gate.found, gate.expected) == ("share of changed pictures", 50.0, "<= 25 %")
    # 6 of 12 do not show that it is over a quarter: Clopper and Pearson's interval is 21 to 79 %.
    assert gate.state is State.UNDECIDED
    assert judge(with_changed(9), limits, Compression.QUANTIZED)[0].state is State.FAILED
    assert judge(with_changed(3), limits, Compression.QUANTIZED)[0].state is State.PASSED
    floors = (with_changed(1), compare(pairs, backbones))
    (gate,) = judge(found, limits, Compression.QUANTIZED, floors)
    assert gate.limit == pytest.approx(25.0 + 100 / 12)


def test_identical_pictures_are_the_same(world):
    pairs, _, _, backbones = world
    found = compare(pairs, backbones)
    assert set(sort_pictures(found, find_bounds([])).kinds) == {Kind.SAME}
    assert found.resemblance.distances == pytest.approx((0.0,) * COUNT, abs=1e-6)
    assert found.resemblance.matches == pytest.approx((1.0,) * COUNT)
    (gate,) = judge(found, ONLY_BROKEN, Compression.QUANTIZED)
    assert (gate.state, gate.found) == (State.PASSED, 0.0)
    # 100 * scipy.stats.beta.ppf(0.975, 1, 12), the upper end of Clopper and Pearson's interval
    assert gate.interval.high == pytest.approx(26.46, abs=0.01)


@pytest.mark.parametrize("count", [1, LEAST_OTHERS])
def test_few_other_prompts_give_no_scale(world, count):
    pairs, _, foreign, backbones = world
    few = Pairs(*(part[:count] for part in (pairs.names, pairs.original, foreign, pairs.prompts)))
    found = compare(few, backbones)
    assert found.resemblance.matches == (None,) * count
    pictures = sort_pictures(found, find_bounds([]))
    assert set(pictures.kinds) == {Kind.VARIANT}
    assert pictures.matched == 0
    (gate,) = judge(found, ONLY_BROKEN, Compression.QUANTIZED)
    assert (gate.state, gate.passed) == (State.NOT_JUDGED, None)


def test_other_seeds_of_one_prompt_are_no_other_prompts(world):
    pairs, _, _, backbones = world
    alike = replace(pairs, prompts=(pairs.prompts[0],) * COUNT)
    assert compare(alike, backbones).resemblance.distances == (None,) * COUNT


def test_a_clip_that_tells_no_prompts_apart_calls_nothing_broken():
    found = compare(made_pairs(8, prompts=tuple("abcdefgh")), Backbones(clip=fake_clip()))
    assert sort_pictures(found, find_bounds([])).matched < 8


def made(ssim, distances=None, matches=None):
    score = Score(METRICS["ssim"], "", tuple(ssim), summarize(list(ssim)))
    seen = Resemblance("c", tuple(distances), tuple(matches)) if distances else None
    return Comparison(tuple(map(str, range(len(ssim)))), None, {"ssim": score}, None, seen)


def test_bounds_are_the_defaults_or_the_noise_floors():
    assert find_bounds([]) == Bounds(DISSIMILARITY, DISTANCE, MATCH)
    assert find_bounds([made([0.999] * 5, [0.001] * 5, [0.99] * 5)]) == find_bounds([])
    wide = made([0.85] * 4 + [0.5], [0.04] * 5, [0.99] * 4 + [0.6])
    found = find_bounds([made([0.99]), wide])
    assert found.dissimilarity == pytest.approx(2 * np.quantile([0.15] * 4 + [0.5], 0.9))
    assert (found.distance, found.match) == (pytest.approx(0.08), 0.6)
    assert find_bounds([made([0.85] * 3)]).distance == DISTANCE


@pytest.mark.parametrize(
    ("ssim", "distance", "match", "expected"),
    [
        (0.99, 0.001, 0.2, Kind.SAME),
        (0.85, None, None, Kind.VARIANT),
        (0.99, 0.2, None, Kind.VARIANT),
        (0.85, 0.001, 0.9, Kind.VARIANT),
        (0.85, 0.5, 0.69, Kind.BROKEN),
        (0.99, None, None, Kind.SAME),
        (0.85, 0.5, MATCH, Kind.VARIANT),
        (0.99, DISTANCE, 0.2, Kind.SAME),
        (1.0 - DISSIMILARITY, 0.001, 0.2, Kind.SAME),
    ],
)
def test_a_picture_is_broken_only_if_it_changed_and_lost_its_prompt(
    ssim, distance, match, expected
):
    found = made([ssim], [distance], [match])
    assert sort_pictures(found, find_bounds([])).kinds == (expected,)
