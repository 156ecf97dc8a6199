"""Which formats each attention module is multiplied in, and a packed model that has them."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from quantkit.eval.judging.report_facts import attention_formats
from torch.nn.functional import scaled_dot_product_attention

import quantkit
from quantkit.calibration.observing.attention_accumulators import (
    AttentionAccumulators,
    add_attended,
)
from quantkit.calibration.statistics import format_errors
from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
from quantkit.calibration.statistics.format_errors import (
    lost_power,
    rounded_attention,
)
from quantkit.calibration.statistics.layer_statistics import load_calibration, save_calibration
from quantkit.checkpoint.packed_attention import PackedAttention, parse_attention
from quantkit.checkpoint.reader import open_packed
from quantkit.cli.inspect_command import inspect
from quantkit.device import compilers, log
from quantkit.device.backends import Backend, use
from quantkit.errors import CheckpointError, RecipeError
from quantkit.inference.attention.attention_choices import attention_choices
from quantkit.inference.attention.coded_attention import install
from quantkit.models.attention_modules import Heads, attention_modules
from quantkit.numerics.attention_formats import ATTENTION_FORMATS, attention_format
from quantkit.packing.choose_attention_formats import choose_attention_formats
from quantkit.recipe.attention_recipe import AttentionRecipe
from quantkit.recipe.load import parse_recipe
from tests.support.artefacts import attention_statistics
from tests.support.kernel_cases import need

pytestmark = pytest.mark.usefixtures("one_thread")

E4M3FN, INT8, E4M3FN_WIDE, INT8_WIDE = ATTENTION_FORMATS
NAMES = [row.name for row in ATTENTION_FORMATS]


def module(*errors, keys=4096):
    """Return statistics of a module with these relative errors, by row."""
    power = torch.tensor([1.0, 2.0, 5.0]).double()
    lost = torch.tensor(errors).double().square().unsqueeze(1) * power
    seen = attention_statistics()
    return replace(
        seen,
        format_lost=lost,
        format_power=power,
        call_keys=torch.full_like(seen.call_keys, keys),
    )


#: errors of e4m3fn, int8, e4m3fn-pv16 and int8-pv16; what is chosen within 0.02, and a part of why
CHOICES = {
    "fastest": ((0.0199, 0.01, 0.01, 0.0), "e4m3fn", "error 0.0199"),
    "int8": ((0.021, 0.019, 0.05, 0.0), "int8", "error 0.0190; e4m3fn 0.0210"),
    "wide": ((0.04, 0.05, 0.019, 0.0), "e4m3fn-pv16", "error 0.0190; e4m3fn 0.0400, int8 0.0500"),
    "finest": (
        (0.1, 0.1, 0.1, 0.019),
        "int8-pv16",
        "error 0.0190; e4m3fn 0.1000, int8 0.1000, e4m3fn-pv16 0.1000",
    ),
    "16 bit": ((0.2, 0.1, 0.2, 0.05), None, "int8-pv16: error 0.0500, over 0.02"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_fastest_within_the_budget_is_chosen(case):
    errors, wanted, reason = CHOICES[case]
    section = AttentionRecipe.model_validate({"strategy": "adaptive"})
    found = choose_attention_formats(section, ["a"], {"a": module(*errors)})
    (told,) = found.decisions.values()
    assert told.chosen == wanted
    assert told.reason == reason
    assert told.errors == pytest.approx(dict(zip(NAMES, errors, strict=True)), abs=1e-4)
    assert (found.kept == ("a",)) == (wanted is None) == (found.most is None)


def test_what_was_not_measured_stays_in_16_bit_or_is_refused():
    section = AttentionRecipe.model_validate({"strategy": "adaptive"})
    few = module(0, 0, 0, 0, keys=77)
    found = choose_attention_formats(section, ["few", "unseen"], {"few": few})
    assert found.kept == ("few", "unseen")
    assert found.decisions["few"].reason == "77 keys, fewer than 512"
    assert "without a mask" in found.decisions["unseen"].reason
    for columns in (20, 256):
        wide = replace(attention_statistics(columns=columns), call_keys=torch.tensor([4096, 4096]))
        found = choose_attention_formats(section, ["wide"], {"wide": wide})
        assert found.kept == ("wide",)
        assert found.decisions["wide"].reason == f"heads of {columns} columns"
    unmeasured = {"a": replace(module(0, 0, 0, 0), format_lost=None, format_power=None)}
    with pytest.raises(RecipeError, match=r"no errors of formats for a; run 'quantkit calibrate"):
        choose_attention_formats(section, ["a"], unmeasured)
    # Before there is a calibration, the fastest stands for what will be chosen.
    assert choose_attention_formats(section, ["a"], None).formats == {"a": E4M3FN}


def test_most_modules_decide_what_the_others_differ_from():
    section = AttentionRecipe.model_validate(
        {"overrides": [{"layers": ["b*"], "qk": "int8"}, {"layers": ["c"], "qk": "none"}]}
    )
    found = choose_attention_formats(section, ["a", "b1", "b2", "c"], None)
    assert (found.most, found.others, found.kept) == (INT8, {"a": E4M3FN}, ("c",))
    even = choose_attention_formats(section, ["b1", "a"], None)
    assert (even.most, even.others) == (E4M3FN, {"b1": INT8})
    assert choose_attention_formats(section, ["c"], None).most is None


@pytest.mark.parametrize(("columns", "measured"), [(20, False), (160, True), (168, False)])
def test_errors_are_measured_of_heads_that_kernels_take(columns, measured):
    sums = AttentionAccumulators(2, columns, 1, torch.device("cpu"), errors_from=8)
    heads = Heads(*torch.randn(3, 1, 2, 8, columns).unbind())
    assert bool(sums.look(heads, None).errors) == measured


def test_errors_are_relative_to_the_exact_output():
    generator = torch.Generator().manual_seed(2)
    lost, power = torch.zeros(4, 3).double(), torch.zeros(3).double()
    sums = AttentionAccumulators(3, 24, 1, torch.device("cpu"), errors_from=8)
    for queries, keys in ((20, 70), (100, 33)):
        q, k, v = (torch.randn(2, 3, n, 24, generator=generator) for n in (queries, keys, keys))
        add_attended(0, [(sums, sums.look(Heads(q, k + 1, v + 2), 0.2))])
        places = [(2 * i + 1) * queries // (2 * min(32, queries)) for i in range(min(32, queries))]
        heads = Heads(q.double(), k.double() + 1, v.double() + 2)
        exact = scaled_dot_product_attention(*heads, scale=0.2)[:, :, places]
        power += exact.square().sum(dim=(0, 2, 3))
        for index, row in enumerate(ATTENTION_FORMATS):
            y = rounded_attention(Heads(q, k + 1, v + 2), 0.2, row, None)[:, :, places]
            lost[index] += (y - exact).square().sum(dim=(0, 2, 3))
    found = AttentionStatistics.of_sums(sums.taken())
    torch.testing.assert_close(found.format_lost, lost, rtol=1e-2, atol=1e-9)
    torch.testing.assert_close(found.format_power, power, rtol=1e-5, atol=0)
    by_format = found.format_errors()
    assert by_format["int8-pv16"] < by_format["int8"] < by_format["e4m3fn"]
    assert by_format["e4m3fn"] == pytest.approx(
        float((lost[0].sum() / power.sum()).sqrt()), rel=1e-2
    )


def by_operations(heads, monkeypatch):
    """Return what is lost where operations compute it, as on a GPU; by their references."""
    with monkeypatch.context() as patch, use(Backend.REFERENCE):
        patch.setattr(format_errors, "_are_for_kernels", lambda _: True)
        return lost_power(heads, 0.2, ATTENTION_FORMATS, None)


@pytest.mark.parametrize("columns", [24, 64])
def test_operations_and_pytorch_find_the_same_errors(columns, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, 3, columns, generator=generator) for n in (50, 170, 170))
    heads = Heads(*(t.transpose(1, 2) for t in (q, k + 1, v + 2)))
    lost, power = by_operations(heads, monkeypatch)
    wanted, whole = lost_power(heads, 0.2, ATTENTION_FORMATS, None)
    torch.testing.assert_close(lost, wanted, rtol=1e-4, atol=0)
    assert torch.equal(power, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gpu_computes_them_with_its_kernels(dtype):
    generator = torch.Generator().manual_seed(4)
    heads = Heads(
        *(torch.randn(2, 3, 600, 64, generator=generator).cuda().to(dtype) for _ in "qkv")
    )
    with log.record() as kernels:
        lost, _ = lost_power(heads, None, ATTENTION_FORMATS, None)
    assert {op for op, _, backend in kernels.calls if backend is Backend.REFERENCE} == set()
    with use(Backend.REFERENCE):
        wanted, _ = lost_power(heads, None, ATTENTION_FORMATS, None)
    # Hopper sums products of codes in fewer bits than float32 has.
    torch.testing.assert_close(lost, wanted, rtol=3e-2, atol=0)


# A whole pipeline

RECIPE = {
    "name": "adaptive",
    "calibration": {"prompts": 2, "steps": 2, "batch": 1, "buckets": 2},
}


def recipe(**keys):
    text = json.dumps({**RECIPE, "attention": {"min_keys": 1, **keys}})
    return parse_recipe(text, where="recipe")


@pytest.fixture(scope="module")
def calibrated(pipeline_dir):
    return quantkit.calibrate(
        pipeline_dir, recipe=recipe(strategy="adaptive"), prompts=["a cat", "a dog"]
    )


def packed_with(pipeline_dir, calibrated, output, **keys):
    quantkit.pack(
        pipeline_dir, recipe=recipe(**keys), calibration=calibrated.calibration, output=output
    )
    (component,) = open_packed(output).components
    return component


def median_error(calibrated):
    """Return a budget that some modules meet in e4m3fn and others do not."""
    errors = [
        s.format_errors()["e4m3fn"] for s in calibrated.calibration.attention["unet"].values()
    ]
    return sorted(errors)[len(errors) // 2]


@torch.no_grad()
def test_a_packed_model_has_the_formats_that_errors_chose(pipeline_dir, calibrated, tmp_path):
    need(compilers.host_compiler)
    budget = median_error(calibrated)
    component = packed_with(
        pipeline_dir, calibrated, tmp_path / "p", strategy="adaptive", error_budget=budget
    )
    packed, seen = component.config.attention, calibrated.calibration.attention["unet"]
    for name, statistics in seen.items():
        errors = statistics.format_errors()
        fastest = min(
            (r for r in ATTENTION_FORMATS if errors[r.name] <= budget), key=lambda r: r.cost
        )
        assert packed.format_of(name) == fastest
    assert packed.formats
    unet = quantkit.load_pipeline(tmp_path / "p", torch_dtype=torch.float32).unet
    found = {n: m.processor.settings for n, m in attention_modules(unet)}
    assert {(s.qk_format, s.pv) for s in found.values()} > {("e4m3fn", "e4m3fn")}
    for name, settings in found.items():
        row = packed.format_of(name)
        assert (settings.qk_format, settings.pv) == (row.qk, row.pv)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, 8, 8, generator=generator)
    text = torch.randn(2, 16, unet.config.cross_attention_dim, generator=generator)
    with log.record() as calls:
        unet(x, torch.tensor(500), text)
    ops = {name for name, _, _ in calls.calls if name.startswith("attention")}
    assert len(ops) == len(set(map(packed.format_of, found)))
    unet.save_pretrained(tmp_path / "again")
    assert open_packed(tmp_path / "again").components[0].config.attention == packed


def test_what_was_decided_is_shown(pipeline_dir, calibrated, tmp_path):
    budget = median_error(calibrated)
    packed_with(pipeline_dir, calibrated, tmp_path / "p", strategy="adaptive", error_budget=budget)
    done = CliRunner().invoke(inspect, [str(tmp_path / "p")])
    assert done.exit_code == 0, done.output
    assert "Formats of attention" in done.stdout
    told = json.loads(CliRunner().invoke(inspect, [str(tmp_path / "p"), "--json"]).stdout)
    rows = attention_formats(open_packed(tmp_path / "p"))
    assert [row.module for row in rows] == [row["module"] for row in told["attention_formats"]]
    assert {row.module for row in rows} == set(calibrated.calibration.attention["unet"])
    assert {row.decision.chosen for row in rows} > {"e4m3fn"}
    choices = attention_choices(open_packed(tmp_path / "p"), torch.device("cpu"))
    assert {choice.format.partition(",")[0] for choice in choices} == {"e4m3fn", "int8"}


def test_a_budget_that_nothing_meets_leaves_all_in_16_bit(pipeline_dir, calibrated, tmp_path):
    component = packed_with(
        pipeline_dir, calibrated, tmp_path / "p", strategy="adaptive", error_budget=1e-9
    )
    assert component.config.attention is None
    chosen = component.metadata[0].recipe["attention_formats_chosen"]
    assert {row["chosen"] for row in chosen.values()} == {None}


def test_formats_of_the_recipe_need_no_calibration(pipeline_dir, tmp_path):
    overrides = [{"layers": ["mid_block.*"], "qk": "none"}, {"layers": ["up_*"], "qk": "int8"}]
    quantkit.pack(
        pipeline_dir,
        recipe=recipe(layers=["*.attn1"], overrides=overrides),
        output=tmp_path / "p",
    )
    packed = open_packed(tmp_path / "p").components[0].config.attention
    unet = quantkit.load_pipeline(tmp_path / "p", torch_dtype=torch.float32).unet
    for name, found in attention_modules(unet):
        settings = getattr(found.processor, "settings", None)
        if name.startswith("mid_block.") or name.endswith("attn2"):
            assert settings is None
            assert name in packed.exclude
        else:
            assert settings.qk_format == ("int8" if name.startswith("up_") else "e4m3fn")


def test_a_calibration_without_errors_is_refused(pipeline_dir, calibrated, tmp_path):
    plain = quantkit.calibrate(pipeline_dir, recipe=recipe(), prompts=["a cat", "a dog"])
    assert {s.format_errors() for s in plain.calibration.attention["unet"].values()} == {None}
    with pytest.raises(RecipeError, match=r"qk or pv auto: .* calibrate model' with this recipe"):
        packed_with(pipeline_dir, plain, tmp_path / "p", strategy="adaptive")
    nothing = replace(calibrated, calibration=replace(calibrated.calibration, attention={}))
    with pytest.raises(RecipeError, match=r"the calibration has no attention"):
        packed_with(pipeline_dir, nothing, tmp_path / "p", strategy="adaptive")
    assert not (tmp_path / "p").exists()


def test_aggressive_has_static_scales(pipeline_dir, calibrated, tmp_path):
    component = packed_with(pipeline_dir, calibrated, tmp_path / "p", strategy="aggressive")
    assert component.config.attention.format_of("anything") == E4M3FN
    assert component.config.attention.static


# Files


def test_errors_are_stored_and_merged(calibrated, tmp_path):
    saved, path = calibrated.calibration, tmp_path / "c.safetensors"
    save_calibration(saved, path, force=False)
    found = load_calibration(path).attention["unet"]
    assert json.loads(CliRunner().invoke(inspect, [str(path), "--json"]).stdout)["attention"]
    for name, statistics in saved.attention["unet"].items():
        assert found[name].format_errors() == statistics.format_errors()
    other = replace(saved, metadata=replace(saved.metadata, seed=saved.metadata.seed + 2))
    save_calibration(other, tmp_path / "other.safetensors", force=False)
    merged = quantkit.merge_calibrations([path, tmp_path / "other.safetensors"]).calibration
    for name, statistics in merged.attention["unet"].items():
        assert statistics.format_errors() == pytest.approx(found[name].format_errors())
        assert torch.equal(statistics.format_power, 2 * found[name].format_power)


def entry(**more):
    return {"qk": "e4m3fn", "min_keys": 512, "exclude": [], **more}


BROKEN = {
    "no list": ({"formats": 3}, "3, expected a list of formats"),
    "empty": ({"formats": []}, "expected a list of formats"),
    "no object": ({"formats": ["a"]}, "'a', expected an object"),
    "unknown key": ({"formats": [{"qk": "int8", "modules": ["a"], "k": 1}]}, "unknown key 'k'"),
    "no modules": ({"formats": [{"qk": "int8", "modules": []}]}, "expected paths, each once"),
    "numbers": ({"formats": [{"qk": "int8", "modules": [3]}]}, "expected paths, each once"),
    "twice": ({"formats": [{"qk": "int8", "modules": ["a"]}] * 2}, "expected paths, each once"),
    "format": ({"formats": [{"qk": "e5m2", "modules": ["a"]}]}, "qk 'e5m2' .* upgrade quantkit"),
    "kind": ({"formats": [{"qk": ["int8"], "modules": ["a"]}]}, "upgrade quantkit"),
    "values": ({"formats": [{"qk": "int8", "pv": "int8", "modules": ["a"]}]}, "'int8', expected"),
}  # fmt: skip


@pytest.mark.parametrize(("more", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_entries_are_refused(more, message):
    with pytest.raises(CheckpointError, match=message):
        parse_attention(entry(**more), "config")


def test_entries_are_written_as_they_are_read():
    others = {"a": INT8_WIDE, "c": INT8, "b": INT8_WIDE}
    whole = PackedAttention("e4m3fn", 3, pv=None, formats=others)
    told = whole.to_json()
    assert told["formats"] == [
        {"qk": "int8", "modules": ["c"]},
        {"qk": "int8", "pv": "none", "modules": ["a", "b"]},
    ]
    assert parse_attention(told, "config") == whole
    assert whole.format_of("z") == attention_format("e4m3fn", None) == E4M3FN_WIDE
    assert "; int8 in 1 modules; int8-pv16 in 2 modules" in str(whole)


def test_modules_that_the_model_has_not_are_refused(pipeline_dir):
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(pipeline_dir / "unet")
    with pytest.raises(CheckpointError, match="nowhere: a format, but no such module"):
        install(unet, PackedAttention("e4m3fn", 1, formats={"nowhere": INT8}))
