"""A tiny pipeline packed under several schemes, and whether what is loaded has its bytes."""

import hashlib

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from quantkit.checkpoint.spec import PACKED_PARTS
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.numerics.formats import E4M3FN, E5M2
from quantkit.numerics.granularity import PerChannel, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme

TOKEN = Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN)


#: One of each, spread over the layers in turn; e5m2 and float32 scales are what loaders destroy.
MIXED = (
    TOKEN,
    Scheme(E5M2, PerChannel(), None, Activation.TOKEN, smooth=True),
    Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, Activation.TOKEN),
    Scheme(E4M3FN, PerTensor(), None, Activation.STATIC),
    Scheme(E5M2, PerTensor(), TWO_OF_FOUR, Activation.STATIC, (300.5, 600.5), smooth=True),
    Scheme(E4M3FN, PerChannel(), None, Activation.NONE),
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def packable(folder):
    """Layers inside blocks, with rows that both kernels divide."""
    with safe_open(folder / "diffusion_pytorch_model.safetensors", framework="pt") as file:
        for name in sorted(file.keys()):
            shape = file.get_slice(name).get_shape()
            layer, _, part = name.rpartition(".")
            inside = "block" in layer and "norm" not in layer and "emb" not in layer
            if part == "weight" and len(shape) in (2, 4) and shape[1] % 32 == 0 and inside:
                yield layer


def mixed(folder):
    return {layer: MIXED[i % len(MIXED)] for i, layer in enumerate(packable(folder))}


def unet_class():
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel


def tensors_on_disk(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: t for file in files for name, t in load_file(file).items()}


def same_bytes(a, b):
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def assert_bit_exact(model, folder):
    disk = tensors_on_disk(folder)
    state = model.state_dict()
    packed = [
        n
        for n in state
        if n.rpartition(".")[2] in PACKED_PARTS
        and isinstance(model.get_submodule(n.rpartition(".")[0]), PackedLayer)
    ]
    assert len(packed) > 40
    assert {disk[n].dtype for n in packed} == {
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint8,
        torch.float32,
    }
    for name in packed:
        assert state[name].dtype == disk[name].dtype, name
        # Rows of a convolution's codes have two more axes in memory.
        assert state[name].squeeze().shape == disk[name].squeeze().shape, name
        assert same_bytes(state[name], disk[name]), name


def draw(pipe):
    images = pipe(
        "a red square",
        num_inference_steps=1,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).images
    assert torch.isfinite(images).all()
    return images


def plain(folder, **options):
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(folder, **options)


def weight_files(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.name.endswith((".safetensors", ".safetensors.index.json"))
    }
