"""Permuted pipelines: they compute what they did, their masks take less, calibrations follow."""

import json
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit.calibration.statistics import (
    Calibration,
    CalibrationProvenance,
    LayerStatistics,
    load_calibration,
    save_calibration,
)
from quantkit.cli.pack import pack as pack_command
from quantkit.cli.permute import permute as command
from quantkit.cli.sparsify import sparsify as sparsify_command
from quantkit.errors import ArtefactError, ModelError, NonFiniteError, OutputError, RecipeError
from quantkit.models.channel_couplings import Coupling
from quantkit.models.layers import list_layers
from quantkit.models.source import open_model
from quantkit.numerics.histogram import count_bins
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.permutation_search import search_permutation
from quantkit.progress import silent
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import SparsityRecipe
from quantkit.sparsity import channel_permutation
from quantkit.sparsity.channel_permutation import attention_heads, choose_permutations, moves_of
from quantkit.sparsity.choose import LayerInputs, choose_masks
from quantkit.sparsity.maskfile import load_masks
from quantkit.storage.digest import sha256_of
from tests.support.headers import write_component
from tests.support.permutations import PIPELINES, WEIGHTS, couplings_of
from tests.support.pipelines import tiny_pipeline

CPU = torch.device("cpu")


def with_sparsity(**settings):
    return load_recipe("fp8").model_copy(update={"sparsity": SparsityRecipe(**settings)})


@pytest.fixture(scope="module", params=PIPELINES)
def model(request, tmp_path_factory):
    """One tiny model of every kind of denoiser that a rule is for."""
    path = PIPELINES[request.param](tmp_path_factory.mktemp("model") / request.param)
    return open_model(str(path))


@pytest.fixture(scope="module")
def unet(tmp_path_factory):
    return open_model(str(tiny_pipeline(tmp_path_factory.mktemp("unet") / "model")))


@pytest.fixture(autouse=True)
def short_searches(monkeypatch):
    """Search briefly: what is tested here holds for any length."""
    monkeypatch.setattr(
        channel_permutation, "search_permutation", partial(search_permutation, work=1e6)
    )


def invoke(*arguments):
    return CliRunner().invoke(command, [*map(str, arguments), "-q"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("powers", "before", "after"),
    [
        (((1, 1, 1, 1), (1, 1, 0, 0)), 0.25, 0.25),
        (((1, 1, 1, 1), (1, 1, 1, 1)), 0.5, 0.5),
        (((1, 1, 1, 1, 0, 0, 0, 0),) * 3, 0.5, 0.0),
    ],
    ids=["one-loses", "both-lose", "three-gain"],
)
def test_the_loss_of_a_coupling_is_the_mean_over_its_consumers(powers, before, after):
    size = len(powers[0])
    coupling = Coupling((), (), channels=size, block=size, start=0)
    shares = [torch.tensor([power]) / sum(power) for power in powers]
    found = channel_permutation._search(coupling, shares, TWO_OF_FOUR, seed=0)
    assert (found.lost_before, found.lost_after) == pytest.approx((before, after))


@pytest.mark.parametrize(("start", "channels"), [(0, 64), (32, 32), (32, 96), (96, 32)])
def test_the_power_of_what_moves_sums_to_one(tmp_path, start, channels):
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    folder = write_component(tmp_path / "m", "UNet2DConditionModel", {})
    save_file({"fc.weight": weight}, folder / WEIGHTS)
    (component,) = open_model(str(folder)).components
    (layer,) = list_layers(component)
    coupling = Coupling((), (layer,), channels, block=channels, start=start)
    inputs = LayerInputs.of(component, None, None, update=False)
    found = channel_permutation._power(layer, coupling, "magnitude", inputs)
    part = weight[:, start : start + channels].square()
    torch.testing.assert_close(found, part / part.sum())


#: consumers by kind in the tiny models: (feed-forward, attention, FLUX's single blocks)
TINY = {"unet": (4, 8, 0), "sd3": (3, 2, 0), "flux": (2, 1, 2), "pixart": (2, 4, 0)}


def test_the_tiny_models_have_the_couplings_of_their_blocks(model, request):
    kind = request.node.callspec.params["model"]
    names = [coupling.consumers[0].name for coupling in couplings_of(model)]
    found = tuple(
        sum(name.endswith(end) for name in names) for end in (".net.2", ".to_out.0", ".proj_out")
    )
    assert found == TINY[kind]


# The models.


def answers(path):
    """Return what the denoiser of a directory answers to seeded inputs, in float64."""
    import diffusers

    model = open_model(str(path))
    component = model.components[0]
    denoiser = getattr(diffusers, component.class_name).from_pretrained(component.path).double()
    g = torch.Generator().manual_seed(3)
    config = denoiser.config

    def noise(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    if component.family.name == "unet":
        call = {"sample": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 5, 32)}
    elif component.family.name == "sd3":
        call = {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 5, 64),
            "pooled_projections": noise(2, config.pooled_projection_dim),
        }
    elif component.family.name == "flux":
        call = {
            "hidden_states": noise(2, 16, 16),
            "encoder_hidden_states": noise(2, 5, 64),
            "pooled_projections": noise(2, 32),
            "img_ids": torch.arange(48.0).reshape(16, 3).double(),
            "txt_ids": torch.zeros(5, 3).double(),
            "guidance": torch.ones(2).double(),
        }
    else:
        call = {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 5, 32),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }
    timestep = torch.tensor([0.5, 0.25]).double() * (1 if component.family.name == "flux" else 999)
    with torch.no_grad():
        return denoiser(timestep=timestep, return_dict=False, **call)[0]


def test_the_permuted_model_answers_the_same(model, tmp_path):
    output = tmp_path / "permuted"
    said = json.loads(invoke(model.path, "-o", output, "--json").stdout)
    before, after = answers(model.path), answers(output)
    assert torch.allclose(before, after, rtol=1e-9, atol=1e-9 * float(before.abs().max()))
    folder = model.components[0].name
    old, new = (load_file(path / folder / WEIGHTS) for path in (model.path, output))
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    expected = [name for entry in said["permuted"] for name in entry["consumers"]]
    assert {f"{name}.weight" for name in expected} <= moved
    assert set(old) == set(new)
    for name in moved:
        assert old[name].dtype == new[name].dtype
        assert torch.equal(old[name].flatten().sort()[0], new[name].flatten().sort()[0])


def test_masks_of_the_permuted_model_take_less(model, tmp_path):
    output = tmp_path / "permuted"
    said = json.loads(invoke(model.path, "-o", output, "--json").stdout)
    unmoved = choose_masks(model, load_recipe("fp8"), None, progress=silent)
    masks = load_masks(tmp_path / "permuted.masks.safetensors")
    component = model.components[0].name
    before, after = (m.layers[component] for m in (unmoved, masks))
    assert set(before) == set(after)
    consumers = {name for entry in said["permuted"] for name in entry["consumers"]}
    assert consumers
    for name in after:
        if name not in consumers:
            assert after[name].error == pytest.approx(before[name].error, rel=1e-6)
    for entry in said["permuted"]:
        assert entry["lost_after"] < entry["lost_before"]
        mean = sum(after[n].error - before[n].error for n in entry["consumers"])
        assert mean < 0


def test_channels_stay_in_their_heads(model):
    component = model.components[0]
    found = choose_permutations(
        component, with_sparsity(), None, device=CPU, seed=0, progress=silent
    )
    heads = attention_heads(component)
    inside = [p for p in found if p.coupling.producers[0].name.endswith("to_v")]
    assert inside
    for permutation in inside:
        producer = permutation.coupling.producers[0]
        count = heads[producer.name.removesuffix(".to_v")]
        width = producer.n // count
        assert count > 1
        assert torch.equal(permutation.order // width, torch.arange(producer.n) // width)
        assert not torch.equal(permutation.order, torch.arange(producer.n))


def test_values_and_gates_move_together(unet):
    component = unet.components[0]
    found = choose_permutations(
        component, with_sparsity(), None, device=CPU, seed=0, progress=silent
    )
    gated = next(p for p in found if p.coupling.producers[0].name.endswith("net.0.proj"))
    moves = moves_of([gated])
    producer = gated.coupling.producers[0].name
    axis, rows = moves[f"{producer}.weight"]
    channels = gated.coupling.channels
    assert axis == 0
    assert torch.equal(rows, torch.cat([gated.order, gated.order + channels]))
    assert torch.equal(rows, moves[f"{producer}.bias"][1])


def test_layers_that_stay_dense_are_not_permuted(unet):
    recipe = with_sparsity(exclude=("*.attn2.*", "mid_block.*"))
    found = choose_permutations(
        unet.components[0], recipe, None, device=CPU, seed=0, progress=silent
    )
    names = [layer.name for p in found for layer in p.coupling.consumers]
    assert names
    assert not [name for name in names if "attn2" in name or name.startswith("mid_block")]


def test_groups_that_do_not_fit_a_head_are_left_alone(unet, monkeypatch):
    # Groups of 64 have 4096 exchanges a pair: who is asked counts here, not the answer.
    monkeypatch.setattr(
        channel_permutation,
        "search_permutation",
        lambda power, *_, **__: torch.arange(power.shape[1]),
    )
    recipe = with_sparsity(pattern="8:64")
    found = choose_permutations(
        unet.components[0], recipe, None, device=CPU, seed=0, progress=silent
    )
    assert {p.coupling.consumers[0].name.rpartition(".ff.")[2] for p in found} == {"net.2"}


# The calibration.


def calibration_of(model, inputs):
    layers = {layer.name: layer for layer in list_layers(model.components[0])}
    digests = {name: sha256_of(layers[name].shard, layers[name].weight) for name in inputs}
    statistics = {
        name: LayerStatistics(
            amax=x.abs().amax().reshape(1),
            histogram=count_bins(x).reshape(1, -1),
            second_moment=x.square().mean(0, keepdim=True),
            channel_amax=x.abs().amax(0, keepdim=True),
            count=torch.tensor([len(x)]),
        )
        for name, x in inputs.items()
    }
    component = model.components[0].name
    provenance = CalibrationProvenance(
        {component: digests}, "t", 1, "", 1, None, 0, {component: [1]}, {}
    )
    return Calibration({component: statistics}, (), provenance)


@pytest.fixture
def calibrated(unet, tmp_path):
    """A calibration of synthetic inputs, some channels loud."""
    g = torch.Generator().manual_seed(7)
    inputs = {
        layer.name: torch.randn(50, layer.channels, generator=g)
        * torch.logspace(-1, 1, layer.channels)[torch.randperm(layer.channels, generator=g)]
        for layer in list_layers(unet.components[0])
    }
    path = tmp_path / "calibration.safetensors"
    save_calibration(calibration_of(unet, inputs), path, force=False)
    return path, inputs


def test_the_calibration_follows_its_channels(unet, calibrated, tmp_path):
    path, inputs = calibrated
    output = tmp_path / "permuted"
    arguments = ("--method", "wanda", "-c", path, "-o", output, "--json")
    said = json.loads(invoke(unet.path, *arguments).stdout)
    assert all(entry["lost_after"] < entry["lost_before"] for entry in said["permuted"])
    fitting = load_calibration(tmp_path / "permuted.calibration.safetensors")
    permuted = open_model(str(output))
    found = choose_permutations(
        unet.components[0], with_sparsity(method="wanda"), load_calibration(path),
        device=CPU, seed=0, progress=silent,
    )  # fmt: skip
    moves = moves_of(found)
    moved = {
        name: x[:, moves[f"{name}.weight"][1]] if moves.get(f"{name}.weight", (0,))[0] else x
        for name, x in inputs.items()
    }
    expected = calibration_of(permuted, moved)
    assert fitting.metadata == expected.metadata
    for name, statistics in expected.layers["unet"].items():
        for field in ("second_moment", "channel_amax", "amax", "histogram"):
            assert torch.equal(
                getattr(fitting.layers["unet"][name], field), getattr(statistics, field)
            )


def test_what_was_permuted_is_packed_with_its_calibration(unet, calibrated, tmp_path):
    output = tmp_path / "permuted"
    invoke(unet.path, "--method", "wanda", "-c", calibrated[0], "-o", output)
    arguments = [output, "-r", "fp8-static", "-c", f"{output}.calibration.safetensors",
                 "--masks", f"{output}.masks.safetensors", "-o", tmp_path / "p", "-q"]  # fmt: skip
    result = CliRunner().invoke(pack_command, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0


def test_the_calibration_of_the_model_as_it_was_is_refused(unet, calibrated, tmp_path):
    output = tmp_path / "permuted"
    invoke(unet.path, "--method", "wanda", "-c", calibrated[0], "-o", output)
    with pytest.raises(ArtefactError, match="had other weights"):
        choose_masks(
            open_model(str(output)), with_sparsity(method="wanda"),
            load_calibration(calibrated[0]), progress=silent,
        )  # fmt: skip


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["--method", "sparsegpt"], RecipeError, "sparsegpt"),
        (["--method", "wanda"], RecipeError, "needs input statistics"),
        (["-r", "adaptive"], RecipeError, "budget"),
    ],
)
def test_mistakes_leave_nothing_behind(unet, tmp_path, arguments, error, words):
    with pytest.raises(error, match=words):
        invoke(unet.path, *arguments, "-o", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def invoke_as_before(*arguments):
    words = [*map(str, arguments), "--permute", "-q", "--json"]
    return CliRunner().invoke(sparsify_command, words, catch_exceptions=False)


def test_sparsify_permutes_as_before_and_hints(unet, tmp_path):
    result = invoke_as_before(unet.path, "--seed", 3, "-o", tmp_path / "old")
    assert "'quantkit sparsify --permute' is 'quantkit permute' now" in result.stderr
    again = invoke(unet.path, "--seed", 3, "-o", tmp_path / "new")
    assert again.exit_code == result.exit_code == 0
    for name in (f"unet/{WEIGHTS}", WEIGHTS):
        old, new = (tmp_path / folder / name for folder in ("old", "new"))
        assert old.exists() == new.exists()
        assert not old.exists() or old.read_bytes() == new.read_bytes()
    masks = [tmp_path / f"{folder}.masks.safetensors" for folder in ("old", "new")]
    assert masks[0].read_bytes() == masks[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recover", "distill"], "permute first, .* with --recover distill"),
        (["--hessians", "h"], "--permute with --hessians"),
        (["--minutes", "1"], "minutes: a setting of recovery"),
    ],
)
def test_sparsify_permute_refuses_what_it_did(unet, tmp_path, arguments, words):
    with pytest.raises(RecipeError, match=words):
        invoke_as_before(unet.path, *arguments, "-o", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_sparsegpt_cannot_be_permuted_for(unet):
    with pytest.raises(RecipeError, match="permute with magnitude or wanda"):
        choose_permutations(
            unet.components[0], with_sparsity(method="sparsegpt"), None,
            device=CPU, seed=0, progress=silent,
        )  # fmt: skip


def test_outputs_that_cannot_be_are_refused(unet, calibrated, tmp_path):
    with pytest.raises(OutputError, match="overlaps the input"):
        invoke(unet.path, "-o", unet.path / "inside")
    (tmp_path / "there.calibration.safetensors").touch()
    with pytest.raises(OutputError, match="exists"):
        invoke(unet.path, "-c", calibrated[0], "-o", tmp_path / "there")
    with pytest.raises(OutputError, match="the calibration is written there"):
        invoke(
            unet.path, "-c", calibrated[0], "-o", tmp_path / "x",
            "--masks-output", tmp_path / "x.calibration.safetensors",
        )  # fmt: skip
    assert not (tmp_path / "there").exists()
    assert not (tmp_path / "x").exists()


def test_a_dry_run_says_what_it_would_gain_and_writes_nothing(unet, tmp_path):
    said = json.loads(invoke(unet.path, "-n", "-o", tmp_path / "x", "--json").stdout)
    assert said["written"] is None
    assert said["permuted"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("end", "value"), [("ff.net.2.weight", -torch.inf), ("ff.net.0.proj.bias", torch.nan)]
)
def test_no_number_is_refused_and_named(tmp_path, end, value):
    path = tiny_pipeline(tmp_path / "model")
    file = path / "unet" / WEIGHTS
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(end))
    tensors[name].flatten()[5] = value
    save_file(tensors, file)
    with pytest.raises(NonFiniteError, match=end):
        invoke(path, "-o", tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_model_of_two_denoisers_is_refused(unet, tmp_path):
    from dataclasses import replace

    from quantkit.recovery.permuted_model import only_component

    with pytest.raises(ModelError, match="pass the directory of one"):
        only_component(replace(unet, components=unet.components * 2))
