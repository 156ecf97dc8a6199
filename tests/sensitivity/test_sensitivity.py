"""Sensitivity: errors against packed layers, gains, the optimiser against brute force, files."""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
import torch
import yaml
from click.testing import CliRunner
from torch import nn

import quantkit as package
from quantkit.calibration.hessian import load_hessians
from quantkit.calibration.moments import Moments
from quantkit.calibration.statistics import load_calibration
from quantkit.cli import quantkit as command
from quantkit.errors import ArtefactError, OutputError, RecipeError
from quantkit.models.layer_plan import dense_reason
from quantkit.models.layers import list_layers
from quantkit.models.source import open_model
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import METHODS, TWO_OF_FOUR
from quantkit.numerics.scales import WEIGHT_SCALES, dequantize, quantize
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.packing.pack import plan_pack, summarize
from quantkit.pipelines.running import load_pipeline, quiet_libraries
from quantkit.progress import silent
from quantkit.recipe.load import load_recipe, parse_recipe
from quantkit.recipe.schema import BudgetRecipe, CalibrationRecipe, Recipe
from quantkit.sensitivity import budget, cost, knapsack, probe_selection, selection
from quantkit.sensitivity.analyse import treated_pipeline
from quantkit.sensitivity.error_propagation import find_gains
from quantkit.sensitivity.knapsack import Option
from quantkit.sensitivity.local_error import StoredInputs, local_errors, read_weight
from quantkit.sensitivity.measured_model import MeasuredModel
from quantkit.sensitivity.plot import save_plot
from quantkit.sensitivity.recipe_writer import recipe_text
from quantkit.sensitivity.result import (
    LayerSensitivity,
    Measured,
    Outcome,
    Sensitivity,
    SensitivityProvenance,
    load_sensitivity,
    save_sensitivity,
    to_json,
)
from quantkit.sensitivity.simulate import Substitute, final_latents, relative_error, treated
from quantkit.sensitivity.treated_layer import PrunedWeight, treat_input, treat_weight
from quantkit.sensitivity.treatments import BY_NAME, TREATMENTS, refusal
from quantkit.sparsity.sparsegpt import Surgeon
from tests.sparsity.test_sparsity import component_with, statistics_of
from tests.support.packed import packed_module

CPU = torch.device("cpu")
PACKING = [t.name for t in TREATMENTS if t.packs]


# The knapsack


def brute_force(items, limit):
    """Return the least loss of all combinations within the limit, or None."""
    losses = [
        math.fsum(o.loss for o in picked)
        for picked in itertools.product(*items)
        if math.fsum(o.cost for o in picked) <= limit
    ]
    return min(losses, default=None)


@pytest.mark.parametrize("seed", range(200))
def test_solution_is_within_a_step_of_the_best(seed):
    rng = random.Random(seed)
    items = [
        [
            Option(rng.choice([rng.random(), rng.randrange(4) / 4]), rng.random() ** 4)
            for _ in range(rng.randint(1, 5))
        ]
        for _ in range(rng.randint(1, 5))
    ]
    limit = rng.random() * sum(max(o.cost for o in item) for item in items)
    best, picked = brute_force(items, limit), knapsack.solve(items, limit)
    if best is None:
        assert picked is None
        return
    chosen = [options[index] for options, index in zip(items, picked, strict=True)]
    assert math.fsum(o.cost for o in chosen) <= limit + 1e-12
    largest = max((step.gain for step in knapsack.steps_of(items)), default=0.0)
    loss = math.fsum(o.loss for o in chosen)
    assert best - 1e-12 <= loss <= best + largest + 1e-12


def test_solution_is_the_best_where_the_walk_stops_on_the_limit():
    rng = random.Random(7)
    items = [[Option(rng.random(), rng.random()) for _ in range(4)] for _ in range(5)]
    for picked in knapsack.walk(items):
        chosen = [options[index] for options, index in zip(items, picked, strict=True)]
        limit = math.fsum(o.cost for o in chosen) + 1e-12
        assert math.fsum(o.loss for o in chosen) == pytest.approx(brute_force(items, limit))


def test_walk_goes_from_least_cost_to_least_loss_by_convex_steps():
    items = [[Option(0, 9), Option(1, 4), Option(2, 3.9), Option(3, 0)], [Option(5, 1)]]
    assert knapsack.lower_hull(items[0]) == (0, 1, 3)
    assert knapsack.walk(items) == ((0, 0), (1, 0), (3, 0))


def test_dominated_and_equal_options_are_never_on_the_hull():
    options = [Option(1, 1), Option(1, 1), Option(2, 1), Option(1, 2), Option(0.5, 3)]
    assert knapsack.lower_hull(options) == (4, 0)
    assert knapsack.lower_hull([Option(0, 0)]) == (0,)


def test_nothing_within_the_limit_is_none():
    assert knapsack.solve([[Option(2, 0), Option(3, 0)]], 1.9) is None
    assert knapsack.solve([], 0) == ()


def test_what_is_left_goes_to_options_off_the_hull():
    # The hull has only 0 and 1: the middle, above it, is what still fits.
    items = [[Option(0, 1), Option(3, 0.9), Option(4, 0)]]
    assert knapsack.solve(items, 3.5) == (1,)


# Local errors, against the packed layers that inference runs

SHAPES = {"linear": (24, 64), "conv": (8, 32, 3, 3)}


def stored_inputs(rows, buckets=1, channels=None):
    """Return rows (R, K) as stored inputs, split over buckets whose edges are 10, 20, ...

    A convolution's rows have their taps one after the other, ``channels`` each.
    """
    parts = rows.to(torch.bfloat16).chunk(buckets)
    stats = [statistics_of(part.float().reshape(-1, channels or rows.shape[1])) for part in parts]
    joined = replace(
        stats[0],
        **{
            name: torch.cat([getattr(s, name) for s in stats])
            for name in ("amax", "histogram", "second_moment", "channel_amax", "count")
        },
        samples=torch.stack(parts),
        sample_priority=torch.rand(buckets, len(parts[0])).sort(dim=1, descending=True).values,
        sample_count=torch.tensor([len(part) for part in parts]),
    )
    return StoredInputs(joined, tuple(10.0 * (i + 1) for i in range(buckets - 1)))


def layer_in(path, shape, seed=3):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    model = component_with(path / "model", {"layer": weight})
    return list_layers(model.components[0])[0]


def random_rows(count, k, seed=4):
    rows = torch.randn(count, k, generator=torch.Generator().manual_seed(seed))
    rows[0] = 0
    return (rows * torch.linspace(0.1, 3, k)).to(torch.bfloat16).float()


def errors_of(*given):
    return {name: found.error for name, found in local_errors(*given).items()}


def settings_of(recipe="fp8"):
    return load_recipe(recipe).settings("layer")


@pytest.mark.parametrize("name", ["e4m3fn-token", "e5m2-token", "2:4-magnitude-e4m3fn-token"])
def test_local_error_is_that_of_the_packed_layer(tmp_path, name):
    layer, treatment = layer_in(tmp_path, SHAPES["linear"]), BY_NAME[name]
    rows = random_rows(40, layer.k)
    found = errors_of(layer, settings_of(), stored_inputs(rows), CPU)[name]
    dense = nn.Linear(layer.k, layer.n, bias=False).requires_grad_(requires_grad=False)
    dense.weight.data = read_weight(layer, CPU)
    mask = TWO_OF_FOUR if treatment.method else None
    scheme = Scheme(treatment.format, PerChannel(), mask, Activation.TOKEN)
    wanted = dense(rows)
    lost = (packed_module(dense, scheme)(rows) - wanted).square().sum() / wanted.square().sum()
    assert found == pytest.approx(float(lost), rel=1e-4)


def test_static_scales_are_those_of_their_buckets(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    rows = random_rows(40, layer.k)
    # e5m2 has so few codes that a scale of the wrong bucket shows.
    rows[20:] *= 2.0**-18
    settings = load_recipe("fp8-buckets").settings("layer")
    settings = replace(settings, activation=settings.activation.model_copy(update={"buckets": 2}))
    apart = errors_of(layer, settings, stored_inputs(rows, 2), CPU)
    alone = errors_of(layer, settings, stored_inputs(rows[:20].repeat(2, 1), 2), CPU)
    assert apart["e4m3fn-static"] == pytest.approx(alone["e4m3fn-static"], rel=1e-3)
    pooled = replace(settings, activation=settings.activation.model_copy(update={"buckets": 1}))
    cast = treat_input(
        BY_NAME["e4m3fn-static"], pooled.activation, stored_inputs(rows, 2).statistics, (10.0,)
    )
    assert cast.at(-1.0) == cast.at(99.0)


def test_wanda_counts_inputs_where_magnitude_does_not(tmp_path):
    layer = layer_in(tmp_path, SHAPES["conv"])
    channels = torch.cat((torch.ones(16), torch.full((16,), 0.05)))
    rows = random_rows(64, layer.k) * channels.repeat(9)
    errors = errors_of(layer, settings_of(), stored_inputs(rows, channels=32), CPU)
    assert errors["2:4-wanda-16-bit"] < errors["2:4-magnitude-16-bit"]


def test_errors_rank_as_their_formats_do(tmp_path):
    layer = layer_in(tmp_path, SHAPES["conv"])
    inputs = stored_inputs(random_rows(64, layer.k), channels=32)
    errors = errors_of(layer, settings_of(), inputs, CPU)
    assert list(errors) == [t.name for t in TREATMENTS if not t.updates]
    assert errors["16-bit"] == 0
    assert 0 < errors["e4m3fn-token"] < errors["e5m2-token"] < errors["2:4-magnitude-16-bit"] < 1
    assert errors["2:4-magnitude-16-bit"] < errors["2:4-magnitude-e4m3fn-token"]


def test_all_zero_output_has_no_error(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    errors = errors_of(layer, settings_of(), stored_inputs(torch.zeros(8, layer.k)), CPU)
    assert set(errors.values()) == {0.0}


def test_rows_stand_for_what_their_bucket_saw(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    inputs = stored_inputs(random_rows(40, layer.k), 2)
    counts = torch.tensor([20, 20_000_000])
    heavy = replace(inputs, statistics=replace(inputs.statistics, count=counts))
    only = StoredInputs(stored_inputs(random_rows(40, layer.k)[20:]).statistics, ())
    settings = settings_of()
    found = errors_of(layer, settings, heavy, CPU)["e4m3fn-token"]
    assert found == pytest.approx(errors_of(layer, settings, only, CPU)["e4m3fn-token"], 1e-4)


def test_layer_that_cannot_be_sparse_has_no_masks(tmp_path):
    layer = layer_in(tmp_path, (8, 48))
    assert dense_reason(layer, TWO_OF_FOUR)
    errors = errors_of(layer, settings_of(), stored_inputs(random_rows(8, 48)), CPU)
    assert not [name for name in errors if name.startswith("2:4")]


def test_calibration_without_stored_inputs_is_refused(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    inputs = stored_inputs(random_rows(8, layer.k))
    bare = replace(inputs, statistics=replace(inputs.statistics, samples=None))
    with pytest.raises(ArtefactError, match=r"no stored inputs of layer, .*; calibrate again"):
        local_errors(layer, settings_of(), bare, CPU)
    with pytest.raises(ArtefactError, match="stored inputs have 32 columns, wanted 64"):
        local_errors(layer, settings_of(), stored_inputs(random_rows(8, 32)), CPU)


def test_table_names_are_distinct_and_methods_exist():
    assert len(BY_NAME) == len(TREATMENTS)
    assert {t.method for t in TREATMENTS if t.method} == set(METHODS)
    assert [t.name for t in TREATMENTS if not t.packs] == [
        f"2:4-{method}-16-bit" for method in METHODS
    ]


def moments_of(rows):
    return Moments(rows.T @ rows / len(rows), rows.mean(dim=0), len(rows))


def correlated_rows(count, k, seed):
    """Return rows of correlated columns; the seed draws rows, the correlation is one."""
    mixing = torch.randn(k // 4, k, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    noise = 0.1 * torch.randn(count, k, generator=g)
    rows = torch.randn(count, k // 4, generator=g) @ mixing + noise
    return rows.to(torch.bfloat16).float()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sparsegpt_beats_wanda_on_rows_that_its_moments_never_saw(tmp_path, shape):
    layer = layer_in(tmp_path, shape)
    moments = moments_of(correlated_rows(4000, layer.k, 1))
    inputs = stored_inputs(correlated_rows(64, layer.k, 2), channels=shape[1])
    found = errors_of(layer, settings_of(), inputs, CPU, moments)
    assert list(found) == [t.name for t in TREATMENTS]
    for end in ("16-bit", "e4m3fn-token"):
        assert found[f"2:4-sparsegpt-{end}"] < 0.7 * found[f"2:4-wanda-{end}"]
    assert found["2:4-sparsegpt-16-bit"] < found["2:4-sparsegpt-e4m3fn-token"]


def test_a_weight_after_surgery_has_its_mask_and_lands_on_the_grid(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    moments = moments_of(correlated_rows(400, layer.k, 1))
    operated = PrunedWeight.of(read_weight(layer, CPU), moments, bias=True)
    assert bool((operated.mask.reshape(layer.n, -1, 4).sum(2) == 2).all())
    treatment, settings = BY_NAME["2:4-sparsegpt-e4m3fn-token"], settings_of()
    packed = operated.packed(treatment, settings)
    assert not packed[~operated.mask].any()
    fmt, channel = treatment.format, PerChannel()
    scale = WEIGHT_SCALES[settings.weight.observer](operated.rows, fmt, channel)
    assert torch.equal(dequantize(quantize(packed, scale, fmt, channel), scale, channel), packed)


# Layers under a treatment inside a module

CONVOLUTIONS = {
    "plain": {"padding": 1},
    "strided": {"padding": 1, "stride": 2},
    "dilated same": {"padding": "same", "dilation": 2},
    "one tap": {"kernel_size": 1, "bias": False},
    "no padding": {"stride": (2, 1)},
}


@pytest.mark.parametrize("name", ["e4m3fn-static", "e4m3fn-token", "2:4-magnitude-e4m3fn-token"])
@pytest.mark.parametrize("form", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_treated_convolution_is_the_packed_one(name, form):
    torch.manual_seed(1)
    dense = nn.Conv2d(32, 8, **{"kernel_size": 3, **form}).requires_grad_(requires_grad=False)
    x = torch.randn(2, 32, 7, 6)
    assert_treated_is_packed(dense, x, BY_NAME[name])


@pytest.mark.parametrize("name", ["e4m3fn-static", "e5m2-token", "2:4-magnitude-e4m3fn-token"])
def test_treated_linear_is_the_packed_one(name):
    torch.manual_seed(1)
    dense = nn.Linear(64, 24).requires_grad_(requires_grad=False)
    assert_treated_is_packed(dense, torch.randn(2, 5, 64), BY_NAME[name])


class Root(nn.Module):
    """A denoiser of one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, timestep):
        return self.layer(x)


def assert_treated_is_packed(dense, x, treatment):
    from quantkit.numerics.packing import to_rows
    from quantkit.sensitivity.treated_layer import InputCast

    root = Root(dense)
    before = root(x, timestep=5)
    mask = TWO_OF_FOUR if treatment.method else None
    packed = packed_module(
        dense, Scheme(treatment.format, PerChannel(), mask, treatment.activation)
    )
    rows = treat_weight(to_rows(dense.weight), treatment, settings_of(), None)
    cast = InputCast(treatment.format, None)
    if treatment.activation is Activation.STATIC:
        cast = InputCast(treatment.format, packed.input_scale.reshape(1))
    with treated(root, {"layer": Substitute.of(rows, tuple(dense.weight.shape), cast)}):
        found = root(x, timestep=torch.tensor([5]))
        half = root(x.half(), timestep=5)
    torch.testing.assert_close(found, packed(x), rtol=1e-5, atol=1e-5)
    assert half.dtype == torch.float16
    assert torch.equal(root(x, timestep=5), before)
    assert "forward" not in vars(dense)


def test_scale_follows_the_timestep():
    from quantkit.sensitivity.treated_layer import InputCast

    root = Root(nn.Linear(16, 16, bias=False).requires_grad_(requires_grad=False))
    cast = InputCast(BY_NAME["e4m3fn-static"].format, torch.tensor([1e-3, 1.0]), (500.0,))
    x = torch.full((1, 16), 100.0)
    with treated(root, {"layer": Substitute.of(torch.eye(16), (16, 16), cast)}):
        low, high = root(x, timestep=499), root(x, timestep=500)
    # The small scale saturates at 448 codes; the large one rounds 100 to e4m3's 96 or 104.
    assert float(low[0, 0]) == pytest.approx(0.448)
    assert float(high[0, 0]) in (96.0, 104.0)


def test_layers_are_restored_after_an_error():
    root = Root(nn.Linear(16, 16))
    substitutes = {"layer": Substitute(torch.eye(16), None)}
    with pytest.raises(ZeroDivisionError), treated(root, substitutes):
        raise ZeroDivisionError
    assert "forward" not in vars(root.layer)
    assert not root._forward_pre_hooks


def test_relative_error_is_the_median_over_prompts():
    wanted = torch.ones(3, 2, 2)
    found = wanted * torch.tensor([1.1, 1.2, 5.0]).reshape(3, 1, 1)
    assert relative_error(found, wanted) == pytest.approx(0.04)
    assert relative_error(torch.zeros(1, 4), torch.zeros(1, 4)) == 0


# Gains


def layer_with(name, kind="linear", measured=None, **errors):
    outcomes = {"16-bit": Outcome(0.0, 1000, 1.0)}
    sizes = {"e4m3fn": (500, 0.5), "2:4": (300, 0.25)}
    for treatment, error in errors.items():
        nbytes, seconds = sizes["2:4" if treatment.startswith("2:4") else "e4m3fn"]
        outcomes[treatment] = Outcome(error, nbytes, seconds)
    return LayerSensitivity(name, kind, (4, 4), "00", 16.0, outcomes, measured)


def test_gain_is_measured_or_the_median_of_role_kind_or_all():
    token = "e4m3fn-token"
    layers = [
        layer_with(f"a.{i}.to_q", measured=Measured(token, final), **{token: 0.01})
        for i, final in enumerate((0.1, 0.3, 0.2))
    ]
    layers += [
        layer_with("b.a.to_q", **{token: 0.5}),
        layer_with("b.ff.out", **{token: 0.5}),
        layer_with("c.conv1", kind="conv2d", **{token: 0.5}),
    ]
    gains = find_gains(layers)
    assert gains["a.1.to_q"].value == pytest.approx(30)
    assert [gains[layer.name].source for layer in layers] == [
        *["measured"] * 3,
        "median of linear a.to_q",
        "median of linear",
        "median of all",
    ]
    assert [gains[layer.name].value for layer in layers[3:]] == pytest.approx([20] * 3)
    assert find_gains(layers[3:])["c.conv1"].value == 1.0


def test_role_is_kind_and_last_two_words():
    name = "up_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj"
    assert layer_with(name).role == "linear net.proj"
    assert layer_with("proj_in", kind="conv2d").role == "conv2d proj_in"


def test_layer_without_local_error_has_the_median():
    flat = layer_with("a.x", measured=Measured("e4m3fn-token", 0.0), **{"e4m3fn-token": 0.0})
    assert find_gains([flat])["a.x"].source == "nothing measured"


# Budgets


def made(layers, fixed=100):
    about = SensitivityProvenance("m", "0", "0", 0, "0", 20, None, 0, "card", {"quantkit": "0"})
    return Sensitivity("unet", tuple(layers), (250.0,), fixed, load_recipe("fp8-static"), about)


def three_layers():
    return made(
        layer_with(name, **{
            "e4m3fn-static": error, "e4m3fn-token": error * 1.01,
            "2:4-magnitude-e4m3fn-token": 130 * error, "2:4-wanda-e4m3fn-token": 100 * error,
        })
        for name, error in (("a.one", 1e-3), ("a.two", 2e-3), ("a.three", 4e-3))
    )  # fmt: skip


FP8 = load_recipe("fp8")


def choose(sensitivity, recipe=FP8, **goal):
    return selection.choose(sensitivity, recipe, BudgetRecipe(**goal))


@pytest.mark.parametrize(
    ("goal", "names"),
    [
        ({"bytes": 1.0}, ["16-bit"] * 3),
        ({"bytes": 0.9}, ["e4m3fn-static", "16-bit", "16-bit"]),
        ({"bytes": 0.52}, ["e4m3fn-static"] * 3),
        ({"bytes": 0.46}, ["2:4-wanda-e4m3fn-token", "e4m3fn-static", "e4m3fn-static"]),
        ({"error": 7.1e-3}, ["e4m3fn-static"] * 3),
        ({"error": 5e-3}, ["e4m3fn-static", "e4m3fn-static", "16-bit"]),
        ({"error": 0.11}, ["2:4-wanda-e4m3fn-token", "e4m3fn-static", "e4m3fn-static"]),
        ({"speed": 2.0}, ["e4m3fn-static"] * 3),
        ({"speed": 2.5, "treatments": ["2:4-*"]}, None),
    ],
    ids=str,
)
def test_budget_is_met(goal, names):
    choice = choose(three_layers(), **goal).assignment
    assert choice.size <= goal.get("bytes", 2)
    assert choice.error <= goal.get("error", 1)
    assert choice.speed >= goal.get("speed", 1)
    if names:
        assert [c.treatment for c in choice.chosen] == names


def test_figures_of_a_choice():
    choice = choose(three_layers(), bytes=0.52).assignment
    assert choice.size == (100 + 3 * 500) / 3100
    assert choice.error == pytest.approx(7e-3)
    assert choice.speed == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ({"bytes": 0.2}, r"budget bytes 0.2: the treatments reach 0.3226 of the source's size"),
        ({"speed": 9}, "budget speed 9: at most 4 is modelled"),
        (
            {"bytes": 0.5, "treatments": ["int4"]},
            "treatments int4: match none of 16-bit, e4m3fn-st",
        ),
    ],
)
def test_budget_out_of_reach_says_how_near_one_comes(goal, message):
    with pytest.raises(RecipeError, match=message):
        choose(three_layers(), **goal)


def test_masks_of_a_choice_have_one_method():
    layers = list(three_layers().layers)
    swapped = dict(layers[0].outcomes)
    swapped["2:4-magnitude-e4m3fn-token"] = Outcome(1e-9, 300, 0.25)
    choice = choose(
        made([replace(layers[0], outcomes=swapped), *layers[1:]]), bytes=0.36
    ).assignment
    methods = {BY_NAME[c.treatment].method for c in choice.chosen} - {None}
    assert len(methods) == 1


def test_recipe_keeps_its_layers():
    recipe = parse_recipe("{name: t, keep: ['*.one']}", where="t")
    chosen = choose(three_layers(), recipe, error=1.0)
    assert chosen.assignment.chosen[0].treatment == "16-bit"
    assert chosen.remarks["a.one"] == "kept by the recipe"
    assert "local 0.2 x gain 1, nothing measured" in chosen.remarks["a.two"]
    assert "e4m3fn-static 0.002 for +200 bytes" in chosen.remarks["a.two"]


# The edge


def test_roles_that_nobody_knows_go_first_and_then_the_edge():
    sensitivity, goal = three_layers(), BudgetRecipe(bytes=0.52)
    seen = []
    for _ in range(9):
        problems = budget.make_problems(sensitivity, FP8, ("*",))
        probe = probe_selection.next_probe(budget.optimize(problems, goal), goal)
        if probe is None:
            break
        seen.append(probe)
        found = Measured(probe.treatment, 0.5)
        layers = [
            replace(layer, measured=replace(found, error=layer.outcomes[probe.treatment].error))
            if layer.name == probe.layer
            else layer
            for layer in sensitivity.layers
        ]
        sensitivity = replace(sensitivity, layers=tuple(layers))
    assert seen[0].why == "first of linear a.three"
    assert len({probe.layer for probe in seen}) == len(seen)
    assert all(probe.treatment != "16-bit" for probe in seen)


def test_layers_far_from_the_edge_are_not_run():
    token = "e4m3fn-token"
    layers = [layer_with("x.a", measured=Measured(token, 1e-3), **{token: 1e-3})]
    layers += [layer_with(f"{i}.x.a", **{token: e}) for i, e in enumerate((1.1e-3, 1e-8, 1.0))]
    # All of one role, so that the first one's gain is everybody's.
    goal = BudgetRecipe(bytes=(100 + 2 * 500 + 2 * 1000) / 4100)
    sensitivity = made(layers)
    problems = budget.make_problems(sensitivity, FP8, ("*",))
    probe = probe_selection.next_probe(budget.optimize(problems, goal), goal)
    assert probe.layer == "0.x.a"
    known = [replace(layer, measured=Measured(token, layer.outcomes[token].error)) for layer in
             layers[:2]]  # fmt: skip
    problems = budget.make_problems(made([*known, *layers[2:]]), FP8, ("*",))
    assert probe_selection.next_probe(budget.optimize(problems, goal), goal) is None


# Cost


@pytest.mark.parametrize("name", PACKING)
def test_bytes_are_those_of_the_packed_file(tmp_path, name):
    layer = layer_in(tmp_path, SHAPES["conv"])
    settings = settings_of()
    n, k = layer.n, layer.k
    wanted = {"16-bit": 2 * n * k, "2:4": n * k // 2 + n * k // 8 + 4 * n}
    key = "2:4" if name.startswith("2:4") else name
    edges = (1.0, 2.0) if name.endswith("static") else ()
    found = cost.packed_bytes(layer, BY_NAME[name], settings.weight, edges)
    assert found == wanted.get(key, n * k + 4 * n) + 4 * 3 * bool(edges)


def test_time_is_bound_by_compute_or_by_memory(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    device = cost.PeakRates("test", 1e3, 2e3, 4e3, bandwidth=1e6)
    flops = 2 * 100 * layer.n * layer.k
    times = [
        cost.modelled_seconds(layer, BY_NAME[name], 10, 100, device)
        for name in ("16-bit", "e5m2-static", "2:4-wanda-e4m3fn-token", "2:4-wanda-16-bit")
    ]
    assert times == [flops / 1e3, flops / 2e3, flops / 4e3, flops / 1e3]
    assert cost.modelled_seconds(layer, BY_NAME["16-bit"], 3e6, 0, device) == 3.0


def test_peak_rates_are_those_of_the_data_sheet():
    card = cost.RX_9070_XT
    rates = (card.flops_16_bit, card.flops_fp8, card.flops_fp8_sparse)
    assert [round(rate / 1e12) for rate in rates] == [195, 389, 779]
    assert card.bandwidth == 640e9


# Files


def test_file_holds_what_was_written(tmp_path):
    sensitivity = replace(three_layers(), notes=("a.one: why",))
    measured = replace(sensitivity.layers[0], measured=Measured("e4m3fn-token", 0.1))
    sensitivity = replace(sensitivity, layers=(measured, *sensitivity.layers[1:]))
    path = tmp_path / "s.json"
    save_sensitivity(sensitivity, path, force=False)
    assert load_sensitivity(path) == sensitivity
    with pytest.raises(OutputError, match="exists already"):
        save_sensitivity(sensitivity, path, force=False)


BAD_FILES = {
    "missing": (None, "s.json: missing"),
    "not json": ("{", "not JSON"),
    "list": ("[]", "found list, wanted a JSON object"),
    "other": ('{"schema": "x"}', "not a quantkit.sensitivity file"),
    "newer": ('{"schema": "quantkit.sensitivity", "schema_version": 2}', "schema_version 2, want"),
    "empty": ('{"schema": "quantkit.sensitivity", "schema_version": 1}', "damaged .*component"),
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "s.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArtefactError, match=message) as caught:
        load_sensitivity(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-1.0, float("nan"), "much"])
def test_figures_that_cannot_be_are_refused(tmp_path, value):
    values = to_json(three_layers())
    values["layers"][1]["outcomes"]["e4m3fn-token"]["error"] = value
    path = tmp_path / "s.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ArtefactError, match="damaged"):
        load_sensitivity(path)


def test_plot_is_drawn_and_other_suffixes_are_refused(tmp_path):
    for name in ("p.svg", "p.png"):
        save_plot(three_layers(), tmp_path / name, force=False)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "p.svg").read_text()
    assert all(name in text for name in PACKING if name in three_layers().layers[0].outcomes
               and name != "16-bit")  # fmt: skip
    with pytest.raises(OutputError, match=r"p.gif: plots are written as .svg"):
        save_plot(three_layers(), tmp_path / "p.gif", force=False)


def test_recipe_text_says_what_the_recipe_does():
    chosen = choose(three_layers(), load_recipe("fp8-sparse"), bytes=0.46)
    text = recipe_text(chosen.recipe, chosen.remarks)
    assert parse_recipe(text, where="t") == chosen.recipe
    assert '- "a.one"  # loses 0.1 (local 0.1 x gain 1' in text
    reasons = [override["reason"] for override in yaml.safe_load(text)["overrides"]]
    assert reasons[0].startswith("e4m3fn-static: ")
    assert chosen.recipe.sparsity.error_budget is None
    settings = [chosen.recipe.settings(f"a.{n}") for n in ("one", "two")]
    assert [(s.sparse, s.activation.mode) for s in settings] == [(True, "token"), (False, "static")]


def test_bundled_recipes_survive_being_written():
    from quantkit.recipe.load import recipe_names

    for name in recipe_names():
        recipe = load_recipe(name)
        assert parse_recipe(recipe_text(recipe, {}), where=name) == recipe


def test_recipe_with_a_budget_is_not_packed(pipeline_dir):
    with pytest.raises(RecipeError, match=r"recipe adaptive: has a budget, .*calibrate optimize"):
        plan_pack(open_model(str(pipeline_dir)), load_recipe("adaptive"), calibration=None,
                  masks=None, progress=silent)  # fmt: skip


def test_budget_has_one_goal():
    with pytest.raises(RecipeError, match="budget: found bytes and error; set one"):
        parse_recipe("{name: t, budget: {bytes: 0.5, error: 1}}", where="t")


# From a pipeline to a packed one


#: The cheapest observers, and few calls.
QUICK = """
name: quick
activation: {mode: static, observer: amax, buckets: 2}
calibration: {prompts: 1, steps: 2, guidance: 2.0, buckets: 2, batch: 1}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory, pipeline_dir):
    """Calibrate the tiny pipeline and measure it, two layers in the pipeline."""
    folder = tmp_path_factory.mktemp("sensitivity")
    quick = folder / "quick.yaml"
    quick.write_text(QUICK)
    invoke("calibrate", "model", pipeline_dir, "-r", quick, "-o", folder / "c.safetensors", "-q")
    invoke("calibrate", "sensitivity", pipeline_dir, "-c", folder / "c.safetensors", "-r", quick,
           "--measure", 2, "-o", folder / "s.json", "--plot", folder / "s.svg", "-q")  # fmt: skip
    return folder


def invoke(*words, code=0):
    result = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=True)
    if code == 0 and result.exception is not None:
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_every_layer_that_can_be_packed_is_measured(work, pipeline_dir):
    found = load_sensitivity(work / "s.json")
    calibration = load_calibration(work / "c.safetensors")
    assert {layer.name for layer in found.layers} == set(calibration.layers["unet"])
    assert sum(layer.measured is not None for layer in found.layers) == 2
    assert len(found.notes) >= 2
    component = open_model(str(pipeline_dir)).components[0]
    layers = {layer.name: layer for layer in list_layers(component)}
    for layer in found.layers:
        assert set(layer.outcomes) == {
            t.name for t in TREATMENTS if not refusal(t, layers[layer.name]) and not t.updates
        }
    # 16x16 latents are halved by the stride of the downsampler; two halves of guidance.
    rows = {layer.name: layer.rows for layer in found.layers}
    down = "down_blocks.0.downsamplers.0.conv"
    assert rows["down_blocks.0.resnets.0.conv1"] == 4 * rows[down] > 0


def test_measuring_again_gives_the_same_file(work, pipeline_dir):
    invoke("calibrate", "sensitivity", pipeline_dir, "-c", work / "c.safetensors", "-r",
           work / "quick.yaml", "--measure", 2, "-o", work / "again.json", "-q")  # fmt: skip
    assert (work / "again.json").read_bytes() == (work / "s.json").read_bytes()


def test_chosen_recipe_packs_to_its_size_and_its_latents(work, pipeline_dir, tmp_path):
    chosen, calibration = tmp_path / "chosen.yaml", work / "c.safetensors"
    out = invoke("calibrate", "optimize", work / "s.json", "-r", "fp8", "--bytes", 0.55, "-o",
                 chosen, "--json")  # fmt: skip
    told = json.loads(out)
    names = {layer["name"]: layer["treatment"] for layer in told["layers"]}
    assert len(set(names.values())) > 1
    assert told["size"] <= 0.55
    invoke("sparsify", pipeline_dir, "-r", chosen, "-c", calibration, "-o", tmp_path / "m", "-q")
    invoke("pack", pipeline_dir, "-r", chosen, "-c", calibration, "--masks", tmp_path / "m", "-o",
           tmp_path / "packed", "-q")  # fmt: skip
    model, recipe = open_model(str(pipeline_dir)), load_recipe(str(chosen))
    stored = load_calibration(calibration)
    plan = plan_pack(model, recipe, calibration=stored, masks=None, progress=silent)
    by_layer = {layer.name: layer for layer in summarize(plan, tmp_path).layers}
    for layer in told["layers"]:
        # Of a layer that stays, pack counts its bias too: this is about those that are packed.
        if layer["treatment"] != "16-bit":
            bias = by_layer[layer["name"]].bytes_after - layer["bytes"]
            assert bias in (0, 2 * by_layer[layer["name"]].shape[0])
    assert_same_codes(model, stored, names, tmp_path / "packed")


def assert_same_codes(model, calibration, names, packed, surgeon=None):
    """Hold what treated layers compute with to the weights and scales of the packed pipeline.

    Latents would not do: sums in another order flip a code once in a while, and in a random UNet
    one flip is an avalanche.
    """
    subject = MeasuredModel.of(model, parse_recipe(QUICK, where="quick"), calibration, surgeon)
    modules = dict(package.load_pipeline(packed, torch_dtype=torch.float32).unet.named_modules())
    for name, treatment in names.items():
        if treatment == "16-bit":
            assert isinstance(modules[name], nn.Linear | nn.Conv2d)
            continue
        found = subject.substitute(name, treatment, CPU)
        assert torch.equal(found.weight, modules[name].dequantized()), name
        assert (found.cast.scale is None) == (modules[name].input_scale is None)
        if found.cast.scale is not None:
            assert torch.equal(found.cast.scale, modules[name].input_scale.reshape(-1)), name
            assert found.cast.edges == modules[name].scheme.buckets


@pytest.fixture(scope="module")
def surgery(work, pipeline_dir):
    """Second moments of the tiny pipeline, and what sensitivity makes of them."""
    quick = work / "quick.yaml"
    invoke("calibrate", "hessian", pipeline_dir, "-r", quick, "-o", work / "h", "-q")
    invoke("calibrate", "sensitivity", pipeline_dir, "-c", work / "c.safetensors", "--hessians",
           work / "h", "-r", quick, "--measure", 0, "-o", work / "sh.json", "-q")  # fmt: skip
    return work


def test_sparsegpt_is_chosen_and_packs_to_what_was_measured(surgery, pipeline_dir, tmp_path):
    found = load_sensitivity(surgery / "sh.json")
    can = [layer for layer in found.layers if "2:4-wanda-e4m3fn-token" in layer.outcomes]
    assert can
    assert all("2:4-sparsegpt-e4m3fn-token" in layer.outcomes for layer in can)
    chosen, calibration = tmp_path / "chosen.yaml", surgery / "c.safetensors"
    told = json.loads(
        invoke("calibrate", "optimize", surgery / "sh.json", "-r", "fp8", "--bytes", 0.5,
               "-o", chosen, "--json")
    )  # fmt: skip
    names = {layer["name"]: layer["treatment"] for layer in told["layers"]}
    sparse = [name for name, treatment in names.items() if BY_NAME[treatment].updates]
    assert sparse
    recipe = load_recipe(str(chosen))
    assert recipe.needs_hessians
    assert recipe.sparsity.method == "sparsegpt"
    assert {name for name in names if recipe.settings(name).weight.rounding == "gptq"} >= {*sparse}
    moments = ("--hessians", surgery / "h")
    invoke("sparsify", pipeline_dir, "-r", chosen, "-c", calibration, *moments, "-o",
           tmp_path / "m", "-q")  # fmt: skip
    invoke("pack", pipeline_dir, "-r", chosen, "-c", calibration, *moments, "--masks",
           tmp_path / "m", "-o", tmp_path / "packed", "-q")  # fmt: skip
    model = open_model(str(pipeline_dir))
    hessians = Surgeon(load_hessians(surgery / "h"), CPU)
    assert_same_codes(model, load_calibration(calibration), names, tmp_path / "packed", hessians)


def test_sparsegpt_without_second_moments_is_refused(work, surgery, pipeline_dir, tmp_path):
    glob, output = "2:4-sparsegpt-*", tmp_path / "chosen.yaml"
    with pytest.raises(RecipeError, match=r"2:4-sparsegpt-\*: not measured, .* give them to"):
        invoke("calibrate", "optimize", work / "s.json", "--bytes", 0.6, "--treatments", glob,
               "-o", output)  # fmt: skip
    assert not output.exists()
    subject = MeasuredModel.of(
        open_model(str(pipeline_dir)),
        parse_recipe(QUICK, where="quick"),
        load_calibration(work / "c.safetensors"),
    )
    found = load_sensitivity(surgery / "sh.json").layers
    name = next(x.name for x in found if "2:4-sparsegpt-e4m3fn-token" in x.outcomes)
    with pytest.raises(RecipeError, match="needs second moments; give those of"):
        subject.substitute(name, "2:4-sparsegpt-e4m3fn-token", CPU)


def test_treated_pipeline_changes_and_comes_back(work, pipeline_dir):
    settings = CalibrationRecipe(prompts=1, steps=1, guidance=2.0, batch=1, buckets=1)
    model = open_model(str(pipeline_dir))
    subject = MeasuredModel.of(
        model, parse_recipe(QUICK, where="quick"), load_calibration(work / "c.safetensors")
    )
    with quiet_libraries():
        pipe = load_pipeline(model, CPU)
        untouched = final_latents(pipe, ("a red fox",), settings)
        with treated_pipeline(subject, pipe, dict.fromkeys(subject.layers, "e4m3fn-static")):
            found = final_latents(pipe, ("a red fox",), settings)
        assert torch.equal(final_latents(pipe, ("a red fox",), settings), untouched)
    # FP8 keeps three bits of mantissa: errors of a few percent, far from none and from all.
    assert 1e-5 < relative_error(found, untouched) < 0.1


def test_search_keeps_the_ssim(work, pipeline_dir, tmp_path):
    told = json.loads(
        invoke(
            "calibrate",
            "optimize",
            work / "s.json",
            "-r",
            "fp8",
            "--ssim",
            0.9,
            "--model",
            pipeline_dir,
            "-c",
            work / "c.safetensors",
            "--count",
            1,
            "--steps",
            2,
            "-o",
            tmp_path / "chosen.yaml",
            "-q",
            "--json",
        )
    )
    passed = [trial for trial in told["trials"] if trial["ssim"] >= 0.9]
    failed = [trial["error"] for trial in told["trials"] if trial["ssim"] < 0.9]
    assert told["error"] == max(trial["error"] for trial in passed)
    assert not failed or told["error"] < min(failed)
    assert "SSIM" in load_recipe(str(tmp_path / "chosen.yaml")).description


REFUSED = {
    "no budget": (["-r", "fp8"], "recipe fp8: no budget; give bytes"),
    "search without a model": (
        ["--ssim", 0.9],
        "budget ssim: pictures have to be made for it; give a model",
    ),
    "out of reach": (["--bytes", 0.01], "budget bytes 0.01: the treatments reach"),
    "two goals": (["--bytes", 0.5, "--error", 1], "budget: found bytes and error"),
    "no such treatment": (["--bytes", 0.9, "--treatments", "int4"], "treatments int4: match none"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_optimize_refuses(work, tmp_path, words, message):
    output = tmp_path / "chosen.yaml"
    result = CliRunner().invoke(
        command,
        ["calibrate", "optimize", str(work / "s.json"), *map(str, words), "-o", str(output)],
    )
    assert message in str(result.exception)
    assert not output.exists()


def test_calibration_of_other_weights_is_refused(work, tmp_path):
    from tests.support.pipelines import tiny_pipeline

    other = tiny_pipeline(tmp_path / "other", seed=1)
    with pytest.raises(ArtefactError, match="had other weights"):
        invoke("calibrate", "sensitivity", other, "-c", work / "c.safetensors", "--measure", 0,
               "-o", tmp_path / "s.json", "-q")  # fmt: skip
    subject = MeasuredModel.of(
        open_model(str(other)), FP8, load_calibration(work / "c.safetensors")
    )
    with pytest.raises(ArtefactError, match="had other weights or is not in this model"):
        changed = replace(load_sensitivity(work / "s.json").layers[0], digest="0")
        subject.refuse_others(made([changed]))


def test_smoothing_is_refused(work, pipeline_dir):
    smooth = Recipe(name="t", smooth=0.5)
    with pytest.raises(RecipeError, match="smooth: sensitivity cannot measure it"):
        MeasuredModel.of(
            open_model(str(pipeline_dir)), smooth, load_calibration(work / "c.safetensors")
        )


def test_recipe_with_a_budget_is_built_whole(work, pipeline_dir, tmp_path, monkeypatch):
    from quantkit.workflow import build

    monkeypatch.setattr(build, "MEASURED", 1)
    quick = parse_recipe(QUICK, where="quick")
    kept = ("weight", "activation", "calibration")
    recipe = load_recipe("adaptive").model_copy(update={k: getattr(quick, k) for k in kept})
    built = build.build(open_model(str(pipeline_dir)), recipe, tmp_path, prompts=["a fox"],
                        device="cpu", threads=1, force=False, progress=silent)  # fmt: skip
    chosen = load_recipe(str(tmp_path / "chosen.yaml"))
    assert (chosen.name, chosen.budget) == ("adaptive-chosen", None)
    assert load_sensitivity(tmp_path / "sensitivity.json").provenance.prompts == 1
    assert built.summary.bytes_after < built.summary.bytes_before
    searching = recipe.model_copy(update={"budget": BudgetRecipe(ssim=0.9)})
    with pytest.raises(RecipeError, match="recipe adaptive: budget ssim, wanted bytes"):
        build.refuse_search(searching)


def test_transformers_are_measured_too(transformer_pipeline_dir, tmp_path):
    invoke("calibrate", "model", transformer_pipeline_dir, "--count", 1, "--steps", 4, "-o",
           tmp_path / "c.safetensors", "-q")  # fmt: skip
    invoke("calibrate", "sensitivity", transformer_pipeline_dir, "-c", tmp_path / "c.safetensors",
           "--count", 1, "--steps", 4, "--measure", 2, "-o", tmp_path / "s.json", "-q")  # fmt: skip
    measured = [m for m in (x.measured for x in load_sensitivity(tmp_path / "s.json").layers) if m]
    assert len(measured) == 2
    assert all(m.error > 0 for m in measured)
