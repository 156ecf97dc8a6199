"""The row that tables of other tools print: which pictures and judges it takes, and its order."""

from dataclasses import replace

import pytest
import torch
from quantkit.eval.measuring.judges import CARD, JUDGES, LEAST_OF_A_SET, Judgement, LoadedJudge
from quantkit.eval.measuring.sample_statistics import summarize
from quantkit.eval.pages.tables import card_rows

from quantkit.cli.report_tables import print_report
from quantkit.workflow import evaluate
from quantkit.workflow.evaluate import EvaluationSettings
from tests.support.reports import made, made_report

CPU = torch.device("cpu")


@pytest.mark.parametrize("given", [["a red ring"], [f"shape {n}" for n in range(300)]])
def test_a_card_has_as_many_pictures_as_sets_need(given):
    pictures = EvaluationSettings(card=True, prompts=given).pictures(CPU, last=False)
    count = max(len(given), LEAST_OF_A_SET)
    assert pictures.prompts == tuple(given[n % len(given)] for n in range(count))
    assert len({*pictures.seeds}) == count


def test_a_count_is_kept():
    settings = EvaluationSettings(card=True, prompts=["a", "b", "c"], count=2)
    assert settings.pictures(CPU, last=False).prompts == ("a", "b")


def test_a_card_asks_its_judges_with_the_weights_that_are_given(monkeypatch):
    asked = []
    monkeypatch.setattr(evaluate, "load_judges", lambda names, device: asked.extend(names) or ())
    settings = EvaluationSettings(card=True, judges=("pickscore=here",), without=("lpips", "clip"))
    settings.backbones(CPU)
    assert asked == ["pickscore=here", "fid"]


def judged(name, values):
    judge = LoadedJudge(JUDGES[name], lambda *_: 0.0).judge
    pairs = judge.takes.value == "picture"
    original = tuple(value + 1 for value in values) if pairs else ()
    return Judgement(judge, "", original, tuple(values), summarize(values), None)


def test_the_row_begins_with_the_judges_and_is_printed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "160")
    report = made_report(made(sigma=20.0))
    found = (judged("fid", [3.25]), judged("pickscore", [20.0, 21.0]), judged("kid", []))
    report = replace(report, comparison=replace(report.comparison, judgements=found))
    titles, (dense, packed) = card_rows(report.comparison)
    assert titles[:5] == ("pictures of", "FID ↓", "PickScore ↑", "PSNR ↑", "SSIM ↑")
    assert not any("KID" in title for title in titles)
    assert (dense[1], packed[1]) == ("-", "3.25")
    assert (dense[2][:4], packed[2][:4]) == ("21.5", "20.5")
    monkeypatch.setattr("quantkit.cli.report_tables.print_worst", lambda *_: None)
    report = replace(report, noise_floor=())
    print_report(report, tmp_path, card=True)
    assert "As tables of other tools print it" in capsys.readouterr().out
    assert {*CARD} <= {*JUDGES}
