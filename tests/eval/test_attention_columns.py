"""How many columns attention multiplies, and in what, in the report's page and JSON."""

import json
from dataclasses import replace

import pytest
from quantkit.eval.report import write_report
from quantkit.eval.result import AttentionColumns, AttentionFormats

from quantkit.checkpoint.column_decisions import ColumnDecision
from quantkit.checkpoint.format_decisions import FormatDecision
from tests.eval.test_report import Page
from tests.support.reports import NASTY, made, made_report

CHOSEN = ColumnDecision(
    "rank 32", 0.0123, 0.145, "error 0.0123, gains 14.5%", (0.5, 0.25), (0.75, 0.125),
    {"rank 32": (0.01, 0.02), "2:4": (0.007, 0.008)},
)  # fmt: skip
KEPT = replace(CHOSEN, chosen=None, error=None, gain=None, reason="rank 32: error 0.1, over 0.02")


@pytest.fixture(scope="module")
def pairs():
    return made(2, sigma=20.0)


def test_every_head_has_a_row(pairs, tmp_path):
    columns = (AttentionColumns("unet", "a.attn1", CHOSEN), AttentionColumns("unet", NASTY, KEPT))
    report = replace(made_report(pairs), attention_columns=columns)
    write_report(report, pairs, tmp_path / "r", force=False)
    page = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    text = " ".join(" ".join(Page(page).text).split())
    assert "Columns of queries and keys 2 attention modules" in text
    assert "unet.a.attn1 0 rank 32 0.5 0.75 rank 32: 0.01, 2:4: 0.007 error 0.0123, gains" in text
    assert "unet.a.attn1 1 rank 32 0.25 0.125 rank 32: 0.02, 2:4: 0.008" in text
    assert text.count("unet.") >= 4
    assert "over 0.02" in text
    (first, second) = json.loads((tmp_path / "r" / "report.json").read_text())["attention_columns"]
    assert first["decision"]["errors"] == {"rank 32": [0.01, 0.02], "2:4": [0.007, 0.008]}
    assert (second["module"], second["decision"]["chosen"]) == (NASTY, None)


def test_a_report_without_them_has_no_section(pairs, tmp_path):
    write_report(made_report(pairs), pairs, tmp_path / "r", force=False)
    page = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    assert "Columns of queries and keys" not in page
    assert json.loads((tmp_path / "r" / "report.json").read_text())["attention_columns"] == []


def test_every_module_has_a_row_of_its_format(pairs, tmp_path):
    errors = {"e4m3fn": 0.0312, "int8": 0.0123}
    chosen = FormatDecision("int8", 0.0123, "error 0.0123; e4m3fn 0.0312", errors)
    kept = FormatDecision(None, None, "77 keys, fewer than 512", {})
    formats = (AttentionFormats("unet", "a.attn1", chosen), AttentionFormats("unet", NASTY, kept))
    report = replace(made_report(pairs), attention_formats=formats)
    write_report(report, pairs, tmp_path / "r", force=False)
    page = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    text = " ".join(" ".join(Page(page).text).split())
    assert "Formats of attention 2 attention modules" in text
    assert "unet.a.attn1 int8 e4m3fn: 0.0312, int8: 0.0123 error 0.0123; e4m3fn 0.0312" in text
    assert "16 bit 77 keys, fewer than 512" in text
    (first, second) = json.loads((tmp_path / "r" / "report.json").read_text())["attention_formats"]
    assert first["decision"]["errors"] == errors
    assert (second["module"], second["decision"]["chosen"]) == (NASTY, None)
