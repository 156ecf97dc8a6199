"""Models made to hurt: pickles, endless configs, entries of other types, numbers that are none."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.verification import verify
from quantkit.errors import CheckpointError, ModelError
from quantkit.packing.final_checks import list_written
from quantkit.progress import silent
from tests.support.packed import relist
from tests.support.packed_folders import UNET, VAE, cut, of_json, packed_to, put_nan


def test_pickles_are_not_copied_and_not_opened(pipeline_dir, copy, tmp_path):
    source = shutil.copytree(pipeline_dir, tmp_path / "source")
    for name in ("vae/old.bin", "unet/optimizer.pt", "scheduler/state.pkl"):
        (source / name).write_bytes(b"pickle")
    output = packed_to(source, tmp_path / "packed")
    assert not [file for file in output.rglob("*") if file.suffix in {".bin", ".pt", ".pkl"}]
    # One that a list names is hashed.
    (copy / "vae" / "old.bin").write_bytes(b"pickle")
    relist(copy)
    assert verify(copy, progress=silent).unchecked == ("not opened: vae/old.bin",)
    (copy / "vae" / "old.bin").write_bytes(b"pickel")
    with pytest.raises(CheckpointError, match=r"old\.bin: damaged"):
        verify(copy, progress=silent)


def pickled(folder):
    """Replace the VAE's weights by a pickle of them."""
    torch.save(load_file(folder / VAE), folder / "vae" / "diffusion_pytorch_model.bin")
    (folder / VAE).unlink()


def test_a_component_of_pickles_alone_is_refused_with_what_cures_it(
    pipeline_dir, copy, tmp_path, monkeypatch
):
    source = shutil.copytree(pipeline_dir, tmp_path / "source")
    for folder in (source, copy):
        pickled(folder)
    relist(copy)
    load = torch.load

    def never(*args, **options):
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", never)
    match = r"vae: only pickled weights \(diffusion_pytorch_model\.bin\), which are never opened"
    with pytest.raises(ModelError, match=match) as caught:
        packed_to(source, tmp_path / "packed")
    with pytest.raises(CheckpointError, match=match):
        verify(copy, progress=silent)
    with pytest.raises(CheckpointError, match=match):
        quantkit.load_pipeline(copy)
    monkeypatch.setattr(torch, "load", load)
    exec(str(caught.value).split('python -c "')[1].removesuffix('"'), {})
    assert verify(packed_to(source, tmp_path / "packed"), progress=silent).opened == 2


#: What fits its digests and no loader takes: name -> (damage, what verify says, what loading says)
UNLOADABLE = {
    "version": (
        of_json("model_index.json", lambda c: c.update(_diffusers_version="x")),
        "_diffusers_version 'x' is no version", None,
    ),
    "version-number": (
        of_json("model_index.json", lambda c: c.update(_diffusers_version=1)),
        "is no version", None,
    ),
    "class-number": (
        of_json("model_index.json", lambda c: c.update(vae=["diffusers", 2])),
        r"vae is \['diffusers', 2\], expected a library and a class", ".",
    ),
    "class-dotted": (
        of_json("model_index.json", lambda c: c.update(vae=["diffusers", "a.AutoencoderKL"])),
        r"vae is \['diffusers', 'a\.Auto.*expected a library and a class", ".",
    ),
    "entry-text": (
        of_json("model_index.json", lambda c: c.update(vae="AutoencoderKL")),
        "vae is 'AutoencoderKL', expected a library and a class", ".",
    ),
    "pipeline-class": (
        of_json("model_index.json", lambda c: c.update(_class_name=["x"])),
        "names no pipeline", ".",
    ),
    "endless-vae": (
        of_json("vae/config.json", lambda c: c.update(layers_per_block=10**9)),
        r"vae/config\.json: layers_per_block is 1000000000, but its files hold",
        r"vae/config\.json: layers_per_block is 1000000000",
    ),
    "endless-encoder": (
        of_json("text_encoder/config.json", lambda c: c.update(num_hidden_layers=10**9)),
        r"text_encoder/config\.json: num_hidden_layers is 1000000000", "num_hidden_layers is",
    ),
    "many-blocks": (
        of_json("vae/config.json", lambda c: c.update(
            block_out_channels=[4] * 900, norm_num_groups=4, layers_per_block=99,
            down_block_types=["DownEncoderBlock2D"] * 900, up_block_types=["UpDecoderBlock2D"] * 9,
        )),
        *["vae/config.json: .*which its files have no tensors for"] * 2,
    ),
    "tokenizer": (
        lambda f: (f / "tokenizer" / "tokenizer.json").write_text('{"version": 2}'), None,
        "diffusers cannot load it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLOADABLE)
def test_what_no_loader_takes_is_told_in_one_line(copy, name):
    change, told, loading = UNLOADABLE[name]
    change(copy)
    relist(copy)
    if told is not None:
        with pytest.raises(CheckpointError, match=told):
            verify(copy, progress=silent)
    if loading is None:
        # Of what it says of itself, loading a directory does not read this.
        quantkit.load_pipeline(copy)
        return
    with pytest.raises((CheckpointError, ModelError), match=loading) as caught:
        quantkit.load_pipeline(copy)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("change", ["nan-vae", "no-encoder"])
def test_pack_refuses_a_pipeline_that_verify_would(pipeline_dir, tmp_path, change):
    source = shutil.copytree(pipeline_dir, tmp_path / "source")
    if change == "no-encoder":
        shutil.rmtree(source / "text_encoder")
        match = "text_encoder: missing, though model_index"
    else:
        tensors = load_file(source / VAE)
        tensors["encoder.conv_in.bias"][0] = torch.nan
        save_file(tensors, source / VAE)
        match = r"conv_in\.bias\[0\]: found nan"
    with pytest.raises((ModelError, CheckpointError), match=match) as caught:
        packed_to(source, tmp_path / "packed")
    # The source, not the stage, which is gone.
    assert str(caught.value).startswith(str(source))
    assert not (tmp_path / "packed").exists()


def test_copied_weights_are_looked_at_before_the_long_work(pipeline_dir, tmp_path, monkeypatch):
    source = shutil.copytree(pipeline_dir, tmp_path / "source")
    put_nan(VAE, "encoder.conv_in.bias")(source)

    def never(*args, **options):
        raise AssertionError("packed first")

    monkeypatch.setattr("quantkit.packing.pack_model.write_shards", never)
    with pytest.raises(ModelError, match="found nan"):
        packed_to(source, tmp_path / "packed")


def test_a_broken_stage_is_told_as_the_output(pipeline_dir, tmp_path, monkeypatch):
    def damaged(stage, *rest):
        list_written(stage, *rest)
        cut(UNET)(stage)

    monkeypatch.setattr("quantkit.packing.pack_model.list_written", damaged)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/packed/unet/diff.*: truncated"):
        packed_to(pipeline_dir, tmp_path / "packed")
