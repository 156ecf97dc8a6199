"""Model directories that are all headers: real names, shapes and offsets over a sparse file."""

import gzip
import json
from math import prod
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_keys(name: str) -> dict:
    """Return one of the key lists that ``golden/make_keys.py`` wrote."""
    return json.loads(gzip.decompress((GOLDEN / f"keys_{name}.json.gz").read_bytes()))


def write_header(path: Path, tensors: dict[str, list[int]], dtype: str = "F16") -> None:
    """Write a safetensors file whose data is a hole: any size, no disk space."""
    table, position = {}, 0
    for name, shape in tensors.items():
        size = prod(shape) * {"F32": 4, "F16": 2, "BF16": 2}.get(dtype, 1)
        table[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + size],
        }
        position += size
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + position)


def write_component(path: Path, class_name: str, tensors: dict[str, list[int]]) -> Path:
    """Write a component directory with config.json and header-only weights."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"_class_name": class_name}))
    write_header(path / "diffusion_pytorch_model.safetensors", tensors)
    return path


def write_pipeline(path: Path, name: str, pipeline: str) -> Path:
    """Write a pipeline directory whose denoiser is a published one's, of holes instead of weights.

    Args:
        path: the directory to make.
        name: of a key list.
        pipeline: class of the pipeline.
    """
    keys = golden_keys(name)
    component = "unet" if keys["class_name"].startswith("UNet") else "transformer"
    write_component(path / component, keys["class_name"], keys["tensors"])
    index = {"_class_name": pipeline, component: ["diffusers", keys["class_name"]]}
    (path / "model_index.json").write_text(json.dumps(index))
    return path
