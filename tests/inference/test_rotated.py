"""Adapters on models whose queries and keys have another basis: refused where they are wrong."""

import copy
import json
import logging
import pickle
import shutil
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0

import quantkit
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.rotated import KEY, SOURCE_KEY, rotated_modules, write_rotated_modules
from quantkit.checkpoint.spec import make_config, parse_config
from quantkit.errors import CheckpointError, InputError, ModelError
from quantkit.inference.rotated import install
from quantkit.models.attention import attention_modules
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.answers import step
from tests.support.loading import plain, unet_class
from tests.support.observed import RECIPE

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # peft's and diffusers', of versions to come
]

SCHEME = Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN)
FEW = RECIPE.with_calibration({"prompts": 2, "steps": 2, "buckets": 2, "batch": 2})
SELF = "mid_block.attentions.0.transformer_blocks.0.attn1"


@pytest.fixture(scope="module")
def folders(pipeline_dir, transformer_pipeline_dir, tmp_path_factory):
    """Return of each pipeline what was rotated, and what was packed of it."""
    found = {}
    for name, source in {"unet": pipeline_dir, "transformer": transformer_pipeline_dir}.items():
        folder = tmp_path_factory.mktemp(name)
        seen = quantkit.calibrate(source, recipe=FEW, prompts=["a cat", "a dog"]).calibration
        rotated = quantkit.rotate(
            source,
            calibration=seen,
            output=folder / "rotated",
            prompts=[f"thing {i}" for i in range(32)],
            batch=16,
        )
        quantkit.pack(folder / "rotated", recipe="fp8", output=folder / "packed")
        found[name] = (folder / "rotated", folder / "packed", sorted(rotated.rotation.bases))
    return found


def load(folder):
    return unet_class().from_pretrained(folder / "unet")


def lora(model, *layers):
    """Return a LoRA of some layers, as diffusers' state dict."""
    generator, state = torch.Generator().manual_seed(5), {}
    for name in layers:
        layer = model.get_submodule(name)
        shapes = {"A": (2, layer.in_features), "B": (layer.out_features, 2)}
        for part, shape in shapes.items():
            state[f"{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator)
    return state


@pytest.mark.parametrize("name", ["unet", "transformer"])
def test_both_models_name_their_modules(folders, name):
    rotated, packed, modules = folders[name]
    assert list(rotated_modules(rotated / name / "config.json")) == modules
    (component,) = open_packed(packed).components
    assert list(component.config.rotated) == modules
    assert not quantkit.verify(packed).breaches


def test_diffusers_carries_the_names_along_without_a_word(folders, tmp_path, caplog):
    rotated, packed, modules = folders["unet"]
    logging.getLogger("diffusers").addHandler(caplog.handler)
    load(rotated).save_pretrained(tmp_path / "dense")
    load(packed).save_pretrained(tmp_path / "packed")
    logging.getLogger("diffusers").removeHandler(caplog.handler)
    assert SOURCE_KEY not in caplog.text
    assert list(rotated_modules(tmp_path / "dense" / "config.json")) == modules
    before, after = (
        json.loads((folder / "config.json").read_text())
        for folder in (packed / "unet", tmp_path / "packed")
    )
    assert after["quantization_config"] == before["quantization_config"]
    assert after["quantization_config"][KEY] == after[SOURCE_KEY] == modules


@pytest.mark.parametrize("projection", ["to_q", "to_k"])
def test_a_lora_of_queries_or_keys_is_refused(folders, projection):
    pipe = plain(folders["unet"][1])
    alone = step(pipe.unet)
    layers = (f"{SELF}.to_v", f"{SELF}.{projection}")
    state = {f"unet.{key}": value for key, value in lora(pipe.unet, *layers).items()}
    message = rf"^adapter: {SELF}\.{projection}: was trained in the basis .* 'quantkit rotate'; "
    with pytest.raises(InputError, match=message):
        pipe.load_lora_weights(state, adapter_name="it")
    assert torch.equal(step(pipe.unet), alone)


@pytest.mark.parametrize("how", ["copy", "pickle", "dequantized", "moved", "peft", "replaced"])
def test_it_is_refused_whatever_became_of_the_model(folders, how):
    import peft

    model: Any = load(folders["unet"][1])
    if how == "copy":
        model = copy.deepcopy(model)
    elif how == "pickle":
        model = pickle.loads(pickle.dumps(model))
    elif how in {"dequantized", "replaced"}:
        model = model.dequantize()
    elif how == "moved":
        model = model.to(torch.bfloat16)
    with pytest.raises(InputError, match=rf"^adapter: {SELF}\.to_q: "):
        if how == "peft":
            config = peft.LoraConfig(r=2, target_modules=[f"{SELF}.to_q"])
            peft.inject_adapter_in_model(config, model)
        elif how == "replaced":
            saved = [f"{SELF}.to_q"]
            config = peft.LoraConfig(r=2, target_modules=[f"{SELF}.to_v"], modules_to_save=saved)
            peft.get_peft_model(model, config)
        else:
            model.load_lora_adapter(lora(model, f"{SELF}.to_q"), prefix=None)


def test_loras_of_other_layers_add_what_they_did(folders):
    """Also attention to the text, which keeps its basis: against hooks that add the branch."""
    model = load(folders["unet"][1])
    block = SELF.removesuffix("attn1")
    layers = [f"{SELF}.to_v", f"{SELF}.to_out.0", f"{block}attn2.to_q", f"{block}attn2.to_k"]
    state = lora(model, *layers, f"{block}ff.net.2")
    alone = step(model)

    def hook(name):
        down, up = (state[f"{name}.lora_{part}.weight"] for part in "AB")
        return lambda _, args, output: output + args[0] @ down.T @ up.T

    handles = [
        model.get_submodule(name).register_forward_hook(hook(name))
        for name in (*layers, f"{block}ff.net.2")
    ]
    wanted = step(model)
    for handle in handles:
        handle.remove()
    assert not torch.allclose(wanted, alone, rtol=1e-2)
    model.load_lora_adapter(state, prefix=None, adapter_name="it")
    assert torch.allclose(step(model), wanted, rtol=1e-4, atol=1e-5)
    model.unload_lora()
    assert torch.equal(step(model), alone)


def test_projections_are_fused_as_ever(folders):
    model = load(folders["unet"][1])
    model.fuse_qkv_projections()
    model.unfuse_qkv_projections()
    with pytest.raises(InputError, match=r"^adapter: .*to_k: "):
        model.load_lora_adapter(lora(model, f"{SELF}.to_k"), prefix=None)


def test_an_ip_adapter_of_stable_diffusion_3_is_refused(folders):
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel.from_pretrained(folders["transformer"][1] / "transformer")
    size = model.inner_dim
    processors = {
        name: SD3IPAdapterJointAttnProcessor2_0(
            hidden_size=size, ip_hidden_states_dim=16, head_dim=size // 2, timesteps_emb_dim=16
        )
        for name in model.attn_processors
    }
    with pytest.raises(InputError, match=r"^adapter: .*\.attn\.to_k_ip: was trained"):
        model.set_attn_processor(processors)


def test_a_model_that_was_not_rotated_takes_all(packed_dir):
    model = load(packed_dir)
    assert not any("quantkit_rotated" in vars(m) for _, m in attention_modules(model))
    model.load_lora_adapter(lora(model, f"{SELF}.to_q"), prefix=None)


def test_rotating_again_names_the_modules_of_both(folders, tmp_path):
    rotated, _, modules = folders["unet"]
    config = shutil.copy(rotated / "unet" / "config.json", tmp_path / "config.json")
    before = json.loads(config.read_text())
    write_rotated_modules(config, ["a", modules[0]])
    assert rotated_modules(config) == ("a", *modules)
    after = json.loads(config.read_text())
    assert list(after) == list(before)
    assert {**after, SOURCE_KEY: modules} == before


# ------------------------------------------------------------------------------- malformed input

BROKEN: list[Any] = [None, "a", {}, [], [1], [""], ["a", "a"], ["a", None], [["a"]]]


@pytest.mark.parametrize("value", BROKEN, ids=str)
def test_entries_that_are_no_list_of_modules_are_refused(value, tmp_path):
    config = make_config({"a": SCHEME}, rotated=("a",)).to_json()
    with pytest.raises(CheckpointError, match=r"rotated .*, wanted a list of modules, each once"):
        parse_config({**config, KEY: value})
    (tmp_path / "config.json").write_text(json.dumps({SOURCE_KEY: value}))
    with pytest.raises(ModelError, match=rf"{SOURCE_KEY} .*run 'quantkit rotate' again"):
        rotated_modules(tmp_path / "config.json")


def test_the_key_has_a_version_and_only_where_it_stands():
    config = make_config({"a": SCHEME}, rotated=("b", "c"))
    assert parse_config(json.loads(json.dumps(config.to_json()))) == config
    without = make_config({"a": SCHEME})
    assert KEY not in without.to_json()
    assert parse_config(without.to_json()).rotated == ()


def test_modules_that_the_model_has_not_are_refused(folders, tmp_path):
    model = load(folders["unet"][1])
    with pytest.raises(CheckpointError, match=r"^rotated: mid_block: no such attention module"):
        install(model, ["mid_block"])
    shutil.copytree(folders["unet"][1], tmp_path / "packed")
    config = tmp_path / "packed" / "unet" / "config.json"
    values = json.loads(config.read_text())
    values["quantization_config"][KEY].append("nowhere")
    config.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"rotated: nowhere: no nowhere\.to_q\.weight"):
        open_packed(tmp_path / "packed")
