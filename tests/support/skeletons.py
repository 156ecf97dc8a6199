"""Models that are what their files say: tests of files need no real model to fit them."""

from quantkit.checkpoint.metadata import METADATA_KEY, parse_metadata
from quantkit.checkpoint.spec import PACKED_PARTS
from quantkit.errors import InputError
from quantkit.models.skeleton import Skeleton
from quantkit.storage.tensorfile import read_header


def of_files(config, *_):
    """Return the skeleton of a model with exactly the tensors beside ``config``, packed or not."""
    tensors, layers = {}, {}
    for file in sorted(config.parent.glob("*.safetensors")):
        try:
            header = read_header(file)
        except InputError:
            continue
        tensors |= {name: info.shape for name, info in header.tensors.items()}
        if METADATA_KEY in header.metadata:
            layers |= parse_metadata(header.metadata[METADATA_KEY]).layers
    for layer, record in layers.items():
        for part in PACKED_PARTS:
            tensors.pop(f"{layer}.{part}", None)
        tensors[f"{layer}.weight"] = record.shape
    modules = {name.rpartition(".")[0]: "" for name in tensors}
    return Skeleton("AnyModel", modules, tensors, ("sample", "timestep"))


def install(monkeypatch):
    """Let every config.json describe what lies beside it."""
    for module in ("packing.final_checks", "checkpoint.verification"):
        monkeypatch.setattr(f"quantkit.{module}.read_skeleton", of_files)
