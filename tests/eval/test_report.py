"""The report: its JSON, Markdown and HTML, and the commands that make it."""

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from quantkit.eval.backbones import Backbones
from quantkit.eval.comparison import compare
from quantkit.eval.gates import Compression, Limits, judge
from quantkit.eval.images import Pairs, match_folders, read_image
from quantkit.eval.noise_floor import Floor, measure_gaps
from quantkit.eval.number_format import show, show_difference, show_interval, show_mean
from quantkit.eval.report import (
    EMBED_COUNT,
    code_span,
    escape_markdown,
    gate_remark,
    headline,
    kernel_sentence,
    write_report,
)
from quantkit.eval.result import (
    SCHEMA_VERSION,
    GenerationFacts,
    KernelCalls,
    Kernels,
    LayerRow,
    ModelFacts,
    Packing,
    Report,
    Timesteps,
)
from quantkit.eval.statistics import Interval, summarize
from quantkit.eval.step_errors import StepErrors

from quantkit.errors import InputError, NonFiniteError, OutputError

NASTY = "a <script>alert(1)</script> | \"quoted\" & 'said' ball"


def pictures(count, side=32):
    rng = np.random.default_rng(0)
    return tuple(
        np.kron(rng.integers(0, 256, (side // 8, side // 8, 3)), np.ones((8, 8, 1))).astype(
            np.uint8
        )
        for _ in range(count)
    )


def made(count=3, *, sigma=4.0, side=32):
    originals = pictures(count, side)
    rng = np.random.default_rng(1)
    # The first pair is identical: PSNR infinite, which JSON cannot say.
    packed = tuple(
        np.clip(p + rng.normal(0, sigma * i, p.shape), 0, 255).round().astype(np.uint8)
        for i, p in enumerate(originals)
    )
    prompts = (NASTY, *(f"ball {i}" for i in range(1, count)))
    return Pairs(tuple(f"{i:03d}" for i in range(count)), originals, packed, prompts)


def layer(index, *, packed=True):
    words = "e4m3fn per channel, input per token" if packed else "F16, not packed"
    numbers = (0.02 + index / 1000, 0.03, 1e-7) if packed else (None, None, None)
    return LayerRow("unet", f"block.{index}.conv", "conv2d", (64, 32, 3, 3), words,
                    "host" if packed else "torch", "", *numbers, 36864, 18688)  # fmt: skip


def made_floors(pairs):
    """BF16 moved every picture by a little noise; the other floor could not be measured."""
    rng = np.random.default_rng(2)
    moved = tuple(
        np.clip(p + rng.normal(0, 2, p.shape), 0, 255).round().astype(np.uint8)
        for p in pairs.original
    )
    steps = StepErrors((900.0, 100.0), ((1e-6,) * 3, (1e-5, 2e-5, 6e-5)))
    return (
        Floor(
            "dtype", "BF16 instead of float32",
            compare(replace(pairs, packed=moved), Backbones()), steps,
        ),
        Floor("batch", "batches of 1 instead of 2", None, None, "the original overflows"),
    )  # fmt: skip


STEPS = Timesteps(
    StepErrors((900.0, 100.0), ((1e-4, 2e-4), (1e-3, 4e-3))),
    StepErrors((900.0, 100.0), ((1e-5, 1e-5), (2e-5, 2e-5))),
    "divergence over 2 prompts",
)


def made_report(pairs, limits=None):
    comparison = compare(pairs, Backbones())
    count = len(pairs.names)
    return Report(
        title="tiny against tiny",
        created="2026-01-02 03:04 UTC",
        quantkit_version="0.1.0",
        compression=Compression.FP8,
        original=ModelFacts("pipeline", "ab" * 32, 4_000_000),
        packed=ModelFacts("packed", "cd" * 32, 2_100_000),
        packing=Packing("fp8-static", 5, 4, 0, 0.0),
        run=GenerationFacts(
            pairs.prompts, tuple(range(count)), 5, None, 2, "cpu", "float32", 1.0, 2.5, "note"
        ),
        comparison=comparison,
        noise_floor=measure_gaps(comparison, made_floors(pairs)),
        timesteps=STEPS,
        gates=judge(comparison, limits or Limits(), Compression.FP8),
        kernels=Kernels(
            tuple(KernelCalls("gemm_fp8", "t0", *row) for row in (("host", 70), ("reference", 3))),
            2.5e-7, "unet.block.1.conv", "8 calls of 4 layers were computed again on reference",
        ),
        layers=(*(layer(i) for i in range(4)), layer(9, packed=False)),
        environment=(("torch", "2.9.0"),),
        commands=("quantkit eval report pipeline packed -o report",),
        warnings=("something to know <first>",),
    )  # fmt: skip


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
    assert found["verdict"] == {"passed": report.passed, "text": report.verdict}
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
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 3 * 3
    assert all(attrs["src"].startswith("data:image/png;base64,") for attrs in images)
    assert all(attrs["alt"] for attrs in images)
    assert not [
        t for t, a in page.tags if t in {"link", "iframe"} or (t == "script" and "src" in a)
    ]
    urls = [v for _, a in page.tags for k, v in a.items() if k in {"href", "src", "xlink:href"}]
    assert all(url.startswith(("data:", "#")) for url in urls)
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 5


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
    assert text.index("Failed.") < text.index("FP8 fails: SSIM is") < text.index("Metrics")
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
    report, pairs, folder = written
    captions = re.findall(r"<figcaption>(\d{3}), seed", (folder / "report.html").read_text())
    assert captions == [pairs.names[i] for i in report.comparison.worst_first()]
    assert captions[-1] == "000"


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
    assert tables == 7
    assert lines[2].startswith("**Failed.** FP8 fails: SSIM is")
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
    monkeypatch.setattr("quantkit.eval.report.plot_bytes", fail)
    with pytest.raises(RuntimeError, match="no plots today"):
        write_report(made_report(pairs), pairs, tmp_path / "report", force=False)
    assert list(tmp_path.iterdir()) == []


def test_many_and_large_pictures_are_shown_in_part_and_shrunk(tmp_path):
    pairs = made(EMBED_COUNT + 2, sigma=0.2)
    large = replace(
        pairs,
        original=(np.zeros((600, 800, 3), np.uint8), *pairs.original[1:]),
        packed=(np.zeros((600, 800, 3), np.uint8), *pairs.packed[1:]),
    )
    write_report(made_report(large), large, tmp_path / "r", force=False)
    text = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    assert text.count("<figcaption>0") == EMBED_COUNT
    assert "2 more are in" in text
    assert "Shown smaller than they are" in text
    assert len(list((tmp_path / "r" / "images" / "packed").iterdir())) == EMBED_COUNT + 2


def test_one_prompt_and_no_packed_layer_still_make_a_report(tmp_path):
    pairs = made(1)
    report = replace(
        made_report(pairs), noise_floor=(), timesteps=Timesteps(None, None, "not measured"),
        layers=(layer(0, packed=False),), kernels=Kernels((), None, "", "none"),
        warnings=(),
    )  # fmt: skip
    write_report(report, pairs, tmp_path / "r", force=False)
    assert "No packed layer ran." in (tmp_path / "r" / "report.md").read_text()


def test_verdict_names_what_passes_fails_and_was_not_measured():
    pairs = made()
    good = made_report(pairs, Limits(ssim=0.0, lpips=None, clip_fp8=None))
    assert good.passed
    assert headline(good) == "Passed."
    assert headline(made_report(pairs, Limits(ssim=0.0))) == "Passed what was measured."
    assert re.match(r"FP8 passes: SSIM 0\.\d+ \(> 0\)\. ", good.verdict)
    none = made_report(pairs, Limits(ssim=None))
    assert not none.passed
    assert headline(none) == "Not judged."
    assert none.verdict.startswith("FP8 was not judged. Not measured: LPIPS, CLIP score loss. ")


def test_gate_remark_warns_when_more_prompts_could_turn_it():
    pairs = made()
    mean = made_report(pairs).comparison.scores["ssim"].summary.mean
    close = made_report(pairs, Limits(ssim=mean - 1e-3)).gates[0]
    far = made_report(pairs, Limits(ssim=-0.9)).gates[0]
    assert gate_remark(close) == "more prompts could change it: the interval includes the limit"
    assert gate_remark(far) == ""


def test_kernel_sentence_names_backends_and_the_worst_layer():
    sentence = kernel_sentence(made_report(made()))
    assert "73 calls: 70 on host, 3 on reference" in sentence
    assert "2.5e-07 of the rms, in unet.block.1.conv" in sentence


@pytest.mark.parametrize(
    ("value", "unit", "wanted"),
    [
        (None, "", "-"),
        (float("inf"), "dB", "infinite"),
        (0.98765, "", "0.9877"),
        (1.5, "%", "1.5 %"),
    ],
)
def test_numbers_are_shown_short(value, unit, wanted):
    assert show(value, unit) == wanted


def test_terminal_shows_every_noise_floor(capsys, monkeypatch):
    from quantkit.cli.report_tables import print_report

    monkeypatch.setenv("COLUMNS", "100")
    print_report(made_report(made(sigma=20.0)), Path("out"))
    text = capsys.readouterr().out
    assert "Noise floor: the original with BF16 instead of float32" in text
    assert re.search(r"SSIM +│ 0.9\d+ \[.*\] +│ -0.\d+ \[.*\] +│ (worse|no clear difference)", text)
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


# --- both pipelines, from the command line


NO_NETWORKS = ("--without", "lpips", "--without", "clip", "--quiet")


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("a red ball\na blue box\na tree, 3 cats\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def ran(pipeline_dir, prompt_file, tmp_path_factory):
    """``quantkit run fp8-sparse`` on the tiny pipeline: calibration, masks, packed, report."""
    from quantkit.cli.run import run

    folder = tmp_path_factory.mktemp("run") / "out"
    recipe = folder.parent / "quick.yaml"
    recipe.write_text(
        "name: quick\nsparsity: {method: wanda}\ngates: {ssim: -1.0}\n"
        "calibration: {prompts: 2, steps: 2, buckets: 1}\n"
    )
    arguments = (
        recipe,
        pipeline_dir,
        "-o",
        folder,
        "--prompts",
        prompt_file,
        "--steps",
        3,
        "--json",
    )
    result = CliRunner().invoke(run, [*map(str, arguments), *NO_NETWORKS])
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout)


def test_run_writes_every_artefact_and_the_report_it_prints(ran):
    folder, printed = ran
    assert {path.name for path in folder.iterdir()} == {
        "calibration.safetensors", "masks.safetensors", "packed", "report",
    }  # fmt: skip
    assert json.loads((folder / "report" / "report.json").read_text()) == printed
    assert printed["compression"] == "FP8 and 4:2"
    assert printed["run"]["dtype"] == "float32"
    assert printed["gates"][0]["limit"] == -1.0


def test_run_takes_second_moments_where_the_recipe_needs_them(pipeline_dir, prompt_file, tmp_path):
    """All that is chosen from activations at once: GPTQ, SparseGPT, shifts per bucket."""
    from quantkit.cli.run import run

    recipe, folder = tmp_path / "all.yaml", tmp_path / "out"
    recipe.write_text(
        "name: all\nweight: {observer: mse, rounding: gptq}\n"
        "activation: {mode: static, shift: true, buckets: 2}\n"
        'keep: ["*"]\noverrides: [{layers: ["mid_block.attentions.*"], keep: false}]\n'
        "sparsity: {method: sparsegpt}\ngates: {ssim: -1.0}\n"
        "calibration: {prompts: 2, steps: 2, buckets: 2}\n"
    )
    arguments = (recipe, pipeline_dir, "-o", folder, "--prompts", prompt_file, "--steps", 2)
    options = ("--no-noise-floor", "--json")
    result = CliRunner().invoke(run, [*map(str, arguments), *options, *NO_NETWORKS])
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == {
        "calibration.safetensors", "hessians", "masks.safetensors", "packed", "report",
    }  # fmt: skip
    config = json.loads((folder / "packed" / "unet" / "config.json").read_text())
    schemes = config["quantization_config"]["schemes"]
    assert config["quantization_config"]["format_version"] == 2
    assert all(s["shift"] and len(s["buckets"]) == 1 for s in schemes)
    assert any(s["sparsity"] == "2:4" for s in schemes)
    # What it was given back through kernels is what reference makes of it.
    assert json.loads(result.stdout)["kernels"]["worst_deviation"] < 1e-4


def test_report_tells_what_ran_every_layer(ran):
    _, printed = ran
    kernels, layers = printed["kernels"], printed["layers"]
    packed = [row for row in layers if row["weight_error"] is not None]
    assert len(packed) > 40
    assert {row["backend"] for row in packed} == set(kernels["calls_by_backend"])
    # Every packed layer quantizes and multiplies once in each of 3 steps; one batch of 3 prompts.
    assert kernels["total_calls"] == 2 * 3 * len(packed)
    assert kernels["worst_deviation"] == max(row["deviation"] for row in packed)
    assert 0 <= kernels["worst_deviation"] < 1e-4
    assert "were computed again on reference" in kernels["watched"]
    # 2:4 of Gaussian weights loses 0.3 of the norm by magnitude; Wanda and FP8 add to it.
    sparse = [row for row in packed if "4:2" in row["format"]]
    assert all(0.2 < row["weight_error"] < 0.7 for row in sparse)
    assert all(row["output_error"] > 0 for row in packed)
    assert all(row["bytes_after"] < row["bytes_before"] for row in packed)


def test_run_needs_no_force_to_refuse_and_plans_dry(ran, pipeline_dir, tmp_path):
    from quantkit.cli.run import run

    folder, _ = ran
    again = CliRunner().invoke(run, ["fp8", str(pipeline_dir), "-o", str(folder), *NO_NETWORKS])
    assert isinstance(again.exception, OutputError)
    dry = CliRunner().invoke(run, ["fp8", str(pipeline_dir), "-o", str(tmp_path / "x"), "-n"])
    assert dry.exit_code == 0, dry.output
    assert "would write packed/, report/ into" in dry.output
    assert not (tmp_path / "x").exists()


def eval_report(*arguments):
    from quantkit.cli.evaluate import evaluate

    return CliRunner().invoke(evaluate, ["report", *map(str, arguments), *NO_NETWORKS])


def test_run_measures_noise_floor_and_steps(ran):
    _, printed = ran
    dtype, batch = printed["noise_floor"]
    assert dtype["title"] == "BF16 instead of float32"
    assert batch["title"] == "batches of 1 instead of 3"
    fine, coarse = (f["comparison"]["metrics"]["mse"]["summary"]["mean"] for f in (batch, dtype))
    # other batches change the order of float32 sums only: nothing that 8 bits can show
    assert 0 <= fine < 1e-7 < coarse < 1e-3
    divergence, local = printed["timesteps"]["divergence"], printed["timesteps"]["local"]
    assert len(divergence["mean"]) == len(local["mean"]) == 3
    assert divergence["timesteps"] == local["timesteps"] == sorted(local["timesteps"])[::-1]
    # one-shot 4:2 of random weights: far above BF16, whose unit roundoff squared is 1.5e-5
    assert divergence["mean"][-1] > 10 * dtype["divergence"]["mean"][-1] > 1e-9
    assert all(1e-4 < error < 10 for error in local["mean"])
    assert divergence["count"] == 3
    assert local["count"] == 4


def test_run_says_which_recipe_and_how_sparse(ran):
    packing = ran[1]["packing"]
    assert packing["recipe"] == "quick"
    assert packing["sparse"] <= packing["packed"] < packing["layers"]
    assert 0.3 < packing["pruned"] < 0.5


def original_pipeline(path):
    import torch

    from quantkit.models.source import open_model
    from quantkit.pipelines.running import load_pipeline

    return load_pipeline(open_model(str(path)), torch.device("cpu"))


def test_batch_size_does_not_change_the_noise(pipeline_dir):
    from quantkit.eval.generation import generate, make_settings

    pipe = original_pipeline(pipeline_dir)
    made_by = {
        batch: generate(
            pipe,
            make_settings(
                ["a ball", "a box", "a cat"], steps=2, guidance=None, seed=7, batch=batch
            ),
            label="original",
        ).pictures
        for batch in (1, 2, 3)
    }
    for batch in (2, 3):
        for one, other in zip(made_by[1], made_by[batch], strict=True):
            # only the rounding of another batch size remains
            assert np.abs(one.astype(int) - other).max() <= 1
    assert np.abs(made_by[1][0].astype(int) - made_by[1][1]).max() > 20


def test_eval_report_fails_with_1_and_warns_of_a_foreign_original(ran, prompt_file, tmp_path):
    from tests.support.pipelines import tiny_pipeline

    other = tiny_pipeline(tmp_path / "other", seed=5)
    result = eval_report(
        other, ran[0] / "packed", "-o", tmp_path / "r", "--prompts", prompt_file,
        "--count", 1, "--steps", 1, "--gate-ssim", 1,
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    assert "SSIM is" in result.output
    found = json.loads((tmp_path / "r" / "report.json").read_text())
    assert found["verdict"]["passed"] is False
    foreign, few = found["warnings"]
    assert "not made from this original" in foreign
    assert "1 prompts are few" in few


def test_eval_report_names_the_reference_when_no_kernel_runs(
    ran, pipeline_dir, prompt_file, tmp_path
):
    from quantkit.device.backends import Backend, use

    with use(Backend.REFERENCE):
        result = eval_report(
            pipeline_dir, ran[0] / "packed", "-o", tmp_path / "r", "--prompts", prompt_file,
            "--count", 1, "--steps", 1, "--gate-ssim", -1,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "report.html" in result.output
    found = json.loads((tmp_path / "r" / "report.json").read_text())
    assert set(found["kernels"]["calls_by_backend"]) == {"reference"}
    assert any("ran on reference, not on quantkit's kernels" in line for line in found["warnings"])
    assert found["kernels"]["worst_deviation"] == 0.0


def test_eval_report_refuses_what_makes_no_pictures(ran, pipeline_dir, prompt_file, tmp_path):
    common = ("-o", tmp_path / "r", "--prompts", prompt_file)
    alone = eval_report(pipeline_dir / "unet", ran[0] / "packed", *common)
    assert re.search("component alone cannot make pictures", str(alone.exception))
    few = eval_report(pipeline_dir, ran[0] / "packed", *common, "--count", 9)
    assert re.search("3 prompts, wanted 9", str(few.exception))
    component = eval_report(pipeline_dir, ran[0] / "packed" / "unet", *common)
    assert isinstance(component.exception, InputError)
    assert not (tmp_path / "r").exists()


def test_pictures_with_nan_name_pipeline_and_prompt(pipeline_dir):
    import torch
    from quantkit.eval.generation import generate, make_settings

    pipe = original_pipeline(pipeline_dir)
    torch.nn.init.constant_(pipe.vae.decoder.conv_out.bias, float("nan"))
    settings = make_settings(["a ball"], steps=1, guidance=None, seed=0, batch=1)
    with pytest.raises(NonFiniteError, match=r"packed, prompt 0 \('a ball'\): \d+ of \d+ values"):
        generate(pipe, settings, label="packed")


@pytest.mark.parametrize(
    ("prompts", "steps", "wanted"),
    [([], 1, "no prompts"), (["a", " "], 1, "prompt 1: empty"), (["a"], 0, "steps 0")],
)
def test_settings_that_make_no_pictures_are_refused(prompts, steps, wanted):
    from quantkit.eval.generation import make_settings

    with pytest.raises(InputError, match=wanted):
        make_settings(prompts, steps=steps, guidance=None, seed=0, batch=1)


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
            assert name.endswith((".html.j2", ".md.j2")), f"{name}: escaped how?"
            tree = environment.parse(loader.get_source(environment, name)[0])
            safe += [(name, f.node) for f in tree.find_all(nodes.Filter) if f.name == "safe"]
            assert not list(tree.find_all(nodes.ScopedEvalContextModifier))
    # Drawn by quantkit.eval.plots, whose text matplotlib escapes.
    assert [(name, node.attr) for name, node in safe] == [("report.html.j2", "svg")]


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
