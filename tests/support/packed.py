"""Packed layers from dense ones, for tests: numerics only, independent of the writer."""

import json
from hashlib import sha256

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quantkit.checkpoint.filelist import write_file_list
from quantkit.checkpoint.metadata import METADATA_KEY, LayerRecord, ShardMetadata
from quantkit.checkpoint.spec import make_config
from quantkit.inference.layers.modules import pack_module
from quantkit.numerics.block_scales import choose_block_scales
from quantkit.numerics.masks import choose_mask
from quantkit.numerics.nibbles import GROUP, amax_factors, pack_nibbles
from quantkit.numerics.packed_2to4 import pack_two_of_four, to_rows
from quantkit.numerics.scales import amax_scale, quantize
from quantkit.numerics.scheme import Activation


def packed_tensors(weight, scheme, *, input_amax=4.0):
    """Return part -> tensor of FORMAT.md for a dense weight; smoothing ramps from 0.5 to 2."""
    channels = weight.shape[1]
    parts = {}
    wide = weight.detach().float()
    if scheme.smooth:
        smooth = torch.linspace(0.5, 2.0, channels)
        wide = wide / smooth.reshape(-1, *[1] * (weight.ndim - 2))
        parts["input_smooth"] = smooth
    rows = to_rows(wide).contiguous()
    mask = None
    if scheme.sparsity:
        mask = choose_mask(rows.abs(), scheme.sparsity)
        rows = rows * mask
    if scheme.weight.subscale_group:
        scale, parts["weight_group"] = amax_factors(rows)
        wide = parts["weight_group"].repeat_interleave(GROUP, dim=1)
        codes = (rows / (wide * scale.unsqueeze(1))).round().clamp(-8, 7).to(torch.int8)
    elif scheme.weight.block:
        scale = choose_block_scales(rows, scheme.weight, "amax")
        codes = quantize(rows, scale, scheme.weight, scheme.granularity)
        scale = scale.half()
    else:
        scale = amax_scale(rows, scheme.weight, scheme.granularity)
        codes = quantize(rows, scale, scheme.weight, scheme.granularity)
    if mask is not None:
        values, parts["weight_meta"] = pack_two_of_four(codes.view(torch.uint8), mask)
        codes = values.view(scheme.weight.torch_dtype)
    if scheme.weight.codes_per_byte > 1:
        codes = pack_nibbles(codes, GROUP if mask is None else GROUP // 2)
    elif mask is None and weight.ndim == 4:
        n, c, kh, kw = weight.shape
        codes = codes.reshape(n, kh, kw, c)
    parts |= {"weight": codes, "weight_scale": scale}
    if scheme.activation is Activation.STATIC:
        count = len(scheme.buckets) + 1
        # no ratio is a power of two, which would change no FP8 result
        ramp = torch.linspace(1.0, 1.7, count) * (input_amax / scheme.input.max)
        parts["input_scale"] = ramp if scheme.buckets else ramp[0]
    return parts


def packed_module(dense, scheme, *, buckets=None, name="layer"):
    """Return the packed layer of a Linear or Conv2d, filled."""
    layer = pack_module(name, scheme, dense, buckets)
    for part, value in packed_tensors(dense.weight, scheme).items():
        assert layer.part(part).numel() == value.numel()
        layer.fill(part, value)
    return layer


def pack_component(folder, schemes, *, shards=1, recipe=None):
    """Pack the 16-bit component in ``folder`` in place.

    Args:
        folder: a component directory with one safetensors file.
        schemes: module path -> Scheme.
        shards: how many files to cut it into.
    """
    source = folder / "diffusion_pytorch_model.safetensors"
    tensors, records = {}, {}
    with safe_open(source, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  not a dict
            tensor = file.get_tensor(name).clone()
            layer, _, part = name.rpartition(".")
            if part == "weight" and layer in schemes:
                parts = packed_tensors(tensor, schemes[layer])
                tensors |= {f"{layer}.{key}": value.contiguous() for key, value in parts.items()}
                records[layer] = LayerRecord(tuple(tensor.shape), digest(tensor))
            else:
                tensors[name] = tensor
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config["quantization_config"] = make_config(schemes).to_json()
    config_path.write_text(json.dumps(config, indent=2))
    source.unlink()
    _write_shards(folder, tensors, records, shards, recipe or {})
    relist(folder)


def relist(folder):
    """Make the list of files of a component's pipeline, or of a folder alone, fit what is there."""
    root = folder.parent if (folder.parent / "model_index.json").is_file() else folder
    files = [file for file in root.rglob("*.safetensors") if _is_packed(file)]
    write_file_list(root, {}, [file.relative_to(root) for file in files])


def _is_packed(file):
    with safe_open(file, framework="pt") as opened:
        return METADATA_KEY in (opened.metadata() or {})


def _write_shards(folder, tensors, records, shards, recipe):
    # A layer's tensors stay together: cut between modules.
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    size = -(-len(modules) // shards)
    index = {}
    for i in range(shards):
        part = set(modules[i * size : (i + 1) * size])
        own = {n: t for n, t in tensors.items() if n.rpartition(".")[0] in part}
        cut = f"-{i + 1:05}-of-{shards:05}" if shards > 1 else ""
        name = f"diffusion_pytorch_model{cut}.safetensors"
        layers = {n: r for n, r in records.items() if n in part}
        digests = {n: digest(t) for n, t in own.items()}
        meta = ShardMetadata(recipe, layers, digests)
        save_file(own, folder / name, metadata={"format": "pt", METADATA_KEY: meta.to_text()})
        index |= dict.fromkeys(own, name)
    if shards > 1:
        total = sum(t.nbytes for t in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(text)


def digest(tensor):
    """Return the SHA-256 of a tensor's bytes, hex."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return sha256(flat.numpy().tobytes()).hexdigest()
