"""Packed pipelines save the bytes they were loaded from."""

import json
import shutil

import pytest
import torch
from torch import nn

import quantkit
from quantkit.errors import CheckpointError, InputError
from tests.support.loading import (
    DTYPES,
    assert_bit_exact,
    plain,
    tensors_on_disk,
    unet_class,
    weight_files,
)
from tests.support.packed import relist


def quantization(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["packed_dir", "sharded_dir"])
def test_pipelines_save_the_same_bytes(where, dtype, request, tmp_path):
    folder = request.getfixturevalue(where)
    pipe = plain(folder, torch_dtype=dtype)
    pipe.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(folder)
    assert quantization(tmp_path / "copy" / "unet") == quantization(folder / "unet")
    again = quantkit.load_pipeline(tmp_path / "copy", torch_dtype=dtype, checksums=True)
    assert_bit_exact(again.unet, folder / "unet")


@pytest.mark.parametrize(
    "casts",
    [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16, torch.float32)],
    ids=str,
)
def test_casts_after_loading_do_not_change_what_is_saved(packed_dir, tmp_path, casts):
    pipe = quantkit.load_pipeline(packed_dir)
    for dtype in casts:
        pipe.to(dtype)
    pipe.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(packed_dir)


def test_models_save_over_themselves_and_over_older_cuts(packed_dir, sharded_dir, tmp_path):
    folder = tmp_path / "unet"
    shutil.copytree(sharded_dir / "unet", folder)
    unet_class().from_pretrained(packed_dir / "unet").save_pretrained(folder)
    assert weight_files(folder) == weight_files(packed_dir / "unet")
    unet_class().from_pretrained(folder).save_pretrained(folder)
    assert weight_files(folder) == weight_files(packed_dir / "unet")


def test_variants_load_and_save_under_their_names(broken, tmp_path):
    unet = broken / "unet"
    (unet / "diffusion_pytorch_model.safetensors").rename(
        unet / "diffusion_pytorch_model.fp16.safetensors"
    )
    relist(unet)
    pipe = quantkit.load_pipeline(broken)
    with pytest.raises(InputError, match="pass variant='fp16'"):
        pipe.unet.save_pretrained(tmp_path / "copy")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "diffusion_pytorch_model.safetensors").write_bytes(b"another variant")
    pipe.unet.save_pretrained(tmp_path / "copy", variant="fp16")
    files = weight_files(tmp_path / "copy")
    assert files.pop("diffusion_pytorch_model.safetensors")
    assert files == weight_files(unet)


def test_saving_refuses_what_would_need_other_bytes(packed_dir, tmp_path):
    model = unet_class().from_pretrained(packed_dir / "unet")
    for options, text in (
        ({"safe_serialization": False}, "packed files are safetensors"),
        ({"variant": "fp16"}, "files keep their names; pass variant=None"),
        ({"max_shard_size": "1GB"}, "shards stay as they were cut"),
        ({"push_to_hub": True}, r"call push_to_hub\(repository\) itself"),
        ({"use_flashpack": True}, "use_flashpack: unknown"),
    ):
        with pytest.raises(InputError, match=text):
            model.save_pretrained(tmp_path / "copy", **options)
    assert not (tmp_path / "copy").exists()
    with pytest.raises(InputError, match=r"model\.save_pretrained"):
        type(model).save_pretrained(model, tmp_path / "copy")
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other").exists()


def test_a_pipeline_saves_over_itself(broken):
    before = weight_files(broken)
    plain(broken).save_pretrained(broken)
    assert weight_files(broken) == before
    pipe = plain(broken)
    with torch.no_grad():
        pipe.vae.quant_conv.bias += 0.5
    pipe.save_pretrained(broken)
    after = weight_files(broken)
    assert {name for name in after if after[name] != before[name]} == {
        "vae/diffusion_pytorch_model.safetensors"
    }
    assert not [p for p in broken.iterdir() if p.name.startswith(".")]


def test_saving_refuses_a_changed_model(packed_dir, tmp_path):
    model = unet_class().from_pretrained(packed_dir / "unet")
    with torch.no_grad():
        model.conv_in.bias[0] += 0.25
    with pytest.raises(CheckpointError, match=r"changed since it was loaded .*conv_in\.bias"):
        model.save_pretrained(tmp_path / "copy")
    model = unet_class().from_pretrained(packed_dir / "unet")
    model.conv_in.add_module("lora_A", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"lacks: conv_in\.lora_A.*unload adapters"):
        model.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_saving_needs_the_files_it_was_loaded_from(broken, tmp_path):
    model = unet_class().from_pretrained(broken / "unet")
    shutil.rmtree(broken)
    with pytest.raises(CheckpointError, match="are gone"):
        model.save_pretrained(tmp_path / "copy")


def test_changed_16_bit_components_save_their_change(packed_dir, tmp_path):
    pipe = plain(packed_dir)
    with torch.no_grad():
        pipe.vae.quant_conv.bias += 0.5
    pipe.save_pretrained(tmp_path / "copy")
    saved = tensors_on_disk(tmp_path / "copy" / "vae")["quant_conv.bias"]
    assert torch.equal(saved, pipe.vae.quant_conv.bias)
    assert saved.dtype == torch.float32


def test_deep_copies_save_too(packed_dir, tmp_path):
    import copy

    model = copy.deepcopy(unet_class().from_pretrained(packed_dir / "unet"))
    model.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(packed_dir / "unet")
