"""Packed bytes against torch: formats, granularities, smoothing, static scales, masks."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quantkit.calibration.statistics.observers import static_scale
from quantkit.calibration.statistics.smoothing import smooth_factor
from quantkit.checkpoint import weight_reader as rows_module
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import verify
from quantkit.errors import ArtefactError, NonFiniteError, RecipeError
from quantkit.models.source import open_model
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.ggml_blocks import split_blocks
from quantkit.numerics.granularity import parse_granularity
from quantkit.numerics.least_error import choose_scale
from quantkit.numerics.masks import MASKS, TWO_OF_FOUR, choose_mask
from quantkit.numerics.packed_2to4 import to_rows
from quantkit.numerics.scale_rules import MSE_GRID
from quantkit.numerics.scheme import Schedule
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from quantkit.sparsity.choose import choose_masks
from tests.support.packing import (
    WEIGHTS,
    bits,
    calibration_of,
    component,
    expected,
    run,
    small_tensors,
)

pytestmark = pytest.mark.usefixtures("any_model", "either_core")
OF_A_BYTE = [fmt for fmt in FORMATS.values() if fmt.codes_per_byte == 1 and not fmt.block]


@pytest.fixture(params=[1, 100, 1 << 17], ids="block-{}".format)
def _block(request, monkeypatch):
    """Elements of a block: a row at a time, a few rows, the whole of a small weight."""
    monkeypatch.setattr(rows_module, "BLOCK_ELEMENTS", request.param)


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group:16"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("fmt", OF_A_BYTE, ids=lambda f: f.name)
def test_bytes_are_those_of_torch(tmp_path, fmt, sparse, granularity):
    folder = component(tmp_path / "source", small_tensors())
    weight = {"format": fmt.name, "granularity": granularity}
    recipe = {"weight": weight, "sparsity": {} if sparse else None, "data_free": True}
    run(folder, tmp_path / "packed", recipe)
    found = load_file(tmp_path / "packed" / WEIGHTS)
    for name in ("a.conv", "a.point", "a.fc"):
        wanted = expected(small_tensors()[f"{name}.weight"], fmt, granularity, sparse=sparse)
        for part, tensor in wanted.items():
            assert torch.equal(bits(found[f"{name}.{part}"]), bits(tensor)), (name, part)
    for name in ("conv_in.weight", "a.conv.bias", "a.fc.bias", "a.norm.weight", "a.odd.weight"):
        assert torch.equal(found[name], small_tensors()[name])
    verify(tmp_path / "packed", progress=silent)


def int4_by_numpy(rows):
    """The two-level int4 of FORMAT.md with scales of amax: nibbles, factors, scales."""
    rows = rows.numpy()
    groups = rows.reshape(len(rows), -1, 32)
    places = np.abs(groups).argmax(axis=2)[:, :, None]
    wanted = (np.take_along_axis(groups, places, axis=2)[:, :, 0] / np.float32(-8)).astype("f4")
    scale = np.abs(wanted).max(axis=1) / np.float32(15)
    sizes = np.clip(np.ceil(np.abs(wanted) / scale[:, None]), 1, 15)
    factors = np.where(wanted < 0, -sizes, sizes).astype(np.int8)
    steps = factors.astype("f4") * scale[:, None]
    codes = np.clip(np.rint(groups / steps[:, :, None]), -8, 7).astype(np.int8)
    return codes.reshape(rows.shape), factors, scale


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_blocks_are_ggmls_but_for_the_last_bits_of_a_scale(tmp_path, name):
    folder = component(tmp_path / "source", small_tensors())
    weight = {"format": name, "granularity": "group:32"}
    run(folder, tmp_path / "packed", {"weight": weight, "activation": {"mode": "none"}})
    found, fmt = load_file(tmp_path / "packed" / WEIGHTS), FORMATS[name]
    kind = gguf.GGMLQuantizationType[name.upper()]
    for layer in ("a.fc", "a.point"):
        rows = small_tensors()[f"{layer}.weight"].float().flatten(1).numpy()
        codes, scale = split_blocks(torch.from_numpy(gguf.quantize(rows, kind)), fmt)
        assert torch.equal(found[f"{layer}.weight_scale"], scale)
        # GGML rounds by d before it is a float16, quantkit by the d that is stored.
        mine = found[f"{layer}.weight"].reshape(codes.shape)
        assert mine.dtype == codes.dtype
        assert (mine != codes).float().mean() < 0.03
    # Windows of 3x3 are no blocks, and 20 columns neither.
    assert found["a.conv.weight"].dtype == found["a.odd.weight"].dtype == torch.float16
    verify(tmp_path / "packed", progress=silent)


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_int4_is_two_codes_a_byte_with_integer_factors(tmp_path, sparse):
    folder = component(tmp_path / "source", small_tensors())
    weight = {"format": "int4"}
    recipe = {"weight": weight, "sparsity": {} if sparse else None, "data_free": True}
    run(folder, tmp_path / "packed", recipe)
    found = load_file(tmp_path / "packed" / WEIGHTS)
    name = "a.point" if sparse else "a.conv"
    rows = to_rows(small_tensors()[f"{name}.weight"].float()).contiguous()
    if sparse:
        mask = choose_mask(rows.abs(), TWO_OF_FOUR)
        rows = rows * mask
    codes, factors, scale = int4_by_numpy(rows)
    if sparse:
        codes = codes[mask.numpy()].reshape(len(codes), -1)
    half = 8 if sparse else 16
    blocks = (codes.astype(np.int16) + 8).astype(np.uint8).reshape(len(codes), -1, 2, half)
    packed = (blocks[:, :, 0] | blocks[:, :, 1] << 4).reshape(len(codes), -1)
    np.testing.assert_array_equal(found[f"{name}.weight"].numpy(), packed)
    np.testing.assert_array_equal(found[f"{name}.weight_group"].numpy(), factors)
    np.testing.assert_array_equal(found[f"{name}.weight_scale"].numpy(), scale)
    verify(tmp_path / "packed", progress=silent)


@pytest.mark.parametrize("observer", ["amax", "mse"])
def test_int4_codes_of_zero_have_the_factor_of_their_weights(tmp_path, observer):
    # One step is 120 / 15 / 8 = 1: weights of 0.4 become codes of zero.
    weight = torch.zeros(2, 128)
    weight[0, 0], weight[1, 0] = 120, -120
    weight[:, 64:96], weight[:, 96:] = 0.4, -0.4
    recipe = {"weight": {"format": "int4", "observer": observer}, "data_free": True}
    run(component(tmp_path / "source", {"fc.weight": weight}), tmp_path / "packed", recipe)
    found = load_file(tmp_path / "packed" / WEIGHTS)
    assert found["fc.weight_group"].tolist() == [[-15, 1, -1, 1], [15, 1, -1, 1]]
    assert (found["fc.weight"][:, 16:] == 0x88).all()
    verify(tmp_path / "packed", progress=silent)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sources_of_every_dtype_pack_alike(tmp_path, dtype):
    tensors = small_tensors(dtype)
    run(component(tmp_path / "source", tensors), tmp_path / "packed")
    found = load_file(tmp_path / "packed" / WEIGHTS)
    wanted = expected(tensors["a.conv.weight"], FORMATS["e4m3fn"], "channel")
    assert torch.equal(bits(found["a.conv.weight"]), bits(wanted["weight"]))
    assert found["a.fc.bias"].dtype == dtype


def test_every_half_precision_number_casts_as_torch_does(tmp_path):
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    weight = patterns[patterns.isfinite()].reshape(-1, 64)
    run(component(tmp_path / "source", {"fc.weight": weight}), tmp_path / "packed")
    found = load_file(tmp_path / "packed" / WEIGHTS)
    wanted = expected(weight, FORMATS["e4m3fn"], "channel")
    assert torch.equal(bits(found["fc.weight"]), bits(wanted["weight"]))


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group:16"])
def test_zeros_and_tiny_weights_have_finite_positive_scales(tmp_path, granularity):
    smallest = 2.0**-149
    # amax / 448 rounds to zero below 224 * smallest, and up to subnormals above.
    tiny = [0.0, smallest, 223 * smallest, 224.5 * smallest, 672 * smallest, 1e-38, 1e-30]
    weight = torch.stack([torch.full((32,), value) for value in tiny])
    weight[:, 1::2] *= -1
    for index, rows in enumerate([weight, weight[:2]]):
        folder = component(tmp_path / f"source{index}", {"fc.weight": rows.contiguous()})
        output = tmp_path / f"packed{index}"
        run(folder, output, {"weight": {"granularity": granularity}})
        verify(output, progress=silent)
        found = load_file(output / WEIGHTS)
        assert bool((found["fc.weight_scale"] > 0).all())
        wanted = expected(rows, FORMATS["e4m3fn"], granularity)
        wanted["weight_scale"][wanted["weight_scale"] == 0] = 1.0
        assert torch.equal(found["fc.weight_scale"].flatten(), wanted["weight_scale"].flatten())
        assert not bool((found["fc.weight"].view(torch.uint8) & 0x7F == 0x7F).any())


@pytest.mark.parametrize("granularity", ["channel", "group:16"])
def test_mse_scales_are_those_of_numerics(source, tmp_path, granularity):
    run(source, tmp_path / "packed", {"weight": {"observer": "mse", "granularity": granularity}})
    found = load_file(tmp_path / "packed" / WEIGHTS)
    rows = to_rows(small_tensors()["a.conv.weight"].float()).contiguous()
    wanted = choose_scale(rows, FORMATS["e4m3fn"], parse_granularity(granularity), "mse")
    assert torch.equal(found["a.conv.weight_scale"], wanted)


def test_mse_scale_per_tensor_has_the_least_error_of_the_grid(source, tmp_path):
    run(source, tmp_path / "packed", {"weight": {"observer": "mse", "granularity": "tensor"}})
    found = load_file(tmp_path / "packed" / WEIGHTS)["a.point.weight_scale"]
    rows = to_rows(small_tensors()["a.point.weight"].double())
    base = rows.abs().amax().float() / 448
    errors = {}
    for fraction in MSE_GRID:
        scale = base * fraction
        codes = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        errors[float(scale)] = float((codes.double() * scale.double() - rows).square().sum())
    assert float(found) == min(errors, key=errors.get)
    assert float(found) < float(base)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.usefixtures("_block")
def test_smoothing_and_static_scales(tmp_path, sparse):
    folder = component(tmp_path / "source", small_tensors())
    calibration = calibration_of(folder)
    activation = {"mode": "static", "observer": "amax", "buckets": 2, "token_below": 50}
    recipe = {"smooth": 0.5, "activation": activation, "sparsity": {} if sparse else None}
    run(folder, tmp_path / "packed", recipe, calibration=calibration)
    found = load_file(tmp_path / "packed" / WEIGHTS)
    for name in ("a.conv", "a.fc"):
        weight = small_tensors()[f"{name}.weight"]
        statistics = calibration.layers[""][name]
        factor = smooth_factor(statistics, to_rows(weight.float()).contiguous(), 0.5)
        wanted = expected(weight, FORMATS["e4m3fn"], "channel", sparse=sparse, factor=factor)
        settings = Recipe.model_validate({"name": "t", **recipe}).activation
        wanted["input_smooth"] = factor
        wanted["input_scale"] = static_scale(
            statistics, settings, FORMATS["e4m3fn"], factor, edges=(500.0,), headroom=1.15
        )
        assert found[f"{name}.input_scale"].shape == (2,)
        for part, tensor in wanted.items():
            assert torch.equal(bits(found[f"{name}.{part}"]), bits(tensor)), (name, part)
    packed = open_packed(tmp_path / "packed").components[0]
    assert packed.config.schemes[0].scheme.schedule == Schedule((500.0,), token_below=50.0)
    if not sparse:
        near = packed.dequantized("a.conv")
        weight = small_tensors()["a.conv.weight"].float()
        assert float((near - weight).norm() / weight.norm()) < 0.04


def test_schedules_in_another_unit_have_static_scales_throughout(tmp_path):
    """EDM's schedulers call a UNet with the logarithm of the noise."""
    folder = component(tmp_path / "source", small_tensors())
    recipe = {"activation": {"mode": "static", "buckets": 2, "token_below": 501}}
    summary = run(folder, tmp_path / "packed", recipe, calibration=calibration_of(folder))
    (entry,) = open_packed(tmp_path / "packed").components[0].config.schemes
    assert entry.scheme.token_below is None
    (reason,) = summary.otherwise()
    assert reason == (
        "static in all steps: token_below is 501, but the calibration's first bucket ends at "
        "timestep 500"
    )


def test_automatic_buckets_are_each_layers_own(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    stored = calibration_of(folder)
    statistics = stored.layers[""]["a.fc"]
    louder = replace(statistics, amax=statistics.amax * torch.tensor([1.0, 4.0]))
    even = replace(stored.layers[""]["a.conv"], amax=torch.tensor([2.0, 2.1]))
    table = {**stored.layers[""], "a.fc": louder, "a.conv": even}
    calibration = replace(stored, layers={"": table})
    recipe = {"activation": {"mode": "static", "observer": "amax", "buckets": "auto"}}
    run(folder, tmp_path / "packed", recipe, calibration=calibration)
    packed = open_packed(tmp_path / "packed").components[0]
    schemes = {layer: entry.scheme for entry in packed.config.schemes for layer in entry.layers}
    assert schemes["a.fc"].buckets == (500.0,)
    assert schemes["a.conv"].buckets == ()
    found = load_file(tmp_path / "packed" / WEIGHTS)
    assert torch.equal(found["a.fc.input_scale"], louder.amax * 1.15 / 448)
    assert torch.equal(found["a.conv.input_scale"], torch.tensor(2.1) * 1.15 / 448)
    with pytest.raises(
        RecipeError, match=r"buckets auto cannot be used with smooth.* give a number"
    ):
        run(folder, tmp_path / "smooth", {**recipe, "smooth": 0.5}, calibration=calibration)


def test_smoothing_that_overflows_is_named(tmp_path):
    tensors = {"a.fc.weight": torch.full((16, 32), 1e30)}
    folder = component(tmp_path / "source", tensors)
    calibration = calibration_of(folder)
    calibration.layers[""]["a.fc"].channel_amax.fill_(1e30)
    with pytest.raises(NonFiniteError, match=r"a\.fc: smoothing overflows the weight"):
        run(folder, tmp_path / "packed", {"smooth": 1.0}, calibration=calibration)
    assert not (tmp_path / "packed").exists()


def test_statistics_that_do_not_fit_are_refused(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    recipe = {"activation": {"mode": "static", "observer": "amax", "buckets": 2}}
    calibration = calibration_of(folder)
    layers = calibration.layers[""]
    layers["a.conv"] = layers["a.fc"]
    with pytest.raises(ArtefactError, match=r"a\.conv: 96 input channels, expected 32; run"):
        run(folder, tmp_path / "packed", recipe, calibration=calibration)
    del layers["a.conv"], calibration.metadata.digests[""]["a.conv"]
    with pytest.raises(ArtefactError, match=r"no statistics of a\.conv, which recipe t needs"):
        run(folder, tmp_path / "packed", recipe, calibration=calibration)


@pytest.mark.parametrize("method", MASKS)
def test_masks_chosen_while_packing_are_those_of_sparsify(source, tmp_path, method):
    calibration = calibration_of(source)
    recipe = {"sparsity": {"method": method}}
    run(source, tmp_path / "at-once", recipe, calibration=calibration)
    model, parsed = open_model(str(source)), Recipe.model_validate({"name": "t", **recipe})
    masks = choose_masks(model, parsed, calibration, progress=silent)
    run(source, tmp_path / "given", recipe, calibration=calibration, masks=masks)
    a, b = ((tmp_path / name / WEIGHTS).read_bytes() for name in ("at-once", "given"))
    assert a == b
    assert b"a.fc.weight_meta" in a


def test_an_error_budget_leaves_layers_dense(source, tmp_path):
    budgets = {"all": 1.0, "none": 1e-9}
    counts = {}
    for name, budget in budgets.items():
        run(source, tmp_path / name, {"sparsity": {"error_budget": budget}})
        config = open_packed(tmp_path / name).components[0].config
        counts[name] = sum(scheme.sparsity is not None for scheme in config.layers.values())
    assert counts == {"all": 3, "none": 0}


def test_wanda_without_a_calibration_is_refused(source, tmp_path):
    with pytest.raises(RecipeError, match="'wanda' needs input statistics; give a calibration"):
        run(source, tmp_path / "packed", {"sparsity": {"method": "wanda"}})
    assert list(tmp_path.iterdir()) == [source]
