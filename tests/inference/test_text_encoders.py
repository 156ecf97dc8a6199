"""Packed text encoders: every kind packs, verifies, loads by from_pretrained, and saves again."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import CheckpointError, InputError, ModelError, RecipeError
from quantkit.inference.layers.layer_summary import iterate_packed, packed_layers
from quantkit.recipe.load import change_recipe
from quantkit.recipe.schema import Recipe
from quantkit.workflow.pack import pack
from quantkit.workflow.verify import verify
from tests.support.encoders import ENCODERS, embed, encoder_class, make_encoder
from tests.support.outliers import encoder_with_outliers

pytestmark = pytest.mark.usefixtures("one_thread")

#: What of the embeddings may be lost, random weights of 64 columns: an int8 code is off by a
#: 440th of a channel's largest weight, e4m3 by a 36th of each, int4 by a 28th of the largest.
#: Versions of transformers draw other weights: Gemma 3 loses .21 or .26 in int4.
MOST = {"fp8": 0.1, "int8": 0.025, "int4": 0.28}


def packed(folder, output, encoders="int8", **kwargs):
    recipe = Recipe.model_validate({"name": "t", "text_encoders": encoders})
    return pack(folder, output=output, recipe=recipe, **kwargs)


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


#: A class and a format of each: how one is stored does not depend on the other.
KINDS = [
    *((name, "int4") for name in ENCODERS),
    *((name, fmt) for name in ("T5EncoderModel", "CLIPTextModel") for fmt in ("fp8", "int8")),
]


@pytest.mark.parametrize(("class_name", "fmt"), KINDS)
def test_every_kind_answers_within_the_error_of_its_format(class_name, tmp_path, fmt):
    folder, cls = tmp_path / "source", encoder_class(class_name)
    make_encoder(class_name).half().save_pretrained(folder)
    summary = packed(folder, tmp_path / "packed", fmt)
    model = cls.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert not verify(tmp_path / "packed").breaches
    assert len(packed_layers(model)) == sum(summary.by_scheme().values()) >= 12
    wanted = embed(cls.from_pretrained(folder, dtype=torch.float32))
    assert error(embed(model), wanted) < MOST[fmt]
    model.save_pretrained(tmp_path / "again")
    assert not verify(tmp_path / "again").breaches
    again = cls.from_pretrained(tmp_path / "again", dtype=torch.float32)
    torch.testing.assert_close(embed(again), embed(model), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("class_name", "fmt", "gated"),
    [
        *(("T5EncoderModel", fmt, "gated-gelu") for fmt in MOST),
        ("T5EncoderModel", "int8", "relu"),
        ("UMT5EncoderModel", "int8", "gated-gelu"),
        ("UMT5EncoderModel", "int4", "relu"),
    ],
)
def test_t5_stays_finite_in_float16_as_it_does_in_16_bit(tmp_path, class_name, fmt, gated):
    """Activations of T5-XXL leave float16's range in the last product of a feed-forward."""
    model = make_encoder(class_name, feed_forward_proj=gated)
    with torch.no_grad():
        for block in model.encoder.block:
            block.layer[-1].DenseReluDense.wo.weight.mul_(3e4)
    model.half().save_pretrained(tmp_path / "source")
    packed(tmp_path / "source", tmp_path / "packed", fmt)
    cls = encoder_class(class_name)
    wanted = embed(cls.from_pretrained(tmp_path / "source", dtype=torch.float32))
    found = cls.from_pretrained(tmp_path / "packed", dtype=torch.float16)
    assert found.encoder.block[0].layer[0].SelfAttention.q.codes.dtype != torch.float16
    # All that they add to the residual stream is the network's.
    assert error(embed(found), wanted) < 2 * MOST[fmt]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("class_name", ["T5EncoderModel", "CLIPTextModel", "Qwen3ForCausalLM"])
def test_dequantized_encoders_are_dense_and_save_in_16_bit(tmp_path, class_name, dtype):
    cls = encoder_class(class_name)
    make_encoder(class_name).half().save_pretrained(tmp_path / "source")
    packed(tmp_path / "source", tmp_path / "packed")
    model = cls.from_pretrained(tmp_path / "packed", dtype=dtype)
    before = embed(model)
    layers = {name: layer.dense_weight() for _, name, layer in iterate_packed(model)}
    classes = {type(m) for m in cls.from_pretrained(tmp_path / "source").modules()}
    assert model.dequantize() is model
    assert {type(module) for module in model.modules()} == classes
    assert all(torch.equal(model.get_submodule(n).weight, w) for n, w in layers.items())
    assert error(embed(model), before) < MOST["int8"]
    model.save_pretrained(tmp_path / "dense")
    again = cls.from_pretrained(tmp_path / "dense", dtype=dtype)
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    assert torch.equal(embed(again), embed(model))
    with pytest.raises(ValueError, match="first quantize"):
        model.dequantize()


def test_a_dequantized_t5_stays_finite_in_float16(tmp_path):
    model = make_encoder("T5EncoderModel")
    with torch.no_grad():
        for block in model.encoder.block:
            block.layer[-1].DenseReluDense.wo.weight.mul_(3e4)
    model.half().save_pretrained(tmp_path / "source")
    packed(tmp_path / "source", tmp_path / "packed")
    cls = encoder_class("T5EncoderModel")
    wanted = embed(cls.from_pretrained(tmp_path / "source", dtype=torch.float32))
    found = cls.from_pretrained(tmp_path / "packed", dtype=torch.float16).dequantize()
    assert error(embed(found), wanted) < 2 * MOST["int8"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_and_scales_keep_their_dtype(tmp_path, dtype):
    make_encoder("T5EncoderModel").half().save_pretrained(tmp_path / "source")
    packed(tmp_path / "source", tmp_path / "packed", "fp8")
    model = encoder_class("T5EncoderModel").from_pretrained(tmp_path / "packed", dtype=dtype)
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    state = model.state_dict()
    for name, tensor in stored.items():
        if name.endswith("_scale") or tensor.itemsize == 1:
            assert state[name].dtype == tensor.dtype
            assert torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8))
    assert model.dtype == dtype


#: What published files call the tensors of a model as transformers builds it.
PUBLISHED = {
    "CLIPTextModel": {"": "text_model."},
    "Qwen2_5_VLForConditionalGeneration": {
        "model.visual.": "visual.", "model.language_model.": "model.",
    },
    "Mistral3ForConditionalGeneration": {
        "model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower.",
        "model.multi_modal": "multi_modal", "lm_head": "language_model.lm_head",
    },
}  # fmt: skip


def published(class_name, name):
    """Return the name of a tensor in published files."""
    for mine, theirs in PUBLISHED[class_name].items():
        if name.startswith(mine):
            return theirs + name.removeprefix(mine)
    return name


@pytest.mark.parametrize("class_name", list(PUBLISHED))
def test_layers_are_found_by_the_names_of_published_files(tmp_path, class_name):
    model, cls = make_encoder(class_name).half(), encoder_class(class_name)
    model.save_pretrained(tmp_path / "source")
    tensors = {published(class_name, n): t.clone() for n, t in model.state_dict().items()}
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    summary = packed(tmp_path / "source", tmp_path / "packed")
    assert sum(summary.by_scheme().values()) >= 12
    assert not verify(tmp_path / "packed").breaches
    found = cls.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert error(embed(found), embed(model.float())) < MOST["int8"]
    found.save_pretrained(tmp_path / "again")
    assert not verify(tmp_path / "again").breaches


@pytest.mark.parametrize("kept", ["shared.weight", "encoder.embed_tokens.weight"])
def test_a_shared_embedding_may_have_either_name(tmp_path, kept):
    model, cls = make_encoder("T5EncoderModel").half(), encoder_class("T5EncoderModel")
    model.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    tensors[kept] = tensors.pop("shared.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    packed(tmp_path / "source", tmp_path / "packed")
    assert not verify(tmp_path / "packed").breaches
    found = cls.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert found.shared.weight.data_ptr() == found.encoder.embed_tokens.weight.data_ptr()
    assert error(embed(found), embed(model.float())) < MOST["int8"]
    found.save_pretrained(tmp_path / "again")


def test_a_tied_layer_cannot_be_packed(tmp_path):
    model = make_encoder("Qwen3ForCausalLM").half()
    model.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    keep = {"weight": {"format": "int8"}, "overrides": [
        {"encoders": ["*"], "layers": ["lm_head"], "keep": False}]}  # fmt: skip
    with pytest.raises(ModelError, match="lm_head: its weight is that of another module, too"):
        packed(tmp_path / "source", tmp_path / "packed", keep)
    packed(tmp_path / "source", tmp_path / "packed")


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards_and_variants(tmp_path, variant):
    model, cls = make_encoder("T5EncoderModel").half(), encoder_class("T5EncoderModel")
    model.save_pretrained(tmp_path / "source", max_shard_size="60KB", variant=variant)
    packed(tmp_path / "source", tmp_path / "packed", "int4")
    names = {file.name for file in (tmp_path / "packed").glob("*.safetensors*")}
    assert names == {file.name for file in (tmp_path / "source").glob("*.safetensors*")}
    assert len(names) > 2
    assert not verify(tmp_path / "packed").breaches
    options = {"dtype": torch.float32, "variant": variant}
    found = cls.from_pretrained(tmp_path / "packed", **options)
    assert error(embed(found), embed(model.float())) < MOST["int4"]
    found.save_pretrained(tmp_path / "again", variant=variant)
    assert not verify(tmp_path / "again").breaches
    cls.from_pretrained(tmp_path / "again", **options)
    next((tmp_path / "packed").glob("*-00002-of-*.safetensors")).unlink()
    with pytest.raises((CheckpointError, OSError), match="00002-of"):
        cls.from_pretrained(tmp_path / "packed", **options)


@pytest.fixture
def small(tmp_path):
    make_encoder("T5EncoderModel").half().save_pretrained(tmp_path / "source")
    packed(tmp_path / "source", tmp_path / "packed")
    return tmp_path / "packed", encoder_class("T5EncoderModel")


def test_flipped_bits_are_found_while_loading(small):
    folder, cls = small
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        cls.from_pretrained(folder)


def test_a_config_of_another_size_is_refused(small):
    folder, cls = small
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "d_ff": 128}))
    with pytest.raises(CheckpointError, match=r"packed from \[96, 64\], the model has \[128, 64\]"):
        cls.from_pretrained(folder)


def test_transformers_does_not_quantize_with_quantkit(small):
    folder, cls = small
    from quantkit.inference.loading.transformers_loading import QuantkitConfig

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    with pytest.raises(InputError, match="does not quantize while loading"):
        cls.from_pretrained(folder.parent / "source", quantization_config=QuantkitConfig(**config))


def test_changed_weights_are_not_saved(small, tmp_path):
    folder, cls = small
    model = cls.from_pretrained(folder)
    with torch.no_grad():
        model.shared.weight[0] += 1
    with pytest.raises(CheckpointError, match="changed since it was loaded"):
        model.save_pretrained(tmp_path / "again")


@pytest.fixture
def pipeline(pipeline_dir, tmp_path):
    """A pipeline in float16, whose text encoder has two layers worth of outliers."""
    shutil.copytree(pipeline_dir, tmp_path / "pipeline")
    return tmp_path / "pipeline"


def test_one_recipe_packs_denoiser_and_encoder(pipeline, tmp_path):
    from diffusers import DiffusionPipeline

    recipe = change_recipe(Recipe(name="t"), {"text_encoders": "int4"})
    planned = pack(pipeline, output=tmp_path / "packed", recipe=recipe, dry_run=True)
    summary = packed(pipeline, tmp_path / "packed", "int4")
    assert planned.to_json() == summary.to_json()
    assert {c.name for c in summary.components} == {"unet", "text_encoder"}
    formats = {x.component: x.scheme.weight.name for x in summary.layers if x.scheme}
    assert formats == {"unet": "e4m3fn", "text_encoder": "int4"}
    assert len(verify(tmp_path / "packed").components) == 2
    for pipe in (
        quantkit.load_pipeline(tmp_path / "packed"),
        DiffusionPipeline.from_pretrained(tmp_path / "packed", torch_dtype=torch.float32),
    ):
        assert {x.component for x in packed_layers(pipe)} == {"unet", "text_encoder"}
        assert pipe.text_encoder.dtype == pipe.unet.dtype == torch.float32
    picture = pipe("abc", num_inference_steps=1, output_type="latent").images
    assert torch.isfinite(picture).all()
    pipe.save_pretrained(tmp_path / "again")
    assert not verify(tmp_path / "again").breaches
    quantkit.load_pipeline(tmp_path / "again")


def test_the_denoiser_decides_about_the_dtype(pipeline, tmp_path):
    """Without a dtype transformers takes that of the file, float16, and diffusers float32."""
    from diffusers import DiffusionPipeline

    packed(pipeline, tmp_path / "packed")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "packed")
    assert pipe.text_encoder.dtype == pipe.unet.dtype


def test_an_encoder_that_is_kept_is_copied(pipeline, tmp_path):
    section = {"weight": {"format": "int8"}, "overrides": [
        {"encoders": ["text_encoder"], "keep": True}]}  # fmt: skip
    summary = packed(pipeline, tmp_path / "packed", section)
    assert {c.name for c in summary.components} == {"unet"}
    source = (pipeline / "text_encoder" / "model.safetensors").read_bytes()
    assert (tmp_path / "packed" / "text_encoder" / "model.safetensors").read_bytes() == source


def test_without_the_section_encoders_are_copied(pipeline, tmp_path):
    summary = pack(pipeline, output=tmp_path / "packed")
    assert {c.name for c in summary.components} == {"unet"}
    (file,) = (tmp_path / "packed" / "unet").glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert "text_encoders" not in opened.metadata()["quantkit"]


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ("int3", "expected fp8, int8, int4, int8-gptq, int4-gptq, or a section"),
        ({"weight": {"format": "int8", "fallback": "e4m3fn"}}, "fallback needs statistics"),
        ({"activation": {"mode": "static"}}, "mode static needs statistics"),
    ],
)
def test_what_encoders_cannot_have_is_refused(section, match):
    with pytest.raises(RecipeError, match=match):
        Recipe.model_validate({"name": "t", "text_encoders": section})


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"keep": ["text_model.*"]}, r"text_encoders.keep: 'text_model.\*' matches none of the"),
        (
            {"overrides": [{"encoders": ["text_encoder_2"]}]},
            r"overrides.0.encoders: 'text_encoder_2' .*; did you mean 'text_encoder'",
        ),
        (
            {"overrides": [{"encoders": ["*"], "layers": ["*.fc3"]}]},
            r"overrides.0.layers: '\*.fc3' .* layers of text encoders; did you mean '\*.fc",
        ),
    ],
)
def test_globs_that_match_nothing_are_refused(pipeline, tmp_path, section, match):
    with pytest.raises(RecipeError, match=match):
        packed(pipeline, tmp_path / "packed", section)


@pytest.mark.parametrize("class_name", ["LlamaForCausalLM"])
def test_outliers_cost_int8_inputs_more_than_weights_and_fp8_nothing(tmp_path, class_name):
    cls = encoder_class(class_name)
    lost = {}
    for factor in (1, 64):
        source = tmp_path / f"source{factor}"
        encoder_with_outliers(class_name, factor).save_pretrained(source)
        wanted = embed(cls.from_pretrained(source, dtype=torch.float32))
        for fmt, mode in (("e4m3fn", "token"), ("int8", "none"), ("int8", "token")):
            section = {"weight": {"format": fmt}, "activation": {"mode": mode}, "data_free": True}
            packed(source, tmp_path / f"{factor}{fmt}{mode}", section)
            model = cls.from_pretrained(tmp_path / f"{factor}{fmt}{mode}", dtype=torch.float32)
            lost[factor, fmt, mode] = error(embed(model), wanted)
    assert lost[64, "e4m3fn", "token"] < 1.2 * lost[1, "e4m3fn", "token"]
    assert lost[64, "int8", "token"] > 2 * lost[64, "int8", "none"]
    assert lost[64, "int8", "token"] > 8 * lost[1, "int8", "token"]
