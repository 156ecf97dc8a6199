"""How near ComfyUI's formats come to 16 bit on the bundled pipeline, multiplied by comfy-kitchen.

``python docs/measure_comfyui.py FOLDER``: statistics and second moments of 16 prompts, then other
prompts' pictures of each export, compared with those of the 16-bit model, the error of the UNet's
answers to the inputs that it had while those were drawn, and the output errors of the layers on
rows that the second moments held out. ComfyUI itself does not recognize this UNet by
its widths; names, codes and products are those that it would take.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import click
import torch
from skimage.metrics import structural_similarity

import quantkit
from quantkit.calibration.moments.moment_files import Hessians, load_hessians
from quantkit.interchange import comfyui_export
from quantkit.models.component_layers import list_layers
from quantkit.models.source import open_model
from quantkit.pipelines.running import load_pipeline, quiet_libraries, read_prompts
from quantkit.recipe.load import load_recipe

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support import comfyui

PIPELINE = Path("eval/assets/pipeline")
PROMPTS = Path("eval/assets/prompts.txt")
#: Of these prompts the first are observed, the last drawn.
OBSERVED, DRAWN, STEPS = 16, 12, 10
SET = {"calibration.steps": STEPS}

#: name -> target, whether statistics, and second moments, are given
EXPORTS: Mapping[str, tuple[str, bool, bool]] = {
    "FP8": ("comfyui", True, False),
    "int8, not rotated": ("comfyui-int8", False, False),
    "int8": ("comfyui-int8", False, False),
    "int8, second moments": ("comfyui-int8", False, True),
    "w4a8": ("comfyui-w4a8", False, False),
    "w4a8, second moments": ("comfyui-w4a8", False, True),
}


def pictures(pipe: Any, prompts: tuple[str, ...]) -> list[Any]:
    """Return a picture of each prompt, as arrays."""
    found = []
    for number, prompt in enumerate(prompts):
        noise = torch.Generator().manual_seed(900 + number)
        how = {"num_inference_steps": STEPS, "guidance_scale": 4.0, "output_type": "np"}
        found.extend(pipe(prompt, generator=noise, **how).images)
    return found


def answers(pipe: Any, prompts: tuple[str, ...]) -> list[tuple[Any, Any, Any]]:
    """Return the arguments, keywords and answers of the UNet's calls while pictures are drawn."""
    found: list[tuple[Any, Any, Any]] = []

    def keep(_: Any, args: Any, kwargs: Any, answer: Any) -> None:
        found.append((args, kwargs, answer[0]))

    handle = pipe.unet.register_forward_hook(keep, with_kwargs=True)
    pictures(pipe, prompts)
    handle.remove()
    return found


def answer_error(unet: Any, calls: list[tuple[Any, Any, Any]]) -> float:
    """Return the mean relative error of the UNet's answers to the same inputs."""
    errors = [
        float((unet(*args, **kwargs)[0] - answer).norm() / answer.norm())
        for args, kwargs, answer in calls
    ]
    return fmean(errors)


def write(name: str, folder: Path, calibration: Path, hessians: Path) -> Path:
    """Export the pipeline, of which a packed model's codes are taken over and not rotated."""
    to, statistics, moments = EXPORTS[name]
    source, path = PIPELINE, folder / f"{name}.safetensors"
    given: dict[str, Any] = {}
    if name == "int8, not rotated":
        source = folder / "packed"
        quantkit.pack(PIPELINE, recipe=to, output=source, force=True)
    if statistics:
        given["calibration"] = calibration
    if moments:
        given["hessians"] = hessians
    quantkit.export(source, to=to, output=path, force=True, **given)
    return path


def output_errors(path: Path, folder: Path, hessians: Hessians) -> list[float]:
    """Return each layer's relative error of its output, by weights alone, on held-out rows."""
    imported = folder / f"{path.stem} imported"
    quantkit.import_file(path, config=PIPELINE, output=imported, encoders="config", force=True)
    component = open_model(PIPELINE).components[0]
    rounded = load_pipeline(open_model(imported), torch.device("cpu")).unet
    exact = load_pipeline(open_model(PIPELINE), torch.device("cpu")).unet
    _, marked = comfyui.read(path)
    errors = []
    for layer in list_layers(component):
        weight, found = (m.get_submodule(layer.name).weight.float() for m in (exact, rounded))
        if len(weight.shape) != 2 or torch.equal(weight, found):
            continue
        moments = hessians.read(component, layer)
        errors.append((moments.power(found - weight) / moments.power(weight)) ** 0.5)
    assert len(errors) >= len(marked), path
    return errors


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def main(folder: Path) -> None:
    """Print a line for each export; statistics that FOLDER has are not taken again."""
    # Widths are no matter here.
    comfyui_export._refuse_widths = Mock()  # noqa: SLF001
    prompts = read_prompts(PROMPTS)
    how = {"prompts": list(prompts[:OBSERVED]), "device": "cpu"}
    folder.mkdir(exist_ok=True)
    calibration, hessians = folder / "calibration.safetensors", folder / "hessians"
    if not calibration.exists():
        quantkit.calibrate(PIPELINE, recipe=load_recipe("comfyui", SET), output=calibration, **how)
    recipe = load_recipe("comfyui-w4a8", SET)
    quantkit.calibrate_hessians(PIPELINE, recipe=recipe, output=hessians, **how)
    with quiet_libraries(), torch.no_grad():
        pipe = load_pipeline(open_model(PIPELINE), torch.device("cpu"))
        unet, drawn = pipe.unet, prompts[-DRAWN:]
        exact, calls = pictures(pipe, drawn), answers(pipe, drawn)
        for name in EXPORTS:
            path = write(name, folder, calibration, hessians)
            errors = output_errors(path, folder, load_hessians(hessians))
            pipe.unet = comfyui.load(path, unet, PIPELINE / "unet", prefix="model.diffusion_model.")
            pairs = zip(pictures(pipe, drawn), exact, strict=True)
            ssim = [structural_similarity(x, y, channel_axis=2, data_range=1.0) for x, y in pairs]
            click.echo(
                f"{name}: SSIM {fmean(ssim):.4f}, error of the UNet's answer "
                f"{answer_error(pipe.unet, calls):.4f}, output error of a layer by its weight "
                f"{fmean(errors):.4f}, {path.stat().st_size:,} bytes"
            )


if __name__ == "__main__":
    main()
