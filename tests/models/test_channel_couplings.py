"""Which channels of a model may change places."""

import json

import pytest

from quantkit.models.channel_couplings import RULES, find_couplings
from quantkit.models.layers import list_layers
from quantkit.models.source import open_model
from tests.golden.make_keys import MODELS
from tests.support.headers import golden_keys, write_component
from tests.support.permutations import PIPELINES, couplings_of
from tests.support.pipelines import tiny_transformer_pipeline


def test_joint_attention_moves_both_streams_alike(tmp_path):
    model = open_model(str(tiny_transformer_pipeline(tmp_path / "sd3")))
    joint = [c for c in couplings_of(model) if c.producers[0].name.endswith("to_v")]
    ends = [
        tuple(layer.name.partition(".attn.")[2] for layer in (*c.producers, *c.consumers))
        for c in joint
    ]
    # The last block does not answer for the text.
    assert ends == [
        ("to_v", "add_v_proj", "to_out.0", "to_add_out"),
        ("to_v", "add_v_proj", "to_out.0"),
    ]
    assert {c.block for c in joint} == {32}


#: model -> couplings, and the share of the weights whose groups they change
PUBLISHED = {"sd15": (48, 0.09), "sdxl": (210, 0.24), "flux1_dev": (133, 0.3)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_couplings(tmp_path, name):
    keys = golden_keys(name)
    path = write_component(tmp_path / name, keys["class_name"], keys["tensors"])
    config = {"_class_name": keys["class_name"], **keys["config"]}
    (path / "config.json").write_text(json.dumps(config))
    found = couplings_of(open_model(str(path)))
    weights = sum(layer.n * c.channels for c in found for layer in c.consumers)
    assert name in MODELS
    assert (len(found), round(weights / keys["parameters"], 2)) == PUBLISHED[name]


FF = {
    "a.ff.net.0.proj.weight": [64, 16],
    "a.ff.net.0.proj.bias": [64],
    "a.ff.net.2.weight": [16, 32],
}

ATTENTION = {f"a.attn.{name}.weight": [32, 32] for name in ("to_q", "to_k", "to_v", "to_out.0")}

SINGLE = {
    "a.attn.to_v.weight": [32, 32],
    "a.proj_mlp.weight": [64, 32],
    "a.proj_out.weight": [32, 96],
}


def found_in(tmp_path, tensors, heads=2):
    model = open_model(str(write_component(tmp_path / "m", "UNet2DConditionModel", tensors)))
    layers = {layer.name: layer for layer in list_layers(model.components[0])}
    return find_couplings(model.components[0], layers, {"a.attn": heads} if heads else {})


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [(FF, [(32, 32, 0)]), (ATTENTION, [(32, 16, 0)]), (SINGLE, [(32, 16, 0), (64, 64, 32)])],
    ids=["feed-forward", "attention", "single"],
)
def test_whole_patterns_are_found(tmp_path, tensors, expected):
    found = found_in(tmp_path, tensors)
    assert [(c.channels, c.block, c.start) for c in found] == expected


@pytest.mark.parametrize(
    ("tensors", "change", "heads"),
    [
        (FF, {"a.ff.net.2.weight": None}, 2),
        (FF, {"a.ff.net.0.proj.weight": None}, 2),
        (FF, {"a.ff.net.0.proj.weight": [96, 16]}, 2),
        (FF, {"a.ff.net.2.weight": [16, 32, 1, 1]}, 2),
        (FF, {"a.ff.net.1.weight": [32]}, 2),
        (ATTENTION, {"a.attn.to_out.0.weight": None}, 2),
        (ATTENTION, {"a.attn.to_v.weight": None, "a.attn.to_qkv.weight": [96, 32]}, 2),
        (ATTENTION, {"a.attn.to_v.weight": [16, 32]}, 2),
        (ATTENTION, {"a.attn.add_v_proj.weight": [16, 32]}, 2),
        (ATTENTION, {"a.attn.to_add_out.weight": [32, 64]}, 2),
        (ATTENTION, {"a.attn.processor.to_v_ip.0.weight": [32, 32]}, 2),
        (ATTENTION, {"a.attn.norm_v.weight": [32]}, 2),
        (ATTENTION, {}, 0),
        (ATTENTION, {}, 3),
        (SINGLE, {"a.proj_mlp.weight": None}, 2),
        (SINGLE, {"a.proj_mlp.weight": [32, 32], "a.attn.to_v.weight": [16, 32]}, 2),
        (SINGLE, {"a.attn.to_v.weight": None}, 2),
    ],
)  # fmt: skip
def test_patterns_in_part_are_left_alone(tmp_path, tensors, change, heads):
    changed = {name: shape for name, shape in (tensors | change).items() if shape}
    assert found_in(tmp_path, changed, heads) == ()


def test_every_rule_is_for_a_tiny_model(tmp_path):
    """A rule that no real module shows to be right would be a guess."""
    seen = set()
    for name, make in PIPELINES.items():
        for coupling in couplings_of(open_model(str(make(tmp_path / name)))):
            path = coupling.producers[0].name
            seen |= {
                rule
                for rule in RULES
                if path.endswith("." + rule.producers[0])
                and any(
                    layer.name.endswith("." + rule.consumers[0]) for layer in coupling.consumers
                )
            }
    assert seen == set(RULES)
