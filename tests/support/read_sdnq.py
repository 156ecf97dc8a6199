"""Read components with SDNQ in a process of its own: importing it changes torch and diffusers.

python -m tests.support.read_sdnq FOLDER...: each FOLDER/component is loaded by diffusers, its
dequantized weights go to FOLDER/read.safetensors, and its answer, if FOLDER is a name of INPUTS.
"""

import json
import os
import sys
from pathlib import Path


def main(folders):
    import diffusers
    import torch
    from safetensors.torch import save_file
    from sdnq.dequantizer import dequantize_sdnq_model

    from tests.support.denoisers import INPUTS, output_of

    torch.set_num_threads(2)
    for folder in map(Path, folders):
        path = folder / "component"
        config = json.loads((path / "config.json").read_text())
        model = getattr(diffusers, config["_class_name"]).from_pretrained(path).eval()
        found = {"answer": output_of(folder.name, model)} if folder.name in INPUTS else {}
        layers = [n for n, m in model.named_modules() if hasattr(m, "sdnq_dequantizer")]
        dense = dequantize_sdnq_model(model).state_dict()
        found |= {name: value.float() for name, value in dense.items()}
        found = {name: value.contiguous() for name, value in found.items()}
        save_file(found, folder / "read.safetensors", metadata={"layers": " ".join(layers)})


if __name__ == "__main__":
    os.environ["SDNQ_USE_TORCH_COMPILE"] = "0"
    main(sys.argv[1:])
