"""Which modules multiply fewer columns, and a packed model that does."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from quantkit.eval.report_facts import attention_columns
from torch.nn.functional import scaled_dot_product_attention

import quantkit
from quantkit.checkpoint.attention import HeadShape, PackedAttention, parse_attention
from quantkit.checkpoint.column_decisions import column_decisions
from quantkit.checkpoint.reader import open_packed
from quantkit.cli.inspect import inspect
from quantkit.device import compilers, log
from quantkit.device.ops.attention import ranks
from quantkit.errors import CheckpointError, RecipeError
from quantkit.inference.attention import install
from quantkit.inference.attention_call import AttentionSettings, attend
from quantkit.models.attention import AttentionCall, Heads, attention_modules
from quantkit.numerics.attention_basis import ranks_of
from quantkit.numerics.attention_formats import attention_format
from quantkit.packing.attention_speed import CYCLES, gain
from quantkit.packing.fewer_columns import decide
from quantkit.recipe.attention import AttentionRecipe
from quantkit.recipe.load import parse_recipe
from tests.support.artefacts import attention_statistics
from tests.support.kernel_cases import need

pytestmark = pytest.mark.usefixtures("one_thread")


def module(errors, columns=64, keys=4096, heads=3):
    """Return statistics of a module; errors by rank, that of 2:4 last."""
    *by_rank, sparse = errors
    ranks = {64: (32, 48), 32: (16,), 128: (64, 96)}[columns]
    power = torch.arange(1, heads + 1).double()
    lost = [e**2 * power for e in by_rank]
    seen = attention_statistics(2, heads, columns)
    return replace(
        seen,
        ranks=torch.tensor(ranks),
        rank_lost=torch.stack(lost),
        sparse_lost=sparse**2 * power[None],
        power=power,
        held_out=torch.tensor([32]),
        call_keys=torch.full_like(seen.call_keys, keys),
        keys=torch.full_like(seen.keys, keys),
    )


FORMATS = dict.fromkeys(("a", "b", "far", "small"), attention_format("e4m3fn", "e4m3fn"))
#: sparse_k, errors, columns, keys -> what is chosen, and a part of why
CHOICES = {
    "half": ("rank", (0.019, 0.01, 0.5), 64, 4096, "rank 32", "error 0.0190, gains 13.1%"),
    "three quarters of 64": ("rank", (0.021, 0, 0), 64, 4096, None, "rank 32: error 0.0210, over"),
    "three quarters": ("rank", (0.021, 0.02, 0), 128, 4096, "rank 96", "gains 8.2%"),
    "neither": ("rank", (0.03, 0.021, 0), 128, 4096, None, "rank 96: error 0.0210, over 0.02"),
    "few keys": ("rank", (0.001, 0.001, 0), 64, 256, None, "rank 32 gains 3.8%, less than 5%"),
    "no kernel": ("rank", (0.001, 0.001), 32, 4096, None, "rank 16 gains 0.0%, less than 5%"),
    "2:4": ("2:4", (0.001, 0.001, 0.02), 64, 4096, "2:4", "error 0.0200, gains 8.7%"),
    "2:4 too far": ("2:4", (0.001, 0.001, 0.3), 64, 4096, None, "2:4: error 0.3000"),
    "auto": ("auto", (0.02, 0.01, 0.001), 64, 4096, "rank 32", "gains 13.1%"),
    "auto without a kernel": ("auto", (0.03, 0.01, 0.001), 128, 4096, "rank 96", "gains 8.2%"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_fastest_within_the_budget_is_chosen(case):
    kind, errors, columns, keys, wanted, reason = CHOICES[case]
    section = AttentionRecipe.model_validate({"sparse_k": kind})
    (found,) = decide(section, {"a": module(errors, columns, keys)}, FORMATS).values()
    assert (None if found.chosen is None else str(found.chosen)) == wanted
    assert reason in found.told.reason
    assert found.told.errors["2:4"] == pytest.approx([errors[-1]] * 3, abs=1e-4)
    assert (found.told.entropy, found.told.locality) == ((1.0,) * 3, (0.0,) * 3)


def test_a_given_rank_is_taken_as_it_is():
    found = decide(AttentionRecipe(sparse_k="rank", rank=32), {
        "far": module((0.9, 0.9, 0.9), keys=16), "small": module((0.9, 0.9), columns=32),
    }, FORMATS)  # fmt: skip
    assert found["far"].chosen.rank == 32
    assert found["small"].chosen is None
    other = decide(
        AttentionRecipe(sparse_k="rank", rank=16), {"a": module((0.1, 0.1, 0.1))}, FORMATS
    )
    assert (other["a"].chosen.rank, other["a"].chosen.error) == (16, None)


def test_nothing_is_chosen_unasked_or_unmeasured():
    assert decide(AttentionRecipe(), {"a": module((0, 0, 0))}, FORMATS) == {}
    with pytest.raises(RecipeError, match=r"sparse_k rank: .*run 'quantkit rotate', and pack"):
        decide(AttentionRecipe(sparse_k="rank"), {"a": attention_statistics()}, FORMATS)
    both = {"a": attention_statistics(), "b": module((0, 0, 0))}
    assert set(decide(AttentionRecipe(sparse_k="rank"), both, FORMATS)) == {"b"}


def test_auto_takes_models_without_a_basis_and_says_so():
    seen = {"a": attention_statistics(), "b": module((0, 0, 0))}
    found = decide(AttentionRecipe(sparse_k="auto"), seen, FORMATS)
    assert found["a"].chosen is None
    assert "'quantkit rotate' gives one" in found["a"].told.reason
    assert len(found["a"].told.entropy) == 3
    assert str(found["b"].chosen) == "rank 32"


def test_gains_are_those_of_the_modules_own_values():
    seen = {"a": module((0.001, 0.001, 0.5)), "b": module((0.001, 0.001, 0.5))}
    formats = {"a": attention_format("int8", "e4m3fn"), "b": attention_format("int8", None)}
    found = decide(AttentionRecipe(sparse_k="rank"), seen, formats)
    assert found["a"].chosen.gain == gain(64, 4096, "rank 32", "e4m3fn")
    assert found["b"].chosen.gain == gain(64, 4096, "rank 32", "none")


@pytest.mark.parametrize(("pv", "moved"), [("e4m3fn", 9), ("none", 10)])
@pytest.mark.parametrize("columns", CYCLES["e4m3fn"])
def test_gains_are_those_of_the_table_less_the_making_of_codes(columns, pv, moved):
    whole, *ways = CYCLES[pv][columns].values()
    for way, cycles in zip(list(CYCLES[pv][columns])[1:], ways, strict=True):
        gains = [gain(columns, keys, way, pv) for keys in (1, 512, 4096, 10**9)]
        assert gains == sorted(gains)
        assert gains[-1] == pytest.approx(whole / cycles - 1, rel=1e-3)
        # Bytes of each column at 640 GB/s, against 2 x 2 x columns operations a score.
        seconds = moved * columns / 640e9 / 4096, cycles / 256 * 1024 / 359e12
        more = (whole / cycles - 1) * seconds[1] / sum(seconds)
        assert gains[2] == pytest.approx(more, rel=1e-6)
    known = {f"rank {rank}" for rank in ranks_of(columns)}
    assert known | {"all", "2:4"} == set(CYCLES["e4m3fn"][columns])
    assert known | {"all"} == set(CYCLES["none"][columns])
    assert known == {f"rank {rank}" for rank in ranks(columns)[1:]}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sparse_k": "3:4"}, "sparse_k"), ({"rank": 16}, "found sparse_k none, wanted rank"),
        ({"sparse_k": "rank", "rank": 24}, "multiple of 16"),
        ({"sparse_k": "rank", "rank": 0}, "greater than or equal to 16"),
        ({"sparse_k": "auto", "error_budget": 0}, "greater than 0"),
        ({"sparse_k": "auto", "rank": 16}, "found sparse_k auto"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be_are_refused(section, message):
    with pytest.raises(RecipeError, match=message):
        parse_recipe(json.dumps({"name": "a", "attention": section}), where="recipe")


def test_both_spellings_of_two_of_four_are_one():
    assert AttentionRecipe.model_validate({"sparse_k": "4:2"}).sparse_k == "2:4"


# What computes it


def draw(columns=48):
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 3, n, columns, generator=generator) for n in (37, 101, 101))
    return Heads(q, k + 1, v + 1)


@pytest.mark.parametrize("qk", ["e4m3fn", "int8"])
@pytest.mark.parametrize("columns", [40, 48])
def test_calls_multiply_the_first_columns(qk, columns):
    need(compilers.host_compiler)
    heads = draw(columns)
    found = attend(AttentionSettings(qk, 1, rank=32), heads, AttentionCall(None, ""))
    q, k = heads.q[..., :32], heads.k[..., :32]
    wanted = scaled_dot_product_attention(q, k, heads.v, scale=columns**-0.5)
    whole = scaled_dot_product_attention(*heads)
    of_codes = attend(AttentionSettings(qk, 1), heads, AttentionCall(None, "")) - whole
    assert float((found - wanted).norm()) < 1.2 * float(of_codes.norm())
    assert float((found - whole).norm()) > 3 * float(of_codes.norm())


@pytest.mark.parametrize("qk", ["e4m3fn", "int8"])
@pytest.mark.parametrize("rank", [32, 48])
def test_zeros_stand_for_what_no_kernel_leaves_out(monkeypatch, qk, rank):
    need(compilers.host_compiler)
    heads, settings = draw(64), AttentionSettings(qk, 1, rank=rank)
    with log.record() as seen:
        found = attend(settings, heads, AttentionCall(None, ""))
    assert any(f"r{rank}" in variant for _, variant, _ in seen.calls)
    monkeypatch.setattr("quantkit.inference.attention_heads._is_multiplied", lambda *_: False)
    assert torch.equal(attend(settings, heads, AttentionCall(None, "")), found)


@pytest.mark.parametrize("qk", ["e4m3fn", "int8"])
def test_calls_multiply_the_largest_two_of_four(qk):
    need(compilers.host_compiler)
    heads = draw()
    settings = AttentionSettings(qk, 1, two_of_four=True)
    found = attend(settings, heads, AttentionCall(None, ""))
    groups = (heads.k - heads.k.mean(2, keepdim=True)).unflatten(3, (4, 12))
    least = groups.abs().topk(2, dim=3).values.amin(3, keepdim=True)
    k = torch.where(groups.abs() >= least, groups, 0).flatten(3)
    wanted = scaled_dot_product_attention(heads.q, k, heads.v)
    whole = scaled_dot_product_attention(*heads)
    # Of two columns with one code, another may be kept than of the numbers.
    assert float((found - wanted).norm() / (found - whole).norm()) < 0.5


RECIPE = {
    "name": "fewer",
    "calibration": {"prompts": 2, "steps": 2, "batch": 2, "buckets": 2},
}


@pytest.fixture(scope="module")
def rotated(pipeline_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fewer")
    recipe = parse_recipe(json.dumps(RECIPE), where="recipe")
    calibrated = quantkit.calibrate(pipeline_dir, recipe=recipe, prompts=["a cat", "a dog"])
    return quantkit.rotate(
        pipeline_dir,
        calibration=calibrated.calibration,
        output=folder / "rotated",
        prompts=[f"thing {i}" for i in range(32)],
        batch=16,
    )


def packed_with(rotated, output, **section):
    text = json.dumps({**RECIPE, "attention": {"min_keys": 1, **section}})
    quantkit.pack(
        rotated.outputs.pipeline,
        recipe=parse_recipe(text, where="recipe"),
        calibration=rotated.calibration,
        output=output,
    )
    return output


@pytest.fixture(scope="module", params=["static", "dynamic"])
def packed(request, rotated, tmp_path_factory):
    output = tmp_path_factory.mktemp("packed") / "p"
    return packed_with(rotated, output, sparse_k="rank", rank=16, scales=request.param)


def test_the_checkpoint_says_how_many(rotated, packed):
    (component,) = open_packed(packed).components
    entry = component.config.to_json()["attention"]
    assert entry["rank"] == [{"modules": sorted(rotated.rotation.bases), "rank": 16}]
    chosen = component.metadata[0].recipe["sparse_k_chosen"]
    assert set(chosen) == set(rotated.rotation.bases)
    for name, row in chosen.items():
        assert (row["chosen"], row["reason"]) == ("rank 16", "the recipe's rank, gains 0.0%")
        assert row["error"] == pytest.approx(rotated.errors[name]["rank 16"])
        seen = rotated.calibration.attention["unet"][name].pooled()
        assert row["entropy"] == pytest.approx(seen.entropy[0].tolist(), abs=1e-4)
        assert row["locality"] == pytest.approx(seen.locality[0].tolist(), abs=1e-4)
    assert "; the first 16 columns in 4 modules" in str(component.config.attention)


@torch.no_grad()
def test_a_loaded_model_computes_with_them(packed, tmp_path):
    need(compilers.host_compiler)
    unet = quantkit.load_pipeline(packed, torch_dtype=torch.float32).unet
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, 8, 8, generator=generator)
    text = torch.randn(2, 16, unet.config.cross_attention_dim, generator=generator)

    def ask():
        return unet(x, torch.tensor(500), text).sample

    ranks = {n: m.processor.settings.rank for n, m in attention_modules(unet)}
    bases = open_packed(packed).components[0].config.attention.ranks
    assert ranks == {name: bases.get(name) for name in ranks}
    assert list(ranks.values()).count(16) == 4
    found = ask()
    unet.save_pretrained(tmp_path / "again")
    again = open_packed(tmp_path / "again").components[0].config
    assert again.attention == open_packed(packed).components[0].config.attention
    unet.set_attn_processor(unet.attn_processors)
    assert torch.equal(ask(), found)
    quantkit.attention(unet, min_keys=1)
    assert not torch.equal(ask(), found)


def test_inspect_shows_every_decision(packed, tmp_path):
    done = CliRunner().invoke(inspect, [str(packed)])
    assert done.exit_code == 0, done.output
    assert "Columns of queries and keys" in done.stdout
    assert "the recipe's rank" in done.stdout
    rows = attention_columns(open_packed(packed))
    assert [(row.component, row.decision.chosen) for row in rows] == [("unet", "rank 16")] * 4
    told = json.loads(CliRunner().invoke(inspect, [str(packed), "--json"]).stdout)
    assert len(told["attention_columns"]) == 4
    assert told["attention_columns"][0]["component"] == "unet"
    assert len(told["attention_columns"][0]["entropy"]) == 2


ROW = {
    "chosen": None, "error": None, "gain": None, "reason": "", "entropy": [0.1, 0.2],
    "locality": [0.1, 0.2], "errors": {},
}  # fmt: skip
DAMAGED = {
    "no object": [3],
    "no row": {"a": 3},
    "unknown": {"a": {"chosen": None}},
    "text": {"a": {**ROW, "entropy": ["x"]}},
    "heads": {"a": {**ROW, "locality": [0.1]}},
}


@pytest.mark.parametrize("told", DAMAGED.values(), ids=DAMAGED)
def test_damaged_decisions_are_named(told):
    header = SimpleNamespace(recipe={"sparse_k_chosen": told})
    component: Any = SimpleNamespace(path="here", metadata=(header,))
    with pytest.raises(CheckpointError, match="here: sparse_k_chosen in the header is damaged"):
        column_decisions(component)


def test_a_budget_that_nothing_meets_leaves_attention_as_it_is(rotated, tmp_path):
    folder = packed_with(rotated, tmp_path / "p", sparse_k="auto", error_budget=1e-6)
    (component,) = open_packed(folder).components
    assert not component.config.attention.fewer_columns
    chosen = component.metadata[0].recipe["sparse_k_chosen"]
    assert {row["chosen"] for row in chosen.values()} == {None}
    for name, row in chosen.items():
        why = "less than 5%" if name in rotated.rotation.bases else "no basis of its own"
        assert why in row["reason"]
    assert set(chosen) > set(rotated.rotation.bases)


def test_a_calibration_of_the_model_before_is_refused(rotated, tmp_path):
    seen = rotated.calibration.attention["unet"]
    older = {name: replace(s, **dict.fromkeys(s.errors() or ())) for name, s in seen.items()}
    before = replace(rotated, calibration=replace(rotated.calibration, attention={"unet": older}))
    with pytest.raises(RecipeError, match="run 'quantkit rotate'"):
        packed_with(before, tmp_path / "p", sparse_k="rank")
    nothing = replace(rotated, calibration=replace(rotated.calibration, attention={}))
    with pytest.raises(RecipeError, match=r"attention.sparse_k rank: .* calibrate again"):
        packed_with(nothing, tmp_path / "p", sparse_k="rank")


def entry(**more):
    return {"qk": "e4m3fn", "min_keys": 512, "exclude": [], **more}


STATIC = [{"heads": 2, "head_size": 32, "modules": ["a"]}]
BROKEN = {
    "no list": ({"rank": 32}, "32, wanted a list of ranks"),
    "empty": ({"rank": []}, "wanted a list of ranks"),
    "no object": ({"rank": [3]}, "3, wanted an object"),
    "unknown": ({"rank": [{"rank": 16, "modules": ["a"], "k": 1}]}, "unknown key 'k'"),
    "odd": ({"rank": [{"rank": 24, "modules": ["a"]}]}, "24 columns, wanted a multiple of 16"),
    "none": ({"rank": [{"rank": 0, "modules": ["a"]}]}, "0 columns"),
    "bool": ({"rank": [{"rank": True, "modules": ["a"]}]}, "True columns"),
    "text": ({"rank": [{"rank": "16", "modules": ["a"]}]}, "'16' columns"),
    "no modules": ({"rank": [{"rank": 16, "modules": []}]}, "wanted paths"),
    "twice": ({"rank": [{"rank": r, "modules": ["a"]} for r in (16, 32)]}, "each once"),
    "all": ({"static": STATIC, "rank": [{"rank": 32, "modules": ["a"]}]}, "32 of 32 columns"),
    "2:4 no list": ({"two_of_four": "a"}, "'a', wanted paths, each once"),
    "2:4 twice": ({"two_of_four": ["a", "a"]}, "wanted paths, each once"),
    "2:4 and rank": (
        {"two_of_four": ["a"], "rank": [{"rank": 16, "modules": ["a"]}]}, "without a rank"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("more", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_entries_are_refused(more, message):
    with pytest.raises(CheckpointError, match=message):
        parse_attention(entry(**more), "config")


def test_entries_are_written_as_they_are_read():
    static = {"a": HeadShape(2, 32), "b": HeadShape(2, 64)}
    whole = PackedAttention("int8", 3, (), static, {"b": 32, "c": 16}, ("d",))
    assert parse_attention(whole.to_json(), "config") == whole
    assert "two of four columns of keys in 1 modules" in str(whole)


@pytest.mark.parametrize(
    ("fewer", "message"),
    [
        ({"ranks": {"nowhere": 16}}, "nowhere: no such module"),
        ({"ranks": {"mid_block.attentions.0.transformer_blocks.0.attn1": 32}}, "heads of 32 col"),
        ({"two_of_four": ("nowhere",)}, "nowhere: no such module"),
    ],
)
def test_modules_that_the_model_has_not_are_refused(pipeline_dir, fewer, message):
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(pipeline_dir / "unet")
    with pytest.raises(CheckpointError, match=message):
        install(unet, PackedAttention("e4m3fn", 1, **fewer))
