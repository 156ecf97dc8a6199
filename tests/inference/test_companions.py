"""What pipelines put beside a packed denoiser, and where they put it: as with a dense one."""

import shutil

import diffusers
import pytest
import torch
from torch import nn

from quantkit.inference.layers.layer_summary import iterate_packed
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.adapters import branches
from tests.support.answers import step
from tests.support.loading import packable, plain, unet_class, weight_files
from tests.support.packed import pack_component

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # accelerate's and diffusers', of their own calls
]

CPU = torch.device("cpu")


@torch.no_grad()
def drawn(pipe, **options):
    seed = torch.Generator().manual_seed(0)
    options = {"num_inference_steps": 2, "output_type": "pt", "generator": seed, **options}
    return pipe("a red square", **options).images


@pytest.fixture(scope="module")
def folder(pipeline_dir, tmp_path_factory):
    """A pipeline whose weights alone are codes: it answers as the dense one that they stand for."""
    path = tmp_path_factory.mktemp("companions") / "packed"
    shutil.copytree(pipeline_dir, path)
    scheme = Scheme(E4M3FN, PerChannel(), None, Activation.NONE)
    pack_component(path / "unet", dict.fromkeys(packable(path / "unet"), scheme))
    return path


@pytest.fixture
def pipe(folder):
    return plain(folder)


@pytest.fixture(scope="module")
def dense(folder):
    pipe = plain(folder)
    pipe.unet.dequantize()
    return pipe


def assert_added_alike(packed, dense, without):
    """The companion changes the picture, and as it changes that of a dense model."""
    assert (packed - without).abs().mean() > 0.005
    assert torch.allclose(packed, dense, atol=1e-4)


# ----------------------------------------------------------------------------------- companions


def ip_adapter(unet, tokens=4, width=24):
    """Random weights of an IP-Adapter, in the layout of its files."""
    generator = torch.Generator().manual_seed(1)

    def weights(module):
        return {n: torch.randn(t.shape, generator=generator) * 0.2
                for n, t in module.state_dict().items()}  # fmt: skip

    texts = [n for n in unet.attn_processors if n.endswith("attn2.processor")]
    widths = [unet.get_submodule(name.removesuffix(".processor")).inner_dim for name in texts]
    context = unet.config.cross_attention_dim
    layers = nn.ModuleDict(
        {
            str(2 * i + 1): nn.ModuleDict(
                {f"to_{x}_ip": nn.Linear(context, n, bias=False) for x in "kv"}
            )
            for i, n in enumerate(widths)
        }
    )
    image = nn.ModuleDict(
        {"proj": nn.Linear(width, tokens * context), "norm": nn.LayerNorm(context)}
    )
    return {"image_proj": weights(image), "ip_adapter": weights(layers)}


def load_ip_adapter(pipe):
    none = {"subfolder": None, "weight_name": None, "image_encoder_folder": None}
    pipe.load_ip_adapter(ip_adapter(pipe.unet), **none)


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_ip_adapters_are_loaded_scaled_and_unloaded(pipe, folder, fused, tmp_path):
    if fused:
        pipe.fuse_qkv_projections()
    before = drawn(pipe)
    dense = plain(folder)
    dense.unet.dequantize()
    image = {"ip_adapter_image_embeds": [torch.randn(2, 1, 24)]}
    for one in (pipe, dense):
        load_ip_adapter(one)
    assert_added_alike(drawn(pipe, **image), drawn(dense, **image), before)
    pipe.set_ip_adapter_scale(0.0)
    assert torch.allclose(drawn(pipe, **image), before, atol=1e-5)
    pipe.unload_ip_adapter()
    assert torch.equal(drawn(pipe), before)
    pipe.unet.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(folder / "unet")


def test_a_controlnet_runs_beside(pipe, dense, pipeline_dir, tmp_path):
    unet = unet_class().from_pretrained(pipeline_dir / "unet")
    net = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():  # they end in zeros
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    image = torch.rand(1, 3, 16, 16, generator=generator)
    guided, reference = (
        diffusers.StableDiffusionControlNetPipeline.from_pipe(one, controlnet=net)
        for one in (pipe, dense)
    )
    assert guided.unet is pipe.unet
    before = drawn(pipe)
    assert_added_alike(drawn(guided, image=image), drawn(reference, image=image), before)
    off = drawn(guided, image=image, controlnet_conditioning_scale=0.0)
    assert torch.equal(off, before)
    guided.save_pretrained(tmp_path / "copy")
    again = plain(tmp_path / "copy")
    assert torch.equal(drawn(again, image=image), drawn(guided, image=image))
    assert [*iterate_packed(again.unet)]


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_perturbed_attention_guides(pipe, dense, fused):
    guided, reference = (
        diffusers.StableDiffusionPAGPipeline.from_pipe(one, pag_applied_layers=["mid"])
        for one in (pipe, dense)
    )
    before = drawn(pipe)
    if fused:
        guided.fuse_qkv_projections()
    off, on = drawn(guided, pag_scale=0.0), drawn(guided, pag_scale=3.0)
    assert torch.allclose(off, before, atol=1e-5)
    assert_added_alike(on, drawn(reference, pag_scale=3.0), before)


# ------------------------------------------------------------------------------------- offloading


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_model_offload_draws_the_same(pipe, fused):
    before = drawn(pipe)
    if fused:
        pipe.fuse_qkv_projections()
    pipe.enable_model_cpu_offload(device=CPU)
    assert torch.allclose(drawn(pipe), before, atol=1e-5)
    pipe.remove_all_hooks()
    assert torch.allclose(drawn(pipe), before, atol=1e-5)


@pytest.mark.parametrize("strategy", ["balanced", "cpu"])
def test_a_device_map_places_a_pipeline(folder, pipe, strategy):
    placed = plain(folder, device_map=strategy)
    assert torch.equal(drawn(placed), drawn(pipe))


@pytest.mark.parametrize("order", ["fused-first", "offloaded-first"])
def test_fused_projections_step_aside_for_sequential_offload(pipe, folder, order):
    """What offloads looks the tensors of every layer up in the state dict, without joined ones."""
    import accelerate

    unet = pipe.unet
    wanted = step(unet)
    if order == "fused-first":
        unet.fuse_qkv_projections()
    # As enable_sequential_cpu_offload does, which wants a GPU.
    accelerate.cpu_offload(unet, CPU, offload_buffers=len(unet._parameters) > 0)
    if order == "offloaded-first":
        unet.fuse_qkv_projections()
    for _ in range(2):
        assert torch.allclose(step(unet), wanted, rtol=1e-4, atol=1e-5)
        parts = [layer for _, _, layer in iterate_packed(unet) if not hasattr(layer, "layers")]
        assert all(layer.codes.is_meta for layer in parts)
    accelerate.hooks.remove_hook_from_module(unet, recurse=True)
    unet.unfuse_qkv_projections()
    assert torch.allclose(step(unet), wanted, rtol=1e-4, atol=1e-5)
    state = plain(folder).unet.state_dict()
    assert state.keys() == unet.state_dict().keys()


def test_fused_projections_are_offloaded_in_groups(pipe):
    wanted = step(pipe.unet)
    pipe.fuse_qkv_projections()
    pipe.unet.enable_group_offload(CPU, CPU, offload_type="leaf_level")
    assert torch.allclose(step(pipe.unet), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_leave_the_codes_of_joined_layers(pipe, dtype):
    pipe.unet.fuse_qkv_projections()
    pipe.unet.to(dtype)
    joined = [layer for _, _, layer in iterate_packed(pipe.unet) if hasattr(layer, "layers")]
    assert joined
    for layer in joined:
        assert layer.codes.dtype == torch.float8_e4m3fn
        assert layer.weight_scale.dtype == torch.float32
        assert layer.compute_dtype == dtype


def test_adapters_are_loaded_into_an_offloaded_model(pipe):
    import accelerate

    pytest.importorskip("peft")
    state = branches(pipe.unet, 1)
    pipe.unet.load_lora_adapter(dict(state), prefix=None)
    wanted = step(pipe.unet)
    pipe.unet.unload_lora()
    before = step(pipe.unet)
    pipe.unet.load_lora_adapter(dict(state), prefix=None)
    accelerate.cpu_offload(pipe.unet, CPU)
    assert torch.equal(step(pipe.unet), wanted)
    assert not torch.allclose(wanted, before, atol=1e-3)
    accelerate.hooks.remove_hook_from_module(pipe.unet, recurse=True)
    pipe.unet.unload_lora()
    assert torch.equal(step(pipe.unet), before)
