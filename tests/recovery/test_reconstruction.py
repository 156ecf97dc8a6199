"""Reconstruction: layers against exact least squares, blocks never worse, masks kept, resumed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from quantkit.cli.recover import recover as recover_command
from quantkit.cli.sparsify import sparsify as sparsify_command
from quantkit.errors import (
    ArtefactError,
    ModelError,
    NonFiniteError,
    OutputError,
    PromptError,
    RecipeError,
)
from quantkit.models.source import open_model
from quantkit.numerics.least_squares import EquationSums, solve_rows
from quantkit.numerics.masks import TWO_OF_FOUR, choose_mask
from quantkit.numerics.packing import to_rows
from quantkit.packing.pack import pack
from quantkit.progress import silent
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import SparsityRecipe
from quantkit.recovery.distill.early_stopping import Clock
from quantkit.recovery.distill.recover import Keeping, RecoveryTask
from quantkit.recovery.distill.settings import DistillSettings
from quantkit.recovery.reconstruct.blocks import find_blocks
from quantkit.recovery.reconstruct.layer_fit import Effort, Examples, Fitting, Throughput, fit_layer
from quantkit.recovery.reconstruct.reconstruct import _refuse_other, reconstruct
from quantkit.recovery.reconstruct.time_budget import TimeBudget
from quantkit.recovery.recovered_model import write_recovered
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.maskfile import load_masks, save_masks
from tests.support.pipelines import tiny_flux_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = load_recipe("fp8").model_copy(update={"sparsity": SparsityRecipe()})
PROMPTS = ("a red cat", "two dogs", "a house")
SHORT = DistillSettings(
    steps=3,
    seconds=None,
    batch=8,
    rate=1e-3,
    sampling_steps=2,
    sampling_batch=2,
    trajectories=4,
    watch_every=None,
)
RIDGE = 1e-9  # next to none, to be compared with the exact solution


def run(model, masks, settings=SHORT, prompts=PROMPTS, quantize=None, **more):
    task = RecoveryTask(model, masks, quantize, prompts, "cpu")
    return reconstruct(task, settings, progress=silent, schedules=(2,), **more)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x, y, mask, *, bias):
    """The least squares of every output channel alone, over its kept columns; numpy, float64."""
    columns = np.concatenate([x, np.ones((len(x), 1))], axis=1) if bias else x
    weight, offset = np.zeros(mask.shape), np.zeros(len(mask))
    for row, kept in enumerate(mask.numpy()):
        chosen = np.append(kept, True) if bias else kept
        found = np.linalg.lstsq(columns[:, chosen], y[:, row], rcond=None)[0]
        weight[row, kept] = found[:-1] if bias else found
        offset[row] = found[-1] if bias else 0
    return weight, offset


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_linear_is_the_exact_least_squares(bias):
    torch.manual_seed(0)
    layer = nn.Linear(16, 6, bias=bias)
    x = random(40, 5, 16) @ random(16, 16, seed=1) + 0.5
    target = random(40, 5, 6, seed=2) + x[..., :6]
    mask = choose_mask(layer.weight.detach().abs(), TWO_OF_FOUR)
    fit = fit_layer(
        layer,
        Examples(x, target),
        mask,
        ridge=RIDGE,
        effort=Effort(200, 400),
        generator=torch.Generator(),
    )
    wanted, offset = exact(
        x.reshape(-1, 16).double().numpy(), target.reshape(-1, 6).double().numpy(), mask, bias=bias
    )
    np.testing.assert_allclose(fit.weight, wanted, atol=2e-3)
    assert torch.equal(fit.weight != 0, mask)
    if bias:
        np.testing.assert_allclose(fit.bias, offset, atol=2e-3)
    else:
        assert fit.bias is None
    assert 0 < fit.after < fit.before


@pytest.mark.parametrize(
    ("stride", "padding", "size"), [(1, 1, 3), (2, 1, 3), (1, 0, 1), (1, "same", 3)]
)
def test_convolution_finds_the_weights_that_made_the_target(stride, padding, size):
    torch.manual_seed(0)
    truth = nn.Conv2d(8, 4, size, stride=stride, padding=padding).requires_grad_(False)
    mask = choose_mask(to_rows(truth.weight).abs(), TWO_OF_FOUR).reshape(4, size, size, 8)
    mask = mask.permute(0, 3, 1, 2)
    truth.weight.mul_(mask)
    x = random(12, 8, 7, 6)
    layer = nn.Conv2d(8, 4, size, stride=stride, padding=padding)
    fit = fit_layer(
        layer,
        Examples(x, truth(x)),
        mask,
        ridge=RIDGE,
        effort=Effort(10**6, 400),
        generator=torch.Generator(),
    )
    torch.testing.assert_close(fit.weight, truth.weight, atol=2e-3, rtol=0)
    torch.testing.assert_close(fit.bias, truth.bias, atol=2e-3, rtol=0)
    assert fit.after < 1e-4


def test_drawn_pairs_are_some_of_all():
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 4), random(50, 30, 16)
    examples = Examples(x, layer(x).detach() + 0.1 * random(50, 30, 4, seed=3))
    mask = torch.ones(4, 16, dtype=torch.bool)
    fits = []
    for pairs in (300, 1500):
        generator = torch.Generator().manual_seed(0)
        effort = Effort(pairs, 30)
        fits.append(
            fit_layer(layer, examples, mask, ridge=1e-2, effort=effort, generator=generator)
        )
    assert not torch.equal(fits[0].weight, fits[1].weight)
    torch.testing.assert_close(fits[0].weight, fits[1].weight, atol=0.05, rtol=0)


def test_ridge_holds_what_inputs_leave_open():
    x, start = torch.zeros(6, 20), random(3, 6)
    x[:2] = random(2, 20, seed=4)
    sums = EquationSums(6, 3, x.device)
    sums.add(x, start @ x)
    found = solve_rows(
        sums.equations(bias=False), start, torch.ones(3, 6, dtype=torch.bool), ridge=1e-2, steps=20
    )
    torch.testing.assert_close(found, start)


def test_layers_that_never_saw_a_number_are_refused():
    layer, x = nn.Linear(8, 4), random(4, 8)
    mask = torch.ones(4, 8, dtype=torch.bool)
    with pytest.raises(NonFiniteError, match="NaN or Inf"):
        fit_layer(layer, Examples(x, x[:, :4] / 0), mask, ridge=RIDGE, effort=Effort(4, 5),
                  generator=torch.Generator())  # fmt: skip


def test_slow_machines_take_fewer_pairs():
    how, layer = Fitting(pairs=1000, pairs_per_input=10, least=50, steps=20), nn.Linear(64, 8)
    speed, full = Throughput(how), Effort(1000, 20)
    assert speed.effort(layer, 1.0) == full
    speed.add(layer, full, 1.0)
    assert speed.effort(layer, None) == speed.effort(layer, 2.0) == full
    assert speed.effort(layer, 0.5) == Effort(500, 10)
    assert speed.effort(layer, 0.0) == Effort(50, 6)
    assert speed.effort(nn.Linear(640, 8), None) == Effort(6400, 20)


def test_time_goes_by_parameters():
    clock = Clock(elapsed=10.0)
    pace = TimeBudget(clock, 110.0, 100)
    assert pace.share(25) == pytest.approx(25, abs=0.5)
    pace.done(75)
    assert pace.share(25) == pytest.approx(100, abs=0.5)
    assert TimeBudget(clock, None, 100).share(25) is None
    assert TimeBudget(clock, 1.0, 100).share(25) == 0


def test_blocks_are_the_smallest_that_repeat(model):
    from quantkit.pipelines.running import choose_device, load_pipeline

    unet = load_pipeline(model, choose_device("cpu")).unet
    layers = ["conv_in", "down_blocks.0.resnets.0.conv1", "down_blocks.0.resnets.0.conv2",
              "mid_block.attentions.0.proj_in",
              "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0"]  # fmt: skip
    found = {block.name: block.layers for block in find_blocks(unet, layers)}
    assert found == {
        "conv_in": ("conv_in",),
        "down_blocks.0.resnets.0": tuple(layers[1:3]),
        "mid_block.attentions.0.proj_in": (layers[3],),
        "mid_block.attentions.0.transformer_blocks.0": (layers[4],),
    }


@pytest.fixture(scope="module")
def rebuilt(model, masks):
    seen = []
    return run(model, masks, watch=seen.append), seen


def test_no_block_ends_worse_than_it_began(rebuilt):
    _, seen = rebuilt
    assert len(seen) > 10
    assert all(block.after <= block.before * (1 + 1e-5) for block in seen)
    assert any(block.steps == SHORT.steps for block in seen)
    assert any(block.steps == 0 for block in seen)


def test_loss_falls_and_zeros_stay(model, masks, rebuilt):
    result, _ = rebuilt
    first, last = result.points
    assert last.loss < 0.7 * first.loss
    for name, mask in masks.of(model.components[0]).items():
        weight = result.weights[f"{name}.weight"]
        kept = mask.dense(len(weight), weight[0].numel())
        assert not torch.any(to_rows(weight)[~kept])
        assert torch.any(weight)


def test_a_rate_that_destroys_is_not_kept(model, masks):
    seen = []
    run(model, masks, replace(SHORT, rate=100.0), watch=seen.append)
    assert all(block.after <= block.before * (1 + 1e-5) for block in seen)


def test_seed_decides(model, masks, rebuilt):
    again = run(model, masks)
    other = run(model, masks, replace(SHORT, seed=1))
    first = rebuilt[0].weights
    assert all(torch.equal(again.weights[n], first[n]) for n in first)
    assert any(not torch.equal(other.weights[n], first[n]) for n in first)


def test_time_is_a_limit(model, masks):
    result = run(model, masks, replace(SHORT, steps=None, seconds=4.0))
    assert result.points[1].loss < result.points[0].loss
    assert result.points[1].seconds < 30


def test_start_is_taken(model, masks, rebuilt):
    name = next(iter(masks.of(model.components[0])))
    start = {f"{name}.weight": 3 * rebuilt[0].weights[f"{name}.weight"]}
    moved = run(model, masks, start=start)
    assert not torch.equal(moved.weights[f"{name}.weight"], rebuilt[0].weights[f"{name}.weight"])


def test_resumed_reconstruction_goes_on_as_if_it_had_not_ended(model, masks, rebuilt, tmp_path):
    keeping, seen = Keeping(tmp_path / "kept.safetensors", every=0.0), []

    def kill(block):
        seen.append(block)
        if len(seen) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, masks, keeping=keeping, watch=kill)
    rest = []
    resumed = run(model, masks, keeping=replace(keeping, resume=True), watch=rest.append)
    assert [block.block for block in rest] == [block.block for block in rebuilt[1][8:]]
    whole = rebuilt[0]
    assert resumed.points[0].loss == whole.points[0].loss
    for name, value in whole.weights.items():
        torch.testing.assert_close(resumed.weights[name], value, atol=1e-5, rtol=1e-4)


def test_resume_refuses_another_reconstruction(model, masks, tmp_path):
    keeping = Keeping(tmp_path / "kept.safetensors", every=0.0)
    run(model, masks, keeping=keeping)
    with pytest.raises(ArtefactError, match=r"rate was 0\.001 and is 0\.002"):
        run(model, masks, replace(SHORT, rate=2e-3), keeping=replace(keeping, resume=True))


def test_partly_masked_models(model, masks):
    component = model.components[0]
    chosen = dict(list(masks.of(component).items())[::5])
    some = replace(masks, layers={component.name: chosen})
    result = run(model, some)
    assert {name.rpartition(".")[0] for name in result.weights} == set(chosen)
    assert result.points[1].loss < result.points[0].loss


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_transformers_are_reconstructed(family, transformer_pipeline_dir, tmp_path):
    path = transformer_pipeline_dir if family == "sd3" else tiny_flux_pipeline(tmp_path / "flux")
    model = open_model(str(path))
    masks = choose_masks(model, RECIPE, None, progress=silent)
    seen = []
    # A few calls: FLUX makes pictures of 4096 tokens, however small it is itself.
    few = replace(SHORT, steps=1, batch=2, sampling_batch=1, trajectories=1)
    result = run(model, masks, few, watch=seen.append)
    assert result.points[1].loss < result.points[0].loss
    assert any(block.steps for block in seen)
    assert all(block.after <= block.before * (1 + 1e-5) for block in seen)


def test_pack_takes_the_result(model, masks, rebuilt, tmp_path):
    out, file = tmp_path / "sparse", tmp_path / "sparse.masks.safetensors"
    write_recovered(model, masks, rebuilt[0], out, file, force=False)
    summary = pack(
        open_model(str(out)), RECIPE, tmp_path / "packed", calibration=None,
        masks=load_masks(file), threads=1, force=False, progress=silent,
    )  # fmt: skip
    sparse = [layer for layer in summary.layers if layer.scheme and layer.scheme.sparsity]
    assert len(sparse) == len(masks.of(model.components[0]))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"prompts": ()}, PromptError, "no prompts"),
        ({"masks": None}, ArtefactError, "no layer is masked"),
        ({"quantize": RECIPE}, RecipeError, "fits layers in 16 bit only"),
    ],
)
def test_refused(model, masks, change, error, text):
    with pytest.raises(error, match=text):
        run(**{"model": model, "masks": masks, **change})


def test_several_processes_are_refused(model, masks, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match="and 2 were started"):
        run(model, masks)


def invoke(command, *args):
    return CliRunner().invoke(command, [str(arg) for arg in args])


QUICK = ("--steps", 1, "--batch", 4, "--trajectories", 2, "--sampling-steps", 2, "--device", "cpu")


def test_sparsify_reconstructs(pipeline_dir, tmp_path):
    out = tmp_path / "sparse"
    result = invoke(
        sparsify_command, pipeline_dir, "-r", "fp8-sparse", "--method", "magnitude", "--recover",
        "reconstruct", "-o", out, *QUICK, "-q", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)["recovery"]
    assert told["last_loss"] < told["first_loss"]
    assert load_masks(tmp_path / "sparse.masks.safetensors").layers
    assert not (tmp_path / "sparse.recovery.safetensors").exists()


def test_recover_reconstructs_with_masks(pipeline_dir, masks, tmp_path):
    save_masks(masks, tmp_path / "m.safetensors", force=False)
    args = (pipeline_dir, "-r", "fp8-sparse", "--method", "reconstruct", "-o", tmp_path / "out")
    result = invoke(recover_command, *args, "--masks", tmp_path / "m.safetensors", *QUICK)
    assert result.exit_code == 0, result.output
    assert "misses" in result.stderr
    assert (tmp_path / "out" / "unet").is_dir()
    none = invoke(recover_command, *args[:-1], tmp_path / "other", *QUICK)
    assert isinstance(none.exception, ArtefactError)
    assert "needs them" in str(none.exception)


@pytest.mark.parametrize("option", ["--offload", "--quantize", "--no-graphs", "--checkpointing"])
def test_options_of_a_training_are_refused(option, pipeline_dir, tmp_path):
    result = invoke(
        sparsify_command, pipeline_dir, "-r", "fp8-sparse", "--method", "magnitude", "--recover",
        "reconstruct", "-o", tmp_path / "out", option,
    )  # fmt: skip
    assert isinstance(result.exception, RecipeError)
    name = option.removeprefix("--").removeprefix("no-")
    assert f"{name}: method reconstruct does not use it" in str(result.exception)


def test_saved_blocks_are_not_written_over(pipeline_dir, masks, tmp_path):
    save_masks(masks, tmp_path / "m.safetensors", force=False)
    (tmp_path / "out.recovery.safetensors").write_bytes(b"a reconstruction")
    args = (pipeline_dir, "-r", "fp8", "--method", "reconstruct", "-o", tmp_path / "out")
    result = invoke(recover_command, *args, "--masks", tmp_path / "m.safetensors", *QUICK)
    assert isinstance(result.exception, OutputError)


@pytest.mark.parametrize(
    "module",
    [nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 3, padding_mode="circular"), nn.Embedding(8, 8)],
    ids=["groups", "circular", "embedding"],
)
def test_other_layers_are_refused(module):
    with pytest.raises(ModelError, match=r"fc: found .* wanted a Linear or a Conv2d"):
        _refuse_other("fc", module)
    _refuse_other("fc", nn.Conv2d(8, 8, 3, padding=1))


def test_layers_without_a_batch_axis_are_refused(model, masks):
    from quantkit.recovery.distill.joint_forward import paired_layers

    layer = nn.Linear(4, 2)
    with paired_layers(nn.ModuleDict({"fc": layer}), {"fc": nn.Linear(4, 2)}, rows=3):
        assert layer(random(6, 4)).shape == (6, 2)
        with pytest.raises(ModelError, match=r"fc: the first axis of its input"):
            layer(random(1, 4))
    assert "forward" not in vars(layer)
