"""A user's own from_pretrained builds nothing that is larger than the files of a packed model."""

import json
import shutil

import pytest
from torch import nn

from quantkit.errors import CheckpointError
from tests.support.loading import plain
from tests.support.packed import relist

BLOCKS = {
    "block_out_channels": [32] * 300, "down_block_types": ["DownBlock2D"] * 300,
    "up_block_types": ["UpBlock2D"] * 300, "layers_per_block": 9,
}  # fmt: skip


def damaged(folder, name, changes):
    path = folder / name / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    relist(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("unet", {"layers_per_block": 10**9}, r"unet/config\.json: layers_per_block is 10000"),
        ("vae", {"layers_per_block": 10**9}, r"vae/config\.json: layers_per_block is 10000"),
        ("text_encoder", {"num_hidden_layers": 10**9}, r"config\.json: num_hidden_layers is 1"),
        (
            "unet",
            BLOCKS,
            "copy: more than .* parameters, which its files have no tensors for; down",
        ),
    ],
    ids=["unet", "vae", "encoder", "blocks"],
)
def test_a_packed_pipeline_that_asks_for_more_is_refused(
    packed_dir, tmp_path, name, changes, match
):
    from diffusers import StableDiffusionPipeline

    folder = damaged(shutil.copytree(packed_dir, tmp_path / "copy"), name, changes)
    with pytest.raises(CheckpointError, match=match) as caught:
        if name == "unet":
            StableDiffusionPipeline.from_pretrained(pretrained_model_name_or_path=str(folder))
        else:
            plain(folder)
    assert "\n" not in str(caught.value)
    # The limit went with the load.
    nn.ModuleList(nn.ReLU() for _ in range(20_000))


def test_pipelines_that_are_not_packed_are_left_alone(pipeline_dir, tmp_path, monkeypatch):
    folder = shutil.copytree(pipeline_dir, tmp_path / "copy")
    monkeypatch.setattr("quantkit.inference.loading.size_limits.refuse_oversized", None)
    plain(folder)
    with pytest.raises(OSError, match=r"nobody/nothing|local_files_only"):
        plain("nobody/nothing", local_files_only=True)
