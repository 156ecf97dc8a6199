"""Masks of whole models: scores, errors, budgets, the file, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit.calibration.statistics.layer_statistics import (
    Calibration,
    CalibrationProvenance,
    save_calibration,
)
from quantkit.cli.sparsify_command import sparsify as sparsify_command
from quantkit.errors import ArtefactError, NonFiniteError, OutputError, RecipeError, ShapeError
from quantkit.models.component_layers import list_layers
from quantkit.models.source import open_model
from quantkit.numerics.masks import MASKS, Pattern
from quantkit.numerics.packed_2to4 import to_rows
from quantkit.progress import silent
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import SparsityRecipe
from quantkit.sparsity import choose
from quantkit.sparsity.choose import choose_mask_of, choose_masks, read_blocks
from quantkit.sparsity.maskfile import LayerMask, load_masks, pack_mask, save_masks
from quantkit.storage.digest import sha256_of
from tests.support.components import component_with
from tests.support.observed import statistics_of


def with_sparsity(**settings):
    return load_recipe("fp8").model_copy(update={"sparsity": SparsityRecipe(**settings)})


MAGNITUDE = with_sparsity()

LAYERS = {
    "linear": torch.randn(12, 64, generator=torch.Generator().manual_seed(1)),
    "conv": torch.randn(8, 32, 3, 3, generator=torch.Generator().manual_seed(2)),
    "odd": torch.randn(8, 48, generator=torch.Generator().manual_seed(3)),
}


def calibration_of(model, inputs):
    """Return the calibration that raw inputs by layer would give."""
    layers = {layer.name: layer for layer in list_layers(model.components[0])}
    digests = {name: sha256_of(layers[name].shard, layers[name].weight) for name in inputs}
    statistics = {name: statistics_of(x) for name, x in inputs.items()}
    provenance = CalibrationProvenance({"": digests}, "t", 1, "", 1, None, 0, {"": [1]}, {})
    return Calibration({"": statistics}, (), provenance)


@pytest.fixture
def model(tmp_path):
    return component_with(tmp_path / "model", LAYERS)


@pytest.fixture
def calibration(model):
    generator = torch.Generator().manual_seed(4)
    loud = torch.logspace(-1, 1, 64)
    return calibration_of(
        model,
        {
            "linear": torch.randn(200, 64, generator=generator) * loud,
            "conv": torch.randn(200, 32, generator=generator) * loud[::2],
        },
    )


def naive_mask(scores, n, m):
    """Keep the n largest of every m in a row, the lower position among equals."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    for row, values in enumerate(scores.tolist()):
        for start in range(0, len(values), m):
            order = sorted(range(start, start + m), key=lambda i: (-values[i], i))
            mask[row, order[:n]] = True
    return mask


def test_magnitude_masks_are_those_of_a_plain_sort(model):
    masks = choose_masks(model, MAGNITUDE, None, progress=silent).layers[""]
    assert set(masks) == {"linear", "conv"}
    for name, mask in masks.items():
        rows = to_rows(LAYERS[name].half().float())
        assert torch.equal(mask.dense(*rows.shape), naive_mask(rows.abs(), 2, 4))
        lost = rows.square()[~mask.dense(*rows.shape)].sum() / rows.square().sum()
        assert mask.error == pytest.approx(float(lost), rel=1e-5)


def test_groups_run_along_the_channels_of_each_tap():
    weight = torch.zeros(1, 8, 2, 1)
    weight[0, [0, 3], 0, 0] = 5.0
    weight[0, [1, 2, 5, 6], 1, 0] = 3.0
    bits, error = choose_mask_of([to_rows(weight)], "magnitude", Pattern(2, 4), None)
    # Tap 0 keeps channels 0 and 3, then (all zero) 4 and 5; tap 1 keeps 1, 2 and 5, 6.
    assert bits.tolist() == [[0b00111001, 0b01100110]]
    assert error == 0.0


def test_wanda_weighs_the_channels_of_every_tap(model, calibration):
    masks = choose_masks(model, with_sparsity(method="wanda"), calibration, progress=silent)
    for name, mask in masks.layers[""].items():
        weight = LAYERS[name].half().float()
        moment = calibration.layers[""][name].second_moment[0]
        wide = moment.reshape(1, -1, *[1] * (weight.ndim - 2)).expand_as(weight)
        scores = to_rows(weight.abs() * wide.sqrt())
        dense = mask.dense(*scores.shape)
        assert torch.equal(dense, naive_mask(scores, 2, 4)), name
        power = to_rows(weight.square() * wide)
        assert mask.error == pytest.approx(float(power[~dense].sum() / power.sum()), rel=1e-5)


def test_error_is_the_outputs_for_independent_inputs():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(100_000, 32, generator=generator) * torch.linspace(0.1, 3, 32)
    w = torch.randn(64, 32, generator=generator)
    bits, error = choose_mask_of([w], "wanda", Pattern(2, 4), x.square().mean(0))
    mask = LayerMask(bits, Pattern(2, 4), "", error).dense(64, 32)
    measured = (x @ (w * ~mask).T).square().sum() / (x @ w.T).square().sum()
    assert error == pytest.approx(float(measured), rel=0.02)


def test_wanda_loses_less_than_magnitude_where_inputs_are_uneven(model, calibration):
    errors = {}
    for method in MASKS:
        masks = choose_masks(model, with_sparsity(method=method), calibration, progress=silent)
        errors[method] = {name: mask.error for name, mask in masks.layers[""].items()}
    for name in ("linear", "conv"):
        assert errors["wanda"][name] < errors["magnitude"][name]


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "4:2", "1:4", "4:8", "3:16"])
@pytest.mark.parametrize("method", MASKS)
def test_any_pattern_keeps_n_of_every_m(pattern, method):
    n, m = sorted(map(int, pattern.split(":")))
    rows = torch.randn(5, 48)
    bits, error = choose_mask_of([rows], method, Pattern(n, m), torch.rand(48))
    mask = LayerMask(bits, Pattern(n, m), "", error).dense(5, 48)
    assert bool((mask.reshape(-1, m).sum(1) == n).all())
    assert 0 < error < 1


def test_blocks_change_nothing(model, monkeypatch):
    whole = choose_masks(model, MAGNITUDE, None, progress=silent).layers[""]
    monkeypatch.setattr(choose, "BLOCK", 100)
    parts = choose_masks(model, MAGNITUDE, None, progress=silent).layers[""]
    for name, mask in whole.items():
        assert torch.equal(parts[name].bits, mask.bits)
        assert parts[name].error == pytest.approx(mask.error, rel=1e-6)


def test_zero_weight_and_zero_input_lose_nothing():
    assert choose_mask_of([torch.zeros(3, 8)], "magnitude", Pattern(2, 4), None)[1] == 0.0
    assert choose_mask_of([torch.ones(3, 8)], "wanda", Pattern(2, 4), torch.zeros(8))[1] == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rows_are_read_as_they_lie_in_the_file(tmp_path, dtype):
    model = component_with(tmp_path / "m", LAYERS, dtype)
    for layer in list_layers(model.components[0]):
        rows = torch.cat(list(read_blocks(layer)))
        assert rows.dtype == dtype
        assert torch.equal(rows, to_rows(LAYERS[layer.name].to(dtype)))


@pytest.mark.parametrize(
    ("block", "counts"), [(320, [5, 5, 2]), (383, [5, 5, 2]), (64, [1] * 12), (1, [1] * 12)]
)
def test_blocks_are_as_many_rows_as_fit(model, monkeypatch, block, counts):
    monkeypatch.setattr(choose, "BLOCK", block)
    layers = {layer.name: layer for layer in list_layers(model.components[0])}
    rows = list(read_blocks(layers["linear"]))
    assert [len(part) for part in rows] == counts
    assert torch.equal(torch.cat(rows), LAYERS["linear"].half())


# Which layers


def decisions_of(masks):
    return {d.layer: (d.chosen, d.reason) for d in masks.decisions}


def test_budget_chooses_layers_and_says_why_not(model):
    errors = {
        d.layer: d.error for d in choose_masks(model, MAGNITUDE, None, progress=silent).decisions
    }
    budget = (errors["linear"] + errors["conv"]) / 2
    better = min(("linear", "conv"), key=errors.__getitem__)
    worse = max(("linear", "conv"), key=errors.__getitem__)
    masks = choose_masks(model, with_sparsity(error_budget=budget), None, progress=silent)
    assert set(masks.layers[""]) == {better}
    decisions = decisions_of(masks)
    assert decisions[better] == (True, "")
    assert f"is over the budget {budget:g}" in decisions[worse][1]
    assert "K 48 is not a multiple of 32" in decisions["odd"][1]


def test_layer_at_its_budget_is_masked(model):
    (error,) = (
        d.error
        for d in choose_masks(model, MAGNITUDE, None, progress=silent).decisions
        if d.layer == "linear"
    )
    masks = choose_masks(model, with_sparsity(error_budget=error), None, progress=silent)
    assert "linear" in masks.layers[""]


def test_patterns_choose_layers(model):
    recipe = with_sparsity(layers=("l*", "c*"), exclude=("conv",))
    masks = choose_masks(model, recipe, None, progress=silent)
    assert decisions_of(masks) == {"linear": (True, "")}


def test_layers_of_a_pipeline_that_stay_in_16_bit_get_no_mask(pipeline_dir):
    masks = choose_masks(open_model(str(pipeline_dir)), MAGNITUDE, None, progress=silent)
    assert len(masks.layers["unet"]) == 71
    assert not {"conv_in", "conv_out"} & set(masks.layers["unet"])


def test_progress_ends_at_its_total(model):
    seen = []
    choose_masks(model, MAGNITUDE, None, progress=lambda *report: seen.append(report))
    assert seen[-1] == ("masks of UNet2DConditionModel", 3, 3)


# What is refused


def test_wanda_needs_a_calibration(model):
    with pytest.raises(RecipeError, match="'wanda' needs input statistics; give a calibration"):
        choose_masks(model, with_sparsity(method="wanda"), None, progress=silent)


def test_calibration_of_other_weights_is_refused(calibration, tmp_path):
    other = component_with(tmp_path / "other", {n: w + 1 for n, w in LAYERS.items()})
    with pytest.raises(ArtefactError, match=r"calibration: conv had other weights \(checksum "):
        choose_masks(other, MAGNITUDE, calibration, progress=silent)


def test_calibration_without_the_layer_is_refused(model, calibration):
    del calibration.layers[""]["linear"]
    del calibration.metadata.digests[""]["linear"]
    with pytest.raises(ArtefactError, match="no statistics of linear; run 'quantkit calibrate"):
        choose_masks(model, MAGNITUDE, calibration, progress=silent)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("block", [choose.BLOCK, 1], ids=["whole", "row by row"])
def test_weight_that_is_not_finite_is_named_with_its_place(tmp_path, monkeypatch, value, block):
    monkeypatch.setattr(choose, "BLOCK", block)
    conv = LAYERS["conv"].clone()
    conv[1, 2, 0, 1] = value
    conv[5, 0, 0, 0] = value
    model = component_with(tmp_path / "m", {"conv": conv})
    with pytest.raises(NonFiniteError, match=rf"conv\.weight: {value} at \[1, 2, 0, 1\]"):
        choose_masks(model, MAGNITUDE, None, progress=silent)


def test_mask_of_another_shape_is_refused():
    mask = LayerMask(pack_mask(torch.ones(3, 12, dtype=torch.bool)), Pattern(2, 4), "", 0.0)
    assert mask.dense(3, 12).all()
    with pytest.raises(
        ShapeError, match=r"mask of \(3, 2\) bytes does not fit a weight of \(3, 17\)"
    ):
        mask.dense(3, 17)


# The file


def test_masks_survive_their_file(model, calibration, tmp_path):
    masks = choose_masks(model, with_sparsity(error_budget=0.12), calibration, progress=silent)
    save_masks(masks, tmp_path / "m.safetensors", force=False)
    loaded = load_masks(tmp_path / "m.safetensors")
    assert (loaded.method, loaded.pattern) == ("magnitude", Pattern(2, 4))
    assert loaded.decisions == masks.decisions
    assert set(loaded.layers[""]) == set(masks.layers[""])
    for name, mask in masks.layers[""].items():
        again = loaded.layers[""][name]
        assert torch.equal(again.bits, mask.bits)
        assert (again.source_digest, again.error) == (mask.source_digest, mask.error)
    with pytest.raises(OutputError, match="exists already"):
        save_masks(masks, tmp_path / "m.safetensors", force=False)


def test_no_masks_at_all_survive_their_file(model, tmp_path):
    masks = choose_masks(model, with_sparsity(error_budget=1e-9), None, progress=silent)
    save_masks(masks, tmp_path / "m.safetensors", force=False)
    assert load_masks(tmp_path / "m.safetensors").of(model.components[0]) == {}


def test_masks_of_a_pipeline_serve_its_denoiser_alone(pipeline_dir):
    masks = choose_masks(open_model(str(pipeline_dir)), MAGNITUDE, None, progress=silent)
    (alone,) = open_model(str(pipeline_dir / "unet")).components
    assert masks.of(alone) is masks.layers["unet"]


@pytest.mark.parametrize("position", [-1, 600, 60], ids=["bits", "header", "metadata"])
def test_flipped_bit_is_found(model, tmp_path, position):
    path = tmp_path / "m.safetensors"
    save_masks(choose_masks(model, MAGNITUDE, None, progress=silent), path, force=False)
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    with pytest.raises(ArtefactError, match=r"damaged|not a quantkit_masks file"):
        load_masks(path)


def test_calibration_is_no_mask_file(calibration, tmp_path):
    save_calibration(calibration, tmp_path / "c.safetensors", force=False)
    with pytest.raises(ArtefactError, match="not a quantkit_masks file"):
        load_masks(tmp_path / "c.safetensors")


# The command


def run(*arguments):
    return CliRunner().invoke(sparsify_command, list(map(str, arguments)))


def test_command_writes_masks_and_prints_decisions(pipeline_dir, tmp_path):
    output = tmp_path / "m.safetensors"
    all_masks = choose_masks(open_model(str(pipeline_dir)), MAGNITUDE, None, progress=silent)
    median = sorted(d.error for d in all_masks.decisions)[35]
    change = ("--set", "sparsity.pattern='4:2'", "--set", f"sparsity.error_budget={median}")
    result = run(pipeline_dir, "-o", output, *change)
    assert result.exit_code == 0, result.output
    masks = load_masks(output)
    count = sum(d.chosen for d in masks.decisions)
    assert count == 36
    assert f"2:4 by magnitude: {count} of 71 layers masked" in result.stdout
    assert "over the budget" in " ".join(result.stdout.split())
    assert isinstance(run(pipeline_dir, "-o", output).exception, OutputError)


def test_command_takes_a_calibration(model, calibration, tmp_path):
    save_calibration(calibration, tmp_path / "c.safetensors", force=False)
    options = (
        "-c",
        tmp_path / "c.safetensors",
        "--set",
        "sparsity.method=wanda",
        "--json",
        "-q",
        "-n",
    )
    result = run(model.path, "-o", tmp_path / "m.safetensors", *options)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["written"], said["method"], said["pattern"]) == (None, "wanda", "2:4")
    assert [d["layer"] for d in said["layers"] if d["chosen"]] == ["conv", "linear"]
    assert not (tmp_path / "m.safetensors").exists()


def test_command_passes_errors_on(pipeline_dir, tmp_path):
    broken = Path(shutil.copytree(pipeline_dir, tmp_path / "p"))
    weights = broken / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["mid_block.resnets.0.conv1.weight"][0, 0, 0, 0] = torch.nan
    save_file(tensors, weights)
    output = tmp_path / "m.safetensors"
    assert isinstance(run(broken, "-o", output, "-q").exception, NonFiniteError)
    refused = run(pipeline_dir, "-o", output, "--set", "sparsity.pattern='4:4'")
    assert isinstance(refused.exception, RecipeError)
    assert not output.exists()
