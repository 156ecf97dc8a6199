"""The page of a recovery: pictures at every look, curves, and how it ended."""

import re

import numpy as np
import pytest
from quantkit.eval.pages.course import CourseFacts, CoursePage

from quantkit.recovery.distill.distillation import Look
from quantkit.recovery.distill.training_progress import TrainingProgress, ValidationScore
from quantkit.recovery.distill.validation import compare_pictures
from quantkit.storage.written import refuse_foreign_file
from tests.support.reports import NASTY

FACTS = CourseFacts("student <1>", ("quantkit recover teacher -o student",))


def look(step, noise, count=3, side=24):
    expected = np.random.default_rng(0).random((count, side, side, 3), np.float32)
    moved = expected + noise * np.random.default_rng(step).normal(size=expected.shape)
    found = np.clip(moved, 0, 1).astype(np.float32)
    prompts = (NASTY, *(f"ball {i}" for i in range(1, count)))
    return Look(step, prompts, found, expected, compare_pictures(found, expected))


def point(step, loss):
    return TrainingProgress(step, loss, 2.0 * step, step / 100, None)


@pytest.fixture
def page(tmp_path):
    return CoursePage(tmp_path / "student.recovery.html", FACTS)


def text_of(tmp_path):
    return (tmp_path / "student.recovery.html").read_text(encoding="utf-8")


def test_every_look_is_a_column_and_every_prompt_a_row(page, tmp_path):
    looks = [look(0, 0.5), look(50, 0.2), look(1000, 0.05)]
    with page.open():
        for seen in looks:
            page.show(seen)
            page.follow(point(seen.step + 1, 0.1 / (1 + seen.step)))
            assert 'http-equiv="refresh"' in text_of(tmp_path)
    text = text_of(tmp_path)
    assert 'http-equiv="refresh"' not in text
    assert text.count('class="pair"') == 3
    for label in ("original", "step 0", "step 50", "step 1,000"):
        assert text.count(f'<div class="side" data-side="{label}">') == 3
    values = [seen.score.value for seen in looks]
    change = f"SSIM {values[0]:.4f} -&gt; {values[-1]:.4f}, better, from step 0 to 1,000."
    assert f"Recovered: {change}" in text
    assert "<title>Recovery of student &lt;1&gt; - quantkit</title>" in text
    assert "<script>alert(1)" not in text
    assert text.count("<svg") == 2
    first = re.findall(r'data-m-ssim="([^"]*)"', text)[:3]
    # of one prompt, look by look: less noise, nearer
    assert sorted(map(float, first)) == list(map(float, first))


def test_the_page_states_the_look_whose_weights_are_written(page, tmp_path):
    looks = [look(0, 0.5), look(50, 0.05), look(100, 0.2)]
    with page.open():
        for seen in looks:
            page.show(seen)
        page.name_written(50)
    values = [seen.score.value for seen in looks]
    change = f"SSIM {values[0]:.4f} -&gt; {values[1]:.4f}, better, from step 0 to 50."
    assert f"Recovered: {change}" in text_of(tmp_path)


def test_a_recovery_that_did_harm_says_so(page, tmp_path):
    looks = [look(0, 0.05), look(4, 0.5)]
    with page.open():
        for seen in looks:
            page.show(seen)
    values = [seen.score.value for seen in looks]
    text = text_of(tmp_path)
    assert f"Recovered: SSIM {values[0]:.4f} -&gt; {values[1]:.4f}, worse, from" in text
    assert f"{values[0]:.4f} -&gt; {values[1]:.4f}, worse</" in text.replace("\n", "")


def test_the_page_is_one_that_force_may_replace(page, tmp_path):
    with page.open():
        page.show(look(0, 0.5))
    refuse_foreign_file(tmp_path / "student.recovery.html")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_student_that_broke_is_shown(page, tmp_path, value):
    broken = look(5, 0.1)
    found = np.full_like(broken.found, value)
    page.show(Look(5, broken.prompts, found, broken.expected, ValidationScore("SSIM", np.nan)))
    page.follow(point(5, 1.0))
    assert "Recovering: SSIM not a number at step 5." in text_of(tmp_path)


def test_losses_alone_make_a_page(page, tmp_path):
    with page.open():
        page.follow(point(1, 1.0))
        page.follow(point(25, 0.5))
    text = text_of(tmp_path)
    assert "Recovered: no pictures were looked at." in text
    assert "1 -&gt; 0.5" in text
    assert 'id="gallery"' not in text


def test_what_ended_a_training_stands_on_its_page(page, tmp_path):
    with pytest.raises(KeyboardInterrupt), page.open():
        page.show(look(0, 0.5))
        raise KeyboardInterrupt
    text = text_of(tmp_path)
    assert "Not finished (interrupted): SSIM " in text
    assert 'http-equiv="refresh"' not in text


def test_a_recovery_that_never_began_leaves_no_page(page, tmp_path):
    with pytest.raises(ValueError, match="masks"), page.open():
        raise ValueError("masks")
    assert list(tmp_path.iterdir()) == []
