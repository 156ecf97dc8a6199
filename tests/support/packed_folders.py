"""A packed pipeline on disk, and damage to it: of bytes, and of what fits its digests again."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.filelist import MADE
from quantkit.models.source import open_model
from quantkit.packing.pack_model import pack
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from tests.support.packed import digest, relist

WEIGHTS = "diffusion_pytorch_model.safetensors"
VAE = f"vae/{WEIGHTS}"
UNET = f"unet/{WEIGHTS}"


def model_files(folder):
    """The files of a directory that are the model's: neither the list nor the marker."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in MADE)


def packed_to(source, output):
    pack(
        open_model(str(source)),
        Recipe(name="t"),
        output,
        calibration=None,
        masks=None,
        threads=2,
        force=False,
        progress=silent,
    )
    return output


def edit_json(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values, indent=2))


def of_json(name, change):
    return lambda folder: edit_json(folder / name, change)


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9])


def flip(name, place=-5):
    def change(folder):
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 1
        (folder / name).write_bytes(data)

    return change


def swap(name, old, new):
    def change(folder):
        data = (folder / name).read_bytes()
        assert old in data
        (folder / name).write_bytes(data.replace(old, new, 1))

    return change


def edit_tensors(folder, name, change):
    path = folder / name
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    change(tensors)
    if "quantkit" in metadata:
        record = json.loads(metadata["quantkit"])
        record["tensors"] = {n: digest(t) for n, t in tensors.items()}
        metadata["quantkit"] = json.dumps(record)
    save_file(tensors, path, metadata=metadata)
    relist(folder)


def put_nan(name, tensor, value=torch.nan):
    def change(tensors):
        tensors[tensor].view(-1)[-1] = value

    return lambda folder: edit_tensors(folder, name, change)


def add(name, tensor, value):
    return lambda folder: edit_tensors(
        folder, name, lambda tensors: tensors.update({tensor: value})
    )


def remove(name, tensor):
    return lambda folder: edit_tensors(folder, name, lambda tensors: tensors.pop(tensor))
