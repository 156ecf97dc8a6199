"""Breaking a packed component's rules: its config, tensors and header metadata, one by one."""

import json
from hashlib import sha256

import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.metadata import METADATA_KEY
from quantkit.models.quantizers import CONFIG_KEY
from quantkit.storage.tensorfile import read_header
from tests.support.packed import relist


class Edit:
    """A packed component taken apart; ``save`` puts it together with the library."""

    def __init__(self, folder):
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())
        self.files = sorted(folder.glob("*.safetensors"))
        self.tensors = {file: load_file(file) for file in self.files}
        self.metadata = {
            file: json.loads(read_header(file).metadata[METADATA_KEY]) for file in self.files
        }
        self.index = next(iter(folder.glob("*.index.json")), None)
        self.redigest = True

    @property
    def schemes(self):
        return self.config[CONFIG_KEY]["schemes"]

    def home(self, name):
        return next(f for f in self.files if name in self.tensors[f])

    def record(self, layer):
        return next(m["layers"] for m in self.metadata.values() if layer in m["layers"])

    def tensor(self, name):
        return self.tensors[self.home(name)][name]

    def replace(self, name, tensor):
        self.tensors[self.home(name)][name] = tensor

    def save(self):
        (self.folder / "config.json").write_text(json.dumps(self.config))
        for file in self.files:
            if self.redigest:
                self.metadata[file]["tensors"] = {
                    n: sha256(bytes(t.reshape(-1).view(torch.uint8).tolist())).hexdigest()
                    for n, t in self.tensors[file].items()
                }
            metadata = {METADATA_KEY: json.dumps(self.metadata[file])}
            save_file(self.tensors[file], file, metadata=metadata)
        if self.index and self.redigest:
            table = {
                "metadata": {"total_size": sum(
                    t.nbytes for m in self.tensors.values() for t in m.values()
                )},
                "weight_map": {n: f.name for f, m in self.tensors.items() for n in m},
            }  # fmt: skip
            self.index.write_text(json.dumps(table))
        # Somebody who makes the checksums fit makes the list fit, too.
        relist(self.folder)
