"""Uploads of before 2023, whose attention has other names: diffusers' own loader is the oracle."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import ModelError
from quantkit.models.component_layers import list_layers
from quantkit.models.source import open_model
from quantkit.models.source_tensors import (
    loaded_name,
    read_source,
    read_tensor,
    read_tensors,
    source_tensors,
)

WEIGHTS = "diffusion_pytorch_model.safetensors"
OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def old_name(name):
    for new, old in OLD.items():
        if ".attentions." in name:
            name = name.replace(f".{new}.", f".{old}.")
    return name


@pytest.fixture(scope="module")
def upload(tmp_path_factory):
    """A UNet2DModel as it was saved then, and what it computes."""
    from diffusers import UNet2DModel

    folder = tmp_path_factory.mktemp("old")
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), attention_head_dim=8,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    model.save_pretrained(folder)
    tensors = {old_name(n): t.clone() for n, t in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def run(folder):
    from diffusers import UNet2DModel

    picture = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return UNet2DModel.from_pretrained(folder)(picture, 10).sample


@pytest.mark.parametrize(
    "name",
    [
        "a.attn.query.weight",
        "attentions.query.weight",
        "a.attentions.0.query.scale",
        "a.attentions.x.key.bias",
        "a.attentions.0.query.extra.weight",
        "a.attentions.0.to_q.weight",
        "a.attentions.0.transformer_blocks.0.key.weight",
    ],
)
def test_other_names_stay(name):
    assert loaded_name(name) == name


def test_names_are_those_that_diffusers_loads(upload):
    from diffusers import UNet2DModel

    component = open_model(upload).components[0]
    (shard,) = component.shards
    state = UNet2DModel.from_pretrained(upload).state_dict()
    assert set(source_tensors(component)) == set(read_source(shard).tensors) == set(state)
    assert any(old_name(name) != name for name in state)
    for name, tensor in read_tensors(shard).items():
        assert torch.equal(tensor, state[name])
        assert torch.equal(read_tensor(shard, name), state[name])
    layers = {layer.name: layer for layer in list_layers(component)}
    assert layers["mid_block.attentions.0.to_out.0"].bias


def test_what_is_packed_of_them_loads_and_computes_the_same(upload, tmp_path):
    summary = quantkit.pack(upload, recipe="fp8", output=tmp_path / "packed")
    packed = {layer.name for layer in summary.layers if layer.scheme}
    assert "mid_block.attentions.0.to_q" in packed
    dense, coded = run(upload), run(tmp_path / "packed")
    error = float((coded - dense).norm() / dense.norm())
    # Rounding to e4m3 costs 2 % a layer; another projection in the place of one costs all.
    assert 0 < error < 0.2
    quantkit.verify(tmp_path / "packed")


def test_both_names_at_once_are_refused(upload, tmp_path):
    tensors = load_file(upload / WEIGHTS)
    name = "mid_block.attentions.0.query.weight"
    both = {**tensors, "mid_block.attentions.0.to_q.weight": tensors[name].clone()}
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
    save_file(both, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=r"to_q\.weight as .*query\.weight, too; load it with"):
        source_tensors(open_model(tmp_path).components[0])
