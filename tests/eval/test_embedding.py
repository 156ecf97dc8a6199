"""Pictures as WebP in a page: without loss while the budget allows it, then by quality."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from quantkit.eval.measuring.embedding import LIST_SIDE, QUALITIES, preview, store_pictures
from quantkit.eval.measuring.pictures import GAIN, Pairs, amplified_difference

SIDE = LIST_SIDE + 16


def pictures(count):
    rng = np.random.default_rng(0)
    # smooth with a little noise: noise alone is what no encoder makes smaller
    ramp = np.linspace(0, 200, SIDE)[None, :, None]
    return tuple(
        (ramp + rng.integers(0, 20, (SIDE, SIDE, 3))).astype(np.uint8) for _ in range(count)
    )


def noisy(count):
    found = pictures(2 * count)
    return Pairs(tuple(map(str, range(count))), found[:count], found[count:])


def decoded(text):
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        assert image.format == "WEBP"
        return np.asarray(image.convert("RGB"))


def test_pictures_within_the_budget_have_no_loss():
    pairs = noisy(2)
    store = store_pictures(pairs)
    assert (store.quality, store.lossy) == (None, False)
    found = {name: decoded(text) for name, text in store.entries}
    assert sorted(found) == ["full-0-original", "full-0-packed", "full-1-original", "full-1-packed"]
    for index in range(2):
        assert (found[f"full-{index}-original"] == pairs.original[index]).all()
        assert (found[f"full-{index}-packed"] == pairs.packed[index]).all()


def test_pictures_over_the_budget_lose_quality_and_bring_their_differences():
    pairs = noisy(4)
    whole = store_pictures(pairs)
    size = sum(len(text) * 3 // 4 for _, text in whole.entries)
    store = store_pictures(pairs, budget=size * 3 // 4)
    assert store.lossy
    assert sum(len(text) * 3 // 4 for _, text in store.entries) <= size * 3 // 4
    found = dict(store.entries)
    assert len(found) == 3 * 4
    expected = amplified_difference(pairs.original[0], pairs.packed[0]).astype(int)
    error = np.abs(decoded(found["full-0-difference"]) - expected)
    # made before the loss: after it, GAIN times the loss would be on top
    assert error.mean() < 4 * GAIN
    # The worst quality is taken whatever it needs.
    assert store_pictures(pairs, budget=1).quality == QUALITIES[-1]


def test_small_pictures_need_no_second_copy():
    small = tuple(picture[:64, :64] for picture in pictures(2))
    assert store_pictures(Pairs(("a",), small[:1], small[1:])).entries == ()
    assert (decoded(preview(small[0], LIST_SIDE).partition(",")[2]) == small[0]).all()


@pytest.mark.parametrize("shape", [(SIDE, SIDE), (SIDE, SIDE // 2)])
def test_previews_keep_the_shape_of_the_picture(shape):
    found = decoded(preview(pictures(1)[0][: shape[0], : shape[1]], LIST_SIDE).partition(",")[2])
    assert found.shape[0] == LIST_SIDE
    assert found.shape[1] / LIST_SIDE == pytest.approx(shape[1] / shape[0], abs=0.01)
