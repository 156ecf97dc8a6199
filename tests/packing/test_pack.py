"""Packing: the bytes against torch, the directory, memory, threads, and being killed."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.calibration.histogram import BINS
from quantkit.calibration.observers import static_scale
from quantkit.calibration.smoothing import smooth_factor
from quantkit.calibration.statistics import (
    Calibration,
    CalibrationProvenance,
    LayerStatistics,
    per_column,
)
from quantkit.checkpoint import weight_reader as rows_module
from quantkit.checkpoint.filelist import FILE_LIST
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import verify
from quantkit.errors import ArtefactError, NonFiniteError, OutputError, RecipeError
from quantkit.models.layers import list_layers
from quantkit.models.source import open_model
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.masks import MASKS, TWO_OF_FOUR, choose_mask
from quantkit.numerics.packing import pack_two_of_four, to_rows
from quantkit.numerics.scales import MSE_GRID, mse_scale
from quantkit.packing.pack import pack, plan_pack, summarize
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from quantkit.sparsity.choose import choose_masks
from quantkit.storage.copying import copy_file
from quantkit.storage.digest import sha256_of
from quantkit.storage.marker import MARKER
from quantkit.storage.tensorfile import read_header
from tests.support.headers import write_header

pytestmark = pytest.mark.usefixtures("any_model")

WEIGHTS = "diffusion_pytorch_model.safetensors"


def component(folder, tensors):
    folder.mkdir(parents=True)
    config = {"_class_name": "UNet2DConditionModel", "sample_size": 8}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def small_tensors(dtype=torch.float16):
    torch.manual_seed(3)
    return {
        "conv_in.weight": torch.randn(16, 4, 3, 3).to(dtype),
        "a.conv.weight": torch.randn(24, 32, 3, 3).mul(0.02).to(dtype),
        "a.conv.bias": torch.randn(24).to(dtype),
        "a.point.weight": torch.randn(48, 64, 1, 1).mul(3).to(dtype),
        "a.fc.weight": torch.randn(40, 96).mul(0.1).to(dtype),
        "a.fc.bias": torch.randn(40).to(dtype),
        "a.norm.weight": torch.randn(96).to(dtype),
        "a.odd.weight": torch.randn(8, 20).to(dtype),
    }


def calibration_of(folder):
    """Random but deterministic statistics of every layer, in two buckets."""
    generator = torch.Generator().manual_seed(5)
    source = open_model(str(folder)).components[0]
    layers, digests = {}, {}
    for layer in list_layers(source):
        channel = torch.rand(2, layer.channels, generator=generator) + 0.1
        layers[layer.name] = LayerStatistics(
            amax=channel.amax(dim=1),
            histogram=torch.zeros(2, BINS, dtype=torch.float64),
            second_moment=channel.square() / 3,
            channel_amax=channel,
            count=torch.tensor([10, 30]),
        )
        digests[layer.name] = sha256_of(layer.shard, layer.weight)
    provenance = CalibrationProvenance(
        {"": digests}, "t", 1, "", 2, None, 0, {"": [1, 1]}, {"torch": torch.__version__}
    )
    return Calibration({"": layers}, (500.0,), provenance)


def run(folder, output, recipe=None, *, calibration=None, masks=None, threads=1, force=False):
    return pack(
        open_model(str(folder)),
        Recipe.model_validate({"name": "t", **(recipe or {})}),
        output,
        calibration=calibration,
        masks=masks,
        threads=threads,
        force=force,
        progress=silent,
    )


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def expected(weight, fmt, granularity, *, sparse=False, factor=None):
    """What FORMAT.md says of a weight, in plain torch on the whole of it."""
    rows = to_rows(weight.float()).contiguous()
    mask = choose_mask(rows.abs(), TWO_OF_FOUR) if sparse else torch.ones_like(rows).bool()
    if factor is not None:
        rows = rows / per_column(factor, rows.shape[1] // len(factor))
    rows = torch.where(mask, rows, 0.0)
    groups = {"tensor": rows.reshape(1, -1), "channel": rows}.get(granularity)
    if groups is None:
        groups = rows.reshape(len(rows), -1, int(granularity.partition(":")[2]))
    amax = groups.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(amax > 0, amax / fmt.max, 1.0)
    codes = (groups / scale).clamp(-fmt.max, fmt.max).to(fmt.torch_dtype).reshape(rows.shape)
    parts = {"weight_scale": scale.squeeze(-1)}
    if sparse:
        parts["weight"], parts["weight_meta"] = pack_two_of_four(codes.view(torch.uint8), mask)
    else:
        parts["weight"] = codes
    return parts


@pytest.fixture
def source(tmp_path):
    return component(tmp_path / "source", small_tensors())


@pytest.fixture(params=[1, 100, 1 << 17], ids="block-{}".format)
def _block(request, monkeypatch):
    """Elements of a block: a row at a time, a few rows, the whole of a small weight."""
    monkeypatch.setattr(rows_module, "BLOCK_ELEMENTS", request.param)


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group:16"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_bytes_are_those_of_torch(tmp_path, fmt, sparse, granularity):
    folder = component(tmp_path / "source", small_tensors())
    weight = {"format": fmt.name, "granularity": granularity}
    run(folder, tmp_path / "packed", {"weight": weight, "sparsity": {} if sparse else None})
    found = load_file(tmp_path / "packed" / WEIGHTS)
    for name in ("a.conv", "a.point", "a.fc"):
        wanted = expected(small_tensors()[f"{name}.weight"], fmt, granularity, sparse=sparse)
        for part, tensor in wanted.items():
            assert torch.equal(bits(found[f"{name}.{part}"]), bits(tensor)), (name, part)
    for name in ("conv_in.weight", "a.conv.bias", "a.fc.bias", "a.norm.weight", "a.odd.weight"):
        assert torch.equal(found[name], small_tensors()[name])
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
    from quantkit.numerics.granularity import parse_granularity

    rows = to_rows(small_tensors()["a.conv.weight"].float()).contiguous()
    wanted = mse_scale(rows, FORMATS["e4m3fn"], parse_granularity(granularity))
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
    activation = {"mode": "static", "observer": "amax", "buckets": 2}
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
            statistics, settings, FORMATS["e4m3fn"], factor, edges=(500.0,)
        )
        assert found[f"{name}.input_scale"].shape == (2,)
        for part, tensor in wanted.items():
            assert torch.equal(bits(found[f"{name}.{part}"]), bits(tensor)), (name, part)
    packed = open_packed(tmp_path / "packed").components[0]
    assert packed.config.schemes[0].scheme.buckets == (500.0,)
    if not sparse:
        near = packed.dequantized("a.conv")
        weight = small_tensors()["a.conv.weight"].float()
        assert float((near - weight).norm() / weight.norm()) < 0.04


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
    assert torch.equal(found["a.fc.input_scale"], louder.amax / 448)
    assert torch.equal(found["a.conv.input_scale"], torch.tensor(2.1) / 448)
    with pytest.raises(
        RecipeError, match=r"buckets auto cannot be used with smooth.* give a number"
    ):
        run(folder, tmp_path / "smooth", {**recipe, "smooth": 0.5}, calibration=calibration)


def test_average_that_was_not_stored_is_refused_before_anything_is_written(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    recipe = {"activation": {"mode": "static", "observer": "moving_average"}}
    with pytest.raises(ArtefactError, match=r"has no moving average .* choose another observer"):
        run(folder, tmp_path / "packed", recipe, calibration=calibration_of(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


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
    with pytest.raises(ArtefactError, match=r"a\.conv: 96 input channels, wanted 32"):
        run(folder, tmp_path / "packed", recipe, calibration=calibration)
    del layers["a.conv"]
    with pytest.raises(ArtefactError, match=r"no statistics of layer a\.conv"):
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


def test_bytes_do_not_depend_on_the_number_of_threads(pipeline_dir, tmp_path):
    recipe = {"sparsity": {}}
    for threads in (1, 2, 7):
        run(pipeline_dir, tmp_path / str(threads), recipe, threads=threads)
    files = [p.relative_to(tmp_path / "1") for p in (tmp_path / "1").rglob("*") if p.is_file()]
    for file in files:
        data = {(tmp_path / str(threads) / file).read_bytes() for threads in (1, 2, 7)}
        assert len(data) == 1, file


@pytest.mark.parametrize("fixture", ["pipeline_dir", "transformer_pipeline_dir"])
def test_a_pipeline_is_copied_but_for_its_denoiser(request, fixture, tmp_path):
    folder = request.getfixturevalue(fixture)
    summary = run(folder, tmp_path / "packed")
    name = summary.components[0].name
    for path in folder.rglob("*"):
        file = path.relative_to(folder)
        if path.is_file() and file.parts[0] != name:
            copy = tmp_path / "packed" / file
            assert copy.read_bytes() == path.read_bytes()
            assert copy.stat().st_ino != path.stat().st_ino
    before = json.loads((folder / name / "config.json").read_text())
    after = json.loads((tmp_path / "packed" / name / "config.json").read_text())
    config = after.pop("quantization_config")
    assert list(after.items()) == list(before.items())
    assert config["quant_method"] == "quantkit"
    assert (tmp_path / "packed" / "model_index.json").stat().st_mode & 0o044 == 0o044
    verify(tmp_path / "packed", progress=silent)


def test_config_keeps_an_unsorted_order(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    (folder / "config.json").write_text('{"z": 1, "_class_name": "UNet2DConditionModel", "é": 2}')
    run(folder, tmp_path / "packed")
    found = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert list(found) == ["z", "_class_name", "é", "quantization_config"]


def test_links_are_resolved_and_other_weights_left_out(tmp_path):
    # The hub's cache: files are links to blobs beside the snapshots.
    blobs = tmp_path / "models--owner--name" / "blobs"
    real = component(tmp_path / "real", small_tensors())
    blobs.mkdir(parents=True)
    source = blobs.parent / "snapshots" / "1234"
    source.mkdir(parents=True)
    for index, file in enumerate(("config.json", WEIGHTS)):
        (blobs / str(index)).write_bytes((real / file).read_bytes())
        (source / file).symlink_to(blobs / str(index))
    (blobs / "readme").write_text("hello")
    (source / "README.md").symlink_to(blobs / "readme")
    (source / "diffusion_pytorch_model.bin").write_text("pickle")
    (source / "diffusion_pytorch_model.fp16.safetensors").write_text("other")
    summary = run(source, tmp_path / "packed")
    names = {path.name for path in (tmp_path / "packed").iterdir()}
    assert names == {"config.json", WEIGHTS, "README.md", FILE_LIST, MARKER}
    assert not any(path.is_symlink() for path in (tmp_path / "packed").iterdir())
    assert (tmp_path / "packed" / "README.md").read_text() == "hello"
    assert [str(file) for file in summary.left_out] == [
        "diffusion_pytorch_model.bin",
        "diffusion_pytorch_model.fp16.safetensors",
    ]


@pytest.mark.parametrize("size", [0, 1, 3 << 20])
def test_copies_without_the_systems_help_are_the_same(tmp_path, monkeypatch, size):
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    copy_file(tmp_path / "a", tmp_path / "b")

    def refuse(*args):
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    copy_file(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes() == data


def test_sharded_sources_stay_cut_where_they_were(pipeline_dir, tmp_path):
    import diffusers

    unet = diffusers.UNet2DConditionModel.from_pretrained(pipeline_dir / "unet")
    unet.half().save_pretrained(tmp_path / "source", max_shard_size="400KB")
    index = "diffusion_pytorch_model.safetensors.index.json"
    before = json.loads((tmp_path / "source" / index).read_text())["weight_map"]
    assert len(set(before.values())) > 2
    run(tmp_path / "source", tmp_path / "packed", threads=2)
    after = json.loads((tmp_path / "packed" / index).read_text())["weight_map"]
    assert {name: after[name] for name in before} == before
    verify(tmp_path / "packed", progress=silent)
    run(pipeline_dir / "unet", tmp_path / "whole")
    cut, whole = (open_packed(tmp_path / n).components[0] for n in ("packed", "whole"))
    assert cut.config.layers == whole.config.layers
    for layer in whole.config.layers:
        for part, tensor in whole.parts(layer).items():
            assert torch.equal(bits(tensor), bits(cut.parts(layer)[part]))


def test_a_plan_knows_every_size_before_writing(pipeline_dir, tmp_path):
    model, recipe = open_model(str(pipeline_dir)), Recipe(name="t")
    plan = plan_pack(model, recipe, calibration=None, masks=None, progress=silent)
    summary = summarize(plan, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    assert summary == run(pipeline_dir, tmp_path / "packed")
    file = tmp_path / "packed" / "unet" / WEIGHTS
    assert summary.components[0].bytes_after == file.stat().st_size
    values = json.loads(json.dumps(summary.to_json()))
    assert values["bytes_after"] == summary.bytes_after < summary.bytes_before
    assert {"conv_in", "conv_out"} <= {n for names in summary.kept().values() for n in names}
    packed = open_packed(tmp_path / "packed").components[0]
    for layer in summary.layers:
        if layer.scheme:
            assert packed.layer_bytes(layer.name) == (layer.bytes_before, layer.bytes_after)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name", ["a.conv.weight", "a.fc.weight", "a.norm.weight", "conv_in.weight"]
)
def test_numbers_that_are_not_finite_are_named(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(rows_module, "BLOCK_ELEMENTS", 700)
    tensors = small_tensors()
    index = tuple(size - 2 for size in tensors[name].shape)
    index = tuple(max(i, 0) for i in index)
    tensors[name][index] = value
    folder = component(tmp_path / "source", tensors)
    text = f"{name}[{', '.join(map(str, index))}]".replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(NonFiniteError, match=rf"{text}: found {value}, wanted a finite number"):
        run(folder, tmp_path / "packed", threads=2)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("who", ["calibration", "masks"])
def test_artefacts_of_another_model_are_refused(tmp_path, who):
    folder = component(tmp_path / "source", small_tensors())
    other = small_tensors()
    other["a.fc.weight"][0, 0] += 1
    stranger = component(tmp_path / "other", other)
    parsed = Recipe.model_validate({"name": "t", "sparsity": {}})
    given = (
        {"calibration": calibration_of(stranger)}
        if who == "calibration"
        else {"masks": choose_masks(open_model(str(stranger)), parsed, None, progress=silent)}
    )
    theirs, ours = (
        sha256_of(f / WEIGHTS, read_header(f / WEIGHTS).tensors["a.fc.weight"])
        for f in (stranger, folder)
    )
    match = (
        rf"{who}: layer a\.fc: made from a weight with SHA-256 {theirs}, but the model's has {ours}"
    )
    with pytest.raises(ArtefactError, match=match):
        run(folder, tmp_path / "packed", **given)
    assert not (tmp_path / "packed").exists()


def test_masks_that_do_not_fit_are_refused_before_any_work(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    parsed = Recipe.model_validate({"name": "t", "sparsity": {}})
    masks = choose_masks(open_model(str(folder)), parsed, None, progress=silent)
    tensors = small_tensors()
    tensors["b.fc.weight"] = tensors.pop("a.fc.weight")
    renamed = component(tmp_path / "renamed", tensors)
    with pytest.raises(ArtefactError, match=r"masks: layer a\.fc: not in this model"):
        run(renamed, tmp_path / "packed", masks=masks)
    tensors["a.fc.weight"] = tensors.pop("b.fc.weight")[:, :64].contiguous()
    narrow = component(tmp_path / "narrow", tensors)
    with pytest.raises(
        ArtefactError, match=r"masks: layer a\.fc: shape \(40, 12\), wanted \(40, 8\)"
    ):
        run(narrow, tmp_path / "packed", masks=masks)


def test_a_recipe_that_packs_nothing_is_refused(source, tmp_path):
    with pytest.raises(RecipeError, match=r"packs no layer of .*kept by the recipe"):
        run(source, tmp_path / "packed", {"keep": ["*"]})


@pytest.mark.parametrize("where", ["", "inside", ".."])
def test_an_output_that_overlaps_the_model_is_refused(tmp_path, where):
    folder = component(tmp_path / "dir" / "source", small_tensors())
    with pytest.raises(OutputError, match="overlaps the input"):
        run(folder, folder / where, force=True)
    assert (folder / WEIGHTS).is_file()


def test_an_existing_output_is_replaced_only_by_force(source, tmp_path):
    run(source, tmp_path / "packed")
    (tmp_path / "packed" / "note").write_text("mine")
    with pytest.raises(OutputError, match="packed: exists already; set force to replace it"):
        run(source, tmp_path / "packed")
    assert (tmp_path / "packed" / "note").exists()
    with pytest.raises(OutputError, match="packed: holds note, which quantkit did not write"):
        run(source, tmp_path / "packed", force=True)
    (tmp_path / "packed" / "note").unlink()
    (tmp_path / "packed" / WEIGHTS).write_text("")
    run(source, tmp_path / "packed", force=True)
    verify(tmp_path / "packed", progress=silent)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "packed"}


def test_a_full_disk_leaves_nothing(source, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match="packed: no space left on the device; free some"):
        run(source, tmp_path / "packed", threads=2)
    assert list(tmp_path.iterdir()) == [source]


def test_partial_writes_are_continued(source, tmp_path, monkeypatch):
    run(source, tmp_path / "whole")
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:1000], at))
    run(source, tmp_path / "parts")
    assert (tmp_path / "whole" / WEIGHTS).read_bytes() == (
        tmp_path / "parts" / WEIGHTS
    ).read_bytes()


def hollow(folder, layers):
    """A component whose weights are a hole in the file: zeros, without disk space."""
    folder.mkdir()
    (folder / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    write_header(folder / WEIGHTS, {f"l{i}.weight": [2048, 2048] for i in range(layers)})
    return folder


ROOT = str(Path(__file__).parents[2])

SCRIPT = """
import resource, sys
import pytest
sys.path.insert(0, sys.argv[3])
from tests.support import skeletons
from pathlib import Path
from quantkit.models.source import open_model
from quantkit.packing.pack import pack
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
skeletons.install(pytest.MonkeyPatch())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
recipe = Recipe.model_validate({"name": "t", "sparsity": {}})
print("ready", flush=True)
pack(open_model(sys.argv[1]), recipe, Path(sys.argv[2]), calibration=None, masks=None, threads=2,
     force=False, progress=silent)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_hold_the_model(tmp_path):
    source = hollow(tmp_path / "source", 48)
    assert (source / WEIGHTS).stat().st_size > 380 << 20
    command = [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "packed"), ROOT]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kilobytes = int(out.split()[-1])
    # The promise is 300 MB beyond torch for any size; the buffers of two threads take about 40.
    assert kilobytes < 100 << 10


def test_a_killed_run_leaves_no_output_and_the_next_one_works(tmp_path):
    source = hollow(tmp_path / "source", 48)
    command = [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "packed"), ROOT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(f".packed.*/*/{WEIGHTS}")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "packed").exists()
    left = list(tmp_path.glob(".packed.*"))
    assert len(left) == 1
    small = component(tmp_path / "small", small_tensors())
    run(small, tmp_path / "packed")
    verify(tmp_path / "packed", progress=silent)
    assert not list(tmp_path.glob(".packed.*")), "what the killed run left is still there"


def test_torch_threads_are_given_back(source, tmp_path):
    before = torch.get_num_threads()
    run(source, tmp_path / "packed")
    assert torch.get_num_threads() == before


def test_progress_reaches_its_total(source, tmp_path):
    seen = []
    pack(
        open_model(str(source)),
        Recipe(name="t"),
        tmp_path / "packed",
        calibration=None,
        masks=None,
        threads=2,
        force=False,
        progress=lambda step, done, total: seen.append((step, done, total)),
    )
    assert seen[0] == ("pack UNet2DConditionModel", 0, 8)
    assert seen[-1] == ("pack UNet2DConditionModel", 8, 8)
