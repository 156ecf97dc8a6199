"""Write reference/targets.md: each family in each target, read back by the target's programs.

``python docs/make_targets.py`` exports tiny models of random weights, reads the files with the
packages that users read them with, and compares the weights. It takes three minutes.
"""

import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pytest import MonkeyPatch  # noqa: PT013
from safetensors.torch import load_file
from torch import Tensor

import quantkit
from quantkit.errors import InputError
from quantkit.interchange.original_layouts import LAYOUTS
from quantkit.pipelines.running import quiet_libraries

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support import comfyui
from tests.support.denoiser_classes import ROWS
from tests.support.denoisers import (
    let_diffusers_read_narrow,
    pixart_of_original,
    tiny_denoiser,
    tiny_renamed,
)
from tests.support.encoders import make_encoder
from tests.support.packing import calibration_of
from tests.support.tiny_denoisers import tiny_model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "targets.md"

#: The relative error from which a weight is another one: a wrong name or row makes it near 1.
WRONG = 0.2

State = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    title: str
    class_name: str
    make: Callable[[], Any]


def _renamed(title: str, class_name: str) -> Family:
    return Family(title, class_name, partial(tiny_renamed, class_name))


def _encoder(title: str, class_name: str) -> Family:
    return Family(title, class_name, partial(make_encoder, class_name))


def _sana() -> Any:
    return tiny_model(next(row for row in ROWS if row.class_name == "SanaTransformer2DModel"))


_UNET, _SD3 = "UNet2DConditionModel", "SD3Transformer2DModel"

FAMILIES = (
    Family("Stable Diffusion 1.x", _UNET, partial(tiny_denoiser, "sd15")),
    Family("Stable Diffusion 2.x", _UNET, partial(tiny_denoiser, "sd2")),
    Family("Stable Diffusion XL", _UNET, partial(tiny_denoiser, "sdxl")),
    Family("Stable Diffusion 3", _SD3, partial(tiny_denoiser, "sd3")),
    Family("Stable Diffusion 3.5", _SD3, partial(tiny_denoiser, "sd35")),
    Family("FLUX.1", "FluxTransformer2DModel", partial(tiny_denoiser, "flux")),
    _renamed("FLUX.2", "Flux2Transformer2DModel"),
    _renamed("Chroma", "ChromaTransformer2DModel"),
    _renamed("Z-Image", "ZImageTransformer2DModel"),
    _renamed("Lumina 2", "Lumina2Transformer2DModel"),
    _renamed("AuraFlow", "AuraFlowTransformer2DModel"),
    _renamed("PixArt", "PixArtTransformer2DModel"),
    _renamed("Qwen-Image", "QwenImageTransformer2DModel"),
    _renamed("Wan", "WanTransformer3DModel"),
    _renamed("HunyuanVideo", "HunyuanVideoTransformer3DModel"),
    _renamed("LTX-Video", "LTXVideoTransformer3DModel"),
    Family("any other, as Sana", "SanaTransformer2DModel", _sana),
    _encoder("CLIP", "CLIPTextModel"),
    _encoder("T5", "T5EncoderModel"),
)


@dataclass(frozen=True)
class Source:
    """A 16-bit model, and the folder that it was saved in."""

    model: Any
    folder: Path


def _split(state: State, source: Source) -> State:
    """Return tensors of the original layout in diffusers' names, by diffusers' converters."""
    name = type(source.model).__name__
    if name == "PixArtTransformer2DModel":
        return pixart_of_original(state)
    prefix = next(layout.prefix for layout in LAYOUTS if layout.class_name == name)
    named = {prefix + key.removeprefix(prefix): value for key, value in state.items()}
    with MonkeyPatch.context() as patch:
        let_diffusers_read_narrow(patch, name)
        how = {"config": str(source.folder), "torch_dtype": torch.float32}
        return dict(type(source.model).from_single_file(named, **how).state_dict())


def _read_single_file(path: Path, source: Source) -> State:
    return _split(load_file(path), source)


def _read_comfyui(path: Path, source: Source) -> State:
    state, layers = comfyui.read(path)
    values = {f"{name}.weight": layer.values() for name, layer in layers.items()}
    return _split({**state, **values}, source)


def _read_gguf(path: Path, source: Source) -> State:
    import gguf

    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        state[tensor.name] = values.reshape(tuple(reversed(tensor.shape.tolist())))
    return _split(state, source)


def _dequantized(state: Mapping[str, Tensor]) -> State:
    """Return weights multiplied by the scales of their rows."""
    return {
        name: value.float() * state[f"{name}_scale"].reshape(-1, 1)
        if f"{name}_scale" in state
        else value
        for name, value in state.items()
        if not name.endswith(".weight_scale")
    }


def _read_fp8r(path: Path, source: Source) -> State:
    from diffusers import BFLQuantizationConfig

    model = type(source.model).from_single_file(
        load_file(path),
        config=str(source.folder),
        quantization_config=BFLQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )
    return _dequantized(model.state_dict())


def _read_sdnq(path: Path, _: Source) -> State:
    return load_file(path.parent / "read.safetensors")


def _read_compressed_tensors(path: Path, source: Source) -> State:
    model = type(source.model).from_pretrained(path, dtype=torch.float32)
    return _dequantized(model.state_dict())


@dataclass(frozen=True)
class Target:
    """A column of the table, and how its files are read."""

    #: of PyPI
    packages: tuple[str, ...]
    #: what they read it by
    reader: str
    #: returns the weights, dequantized, in the model's names
    read: Callable[[Path, Source], State]


_COMFYUI = Target(
    ("comfy-kitchen", "diffusers"), "codes by the first, names by the second", _read_comfyui
)
_GGUF = Target(("gguf", "diffusers"), "blocks by the first, names by the second", _read_gguf)

#: What `export --to` names.
TARGETS: Mapping[str, Target] = {
    "single-file": Target(("diffusers",), "`from_single_file`", _read_single_file),
    "comfyui": _COMFYUI,
    "comfyui-int8": _COMFYUI,
    "comfyui-w4a8": _COMFYUI,
    "gguf:Q8_0": _GGUF,
    "gguf:Q4_0": _GGUF,
    "fp8r": Target(("diffusers",), "`from_single_file` with `BFLQuantizationConfig`", _read_fp8r),
    "sdnq": Target(("sdnq", "diffusers"), "`from_pretrained`", _read_sdnq),
    "compressed-tensors": Target(
        ("compressed-tensors", "transformers"), "`from_pretrained`", _read_compressed_tensors
    ),
}


@dataclass(frozen=True)
class Refusal:
    """A cell without figures."""

    #: what the error says
    said: str
    cell: str
    why: str


REFUSALS = (
    Refusal(
        "original layout is not known",
        "no names",
        "quantkit has no table of the names that the model's authors use; `sdnq` and `fp8r` keep "
        "diffusers' names.",
    ),
    Refusal(
        "no program reads it from GGUF files",
        "no GGUF",
        "no program reads GGUF files of the model.",
    ),
    Refusal(
        "compressed-tensors is for text encoders",
        "denoiser",
        "transformers reads text encoders, so the target takes them alone.",
    ),
    Refusal(
        "no program reads it from fp8r",
        "no reader",
        "diffusers has no `from_single_file` of the class, and nothing else reads the file.",
    ),
    Refusal(
        "a text encoder, and the target takes denoisers",
        "encoder",
        "the target is for denoisers; text encoders go to `compressed-tensors`, or into ComfyUI "
        "with quantkit's [nodes](../guides/comfyui.md).",
    ),
)


@dataclass(frozen=True)
class Cell:
    """What became of a family in a target."""

    #: of the bytes of the 16-bit tensors; None: it is refused
    share: float | None = None
    #: relative error of the weights that the target changes; None: it is refused
    error: float | None = None
    refused: str = ""

    def __str__(self) -> str:
        if self.share is None:
            return self.refused
        return f"{self.error:.2g}, {self.share * 100:.0f} %"


@dataclass(frozen=True)
class Exported:
    """What an export said: its output and bytes, or why there is none."""

    path: Path
    nbytes: int = 0
    refused: str = ""


def measure(families: Sequence[Family], targets: Collection[str]) -> list[list[Cell]]:
    """Return a row of cells for each family, in the order of the targets."""
    with TemporaryDirectory() as folder, quiet_libraries():
        places = [Path(folder) / str(number) for number in range(len(families))]
        sources = [_saved(*pair) for pair in zip(families, places, strict=True)]
        made = [{to: _exported(source, to) for to in targets} for source in sources]
        _dequantize_sdnq([row["sdnq"] for row in made if "sdnq" in row])
        return [
            [_cell(found, TARGETS[to], source) for to, found in row.items()]
            for source, row in zip(sources, made, strict=True)
        ]


def _saved(family: Family, place: Path) -> Source:
    model = family.make().half()
    model.save_pretrained(place / "source")
    return Source(model, place / "source")


def _exported(source: Source, to: str) -> Exported:
    """Export a model; ComfyUI's FP8 has statistics of inputs, which are random."""
    place = source.folder.parent / to.replace(":", "-")
    place.mkdir()
    path = place / "component"
    given = {"calibration": calibration_of(source.folder)} if to == "comfyui" else {}
    try:
        result = quantkit.export(source.folder, to=to, output=path, **given)
    except InputError as error:
        (refusal,) = (row for row in REFUSALS if row.said in str(error))
        return Exported(path, refused=refusal.cell)
    return Exported(path, result.nbytes)


def _dequantize_sdnq(exports: Sequence[Exported]) -> None:
    """Let SDNQ read all of its exports in one process of its own: importing it takes 10 s."""
    folders = [str(found.path.parent) for found in exports if not found.refused]
    if folders:
        command = [sys.executable, "-m", "tests.support.read_sdnq", *folders]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)


def _cell(found: Exported, target: Target, source: Source) -> Cell:
    if found.refused:
        return Cell(refused=found.refused)
    weights = [load_file(path) for path in source.folder.glob("*.safetensors")]
    dense = sum(tensor.nbytes for tensors in weights for tensor in tensors.values())
    error = _error(target.read(found.path, source), source.model.state_dict())
    return Cell(found.nbytes / dense, error)


def _error(found: State, expected: State) -> float:
    """Return the relative error of all tensors that differ, by root of the share of power."""
    assert found.keys() == expected.keys()
    pairs = [(found[name].float(), value.float()) for name, value in expected.items()]
    changed = [(read, value) for read, value in pairs if not torch.equal(read, value)]
    lost = torch.tensor([(read - value).square().sum() for read, value in changed])
    power = torch.tensor([value.square().sum() for _, value in changed])
    # Among all, one wrong tensor may be too small to be seen.
    assert bool((lost <= WRONG**2 * power).all())
    return float(lost.sum() / power.sum()) ** 0.5 if changed else 0.0


PAGE_TEXT = """\
# Families by target

Every family of which quantkit knows the names that its authors use, exported to every
[target](../guides/export.md) from 16 bit, and read back by the packages that users read it with.
Made by `python docs/make_targets.py`; a test makes some of the rows anew.

A cell has the relative error of the weights that the target changes (root of the share of power,
against float16; no input is quantized), and the bytes of all tensors as a share of 16 bit. The
models are tiny ones of random weights: shares of large ones are smaller. Layers of Lumina 2 and
PixArt have 48 columns here, no multiple of 32: `comfyui-w4a8` has them in int8, and `gguf` in 16
bit.

{cells}
Readers:

{readers}
PixArt's names are those of diffusers' conversion script.

## Cells without figures

quantkit refuses them in one line, before anything is written:

{refusals}
## What ran by hand

On a CPU, models of random weights with the published names, of 8 to 380 million parameters:

| program | `--to` | models |
|---|---|---|
| ComfyUI 0.33.0 | `single-file`, `comfyui-int8` | SD 1.5, 2.1, XL, 3, 3.5; FLUX.1 dev, schnell |
| ComfyUI 0.33.0 | `single-file`, `comfyui-int8` | PixArt, AuraFlow, FLUX.2, Lumina 2, Chroma |
| ComfyUI 0.33.0 | `single-file`, `comfyui-int8` | HunyuanVideo |
| ComfyUI 0.33.0 | `single-file` | Z-Image |
| ComfyUI 0.33.0 | `comfyui` | the first row without SDXL |
| ComfyUI 0.33.0 | `comfyui-w4a8` | SD 3 |
| ComfyUI-GGUF 795e451 | `gguf:Q8_0` | the first row |
| ComfyUI-GGUF 795e451 | `gguf:Q4_0` | the first row without SDXL |
| stable-diffusion.cpp (stable-diffusion-cpp-python 0.4.7) | `gguf` | SD 1.5, XL, 3; FLUX.1 |

ComfyUI answered as diffusers does from 16 bit, but for the error of the format.
stable-diffusion.cpp converted the files and drew no picture. In the names of Wan 2.1 and Qwen-Image
ComfyUI read files that were made by hand; LTX-Video has not run in these programs.
"""


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head, *rows = (f"| {' | '.join(row)} |\n" for row in (columns, *lines))
    return f"{head}|{'---|' * len(columns)}\n{''.join(rows)}"


def page(cells: Sequence[Sequence[object]]) -> str:
    """Return the page.

    Args:
        cells: for each family one for each target.
    """
    lines = [[family.title, *map(str, row)] for family, row in zip(FAMILIES, cells, strict=True)]
    columns = ("family", *(f"`{to}`" for to in TARGETS))
    readers = [
        [", ".join(f"`{to}`" for to, row in TARGETS.items() if row == found), _packages(found),
         found.reader]
        for found in dict.fromkeys(TARGETS.values())
    ]  # fmt: skip
    return PAGE_TEXT.format(
        cells=_table(columns, lines),
        readers=_table(("`--to`", "packages", "how"), readers),
        refusals="".join(f"- *{row.cell}*: {row.why}\n" for row in REFUSALS),
    )


def _packages(target: Target) -> str:
    return ", ".join(f"{name} {version(name)}" for name in target.packages)


if __name__ == "__main__":
    PAGE.write_text(page(measure(FAMILIES, TARGETS)), encoding="utf-8")
