"""Keys and values of a prompt in replayed steps: read, and computed anew when they have to be."""

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import nn

import quantkit
from quantkit.device.backends import Backend, use
from quantkit.inference.attention.fused_qkv import fuse_projections
from quantkit.inference.layers import prompts
from quantkit.inference.layers.modules import PackedLinear
from quantkit.inference.layers.prompts import keep_prompts
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.pipelines import recorded_step
from tests.support.packed import packed_module
from tests.support.recording import record_on_cpu

TOKEN = Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN)


class Denoiser(nn.Module):
    """Two cross-attentions, which read a prompt as a UNet's do, or another tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks: Any = nn.ModuleList(
            Attention(32, cross_attention_dim=48, heads=2, dim_head=16) for _ in range(2)
        )
        for block in self.blocks:
            for name in ("to_q", "to_k", "to_v"):
                layer = packed_module(getattr(block, name), TOKEN, name=name)
                setattr(block, name, layer)
        prompts.install(self)

    def read(self, prompt):
        return prompt

    def forward(self, pixels, prompt):
        """Return pixels."""
        for block in self.blocks:
            pixels = pixels + block(pixels, self.read(prompt))
        return pixels


@pytest.fixture
def computed(monkeypatch):
    """The names of the layers that are computed, as they are called."""
    names: list[str] = []
    forward = PackedLinear.forward

    def counted(self, x):
        names.append(self.name)
        return forward(self, x)

    monkeypatch.setattr(PackedLinear, "forward", counted)
    # A program calls operators, and no layer that could count.
    monkeypatch.setattr(recorded_step, "shorten", lambda run, inputs, device: (run, ()))
    return names


@pytest.fixture
def model(monkeypatch):
    """A model whose step is recorded, and was launched once."""
    record_on_cpu(monkeypatch)
    return Denoiser().eval()


@torch.no_grad()
def recorded(model):
    """Replay a model from now on; return pixels and a prompt that it was called with."""
    quantkit.replay(model)
    pixels, prompt = torch.randn(2, 6, 32), torch.randn(2, 5, 48)
    model(pixels, prompt)
    model(pixels, prompt)
    return pixels, prompt


@torch.no_grad()
def own(model, pixels, prompt):
    """Return the model's own answer, of which nothing was kept."""
    keep_prompts(model, enabled=False)
    quantkit.replay(model, enabled=False)
    return model(pixels, prompt)


KEYS = ["to_k", "to_v"] * 2
QUERIES = ["to_q"] * 2


@torch.no_grad()
def test_a_step_reads_them(model, computed):
    pixels, prompt = recorded(model)
    computed.clear()
    answers = [model(x, prompt) for x in (pixels, pixels * 2)]
    assert computed == QUERIES * 2
    wanted = [own(model, x, prompt) for x in (pixels, pixels * 2)]
    assert all(map(torch.equal, answers, wanted))


@torch.no_grad()
def test_another_prompt_computes_them_once(model, computed):
    pixels, prompt = recorded(model)
    other = torch.randn(2, 5, 48)
    computed.clear()
    answers = [model(pixels, p) for p in (other, other, prompt)]
    assert computed == [*KEYS, *QUERIES, *QUERIES, *KEYS, *QUERIES]
    assert all(map(torch.equal, answers, [own(model, pixels, p) for p in (other, other, prompt)]))


def written(model, prompt):
    return prompt.mul_(1.25)


def written_through_a_view(model, prompt):
    prompt[:, 1:].neg_()
    return prompt


def replaced(model, prompt):
    return prompt * 1.25


def shortened(model, prompt):
    return prompt[:, :3]


def weights_written(model, prompt):
    model.blocks[0].to_k.weight_scale.mul_(1.25)
    return prompt


def weights_replaced(model, prompt):
    layer = model.blocks[1].to_v
    layer.fill("weight_scale", layer.weight_scale * 1.25)
    return prompt


def weights_loaded(model, prompt):
    state = {name: t * 1.25 if "scale" in name else t for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    return prompt


def switched_off(model, prompt):
    keep_prompts(model, enabled=False)
    return prompt.mul_(1.25)


def fused(model, prompt):
    for block in model.blocks:
        fuse_projections(block)
    return prompt.mul_(1.25)


CHANGES = [
    written, written_through_a_view, replaced, shortened, weights_written, weights_replaced,
    weights_loaded, switched_off, fused,
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_is_computed_again(model, change):
    pixels, prompt = recorded(model)
    before = model(pixels, prompt)
    prompt = change(model, prompt)
    answers = [model(pixels, prompt) for _ in range(3)]
    assert not torch.equal(answers[0], before)
    assert all(torch.equal(y, own(model, pixels, prompt)) for y in answers)


@torch.no_grad()
def test_recordings_have_their_own(model, computed):
    """As of batches that take turns: what one computes is not the other's."""
    pixels, prompt = recorded(model)
    halves = [(pixels[:1], prompt[:1]), (pixels, prompt)]
    for x, p in halves:
        model(x, p)
    computed.clear()
    answers = [model(x, p) for x, p in halves * 2]
    assert computed == QUERIES * 4
    assert all(map(torch.equal, answers, [own(model, x, p) for x, p in halves * 2]))


@torch.no_grad()
def test_another_back_end_has_a_recording_of_its_own(model, computed):
    pixels, prompt = recorded(model)
    with use(Backend.REFERENCE):
        model(pixels, prompt)
        computed.clear()
        model(pixels, prompt)
    assert computed == QUERIES


def made_by_the_model(self, prompt):
    return prompt + 0.0


def written_by_the_model(self, prompt):
    return prompt.add_(0.0)


@torch.no_grad()
@pytest.mark.parametrize("read", [made_by_the_model, written_by_the_model])
def test_what_is_not_the_argument_is_computed_at_every_step(model, computed, monkeypatch, read):
    monkeypatch.setattr(Denoiser, "read", read)
    pixels, prompt = recorded(model)
    computed.clear()
    answer = model(pixels, prompt)
    assert sorted(computed) == sorted([*KEYS, *QUERIES])
    assert torch.equal(answer, own(model, pixels, prompt))


@torch.no_grad()
def test_a_view_of_the_argument_is_read(model, computed, monkeypatch):
    monkeypatch.setattr(Denoiser, "read", lambda _, prompt: prompt[:, 1:])
    pixels, prompt = recorded(model)
    computed.clear()
    answer = model(pixels, prompt.neg_())
    assert computed == [*KEYS, *QUERIES]
    assert torch.equal(answer, own(model, pixels, prompt))


@torch.no_grad()
def test_keys_that_somebody_writes_over_are_computed_at_every_step(model, computed, monkeypatch):
    forward = prompts.PromptLinear.forward
    monkeypatch.setattr(
        prompts.PromptLinear,
        "forward",
        lambda self, x: forward(self, x).mul_(2) if self.name == "to_k" else forward(self, x),
    )
    pixels, prompt = recorded(model)
    computed.clear()
    answers = [model(pixels, prompt) for _ in range(2)]
    assert computed == ["to_q", "to_k"] * 4
    assert all(torch.equal(y, own(model, pixels, prompt)) for y in answers)


def test_inference_mode_computes_them_at_every_step(model, computed):
    with torch.inference_mode():
        quantkit.replay(model)
        pixels, prompt = torch.randn(2, 6, 32), torch.randn(2, 5, 48)
        model(pixels, prompt)
        computed.clear()
        answer = model(pixels, prompt.neg_())
    assert sorted(computed) == sorted([*KEYS, *QUERIES])
    with torch.no_grad():
        computed.clear()
        again = [model(pixels, prompt) for _ in range(2)]
        assert torch.equal(again[1], answer)
        assert computed.count("to_k") > 2
        assert torch.equal(answer, own(model, pixels, prompt))
