"""The table of methods: several packed pipelines against one run of the original."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from quantkit.eval.judging.gates import State
from quantkit.eval.pages.methods_table import COLUMNS, best_first, cells, name_methods
from safetensors.torch import load_file, save_file

from quantkit.cli.evaluate_command import evaluate
from quantkit.errors import CheckpointError, InputError, ModelError, OutputError

QUICK = ("--lpips-weights", "none", "--clip", "none", "--quiet", "--count", "2", "--steps", "2")


def run(command, *arguments):
    return CliRunner().invoke(evaluate, [command, *map(str, arguments), *QUICK])


@pytest.fixture(scope="module")
def packed(pipeline_dir, tmp_path_factory):
    """FP8 per token, and the same with 2:4 by magnitude in every layer."""
    from quantkit.models.source import open_model
    from quantkit.packing.pack_model import pack
    from quantkit.progress import silent
    from quantkit.recipe.load import load_recipe

    folder = tmp_path_factory.mktemp("packed")
    sparse = folder / "sparse.yaml"
    sparse.write_text("name: one-shot\nsparsity: {method: magnitude}\nactivation: {mode: token}\n")
    for name, recipe in (("fp8", "fp8"), ("sparse", str(sparse))):
        pack(open_model(str(pipeline_dir)), load_recipe(recipe), folder / name, calibration=None,
             masks=None, threads=1, force=False, progress=silent)  # fmt: skip
    return folder / "fp8", folder / "sparse"


@pytest.fixture(scope="module")
def compared(pipeline_dir, packed, tmp_path_factory):
    output = tmp_path_factory.mktemp("compared") / "out"
    result = run("compare", pipeline_dir, *packed, "-o", output, "--gate", "ssim=-1", "--json")
    assert result.exit_code == 0, result.output
    return output, json.loads(result.stdout)


def test_compare_writes_one_page_and_a_report_each(compared):
    output, printed = compared
    assert {path.name for path in output.iterdir()} == {
        ".quantkit", "index.html", "methods.md", "methods.json", "fp8", "sparse",
    }  # fmt: skip
    assert json.loads((output / "methods.json").read_text()) == printed
    assert (printed["schema"], printed["schema_version"]) == ("quantkit.methods", 1)
    assert [row["report"] for row in printed["methods"]] == [
        "fp8/report.json", "sparse/report.json",
    ]  # fmt: skip
    page = (output / "index.html").read_text(encoding="utf-8")
    for link in re.findall(r'(?:href|src)="([^"#]+)"', page):
        assert (output / link).is_file(), link
    assert page.count("noise floor: the original with") == 2
    assert 'href="../index.html"' in (output / "fp8" / "report.html").read_text(encoding="utf-8")
    order = ("<h1>", 'class="tiles methods"', 'id="look"', 'id="pictures"', 'id="table"')
    assert sorted(order, key=page.index) == list(order)
    figure = page[page.index('<figure class="pair"') : page.index("</figure>")]
    assert re.findall('data-side="([^"]+)"><span', figure) == ["original", "fp8", "sparse"]


def test_compare_rows_are_those_of_the_single_reports(compared):
    output, printed = compared
    for row in printed["methods"]:
        report = json.loads((output / row["report"]).read_text())
        metrics = report["comparison"]["metrics"]
        assert row["metrics"]["ssim"]["summary"] == metrics["ssim"]["summary"]
        assert row["ratio"] == report["packed"]["nbytes"] / report["original"]["nbytes"]
        assert row["packing"] == report["packing"]
        assert row["verdict"] == report["verdict"]
    dense, sparse = printed["methods"]
    assert (dense["packing"]["recipe"], sparse["packing"]["recipe"]) == ("fp8", "one-shot")
    assert dense["packing"]["sparse"] == 0 < sparse["packing"]["sparse"]
    assert dense["packing"]["pruned"] == 0.0 < sparse["packing"]["pruned"] <= 0.5
    assert sparse["ratio"] < dense["ratio"] < 1
    ssim = [row["metrics"]["ssim"]["summary"]["mean"] for row in printed["methods"]]
    assert ssim[1] < ssim[0]


def test_compare_runs_the_original_once(compared):
    output, _ = compared
    first, second = (json.loads((output / name / "report.json").read_text())
                     for name in ("fp8", "sparse"))  # fmt: skip
    assert first["run"]["original_seconds"] == second["run"]["original_seconds"]
    floors = [[f["comparison"] for f in report["noise_floor"]] for report in (first, second)]
    assert floors[0] == floors[1]
    for name in ("000.png", "001.png"):
        pictures = [(output / m / "images/original" / name).read_bytes() for m in ("fp8", "sparse")]
        assert pictures[0] == pictures[1]


def test_markdown_table_has_a_row_each_and_the_floors(compared):
    text = (compared[0] / "methods.md").read_text(encoding="utf-8")
    lines = text.partition("## Table of methods")[2].splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {len(COLUMNS) + 1}
    assert [row.split("|")[1].strip() for row in rows] == [
        "method", "---", "[fp8](fp8/report.md)", "[sparse](sparse/report.md)",
        "noise floor: the original with BF16 instead of float32",
        "noise floor: the original with batches of 1 instead of 2",
    ]  # fmt: skip


def test_compare_fails_with_1_when_a_gate_of_any_fails(pipeline_dir, packed, tmp_path):
    result = run(
        "compare", pipeline_dir, packed[0], "-o", tmp_path / "out", "--gate", "ssim=1",
        "--no-noise-floor",
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    assert "fail: SSIM is" in result.output
    assert "FAIL: 0 of 1 packed pipelines" in result.output
    assert "noise floor" not in (tmp_path / "out" / "methods.md").read_text()


def test_compare_plans_dry_and_refuses_before_the_long_work(pipeline_dir, packed, tmp_path):
    output = tmp_path / "out"
    dry = run("compare", pipeline_dir, *packed, "-o", output, "-n")
    assert "would run 2 prompts of 2 steps through 3 pipelines, the original twice" in dry.output
    twice = run("compare", pipeline_dir, packed[0], packed[0], "-o", output)
    assert isinstance(twice.exception, InputError)
    assert "given twice" in str(twice.exception)
    broken = shutil.copytree(packed[0], tmp_path / "broken")
    (broken / "unet" / "config.json").write_text("{")
    for arguments in ((broken,), (*packed, broken)):
        result = run("compare", pipeline_dir, *arguments, "-o", output)
        assert isinstance(result.exception, InputError | CheckpointError)
    output.mkdir()
    taken = run("compare", pipeline_dir, *packed, "-o", output)
    assert isinstance(taken.exception, OutputError)
    assert list(output.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([("failed", 0.99), ("passed", 0.96), ("undecided", 0.95)], [1, 2, 0]),
        ([("passed", 0.96), ("passed", 0.98), ("passed", None)], [1, 0, 2]),
    ],
)
def test_the_best_method_is_first(given, expected):
    def made(state, mean):
        scores = {"ssim": SimpleNamespace(summary=SimpleNamespace(mean=mean))}
        report = SimpleNamespace(state=State(state), comparison=SimpleNamespace(scores=scores))
        return SimpleNamespace(report=report)

    methods = [made(*row) for row in given]
    assert [methods.index(method) for method in best_first(methods)] == expected


def test_names_tell_directories_apart(tmp_path):
    paths = [tmp_path / "a" / "packed", tmp_path / "b" / "packed"]
    assert name_methods(paths) == ("a-packed", "b-packed")
    assert name_methods([tmp_path / "x", tmp_path / "y"]) == ("x", "y")
    assert name_methods(paths[:1]) == ("packed",)
    deep = [tmp_path / "a" / "out" / "packed", tmp_path / "b" / "out" / "packed"]
    assert name_methods(deep) == ("a-out-packed", "b-out-packed")


def test_no_change_of_the_clip_score_has_no_minus():
    from quantkit.eval.measuring.sample_statistics import summarize
    from quantkit.eval.pages.methods_table import _clip_change

    none = summarize([0.0, 0.0])
    assert _clip_change(none, none) == "+0 [+0, +0] %"
    loss = summarize([1.0, 3.0])
    assert re.fullmatch(r"-2 \[-\d.*, -\d.*\] %", _clip_change(loss, loss))


def test_a_row_without_networks_has_dashes(compared, packed):
    from quantkit.eval.pages.methods_table import Method

    from tests.support.reports import made, made_report

    row = dict(
        zip(COLUMNS, cells(Method("mine", made_report(made(sigma=20.0)), "mine")), strict=True)
    )
    assert (row["LPIPS"], row["CLIP change"]) == ("-", "-")
    assert row["gates"] == "undecided: SSIM"
    assert (row["recipe"], row["sparsity"], row["ratio"]) == ("fp8-static", "dense", "52.5 %")
    assert re.fullmatch(r"0\.\d+ \[.*, .*\]", row["SSIM"])


@pytest.fixture
def sparse_pipeline(pipeline_dir, tmp_path):
    """The pipeline in 16 bit with 2:4 zeros in two of its layers, changed in one more."""
    folder = shutil.copytree(pipeline_dir, tmp_path / "sparse16")
    (file,) = (folder / "unet").glob("*.safetensors")
    tensors = load_file(file)
    names = [name for name, tensor in tensors.items() if tensor.ndim == 2 and "attn1" in name][:3]
    for name in names[:2]:
        tensors[name][:, 0::4] = 0
        tensors[name][:, 1::4] = 0
    tensors[names[2]] *= 1.01
    save_file(tensors, file, metadata={"format": "pt"})
    return folder, [name.removesuffix(".weight") for name in names]


def test_a_sixteen_bit_pipeline_is_compared_as_it_is(pipeline_dir, sparse_pipeline, tmp_path):
    folder, (first, second, third) = sparse_pipeline
    result = run("report", pipeline_dir, folder, "-o", tmp_path / "out", "--gate", "ssim=-1",
                 "--no-noise-floor", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    rows = {row["name"]: row for row in report["layers"]}
    changed = {name for name, row in rows.items() if row["weight_error"] is not None}
    assert changed == {first, second, third}
    assert rows[first]["format"].endswith(", 2:4")
    assert not rows[third]["format"].endswith(", 2:4")
    assert rows[third]["weight_error"] == pytest.approx(0.01, rel=0.05)
    assert report["packing"]["packed"] == 0
    assert report["packing"]["sparse"] == 2
    assert report["compression"] == "2:4"
    assert report["packed"]["nbytes"] == pytest.approx(report["original"]["nbytes"], rel=0.01)
    assert report["comparison"]["metrics"]["ssim"]["summary"]["mean"] < 1
    assert "0 of" in (tmp_path / "out" / "report.md").read_text()


def test_an_unchanged_pipeline_is_judged_as_sixteen_bit(pipeline_dir, tmp_path):
    folder = shutil.copytree(pipeline_dir, tmp_path / "same")
    result = run(
        "report", pipeline_dir, folder, "-o", tmp_path / "out", "--no-noise-floor", "--json"
    )
    assert result.exit_code == 3, result.exception
    report = json.loads(result.stdout)
    # Two pictures pass nothing, even if nothing changed.
    assert report["verdict"]["state"] == "undecided"
    assert report["compression"] == "16-bit"
    assert report["comparison"]["metrics"]["ssim"]["summary"]["mean"] == 1
    assert report["timesteps"]["divergence"]["mean"][-1] == 0


def test_pipelines_of_other_layers_are_refused(pipeline_dir, sparse_pipeline, tmp_path):
    folder, (first, *_) = sparse_pipeline
    (file,) = (folder / "unet").glob("*.safetensors")
    tensors = load_file(file)
    del tensors[f"{first}.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    result = run("report", pipeline_dir, folder, "-o", tmp_path / "out")
    assert isinstance(result.exception, ModelError)
    assert f"1 layers differ in name or shape from {pipeline_dir / 'unet'}, as {first}" in str(
        result.exception
    )
    alone = run("report", pipeline_dir, pipeline_dir / "unet", "-o", tmp_path / "out")
    assert isinstance(alone.exception, ModelError)
    assert "not packed" in str(alone.exception)
