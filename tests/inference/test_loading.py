"""Packed directories in diffusers: bit-exact however they are loaded."""

import json
import shutil

import pytest
import torch

import quantkit
from quantkit.device.backends import Backend, use
from quantkit.errors import InputError, ModelError
from quantkit.inference.layers.deviation import watch
from quantkit.inference.layers.layer_summary import iterate_packed, packed_layers
from quantkit.numerics.scheme import Activation
from tests.support.loading import (
    DTYPES,
    assert_bit_exact,
    draw,
    mixed,
    plain,
    same_bytes,
    tensors_on_disk,
    unet_class,
    weight_files,
)
from tests.support.packed import pack_component


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["packed_dir", "sharded_dir"])
def test_codes_and_scales_are_bit_exact(where, dtype, request):
    folder = request.getfixturevalue(where) / "unet"
    model = unet_class().from_pretrained(folder, torch_dtype=dtype)
    assert_bit_exact(model, folder)
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {dtype}
    assert model.dtype == dtype


@pytest.mark.parametrize(
    "options",
    [
        {"low_cpu_mem_usage": True},
        {"device_map": "cpu"},
        {"device_map": {"": "cpu"}},
        {"disable_mmap": True},
        {"use_safetensors": True},
    ],
    ids=str,
)
def test_every_way_of_loading_is_bit_exact(packed_dir, options):
    model = unet_class().from_pretrained(packed_dir, subfolder="unet", **options)
    assert_bit_exact(model, packed_dir / "unet")


def test_parallel_loading_is_bit_exact(sharded_dir, monkeypatch):
    from diffusers.models import modeling_utils

    monkeypatch.setattr(modeling_utils, "HF_ENABLE_PARALLEL_LOADING", True)
    model = unet_class().from_pretrained(sharded_dir / "unet", low_cpu_mem_usage=True)
    assert_bit_exact(model, sharded_dir / "unet")


def test_ways_that_would_cast_are_refused(packed_dir, tmp_path):
    load = unet_class().from_pretrained
    with pytest.raises(ValueError, match="low_cpu_mem_usage` cannot be False"):
        load(packed_dir / "unet", low_cpu_mem_usage=False)
    with pytest.raises(InputError, match="device_map: packed layers cannot be offloaded to 'disk'"):
        load(packed_dir / "unet", device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    with pytest.raises(InputError, match=r"torch_dtype torch.float64, expected float16"):
        load(packed_dir / "unet", torch_dtype=torch.float64)


def test_loaded_layers_are_those_of_the_schemes(packed_dir):
    config = json.loads((packed_dir / "unet" / "config.json").read_text())
    wanted = {n for s in config["quantization_config"]["schemes"] for n in s["layers"]}
    pipe = quantkit.load_pipeline(packed_dir)
    infos = packed_layers(pipe)
    assert {info.name for info in infos} == wanted
    assert {info.component for info in infos} == {"unet"}
    assert {info.kind for info in infos} == {"linear", "conv2d"}


def test_layers_are_near_reference_and_near_the_original(pipeline_dir, packed_dir):
    dense = plain(pipeline_dir, torch_dtype=torch.float32)
    pipe = quantkit.load_pipeline(packed_dir)
    with watch(pipe, dense=dense) as seen:
        draw(pipe)
    assert len(seen.layers) == len(packed_layers(pipe))
    for info in packed_layers(pipe):
        layer = seen.layers["unet", info.name]
        assert layer.calls == layer.watched == 1
        assert layer.kernel < 1e-4, info.name  # float32 sums in another order
        # e4m3fn and e5m2 round to 3 and 2 bits, 2:4 drops half; the static scales are made up.
        if info.scheme.activation is not Activation.STATIC:
            assert 1e-3 < layer.dense < (0.6 if info.scheme.sparsity else 0.15), info.name


@pytest.mark.slow
def test_a_packed_unet_compiles_without_a_graph_break(packed_dir):
    model = unet_class().from_pretrained(packed_dir / "unet")
    x, text = torch.randn(1, 4, 8, 8), torch.randn(1, 16, 32)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad(), use(Backend.REFERENCE):
        for t in (100, 900):
            wanted = model(x, torch.tensor(t), text).sample
            assert torch.equal(compiled(x, torch.tensor(t), text).sample, wanted)
    assert packed_layers(compiled) == packed_layers(model)


def test_transformers_load_alike(transformer_dir, tmp_path):
    from diffusers import PixArtTransformer2DModel

    shutil.copytree(transformer_dir, tmp_path / "pixart")
    pack_component(tmp_path / "pixart", mixed(tmp_path / "pixart"))
    model = PixArtTransformer2DModel.from_pretrained(
        tmp_path / "pixart", torch_dtype=torch.bfloat16
    )
    count = sum(1 for _ in iterate_packed(model))
    assert count == len(mixed(transformer_dir))
    y = model(
        torch.randn(1, 4, 8, 8, dtype=torch.bfloat16),
        encoder_hidden_states=torch.randn(1, 5, 32, dtype=torch.bfloat16),
        timestep=torch.tensor([500]),
    ).sample
    assert y.dtype == torch.bfloat16
    assert torch.isfinite(y).all()
    assert model.quantkit_buckets[0].index.tolist() == [1]


def test_sd3_keeps_its_dtype_its_t5_and_its_bytes(transformer_pipeline_dir, tmp_path):
    folder = tmp_path / "sd3"
    shutil.copytree(transformer_pipeline_dir, folder)
    pack_component(folder / "transformer", mixed(folder / "transformer"))
    pipe = plain(folder, torch_dtype=torch.float16)
    kept = {n for n, p in pipe.text_encoder_3.named_parameters() if p.dtype == torch.float32}
    assert kept
    assert all("wo" in name.split(".") for name in kept)
    assert plain(folder).text_encoder.dtype == torch.float32
    with use(Backend.REFERENCE):
        latents = pipe("a b", num_inference_steps=1, output_type="latent").images
    assert latents.dtype == torch.float16
    assert torch.isfinite(latents).all()
    pipe.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(folder)


def test_what_pack_writes_loads_and_saves(pipeline_dir, tmp_path):
    from quantkit.models.source import open_model
    from quantkit.packing.pack_model import pack
    from quantkit.progress import silent
    from quantkit.recipe.load import load_recipe

    folder = tmp_path / "packed"
    pack(
        open_model(str(pipeline_dir)),
        load_recipe("fp8"),
        folder,
        calibration=None,
        masks=None,
        threads=1,
        force=False,
        progress=silent,
    )
    pipe = plain(folder)
    assert {info.component for info in packed_layers(pipe)} == {"unet"}
    state, disk = pipe.unet.state_dict(), tensors_on_disk(folder / "unet")
    assert state.keys() == disk.keys()
    assert all(same_bytes(state[n], disk[n]) for n in state if state[n].dtype == disk[n].dtype)
    pipe.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(folder)
    quantkit.load_pipeline(tmp_path / "copy", checksums=True)


def test_a_name_that_is_neither_here_nor_on_the_hub_is_refused(monkeypatch):
    import huggingface_hub

    def missing(*args):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", missing)
    with pytest.raises(ModelError, match=r"^some/one: no directory.*no network.*check the name"):
        quantkit.load_pipeline("some/one")
