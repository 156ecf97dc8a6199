"""Packing one of several variants: what it is called, and which loader finds it."""

import shutil

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.reader import open_packed
from quantkit.inference.layers.layer_summary import packed_layers
from quantkit.workflow.arguments import as_model

STEM = "diffusion_pytorch_model"


@pytest.fixture
def source(pipeline_dir, tmp_path):
    """Return a pipeline whose UNet has these variants, and the other parts plain weights."""

    def make(*variants, shards=False):
        folder = shutil.copytree(pipeline_dir, tmp_path / "source")
        unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
        (folder / "unet" / f"{STEM}.safetensors").unlink()
        for number, variant in enumerate(variants):
            with torch.no_grad():
                unet.conv_in.bias.fill_(number + 1)  # which tells them apart
            size = "400KB" if shards else "10GB"
            unet.save_pretrained(folder / "unet", variant=variant, max_shard_size=size)
        return folder

    return make


def bias_of(packed):
    component = open_packed(packed).components[0]
    tensors = {k: v for s in component.headers for k, v in load_file(s.path).items()}
    return float(tensors["conv_in.bias"][0])


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize(
    ("variants", "asked", "wanted"),
    [
        ((None, "fp16"), None, (1, None)),
        ((None, "fp16"), "fp16", (2, None)),
        (("fp16",), None, (1, "fp16")),
        (("fp16",), "fp16", (1, "fp16")),
        (("fp16", "bf16"), "bf16", (2, "bf16")),
    ],
)
def test_a_variant_is_packed_and_loads(request, variants, asked, wanted, shards):
    number, loaded_by = wanted
    source, tmp_path = map(request.getfixturevalue, ("source", "tmp_path"))
    packed = tmp_path / "packed"
    model = as_model(source(*variants, shards=shards), variant=asked)
    quantkit.pack(model, output=packed)
    assert bias_of(packed) == number
    assert not quantkit.verify(packed).breaches
    pipe = diffusers.DiffusionPipeline.from_pretrained(packed, variant=loaded_by)
    assert packed_layers(pipe)
    assert packed_layers(quantkit.load_pipeline(packed))


def test_all_commands_take_the_variant(source, tmp_path):
    from click.testing import CliRunner

    from quantkit.cli import quantkit as command

    folder, packed = source(None, "fp16"), tmp_path / "packed"
    path = folder / "unet" / f"{STEM}.fp16.safetensors"
    save_file({k: v.half() for k, v in load_file(path).items()}, path)
    arguments = ["pack", folder, "--variant", "fp16", "-o", packed, "-q"]
    done = CliRunner().invoke(command, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert bias_of(packed) == 2
