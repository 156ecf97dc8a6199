"""Tiny models of every denoiser class of diffusers: packed, verified, loaded, run, saved again."""

import json

import pytest
import torch
from click.testing import CliRunner
from diffusers.utils import logging

import quantkit
from quantkit.cli import quantkit as command
from quantkit.errors import ModelError
from quantkit.models.component_layers import list_layers
from quantkit.models.families import FAMILIES
from quantkit.models.family import CONDITION, FEW, FIRST, LAST, MODULATION, TEXT, UNKNOWN
from quantkit.models.general_family import GENERAL
from quantkit.models.layer_plan import plan_layers
from quantkit.models.source import of_family, open_model
from quantkit.recipe.load import parse_recipe
from tests.support.denoiser_classes import ROWS
from tests.support.headers import write_component
from tests.support.tiny_denoisers import answer, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

#: recipe -> (its text, what the answers may differ by: NMSE)
RECIPES = {
    "fp8": ("{name: fp8}", 0.05),
    "int8": ("{name: int8, weight: {format: int8}, data_free: true}", 0.01),
    "int4": ("{name: int4, weight: {format: int4}, data_free: true}", 0.2),
}
#: Every class in FP8, and some of the others, with convolutions and experts among them.
OTHERS = {
    "int8": {"CogView4Transformer2DModel", "Kandinsky3UNet", "WanTransformer3DModel"},
    "int4": {"HiDreamImageTransformer2DModel", "QwenImageTransformer2DModel", "StableCascadeUNet"},
}
CASES = [(row, "fp8") for row in ROWS] + [
    (row, fmt) for fmt, names in OTHERS.items() for row in ROWS if row.class_name in names
]


@pytest.fixture(autouse=True)
def _quiet_diffusers():
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    yield
    logging.set_verbosity(level)


@pytest.mark.parametrize(("row", "fmt"), CASES, ids=lambda x: getattr(x, "class_name", x))
def test_any_denoiser_is_packed_and_answers_as_before(row, fmt, tmp_path):
    text, allowed = RECIPES[fmt]
    model = tiny_model(row)
    before = answer(model)
    model.save_pretrained(tmp_path / "model")
    recipe = parse_recipe(text, where="test")
    summary = quantkit.pack(tmp_path / "model", output=tmp_path / "packed", recipe=recipe)
    quantkit.verify(tmp_path / "packed")
    loaded = type(model).from_pretrained(tmp_path / "packed")
    packed = [name for name, module in loaded.named_modules() if hasattr(module, "scheme")]
    assert len(packed) == sum(summary.by_scheme().values()) > 0
    after = answer(loaded)
    error = float((after - before).square().sum() / before.square().sum())
    assert 0 < error < allowed
    if fmt != "fp8":
        loaded.save_pretrained(tmp_path / "again")
        assert torch.equal(answer(type(model).from_pretrained(tmp_path / "again")), after)


@pytest.mark.parametrize("family", FAMILIES[1:], ids=lambda family: family.name)
def test_the_family_recipe_packs_its_class(family, tmp_path):
    (row,) = [row for row in ROWS if row.class_name in family.class_names]
    model = tiny_model(row)
    before = answer(model)
    model.save_pretrained(tmp_path / "model")
    quantkit.pack(tmp_path / "model", output=tmp_path / "packed", recipe="fp8")
    after = answer(type(model).from_pretrained(tmp_path / "packed"))
    assert 0 < float((after - before).square().sum() / before.square().sum()) < 0.05


# What is a layer, and what stays in 16 bit


@pytest.mark.parametrize(
    ("class_name", "kind"),
    [
        ("Kandinsky3UNet", "ConvTranspose2d"),
        ("StableCascadeUNet", "ConvTranspose2d"),
        ("WanTransformer3DModel", "Conv3d"),
        ("UNet3DConditionModel", "Conv3d"),
        ("GlmImageTransformer2DModel", "Embedding"),
        ("StableAudioDiTModel", "Conv1d"),
        ("DreamLiteUNetModel", "depthwise"),
        ("SanaVideoTransformer3DModel", "depthwise"),
    ],
)
def test_other_kinds_are_left_alone(class_name, kind, tmp_path):
    (row,) = [row for row in ROWS if row.class_name == class_name]
    model = tiny_model(row)
    model.save_pretrained(tmp_path)
    component = of_family(open_model(tmp_path), "general").components[0]
    layers = {layer.name for layer in list_layers(component)}
    others = {name for name, module in model.named_modules() if _kind(module) == kind}
    dense = {name for name, m in model.named_modules() if _kind(m) in {"Linear", "Conv2d"}}
    assert others
    assert layers == dense


def _kind(module):
    grouped = getattr(module, "groups", 1) > 1
    return "depthwise" if grouped else type(module).__name__.removeprefix("LoRACompatible")


def test_experts_in_one_parameter_are_left_alone(tmp_path):
    (row,) = [row for row in ROWS if row.class_name.startswith("NucleusMoE")]
    model = tiny_model(row)
    model.save_pretrained(tmp_path)
    assert any(".experts." in name for name, _ in model.named_parameters())
    names = [layer.name for layer in list_layers(open_model(tmp_path).components[0])]
    assert not any(".experts." in name for name in names)


#: module path -> (shape of its weight, why it stays in 16 bit)
ROLES = {
    "img_in": ((3072, 64), FIRST),
    "unheard_of": ((3072, 64), FIRST),
    "also_unheard_of": ((64, 3072), LAST),
    "conv_out": ((4, 320, 3, 3), LAST),
    "norm_out.linear": ((6144, 3072), MODULATION),
    "norm_out.linear_2": ((64, 2304), LAST),
    "txt_in": ((3072, 3584), TEXT),
    "time_text_embed.timestep_embedder.linear_1": ((3072, 256), CONDITION),
    "transformer_blocks.0.img_mod.1": ((18432, 3072), MODULATION),
    "layers.3.adaLN_modulation.0": ((15360, 256), MODULATION),
    "transformer_blocks.0.attn.norm_q.linear": ((6144, 3072), MODULATION),
    "blocks.0.moe.router": ((64, 2048), FEW),
    "glyph_projector.net.2": ((2560, 2560), UNKNOWN),
    "transformer_blocks.0.attn.to_k": ((256, 2048), None),
    "transformer_blocks.0.img_mlp.net.0.proj": ((12288, 3072), None),
    "up_blocks.0.resnets.1.conv1": ((320, 1280, 3, 3), None),
    "single_transformer_blocks.7.proj_out": ((3072, 15360), None),
}


@pytest.mark.parametrize("name", ROLES)
def test_names_and_shapes_tell_what_stays_in_16_bit(name):
    shape, reason = ROLES[name]
    assert GENERAL.keep_reason(name, shape) == reason
    assert GENERAL.packs_alone(name, shape) == (reason in {MODULATION, TEXT, CONDITION, UNKNOWN})


def test_a_class_that_diffusers_lacks_is_one_line(tmp_path):
    import diffusers

    path = write_component(tmp_path / "c", "NewTransformer2DModel", {"a.weight": [16, 16]})
    component = open_model(path).components[0]
    wanted = f"'NewTransformer2DModel' is no model of diffusers {diffusers.__version__}; upgrade"
    with pytest.raises(ModelError, match=wanted) as caught:
        list_layers(component)
    assert "\n" not in str(caught.value)


def test_what_a_recipe_calls_no_layer_is_copied(tmp_path):
    (row,) = [row for row in ROWS if row.class_name.startswith("QwenImageT")]
    tiny_model(row).save_pretrained(tmp_path)
    component = open_model(tmp_path).components[0]
    recipe = parse_recipe(
        "{name: t, not_layers: ['*.img_mlp.*', img_in, '*_mod.1'], kept: {},"
        " overrides: [{layers: ['*'], keep: false}]}",
        where="test",
    )
    plans = plan_layers(component, recipe, calibrated=False, masked=())
    left = {p.layer.name for p in plans if p.reason == "no layer, by the recipe"}
    assert left == {
        *(f"transformer_blocks.0.img_mlp.net.{part}" for part in ("0.proj", "2")),
        *(f"transformer_blocks.0.{stream}_mod.1" for stream in ("img", "txt")),
        "img_in",
    }
    assert all((p.scheme is None) == (p.layer.name in left) for p in plans)


def test_a_recipe_names_another_family(transformer_dir, tmp_path):
    def planned(family):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"{{name: t, family: {family}}}")
        arguments = ["pack", str(transformer_dir), "-r", str(recipe), "-o", str(tmp_path / "o")]
        return CliRunner().invoke(command, [*arguments, "-n", "--json", "-q"])

    def kept(family):
        return [x["name"] for x in json.loads(planned(family).stdout)["layers"] if not x["scheme"]]

    assert kept("general") == kept("null") != []
    assert kept("unet") == []
    refused = planned("unte")
    assert isinstance(refused.exception, ModelError)
    assert "family 'unte': unknown, expected one of unet, " in str(refused.exception)


def test_headers_alone_are_read_of_tuned_families(tmp_path, monkeypatch):
    def refuse(config, *_):
        raise AssertionError(config)

    monkeypatch.setattr("quantkit.models.component_layers.read_skeleton", refuse)
    path = write_component(tmp_path / "c", "FluxTransformer2DModel", {"a.weight": [16, 16]})
    assert len(list_layers(open_model(path).components[0])) == 1
    with pytest.raises(AssertionError):
        list_layers(of_family(open_model(path), "general").components[0])
