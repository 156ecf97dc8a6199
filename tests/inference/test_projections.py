"""Projections of one input as one packed layer: equal to the bit, in diffusers' own processors."""

import copy
import json
import shutil
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.errors import InputError
from quantkit.inference.attention.fused_qkv import fuse_projections
from quantkit.inference.layers.layer_summary import iterate_packed
from quantkit.inference.layers.modules import PackedLinear
from quantkit.numerics.formats import E4M3FN, E5M2
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.packed import pack_component, packed_module
from tests.support.pipelines import tiny_flux_pipeline
from tests.support.tiny_denoisers import compile_a_block

TOKEN, STATIC, NONE = Activation.TOKEN, Activation.STATIC, Activation.NONE
SCHEMES = {
    "token": Scheme(E4M3FN, PerChannel(), None, TOKEN),
    "tensor": Scheme(E5M2, PerTensor(), None, STATIC),
    "group": Scheme(E4M3FN, PerGroup(16), None, TOKEN),
    "sparse": Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, STATIC),
    "smooth": Scheme(E4M3FN, PerChannel(), None, STATIC, smooth=True),
    "buckets": Scheme(E4M3FN, PerChannel(), None, STATIC, (300.5, 600.5)),
    "16 bit": Scheme(E4M3FN, PerChannel(), None, NONE),
}
PROJECTIONS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")


class Attention(nn.Module):
    """What the modules of diffusers have in common here."""

    def __init__(self, schemes, *, cross=False, bias=True, shared=True):
        super().__init__()
        self.is_cross_attention = cross
        torch.manual_seed(0)
        for (name, scheme), rows in zip(schemes.items(), (64, 32, 48), strict=True):
            layer: Any = nn.Linear(32, rows, bias)
            if scheme:
                layer = packed_module(layer, scheme, name=f"a.{name}")
            if scheme and not shared and scheme.activation is STATIC:
                layer.input_scale = layer.input_scale * rows
            setattr(self, name, layer)

    def join(self):
        fuse_projections(self)


def self_attention(scheme, **options):
    return Attention(dict.fromkeys(("to_q", "to_k", "to_v"), scheme), **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scheme", [s for n, s in SCHEMES.items() if n != "buckets"],
                         ids=[n for n in SCHEMES if n != "buckets"])  # fmt: skip
def test_joined_rows_give_the_same_bits(scheme, bias):
    attention, x = self_attention(scheme, bias=bias), torch.randn(2, 5, 32)
    parts = [attention.to_q, attention.to_k, attention.to_v]
    with torch.no_grad():
        apart = torch.cat([part(x) for part in parts], dim=-1)
        attention.join()
        assert torch.equal(attention.to_qkv(x), apart)
        # The layers read their rows of the joined ones, and nothing is there twice.
        assert torch.equal(torch.cat([part(x) for part in parts], dim=-1), apart)
    store = attention.to_qkv.codes.untyped_storage().data_ptr()
    assert {part.codes.untyped_storage().data_ptr() for part in parts} == {store}
    assert attention.fused_projections
    assert attention.to_qkv.name == "a.to_qkv"


def test_cross_attention_joins_keys_and_values_alone():
    attention, text = self_attention(SCHEMES["token"], cross=True), torch.randn(1, 7, 32)
    attention.join()
    assert not hasattr(attention, "to_qkv")
    apart = torch.cat([attention.to_k(text), attention.to_v(text)], dim=-1)
    assert torch.equal(attention.to_kv(text), apart)


def test_projections_in_16_bit_are_joined_as_diffusers_does():
    attention, x = self_attention(None), torch.randn(3, 32)
    attention.join()
    apart = torch.cat([attention.to_q(x), attention.to_k(x), attention.to_v(x)], dim=-1)
    assert torch.allclose(attention.to_qkv(x), apart, atol=1e-6)
    assert isinstance(attention.to_qkv, nn.Linear)


@pytest.mark.parametrize(
    ("attention", "text"),
    [
        (lambda: Attention({"to_q": SCHEMES["token"], "to_k": None, "to_v": None}),
         "a.to_q, a layer in 16 bit, a layer in 16 bit: some are packed and some are not"),
        (lambda: Attention({"to_q": SCHEMES["token"], "to_k": SCHEMES["token"],
                            "to_v": SCHEMES["sparse"]}),
         "a.to_q, a.to_k, a.to_v: they have different schemes"),
        (lambda: self_attention(SCHEMES["tensor"], shared=False),
         "a.to_q, a.to_k, a.to_v: input_scale differs"),
    ],
    ids=["mixed", "schemes", "scales"],
)  # fmt: skip
def test_projections_that_are_not_packed_alike_are_refused(attention, text):
    attention = attention()
    before = {name: id(child) for name, child in attention.named_children()}
    with pytest.raises(InputError, match=f"^fuse_qkv_projections: {text}"):
        attention.join()
    assert {name: id(child) for name, child in attention.named_children()} == before
    assert not getattr(attention, "fused_projections", False)


def test_biases_of_some_are_refused():
    attention = self_attention(SCHEMES["token"])
    attention.to_v.bias = None
    with pytest.raises(InputError, match="some have a bias and some have none"):
        attention.join()


# -------------------------------------------------------------------------------- whole models


def packed_model(folder, scheme):
    """Pack the projections of a component in place, and load it."""
    import diffusers

    cls = getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"])
    dense = cls.from_pretrained(folder)
    layers = [n for n, m in dense.named_modules() if n.rpartition(".")[2] in PROJECTIONS]
    pack_component(folder, dict.fromkeys(layers, scheme))
    return cls.from_pretrained(folder)


@pytest.fixture(params=["unet", "flux"])
def model_and_inputs(request, pipeline_dir, tmp_path):
    folder = tmp_path / "packed"
    if request.param == "unet":
        shutil.copytree(pipeline_dir / "unet", folder)
        model = packed_model(folder, SCHEMES["buckets"])
        inputs = {"sample": torch.randn(2, 4, 8, 8),
                  "encoder_hidden_states": torch.randn(2, 16, 32)}  # fmt: skip
    else:
        source = tiny_flux_pipeline(tmp_path / "flux") / "transformer"
        shutil.copytree(source, folder)
        model = packed_model(folder, SCHEMES["sparse"])
        config = model.config
        inputs = {
            "hidden_states": torch.randn(2, 16, config.in_channels),
            "encoder_hidden_states": torch.randn(2, 6, config.joint_attention_dim),
            "pooled_projections": torch.randn(2, config.pooled_projection_dim),
            "txt_ids": torch.zeros(6, 3),
            "img_ids": torch.zeros(16, 3),
        }
        if config.guidance_embeds:
            inputs["guidance"] = torch.tensor([3.5, 3.5])
    return folder, model, inputs


@torch.no_grad()
def test_models_fuse_and_unfuse_through_their_own_method(model_and_inputs, tmp_path):
    folder, model, inputs = model_and_inputs
    names = set(model.state_dict())

    def step(t):
        return model(**inputs, timestep=torch.tensor([float(t)] * 2), return_dict=False)[0]

    wanted = [step(t) for t in (100, 500, 900)]
    model.fuse_qkv_projections()
    joined = [n for _, n, m in iterate_packed(model) if n.endswith(("qkv", "to_kv"))]
    assert joined
    assert set(model.state_dict()) == names
    called = []
    handles = [model.get_submodule(n).register_forward_hook(lambda *_: called.append(1))
               for n in joined]  # fmt: skip
    for t, right in zip((100, 500, 900), wanted, strict=True):
        # Attention reads rows in another layout, and may sum them in another order.
        assert torch.allclose(step(t), right, rtol=1e-4, atol=1e-5)
    assert len(called) == 3 * len(joined)
    for handle in handles:
        handle.remove()
    before = step(900)
    compile_a_block(model)
    assert torch.equal(step(900), before)
    model.save_pretrained(tmp_path / "copy")
    copied = next((tmp_path / "copy").glob("*.safetensors"))
    assert copied.read_bytes() == (folder / copied.name).read_bytes()
    model.unfuse_qkv_projections()
    assert all(torch.equal(step(t), right) for t, right in zip((100, 500), wanted, strict=False))


@torch.no_grad()
def test_copies_fuse_on_their_own(model_and_inputs):
    _, model, _ = model_and_inputs
    other = copy.deepcopy(model)
    other.fuse_qkv_projections()
    count = sum(isinstance(m, PackedLinear) for m in model.modules())
    assert sum(isinstance(m, PackedLinear) for m in other.modules()) > count
    model.fuse_qkv_projections()
