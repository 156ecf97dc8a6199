"""Refusal of pickled files, which are never opened: a pickle may run code."""

from pathlib import Path

from quantkit.errors import ModelError
from quantkit.storage.inputfile import open_file

_PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
#: What files of torch.save begin with: a zip archive, or a pickle of protocol 2.
_PICKLED = (b"PK\x03\x04", b"\x80\x02")


def refuse_pickle(path: Path) -> None:
    """Refuse a pickled file, by its name or its first bytes.

    Raises:
        ModelError: it is one.
    """
    with open_file(path) as file:
        begin = file.read(4)
    if path.suffix in _PICKLES or begin.startswith(_PICKLED):
        raise ModelError(
            f"{path}: pickled, which runs what its author wrote into it when it is read; take the "
            ".safetensors file of the model"
        )
