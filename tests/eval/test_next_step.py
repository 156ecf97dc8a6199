"""What to do next: commands that do what the sentence beside them says."""

import shlex
from dataclasses import replace

import pytest
from quantkit.eval.judging.evaluation_result import Timesteps
from quantkit.eval.judging.gates import Limits, State
from quantkit.eval.judging.next_step import (
    FLATTEST,
    Treated,
    find_next_steps,
    fit_power,
    with_count,
)
from quantkit.eval.judging.noise_floor import Floor, FloorGap
from quantkit.eval.measuring.step_errors import StepErrors

from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.project.test_docs import parse
from tests.support.reports import made, made_report
from tests.support.sensitivities import layer_with
from tests.support.sensitivities import made as made_sensitivity

FP8 = Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("quantkit eval report a b -o r", "quantkit eval report a b -o r --count 80 --force"),
        ("quantkit eval report a --count 4 b", "quantkit eval report a b --count 80 --force"),
        (
            "quantkit eval report a b --count=4 --force",
            "quantkit eval report a b --count 80 --force",
        ),
        ("quantkit eval report 'a b' c", "quantkit eval report 'a b' c --count 80 --force"),
        # Hours of calibration are kept.
        ("quantkit run int8 a -o r --force", "quantkit run int8 a -o r --count 80 --resume"),
        ("quantkit run int8 a -o r --resume", "quantkit run int8 a -o r --count 80 --resume"),
    ],
)
def test_the_same_command_with_more_prompts(command, expected):
    assert with_count(command, 80) == expected
    parse(shlex.split(expected)[1:], whole="-o" in command)


def test_an_open_gate_asks_for_prompts_and_a_settled_one_for_nothing():
    pairs = made(8, sigma=8.0)
    report = made_report(pairs)
    mean = report.comparison.scores["ssim"].summary.mean
    open_ = made_report(pairs, Limits(ssim=mean + 0.01, lpips=None, clip=None))
    assert open_.state is State.UNDECIDED
    (step,) = find_next_steps(open_, None)
    assert step.what.startswith(f"run about {open_.gates[0].prompts_needed} prompts instead of 8")
    assert step.command == (
        f"quantkit eval report pipeline packed -o report --count {open_.gates[0].prompts_needed} "
        "--force"
    )
    assert find_next_steps(made_report(pairs, Limits(ssim=-0.9)), None) == ()


def test_a_failed_packed_model_is_trained_and_no_other():
    failed = made_report(made(8, sigma=8.0), Limits(ssim=1.5))
    (step,) = find_next_steps(failed, None)
    assert step.command == "quantkit recover pipeline --packed packed -o packed-trained"
    parse(shlex.split(step.command)[1:], whole=True)
    dense = replace(failed, packing=replace(failed.packing, packed=0))
    assert find_next_steps(dense, None) == ()


def test_prompts_that_are_not_there_are_asked_for_instead_of_run():
    pairs = made(8, sigma=8.0)
    mean = made_report(pairs).comparison.scores["ssim"].summary.mean
    report = made_report(pairs, Limits(ssim=mean + 0.01, lpips=None, clip=None))
    needed = report.gates[0].prompts_needed
    (step,) = find_next_steps(report, None, prompts=needed - 1)
    assert step.command == ""
    assert step.what.endswith(f"there are {needed - 1}: give a file of {needed} as --prompts")
    (step,) = find_next_steps(report, None, prompts=needed)
    assert f"--count {needed} " in step.command


def bad_layers(count=6):
    """A dozen layers, of which some lose a hundred times what the others do."""
    errors = [1e-2] * count + [1e-4] * (12 - count)
    return made_sensitivity([
        layer_with(f"block.{i}", **{"e4m3fn-token": error, "int8-token": error / 50})
        for i, error in enumerate(errors)
    ])  # fmt: skip


def packed(sensitivity, **schemes):
    every = {layer.name: FP8 for layer in sensitivity.layers}
    return Treated(sensitivity, "sensitivity.json", every | schemes)


def test_layers_are_kept_where_it_costs_least():
    report = made_report(made(8, sigma=12.0))
    assert report.state is State.FAILED
    step, _ = find_next_steps(report, packed(bad_layers()))
    assert set(step.layers) >= {f"block.{i}" for i in range(6)}
    assert "int8-token (block.0" in step.what
    found = report.gates[0].found
    assert f"SSIM {found:.3g} -> about 0.9" in step.what


def test_the_command_gives_the_recipe_that_was_told(tmp_path):
    """Typed as it stands, it chooses the layers that the sentence names."""
    from click.testing import CliRunner

    from quantkit.cli import quantkit
    from quantkit.recipe.load import load_recipe
    from quantkit.sensitivity.sensitivity_file import save_sensitivity

    sensitivity = bad_layers()
    save_sensitivity(sensitivity, tmp_path / "sensitivity.json", force=False)
    told = replace(packed(sensitivity), path=str(tmp_path / "sensitivity.json"))
    step, _ = find_next_steps(made_report(made(8, sigma=12.0)), told)
    words = shlex.split(step.command)
    words[-1] = str(tmp_path / "better.yaml")
    result = CliRunner().invoke(quantkit, [*words[1:], "--quiet"])
    assert result.exit_code == 0, result.exception
    recipe = load_recipe(tmp_path / "better.yaml")
    changed = {
        name for override in recipe.overrides for name in override.layers
        if override.keep or override.weight.format != "e4m3fn"
    }  # fmt: skip
    assert changed == set(step.layers)


def test_no_layers_are_named_without_figures_for_them():
    report = made_report(made(8, sigma=12.0))
    sparse = replace(FP8, sparsity=TWO_OF_FOUR)
    (step,) = find_next_steps(report, packed(bad_layers(), **{"block.3": sparse}))
    assert not step.layers
    passing = made_report(made(8), Limits(ssim=-0.9))
    assert find_next_steps(passing, packed(bad_layers())) == ()


def test_the_power_goes_through_the_packed_pipeline_and_the_floor():
    report = made_report(made(8, sigma=12.0))
    lost = 1.0 - report.comparison.scores["ssim"].summary.mean
    quiet = made_report(made(8, sigma=3.0)).comparison
    floor_lost = 1.0 - quiet.scores["ssim"].summary.mean
    ratio = (lost / floor_lost) ** 2.0

    def at(floor_error):
        steps = [StepErrors((1.0,), ((error,),)) for error in (ratio * 1e-4, floor_error)]
        gap = FloorGap(Floor("dtype", "t", quiet, steps[1]), {}, {})
        return replace(report, noise_floor=(gap,), timesteps=Timesteps(steps[0], None))

    assert fit_power(at(1e-4)) == pytest.approx(0.5)
    assert fit_power(at(ratio * 1e-4)) == 1.0
    assert fit_power(at(1e-30)) == FLATTEST
    assert fit_power(replace(report, noise_floor=())) == 1.0
