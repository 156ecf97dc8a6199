"""A single file without its config: what it is, in one line, whatever it holds."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantkit.errors import ModelError
from quantkit.interchange.file_contents import _PUBLISHED, KINDS, refuse_bare_file, refuse_underived
from quantkit.interchange.original_layouts import LAYOUTS
from quantkit.workflow.arguments import as_model


def file_of(path, *names):
    save_file({name: torch.zeros(2, 2) for name in names}, path)
    return path


#: Names of tensors of published files.
FILES = {
    # kohya's, diffusers' and peft's LoRA; LoKr of LyCORIS
    "a LoRA": [
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight",
        "unet.down_blocks.0.attentions.0.to_q.lora_A.weight",
        "transformer.transformer_blocks.0.attn.to_k.lora.up.weight",
        "diffusion_model.double_blocks.0.img_attn.proj.lora_B.weight",
        "lycoris_transformer_blocks_0_attn_to_k.lokr_w1",
    ],
    "a ControlNet": [
        "control_model.input_blocks.0.0.weight",
        "controlnet_cond_embedding.conv_in.weight",
        "controlnet_blocks.0.weight",
    ],
    "a language model": ["model.layers.0.self_attn.q_proj.weight"],
    "an embedding": ["emb_params", "clip_l"],
    "a text encoder": [
        "transformer.resblocks.0.attn.in_proj_weight",
        "shared.weight",
        "text_model.encoder.layers.0.self_attn.k_proj.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
    ],
    "a VAE": [
        "decoder.conv_in.weight",
        "first_stage_model.decoder.mid.block_1.conv1.weight",
        "decoder.conv1.weight",
    ],
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in FILES.items() for name in names]
)
def test_what_is_no_denoiser_is_named(kind, name, tmp_path):
    with pytest.raises(ModelError, match=f"m.safetensors: {kind}, which is no MODEL; ") as caught:
        as_model(str(file_of(tmp_path / "m.safetensors", name, "other.weight")))
    assert caught.value.fields == ()
    assert {row.what for row in KINDS} == FILES.keys()


@pytest.mark.parametrize(
    "names", [["a.weight"], ["model.diffusion_model.x", "decoder.conv_in.weight"]]
)
def test_what_may_be_a_denoiser_misses_its_config(names, tmp_path):
    with pytest.raises(ModelError, match=r"a single file has no config; give .* too$") as caught:
        refuse_bare_file(file_of(tmp_path / "m.safetensors", *names))
    assert caught.value.fields == ("config",)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda row: f"{row.architecture}-{row.class_name}")
def test_a_denoiser_is_named_with_a_pipeline(layout, tmp_path):
    names = [layout.prefix + marker for marker in layout.markers]
    path = file_of(tmp_path / "m.safetensors", *names)
    refuse_bare_file(path)
    with pytest.raises(ModelError) as caught:
        refuse_underived(path, names)
    text = str(caught.value)
    assert f"(it holds {layout.class_name}, layout {layout.architecture}" in text
    published = _PUBLISHED.get((layout.architecture, layout.class_name))
    assert (published or ")") in text


def test_published_pipelines_are_those_of_the_stored_names():
    from tests.golden.make_keys import MODELS

    known = {(row[0].partition(", ")[0], row[1]) for row in MODELS.values()}
    assert {(hub, name) for (_, name), hub in _PUBLISHED.items()} <= known
    assert _PUBLISHED.keys() <= {(row.architecture, row.class_name) for row in LAYOUTS}


def test_a_language_model_in_gguf(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"m\.gguf: a language model, which is no MODEL"):
        refuse_bare_file(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("m.safetensors", b"", "empty, 0 bytes; download it again"),
        ("m.gguf", b"", "empty, 0 bytes"),
        ("m.ckpt", b"anything", "pickled, which runs what its author wrote"),
        ("m.safetensors", b"PK\x03\x04rest", "pickled, which runs"),
        ("m.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        ("m.safetensors", b"\n<!DOCTYPE html><html>Access denied", "a web page, and no model"),
        ("m.safetensors", b"\x08", "truncated or not safetensors: 1 bytes"),
        ("m.safetensors", b"\x08" + b"\0" * 7 + b"{}......", "damaged header"),
        ("m.gguf", b"GGUF\x03\0\0", "truncated or damaged GGUF file"),
        ("m", b"hello world, hello world", "truncated or not safetensors"),
    ],
)
def test_what_is_no_model_at_all(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelError, match=f"^{re.escape(str(tmp_path / name))}: {message}"):
        refuse_bare_file(tmp_path / name)


#: Packs what it is given, and says what it has imported.
CODE = """
import sys
from quantkit.cli import main
try:
    main(["pack", sys.argv[1], "-o", "x"])
finally:
    print({"torch", "numpy"} & set(sys.modules))
"""


def test_looking_imports_no_torch(tmp_path):
    file = file_of(tmp_path / "m.safetensors", "decoder.conv_in.weight")
    command = [sys.executable, "-c", CODE, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "set()\n"), done.stderr
    assert ": a VAE, which is no MODEL; " in done.stderr
