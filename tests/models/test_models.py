"""Families against the modules of published models, plans, and every way to open a model."""

import json
import shutil
from pathlib import Path

import pytest

from quantkit.errors import ModelError, RecipeError, ShapeError
from quantkit.models.component_layers import list_layers
from quantkit.models.families import FAMILIES, find_family
from quantkit.models.general_family import GENERAL
from quantkit.models.layer_plan import choose_edges, plan_layers
from quantkit.models.source import open_model
from quantkit.models.timestep import bucket_of, timestep_argument
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation
from quantkit.recipe.layer_recipes import ActivationRecipe
from quantkit.recipe.load import load_recipe, parse_recipe
from tests.golden.make_keys import MODELS, describe
from tests.support.headers import golden_keys, write_component, write_header

#: What stays in 16 bit of each published model: module names without their numbers.
KEPT = {
    "sd15": {
        "conv_in",
        "conv_out",
        "time_embedding.linear_#",
        "down_blocks.#.resnets.#.time_emb_proj",
        "mid_block.resnets.#.time_emb_proj",
        "up_blocks.#.resnets.#.time_emb_proj",
    },
    "sd3_medium": {
        "pos_embed.proj",
        "time_text_embed.timestep_embedder.linear_#",
        "time_text_embed.text_embedder.linear_#",
        "context_embedder",
        "transformer_blocks.#.norm#.linear",
        "transformer_blocks.#.norm#_context.linear",
        "norm_out.linear",
        "proj_out",
    },
    "flux1_dev": {
        "x_embedder",
        "context_embedder",
        "time_text_embed.timestep_embedder.linear_#",
        "time_text_embed.guidance_embedder.linear_#",
        "time_text_embed.text_embedder.linear_#",
        "transformer_blocks.#.norm#.linear",
        "transformer_blocks.#.norm#_context.linear",
        "single_transformer_blocks.#.norm.linear",
        "norm_out.linear",
        "proj_out",
    },
    "pixart_sigma": {
        "pos_embed.proj",
        "adaln_single.linear",
        "adaln_single.emb.timestep_embedder.linear_#",
        "caption_projection.linear_#",
        "proj_out",
    },
    "sana_1600m": {
        "patch_embed.proj",
        "time_embed.linear",
        "time_embed.emb.timestep_embedder.linear_#",
        "caption_projection.linear_#",
        "proj_out",
    },
}
KEPT["flux2_dev"] = {
    "x_embedder",
    "context_embedder",
    "time_guidance_embed.timestep_embedder.linear_#",
    "time_guidance_embed.guidance_embedder.linear_#",
    "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.linear",
    "single_stream_modulation.linear",
    "norm_out.linear",
    "proj_out",
}
KEPT["chroma1_hd"] = {
    "x_embedder",
    "context_embedder",
    "distilled_guidance_layer.in_proj",
    "distilled_guidance_layer.layers.#.linear_#",
    "distilled_guidance_layer.out_proj",
    "proj_out",
}
KEPT["qwen_image"] = {
    "img_in",
    "txt_in",
    "time_text_embed.timestep_embedder.linear_#",
    "transformer_blocks.#.img_mod.#",
    "transformer_blocks.#.txt_mod.#",
    "norm_out.linear",
    "proj_out",
}
KEPT["z_image"] = {
    "all_x_embedder.#-#",
    "cap_embedder.#",
    "t_embedder.mlp.#",
    "layers.#.adaLN_modulation.#",
    "noise_refiner.#.adaLN_modulation.#",
    "all_final_layer.#-#.adaLN_modulation.#",
    "all_final_layer.#-#.linear",
}
KEPT["wan22_t2v_14b"] = {
    "condition_embedder.time_embedder.linear_#",
    "condition_embedder.text_embedder.linear_#",
    "condition_embedder.time_proj",
    "proj_out",
}
KEPT["wan21_i2v_14b"] = KEPT["wan22_t2v_14b"] | {
    "condition_embedder.image_embedder.ff.net.#",
    "condition_embedder.image_embedder.ff.net.#.proj",
}
KEPT["ltx_video"] = {
    "proj_in",
    "time_embed.linear",
    "time_embed.emb.timestep_embedder.linear_#",
    "caption_projection.linear_#",
    "proj_out",
}
KEPT["sdxl"] = KEPT["sd15"] | {"add_embedding.linear_#"}
KEPT["sd35_medium"] = KEPT["sd35_large"] = KEPT["sd3_medium"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Open a published model from its key list."""
    root, opened = tmp_path_factory.mktemp("published"), {}

    def get(name):
        if name not in opened:
            keys = golden_keys(name)
            path = write_component(root / name, keys["class_name"], keys["tensors"])
            opened[name] = keys, open_model(str(path)).components[0]
        return opened[name]

    return get


def without_numbers(path):
    import re

    return re.sub(r"\d+", "#", path)


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_the_modules_that_diffusers_builds(published, name):
    keys, component = published(name)
    wanted = {
        path: ("linear" if kind == "Linear" else "conv2d", bias)
        for path, (kind, groups, bias) in keys["modules"].items()
        if groups == 1
    }
    found = {layer.name: (layer.kind, layer.bias) for layer in list_layers(component)}
    assert found == wanted


@pytest.mark.parametrize("name", MODELS)
def test_what_stays_in_16_bit(published, name):
    _, component = published(name)
    plan = plan_layers(component, load_recipe("fp8"), calibrated=False, masked=())
    assert {without_numbers(t.layer.name) for t in plan if t.scheme is None} == KEPT[name]
    assert all(t.reason for t in plan if t.scheme is None)


@pytest.mark.parametrize("name", MODELS)
def test_the_general_family_keeps_what_tuned_ones_keep(published, name):
    keys, component = published(name)
    plan = plan_layers(component, load_recipe("fp8"), calibrated=False, masked=())
    tuned = {t.layer.name for t in plan if t.scheme is None}
    names = [layer for layer, (_, groups, _) in keys["modules"].items() if groups == 1]
    shapes = {layer: keys["tensors"][f"{layer}.weight"] for layer in names}
    assert {layer for layer in names if GENERAL.keep_reason(layer, shapes[layer])} == tuned


@pytest.mark.parametrize("name", MODELS)
def test_every_packed_layer_can_be_sparse(published, name):
    _, component = published(name)
    names = [layer.name for layer in list_layers(component)]
    plan = plan_layers(component, load_recipe("fp8"), calibrated=False, masked=names)
    packed = [t for t in plan if t.scheme]
    assert packed
    assert all(t.scheme.sparsity == TWO_OF_FOUR and not t.reason for t in packed)


def test_key_lists_are_those_of_the_installed_diffusers():
    stored, built = golden_keys("sd15"), describe("sd15")
    assert json.loads(json.dumps(built)) == stored


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_every_family_has_a_published_model_and_uses_every_pattern(published, family):
    names = [n for n, (_, class_name, *_) in MODELS.items() if class_name in family.class_names]
    assert names
    modules = {m for name in names for m in published(name)[0]["modules"]}
    unused = {k.pattern for k in family.keep if not any(_hit(m, k.pattern) for m in modules)}
    # Conditions that the published models do not have, as class labels.
    assert unused <= {
        "class_embedding",
        "class_embedding.*",
        "encoder_hid_proj",
        "encoder_hid_proj.*",
    }


def _hit(module, pattern):
    from fnmatch import fnmatchcase

    return fnmatchcase(module, pattern)


def test_a_class_without_a_row_is_of_the_general_family():
    assert find_family("AuraFlowTransformer2DModel") is GENERAL
    assert find_family("AuraFlowTransformer2DModel", "flux").name == "flux"
    with pytest.raises(
        ModelError, match=r"family 'fulx': unknown, expected one of unet, .*general"
    ):
        find_family("FluxTransformer2DModel", "fulx")


def test_layer_has_the_shape_the_kernels_read(published):
    layers = {layer.name: layer for layer in list_layers(published("sd15")[1])}
    conv = layers["up_blocks.3.resnets.0.conv1"]
    assert (conv.n, conv.k, conv.channels, conv.area) == (320, 960 * 9, 960, 9)
    linear = layers["mid_block.attentions.0.transformer_blocks.0.ff.net.2"]
    assert (linear.n, linear.k, linear.channels, linear.area) == (1280, 5120, 5120, 1)


def component_of(tmp_path, tensors, class_name="UNet2DConditionModel"):
    return open_model(str(write_component(tmp_path / "c", class_name, tensors))).components[0]


def plan(tmp_path, tensors, recipe="name: t", *, calibrated=False, masked=(), edges=()):
    component = component_of(tmp_path, tensors)
    recipe = parse_recipe(recipe, where="test")
    found = plan_layers(component, recipe, calibrated=calibrated, masked=masked, edges=edges)
    return {t.layer.name: t for t in found}


def test_tensors_that_are_no_layers(tmp_path):
    component = component_of(
        tmp_path,
        {
            "class_embedding.weight": [1000, 64],
            "pos_embed": [16, 64],
            "norm.weight": [64],
            "conv3d.weight": [8, 8, 3, 3, 3],
            "a.weight": [64, 64],
            "a.bias": [64],
        },
    )
    assert [(layer.name, layer.bias) for layer in list_layers(component)] == [("a", True)]


def test_k_that_the_kernels_cannot_read_stays_in_16_bit(tmp_path):
    found = plan(tmp_path, {"a.weight": [8, 24], "b.weight": [8, 4, 3, 3], "c.weight": [8, 16]})
    assert found["a"].scheme is None
    assert "K 24 is not a multiple of 16" in found["a"].reason
    assert "4 channels x 9 taps, K 36" in found["b"].reason
    assert found["c"].scheme is not None


def test_masked_layer_that_cannot_be_sparse_is_dense_with_a_reason(tmp_path):
    tensors = {"a.weight": [8, 48], "b.weight": [8, 2, 4, 4], "c.weight": [8, 64]}
    found = plan(tmp_path, tensors, masked=("a", "b", "c"))
    assert found["a"].scheme.sparsity is None
    assert "K 48 is not a multiple of 32" in found["a"].reason
    assert "2 channels are not a multiple of 4" in found["b"].reason
    assert found["c"].scheme.sparsity == TWO_OF_FOUR


def test_layer_without_a_mask_says_so_when_one_was_wanted(tmp_path):
    found = plan(tmp_path, {"a.weight": [8, 64]}, "{name: t, sparsity: {}}")
    assert found["a"].reason == "dense: no mask was chosen"
    assert found["a"].scheme.sparsity is None


def test_masks_that_the_format_does_not_hold_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="pattern 1:4: the packed format only has 2:4"):
        plan(tmp_path, {"a.weight": [8, 64]}, "{name: t, sparsity: {pattern: '1:4'}}", masked="a")


@pytest.mark.parametrize(
    ("shape", "message"),
    [([8, 64], "K 64 is not a multiple of group size 48"), ([8, 32, 3, 3], "C 32 is not")],
    ids=["linear", "conv2d"],
)
def test_group_size_must_divide(tmp_path, shape, message):
    with pytest.raises(ShapeError, match=message):
        plan(tmp_path, {"a.weight": shape}, "{name: t, weight: {granularity: 'group:48'}}")


def test_static_activations_need_a_calibration(tmp_path):
    text = "{name: t, activation: {mode: static, buckets: 2}}"
    with pytest.raises(RecipeError, match=r"a: activation\.mode static needs statistics"):
        plan(tmp_path, {"a.weight": [8, 64]}, text)
    shutil.rmtree(tmp_path / "c")
    found = plan(
        tmp_path, {"a.weight": [8, 64]}, text, calibrated=True, edges=(250.0, 500.0, 750.0)
    )
    assert found["a"].scheme.buckets == (500.0,)
    assert found["a"].scheme.activation is Activation.STATIC


def test_smoothing_needs_a_calibration_and_an_fp8_input(tmp_path):
    text = "{name: t, smooth: 0.5, overrides: [{layers: [b], activation: {mode: none}}]}"
    tensors = {"a.weight": [8, 64], "b.weight": [8, 64]}
    with pytest.raises(RecipeError, match="smooth needs statistics"):
        plan(tmp_path, tensors, text)
    shutil.rmtree(tmp_path / "c")
    found = plan(tmp_path, tensors, text, calibrated=True)
    assert (found["a"].scheme.smooth, found["b"].scheme.smooth) == (True, False)


def test_overrides_reach_what_the_family_keeps(tmp_path):
    tensors = {"conv_in.weight": [32, 32, 1, 1], "a.weight": [32, 32], "b.weight": [32, 32]}
    found = plan(
        tmp_path,
        tensors,
        "{name: t, keep: ['?'], overrides: [{layers: [conv_in, a], keep: false},"
        " {layers: [a], weight: {granularity: tensor}}, {layers: [a], weight: {}}]}",
    )
    assert found["conv_in"].scheme is not None
    assert found["b"].reason == "kept by the recipe"
    assert found["a"].scheme.granularity == PerChannel()


@pytest.mark.parametrize(
    ("buckets", "wanted"),
    [
        (1, ()),
        (2, (20.0,)),
        (4, (10.0, 20.0, 30.0)),
        ("auto", (10.0, 20.0, 30.0)),
        ((10.0, 30.0), (10.0, 30.0)),
    ],
    ids=str,
)
def test_static_scales_use_some_of_the_stored_edges(buckets, wanted):
    assert choose_edges(ActivationRecipe(buckets=buckets), (10.0, 20.0, 30.0)) == wanted


@pytest.mark.parametrize(
    ("buckets", "message"),
    [(3, "has 4 buckets, which cannot be merged into 3"), ((10.0, 15.0), "edge 15 is not one of")],
    ids=str,
)
def test_buckets_that_were_not_stored_are_refused(buckets, message):
    with pytest.raises(RecipeError, match=message):
        choose_edges(ActivationRecipe(buckets=buckets), (10.0, 20.0, 30.0))


def test_timestep_is_found_however_it_is_passed():
    def forward(sample, timestep, encoder_hidden_states=None):
        raise AssertionError

    assert timestep_argument(forward, (1, 2), {}) == 2
    assert timestep_argument(forward, (1,), {"timestep": 3}) == 3
    assert timestep_argument(forward, (), {"timestep": 4, "sample": 0}) == 4


def test_an_edge_belongs_to_the_bucket_above_it():
    assert [bucket_of(t, (10.0, 20.0)) for t in (0, 9.9, 10, 19, 20, 999)] == [0, 0, 1, 1, 2, 2]
    assert bucket_of(5.0, ()) == 0


# Opening


def test_pipeline_names_its_denoiser(pipeline_dir, transformer_pipeline_dir):
    model = open_model(str(pipeline_dir))
    assert model.is_pipeline
    (unet,) = model.components
    assert (unet.name, unet.family.name, unet.path) == ("unet", "unet", pipeline_dir / "unet")
    assert unet.shards == (pipeline_dir / "unet" / "diffusion_pytorch_model.safetensors",)
    assert unet.index is None
    (transformer,) = open_model(str(transformer_pipeline_dir)).components
    assert (transformer.name, transformer.family.name) == ("transformer", "sd3")


def test_component_alone_has_no_name(transformer_dir):
    model = open_model(str(transformer_dir))
    assert not model.is_pipeline
    assert (model.components[0].name, model.components[0].family.name) == ("", "pixart")


def test_shards_come_from_the_index(tmp_path):
    path = write_component(tmp_path / "c", "UNet2DConditionModel", {})
    stem = "diffusion_pytorch_model"
    (path / f"{stem}.safetensors").unlink()
    names = [f"{stem}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, layer in zip(names, "ab", strict=True):
        write_header(path / name, {f"{layer}.weight": [16, 16]})
    index = path / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b.weight": names[1], "a.weight": names[0]}}))
    component = open_model(str(path)).components[0]
    assert [shard.name for shard in component.shards] == names
    assert component.index == index
    assert [layer.name for layer in list_layers(component)] == ["a", "b"]
    write_header(path / names[1], {"a.weight": [16, 16]})
    with pytest.raises(ModelError, match=f"a.weight is in {names[0]} too"):
        list_layers(component)
    (path / names[1]).unlink()
    with pytest.raises(ModelError, match=r"00002-of-00002.safetensors: missing shard"):
        open_model(str(path))
    index.write_text(json.dumps({"weight_map": {"a.weight": "../a.safetensors"}}))
    with pytest.raises(ModelError, match=r"names the file '\.\./a\.safetensors', expected"):
        open_model(str(path))
    table = {"b.weight": names[1], "a.weight": names[0]}
    index.write_text(json.dumps({"metadata": "x", "weight_map": table}))
    with pytest.raises(ModelError, match="metadata is 'x', expected an object"):
        open_model(str(path))


def test_a_variant_is_taken_when_there_is_no_plain_file(tmp_path):
    path = write_component(tmp_path / "c", "UNet2DConditionModel", {"a.weight": [16, 16]})
    plain = path / "diffusion_pytorch_model.safetensors"
    variant = plain.rename(path / "diffusion_pytorch_model.fp16.safetensors")
    component = open_model(str(path)).components[0]
    assert (component.shards, component.variant) == ((variant,), "fp16")
    with pytest.raises(ModelError, match="no weights of variant int8, found fp16; choose"):
        open_model(str(path), variant="int8")
    shutil.copy(variant, path / "diffusion_pytorch_model.bf16.safetensors")
    with pytest.raises(ModelError, match="found the variants bf16, fp16, expected one") as caught:
        open_model(str(path))
    assert caught.value.fields == ("variant",)
    chosen = open_model(str(path), variant="fp16").components[0]
    assert (chosen.shards, chosen.variant, chosen.has_plain) == ((variant,), "fp16", False)
    with pytest.raises(ModelError, match=r"variant '\*': expected a word as fp16"):
        open_model(str(path), variant="*")
    shutil.copy(variant, plain)
    assert open_model(str(path)).components[0].variant is None


def config(text):
    return lambda path: (path / "config.json").write_text(text)


def index(text):
    return lambda path: (path / "model_index.json").write_text(text)


def weights(action):
    return lambda path: action(path / "diffusion_pytorch_model.safetensors")


#: name -> (what is done to a component directory, what is said of it)
BROKEN = {
    "empty": (
        lambda path: (path / "config.json").unlink(),
        "not a diffusers directory: found neither model_index.json .* nor config.json",
    ),
    "not json": (config("{"), "config.json: not JSON"),
    "list": (config("[]"), "found list, expected a JSON object"),
    "no class": (config("{}"), "neither _class_name nor architectures"),
    "text encoder": (
        config('{"architectures": ["T5EncoderModel"], "model_type": "t5"}'),
        r"no weights: model\.safetensors is missing",
    ),
    "unknown": (config('{"_class_name": "VQModel"}'), "VQModel is no denoiser"),
    "packed": (
        config('{"_class_name": "X", "quantization_config": {"quant_method": "quantkit"}}'),
        r"packed already \(by quantkit\)",
    ),
    "no weights": (
        weights(Path.unlink),
        "no weights: diffusion_pytorch_model.safetensors is missing",
    ),
    "pickled": (weights(lambda w: w.rename(w.with_suffix(".bin"))), "only pickled weights"),
    "no map": (
        weights(lambda w: w.with_name(f"{w.name}.index.json").write_text("{}")),
        "no weight_map",
    ),
    "pipeline without unet": (
        index('{"vae": ["diffusers", "AutoencoderKL"]}'),
        r"names no unet or transformer \(found vae\)",
    ),
    "unknown pipeline": (
        index('{"transformer": ["diffusers", "SD3ControlNetModel"]}'),
        r"names no unet or transformer \(found transformer\)",
    ),
    "pipeline without folder": (
        index('{"unet": ["diffusers", "UNet2DConditionModel"]}'),
        "unet: missing, though model_index.json names it",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_directory_is_named(tmp_path, damage, message):
    path = write_component(tmp_path / "c", "UNet2DConditionModel", {"a.weight": [16, 16]})
    damage(path)
    with pytest.raises(ModelError, match=message) as caught:
        open_model(str(path))
    assert "\n" not in str(caught.value)


def test_path_that_is_nothing(tmp_path):
    with pytest.raises(ModelError, match="no such directory, and not a hub id"):
        open_model(str(tmp_path / "none"))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="a single file has no config; give the directory"):
        open_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("F8_E4M3FNUZ", "FP8 of MI300"),
        ("F8_E4M3", "found F8_E4M3, expected one of F16"),
        ("I8", "I8"),
    ],
)
def test_weights_of_other_dtypes_are_refused(tmp_path, dtype, message):
    path = write_component(tmp_path / "c", "UNet2DConditionModel", {})
    write_header(path / "diffusion_pytorch_model.safetensors", {"a.weight": [16, 16]}, dtype)
    with pytest.raises(ModelError, match=rf"a\.weight: .*{message}"):
        list_layers(open_model(str(path)).components[0])


def test_empty_weight_and_truncated_file_are_refused(tmp_path):
    component = component_of(tmp_path, {"a.weight": [0, 16]})
    with pytest.raises(ModelError, match=r"shape \(0, 16\) holds no weights"):
        list_layers(component)
    write_header(component.shards[0], {"a.weight": [16, 16]})
    with component.shards[0].open("r+b") as file:
        file.truncate(component.shards[0].stat().st_size - 1)
    with pytest.raises(ModelError, match="truncated"):
        list_layers(component)


# The hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of huggingface_hub with one snapshot to fill."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--someone--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_hub_id_is_found_in_the_cache(hub, pipeline_dir, monkeypatch):
    shutil.copytree(pipeline_dir, hub)
    model = open_model("someone/model")
    assert model.path == hub
    assert [c.name for c in model.components] == ["unet"]


def test_hub_id_that_cannot_be_fetched_is_one_line(hub):
    with pytest.raises(ModelError, match="someone/other: cannot be fetched from the hub") as caught:
        open_model("someone/other")
    assert "\n" not in str(caught.value)
