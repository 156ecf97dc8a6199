"""Other judges, through their libraries, with small or random weights: none was downloaded here."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quantkit.eval.judging.serialize import comparison_json
from quantkit.eval.measuring import judges
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import compare
from quantkit.eval.measuring.judges import (
    JUDGES,
    LEAST_OF_A_SET,
    Judge,
    LoadedJudge,
    Takes,
    give_judgement,
    load_judges,
)
from quantkit.eval.measuring.pictures import Pairs

from quantkit.errors import InputError, ModelError, NonFiniteError
from tests.support.pictures import CPU, made_pairs, noisy, pixels


def loaded(takes, measure):
    judge = Judge("made", "Made", takes, True, "made for tests", (), (), lambda *_: measure)
    return LoadedJudge(judge, measure)


def test_pickscore_is_the_models_own_logit(clip_dir):
    from transformers import CLIPModel, CLIPProcessor

    (judge,) = load_judges([f"pickscore={clip_dir}"], device=CPU)
    picture = pixels(0, 16, 16)
    model, processor = CLIPModel.from_pretrained(clip_dir), CLIPProcessor.from_pretrained(clip_dir)
    inputs = processor(text=["a red ball"], images=[picture], return_tensors="pt")
    with torch.no_grad():
        expected = float(model.eval()(**inputs).logits_per_image)
    assert judge(picture, "a red ball") == pytest.approx(expected, rel=1e-5)
    found = give_judgement(judge, made_pairs(3, prompts=("a red ball", "a box", "a cat")))
    assert len(found.original) == len(found.packed) == 3
    assert found.change.mean == pytest.approx(np.mean(found.packed) - np.mean(found.original))


def test_dists_is_zero_for_one_picture_and_grows_with_noise(monkeypatch):
    """torchmetrics' network with random features, and the weights that come in its package."""
    dists = pytest.importorskip("torchmetrics.functional.image.dists")
    from torchvision.models import vgg16

    torch.manual_seed(0)
    monkeypatch.setattr(dists, "vgg16", lambda **_: vgg16(weights=None))
    (judge,) = load_judges(["dists"], device=CPU)
    picture = pixels(0, 64, 64)
    assert judge(picture, picture.copy()) == pytest.approx(0.0, abs=1e-5)
    values = [judge(picture, noisy(picture, sigma)) for sigma in (2, 10, 40)]
    assert values == sorted(values)
    assert values[0] > 1e-6


def test_clip_iqa_asks_piq_for_pictures_in_unit_range(monkeypatch):
    piq = pytest.importorskip("piq")

    class Mean(torch.nn.Module):
        def __init__(self, data_range):
            super().__init__()
            assert data_range == 1.0

        def forward(self, image):
            assert image.shape == (1, 3, 48, 40)
            return image.mean()

    monkeypatch.setattr(piq, "CLIPIQA", Mean)
    (judge,) = load_judges(["clip-iqa"], device=CPU)
    picture = pixels()
    assert judge(picture, "any") == pytest.approx(picture.mean() / 255, rel=1e-5)


class Colours(torch.nn.Module):
    """Features that can be computed by hand: means of the channels' halves."""

    num_features = 6

    def forward(self, pictures):
        upper, lower = pictures.double().div(255).chunk(2, dim=2)
        return torch.cat([upper.mean((2, 3)), lower.mean((2, 3))], 1)


def set_pairs(count, shift=6.0):
    first = tuple(pixels(seed, 16, 16) for seed in range(count))
    second = tuple(noisy(picture, shift, seed) for seed, picture in enumerate(first))
    return Pairs(tuple(map(str, range(count))), first, second)


def features(pictures):
    return Colours()(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)).numpy()


def test_fid_is_the_distance_of_two_normal_distributions():
    fid = pytest.importorskip("torchmetrics.image.fid")
    from scipy.linalg import sqrtm

    distance = fid.FrechetInceptionDistance(feature=Colours()).set_dtype(torch.float64)
    judge = loaded(Takes.SETS, judges._between_sets(distance, float))
    pairs = set_pairs(LEAST_OF_A_SET)
    found = give_judgement(judge, pairs)
    one, two = features(pairs.original), features(pairs.packed)
    covariances = np.cov(one, rowvar=False), np.cov(two, rowvar=False)
    expected = np.square(one.mean(0) - two.mean(0)).sum() + np.trace(
        covariances[0] + covariances[1] - 2 * sqrtm(covariances[0] @ covariances[1]).real
    )
    assert found.packed == (pytest.approx(expected, rel=1e-3, abs=1e-9),)
    assert found.summary.interval is None
    same = give_judgement(judge, replace(pairs, packed=pairs.original))
    assert same.packed[0] == pytest.approx(0.0, abs=1e-8)


@pytest.mark.filterwarnings("ignore:Metric `Kernel Inception Distance`")
def test_kid_is_the_same_every_time():
    kid = pytest.importorskip("torchmetrics.image.kid")
    distance = kid.KernelInceptionDistance(feature=Colours(), subset_size=64, subsets=10)
    measure = judges._between_sets(distance, lambda found: 1e3 * float(found[0]))
    pairs = set_pairs(LEAST_OF_A_SET)
    pairs = replace(pairs, packed=tuple(picture // 4 for picture in pairs.packed))
    state = torch.random.get_rng_state()
    first = measure(pairs.original, pairs.packed)
    assert measure(pairs.original, pairs.packed) == first
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first > abs(measure(pairs.original, pairs.original))


def test_sets_of_few_pictures_are_not_judged():
    found = give_judgement(loaded(Takes.SETS, lambda *_: 1.0), set_pairs(4))
    assert (found.packed, found.note) == ((), "4 pictures; expected at least 256")


def test_judgements_are_measured_once_and_written(monkeypatch):
    asked = []

    def measure(picture, prompt):
        asked.append(prompt)
        return float(picture.mean())

    judge = loaded(Takes.PICTURE, measure)
    pairs = made_pairs(3, prompts=("a", "b", "c"))
    found = compare(pairs, Backbones(judges=(judge,)))
    compare(replace(pairs, packed=pairs.original), Backbones(judges=(judge,)))
    assert len(asked) == 6
    values = comparison_json(found)["judges"]["made"]
    assert values["original"] == [float(p.mean()) for p in pairs.original]
    assert values["change"]["count"] == 3
    assert (values["better"], values["note"]) == ("higher", None)
    assert loaded(Takes.PAIR, lambda *_: 0.5) != judge


def test_judgements_stand_on_the_page_beside_the_noise_floors(tmp_path):
    from quantkit.eval.judging.noise_floor import measure_gaps
    from quantkit.eval.pages.report import write_report

    from tests.support.reports import made, made_floors, made_report

    asked = (
        loaded(Takes.PICTURE, lambda picture, _: float(picture.mean())),
        replace(loaded(Takes.SETS, lambda *_: 1.0), source="weights <1>"),
    )
    pairs = made(4)
    report = made_report(pairs)
    comparison = compare(pairs, Backbones(judges=asked))
    floors = tuple(
        replace(floor, comparison=floor.comparison and replace(
            compare(replace(pairs, packed=pairs.original), Backbones(judges=asked)),
        ))
        for floor in made_floors(pairs)
    )  # fmt: skip
    report = replace(report, comparison=comparison, noise_floor=measure_gaps(comparison, floors))
    write_report(report, pairs, tmp_path / "out", force=False)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    rows = page.partition('aria-label="Other judges"')[2].partition("</table>")[0].split("<tr>")[2:]
    assert len(rows) == 2
    assert f"{comparison.judgements[0].summary.mean:.4g}" in rows[0]
    assert "+0<br>" in rows[0], "the floor's pictures are the original's"
    assert "4 pictures; expected at least 256" in rows[1]
    assert "weights &lt;1&gt;, " in rows[1]


def test_the_table_of_methods_lists_all_judges():
    text = Path("docs/notes/methods.md").read_text(encoding="utf-8")
    assert {name for name in JUDGES if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_judge_that_gives_no_number_is_named(value):
    with pytest.raises(NonFiniteError, match=r"made: found (nan|inf), which is no judgement"):
        loaded(Takes.PICTURE, lambda *_: value)(pixels(), "a")


@pytest.mark.parametrize("name", ["dists", "clip-iqa", "fid", "kid"])
def test_a_judge_whose_package_is_missing_says_how_to_get_it(name, monkeypatch):
    monkeypatch.setattr(judges, "find_spec", lambda _: None)
    packages = " ".join(JUDGES[name].packages)
    with pytest.raises(InputError) as caught:
        load_judges([name], device=CPU)
    assert str(caught.value).endswith(f"which is not installed; pip install {packages}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lpips", "judge 'lpips': unknown; expected one of dists, clip-iqa, pickscore, fid, kid"),
        ("dists=weights.pt", "takes its library's own weights"),
        ("", "judge '': unknown"),
    ],
)
def test_judges_that_cannot_be_had_are_refused(text, expected, monkeypatch):
    monkeypatch.setattr(judges, "find_spec", lambda _: object())
    with pytest.raises(InputError, match=expected):
        load_judges([text], device=CPU)


def test_weights_that_cannot_be_had_are_named(tmp_path):
    with pytest.raises(ModelError, match="judge pickscore: its weights cannot be had"):
        load_judges([f"pickscore={tmp_path}"], device=CPU)
