"""Transformer blocks whose norms end in codes: diffusers' results, by fewer operators."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import peft
import pytest
import torch
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from diffusers.models.transformers.transformer_flux import (
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import nn

from quantkit.inference.attention import fused_qkv
from quantkit.inference.attention.attention_call import AttentionSettings
from quantkit.inference.attention.coded_attention import _quantized as quantized_processor
from quantkit.inference.blocks import activation_codes, feed_forward, norm_codes
from quantkit.inference.blocks.norm_codes import Branch
from quantkit.inference.blocks.normed_blocks import install, uninstall
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.packed import packed_module
from tests.support.sampling import one_of_each, turned

STATIC = Scheme(E4M3FN, PerChannel(), None, Activation.STATIC)
SCHEMES = {
    "static": STATIC,
    "token": Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN),
    "int8": Scheme(INT8, PerChannel(), None, Activation.STATIC),
    "sparse": Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, Activation.STATIC),
    "smooth": Scheme(E4M3FN, PerChannel(), None, Activation.STATIC, smooth=True),
}


class Case(NamedTuple):
    """A block of diffusers, and its arguments beside the picture's tokens."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    #: codes that are made of inputs: by diffusers' block, and with norms that end in codes
    apart: int
    together: int


def text():
    return torch.randn(2, 5, 32)


def emb():
    return torch.randn(2, 32)


def rotary():
    angles = torch.randn(11, 16)
    return angles.cos(), angles.sin()


CASES = {
    # Queries, keys, values, out; query, key, value, out; two of the network.
    "basic": Case(
        lambda: BasicTransformerBlock(32, 2, 16, cross_attention_dim=32),
        lambda: {"encoder_hidden_states": text()}, 10, 8,
    ),
    # Both streams: queries, keys, values, out; two of the network.
    "joint": Case(
        lambda: JointTransformerBlock(32, 2, 16),
        lambda: {"encoder_hidden_states": text(), "temb": emb()}, 12, 8,
    ),
    "joint, last": Case(
        lambda: JointTransformerBlock(32, 2, 16, context_pre_only=True),
        lambda: {"encoder_hidden_states": text(), "temb": emb()}, 9, 7,
    ),
    "joint, dual": Case(
        lambda: JointTransformerBlock(32, 2, 16, use_dual_attention=True),
        lambda: {"encoder_hidden_states": text(), "temb": emb()}, 16, 16,
    ),
    "flux": Case(
        lambda: FluxTransformerBlock(32, 2, 16),
        lambda: {"encoder_hidden_states": text(), "temb": emb(), "image_rotary_emb": rotary()},
        12, 8,
    ),
    # Queries, keys, values, network; both halves of what is behind them.
    "flux, single": Case(
        lambda: FluxSingleTransformerBlock(32, 2, 16),
        lambda: {"encoder_hidden_states": text(), "temb": emb(), "image_rotary_emb": rotary()},
        5, 3,
    ),
}  # fmt: skip


def is_packed(name, module):
    return type(module) is nn.Linear and "norm" not in name


def packed(case, scheme=STATIC):
    """Return a model of one block in eval mode, and its inputs."""
    torch.manual_seed(0)
    block = CASES[case].make()
    for parameter in block.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    for name, layer in list(block.named_modules()):
        if is_packed(name, layer):
            block.set_submodule(name, packed_module(layer, scheme, name=name))
    inputs = {"hidden_states": torch.randn(2, 6, 32), **CASES[case].inputs()}
    return nn.ModuleList([block]).eval(), inputs


def answer(model, inputs):
    found = model[0](**inputs)
    return [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]


def near(found, wanted):
    pairs = zip(found, wanted, strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def same(found, wanted):
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


WORDS = ("quantize_", "layer_norm_", "sum_norm_", "gelu_codes_", "project_gelu_")


def quantized(function):
    """Return what a function gives, and how many operators of which kind made codes for it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        result = function()
    counts = {e.key: e.count for e in seen.key_averages() if e.key.startswith("quantkit::")}
    made = {word: sum(n for key, n in counts.items() if word in key) for word in WORDS}
    return result, made


@torch.no_grad()
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("case", CASES)
def test_layers_of_one_norm_share_its_codes_to_the_bit(case, name):
    model, inputs = packed(case, SCHEMES[name])
    wanted, apart = quantized(lambda: answer(model, inputs))
    install(model)
    found, together = quantized(lambda: answer(model, inputs))
    assert same(found, wanted)
    assert apart["quantize_"] == CASES[case].apart
    fewer = CASES[case].together
    # What stands side by side has one scale per row, which needs both halves.
    if case == "flux, single":
        fewer -= name == "token"
    assert together["quantize_"] == fewer


@pytest.fixture
def one_pass(monkeypatch):
    """Every device has an operation for norms, a CPU too."""
    monkeypatch.setattr(norm_codes, "has_kernel", lambda *_: True)
    monkeypatch.setattr(norm_codes, "sums_pay", lambda: True)


#: Norms before layers with static scales: of each block, those that become one operation, and of
#: these those with the sum before them.
NORMS = {"basic": 3, "joint": 4, "joint, last": 2, "joint, dual": 0, "flux": 4, "flux, single": 1}
SUMS = {"basic": 2, "joint": 2, "joint, last": 1, "joint, dual": 0, "flux": 2, "flux, single": 0}


def norms_of(case):
    """Return how many norms without a sum become one operation, and how many with it."""
    return NORMS[case] - SUMS[case], SUMS[case]


@torch.no_grad()
@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize(
    "how", turned(CASES, SCHEMES, (torch.float32, torch.bfloat16, torch.float16), times=4)
)
def test_norm_and_codes_are_one_operation(how):
    case, name, dtype = how
    model, inputs = packed(case, SCHEMES[name])
    model.to(dtype)
    inputs = {k: v if k == "image_rotary_emb" else v.to(dtype) for k, v in inputs.items()}
    wanted = answer(model, inputs)
    install(model)
    found, made = quantized(lambda: answer(model, inputs))
    norms = (made["layer_norm_"], made["sum_norm_"])
    assert norms == ((0, 0) if name == "token" else norms_of(case))
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype is dtype
        # A sum in another order takes a few codes to the next place, 1/8 of their value.
        assert float((mine - theirs).float().norm() / theirs.float().norm()) < 0.02
    if name == "token":
        assert same(found, wanted)


@torch.no_grad()
@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case, count in SUMS.items() if count])
def test_a_sum_in_the_norms_operation_is_diffusers_to_the_bit(monkeypatch, case, dtype):
    model, inputs = packed(case)
    model.to(dtype)
    inputs = {k: v if k == "image_rotary_emb" else v.to(dtype) for k, v in inputs.items()}
    install(model)
    found, made = quantized(lambda: answer(model, inputs))
    monkeypatch.setattr(Branch, "is_like", lambda *_: False)
    wanted, apart = quantized(lambda: answer(model, inputs))
    assert (made["sum_norm_"], apart["sum_norm_"]) == (SUMS[case], 0)
    assert made["layer_norm_"] + SUMS[case] == apart["layer_norm_"]
    assert same(found, wanted)


@torch.no_grad()
@pytest.mark.usefixtures("one_pass")
def test_a_sum_of_another_dtype_is_made_before():
    model, inputs = packed("joint")
    model.half()
    inputs = {k: v.half() for k, v in inputs.items()}
    attend = model[0].attn.processor
    model[0].attn.processor = lambda *args, **kwargs: [t.float() for t in attend(*args, **kwargs)]
    wanted = answer(model, inputs)
    install(model)
    found, made = quantized(lambda: answer(model, inputs))
    assert (made["layer_norm_"], made["sum_norm_"]) == (0, 0)
    assert same(found, wanted)
    assert {t.dtype for t in found} == {torch.float32}


@torch.no_grad()
@pytest.mark.usefixtures("one_pass")
def test_numbers_of_a_norm_that_are_written_over_are_read_again():
    model, inputs = packed("basic")
    install(model)
    before = answer(model, inputs)
    assert same(answer(model, inputs), before)
    model[0].norm1.weight.data = model[0].norm1.weight * 2
    model[0].norm2.bias.add_(1.0)
    found = answer(model, inputs)
    uninstall(model)
    (wanted,) = answer(model, inputs)
    assert float((found[0] - wanted).norm() / wanted.norm()) < 0.02
    assert float((found[0] - before[0]).norm() / wanted.norm()) > 0.05


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_single_blocks_activation_and_codes_are_one_operation(monkeypatch, name, dtype):
    monkeypatch.setattr(activation_codes, "has_kernel", lambda *_: True)
    model, inputs = packed("flux, single", SCHEMES[name])
    model.to(dtype)
    inputs = {k: v if k == "image_rotary_emb" else v.to(dtype) for k, v in inputs.items()}
    wanted = answer(model, inputs)
    install(model)
    found, made = quantized(lambda: answer(model, inputs))
    # What is left: of the norm. No codes are put together.
    assert (made["project_gelu_"], made["gelu_codes_"], made["quantize_"]) == (1, 0, 1)
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).float().norm() / theirs.float().norm()) < 0.02


@torch.no_grad()
def test_networks_of_joint_blocks_end_their_activation_in_codes(monkeypatch):
    monkeypatch.setattr(activation_codes, "has_kernel", lambda *_: True)
    model, inputs = packed("joint")
    wanted = answer(model, inputs)
    feed_forward.install(model)
    install(model)
    found, made = quantized(lambda: answer(model, inputs))
    assert (made["project_gelu_"], made["quantize_"]) == (2, CASES["joint"].together - 2)
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 0.02


@torch.no_grad()
@pytest.mark.parametrize("path", ["act_mlp", "proj_out"])
def test_who_looks_at_a_single_blocks_activation_sees_16_bit(monkeypatch, path):
    monkeypatch.setattr(activation_codes, "has_kernel", lambda *_: True)
    model, inputs = packed("flux, single")
    wanted, seen = answer(model, inputs), []
    install(model)
    model[0].get_submodule(path).register_forward_hook(lambda *args: seen.append(args[-1]))
    assert same(answer(model, inputs), wanted)
    assert [type(y) for y in seen] == [torch.Tensor]


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)


def offloaded(layer):
    layer.forward = layer.forward


WATCHED = {
    "basic": ("attn1", "attn1.to_k", "attn2.to_q", "ff", "ff.net.0", "ff.net.0.proj", "norm1"),
    "joint": ("attn", "attn.to_k", "attn.add_q_proj", "ff", "ff_context.net.0", "norm1", "norm2"),
    "flux": ("attn", "attn.to_k", "attn.add_q_proj", "ff", "ff_context.net.0", "norm1", "norm2"),
    "flux, single": ("attn", "attn.to_v", "proj_mlp", "proj_out", "norm"),
}


@torch.no_grad()
@pytest.mark.parametrize("watch", [hooked, offloaded], ids=lambda watch: watch.__name__)
@pytest.mark.parametrize(("case", "path"), [(c, p) for c, paths in WATCHED.items() for p in paths])
def test_who_looks_at_a_part_sees_16_bit(case, path, watch):
    model, inputs = packed(case)
    wanted = answer(model, inputs)
    install(model)
    watch(model[0].get_submodule(path))
    seen: list[type] = []
    model[0].get_submodule(path).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(type([*args, *kwargs.values()][0])), with_kwargs=True
    )
    assert same(answer(model, inputs), wanted)
    assert seen == [torch.Tensor]


@torch.no_grad()
@pytest.mark.parametrize("case", ["basic", "flux", "flux, single"])
def test_an_adapter_reads_16_bit(case):
    model, inputs = packed(case)
    other = copy.deepcopy(model)
    install(model)
    config = peft.LoraConfig(r=4, target_modules=["to_k", "proj_mlp"], init_lora_weights=False)
    for each in (model, other):
        torch.manual_seed(3)
        peft.inject_adapter_in_model(config, each)
    assert same(answer(model, inputs), answer(other, inputs))


@torch.no_grad()
@pytest.mark.parametrize("case", ["basic", "joint", "flux", "flux, single"])
def test_joined_projections_read_codes(case):
    model, inputs = packed(case)
    wanted = answer(model, inputs)
    for module in model.modules():
        if hasattr(module, "fuse_projections"):
            fused_qkv.fuse_projections(module)
    install(model)
    found, made = quantized(lambda: answer(model, inputs))
    # The processor of joined projections comes with the model's own method.
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True)
    )
    assert made["quantize_"] == CASES[case].together


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda attn: setattr(attn, "residual_connection", True),
        lambda attn: setattr(attn, "group_norm", nn.GroupNorm(4, 32).eval()),
        lambda attn: attn.set_processor(Logging()),
    ],
    ids=["residual", "group norm", "processor"],
)
def test_attention_that_does_more_than_project_reads_16_bit(change):
    model, inputs = packed("basic")
    change(model[0].attn1)
    wanted = answer(model, inputs)
    install(model)
    assert same(answer(model, inputs), wanted)


class Logging:
    """A processor of somebody else's."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        del encoder_hidden_states, attention_mask
        return attn.to_out[0](attn.to_v(hidden_states) + hidden_states.sin())


@torch.no_grad()
def test_quantized_attention_reads_codes():
    model, inputs = packed("basic")
    model[0].attn1.processor = quantized_processor(
        model[0].attn1.processor, AttentionSettings(min_keys=1)
    )
    wanted = answer(model, inputs)
    install(model)
    found, made = quantized(lambda: answer(model, inputs))
    assert same(found, wanted)
    assert made["quantize_"] == CASES["basic"].together


@torch.no_grad()
def test_gated_networks_read_codes(monkeypatch):
    monkeypatch.setattr(feed_forward, "has_kernel", lambda *_: True)
    model, inputs = packed("basic")
    feed_forward.install(model)
    wanted = answer(model, inputs)
    install(model)
    assert same(answer(model, inputs), wanted)


@pytest.mark.parametrize(
    "change",
    [
        {"to_k": Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN)},
        {"to_k": Scheme(E4M3FN, PerChannel(), None, Activation.NONE)},
        {"to_q": Scheme(E4M3FN, PerChannel(), None, Activation.STATIC, smooth=True)},
        {"to_q": Scheme(INT8, PerChannel(), None, Activation.STATIC)},
        {"to_v": None},
    ],
    ids=["token", "16 bit", "smooth", "int8", "dense"],
)
@torch.no_grad()
def test_layers_that_read_otherwise_share_nothing(change):
    model, inputs = packed("basic")
    for name, scheme in change.items():
        torch.manual_seed(1)
        dense = nn.Linear(32, 32, bias=False)
        setattr(model[0].attn1, name, packed_module(dense, scheme) if scheme else dense)
    wanted = answer(model, inputs)
    install(model)
    assert same(answer(model, inputs), wanted)
    assert "norm1" not in model[0].quantkit_coded_norms.names


@torch.no_grad()
def test_layers_of_other_scales_share_nothing():
    model, _ = packed("basic")
    model[0].attn1.to_k.input_scale *= 2
    install(model)
    assert model[0].quantkit_coded_norms.names == {"norm2", "norm3"}


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        ({"cross_attention_dim": 32}, {}),
        ({"cross_attention_dim": 32, "only_cross_attention": True},
         {"encoder_hidden_states": text}),
        ({"double_self_attention": True}, {}),
        ({}, {}),
        ({"cross_attention_dim": 32, "positional_embeddings": "sinusoidal",
          "num_positional_embeddings": 8}, {"encoder_hidden_states": text}),
        ({"cross_attention_dim": 32, "norm_type": "ada_norm_single"},
         {"encoder_hidden_states": text, "timestep": lambda: torch.randn(2, 6 * 32)}),
        ({"cross_attention_dim": 32, "norm_type": "ada_norm", "num_embeds_ada_norm": 4},
         {"encoder_hidden_states": text, "timestep": lambda: torch.tensor(3)}),
    ],
    ids=["no context", "only cross", "double self", "self", "positions", "PixArt", "ada"],
)  # fmt: skip
def test_other_blocks_are_computed_by_diffusers(make, inputs):
    torch.manual_seed(0)
    block = BasicTransformerBlock(32, 2, 16, **make)
    for name, layer in list(block.named_modules()):
        if is_packed(name, layer):
            block.set_submodule(name, packed_module(layer, STATIC, name=name))
    model = nn.ModuleList([block]).eval()
    given = {"hidden_states": torch.randn(2, 6, 32), **{k: v() for k, v in inputs.items()}}
    wanted = answer(model, given)
    install(model)
    assert same(answer(model, given), wanted)


@torch.no_grad()
def test_a_chunked_network_is_computed_by_diffusers():
    for case in ("basic", "joint"):
        model, inputs = packed(case)
        model[0].set_chunk_feed_forward(1, 1)
        wanted = answer(model, inputs)
        install(model)
        assert same(answer(model, inputs), wanted)


@torch.no_grad()
@pytest.mark.parametrize("case", ["basic", "joint", "flux", "flux, single"])
def test_copies_and_pickles_are_alike_and_training_is_diffusers(case):
    model, inputs = packed(case)
    wanted = answer(model, inputs)
    former = type(model[0])
    install(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made[0]) is type(model[0]) is not former
        assert same(answer(made, inputs), wanted)
    model.train()
    assert len(answer(model, inputs)) == len(wanted)
    uninstall(model)
    assert type(model[0]) is former
    assert not hasattr(model[0], "quantkit_coded_norms")


@pytest.mark.parametrize("case", ["basic", "joint", "flux", "flux, single"])
def test_diffusers_knows_the_block_as_its_own(case):
    """It finds blocks to compile by the name of their class, and those to cache by a table."""
    model, _ = packed(case)
    former = type(model[0])
    install(model)
    assert type(model[0]).__name__ == former.__name__
    if former in TransformerBlockRegistry._registry:
        assert TransformerBlockRegistry.get(type(model[0]))._cls is type(model[0])
        assert TransformerBlockRegistry.get(former)._cls is former


@torch.no_grad()
@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case.partition(",")[0]))
def test_they_compile_without_a_graph_break(case):
    model, inputs = packed(case)
    install(model)
    torch._dynamo.reset()
    compiled = torch.compile(model[0], fullgraph=True, backend="aot_eager")
    found = compiled(**inputs)
    found = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
    wanted = answer(model, inputs)
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True)
    )
    _, made = quantized(lambda: compiled(**inputs))
    assert (made["layer_norm_"], made["sum_norm_"]) == norms_of(case)
