"""Layers whose weights a module hands to functions of torch, which stay in 16 bit."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import quantkit
from quantkit.inference.layers.layer_summary import packed_layers
from quantkit.models.skeleton import why_none_packed
from quantkit.models.weight_readers import readers
from quantkit.recipe.load import parse_recipe
from tests.support.denoiser_classes import ROWS
from tests.support.encoders import ENCODERS, make_encoder
from tests.support.tiny_denoisers import answer, tiny_model


class Reading(nn.Module):
    """One layer for each way to use it; some only through a method, a closure or a processor."""

    read: nn.Linear
    inner: nn.Linear
    helped: nn.Linear
    called: nn.Linear
    asked: nn.Linear
    both: nn.Linear
    passed: nn.Linear
    listed: Any

    def __init__(self):
        super().__init__()
        names = ("read", "inner", "helped", "called", "asked", "both", "passed", "processed")
        for name in names:
            setattr(self, name, nn.Linear(4, 4))
        self.listed = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.weight = nn.Parameter(torch.ones(4))
        self.processor = Processor()

    @torch.no_grad()
    def forward(self, x):
        x = functional.linear(x, self.read.weight, self.read.bias) * self.weight
        x = torch.stack([functional.linear(part, self.inner.weight) for part in (x, x)])
        x = self.called(x.to(self.asked.weight.dtype)) + self.asked(x)
        x = self.both(x) + functional.linear(x, self.both.weight)
        x = functional.linear(x, self.listed[1].weight) + self.listed[0](x)
        return self.processor(self, self.help(x, self.passed))

    def help(self, x, layer):
        return functional.linear(layer(x), self.helped.weight)

    def never(self, x):
        return functional.linear(x, self.called.weight)


class Processor:
    def __call__(self, module, x):
        return functional.linear(x, module.processed.weight)


def test_layers_are_found_that_are_read_and_never_called():
    model = nn.Sequential(Reading())
    found = readers(model)
    read = {"read", "inner", "helped", "listed.1"}
    assert found == dict.fromkeys((f"0.{n}" for n in read), "Reading") | {
        "0.processed": "Processor"
    }
    reasons = why_none_packed(model)
    assert "Reading reads this weight itself" in reasons["0.read"]
    assert reasons["0.called"] == reasons["0.both"] == ""


def test_attention_of_torch_reads_its_output_projection():
    model = nn.ModuleDict({
        "a": nn.MultiheadAttention(8, 2), "t": nn.TransformerEncoderLayer(8, 2, 16)
    })  # fmt: skip
    assert readers(model).keys() == {"a.out_proj", "t.self_attn.out_proj"}


def called_and_not(model, run):
    """Return the layers that a run calls, and the others."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    called = set()
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    run(model)
    return called, layers.keys() - called


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.class_name)
def test_of_every_denoiser_no_layer_that_is_called_is_taken_for_read(row):
    model = tiny_model(row)
    called, silent = called_and_not(model, answer)
    found = readers(model).keys()
    assert not found & called
    assert found <= silent
    if row.class_name == "HunyuanDiT2DModel":
        pooler = "time_extra_emb.pooler"
        assert found == {f"{pooler}.{n}_proj" for n in "qkvc"} == silent


@pytest.mark.parametrize("class_name", ENCODERS)
def test_no_layer_of_an_encoder_is_taken_for_read(class_name):
    names = readers(make_encoder(class_name))
    assert all(name.endswith("attention.out_proj") for name in names)


def test_a_denoiser_keeps_what_it_reads_in_16_bit(tmp_path):
    (row,) = [row for row in ROWS if row.class_name == "HunyuanDiT2DModel"]
    model = tiny_model(row)
    before = answer(model)
    model.save_pretrained(tmp_path / "model")
    text = "{name: t, weight: {format: int8}, activation: {mode: none}, kept: {format: int8}}"
    recipe = parse_recipe(text, where="test")
    quantkit.pack(tmp_path / "model", output=tmp_path / "packed", recipe=recipe)
    loaded = type(model).from_pretrained(tmp_path / "packed")
    names = {layer.name for layer in packed_layers(loaded)}
    assert "time_extra_emb.timestep_embedder.linear_1" in names
    assert not any("pooler" in name for name in names)
    assert (answer(loaded) - before).norm() < 0.05 * before.norm()
