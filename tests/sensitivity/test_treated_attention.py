"""Attention under treatments: its emulation, its errors, its cost, and choosing it."""

from dataclasses import replace

import pytest
import torch
from diffusers import UNet2DConditionModel

import quantkit
from quantkit.calibration.statistics.format_errors import lost_power, rounded_attention
from quantkit.device.backends import Backend, use
from quantkit.errors import RecipeError
from quantkit.models.attention_modules import Heads
from quantkit.numerics.attention_formats import ATTENTION_FORMATS
from quantkit.numerics.attention_scales import AttentionScales
from quantkit.recipe.attention_recipe import AttentionRecipe
from quantkit.recipe.dump import recipe_text
from quantkit.recipe.load import load_recipe, parse_recipe
from quantkit.sensitivity.budget import allowed_names
from quantkit.sensitivity.sensitivity_file import (
    LayerSensitivity,
    Outcome,
    load_sensitivity,
    save_sensitivity,
)
from quantkit.sensitivity.treated_attention import AttentionErrors, rounding
from quantkit.sensitivity.treatment_cost import PeakRates, attention_seconds
from quantkit.sensitivity.treatments import ATTENTION_BY_NAME, ATTENTION_TREATMENTS
from tests.support.artefacts import attention_statistics
from tests.support.sensitivities import choose, three_layers

pytestmark = pytest.mark.usefixtures("one_thread")

SCALES = AttentionScales(
    torch.full((3,), 8.0),
    torch.full((3,), 8.0),
    torch.zeros(3, 24),
    torch.full((3, 24), 8 / 448),
    torch.zeros(3, 24),
)
by_name = pytest.mark.parametrize("found", ATTENTION_FORMATS, ids=lambda row: row.name)


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=2,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32,
    ).eval()  # fmt: skip


def answer(unet):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 8, 8, generator=generator)
    text = torch.randn(2, 11, 32, generator=generator)
    with torch.no_grad():
        return unet(x, torch.tensor(500.0), text).sample


def modules_of(unet):
    return [name for name, m in unet.named_modules() if hasattr(m, "processor")]


@by_name
def test_rounding_is_what_quantized_attention_computes(unet, found):
    before = answer(unet)
    modules = modules_of(unet)
    with rounding(unet, dict.fromkeys(modules, found), dict.fromkeys(modules)):
        rounded = answer(unet)
    assert torch.equal(answer(unet), before)
    with use(Backend.REFERENCE):
        quantkit.attention(unet, qk=found.qk, pv=found.pv, min_keys=1)
        wanted = answer(unet)
    quantkit.attention(unet, qk=None)
    # Kernels add the keys up in another order: a mean's last bit moves a code here and there.
    assert (rounded - wanted).norm() < 0.1 * (rounded - before).norm()


@by_name
def test_errors_are_of_some_rows_with_scales_of_all(found):
    generator = torch.Generator().manual_seed(0)
    heads = Heads(*(torch.randn(2, 3, n, 24, generator=generator) for n in (50, 70, 70)))
    places = [(2 * i + 1) * 50 // 64 for i in range(32)]
    exact = torch.nn.functional.scaled_dot_product_attention(*heads, scale=0.3)[:, :, places]
    for scales in (None, SCALES):
        whole = rounded_attention(heads, 0.3, found, scales)[:, :, places]
        lost, power = lost_power(heads, 0.3, (found,), scales)
        wanted = (whole - exact).double().square().sum(dim=(0, 2, 3))
        torch.testing.assert_close(lost[0], wanted, rtol=1e-3, atol=0)
        torch.testing.assert_close(
            power, exact.double().square().sum(dim=(0, 2, 3)), rtol=1e-5, atol=0
        )
        assert 0 < float(lost.sum() / power.sum()) < 0.01
    # The ranges are those given: codes end there.
    short = replace(SCALES, query_range=torch.full((3,), 0.5))
    cut = rounded_attention(heads, 0.3, found, short)[:, :, places]
    assert not torch.equal(cut, whole) or found.qk == "int8"


def test_errors_are_of_the_outputs_of_all_calls(unet, monkeypatch):
    modules, seen = modules_of(unet), []
    errors = AttentionErrors(dict.fromkeys(modules))
    attend = torch.nn.functional.scaled_dot_product_attention

    def keep(query, key, value, **kwargs):
        seen.append((query, key, value))
        return attend(query, key, value, **kwargs)

    before = answer(unet)
    with errors.listening(unet):
        for _ in range(2):
            assert torch.equal(answer(unet), before)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", keep)
    answer(unet)
    order = [name for name in modules if errors.of(name)]
    assert set(order) == set(modules)
    # diffusers calls down, mid and up, and names down, up and mid.
    called = sorted(modules, key=lambda n: ("down", "mid_", "up_b").index(n[:4]))
    for name, (q, k, v) in zip(called, seen, strict=True):
        places = [(2 * i + 1) * q.shape[2] // 64 for i in range(32)] if q.shape[2] > 32 else None
        places = list(range(q.shape[2])) if places is None else places
        wanted = attend(q.double(), k.double(), v.double())[:, :, places]
        for treatment, error in errors.of(name).items():
            y = rounded_attention(Heads(q, k, v), None, ATTENTION_BY_NAME[treatment].format, None)
            lost = (y[:, :, places] - wanted).square().sum() / wanted.square().sum()
            assert error == pytest.approx(float(lost), rel=1e-3), (name, treatment)
            assert 0 < error < 0.01


def test_time_is_that_of_products_or_of_bytes():
    statistics = attention_statistics()  # 3 heads of 8 columns, 64 queries and 40 keys a call
    slow = PeakRates("card", 10.0, 20.0, 40.0, 1e9)
    e4m3fn, int8, wide, _ = ATTENTION_TREATMENTS
    work = 4 * 128 * 40 * 24
    assert attention_seconds(statistics, None, 128, slow) == work / 10
    assert attention_seconds(statistics, e4m3fn, 128, slow) == work / 20
    assert attention_seconds(statistics, int8, 128, slow) == pytest.approx(1.14 * work / 20)
    narrow = PeakRates("card", 1e12, 1e12, 1e12, 2.0)
    inputs, outputs = (128 + 2 * 2 * 40) * 24, 128 * 24
    assert attention_seconds(statistics, None, 128, narrow) == inputs + outputs
    # Codes are made of what was read, and read again.
    assert attention_seconds(statistics, e4m3fn, 128, narrow) == 2 * inputs + outputs
    # Two bytes more, one written and one read, for each value of two calls.
    assert attention_seconds(statistics, wide, 128, narrow) == 2 * inputs + outputs + 2 * 40 * 24


# Choosing


def module(name, error=1e-4):
    outcomes = {
        "16-bit": Outcome(0.0, 0, 1.0),
        "attention-e4m3fn": Outcome(error, 0, 0.5),
        "attention-int8": Outcome(error / 5, 0, 0.6),
    }
    return LayerSensitivity(name, "attention", (2, 1024, 64), "", 1024.0, outcomes)


def with_attention():
    found = three_layers()
    return replace(found, layers=(*found.layers, module("b.attn1"), module("c.attn1", 1.0)))


def treatments(chosen):
    pairs = zip(chosen.assignment.problem.layers, chosen.assignment.chosen, strict=True)
    return {layer.name: candidate.treatment for layer, candidate in pairs}


def test_bytes_are_never_saved_by_attention():
    for goal in ({"bytes": 0.6}, {"error": 10.0}):
        chosen = choose(with_attention(), **goal)
        assert treatments(chosen)["b.attn1"] == "16-bit"
        assert chosen.recipe.attention is None
        assert treatments(chosen).items() >= treatments(choose(three_layers(), **goal)).items()


def test_speed_is_bought_where_it_costs_least():
    chosen = choose(with_attention(), speed=1.05)
    assert treatments(chosen)["b.attn1"].startswith("attention-")
    assert treatments(chosen)["c.attn1"] == "16-bit"
    section = chosen.recipe.attention
    assert section == AttentionRecipe(qk=section.qk, min_keys=512, exclude=("c.attn1",))
    text = recipe_text(chosen.recipe, chosen.remarks)
    assert parse_recipe(text, where="t") == chosen.recipe
    assert set(chosen.remarks) == {layer.name for layer in with_attention().layers}


def test_every_module_has_a_format_of_its_own():
    sensitive = module("c.attn1", 0.02)
    both = replace(with_attention(), layers=(module("b.attn1"), sensitive, *three_layers().layers))
    seen = set()
    for speed in (1.1, 1.2, 1.4, 1.86, 1.94):
        chosen = choose(both, speed=speed)
        section, found = chosen.recipe.attention, treatments(chosen)
        assert parse_recipe(recipe_text(chosen.recipe, {}), where="t").attention == section
        for name in ("b.attn1", "c.attn1"):
            formats = tuple(f"attention-{row.name}" for row in section.formats_of(name))
            assert formats == (() if found[name] == "16-bit" else (found[name],))
        seen.add((found["b.attn1"], found["c.attn1"]))
    # Where a module of theirs is enough, the sensitive one has the finer format.
    assert ("attention-e4m3fn", "attention-int8") in seen
    assert ("attention-e4m3fn", "attention-e4m3fn") in seen


def test_what_the_recipe_excludes_stays():
    fp8 = load_recipe("fp8")
    kept = fp8.model_copy(update={"attention": AttentionRecipe(exclude=("b.*",))})
    chosen = choose(with_attention(), kept, speed=1.05)
    assert treatments(chosen)["b.attn1"] == "16-bit"
    assert choose(three_layers(), kept, bytes=0.6).recipe.attention == kept.attention


def test_formats_that_errors_choose_are_left_to_packing():
    adaptive = AttentionRecipe.model_validate({"strategy": "adaptive"})
    recipe = load_recipe("fp8").model_copy(update={"attention": adaptive})
    chosen = choose(with_attention(), recipe, error=10.0)
    assert chosen.recipe.attention == adaptive
    assert treatments(chosen)["b.attn1"] == "16-bit"


def test_globs_choose_among_formats():
    assert allowed_names(("attention-int8",)) == ("attention-int8",)
    chosen = choose(with_attention(), speed=1.05, treatments=("attention-int8",))
    assert set(treatments(chosen).values()) == {"16-bit", "attention-int8"}
    assert chosen.recipe.attention.qk == "int8"
    with pytest.raises(RecipeError, match=r"attention-\*: not measured; .* in the pipeline"):
        choose(three_layers(), bytes=0.6, treatments=("attention-*",))


def test_results_with_attention_survive_their_file(tmp_path):
    path = tmp_path / "s.json"
    save_sensitivity(with_attention(), path, force=False)
    assert load_sensitivity(path) == with_attention()
