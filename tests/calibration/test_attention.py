"""Statistics of attention modules, against q, k and v that the test records itself."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as torch_functional
from diffusers import UNet2DConditionModel

import quantkit
from quantkit.calibration.observing import hooks
from quantkit.calibration.observing.collect import calibrate
from quantkit.calibration.observing.hooks import Collector
from quantkit.calibration.statistics.attention_statistics import (
    AttentionStatistics,
    largest_about,
)
from quantkit.calibration.statistics.layer_statistics import load_calibration, save_calibration
from quantkit.calibration.statistics.merge import merge
from quantkit.device.backends import Backend, use
from quantkit.errors import ArtefactError, NonFiniteError
from quantkit.models.source import open_model
from quantkit.models.timestep import bucket_of
from quantkit.pipelines.batches import split_batches
from quantkit.pipelines.running import load_pipeline, quiet_libraries, run_batch
from quantkit.progress import silent
from quantkit.recipe.load import change_recipe
from quantkit.storage.artefact import read_artefact, write_artefact
from tests.support.artefacts import attention_statistics
from tests.support.observed import FIELDS as LAYER_FIELDS
from tests.support.observed import PROMPTS, RECIPE, Scheduler
from tests.support.pipelines import small_pictures, tiny_flux_pipeline

FIELDS = tuple(field.name for field in fields(AttentionStatistics))


def record(monkeypatch, denoiser, modules, bucket):
    """Return a table that fills with q, k and v of each module's calls, as (B, H, N, D)."""
    seen, current = {name: [] for name in modules}, []
    torchs = torch_functional.scaled_dot_product_attention

    def scaled_dot_product_attention(query, key, value, *args, **kwargs):
        if current:
            rows = (t.clone() for t in (query, key, value))
            seen[current[-1]].append((bucket[0], *rows))
        return torchs(query, key, value, *args, **kwargs)

    monkeypatch.setattr(
        torch_functional, "scaled_dot_product_attention", scaled_dot_product_attention
    )
    for name in modules:
        module = denoiser.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: current.append(name))
        module.register_forward_hook(lambda *_: current.clear())
    return seen


def wanted_of(calls, buckets):
    """Return the statistics of recorded calls, by numpy."""
    shape = (buckets, *calls[0][2].shape[1::2])
    found = {name: np.zeros(shape) for name in FIELDS[1:8]}
    found["q_amax"] = np.zeros(shape[:2])
    counts = ("queries", "keys", "call_queries", "call_keys")
    found |= {name: np.zeros(buckets, dtype=int) for name in counts}
    for b in range(buckets):
        q, k, v = (
            np.concatenate([np.moveaxis(c[i].numpy(), 1, 2).reshape(-1, *shape[1:]) for c in calls
                            if c[0] == b]).astype(float)
            for i in (1, 2, 3)
        )  # fmt: skip
        found["q_amax"][b] = np.abs(q).max((0, 2))
        for name, x in (("k", k), ("v", v)):
            found[f"{name}_low"][b], found[f"{name}_high"][b] = x.min(0), x.max(0)
        for name, x in (("q", q), ("k", k), ("v", v)):
            found[f"{name}_mean"][b] = x.mean(0)
        found["queries"][b], found["keys"][b] = len(q), len(k)
        for _, q1, k1, _ in (c for c in calls if c[0] == b):
            m, n = q1.shape[2], k1.shape[2]
            found["call_queries"][b] = max(found["call_queries"][b], m)
            found["call_keys"][b] = max(found["call_keys"][b], n)
    return found


def assert_is(found, wanted, name):
    for field in FIELDS:
        tensor = getattr(found, field)
        if field not in wanted:
            assert tensor is None, (name, field)
            continue
        theirs = torch.from_numpy(wanted[field])
        if field.endswith(("amax", "low", "high")) or tensor.dtype is torch.int64:
            assert torch.equal(tensor, theirs.to(tensor.dtype)), (name, field)
        else:
            torch.testing.assert_close(
                tensor, theirs.float(), rtol=1e-4, atol=1e-5, msg=f"{name} {field}"
            )


@pytest.fixture(scope="module")
def flux_dir(tmp_path_factory):
    with small_pictures("FluxPipeline"):
        yield tiny_flux_pipeline(tmp_path_factory.mktemp("tiny") / "flux")


@pytest.mark.parametrize("family", ["sd", "sd3", "flux"])
def test_statistics_are_those_of_what_is_multiplied(
    request, monkeypatch, family, pipeline_dir, transformer_pipeline_dir
):
    paths = {"sd": pipeline_dir, "sd3": transformer_pipeline_dir}
    source = open_model(str(paths.get(family) or request.getfixturevalue("flux_dir")))
    found = calibrate(source, RECIPE, PROMPTS, device="cpu", progress=silent)
    (component,) = source.components
    table, bucket = found.attention_of(component), [0]
    with quiet_libraries(), monkeypatch.context() as patched:
        pipe = load_pipeline(source, torch.device("cpu"))
        denoiser = getattr(pipe, component.name)

        def begin(module, args, kwargs):
            t = kwargs["timestep"] if "timestep" in kwargs else args[1]
            bucket[0] = bucket_of(float(torch.as_tensor(t).reshape(-1)[0]), found.edges)

        denoiser.register_forward_pre_hook(begin, with_kwargs=True)
        seen = record(patched, denoiser, table, bucket)
        for batch in split_batches(PROMPTS, RECIPE.calibration):
            run_batch(pipe, batch, RECIPE.calibration)
    names = {n for n, m in denoiser.named_modules() if hasattr(m, "processor")}
    assert set(table) == names
    for name, calls in seen.items():
        assert_is(table[name], wanted_of(calls, 2), name)


def test_the_largest_distance_from_any_mean_follows():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    for mean in (x.mean(0), torch.tensor([9.0, -9.0, 0.0])):
        found = largest_about(x.amin(0), x.amax(0), mean)
        assert torch.equal(found, (x - mean).abs().amax(0))


# On a denoiser, without a pipeline


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=2,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32,
    ).eval()  # fmt: skip


def run(unet, timesteps=(900.0, 100.0), **options):
    """Return what a denoiser answers at each timestep."""
    generator = torch.Generator().manual_seed(1)
    answers = []
    with torch.no_grad():
        for timestep in timesteps:
            x = torch.randn(2, 4, 8, 8, generator=generator)
            text = torch.randn(2, 11, 32, generator=generator)
            answers.append(unet(x, torch.tensor(timestep), text, **options).sample)
    return torch.stack(answers)


def observe(unet, buckets=2, **options):
    collector = Collector("unet", unet, (), buckets)
    with torch.no_grad(), collector.attached(Scheduler(900.0, 100.0), lambda calls: None):
        answers = run(unet, **options)
    return collector, answers


def processors(model):
    return [m.processor for m in model.modules() if hasattr(m, "processor")]


def test_observing_changes_no_answer_and_leaves_nothing(unet):
    before, wanted = processors(unet), run(unet)
    collector, found = observe(unet)
    assert torch.equal(found, wanted)
    assert collector.taken_attention()
    assert all(a is b for a, b in zip(processors(unet), before, strict=True))


def test_processors_come_back_when_the_run_fails(unet):
    before = processors(unet)
    attached = Collector("unet", unet, (), 2).attached(Scheduler(900.0, 100.0), lambda calls: None)

    def fail():
        assert processors(unet) != before
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), attached:
        fail()
    assert all(a is b for a, b in zip(processors(unet), before, strict=True))


def test_layers_have_the_statistics_that_they_have_without(sd, sd_calibration, monkeypatch):
    monkeypatch.setattr(hooks, "observed_modules", lambda denoiser: {})
    without = calibrate(sd, RECIPE, PROMPTS, device="cpu", progress=silent)
    assert not without.attention
    for name, statistics in without.layers["unet"].items():
        for field in LAYER_FIELDS:
            other = getattr(sd_calibration.layers["unet"][name], field)
            assert torch.equal(getattr(statistics, field), other), (name, field)


def test_quantized_attention_is_still_quantized(unet):
    plain = run(unet)
    with use(Backend.REFERENCE):
        quantkit.attention(unet, min_keys=1)
        wanted = run(unet)
        collector, found = observe(unet)
    assert not torch.equal(wanted, plain)
    assert torch.equal(found, wanted)
    # Some multiply codes of their own, which nobody else sees.
    assert set(collector.taken_attention()) < {n for n, _ in unet.named_modules()}


def test_fused_projections_are_observed(unet):
    separate, _ = observe(unet)
    unet.fuse_qkv_projections()
    fused, _ = observe(unet)
    one, two = separate.taken_attention(), fused.taken_attention()
    assert one.keys() == two.keys()
    for name, sums in one.items():
        for field, tensor in sums.items():
            torch.testing.assert_close(two[name][field], tensor, rtol=1e-4, atol=1e-4)


def test_calls_with_a_mask_and_unknown_processors_are_left_out(unet):
    mask = torch.ones(2, 11, dtype=torch.bool)
    collector, _ = observe(unet, encoder_attention_mask=mask)
    names = [n for n, m in unet.named_modules() if hasattr(m, "processor")]
    assert set(collector.taken_attention()) == {n for n in names if n.endswith("attn1")}

    class Mine:
        def __call__(self, attn, hidden_states, **kwargs):
            return hidden_states

    unet.mid_block.attentions[0].transformer_blocks[0].attn1.processor = Mine()
    collector, _ = observe(unet)
    assert set(names) - set(collector.taken_attention()) == {
        "mid_block.attentions.0.transformer_blocks.0.attn1"
    }


@pytest.mark.parametrize(
    ("projection", "value"), [("to_q", torch.nan), ("to_v", torch.inf), ("to_k", -torch.inf)]
)
def test_nan_and_inf_are_refused_where_they_come_up(unet, projection, value):
    block = "mid_block.attentions.0.transformer_blocks.0"
    weight = unet.get_submodule(f"{block}.attn2.{projection}").weight
    weight.data[0, 0] = value
    wanted = rf"unet\.{block}\.attn2: NaN or Inf in its queries, keys or values at step 1 "
    with pytest.raises(NonFiniteError, match=wanted):
        observe(unet)


def test_empty_buckets_are_zero(unet):
    collector = Collector("unet", unet, (), 2)
    with torch.no_grad(), collector.attached(Scheduler(900.0, 100.0), lambda calls: None):
        unet(torch.randn(1, 4, 8, 8), torch.tensor(900.0), torch.randn(1, 1, 32))
    for sums in collector.taken_attention().values():
        statistics = AttentionStatistics.of_sums(sums)
        assert all(bool(t.isfinite().all()) for f in FIELDS[:8] for t in [getattr(statistics, f)])
        assert statistics.queries[0] == 0
        assert not statistics.k_high[0].any()
        whole = statistics.pooled()
        for field in ("k_low", "k_high", "v_low", "q_mean"):
            assert torch.equal(getattr(whole, field)[0], getattr(statistics, field)[1]), field


# Pooled, merged, saved


def assert_close(found, wanted, name=""):
    for field in FIELDS:
        one, two = getattr(found, field), getattr(wanted, field)
        if one is None or two is None:
            assert one is two, (name, field)
        elif field.endswith("mean"):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, msg=f"{name} {field}")
        else:
            assert torch.equal(one, two), (name, field)


def test_pooling_is_what_one_bucket_has_seen(unet):
    steps = (900.0, 500.0, 100.0)
    many, one = (Collector("unet", unet, (), buckets) for buckets in (3, 1))
    for collector in (many, one):
        with torch.no_grad(), collector.attached(Scheduler(*steps), lambda calls: None):
            run(unet, steps)
    whole = one.taken_attention()
    for name, sums in many.taken_attention().items():
        statistics = AttentionStatistics.of_sums(sums)
        assert_close(statistics.pooled(), AttentionStatistics.of_sums(whole[name]), name)
        halves = statistics.rebucketed((200.0, 700.0), (700.0,))
        assert halves.queries.tolist() == [2 * int(statistics.queries[0]), statistics.queries[2]]
        assert_close(halves.pooled(), statistics.pooled(), name)


def test_merged_halves_are_the_whole_run(sd, sd_calibration):
    later = change_recipe(RECIPE, {"calibration.seed": 9})
    halves = {
        "a": calibrate(sd, RECIPE, PROMPTS[:2], device="cpu", progress=silent),
        "b": calibrate(sd, later, PROMPTS[2:], device="cpu", progress=silent),
    }
    merged = merge(halves).attention["unet"]
    whole = sd_calibration.attention["unet"]
    assert merged.keys() == whole.keys()
    for name, statistics in whole.items():
        assert_close(merged[name], statistics, name)
    # What a part does not have, the result has not.
    assert merge({**halves, "b": replace(halves["b"], attention={})}).attention == {}
    some = {name: whole[name] for name in list(whole)[1:]}
    masked = replace(halves["b"], attention={"unet": some})
    assert merge({**halves, "b": masked}).attention["unet"].keys() == whole.keys()
    odd = replace(halves["b"], attention={"unet": {next(iter(whole)): attention_statistics()}})
    with pytest.raises(ArtefactError, match=r"has heads of \(3, 8\), expected"):
        merge({**halves, "b": odd})


def test_attention_survives_its_file(sd_calibration, tmp_path):
    path = tmp_path / "c.safetensors"
    save_calibration(sd_calibration, path, force=False)
    loaded = load_calibration(path).attention["unet"]
    assert loaded.keys() == sd_calibration.attention["unet"].keys()
    for name, statistics in sd_calibration.attention["unet"].items():
        wanted = statistics.tensors()
        assert loaded[name].tensors().keys() == wanted.keys()
        assert all(torch.equal(getattr(loaded[name], field), wanted[field]) for field in wanted)
    save_calibration(replace(sd_calibration, attention={}), path, force=True)
    assert load_calibration(path).attention == {}


#: field -> what is wrong with it, and what the message says
WRONG = {
    "missing": ("q_amax", None, "b/q_amax: missing"),
    "dtype": ("k_mean", lambda t: t.double(), "b/k_mean: torch.float64, expected torch.float32"),
    "shape": ("v_low", lambda t: t[:, :2], r"b/v_low: shape \(2, 2, 8\), expected \(2, 3, 8\)"),
    "buckets": ("keys", lambda t: t[:1], r"b/keys: shape \(1,\), expected \(2,\)"),
    "nan": ("v_mean", lambda t: t * torch.nan, "b/v_mean: NaN or Inf"),
    "negative": ("q_amax", lambda t: -t, "b/q_amax: below 0"),
    "mean": ("k_mean", lambda t: t + 1, "b/k_mean: not between k_low and k_high"),
    "order": ("v_low", lambda t: t + 1, "b/v_mean: not between v_low and v_high"),
    "loud": ("q_mean", lambda t: t + 1, "b/q_mean: larger than q_amax"),
    "rows": ("call_queries", lambda t: t + 100, "b/call_queries: more than queries"),
    "calls": ("call_keys", lambda t: t + 100, "b/call_keys: more than keys"),
}


@pytest.mark.parametrize(("field", "change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_tensors_are_refused(sd_calibration, tmp_path, field, change, message):
    path = tmp_path / "c.safetensors"
    made = replace(sd_calibration, attention={"unet": {"b": attention_statistics()}})
    save_calibration(made, path, force=False)
    load_calibration(path)
    tensors, about = read_artefact(path, "quantkit_calibration")
    tensor = tensors.pop(f"unet/b/attention.{field}")
    if change is not None:
        tensors[f"unet/b/attention.{field}"] = change(tensor)
    write_artefact(path, "quantkit_calibration", tensors, about, force=True)
    with pytest.raises(ArtefactError, match=message):
        load_calibration(path)
