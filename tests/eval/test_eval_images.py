"""``quantkit eval images``: two folders of pictures."""

import json

import pytest
from click.testing import CliRunner
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import compare
from quantkit.eval.measuring.pictures import Pairs, match_folders

from quantkit.cli.evaluate_command import evaluate
from quantkit.errors import InputError, OutputError
from tests.support.pictures import made_pairs, pixels, write_folders


def run_images(*arguments):
    return CliRunner().invoke(evaluate, ["images", *map(str, arguments)])


def test_eval_images_prints_what_the_metrics_give(tmp_path):
    pairs = made_pairs(3)
    folders = write_folders(tmp_path, pairs)
    result = run_images(*folders, "--lpips-weights", "none", "--json", "--quiet")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    expected = compare(pairs, Backbones())
    assert found["schema"] == "quantkit.images"
    assert found["names"] == list(pairs.names)
    for name, score in expected.scores.items():
        assert found["metrics"][name]["values"] == pytest.approx(score.values)
    table = run_images(*folders, "--lpips-weights", "none")
    assert "SSIM" in table.stdout
    assert "3 pairs" in table.stdout


@pytest.mark.parametrize("place", ["inside", "beside"])
def test_eval_images_writes_a_page_of_the_pairs(tmp_path, place):
    pairs = made_pairs(3)
    folders, output = write_folders(tmp_path, pairs), tmp_path / "page"
    arguments = (*folders, "--lpips-weights", "none", "--quiet", "-o", output, "--pictures", place)
    result = run_images(*arguments, "--gate", "ssim=-1")
    assert result.exit_code == 0, result.output
    found = json.loads((output / "report.json").read_text())
    assert found["names"] == list(pairs.names)
    page = (output / "report.html").read_text(encoding="utf-8")
    assert page.index("Passed: SSIM") < page.index("Worst pairs") < page.index('id="metrics"')
    assert page.count('id="pair-') == 3
    assert ('src="data:image/webp' in page) == (place == "inside")
    saved = match_folders(output / "images/original", output / "images/packed")
    assert all((a == b).all() for a, b in zip(saved.packed, pairs.packed, strict=True))
    with pytest.raises(OutputError, match="exists already"):
        CliRunner().invoke(evaluate, ["images", *map(str, arguments)], catch_exceptions=False)
    inside = (*folders, "--lpips-weights", "none", "--quiet", "-o", folders[0] / "page")
    with pytest.raises(OutputError, match="overlaps the input"):
        CliRunner().invoke(evaluate, ["images", *map(str, inside)], catch_exceptions=False)


def test_eval_images_of_identical_folders_is_valid_json(tmp_path):
    first, _ = write_folders(tmp_path, made_pairs(3))
    result = run_images(first, first, "--lpips-weights", "none", "--json", "--quiet")

    def refuse(constant):
        raise AssertionError(constant)

    psnr = json.loads(result.stdout, parse_constant=refuse)["metrics"]["psnr"]
    assert psnr["values"] == [None] * 3
    assert psnr["null_means"] == "infinite: identical pictures"
    assert psnr["summary"]["mean"] is None
    assert psnr["summary"]["note"].startswith("3 of 3 pairs identical")


def test_eval_images_with_prompts_scores_clip_and_keeps_gates(
    tmp_path, clip_dir, alexnet_file, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "160")
    originals = tuple(pixels(seed, 40, 40) for seed in range(8))
    folders = write_folders(tmp_path, Pairs(tuple("abcdefgh"), originals, originals))
    (tmp_path / "prompts.txt").write_text("a red ball\na blue box\n" * 4)
    arguments = (
        *folders, "--prompts", tmp_path / "prompts.txt", "--clip", clip_dir,
        "--lpips-weights", alexnet_file, "--json",
    )  # fmt: skip
    good = run_images(*arguments, "--gate", "clip=1", "--gate", "lpips=0.1", "--gate", "ssim=0.9")
    assert good.exit_code == 0, good.output
    found = json.loads(good.stdout)
    assert found["clip"]["backbone"] == "tiny-clip (CLIP)"
    assert found["metrics"]["lpips"]["backbone"] == "ImageNet AlexNet"
    assert found["metrics"]["lpips"]["values"] == [0.0] * 8
    assert found["state"] == "passed"
    table = run_images(*arguments[:-1], "--gate", "lpips=0.1")
    assert "LPIPS [ImageNet AlexNet]" in table.stdout
    assert "tiny-clip (CLIP)" in table.stdout
    bad = run_images(*arguments, "--gate", "ssim=1.5")
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["gates"][0]["state"] == "failed"


def test_eval_images_of_few_pictures_decides_nothing(tmp_path):
    """3 is neither success nor failure: a script that asks for either does not go on."""
    folders = write_folders(tmp_path, made_pairs(4, sigma=0.1))
    found = run_images(*folders, "--lpips-weights", "none", "--gate", "ssim=0.5", "--quiet")
    assert found.exit_code == 3
    last = found.output.strip().splitlines()[-1]
    assert last.startswith("UNDECIDED: SSIM ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--gate", "clip=1"), "the gate on clip: CLIP needs the prompts"),
        (("--gate", "lpips=1", "--lpips-weights", "none"), "lpips: this metric is left out"),
    ],
)
def test_eval_images_refuses_gates_that_it_cannot_judge(tmp_path, arguments, expected):
    result = run_images(*write_folders(tmp_path, made_pairs(2)), "--quiet", *arguments)
    with pytest.raises(InputError, match=expected):
        raise result.exception
