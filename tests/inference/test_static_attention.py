"""Attention with static scales: the modules that have them, and everything that handles a model."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch

import quantkit
from quantkit.bench.models.denoiser_inputs import first_tensor, make_inputs
from quantkit.checkpoint.packed_attention import CHILD, HeadShape
from quantkit.device import compilers, log
from quantkit.device.archs import ARCHS, OneLaunch
from quantkit.device.ops.table import find_op
from quantkit.errors import CheckpointError
from quantkit.inference.attention import attention_heads, head_factors
from quantkit.inference.layers import head_scales
from quantkit.models.attention_modules import attention_modules, call_with
from quantkit.numerics import attention_factors
from quantkit.numerics.attention_scales import SHAPES, scales_of_ranges
from tests.support.denoiser_classes import ROWS, Row
from tests.support.kernel_cases import need
from tests.support.sampling import one_of_each
from tests.support.tiny_denoisers import answer, compile_a_block, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ROW = {row.class_name: row for row in ROWS}
CLASSES = (
    "UNet2DConditionModel", "PixArtTransformer2DModel", "SD3Transformer2DModel",
    "FluxTransformer2DModel", "ChromaTransformer2DModel",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _compiler():
    need(compilers.host_compiler)


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def recorded(model):
    """Return what each attention module multiplies in one call."""
    seen, own = {}, {}

    def record(name, heads, _):
        seen[name] = heads

    for name, module in attention_modules(model):
        own[name], cls = module.processor, type(module.processor)
        module.processor = type(
            "Recording", (cls,), {"__call__": call_with(cls, partial(record, name))}
        )()
    answer(model)
    for name, module in attention_modules(model):
        module.processor = own[name]
    return seen


def scales(heads, margin=1.0):
    q, k, v = (t.float().transpose(0, 1).flatten(1, 2) for t in heads)
    k_mean, v_mean = k.mean(dim=1), v.mean(dim=1)
    return scales_of_ranges(
        q=q.abs().amax(dim=(1, 2)),
        k=(k - k_mean.unsqueeze(1)).abs().amax(dim=(1, 2)),
        k_mean=k_mean,
        v=(v - v_mean.unsqueeze(1)).abs().amax(dim=1),
        v_mean=v_mean,
        margin=margin,
    )


def with_scales(model, margin=1.0, names=None):
    """Return a copy whose attention has the static scales of one call."""
    found = {
        n: scales(h, margin) for n, h in recorded(model).items() if names is None or n in names
    }
    model = copy.deepcopy(model)
    head_scales.install(model, {n: HeadShape(s.heads, s.head_size) for n, s in found.items()})
    for name, of_module in found.items():
        for part in SHAPES:
            getattr(model.get_submodule(name), CHILD).fill(part, getattr(of_module, part))
    return model


#: Stable Diffusion 3.5's attention, whose heads have norms.
_SD3 = ROW["SD3Transformer2DModel"]
NORMED = Row("SD3Transformer2DModel", {**_SD3.config, "qk_norm": "rms_norm"})


@pytest.fixture(
    scope="module", params=[*(ROW[name] for name in CLASSES), NORMED], ids=[*CLASSES, "with-norms"]
)
def model(request):
    return tiny_model(request.param)


@torch.no_grad()
def test_static_scales_are_as_near_as_those_of_each_call(model):
    wanted, dynamic = answer(model), copy.deepcopy(model)
    quantkit.attention(dynamic, min_keys=1)
    static = with_scales(model, margin=2.0)
    quantkit.attention(static, min_keys=1)
    assert 0 < error(answer(static), wanted) < 1.2 * error(answer(dynamic), wanted) + 1e-4


@torch.no_grad()
def test_each_module_reads_its_own_scales(model):
    static = with_scales(model)
    quantkit.attention(static, min_keys=1)
    before, wanted = answer(static), answer(model)
    modules = [m for _, m in attention_modules(static)]
    for module in modules:
        child = getattr(module, CHILD)
        kept = child.value_scale
        child.fill("value_scale", kept * 3)
        after = answer(static)
        assert not torch.equal(after, before)
        assert error(after, wanted) < 0.03
        child.fill("value_scale", kept)


@torch.no_grad()
def test_an_offset_in_keys_and_values_costs_nothing(model):
    """Means stand for it: without them 100 would leave no bits."""
    moved = copy.deepcopy(model)
    for _, module in attention_modules(moved):
        for name in ("to_k", "to_v", "add_k_proj", "add_v_proj"):
            layer = getattr(module, name, None)
            if layer is not None and layer.bias is not None:
                layer.bias.add_(20)
    plain = answer(moved)
    static = with_scales(moved)
    quantkit.attention(static, min_keys=1)
    assert error(answer(static), plain) < 0.03


@torch.no_grad()
def test_joined_projections_read_them_too(model):
    if not hasattr(model, "fuse_qkv_projections"):
        pytest.skip("its projections cannot be joined")
    if getattr(model.config, "qk_norm", None):
        pytest.skip("diffusers leaves norms out of joined projections")
    static = with_scales(model)
    quantkit.attention(static, min_keys=1)
    wanted = answer(static)
    static.fuse_qkv_projections()
    quantkit.attention(static, min_keys=1)
    assert error(answer(static), wanted) < 2e-3


@torch.no_grad()
def test_copies_pickles_and_other_dtypes_keep_them(model):
    static = with_scales(model)
    quantkit.attention(static, min_keys=1)
    wanted = answer(static)
    for other in (copy.deepcopy(static), pickle.loads(pickle.dumps(static))):
        assert torch.equal(answer(other), wanted)
    halved = copy.deepcopy(static).to(torch.bfloat16)
    children = [m for m in halved.modules() if isinstance(m, head_scales.HeadScales)]
    assert children
    assert all(t.dtype is torch.float32 for m in children for t in m.buffers())


@torch.no_grad()
def test_codes_of_one_launch_are_those_of_three(model, monkeypatch):
    static = with_scales(model)
    quantkit.attention(static, min_keys=1)
    made, at_once = [], attention_heads._in_one_launch
    monkeypatch.setattr(
        attention_heads, "_in_one_launch", lambda *args: made.append(at_once(*args)) or made[-1]
    )
    found = answer(static)
    assert any(codes is not None for codes in made)
    monkeypatch.setattr(attention_heads, "_in_one_launch", lambda *_: None)
    assert torch.equal(answer(static), found)


def calls_on_hopper(model, monkeypatch, least):
    """Return the operations of a call where streams pay from so many keys on; the host computes."""
    pays = ((OneLaunch.STREAMS, ((16, least),)),)
    hopper = replace(ARCHS["sm_90a"], from_keys=pays)
    monkeypatch.setattr(
        "quantkit.inference.attention.attention_call.why_on_request",
        lambda op, device, made: hopper.why_on_request(find_op(op).family, made),
    )
    with torch.no_grad(), log.record() as seen:
        answer(model)
    return {name for name, _, _ in seen.calls}


def test_on_hopper_streams_are_on_codes_where_one_launch_makes_them(model, monkeypatch):
    static = with_scales(model)
    quantkit.attention(static, min_keys=1)
    asked = calls_on_hopper(static, monkeypatch, 1)
    if type(model).__name__.startswith(("UNet", "PixArt")):
        # Nothing but codes would be made in that launch.
        assert not asked
    else:
        assert asked == {"attention_fp8", "stream_codes_fp8"}
    assert not calls_on_hopper(static, monkeypatch, 10_000)


def changed_norm(model):
    for _, module in attention_modules(model):
        module.norm_k.to(torch.float64)


OTHERWISE = {
    "scales of each call": (lambda model: model, {}, None),
    "int8": (with_scales, {"qk": "int8"}, None),
    "norms in another dtype": (with_scales, {}, changed_norm),
}


@pytest.mark.parametrize(("make", "settings", "change"), OTHERWISE.values(), ids=OTHERWISE)
def test_on_hopper_codes_of_several_launches_are_torchs(make, settings, change, monkeypatch):
    model = make(tiny_model(ROW["FluxTransformer2DModel"]))
    quantkit.attention(model, min_keys=1, **settings)
    if change is not None:
        change(model)
    assert not calls_on_hopper(model, monkeypatch, 1)


@torch.no_grad()
def test_norms_in_another_dtype_are_read_as_they_are():
    static = with_scales(tiny_model(ROW["FluxTransformer2DModel"]))
    quantkit.attention(static, min_keys=1)
    wanted = answer(static)
    for _, module in attention_modules(static):
        module.norm_k.to(torch.float64)
    assert error(answer(static), wanted) < 1e-3


@torch.no_grad()
def test_what_follows_from_scales_is_made_once(model, monkeypatch):
    static = with_scales(model)
    quantkit.attention(static, min_keys=1)
    made, make = [], attention_factors.head_factors
    monkeypatch.setattr(
        head_factors, "head_factors", lambda *args: made.append(make(*args)) or made[-1]
    )
    for calls in (1, 1, 2):
        if calls == 2:
            for _, module in attention_modules(static):
                getattr(module, CHILD).query_range.mul_(2)
        answer(static)
        assert len(made) == calls * len(list(attention_modules(static)))
    assert (
        len(pickle.dumps(copy.deepcopy(static))) <= len(pickle.dumps(with_scales(model))) + 20_000
    )


@torch.no_grad()
@pytest.mark.parametrize(
    "model",
    one_of_each([ROW[name] for name in CLASSES], type),
    indirect=True,
    ids=lambda row: row.class_name,
)
def test_it_compiles_into_one_graph(model):
    static = with_scales(model)
    quantkit.attention(static, min_keys=1)
    wanted = answer(static)
    compile_a_block(static)
    assert torch.equal(answer(static), wanted)


def test_gradients_are_torchs(model):
    static = with_scales(model).requires_grad_(True)
    quantkit.attention(static, min_keys=1)
    inputs = make_inputs(static, 1, 8, torch.device("cpu"))
    first_tensor(static(**inputs)).sum().backward()
    assert all(m.to_q.weight.grad is not None for _, m in attention_modules(static))


@torch.no_grad()
def test_few_keys_are_torchs(model):
    static = with_scales(model)
    quantkit.attention(static, min_keys=100_000)
    assert torch.equal(answer(static), answer(model))


@torch.no_grad()
def test_taken_away_everything_is_diffusers(model):
    static = with_scales(model)
    quantkit.attention(static, min_keys=1)
    quantkit.attention(static, qk=None)
    head_scales.uninstall(static)
    assert torch.equal(answer(static), answer(model))
    assert static.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("static", "text"),
    [
        ({"nowhere": HeadShape(2, 16)}, "nowhere: no such attention module, expected 2 heads"),
        ({"conv_in": HeadShape(2, 16)}, "conv_in: no such attention module"),
        (
            {"down_blocks.0.attentions.0.transformer_blocks.0.attn1": HeadShape(3, 16)},
            "attn1: 2 heads, expected 3 heads; pack the model again",
        ),
    ],
)
def test_scales_of_another_model_are_refused(static, text):
    model = tiny_model(ROW["UNet2DConditionModel"])
    with pytest.raises(CheckpointError, match=text):
        head_scales.install(model, static)
