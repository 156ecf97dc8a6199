"""Split concatenations, smoothing by layer, bias correction: from statistics to bytes."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit.calibration.statistics.layer_statistics import (
    Calibration,
    CalibrationProvenance,
    LayerStatistics,
    per_column,
)
from quantkit.calibration.statistics.observers import static_scale
from quantkit.calibration.statistics.rescaled_statistics import rescaled
from quantkit.calibration.statistics.sampling import SAMPLE_ROWS
from quantkit.calibration.statistics.smoothing import smooth_factor
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import verify
from quantkit.cli.inspect_command import inspect as inspect_command
from quantkit.cli.pack_command import pack as pack_command
from quantkit.errors import NonFiniteError, RecipeError
from quantkit.models.component_layers import list_layers
from quantkit.models.source import open_model
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.histogram import count_bins
from quantkit.numerics.masks import TWO_OF_FOUR, choose_mask
from quantkit.numerics.packed_2to4 import to_rows
from quantkit.numerics.scales import cast
from quantkit.packing.pack_model import pack
from quantkit.packing.smoothing_strength import ALPHAS
from quantkit.progress import silent
from quantkit.recipe.layer_recipes import ActivationRecipe
from quantkit.recipe.schema import Recipe
from quantkit.storage.digest import sha256_of

pytestmark = pytest.mark.usefixtures("any_model")

WEIGHTS = "diffusion_pytorch_model.safetensors"
E4M3 = FORMATS["e4m3fn"]
READER, SHORTCUT = "up_blocks.0.resnets.0.conv1", "up_blocks.0.resnets.0.conv_shortcut"
BOUNDARY = 16

# Statistics after rescaling


def windows_of(x):
    """Return (B * OH * OW, 9 * C) rows of a 3x3 convolution with padding 1."""
    b, c = x.shape[:2]
    columns = torch.nn.functional.unfold(x, 3, padding=1)
    return columns.reshape(b, c, 9, -1).permute(0, 3, 2, 1).reshape(-1, 9 * c)


def statistics_of(buckets, rows=None):
    """Return the statistics of inputs (n, C), the rows that kernels read of each beside them."""
    rows = rows or buckets
    samples = torch.zeros(len(rows), SAMPLE_ROWS, rows[0].shape[1], dtype=torch.bfloat16)
    counts = [min(len(r), SAMPLE_ROWS) for r in rows]
    for b, (r, count) in enumerate(zip(rows, counts, strict=True)):
        # Inputs are independent draws, so the first ones are as good as any.
        samples[b, :count] = r[:count].bfloat16()
    return LayerStatistics(
        amax=torch.stack([x.abs().amax() for x in buckets]),
        histogram=torch.stack([count_bins(x) for x in buckets]),
        second_moment=torch.stack([x.square().mean(0) for x in buckets]),
        channel_amax=torch.stack([x.abs().amax(0) for x in buckets]),
        count=torch.tensor([len(x) for x in buckets]),
        moving_amax=torch.stack([x.abs().amax() for x in buckets]).double(),
        updates=torch.ones(len(buckets), dtype=torch.int64),
        mean=torch.stack([x.mean(0) for x in buckets]),
        samples=samples,
        sample_priority=(torch.arange(SAMPLE_ROWS, 0, -1.0) / 40).double().repeat(len(rows), 1),
        sample_count=torch.tensor(counts),
    )


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def static(observer="amax", **more):
    return ActivationRecipe(mode="static", observer=observer, **more)


def test_rescaled_maxima_are_exact_and_every_value_is_counted():
    x, factor = draw(0, SAMPLE_ROWS, 8), torch.linspace(0.1, 3, 8)
    found = rescaled(statistics_of([x]), factor)
    assert torch.equal(found.channel_amax[0], x.abs().amax(0) * factor)
    assert float(found.amax) == float((x.abs().amax(0) * factor).amax())
    # All rows are stored: each value once, and each channel's largest once more.
    near = (x.bfloat16().float() * factor).abs().minimum(found.channel_amax)
    wanted = count_bins(near) + count_bins(found.channel_amax[0])
    assert torch.equal(found.histogram[0], wanted)


@pytest.mark.parametrize("observer", ["percentile", "mse", "kl"])
def test_scale_after_smoothing_is_nearly_that_of_all_values(observer):
    x = draw(1, 5000, 96) * torch.tensor([1, 1, 9, 1, 1, 1, 30.0, 1]).repeat(12)
    factor = torch.tensor([1, 1, 0.2, 1, 1, 1, 0.05, 1]).repeat(12)
    recipe = static(observer, percentile=99.0)
    found = static_scale(statistics_of([x]), recipe, E4M3, factor)
    wanted = static_scale(statistics_of([x * factor]), recipe, E4M3)

    def error(scale):
        values = x * factor
        return float((cast(values / scale, E4M3).float() * scale - values).square().mean())

    # What lies beyond a percentile weighs much in the error; the minimum of kl is flat.
    tolerance = {"mse": 1.05, "percentile": 1.3, "kl": 1.5}[observer]
    assert error(found) <= tolerance * error(wanted)
    if observer == "percentile":
        assert float(found) == pytest.approx(float(wanted), rel=0.1)


# Packing


def source_of(folder):
    """Write a component with a skip concatenation, and return its path and its calibration."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    shapes = {
        "mid_block.resnets.0.conv2": (BOUNDARY, 16, 3, 3),
        READER: (24, 48, 3, 3),
        SHORTCUT: (24, 48, 1, 1),
        "up_blocks.0.attn.to_q": (40, 64),
    }
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator).mul(0.1).half()
        if name != "up_blocks.0.attn.to_q":
            tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator).half()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def inputs_of(layer):
    """Return two buckets of inputs (n, C) and the rows of each; the skip's half is loud."""
    c, seed = layer.channels, len(layer.name)
    loud = torch.ones(c)
    if c == 48:
        loud[BOUNDARY:] = 12.0
    loud[3] = 60.0
    if layer.area == 1:
        buckets = [0.4 + draw(seed + b, 200, c) * loud * (1 + b) for b in range(2)]
        return buckets, buckets
    images = [0.4 + draw(seed + b, 3, c, 5, 5) * loud[:, None, None] * (1 + b) for b in range(2)]
    return [x.movedim(1, -1).reshape(-1, c) for x in images], [windows_of(x) for x in images]


def calibration_of(folder, change=lambda statistics: statistics):
    component = open_model(str(folder)).components[0]
    layers = list_layers(component)
    digests = {layer.name: sha256_of(layer.shard, layer.weight) for layer in layers}
    table = {layer.name: change(statistics_of(*inputs_of(layer))) for layer in layers}
    about = CalibrationProvenance(
        {"": digests}, "t", 1, "", 2, None, 0, {"": [1, 1]}, {"torch": "x"}
    )
    return Calibration({"": table}, (500.0,), about)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return source_of(tmp_path_factory.mktemp("source") / "unet")


@pytest.fixture(scope="module")
def calibration(source):
    return calibration_of(source)


def run(source, output, calibration, *, threads=1, **recipe):
    settings = Recipe.model_validate({"name": "t", **recipe})
    return pack(
        open_model(str(source)),
        settings,
        output,
        calibration=calibration,
        masks=None,
        threads=threads,
        force=False,
        progress=silent,
    )


def _layers(source):
    return list_layers(open_model(str(source)).components[0])


REFUSED = {
    "no calibration": ({"smooth": 0.5}, RecipeError, "smooth needs statistics"),
    "no calibration, bias": (
        {"bias_correction": True},
        RecipeError,
        r"conv2: bias_correction needs statistics; run 'quantkit calibrate model",
    ),
}


@pytest.mark.parametrize(("recipe", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_recipe_without_a_calibration_is_refused(source, tmp_path, recipe, kind, message):
    with pytest.raises(kind, match=message):
        run(source, tmp_path / "packed", None, **recipe)
    assert not (tmp_path / "packed").exists()


# Smoothing chosen by layer


def best_alpha(rows, weight, statistics, recipe, *, sparse):
    """Return the strength of least output error, on the whole weight, in plain torch."""
    settings = Recipe.model_validate({"name": "t", **recipe})
    wide, errors = to_rows(weight.float()), {}
    mask = choose_mask(wide.abs(), TWO_OF_FOUR) if sparse else 1.0
    area = wide.shape[1] // statistics.channel_amax.shape[1]
    for alpha in ALPHAS:
        factor = torch.ones(statistics.channel_amax.shape[1])
        if alpha is not None:
            factor = smooth_factor(statistics, wide, alpha)
        columns = per_column(factor, area)
        found = []
        for bucket, x in enumerate(rows):
            smooth = x * columns
            if settings.activation.mode == "static":
                scale = static_scale(
                    statistics, settings.activation, E4M3, factor, edges=(500.0,)
                ).reshape(-1)
                scale = scale[min(bucket, len(scale) - 1)]
            else:
                scale = smooth.abs().amax(1, keepdim=True) / 448
            found.append(cast(smooth / scale, E4M3).float() * scale)
        w = wide * mask / columns
        scale = w.abs().amax(1, keepdim=True) / 448
        w = cast(w / scale, E4M3).float() * scale
        wanted = torch.cat(rows) @ (wide * mask).T
        errors[alpha] = float((torch.cat(found) @ w.T - wanted).double().square().sum())
    return min(errors, key=errors.get)


AUTO = {
    "token": {},
    "static": {"activation": {"mode": "static", "observer": "mse"}},
    "buckets": {"activation": {"mode": "static", "observer": "amax", "buckets": 2}},
    "sparse": {"sparsity": {}, "activation": {"mode": "static", "observer": "amax"}},
    "one scale": {"weight": {"granularity": "tensor"}},
}


@pytest.mark.parametrize("recipe", AUTO.values(), ids=AUTO)
def test_strength_is_that_of_least_output_error(source, calibration, tmp_path, recipe):
    summary = run(source, tmp_path / "packed", calibration, smooth="auto", **recipe)
    chosen = {layer.name: layer.smooth_alpha for layer in summary.layers}
    assert set(chosen.values()) <= set(ALPHAS)
    packed = open_packed(tmp_path / "packed").components[0]
    told = packed.metadata[0].recipe["smooth_chosen"]
    for layer in _layers(source):
        name, statistics = layer.name, calibration.layers[""][layer.name]
        smooth = packed.config.layers[name].smooth
        assert smooth == (chosen[name] is not None)
        assert told.get(name) == chosen[name]
        if "weight" not in recipe:
            rows = [x.float() for x in statistics.samples]
            weight = load_file(source / WEIGHTS)[layer.weight.name]
            sparse = packed.config.layers[name].sparsity is not None
            wanted = best_alpha(rows, weight, statistics, recipe, sparse=sparse)
            assert chosen[name] == wanted, name
    # A channel sixty times as loud as the others is what smoothing is for.
    assert any(alpha is not None for alpha in chosen.values())


def test_even_inputs_and_weights_are_not_smoothed(tmp_path):
    folder = tmp_path / "even"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    signs = torch.randint(0, 2, (32, 64), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    save_file({"a.fc.weight": signs.half()}, folder / WEIGHTS, metadata={"format": "pt"})
    x = torch.randint(0, 2, (50, 64), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    made = calibration_of(folder, lambda _: statistics_of([x, x]))
    summary = run(folder, tmp_path / "packed", made, smooth="auto")
    # Every value is exact as it is: nothing can be gained.
    assert [layer.smooth_alpha for layer in summary.layers] == [None]
    assert not open_packed(tmp_path / "packed").components[0].config.layers["a.fc"].smooth


def test_commands_show_what_was_chosen(source, calibration, tmp_path):
    from quantkit.calibration.statistics.layer_statistics import save_calibration

    save_calibration(calibration, tmp_path / "c.safetensors", force=False)
    (tmp_path / "r.yaml").write_text("name: t\nsmooth: auto\nbias_correction: true\n")
    arguments = [str(source), "-r", str(tmp_path / "r.yaml"), "-o", str(tmp_path / "out")]
    arguments += ["-c", str(tmp_path / "c.safetensors")]
    dry = CliRunner().invoke(pack_command, [*arguments, "--dry-run", "--json"])
    assert dry.exit_code == 0, dry.output
    result = CliRunner().invoke(pack_command, arguments)
    assert result.exit_code == 0, result.output
    assert "Smoothed" in result.stdout
    assert "Without a bias to correct: 1 layers, up_blocks.0.attn.to_q" in result.stdout
    shown = CliRunner().invoke(inspect_command, [str(tmp_path / "out"), "--json"])
    found = {e["name"]: e["smooth_alpha"] for e in json.loads(shown.stdout)["layers"]}
    planned = {e["name"]: e["smooth_alpha"] for e in json.loads(dry.stdout)["layers"]}
    assert found == planned
    corrected = {e["name"]: e["bias_corrected"] for e in json.loads(dry.stdout)["layers"]}
    assert corrected == {name: name != "up_blocks.0.attn.to_q" for name in found}


# Bias correction

BIASED = {
    "dense": {},
    "sparse": {"sparsity": {}},
    "smooth": {"smooth": 0.5},
    "one scale": {"weight": {"granularity": "tensor"}},
    "groups": {"weight": {"granularity": "group:16"}},
}


@pytest.mark.parametrize("recipe", BIASED.values(), ids=BIASED)
@pytest.mark.parametrize("threads", [1, 3])
def test_bias_gains_what_packing_takes_from_the_mean(
    source, calibration, tmp_path, recipe, threads
):
    run(source, tmp_path / "packed", calibration, threads=threads, bias_correction=True, **recipe)
    verify(tmp_path / "packed", progress=silent)
    packed = open_packed(tmp_path / "packed").components[0]
    before, after = load_file(source / WEIGHTS), load_file(tmp_path / "packed" / WEIGHTS)
    for layer in _layers(source):
        if not layer.bias:
            assert f"{layer.name}.bias" not in after
            continue
        mean = calibration.layers[""][layer.name].pooled().mean[0].double()
        lost = before[layer.weight.name].double() - packed.dequantized(layer.name).double()
        # A window without padding sees the mean at every tap.
        gain = torch.einsum("nc...,c->n", lost, mean)
        bias = before[f"{layer.name}.bias"]
        found = after[f"{layer.name}.bias"]
        assert found.dtype == bias.dtype
        torch.testing.assert_close(found.double(), bias.double() + gain, rtol=1e-3, atol=1e-5)
        assert not torch.equal(found, bias)


def test_bias_in_another_shard_is_corrected(source, calibration, tmp_path):
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / WEIGHTS)
    parts = [{n: t for n, t in tensors.items() if n.endswith(k)} for k in (".bias", ".weight")]
    names = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    table = {}
    for name, part in zip(names, parts, strict=True):
        save_file(part, sharded / name, metadata={"format": "pt"})
        table |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": table}
    (sharded / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    for folder in (source, sharded):
        out = tmp_path / f"packed-{folder.name}"
        run(folder, out, calibration, threads=2, bias_correction=True)
        verify(out, progress=silent)
    wanted = load_file(tmp_path / "packed-unet" / WEIGHTS)
    for name in names:
        for tensor, value in load_file(tmp_path / "packed-sharded" / name).items():
            assert torch.equal(value.view(torch.uint8), wanted[tensor].view(torch.uint8))


def test_bias_that_overflows_is_named(source, tmp_path):
    far = calibration_of(source, lambda s: replace(s, mean=torch.full_like(s.mean, 1e7)))
    with pytest.raises(NonFiniteError, match=r"bias: bias_correction overflows F16; drop it"):
        run(source, tmp_path / "packed", far, bias_correction=True)
    assert not (tmp_path / "packed").exists()
