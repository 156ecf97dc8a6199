"""Packed directories that do not fit: refused while loading, by name."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.spec import FORMAT_VERSION
from quantkit.errors import CheckpointError, InputError, ModelError
from quantkit.storage.tensorfile import read_header
from tests.support.loading import unet_class
from tests.support.packed import digest, relist


def edit_config(folder, change):
    path = folder / "unet" / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
    relist(folder / "unet")


def edit_tensors(folder, change):
    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    change(tensors)
    record = json.loads(metadata["quantkit"])
    record["tensors"] = {name: digest(tensor) for name, tensor in tensors.items()}
    save_file(tensors, path, metadata=metadata | {"quantkit": json.dumps(record)})
    relist(folder / "unet")


def first(tensors, part):
    return next(n for n in sorted(tensors) if n.endswith(part))


def drop(part):
    return lambda tensors: tensors.pop(first(tensors, part))


def put(part, value):
    def change(tensors):
        tensors[first(tensors, part)].reshape(-1)[0] = value

    return change


def retype(tensors):
    name = first(tensors, ".weight_scale")
    tensors[name] = tensors[name].half()


def reshape(tensors):
    name = first(tensors, ".weight_meta")
    tensors[name] = tensors[name][:, :-1].contiguous()


TENSOR_FAULTS = {
    "scale-missing": (drop(".weight_scale"), r"\.weight_scale: missing"),
    "codes-missing": (drop("to_q.weight"), r"\.to_q\.weight: missing"),
    "meta-missing": (drop(".weight_meta"), r"\.weight_meta: missing"),
    "dense-missing": (drop("conv_in.weight"), r"lacks conv_in\.weight"),
    "bias-missing": (drop("conv1.bias"), r"conv1: no bias, the model has one"),
    "bias-added": (
        lambda t: t.update({first(t, "to_q.weight")[:-6] + "bias": torch.zeros(64)}),
        r"to_q.*bias",
    ),
    "scale-dtype": (retype, r"\.weight_scale: found F16 \[.*\], expected F32"),
    "meta-shape": (reshape, r"\.weight_meta: found U8 \[.*\], expected U8 \["),
    "scale-zero": (put(".weight_scale", 0.0), r"\.weight_scale: .*finite and positive"),
    "scale-nan": (put(".input_scale", torch.nan), r"\.input_scale: .*finite and positive"),
    "smooth-inf": (put(".input_smooth", torch.inf), r"\.input_smooth: .*finite and positive"),
    "extra": (
        lambda t: t.update({"conv_in.weight_scale": torch.ones(())}),
        r"conv_in\.weight_scale: packed, but no scheme",
    ),
    "raw-codes": (
        lambda t: t.update({"conv_in.weight": t["conv_in.weight"].to(torch.float8_e4m3fn)}),
        r"conv_in\.weight: packed, but no scheme",
    ),
}


@pytest.mark.parametrize(("change", "text"), TENSOR_FAULTS.values(), ids=TENSOR_FAULTS.keys())
def test_damaged_tensors_are_named(broken, change, text):
    edit_tensors(broken, change)
    with pytest.raises(CheckpointError, match=text) as caught:
        unet_class().from_pretrained(broken / "unet")
    assert "\n" not in str(caught.value)
    assert str(broken) in str(caught.value)


CONFIG_FAULTS = {
    "newer": (
        lambda c: c.update(format_version=9),
        f"format_version 9, expected {FORMAT_VERSION}: made by a development version or a newer",
    ),
    "unknown-key": (lambda c: c.update(extra=1), "extra"),
    "unknown-layer": (
        lambda c: c["schemes"][0]["layers"].append("mid_block.nothing"),
        r"layer mid_block\.nothing: has a scheme, but no description",
    ),
    "scheme-dropped": (lambda c: c["schemes"].pop(), "no scheme has"),
    "not-a-layer": (
        lambda c: c["schemes"][0]["layers"].append("conv_norm_out"),
        "layer conv_norm_out: has a scheme, but no description",
    ),
}


@pytest.mark.parametrize(("change", "text"), CONFIG_FAULTS.values(), ids=CONFIG_FAULTS.keys())
def test_damaged_configurations_are_named(broken, change, text):
    edit_config(broken, change)
    with pytest.raises(CheckpointError, match=text):
        unet_class().from_pretrained(broken / "unet")


def test_a_model_of_other_shapes_is_refused(broken):
    path = broken / "unet" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"cross_attention_dim": 64}))
    with pytest.raises(
        CheckpointError, match=r"to_[kv]: packed from \[64, 32\], the model has \[64"
    ):
        unet_class().from_pretrained(broken / "unet")


def test_quantizing_while_loading_is_refused(pipeline_dir, packed_dir):
    from quantkit.inference.loading.diffusers_loading import QuantkitConfig

    config = json.loads((packed_dir / "unet" / "config.json").read_text())["quantization_config"]
    with pytest.raises(InputError, match="run 'quantkit pack'"):
        unet_class().from_pretrained(
            pipeline_dir / "unet", quantization_config=QuantkitConfig(**config)
        )


def test_unknown_packed_text_encoders_are_refused(broken):
    from transformers import CLIPTextModel

    path = broken / "text_encoder" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "quantkit", "format_version": 1}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config: ") as caught:
        CLIPTextModel.from_pretrained(broken / "text_encoder")
    assert "\n" not in str(caught.value)
    from diffusers import DiffusionPipeline

    with pytest.raises(CheckpointError):
        DiffusionPipeline.from_pretrained(broken)


def test_load_pipeline_refuses_what_is_no_packed_pipeline(pipeline_dir, packed_dir, tmp_path):
    with pytest.raises(ModelError, match="nothing in it is packed; run 'quantkit pack'"):
        quantkit.load_pipeline(pipeline_dir)
    with pytest.raises(ModelError, match=r"no model_index.json, expected a pipeline directory"):
        quantkit.load_pipeline(packed_dir / "unet")
    with pytest.raises(ModelError, match=r"no model_index.json"):
        quantkit.load_pipeline(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"torch_dtype torch.float8_e4m3fn, expected float16"):
        quantkit.load_pipeline(packed_dir, torch_dtype=torch.float8_e4m3fn)


def test_load_pipeline_finds_flipped_bits(broken):
    path = broken / "unet" / "diffusion_pytorch_model.safetensors"
    header = read_header(path)
    info = header.tensors[first(header.tensors, "to_q.weight")]
    data = bytearray(path.read_bytes())
    data[info.start] ^= 0x80
    path.write_bytes(data)
    quantkit.load_pipeline(broken, checksums=False)
    with pytest.raises(CheckpointError, match=r"to_q\.weight: damaged: SHA-256"):
        quantkit.load_pipeline(broken)


def test_load_pipeline_finds_a_truncated_file(broken):
    path = broken / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises((CheckpointError, ModelError), match="truncated"):
        quantkit.load_pipeline(broken)
