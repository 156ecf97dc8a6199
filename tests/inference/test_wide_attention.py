"""Attention in 16 bit whose heads one pass makes: diffusers' answers, and when it is not taken."""

import copy
import pickle

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn

import quantkit
from quantkit.bench.models.denoiser_inputs import first_tensor, make_inputs
from quantkit.device import compilers
from quantkit.device.torch_operators import OPERATORS
from quantkit.inference.attention import attention_wide, coded_attention
from quantkit.models.attention_modules import attention_modules
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.denoiser_classes import ROWS, Row
from tests.support.kernel_cases import need
from tests.support.packed import packed_module
from tests.support.tiny_denoisers import answer, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = Scheme(E4M3FN, PerChannel(), None, Activation.STATIC)
ROW = {row.class_name: row for row in ROWS}
_SD3 = ROW["SD3Transformer2DModel"]
MODELS = {
    "FLUX": ROW["FluxTransformer2DModel"],
    "Chroma": ROW["ChromaTransformer2DModel"],
    "SD3": _SD3,
    "SD3.5": Row(_SD3.class_name, {**_SD3.config, "qk_norm": "rms_norm"}),
    "SD3.5, dual": Row(
        _SD3.class_name, {**_SD3.config, "qk_norm": "rms_norm", "dual_attention_layers": (0,)}
    ),
}
#: One entry for each time that one pass made heads.
MADE = []


@pytest.fixture(autouse=True)
def _every_device(monkeypatch):
    """Every device makes heads in one pass, a CPU too."""
    need(compilers.host_compiler)
    monkeypatch.setattr(attention_wide, "has_kernel", lambda *_: True)
    operator = OPERATORS["joint_heads"]

    def counting(*arguments):
        MADE.append(arguments[0].shape)
        return operator(*arguments)

    monkeypatch.setattr(attention_wide, "OPERATORS", {"joint_heads": counting})
    MADE.clear()


def packed(name, dtype=torch.float32):
    """Return a tiny model with one packed layer, and the same with diffusers' processors."""
    model = tiny_model(MODELS[name]).to(dtype)
    _, module = next(attention_modules(model))
    module.to_out[0] = packed_module(module.to_out[0], SCHEME, name="to_out.0")
    own = copy.deepcopy(model)
    coded_attention.install(model, None)
    return model, own


def answered(model):
    """Return the answer, and how often one pass made heads."""
    MADE.clear()
    with torch.no_grad():
        found = answer(model)
    return found, len(MADE)


def count(model):
    return len(list(attention_modules(model)))


def near(found, wanted, tolerance=1e-5):
    return float((found - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_answer_as_with_diffusers_processors(name, dtype):
    model, own = packed(name, dtype)
    wanted, none = answered(own)
    found, made = answered(model)
    assert (made, none) == (count(model), 0)
    # In bfloat16 norm and rotation are rounded once, and diffusers' twice.
    assert near(found, wanted, 1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("name", ["FLUX", "Chroma", "SD3"])
def test_joined_projections_are_read_where_they_lie(name):
    model, own = packed(name)
    for each in (model, own):
        each.fuse_qkv_projections()
    found, made = answered(model)
    assert made == count(model)
    assert near(found, answered(own)[0])


def test_masks_are_torchs():
    model, own = packed("Chroma")
    inputs = make_inputs(model, 1, 8, torch.device("cpu"))
    tokens = inputs["hidden_states"].shape[1] + inputs["encoder_hidden_states"].shape[1]
    inputs["attention_mask"] = torch.arange(tokens).ge(2)[None]
    with torch.no_grad():
        found, wanted = (first_tensor(each(**inputs)) for each in (model, own))
        other = first_tensor(model(**{**inputs, "attention_mask": None}))
    assert len(MADE) == 2 * count(model)
    assert near(found, wanted)
    assert not near(other, wanted)


def _set(name, value):
    return lambda module: setattr(module, name, value(getattr(module, name)))


class OtherNorm(nn.RMSNorm):
    """A norm of somebody else's, an adapter's perhaps."""


def _other(norm):
    made = OtherNorm(norm.normalized_shape, eps=norm.eps)
    made.load_state_dict(norm.state_dict())
    return made


EXITS = {
    "hook": lambda module: module.norm_q.register_forward_hook(lambda *_: None),
    "pre-hook": lambda module: module.norm_added_k.register_forward_pre_hook(lambda *_: None),
    "offloading": lambda module: setattr(module.norm_k, "forward", module.norm_k.forward),
    "another norm": _set("norm_k", _other),
    "another eps": lambda module: setattr(module.norm_k, "eps", 1e-3),
    "no weight": lambda module: setattr(module.norm_q, "weight", None),
    "wider weight": lambda module: setattr(
        module.norm_q, "weight", nn.Parameter(module.norm_q.weight.double())
    ),
    "layer norm": _set("norm_q", lambda norm: nn.LayerNorm(norm.normalized_shape)),
}


@pytest.mark.parametrize("change", EXITS.values(), ids=EXITS)
def test_norms_that_are_not_known_are_called(change):
    model, own = packed("FLUX")
    for each in (model, own):
        torch.manual_seed(1)
        change(each.transformer_blocks[0].attn)
    found, made = answered(model)
    assert made == count(model) - 1
    assert near(found, answered(own)[0])


def test_gradients_are_torchs():
    model, own = packed("FLUX")
    inputs = make_inputs(model, 1, 8, torch.device("cpu"))
    assert torch.equal(*(first_tensor(each(**inputs)) for each in (model, own)))
    assert not MADE


def test_compiled_blocks_leave_it_to_the_compiler():
    model, own = packed("FLUX")
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="eager")
    found, made = answered(model)
    assert made == 0
    assert torch.equal(found, answered(own)[0])


def test_what_computes_attention_elsewhere_is_asked(monkeypatch):
    """diffusers' backends are given the heads; several devices are its own affair."""
    model, own = packed("FLUX")
    seen = []
    dispatch = dispatch_attention_fn

    def spying(*args, backend, **kwargs):
        seen.append(backend)
        return dispatch(*args, **kwargs)

    monkeypatch.setattr(attention_wide, "dispatch_attention_fn", spying)
    model.set_attention_backend("native")
    found, made = answered(model)
    assert seen == ["native"] * made
    assert near(found, answered(own)[0])
    for _, module in attention_modules(model):
        module.processor._parallel_config = "several"
    assert not attention_wide.WideAttention(module, module.processor, None).takes(
        21, torch.empty(0)
    )


def test_copies_pickles_and_new_processors_keep_it():
    model, own = packed("FLUX")
    wanted = answered(own)[0]
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found, made = answered(each)
        assert made == count(model)
        assert near(found, wanted)
    model.set_attn_processor(FluxAttnProcessor())
    assert answered(model)[1] == count(model)
    assert {type(m.processor).__name__ for _, m in attention_modules(model)} == {
        "FluxAttnProcessor"
    }


def test_codes_of_each_call_are_made_of_these_heads():
    model, own = packed("FLUX")
    quantkit.attention(model, min_keys=1)
    quantkit.attention(own, qk=None)
    (found, made), wanted = answered(model), answered(own)[0]
    assert made == count(model)
    assert 1e-5 < float((found - wanted).norm() / wanted.norm()) < 0.03
    quantkit.attention(model, qk=None)
    assert near(answered(model)[0], wanted)


def test_a_model_that_is_not_packed_keeps_diffusers_processors():
    model = tiny_model(MODELS["FLUX"])
    coded_attention.install(model, None)
    assert {type(m.processor) for _, m in attention_modules(model)} == {FluxAttnProcessor}
    assert "set_attn_processor" not in vars(model)


def test_a_dense_model_has_diffusers_processors_again():
    model, _ = packed("FLUX")
    _, module = next(attention_modules(model))
    module.to_out[0] = nn.Linear(*module.to_out[0].weight.shape[::-1])
    coded_attention.uninstall(model)
    assert {type(m.processor) for _, m in attention_modules(model)} == {FluxAttnProcessor}
