"""Keys and values of a prompt: kept while its embedding is the same, else computed."""

import copy
import gc
import pickle
import shutil
import weakref
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
from quantkit.inference.layers.prompts import PromptLinear, keep_prompts
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.loading import plain, unet_class
from tests.support.packed import pack_component, packed_module

TOKEN = Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN)
BUCKETS = Scheme(E4M3FN, PerChannel(), None, Activation.STATIC, (300.5, 600.5))


def attention(scheme=TOKEN, *, cross=48):
    """Return a model of one cross-attention, whose projections are packed."""
    torch.manual_seed(0)
    module = Attention(32, cross_attention_dim=cross, heads=2, dim_head=16)
    for name in ("to_q", "to_k", "to_v"):
        setattr(module, name, packed_module(getattr(module, name), scheme, name=name))
    model = nn.Sequential(module).eval()
    prompts.install(model)
    return model


@pytest.fixture
def computed(monkeypatch):
    """The names of the layers that are computed, as they are called."""
    names: list[str] = []
    forward = PackedLinear.forward

    def counted(self, x):
        names.append(self.name)
        return forward(self, x)

    monkeypatch.setattr(PackedLinear, "forward", counted)
    return names


@pytest.fixture
def model(computed):
    """A model whose layers have kept their results of ``prompt``."""
    made = attention()
    made.pixels, made.prompt = torch.randn(2, 6, 32), torch.randn(2, 5, 48)
    with torch.no_grad():
        made.wanted = [made[0](made.pixels, made.prompt) for _ in range(2)][1]
    computed.clear()
    return made


@torch.no_grad()
def test_the_same_embedding_is_projected_once_per_picture(model, computed):
    for _ in range(3):
        assert torch.equal(model[0](model.pixels, model.prompt), model.wanted)
    assert computed == ["to_q"] * 3


@torch.no_grad()
def test_an_embedding_that_comes_once_costs_no_memory(model, computed):
    """As of models that project it themselves, at every step."""
    steps = [model.prompt.clone() for _ in range(3)]
    for prompt in steps:
        assert torch.equal(model[0](model.pixels, prompt), model.wanted)
    assert computed.count("to_k") == computed.count("to_v") == 3
    assert [e.result for e in model[0].to_k.kept.entries] == [None, None]


def written(model):
    model.prompt.mul_(1.25)


def written_through_a_view(model):
    model.prompt[:, 1:].neg_()


def written_by_a_detached_one(model):
    model.prompt.detach().mul_(1.25)


def given_other_data(model):
    model.prompt.data = model.prompt * 1.25


def shortened(model):
    model.prompt = model.prompt[:, :3]


def of_one_picture(model):
    model.prompt, model.pixels = model.prompt[:1], model.pixels[:1]


def transposed(model):
    model.prompt = model.prompt[:, :, :32].as_strided((2, 5, 48), (240, 1, 5))


def replaced_at_its_address(model):
    memory = bytearray(model.prompt.numpy().tobytes())
    model.prompt = torch.frombuffer(memory, dtype=torch.float32).view(2, 5, 48)
    address = model.prompt.data_ptr()
    assert all(torch.equal(model[0](model.pixels, model.prompt), model.wanted) for _ in range(3))
    model.prompt = None
    memory[:] = (torch.frombuffer(memory, dtype=torch.float32) * 1.25).numpy().tobytes()
    model.prompt = torch.frombuffer(memory, dtype=torch.float32).view(2, 5, 48)
    assert model.prompt.data_ptr() == address


def cast(model):
    model.half()
    model.prompt, model.pixels = model.prompt.half(), model.pixels.half()


def scaled_weights(model):
    model[0].to_k.weight_scale.mul_(1.25)


def filled_weights(model):
    model[0].to_v.fill("weight_scale", model[0].to_v.weight_scale * 1.25)


def loaded_weights(model):
    state = {name: t * 1.25 if "scale" in name else t for name, t in model.state_dict().items()}
    model.load_state_dict(state)


CHANGES = [
    written, written_through_a_view, written_by_a_detached_one, given_other_data, shortened,
    of_one_picture, transposed, replaced_at_its_address, cast, scaled_weights, filled_weights,
    loaded_weights,
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_is_computed_again(model, change):
    change(model)
    found = [model[0](model.pixels, model.prompt) for _ in range(3)]
    keep_prompts(model, enabled=False)
    wanted = model[0](model.pixels, model.prompt)
    assert wanted.shape != model.wanted.shape or not torch.equal(wanted.float(), model.wanted)
    assert all(torch.equal(y, wanted) for y in found)


@torch.no_grad()
def test_a_result_that_somebody_wrote_over_is_not_given_again(model, computed):
    layer = model[0].to_k
    wanted = layer(model.prompt).clone()
    layer(model.prompt).zero_()
    assert torch.equal(layer(model.prompt), wanted)
    assert computed == ["to_k"]


def hooked(model):
    model[0].to_k.register_forward_hook(lambda *_: None)


def offloaded(model):
    model[0].to_k.forward = model[0].to_k.forward


def trained(model):
    model.train()


@torch.no_grad()
@pytest.mark.parametrize("watch", [hooked, offloaded, trained], ids=lambda watch: watch.__name__)
def test_a_layer_that_is_watched_is_computed(model, computed, watch):
    watch(model)
    assert torch.equal(model[0](model.pixels, model.prompt), model.wanted)
    assert "to_k" in computed


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_other_modes_of_autograd_compute(model, computed, mode):
    """No version is counted in inference mode, and a kept result has no gradient."""
    with mode():
        for _ in range(3):
            assert torch.equal(model[0](model.pixels, model.prompt), model.wanted)
    assert computed == ["to_q", "to_k", "to_v"] * 3


def test_an_embedding_of_inference_mode_is_computed(model, computed):
    with torch.inference_mode():
        prompt = model.prompt * 1.0
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model[0](model.pixels, prompt), model.wanted)
    assert computed.count("to_k") == 3


@torch.no_grad()
def test_another_back_end_computes(model, computed):
    with use(Backend.REFERENCE):
        model[0](model.pixels, model.prompt)
    assert computed == ["to_q", "to_k", "to_v"]


@torch.no_grad()
def test_two_prompts_by_turns_are_both_kept(model, computed):
    """As of guidance that calls the model twice a step; a third takes the place of the first."""
    other = torch.randn(2, 5, 48)
    for _ in range(2):
        model[0](model.pixels, other)
        model[0](model.pixels, model.prompt)
    computed.clear()
    model[0](model.pixels, other)
    assert torch.equal(model[0](model.pixels, model.prompt), model.wanted)
    assert computed == ["to_q"] * 2
    others = [torch.randn(2, 5, 48) for _ in range(4)]
    for prompt in others:
        model[0](model.pixels, prompt)
    assert len(model[0].to_k.kept.entries) == 2


@torch.no_grad()
def test_a_view_that_is_made_anew_is_the_same_embedding(model, computed):
    for _ in range(4):
        model[0](model.pixels[:1], model.prompt[1:])
    assert computed.count("to_k") == 2


@torch.no_grad()
def test_results_are_freed_with_their_embedding(model):
    kept = [e.result for e in model[0].to_k.kept.entries]
    alive = weakref.ref(kept[0])
    del kept
    assert alive() is not None
    model.prompt = None
    gc.collect()
    assert alive() is None
    assert model[0].to_k.kept.entries == ()


@torch.no_grad()
def test_copies_and_pickles_start_anew(model):
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made[0].to_k) is PromptLinear
        assert made[0].to_k.kept.entries == ()
        made[0].to_k.weight_scale.mul_(2)
        assert not torch.equal(made[0](model.pixels, model.prompt), model.wanted)
    assert torch.equal(model[0](model.pixels, model.prompt), model.wanted)


def test_only_what_reads_the_prompt_keeps():
    assert type(attention()[0].to_q) is PackedLinear
    assert type(attention(cross=None)[0].to_k) is PackedLinear
    # A bucket's scale is another one at another step.
    assert type(attention(BUCKETS)[0].to_k) is PackedLinear


@torch.no_grad()
def test_it_is_switched_off_and_on(model, computed):
    assert keep_prompts(model, enabled=False) == 2
    model[0](model.pixels, model.prompt)
    assert computed == ["to_q", "to_k", "to_v"]
    assert keep_prompts(model) == 2
    for _ in range(3):
        assert torch.equal(model[0](model.pixels, model.prompt), model.wanted)
    assert computed.count("to_k") == 3


@torch.no_grad()
def test_joined_projections_keep_theirs(model, computed):
    fuse_projections(model[0])
    apart = torch.cat([model[0].to_k(model.prompt), model[0].to_v(model.prompt)], -1)
    computed.clear()
    assert all(torch.equal(model[0].to_kv(model.prompt), apart) for _ in range(4))
    assert computed == ["to_kv"] * 2
    other = attention()
    keep_prompts(other, enabled=False)
    fuse_projections(other[0])
    assert other[0].to_kv.kept is None


@torch.no_grad()
def test_a_compiled_step_computes_without_a_graph_break(model):
    torch._dynamo.reset()
    compiled = torch.compile(model[0], fullgraph=True, backend="eager")
    prompts_ = [model.prompt, torch.randn(2, 5, 48)]
    for prompt in prompts_:
        found = [compiled(model.pixels, prompt) for _ in range(3)]
        assert all(torch.equal(y, model[0](model.pixels, prompt)) for y in found)
    prompts_[1].mul_(2)
    assert torch.equal(compiled(model.pixels, prompts_[1]), model[0](model.pixels, prompts_[1]))


# ------------------------------------------------------------------------------------ pipelines


@pytest.fixture(scope="module")
def folder(pipeline_dir, tmp_path_factory):
    """A pipeline whose cross-attention is packed."""
    path = tmp_path_factory.mktemp("prompts") / "packed"
    shutil.copytree(pipeline_dir, path)
    dense = unet_class().from_pretrained(path / "unet")
    layers = [n for n, _ in dense.named_modules() if n.endswith(("attn2.to_k", "attn2.to_v"))]
    pack_component(path / "unet", dict.fromkeys(layers, TOKEN))
    return path


def draw(pipe, prompt="a red square", steps=3, **options):
    generator = torch.Generator().manual_seed(0)
    made = pipe(prompt, num_inference_steps=steps, output_type="pt", generator=generator, **options)
    return made.images


def test_pictures_are_the_same_to_the_bit(folder, computed):
    pipe = quantkit.load_pipeline(folder)
    layers = keep_prompts(pipe)
    assert layers > 0
    calls: list[dict[str, Any]] = [
        {},
        {"prompt": "a blue one"},
        {"guidance_scale": 1.0},
        {"num_images_per_prompt": 2},
        {"negative_prompt": "green"},
    ]
    kept = [draw(pipe, **options) for options in calls]
    # Of three steps the first two compute: a result is kept when its embedding comes again.
    assert len(computed) == layers * 2 * len(calls)
    keep_prompts(pipe, enabled=False)
    computed.clear()
    assert all(torch.equal(draw(pipe, **o), y) for o, y in zip(calls, kept, strict=True))
    assert len(computed) == layers * 3 * len(calls)


def test_nothing_is_kept_when_the_picture_is_drawn(folder):
    pipe = quantkit.load_pipeline(folder)
    draw(pipe)
    gc.collect()
    layers = [m for m in pipe.unet.modules() if isinstance(m, PromptLinear)]
    assert layers
    assert all(layer.kept.entries == () for layer in layers)


def test_adapters_add_to_what_is_kept(folder):
    from tests.support.adapters import branches

    def draw_with_adapter(pipe):
        state = branches(pipe.unet, 7)
        pipe.unet.load_lora_adapter(state, prefix=None, adapter_name="it")
        adapted = draw(pipe)
        pipe.unet.set_adapters("it", 0.5)
        return torch.stack([adapted, draw(pipe)])

    pipe, other = plain(folder), plain(folder)
    keep_prompts(other, enabled=False)
    before = draw(pipe)
    adapted = draw_with_adapter(pipe)
    assert torch.equal(adapted, draw_with_adapter(other))
    assert not torch.equal(adapted[0], before)
    pipe.unet.unload_lora()
    assert torch.equal(draw(pipe), before)
