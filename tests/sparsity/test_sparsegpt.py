"""Second moments at work: sparsegpt masks, updated pipelines, codes rounded by GPTQ."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.nn import functional

from quantkit.calibration.moments.held_out_rows import HeldRows
from quantkit.calibration.moments.moment_files import HessianIndex, create_hessians
from quantkit.calibration.moments.moments import Moments
from quantkit.calibration.statistics.layer_statistics import per_column
from quantkit.calibration.statistics.smoothing import smooth_factor
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import verify
from quantkit.cli.pack_command import pack as pack_command
from quantkit.cli.recover_command import recover as recover_command
from quantkit.cli.sparsify_command import sparsify as command
from quantkit.errors import ArtefactError, InputError, NonFiniteError, OutputError, RecipeError
from quantkit.models.component_layers import list_layers
from quantkit.models.source import open_model
from quantkit.numerics.formats import INT4
from quantkit.numerics.masks import METHODS, TWO_OF_FOUR, choose_mask
from quantkit.numerics.obs import Grid, factorize, falling_power, output_error, settle_rows
from quantkit.numerics.packed_2to4 import from_rows, to_rows
from quantkit.packing.gptq import Rounding
from quantkit.packing.pack_model import pack
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from quantkit.recovery.obs_update import UpdatedTensors
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.maskfile import load_masks, save_masks
from quantkit.sparsity.sparsegpt import Surgeon, lost_share, prune_layer
from quantkit.storage.digest import sha256_of
from tests.support.pipelines import tiny_pipeline

pytestmark = pytest.mark.usefixtures("any_model")

WEIGHTS = "diffusion_pytorch_model.safetensors"
CPU = torch.device("cpu")
SHAPES = {"fc": (24, 64), "conv": (16, 32, 3, 3), "odd": (8, 48)}


def inputs_of(k, seed):
    """Return correlated rows with a mean (400, k)."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=g) / k**0.5 * torch.logspace(-0.5, 0.5, k)
    return torch.randn(400, k, generator=g) @ mixing + 0.4


def moments_of(x):
    return Moments(x.T @ x / len(x), x.mean(0), len(x))


def index_of(model):
    digests = {
        c.name: {layer.name: sha256_of(layer.shard, layer.weight) for layer in list_layers(c)}
        for c in model.components
    }
    return HessianIndex(digests, "t", 1, 0, "", 1, None, 0, 1, "uniform", 1.0, {})


def hessians_of(model, path):
    """Return moments of synthetic inputs of every layer, and the inputs."""
    hessians = create_hessians(path, index_of(model))
    inputs = {}
    for component in model.components:
        for seed, layer in enumerate(list_layers(component)):
            x = inputs_of(layer.k, seed)
            hessians.write(component.name, layer.name, moments_of(x))
            inputs[layer.name] = x
    return hessians, inputs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in SHAPES.items():
        tensors[f"{name}.weight"] = torch.randn(shape, generator=g).half()
    tensors["fc.bias"] = torch.randn(24, generator=g).half()
    save_file(tensors, folder / WEIGHTS)
    return open_model(str(folder))


@pytest.fixture(scope="module")
def known(model, tmp_path_factory):
    return hessians_of(model, tmp_path_factory.mktemp("h") / "hessians")


@pytest.fixture(scope="module")
def surgeon(known):
    return Surgeon(known[0], CPU)


def recipe_with(method="sparsegpt", budget=None, **weight):
    sparsity = {"method": method, "error_budget": budget}
    return Recipe.model_validate({"name": "t", "sparsity": sparsity, "weight": weight})


def rows_of(model, name):
    return to_rows(load_file(model.path / WEIGHTS)[f"{name}.weight"].float()).contiguous()


def test_surgery_is_least_squares_on_the_inputs_with_a_bias():
    """Nothing that keeps the same weights makes less error on the inputs themselves."""
    x = inputs_of(32, 5)
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    settled = prune_layer(rows, moments_of(x), TWO_OF_FOUR, bias=True)
    output = x @ rows.T
    found = x @ settled.rows.T + settled.bias_change - output
    for row in range(4):
        kept = settled.mask[row]
        design = torch.cat((x[:, kept], torch.ones(len(x), 1)), dim=1).double()
        best = torch.linalg.lstsq(design, output[:, row : row + 1].double()).solution
        least = float((design @ best - output[:, row : row + 1]).square().sum())
        # The damping costs something, the rest is float32.
        assert least * 0.999 <= float(found[:, row].square().sum()) <= 1.35 * least
    share = float(found.square().sum() / output.square().sum())
    assert settled.error == pytest.approx(share, rel=1e-3)


def test_without_a_bias_the_mean_counts():
    x = inputs_of(32, 6)
    rows = torch.randn(4, 32)
    settled = prune_layer(rows, moments_of(x), TWO_OF_FOUR, bias=False)
    assert settled.bias_change is None
    found = x @ (settled.rows - rows).T
    share = float(found.square().sum() / (x @ rows.T).square().sum())
    assert settled.error == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_the_error_is_that_on_rows_that_were_held_out(bias):
    """More columns than rows: what was fitted says nothing of other rows, and the error says so."""
    x, other = inputs_of(256, 3)[:160], inputs_of(256, 3)[200:]
    rows = torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
    held = HeldRows(other.bfloat16(), torch.ones(len(other)))
    within = prune_layer(rows, moments_of(x), TWO_OF_FOUR, bias=bias)
    settled = prune_layer(rows, replace(moments_of(x), held=held), TWO_OF_FOUR, bias=bias)
    assert torch.equal(settled.rows, within.rows)
    found = other @ (settled.rows - rows).T + (settled.bias_change if bias else 0)
    share = float(found.square().sum() / (other @ rows.T).square().sum())
    assert settled.error == pytest.approx(share, rel=0.02)
    assert settled.error > 3 * within.error


def test_lost_share_of_nothing_is_zero():
    moments = moments_of(inputs_of(8, 1))
    assert lost_share(torch.zeros(2, 8), torch.zeros(2, 8), moments, torch.zeros(2)) == 0


def test_lost_share_is_a_share_however_small_the_power():
    moments = Moments(0.01 * torch.eye(2), torch.zeros(2), 1)
    rows, change = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert lost_share(rows, change, moments) == pytest.approx(0.25)


def test_a_loss_that_rounding_takes_below_zero_is_none():
    moments = Moments(torch.diag(torch.tensor([1.0, -0.5])), torch.zeros(2), 1)
    assert lost_share(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), moments) == 0.0


def test_gptq_factors_the_moment_with_a_thousandth_of_its_mean_power():
    """A decision, without rows held out: from 1e-4 to 1e-3 the demo's pictures are the same."""
    moments, rows, scale = moments_of(inputs_of(8, 1)), torch.randn(3, 8), torch.full((3, 1), 0.2)
    factor = factorize(moments.second, damping=1e-3, order=falling_power(moments.second))
    expected, _ = settle_rows(rows, factor, grid=Grid(INT4, scale))
    assert torch.equal(Rounding(moments, centred=False).round(rows, None, scale, INT4), expected)


def test_sparsegpt_loses_less_than_wanda_less_than_magnitude(model, known, surgeon):
    inputs = known[1]
    errors = {}
    for method in METHODS:
        masks = choose_masks(model, recipe_with(method), None, surgeon=surgeon, progress=silent)
        errors[method] = {name: mask.error for name, mask in masks.layers[""].items()}
        assert set(errors[method]) == {"fc", "conv"}
        for name, mask in masks.layers[""].items():
            kept = mask.dense(*rows_of(model, name).shape)
            assert bool((kept.reshape(-1, 4).sum(1) == 2).all())
            if method != "sparsegpt":
                rows = rows_of(model, name)
                lost = (inputs[name] @ (rows * ~kept).T).square().sum()
                share = float(lost / (inputs[name] @ rows.T).square().sum())
                assert mask.error == pytest.approx(share, rel=1e-3)
    for name in ("fc", "conv"):
        assert errors["sparsegpt"][name] < errors["wanda"][name] < errors["magnitude"][name]


def test_updates_lower_the_error_of_any_mask(model, surgeon):
    def errors(*, update):
        masks = choose_masks(
            model, recipe_with("wanda"), None, surgeon=surgeon, update=update, progress=silent
        )
        return {name: mask.error for name, mask in masks.layers[""].items()}

    before, after = errors(update=False), errors(update=True)
    assert all(after[name] < 0.7 * before[name] for name in before)


def test_a_budget_holds_for_the_error_after_updates(model, surgeon):
    all_masks = choose_masks(model, recipe_with(), None, surgeon=surgeon, progress=silent)
    errors = {d.layer: d.error for d in all_masks.decisions if d.error is not None}
    budget = sum(errors.values()) / 2
    masks = choose_masks(model, recipe_with(budget=budget), None, surgeon=surgeon, progress=silent)
    assert set(masks.layers[""]) == {name for name, error in errors.items() if error <= budget}
    assert len(masks.layers[""]) == 1


def test_sparsegpt_without_moments_is_refused(model):
    with pytest.raises(RecipeError, match="'sparsegpt' needs second moments; give those of"):
        choose_masks(model, recipe_with(), None, progress=silent)
    with pytest.raises(RecipeError, match="'wanda' with updates needs second moments"):
        choose_masks(model, recipe_with("wanda"), None, update=True, progress=silent)


def test_moments_of_other_weights_are_refused(model, known, tmp_path):
    digests = {"": dict.fromkeys(SHAPES, "0" * 64)}
    other = replace(known[0], index=replace(known[0].index, digests=digests))
    with pytest.raises(ArtefactError, match="had other weights"):
        choose_masks(model, recipe_with(), None, surgeon=Surgeon(other, CPU), progress=silent)


@pytest.mark.parametrize(
    ("k", "held"),
    [(32, None), (64, (5, 32, 5)), (64, (5, 64, 4))],
    ids=["moments", "held-columns", "held-weights"],
)
def test_moments_of_other_shapes_are_refused(model, tmp_path, k, held):
    hessians = create_hessians(tmp_path / "h", index_of(model))
    moments = moments_of(inputs_of(k, 0))
    if held:
        rows, columns, weights = held
        kept = HeldRows(torch.ones(rows, columns).bfloat16(), torch.ones(weights))
        moments = replace(moments, held=kept)
    hessians.write("", "fc", moments)
    component = model.components[0]
    layer = next(x for x in list_layers(component) if x.name == "fc")
    with pytest.raises(ArtefactError, match=r"fc/.*: shape .*, expected .* hessians of this model"):
        hessians.read(component, layer)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_no_number_in_a_weight_is_named(value, known, tmp_path):
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    weight = torch.zeros(24, 64).half()
    weight[3, 5] = value
    save_file({"fc.weight": weight}, tmp_path / WEIGHTS)
    broken = open_model(str(tmp_path))
    hessians = create_hessians(tmp_path / "h", index_of(broken))
    hessians.write("", "fc", moments_of(inputs_of(64, 0)))
    with pytest.raises(NonFiniteError, match=rf"fc\.weight: {value} at \[3, 5\]"):
        choose_masks(broken, recipe_with(), None, surgeon=Surgeon(hessians, CPU), progress=silent)


def packed_with(model, output, recipe, **given):
    pack(
        model,
        recipe,
        output,
        **{"calibration": None, "masks": None, "threads": 1, "force": False, **given},
        progress=silent,
    )
    verify(output, progress=silent)
    return open_packed(output).components[0]


def error_on(model, packed, inputs, name):
    change = to_rows(packed.dequantized(name)) - rows_of(model, name)
    return float((inputs[name] @ change.T).square().sum())


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group:16"])
def test_gptq_packs_with_less_error_than_the_nearest_code(model, known, tmp_path, fmt, granularity):
    hessians, inputs = known
    settings = {"format": fmt, "granularity": granularity, "observer": "mse"}
    parts = {}
    for rounding in ("nearest", "gptq"):
        recipe = Recipe.model_validate({"name": "t", "weight": settings | {"rounding": rounding}})
        parts[rounding] = packed_with(model, tmp_path / rounding, recipe, hessians=hessians)
    for name in SHAPES:
        scales = [p.parts(name)["weight_scale"] for p in parts.values()]
        assert torch.equal(*scales)
        errors = [error_on(model, p, inputs, name) for p in parts.values()]
        assert errors[1] < 0.8 * errors[0], name


@pytest.mark.parametrize("method", METHODS)
def test_sparse_layers_are_updated_and_rounded_in_one(model, known, tmp_path, method):
    hessians, inputs = known
    packed = packed_with(
        model, tmp_path / "gptq", recipe_with(method, rounding="gptq"), hessians=hessians
    )
    bare = packed_with(model, tmp_path / "nearest", recipe_with("magnitude"))
    for name in ("fc", "conv"):
        assert packed.config.layers[name].sparsity == TWO_OF_FOUR
        assert error_on(model, packed, inputs, name) < 0.5 * error_on(model, bare, inputs, name)
    assert packed.config.layers["odd"].sparsity is None


@pytest.mark.parametrize("budget", [None, "between"])
def test_masks_of_a_file_are_those_that_packing_chooses(model, known, surgeon, tmp_path, budget):
    if budget:
        # The rest of a layer's weights make up for what is masked: more layers are within it.
        bare = choose_masks(model, recipe_with(), None, surgeon=surgeon, progress=silent)
        budget = 0.9 * min(d.error for d in bare.decisions if d.error is not None)
    recipe = recipe_with(rounding="gptq", budget=budget)
    masks = choose_masks(model, recipe, None, surgeon=surgeon, update=True, progress=silent)
    save_masks(masks, tmp_path / "masks", force=False)
    stored = load_masks(tmp_path / "masks")
    packed_with(model, tmp_path / "a", recipe, hessians=known[0])
    packed_with(model, tmp_path / "b", recipe, hessians=known[0], masks=stored)
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()


def test_threads_and_blocks_change_nothing(model, known, tmp_path):
    recipe = recipe_with("magnitude", rounding="gptq")
    packed_with(model, tmp_path / "a", recipe, hessians=known[0])
    packed_with(model, tmp_path / "b", recipe, hessians=known[0], threads=3)
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()


def test_moments_follow_smoothing():
    x, factor = inputs_of(16, 3), torch.linspace(0.5, 2, 16)
    smoothed, wanted = moments_of(x).smoothed(factor), moments_of(x * factor)
    torch.testing.assert_close(smoothed.second, wanted.second)
    torch.testing.assert_close(smoothed.mean, wanted.mean)


def test_gptq_works_on_smoothed_weights(model, known, tmp_path):
    from tests.support.packing import calibration_of

    hessians, inputs = known
    calibration = calibration_of(model.path)
    errors = []
    for rounding in ("nearest", "gptq"):
        recipe = Recipe.model_validate(
            {"name": "t", "smooth": 0.5, "weight": {"rounding": rounding}}
        )
        packed = packed_with(
            model, tmp_path / rounding, recipe, hessians=hessians, calibration=calibration
        )
        assert packed.config.layers["conv"].smooth
        errors.append([error_on(model, packed, inputs, name) for name in SHAPES])
    assert all(b < 0.8 * a for a, b in zip(*errors, strict=True))
    rows = rows_of(model, "conv")
    factor = smooth_factor(calibration.layers[""]["conv"], rows, 0.5)
    assert per_column(factor, 9).shape == (rows.shape[1],)


def test_gptq_without_moments_is_refused(model, tmp_path):
    recipe = Recipe.model_validate({"name": "t", "weight": {"rounding": "gptq"}})
    with pytest.raises(RecipeError, match=r"conv: weight\.rounding gptq needs second moments"):
        packed_with(model, tmp_path / "p", recipe)
    assert not (tmp_path / "p").exists()


def test_gptq_of_a_layer_without_moments_is_refused(model, known, tmp_path):
    fewer = {"": {n: d for n, d in known[0].index.digests[""].items() if n != "odd"}}
    partial = replace(known[0], index=replace(known[0].index, digests=fewer))
    recipe = Recipe.model_validate({"name": "t", "weight": {"rounding": "gptq"}})
    with pytest.raises(ArtefactError, match="no second moments of odd, which"):
        packed_with(model, tmp_path / "p", recipe, hessians=partial)


def test_sparsegpt_masks_alone_are_refused(model, surgeon, tmp_path):
    masks = choose_masks(model, recipe_with(), None, surgeon=surgeon, progress=silent)
    with pytest.raises(RecipeError, match="updates the kept weights too"):
        packed_with(model, tmp_path / "p", Recipe(name="t"), masks=masks)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    model = open_model(str(tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model")))
    hessians, inputs = hessians_of(model, tmp_path_factory.mktemp("tiny-h") / "h")
    return model, hessians, inputs


@pytest.fixture
def some(tmp_path):
    """Write a recipe that masks some layers only, for speed."""
    path = tmp_path / "some.yaml"
    path.write_text("name: some\nsparsity: {method: sparsegpt, layers: ['down_blocks.1.*']}\n")
    return path


def invoke(*arguments):
    return CliRunner().invoke(command, [*map(str, arguments), "-q"], catch_exceptions=False)


def recover(*arguments):
    return CliRunner().invoke(recover_command, [*map(str, arguments), "-q"], catch_exceptions=False)


def test_recover_obs_writes_an_ordinary_pipeline_and_its_masks(pipeline, some, tmp_path):
    model, hessians, inputs = pipeline
    output = tmp_path / "sparse"
    result = recover(
        model.path, "-r", some, "--hessians", hessians.path, "--method", "obs",
        "--device", "cpu", "-o", output, "--json",
    )  # fmt: skip
    said = json.loads(result.stdout)
    masks = load_masks(tmp_path / "sparse.masks.safetensors")
    written = open_model(str(output))
    layers = {layer.name: layer for layer in list_layers(written.components[0])}
    chosen = masks.layers["unet"]
    assert chosen
    assert said["tensors"] == len(chosen) + sum(layers[n].bias for n in chosen)
    assert not masks.counts_on_updates
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "some.yaml", "sparse", "sparse.masks.safetensors"
    ]  # fmt: skip
    before = load_file(model.path / "unet" / WEIGHTS)
    after = load_file(output / "unet" / WEIGHTS)
    errors = {entry["layer"]: entry["error"] for entry in said["layers"]}
    for name, mask in chosen.items():
        layer = layers[name]
        assert mask.source_digest == sha256_of(layer.shard, layer.weight)
        keep = from_rows(mask.dense(layer.n, layer.k), layer.shape)
        assert not after[f"{name}.weight"][~keep].any()
        x = inputs[name]
        old, new = (to_rows(t[f"{name}.weight"].float()) for t in (before, after))
        change = x @ (new - old).T
        if layer.bias:
            change += after[f"{name}.bias"].float() - before[f"{name}.bias"].float()
        share = float(change.square().sum() / (x @ old.T).square().sum())
        # float16 on disk is what the stored weights differ by
        assert share == pytest.approx(errors[name], rel=0.02, abs=1e-5)
    kept = [n for n in before if n.removesuffix(".weight").removesuffix(".bias") not in chosen]
    assert kept
    assert all(torch.equal(before[n], after[n]) for n in kept)


@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
def test_recovering_the_masks_of_a_file_is_the_same(pipeline, some, method, tmp_path, monkeypatch):
    model, hessians, _ = pipeline
    given = ("-r", some, "--hessians", hessians.path, "--device", "cpu")
    mask_file = tmp_path / "masks"
    outputs = [tmp_path / name for name in ("by-file", "by-recipe")]
    how = ("--set", f"sparsity.method={method}", "--set", "weight.rounding=gptq")
    assert invoke(model.path, *given, *how, "-o", mask_file).exit_code == 0
    done = recover(model.path, *given, "--method", "obs", "--masks", mask_file, "-o", outputs[0])
    assert done.exit_code == 0
    some.write_text(some.read_text().replace("sparsegpt", method))
    by_recipe = (model.path, *given, "--method", "obs", "-o", outputs[1])
    planned = recover(*by_recipe, "--dry-run")
    # a layer is computed for its mask, and not again for its weights
    monkeypatch.setattr("quantkit.recovery.obs_update.prune_layer", None)
    layers = json.loads(recover(*by_recipe, "--json").stdout)["layers"]
    assert planned.stdout == f"{sum(layer['chosen'] for layer in layers)} layers masked, 0 packed\n"
    weights = [(output / "unet" / WEIGHTS).read_bytes() for output in outputs]
    assert weights[0] == weights[1]
    masks = [(tmp_path / f"{o.name}.masks.safetensors").read_bytes() for o in outputs]
    assert masks[0] == masks[1]


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("obs", (), "hessians: missing, and method obs needs second moments"),
        ("obs", ("--hessians", "H"), "masks: missing, and method obs needs them"),
        ("obs", ("--hessians", "H", "--steps", "3"), "steps: method obs does not use it"),
        ("obs", ("--hessians", "H", "--prompts", "P"), "prompts: method obs does not use them"),
        ("distill", ("--hessians", "H"), "hessians: method distill does not use them"),
    ],
)
def test_what_a_recovery_does_not_take_is_refused(pipeline, tmp_path, method, more, words):
    model, hessians, _ = pipeline
    paths = {"H": str(hessians.path), "P": __file__}
    more = [paths.get(word, word) for word in more]
    arguments = [str(model.path), "--method", method, "-o", str(tmp_path / "out"), *more]
    with pytest.raises(InputError, match=words):
        CliRunner().invoke(recover_command, arguments, catch_exceptions=False)
    assert not list(tmp_path.iterdir())


def updated_by(model, masks, surgeon):
    return {n: t.clone() for n, t in UpdatedTensors(model.components[0], masks, surgeon).items()}


@pytest.mark.parametrize("method", METHODS)
def test_what_choosing_left_is_what_would_be_computed_again(
    model, known, method, tmp_path, monkeypatch
):
    leaving = Surgeon(known[0], CPU, tmp_path)
    masks = choose_masks(
        model, recipe_with(method), None, surgeon=leaving, update=True, progress=silent
    )
    again = updated_by(model, masks, Surgeon(known[0], CPU))
    monkeypatch.setattr("quantkit.recovery.obs_update.prune_layer", None)
    left = updated_by(model, masks, leaving)
    assert left.keys() == again.keys()
    assert all(torch.equal(left[name], again[name]) for name in again)


def test_what_was_left_for_another_mask_is_not_taken(model, known, tmp_path):
    leaving = Surgeon(known[0], CPU, tmp_path)
    choose_masks(model, recipe_with(), None, surgeon=leaving, update=True, progress=silent)
    masks = choose_masks(
        model, recipe_with("magnitude"), None, surgeon=Surgeon(known[0], CPU), progress=silent
    )
    wanted = updated_by(model, masks, Surgeon(known[0], CPU))
    found = updated_by(model, masks, leaving)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_recover_obs_wrote_is_packed(pipeline, some, tmp_path):
    model, hessians, _ = pipeline
    output = tmp_path / "sparse"
    recover(
        model.path, "-r", some, "--hessians", hessians.path, "--method", "obs",
        "--device", "cpu", "-o", output, "--masks-output", tmp_path / "m.safetensors",
    )  # fmt: skip
    packed = CliRunner().invoke(
        pack_command,
        [str(output), "--masks", str(tmp_path / "m.safetensors"), "-o", str(tmp_path / "p"), "-q"],
        catch_exceptions=False,
    )
    assert packed.exit_code == 0
    config = open_packed(tmp_path / "p").components[0].config
    assert any(scheme.sparsity for scheme in config.layers.values())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["--device", "cpu"], RecipeError, "device: where second moments are used"),
        (["--hessians", "nowhere"], ArtefactError, "not a directory of hessians"),
    ],
    ids=["device", "no-directory"],
)
def test_mistakes_on_the_command_line(pipeline, tmp_path, arguments, error, words):
    output = tmp_path / "out"
    with pytest.raises(error, match=words):
        invoke(pipeline[0].path, "-o", output, *arguments)
    assert not output.exists()


def test_recover_obs_refuses_an_output_inside_the_model(pipeline, tmp_path):
    model, hessians, _ = pipeline
    with pytest.raises(OutputError, match="overlaps the input"):
        recover(
            model.path, "-r", "fp8-sparsegpt", "--hessians", hessians.path, "--method", "obs",
            "--device", "cpu", "-o", model.path / "sparse",
        )  # fmt: skip


def test_a_dry_run_with_moments_writes_nothing(pipeline, some, tmp_path):
    model, hessians, _ = pipeline
    result = invoke(
        model.path, "-r", some, "--set", "sparsity.method=wanda", "--hessians", hessians.path,
        "--device", "cpu", "-o", tmp_path / "x", "-n", "--json",
    )  # fmt: skip
    assert json.loads(result.stdout)["written"] is None
    assert list(tmp_path.iterdir()) == [some]


def test_the_error_is_that_of_a_convolutions_output(model, surgeon):
    """The same through torch's convolution: windows, taps and channels are in the right order."""
    x = torch.randn(40, 32, 8, 8, generator=torch.Generator().manual_seed(8))
    x += torch.linspace(-1, 1, 32)[:, None, None]
    windows = functional.unfold(x, 3).reshape(40, 32, 9, -1).permute(0, 3, 2, 1).reshape(-1, 288)
    weight = load_file(model.path / WEIGHTS)["conv.weight"].float()
    rows = to_rows(weight).contiguous()
    settled = prune_layer(rows, moments_of(windows), TWO_OF_FOUR, bias=False)
    sparse = from_rows(settled.rows, weight.shape)
    change = functional.conv2d(x, sparse) - functional.conv2d(x, weight)
    share = float(change.square().sum() / functional.conv2d(x, weight).square().sum())
    assert settled.error == pytest.approx(share, rel=1e-3)
    naive = choose_mask(rows.abs(), TWO_OF_FOUR)
    lost = output_error(rows * ~naive, moments_of(windows).second)
    assert settled.error < 0.8 * lost / output_error(rows, moments_of(windows).second)
