"""Attention on codes beside what pipelines add to a denoiser, and where they put it.

Twice each: in a 16-bit pipeline that was asked with ``quantkit.attention``, and in a packed one
whose recipe asks for it.
"""

import copy
import json
from typing import Any

import diffusers
import pytest
import torch

import quantkit
from quantkit.device import compilers, log
from quantkit.models.attention_modules import attention_modules
from quantkit.recipe.load import parse_recipe
from tests.inference.test_companions import drawn, load_ip_adapter
from tests.support.answers import step
from tests.support.kernel_cases import need
from tests.support.loading import plain, unet_class

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # accelerate's and diffusers', of their own calls
]

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"qk": "int8", "min_keys": 1}
IMAGE = {"ip_adapter_image_embeds": [torch.ones(2, 1, 24)]}


@pytest.fixture(autouse=True)
def _host():
    need(compilers.host_compiler)


@pytest.fixture(scope="module")
def folders(pipeline_dir, tmp_path_factory):
    """A pipeline whose weights are codes, and no inputs: what differs is attention."""
    folder = tmp_path_factory.mktemp("attention_companions")
    for name, section in (("packed", SETTINGS), ("plain", None)):
        values = {"name": name, "activation": {"mode": "none"}}
        values |= {"attention": section} if section else {}
        recipe = parse_recipe(json.dumps(values), where="recipe")
        quantkit.pack(pipeline_dir, recipe=recipe, output=folder / name)
    return folder


@pytest.fixture(params=["16-bit", "packed"])
def pipes(request, pipeline_dir, folders):
    """A pipeline with attention on codes, and the same with torch's."""
    if request.param == "packed":
        return plain(folders / "packed"), plain(folders / "plain")
    pipe, other = (plain(pipeline_dir, torch_dtype=torch.float32) for _ in range(2))
    quantkit.attention(pipe, **SETTINGS)
    return pipe, other


def counted(draw):
    """Return what it draws, and how many calls of attention ran on codes."""
    with log.record() as seen:
        picture = draw()
    return picture, sum(n for (op, _, _), n in seen.calls.items() if op == "attention_int8")


def processors(pipe):
    return {name: type(m.processor).__name__ for name, m in attention_modules(pipe.unet)}


def kept(pipe):
    """Return the modules whose processors are diffusers' own now, as doctor's reasons name them."""
    copied = copy.deepcopy(pipe.unet)
    return quantkit.attention(copied, **SETTINGS).kept


def assert_near(found, wanted, without):
    """As far from torch's attention as codes take it: little beside what the companion does."""
    effect = float((wanted - without).abs().mean())
    assert effect > 0.005
    assert float((found - wanted).abs().mean()) < effect / 4


def test_an_ip_adapter_is_loaded_scaled_and_unloaded(pipes):
    pipe, other = pipes
    before, whole = counted(lambda: drawn(pipe))
    without = drawn(other)
    for one in pipes:
        load_ip_adapter(one)
    found, fewer = counted(lambda: drawn(pipe, **IMAGE))
    assert_near(found, drawn(other, **IMAGE), without)
    # Self-attention is still on codes, cross attention is the adapter's.
    assert 0 < fewer < whole
    texts = {name for name in processors(pipe) if name.endswith("attn2")}
    assert kept(pipe).keys() == texts
    assert set(kept(pipe).values()) == {"IPAdapterAttnProcessor2_0 has weights of an adapter"}
    pipe.set_ip_adapter_scale(0.0)
    assert float((drawn(pipe, **IMAGE) - before).abs().max()) < 0.05
    pipe.unload_ip_adapter()
    quantkit.attention(pipe, **SETTINGS)
    assert torch.equal(drawn(pipe), before)


def test_a_packed_model_has_all_of_it_when_the_adapter_is_gone(folders):
    pipe = plain(folders / "packed")
    before = drawn(pipe)
    load_ip_adapter(pipe)
    pipe.unload_ip_adapter()
    assert torch.equal(drawn(pipe), before)


def test_a_controlnet_runs_beside(pipes, pipeline_dir):
    unet = unet_class().from_pretrained(pipeline_dir / "unet")
    net = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():  # they end in zeros
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    image = torch.rand(1, 3, 16, 16, generator=generator)
    pipe, other = pipes
    (before, calls), without = counted(lambda: drawn(pipe)), drawn(other)
    guided, reference = (
        diffusers.StableDiffusionControlNetPipeline.from_pipe(one, controlnet=net) for one in pipes
    )
    found, again = counted(lambda: drawn(guided, image=image))
    assert_near(found, drawn(reference, image=image), without)
    assert again == calls
    assert torch.equal(drawn(guided, image=image, controlnet_conditioning_scale=0.0), before)
    # Its own attention is asked for by the same call, since it is a denoiser's, too.
    quantkit.attention(guided, **SETTINGS)
    assert_near(drawn(guided, image=image), drawn(reference, image=image), without)


def test_perturbed_attention_guides(pipes):
    pipe, other = pipes
    before, whole = counted(lambda: drawn(pipe))
    without, names = drawn(other), processors(pipe)
    guided, reference = (
        diffusers.StableDiffusionPAGPipeline.from_pipe(one, pag_applied_layers=["mid"])
        for one in pipes
    )
    found, fewer = counted(lambda: drawn(guided, pag_scale=3.0))
    assert_near(found, drawn(reference, pag_scale=3.0), without)
    assert 0 < fewer < whole
    # The pipeline gives the processors back that it found.
    assert processors(pipe) == names
    assert torch.allclose(drawn(guided, pag_scale=0.0), before, atol=1e-5)
    assert torch.equal(drawn(pipe), before)


def test_projections_are_joined_and_taken_apart(pipes):
    pipe, _ = pipes
    before, calls = counted(lambda: drawn(pipe))
    pipe.fuse_qkv_projections()
    quantkit.attention(pipe, **SETTINGS)
    joined, again = counted(lambda: drawn(pipe))
    assert set(processors(pipe).values()) == {"FusedAttnProcessor2_0"}
    assert again == calls
    # Products of other shapes round otherwise, which moves codes.
    assert float((joined - before).abs().mean()) < 0.005
    pipe.unfuse_qkv_projections()
    assert torch.equal(drawn(pipe), before)


@pytest.mark.parametrize("way", ["model", "sequential", "block_level", "leaf_level"])
def test_offloading_draws_the_same(pipes, way):
    import accelerate

    pipe, _ = pipes
    before, calls = counted(lambda: step(pipe.unet))
    if way == "model":
        picture = drawn(pipe)
        pipe.enable_model_cpu_offload(device=CPU)
        assert torch.allclose(drawn(pipe), picture, atol=1e-5)
        pipe.remove_all_hooks()
    elif way == "sequential":
        # As enable_sequential_cpu_offload does, which wants a GPU.
        accelerate.cpu_offload(pipe.unet, CPU, offload_buffers=len(pipe.unet._parameters) > 0)
    else:
        blocks = {"num_blocks_per_group": 1} if way == "block_level" else {}
        pipe.unet.enable_group_offload(CPU, CPU, offload_type=way, **blocks)
    after, again = counted(lambda: step(pipe.unet))
    assert torch.equal(after, before)
    assert again == calls > 0
