"""The report: its JSON, Markdown and HTML."""

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from quantkit.eval.judging.evaluation_result import SCHEMA_VERSION, Kernels, QuantizedBy, Timesteps
from quantkit.eval.judging.gates import Limits
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import compare
from quantkit.eval.measuring.embedding import Pictures
from quantkit.eval.measuring.number_format import show, show_difference, show_interval, show_mean
from quantkit.eval.measuring.pictures import match_folders, read_image
from quantkit.eval.measuring.sample_statistics import Interval, summarize
from quantkit.eval.pages.markdown import MOST_PAIRS, code_span, escape_markdown
from quantkit.eval.pages.report import write_report
from quantkit.eval.pages.sentences import gate_remark, headline, kernel_sentence, lead

from quantkit.errors import OutputError
from tests.support.reports import NASTY, STEPS, layer, made, made_report


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    pairs = made(sigma=20.0)
    report = made_report(pairs)
    folder = tmp_path_factory.mktemp("report") / "report"
    write_report(report, pairs, folder, force=False)
    return report, pairs, folder


class Page(HTMLParser):
    """Collects tags, and refuses tags that are closed in another order than opened."""

    VOID = frozenset({"meta", "img", "br", "link", "input"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page_of(written):
    return Page((written[2] / "report.html").read_text(encoding="utf-8"))


def test_json_is_strict_and_complete(written):
    report, pairs, folder = written

    def refuse(constant):
        raise AssertionError(constant)

    found = json.loads((folder / "report.json").read_text(), parse_constant=refuse)
    assert (found["schema"], found["schema_version"]) == ("quantkit.report", SCHEMA_VERSION)
    assert found["verdict"] == {
        "state": report.state.value,
        "passed": report.passed,
        "text": report.verdict,
    }
    psnr = found["comparison"]["metrics"]["psnr"]
    assert psnr["values"][0] is None
    assert psnr["null_means"] == "infinite: identical pictures"
    assert psnr["summary"]["note"] == "1 of 3 pairs identical (infinite), left out"
    assert found["comparison"]["metrics"]["ssim"]["summary"]["interval"]["method"]
    assert found["comparison"]["prompts"] == list(pairs.prompts)
    assert found["kernels"]["total_calls"] == 73
    assert found["kernels"]["calls_by_backend"] == {"host": 70, "reference": 3}
    assert found["gates"][0]["limit"] == 0.95
    assert len(found["layers"]) == 5
    assert found["layers"][0]["shape"] == [64, 32, 3, 3]
    floor, missing = found["noise_floor"]
    assert floor["comparison"]["metrics"]["ssim"]["summary"]["mean"] > 0.9
    assert len(floor["comparison"]["metrics"]["ssim"]["values"]) == 3
    assert floor["packed_minus_floor"]["ssim"]["interval"]["low"] < 0
    assert floor["divergence"]["mean"] == pytest.approx([1e-6, 3e-5])
    assert (missing["comparison"], missing["note"]) == (None, "the original overflows")
    steps = found["timesteps"]
    assert steps["unit"] == "NMSE"
    assert steps["divergence"]["timesteps"] == [900.0, 100.0]
    assert steps["divergence"]["mean"] == pytest.approx([1.5e-4, 2.5e-3])
    assert steps["local"]["quartile_high"] == pytest.approx([1e-5, 2e-5])
    fields = {"title", "created", "run", "environment", "commands", "original", "packed"}
    assert fields <= found.keys()


def test_html_is_self_contained_and_describes_every_picture(written):
    page = page_of(written)
    images = [attrs for tag, attrs in page.tags if tag == "img" and "src" in attrs]
    # every pair once among the first, once in the list of all
    assert len(images) == 2 * 2 * 3
    assert all(attrs["src"].startswith("data:image/webp;base64,") for attrs in images)
    assert all(attrs["alt"] for attrs in images)
    assert not [
        t for t, a in page.tags if t in {"link", "iframe"} or (t == "script" and "src" in a)
    ]
    urls = [v for _, a in page.tags for k, v in a.items() if k in {"href", "src", "xlink:href"}]
    assert all(url.startswith(("data:", "#")) for url in urls)
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {url[1:] for url in urls if url.startswith("#") and "clip" not in url} - ids == set()
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 4


def test_html_has_no_id_twice(written):
    ids = [attrs["id"] for _, attrs in page_of(written).tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_html_escapes_prompts_and_warnings(written):
    text = (written[2] / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "something to know &lt;first&gt;" in text


def test_html_says_the_verdict_before_anything_else(written):
    text = "".join(page_of(written).text)
    assert (
        text.index("Undecided: SSIM")
        < text.index("Size")
        < text.index("Worst pairs")
        < text.index("Quantized weights are undecided. SSIM")
    )
    assert "Not measured: LPIPS, CLIP score loss." in text
    assert "73 calls: 70 on host, 3 on reference" in text


def test_pages_put_every_noise_floor_beside_the_metrics(written):
    report, _, folder = written
    text = (folder / "report.html").read_text(encoding="utf-8")
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    gap = report.noise_floor[0]
    numbers = (
        show_mean(report.comparison.scores["ssim"].summary),
        show_mean(gap.floor.comparison.scores["ssim"].summary),
        show_difference(gap.differences["ssim"]),
    )
    for page in (text, markdown):
        assert "BF16 instead of float32" in page
        # the HTML table sets the interval below its mean
        assert all(part in page for number in numbers for part in number.split(" ", 1))
        assert "batches of 1 instead of 2: the original overflows" in page
    assert "| 1 | 900 | 0.00015 | 1e-05 | 1e-06 | - |" in markdown


def test_html_shows_the_worst_first(written):
    report, pairs, _ = written
    figures = [attrs for tag, attrs in page_of(written).tags if tag == "figure"]
    found = [a["data-name"] for a in figures if a.get("id", "").startswith("pair-")]
    assert found == [pairs.names[i] for i in report.comparison.worst_first()]
    assert found[-1] == "000"


def test_html_follows_light_and_dark(written):
    text = (written[2] / "report.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert all("currentColor" in svg and "#010203" not in svg for svg in drawings)


def test_markdown_tables_have_as_many_cells_as_headings(written):
    lines = (written[2] / "report.md").read_text(encoding="utf-8").splitlines()
    width, tables = None, 0
    for line in lines:
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
        tables += width is None and cells is not None
        assert cells is None or width is None or cells == width, line
        width = cells
    assert tables == 10
    assert lines[2].startswith("**Undecided: SSIM")
    for i, line in enumerate(lines):
        assert not line.startswith("#") or i == 0 or lines[i - 1] == "", line


def test_saved_pictures_are_the_measured_ones(written):
    report, pairs, folder = written
    for side in ("original", "packed"):
        for name, picture in zip(pairs.names, getattr(pairs, side), strict=True):
            assert (read_image(folder / "images" / side / f"{name}.png") == picture).all()
    again = compare(
        match_folders(folder / "images/original", folder / "images/packed"), Backbones()
    )
    for name, score in report.comparison.scores.items():
        assert again.scores[name].values == score.values


def test_report_is_never_overwritten_without_force(written, tmp_path):
    report, pairs, _ = written
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match="exists already; set force to replace it"):
        write_report(report, pairs, tmp_path / "out", force=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    with pytest.raises(OutputError, match=r"holds mine\.txt, which quantkit did not write"):
        write_report(report, pairs, tmp_path / "out", force=True)
    (tmp_path / "out" / "mine.txt").unlink()
    for _ in range(2):
        write_report(report, pairs, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_report_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no plots today")

    pairs = made()
    monkeypatch.setattr("quantkit.eval.pages.layer_sections.plot_layer_errors", fail)
    with pytest.raises(RuntimeError, match="no plots today"):
        write_report(made_report(pairs), pairs, tmp_path / "report", force=False)
    assert list(tmp_path.iterdir()) == []


def test_every_pair_is_on_the_page_and_the_first_in_the_markdown(tmp_path):
    pairs = made(MOST_PAIRS + 2, sigma=0.2)
    write_report(made_report(pairs), pairs, tmp_path / "r", force=False)
    text = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    assert text.count('id="pair-') == MOST_PAIRS + 2
    markdown = (tmp_path / "r" / "report.md").read_text(encoding="utf-8")
    assert markdown.count("![original]") == MOST_PAIRS
    assert len(list((tmp_path / "r" / "images" / "packed").iterdir())) == MOST_PAIRS + 2


def test_pictures_beside_the_page_are_the_measured_files(tmp_path):
    pairs = replace(made(), names=("a b", "c%d", "e"))
    write_report(made_report(pairs), pairs, tmp_path / "r", force=False, pictures=Pictures.BESIDE)
    page = Page((tmp_path / "r" / "report.html").read_text(encoding="utf-8"))
    sources = {attrs["src"] for tag, attrs in page.tags if tag == "img" and "src" in attrs}
    found = {(tmp_path / "r" / unquote(source)).resolve() for source in sources}
    assert found == {path.resolve() for path in (tmp_path / "r").glob("images/*/*.png")}
    assert len(found) == 6


def test_one_prompt_and_no_packed_layer_still_make_a_report(tmp_path):
    pairs = made(1)
    report = replace(
        made_report(pairs), noise_floor=(), timesteps=Timesteps(None, None, "not measured"),
        layers=(layer(0, packed=False),), kernels=Kernels((), None, "", "none"),
        warnings=(),
    )  # fmt: skip
    write_report(report, pairs, tmp_path / "r", force=False)
    assert "No packed layer ran." in (tmp_path / "r" / "report.md").read_text()


def test_what_another_tool_did_is_shown_as_it_is_written(tmp_path):
    by = QuantizedBy("unet", "SDNQ", "sdnq", "0.2.8", (("weights_dtype", NASTY),), {"a": [None]})
    report = replace(
        made_report(made()), quantized_by=(by,), layers=(), kernels=Kernels((), None, "", "none")
    )
    write_report(report, made(), tmp_path / "r", force=False)
    page = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    assert f"unet by SDNQ 0.2.8 (weights_dtype {html.escape(NASTY)[:9]}" in page
    assert "<script>alert" not in page
    assert "no kernel of quantkit ran" in page
    text = (tmp_path / "r" / "report.md").read_text(encoding="utf-8")
    assert "## Layers" not in text
    for missing in ("computed the packed layers", "largest deviation", "No packed"):
        assert missing not in page + text
    found = json.loads((tmp_path / "r" / "report.json").read_text())
    assert found["quantized_by"][0]["settings"] == [["weights_dtype", NASTY]]
    assert found["quantized_by"][0]["config"] == {"a": [None]}


def test_steps_without_a_local_error_are_shown(tmp_path):
    report = replace(made_report(made()), timesteps=replace(STEPS, local=None))
    write_report(report, made(), tmp_path / "r", force=False)
    text = (tmp_path / "r" / "report.md").read_text(encoding="utf-8")
    assert "| 1 | 900 | 0.00015 | - | 1e-06 | - |" in text


def test_verdict_names_what_passes_fails_and_was_not_measured():
    pairs = made(8)
    good = made_report(pairs, Limits(ssim=0.0, lpips=None, clip=None))
    assert good.passed
    assert headline(good.gates) == "Passed."
    assert headline(made_report(pairs, Limits(ssim=0.0)).gates) == "Passed what was measured."
    assert headline(made_report(made(3), Limits(ssim=0.0)).gates) == "Undecided."
    assert re.match(r"Quantized weights pass: SSIM 0\.\d+ \(> 0\)\. ", good.verdict)
    mean = show_mean(good.comparison.scores["ssim"].summary)
    assert mean.endswith("]")
    assert lead(good.gates) == f"Passed: SSIM {mean} (expected > 0)."
    none = made_report(pairs, Limits(ssim=None))
    assert lead(none.gates) == "Not judged: no gate was measured."
    assert not none.passed
    assert headline(none.gates) == "Not judged."
    assert none.verdict.startswith(
        "Quantized weights were not judged. Not measured: LPIPS, CLIP score loss. "
    )


def test_gate_remark_warns_when_more_prompts_could_turn_it():
    pairs = made()
    mean = made_report(pairs).comparison.scores["ssim"].summary.mean
    close = made_report(pairs, Limits(ssim=mean - 1e-3)).gates[0]
    far = made_report(pairs, Limits(ssim=-0.9)).gates[0]
    assert gate_remark(close) == "more than 10,000 prompts would decide"
    assert gate_remark(far) == "about 8 prompts would decide"
    assert gate_remark(made_report(made(8), Limits(ssim=-0.9)).gates[0]) == ""


def test_kernel_sentence_names_backends_and_the_worst_layer():
    sentence = kernel_sentence(made_report(made()))
    assert "73 calls: 70 on host, 3 on reference" in sentence
    assert "2.5e-07 of the rms, in unet.block.1.conv" in sentence


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (None, "", "-"),
        (float("inf"), "dB", "infinite"),
        (0.98765, "", "0.9877"),
        (1.5, "%", "1.5 %"),
    ],
)
def test_numbers_are_shown_short(value, unit, expected):
    assert show(value, unit) == expected


def test_terminal_shows_every_noise_floor(capsys, monkeypatch):
    from quantkit.cli.report_tables import print_report

    monkeypatch.setenv("COLUMNS", "100")
    print_report(made_report(made(sigma=20.0)), Path("out"))
    text = capsys.readouterr().out
    assert "Noise floor: the original with BF16 instead of float32" in text
    assert re.search(r"SSIM +│ 0.9\d+ \[.*\] +│ -0.\d+ \[.*\] +│ (worse|undecided)", text)
    assert "Noise floor: the original with batches of 1 instead of 2: the original" in text


def test_intervals_and_differences_are_shown_in_brackets():
    summary = summarize([0.25, 0.75])
    assert show_interval(Interval(0.95123, 1.0, "BCa")) == "[0.9512, 1]"
    assert show_interval(None) == "-"
    assert show_mean(summary) == f"0.5 {show_interval(summary.interval)}"
    assert show_mean(summarize([])) == "-"
    assert show_difference(summarize([-0.125])) == "-0.125"
    assert show_difference(summarize([2.0, 2.0]), "%") == "+2 [+2, +2] %"


def test_to_json_of_every_state_is_valid():
    for count in (1, 2):
        json.dumps(made_report(made(count)).to_json(), allow_nan=False)


HOSTILE = (
    "a|b `x` <script>alert(1)</script> [l](javascript:x) *b* _c_ $d$ ~~e~~ @f https://g www.h.i "
    "&amp; \\ \n# heading\n- item"
)


def test_markdown_shows_text_of_others_as_it_is():
    text = escape_markdown(HOSTILE)
    assert "\n" not in text
    assert "<" not in text
    # What CommonMark makes of it again: escapes and entities undone, nothing else is markup.
    assert html.unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text)) == " ".join(HOSTILE.split())
    for mark in "`*_[]|~$@":
        assert not re.search(rf"(?<!\\){re.escape(mark)}", text.replace(r"\\\\", ""))


@pytest.mark.parametrize("text", ["x", "`", "a`b``c", "``", "a\nb", "<b>"])
def test_code_spans_hold_any_text(text):
    span = code_span(text)
    fence = re.match("`+", span)[0]
    assert span.endswith(fence)
    inside = span[len(fence) : -len(fence)]
    assert fence not in re.findall("`+", inside)
    assert inside.strip() == " ".join(text.split())


def test_every_html_template_is_escaped():
    import jinja2
    from jinja2 import nodes

    loader = jinja2.PackageLoader("quantkit.eval", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True)
    safe = []
    for name in loader.list_templates():
        if name.endswith(".j2"):
            assert name.endswith(".html.j2"), f"{name}: escaped how?"
            tree = environment.parse(loader.get_source(environment, name)[0])
            safe += [(name, f.node) for f in tree.find_all(nodes.Filter) if f.name == "safe"]
            assert not list(tree.find_all(nodes.ScopedEvalContextModifier))
    # Drawn by quantkit.eval.pages.plots, whose text matplotlib escapes.
    assert [(name, getattr(node, "attr", None)) for name, node in safe] == [("page.html.j2", "svg")]


def test_a_hostile_prompt_and_path_are_text_in_every_page(tmp_path):
    pairs = replace(made(), prompts=(HOSTILE, "ball", "ball"))
    report = replace(made_report(pairs), title=HOSTILE, commands=(HOSTILE,))
    report = replace(report, packed=replace(report.packed, path=HOSTILE))
    write_report(report, pairs, tmp_path / "out", force=False)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>alert(1)" not in page
    text = (tmp_path / "out" / "report.md").read_text()
    outside = text.replace(code_span(HOSTILE), "").replace(" ".join(HOSTILE.split()), "")
    assert "<script>" not in outside
    assert "\n# heading" not in text
    assert escape_markdown(HOSTILE) in text
