"""Quantized attention in diffusers' models: every processor, and what is left alone."""

import copy
import json
import pickle
import shutil

import pytest
import torch
from diffusers.utils import logging
from torch.nn import functional as F  # noqa: N812  as processors import it

import quantkit
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import verify
from quantkit.device import choosing, compilers, log
from quantkit.device.archs import ARCHS
from quantkit.errors import CheckpointError, InputError, RecipeError
from quantkit.inference.attention.attention_call import AttentionSettings
from quantkit.progress import silent
from quantkit.recipe.load import parse_recipe
from tests.support.denoiser_classes import ROWS
from tests.support.kernel_cases import need
from tests.support.tiny_denoisers import answer, compile_a_block, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quiet():
    need(compilers.host_compiler)
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    yield
    logging.set_verbosity(level)


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def processors(model):
    return {type(m.processor).__name__ for m in model.modules() if hasattr(m, "processor")}


ROW = {row.class_name: row for row in ROWS}
#: A class for each processor of models whose calls have no masks.
CLASSES = (
    "AllegroTransformer3DModel",
    "AuraFlowTransformer2DModel",
    "BriaFiboTransformer2DModel",
    "ChromaTransformer2DModel",
    "CogVideoXTransformer3DModel",
    "CogView4Transformer2DModel",
    "CosmosTransformer3DModel",
    "EasyAnimateTransformer3DModel",
    "Flux2Transformer2DModel",
    "FluxTransformer2DModel",
    "GlmImageTransformer2DModel",
    "HiDreamImageTransformer2DModel",
    "HunyuanDiT2DModel",
    "JoyImageEditTransformer3DModel",
    "Kandinsky5Transformer3DModel",
    "Krea2Transformer2DModel",
    "LTXVideoTransformer3DModel",
    "LongCatImageTransformer2DModel",
    "Lumina2Transformer2DModel",
    "NucleusMoEImageTransformer2DModel",
    "OvisImageTransformer2DModel",
    "PRXTransformer2DModel",
    "PixArtTransformer2DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "SanaTransformer2DModel",
    "SanaVideoTransformer3DModel",
    "SkyReelsV2Transformer3DModel",
    "StableAudioDiTModel",
    "UNet2DConditionModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
)


@pytest.mark.parametrize("name", CLASSES)
def test_processors_answer_as_torch_does(name):
    model = tiny_model(ROW[name])
    wanted = answer(model)
    layers = quantkit.attention(model, min_keys=1)
    assert layers.quantized
    found = answer(model)
    assert 0 < error(found, wanted) < 0.03
    quantkit.attention(model, qk=None)
    assert torch.equal(answer(model), wanted)


class _Own:
    """Somebody's processor, whose attention is torch's by its usual name."""

    def __call__(self, attn, x, *_, **__):
        q, k, v = (
            t.unflatten(2, (attn.heads, -1)).transpose(1, 2)
            for t in (attn.to_q(x), attn.to_k(x), attn.to_v(x))
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return attn.to_out[0](y.transpose(1, 2).flatten(2))


class _Hidden(_Own):
    def __call__(self, attn, x, *_, **__):
        y = torch.nn.functional.scaled_dot_product_attention(*(x.unsqueeze(1),) * 3)
        return y.squeeze(1)


class _Native:
    __call__ = torch.nn.functional.silu


def test_anybodys_processor_gets_codes_by_what_it_calls():
    from diffusers.models.attention_processor import Attention

    torch.manual_seed(0)
    attn = Attention(32, heads=4, dim_head=8, processor=_Own()).eval()
    x = torch.randn(2, 20, 32)
    with torch.no_grad():
        wanted = attn(x)
        assert quantkit.attention(attn, min_keys=1).quantized == ("",)
        found = attn(x)
    assert 0 < error(found, wanted) < 0.03


@pytest.mark.parametrize("processor", [_Hidden(), _Native()])
def test_a_processor_without_such_a_call_is_kept(processor):
    from diffusers.models.attention_processor import Attention

    attn = Attention(32, heads=4, dim_head=8, processor=processor).eval()
    name = type(processor).__name__
    assert quantkit.attention(attn).kept == {"": f"{name} calls no attention of torch's"}


def test_a_mask_leaves_a_call_to_torch(unet):
    masked, own = copy.deepcopy(unet), copy.deepcopy(unet)
    mask = torch.ones(2, 77, dtype=torch.bool)
    mask[:, 60:] = False
    quantkit.attention(masked, min_keys=1)
    for name, module in own.named_modules():
        if name.endswith("attn1"):
            quantkit.attention(module, min_keys=1)
    assert torch.equal(*(ask(m, encoder_attention_mask=mask) for m in (masked, own)))
    assert not torch.equal(ask(masked), ask(own))


@pytest.fixture(scope="module")
def unet():
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=2,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32,
    ).eval().requires_grad_(False)  # fmt: skip


def with_gradients(model, **options):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, 16, 16, generator=generator)
    text = torch.randn(2, 77, 32, generator=generator)
    return model(x, torch.tensor(500), text, **options).sample


@torch.no_grad()
def ask(model, **options):
    return with_gradients(model, **options)


def test_few_keys_are_torchs(unet):
    model = copy.deepcopy(unet)
    quantkit.attention(model, min_keys=257)
    assert torch.equal(ask(model), ask(unet))
    quantkit.attention(model, min_keys=100)
    only_own = error(ask(model), ask(unet))
    quantkit.attention(model, min_keys=77)
    assert 0 < only_own < error(ask(model), ask(unet)) < 0.03


def test_int8_is_nearer(unet):
    model = copy.deepcopy(unet)
    quantkit.attention(model, min_keys=1)
    fp8 = error(ask(model), ask(unet))
    assert "8 modules" in str(quantkit.attention(model, qk="int8", min_keys=1))
    assert 0 < error(ask(model), ask(unet)) < fp8


@pytest.mark.parametrize("qk", ["e4m3fn", "int8"])
def test_values_in_16_bit_are_nearer(unet, qk):
    model = copy.deepcopy(unet)
    quantkit.attention(model, qk=qk, min_keys=1)
    coarse = error(ask(model), ask(unet))
    quantkit.attention(model, qk=qk, pv=None, min_keys=1)
    with log.record() as seen:
        found = ask(model)
    assert {name for name, _, _ in seen.calls if name.startswith("attention")} == {
        {"e4m3fn": "attention_fp8_f16", "int8": "attention_int8_f16"}[qk]
    }
    assert 0 < error(found, ask(unet)) < (0.75 if qk == "e4m3fn" else 0.4) * coarse
    assert torch.equal(ask(pickle.loads(pickle.dumps(model))), found)


def test_without_their_kernel_attention_is_torchs(unet, monkeypatch):
    model = copy.deepcopy(unet)
    why = ARCHS["sm_90a"].why_without("attention_f16")
    monkeypatch.setattr(choosing, "_why_not_here", lambda _, op: why if op.endswith("_f16") else "")
    quantkit.attention(model, pv=None, min_keys=1)
    assert torch.equal(ask(model), ask(unet))
    quantkit.attention(model, min_keys=1)
    assert not torch.equal(ask(model), ask(unet))


@pytest.mark.parametrize("qk", ["e4m3fn", "int8"])
def test_one_picture_is_computed_as_one_of_two(unet, qk):
    """One picture's heads are a view of the projections, which two pictures' are not."""
    model = copy.deepcopy(unet)
    quantkit.attention(model, qk=qk, min_keys=1)
    one, two = (torch.ones(n, 4, 16, 16) for n in (1, 2))
    with torch.no_grad():
        answers = [
            model(x, torch.tensor(500), torch.ones(len(x), 80, 32)).sample[0] for x in (one, two)
        ]
    # Convolutions of another batch round otherwise, which moves codes.
    assert error(*answers) < 0.01


def test_joined_projections_have_it_too(unet):
    model = copy.deepcopy(unet)
    model.fuse_qkv_projections()
    assert processors(model) == {"FusedAttnProcessor2_0"}
    quantkit.attention(model, min_keys=1)
    assert 0 < error(ask(model), ask(unet)) < 0.03


def test_copies_and_pickles_keep_it(unet):
    model = copy.deepcopy(unet)
    quantkit.attention(model, min_keys=1)
    wanted = ask(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(ask(other), wanted)
        quantkit.attention(other, qk=None)
        assert torch.equal(ask(other), ask(unet))


def test_it_compiles_into_one_graph(unet):
    model = copy.deepcopy(unet)
    quantkit.attention(model, min_keys=1)
    wanted = ask(model)
    compile_a_block(model)
    assert torch.equal(ask(model), wanted)


def test_gradients_are_torchs(unet):
    model = copy.deepcopy(unet).requires_grad_(True)
    quantkit.attention(model, min_keys=1)
    with_gradients(model).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_adapters_keep_their_processors(unet):
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    model = copy.deepcopy(unet)
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn2"
    model.get_submodule(name).processor = IPAdapterAttnProcessor2_0(32, 32)
    layers = quantkit.attention(model)
    assert layers.kept == {name: "IPAdapterAttnProcessor2_0 has weights of an adapter"}
    assert len(layers.quantized) == 7
    assert "1 keep theirs (IPAdapterAttnProcessor2_0" in str(layers)


def test_a_pipeline_means_its_denoisers(pipeline_dir):
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(pipeline_dir)
    layers = quantkit.attention(pipe)
    assert layers.quantized
    assert all(name.startswith("unet.") for name in layers.quantized)


@pytest.fixture(scope="module")
def packed(unet, tmp_path_factory):
    """The UNet in FP8, with attention on int8 codes but in the first block."""
    folder = tmp_path_factory.mktemp("attention")
    copy.deepcopy(unet).half().save_pretrained(folder / "unet")
    section = {"qk": "int8", "min_keys": 1, "exclude": ["down_blocks.*"]}
    recipe = parse_recipe(json.dumps({"name": "a", "attention": section}), where="recipe")
    quantkit.pack(folder / "unet", recipe=recipe, output=folder / "packed")
    plain = recipe.model_copy(update={"attention": None})
    quantkit.pack(folder / "unet", recipe=plain, output=folder / "plain")
    return folder


def load(folder):
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel.from_pretrained(folder, torch_dtype=torch.float32).eval()


def test_a_recipe_asks_for_it_and_a_packed_model_has_it(packed, tmp_path):
    config = json.loads((packed / "packed" / "config.json").read_text())["quantization_config"]
    assert config["format_version"] == 1
    assert config["attention"] == {"qk": "int8", "min_keys": 1, "exclude": ["down_blocks.*"]}
    model, plain = load(packed / "packed"), load(packed / "plain")
    wanted = copy.deepcopy(plain)
    layers = quantkit.attention(wanted, qk="int8", min_keys=1, exclude=["down_blocks.*"])
    assert {name.partition(".")[0] for name in layers.kept} == {"down_blocks"}
    assert torch.equal(ask(model), ask(wanted))
    assert not torch.equal(ask(model), ask(plain))
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(ask(load(tmp_path / "again")), ask(model))
    assert not verify(tmp_path / "again", progress=silent).breaches
    assert torch.equal(ask(pickle.loads(pickle.dumps(model))), ask(model))


def test_a_packed_model_keeps_it_when_projections_are_joined(packed):
    model = load(packed / "packed")
    wanted = ask(model)
    model.fuse_qkv_projections()
    assert processors(model) == {"FusedAttnProcessor2_0"}
    assert torch.equal(ask(model), wanted)
    model.unfuse_qkv_projections()
    assert torch.equal(ask(model), wanted)


def test_a_dequantized_model_has_its_own_attention(packed):
    model, plain = (load(packed / name).dequantize() for name in ("packed", "plain"))
    assert torch.equal(ask(model), ask(plain))
    model.fuse_qkv_projections()
    assert error(ask(model), ask(plain)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"qk": "fp4"}, "qk 'fp4' with pv 'e4m3fn', expected one of e4m3fn, int8"),
        ({"min_keys": 0}, "min_keys 0, expected 1 or more"),
        ({"min_keys": True}, "min_keys True, expected 1 or more"),
        ({"exclude": "a"}, "exclude 'a', expected a list"),
        ({"ranks": 3}, "unknown key 'ranks'"),
        ({"pv": "e5m2"}, "pv 'e5m2', expected none or no such key"),
        ({"pv": None}, "pv None, expected none"),
        (None, "attention None, expected an object"),
    ],
)
def test_malformed_entries_are_refused(packed, tmp_path, changes, text):
    folder = shutil.copytree(packed / "packed", tmp_path / "packed")
    values = json.loads((folder / "config.json").read_text())
    config = values["quantization_config"]
    config["attention"] = None if changes is None else {**config["attention"], **changes}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as caught:
        open_packed(folder)
    assert text in str(caught.value)


def test_values_may_be_in_16_bit(packed, tmp_path):
    section = {"qk": "int8", "pv": "none", "min_keys": 1, "exclude": ["down_blocks.*"]}
    recipe = parse_recipe(json.dumps({"name": "a", "attention": section}), where="recipe")
    quantkit.pack(packed / "unet", recipe=recipe, output=tmp_path / "wide")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())["quantization_config"]
    assert config["attention"] == section
    model, wanted = load(tmp_path / "wide"), load(packed / "plain")
    quantkit.attention(wanted, qk="int8", pv=None, min_keys=1, exclude=["down_blocks.*"])
    assert torch.equal(ask(model), ask(wanted))
    assert not torch.equal(ask(model), ask(load(packed / "packed")))
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(ask(load(tmp_path / "again")), ask(model))


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"pv": "int8"}, "attention.pv"),
        ({"qk": "fp4"}, "attention.qk"),
        ({"min_keys": 0}, "attention.min_keys"),
        ({"ranks": "auto"}, "unknown key 'attention.ranks'"),
    ],
)
def test_recipes_are_checked(section, text):
    with pytest.raises(RecipeError, match=text):
        parse_recipe(json.dumps({"name": "a", "attention": section}), where="recipe")


def test_what_is_refused():
    with pytest.raises(InputError, match="qk 'fp4', expected one of e4m3fn, int8"):
        AttentionSettings("fp4")
    with pytest.raises(InputError, match="pv 'int8', expected e4m3fn, or None for 16 bit"):
        AttentionSettings(pv="int8")
    with pytest.raises(InputError, match="min_keys 0"):
        AttentionSettings(min_keys=0)
    with pytest.raises(InputError, match="Linear has no attention modules"):
        quantkit.attention(torch.nn.Linear(2, 2))
