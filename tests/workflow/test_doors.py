"""From door to door as a user types it: models of every kind in, files of other tools out.

Each model is packed by recipes of its family, drawn beside its original, given a LoRA, and written
for other tools, whose files are read again and drawn, too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.reader import open_packed
from quantkit.cli import quantkit
from quantkit.inference.layers.layer_summary import iterate_packed
from quantkit.workflow import single_file
from tests.support import checkpoints, comfyui, pipelines
from tests.support.adapters import branches
from tests.support.denoisers import original_state
from tests.support.loading import plain
from tests.support.qwen_pipeline import tiny_qwen_pipeline

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # peft's and diffusers', of versions to come
]

#: Two networks that nobody here has.
PICTURES = ("--count", 1, "--steps", 2, "--lpips-weights", "none", "--clip", "none",
            "--no-noise-floor", "--device", "cpu", "--json", "-q")  # fmt: skip
WEIGHTS = "diffusion_pytorch_model.safetensors"


def run(*arguments):
    done = CliRunner().invoke(quantkit, [str(argument) for argument in arguments])
    # 3: one picture decides no gate
    assert done.exit_code in ({0, 3} if arguments[0] == "eval" else {0}), (
        arguments,
        done.output,
        done.exception,
    )
    return done.stdout


def draw_beside(original, other, output, *options):
    """Return the SSIM that ``eval report`` finds, of one picture."""
    said = json.loads(run("eval", "report", original, other, "-o", output, *PICTURES, *options))
    assert said["verdict"]["state"] == "undecided"
    assert said["gates"][0]["found"] > 0.95
    return said["comparison"]["metrics"]["ssim"]["summary"]["mean"]


# ------------------------------------------------------------------------------------- models in


@dataclass(frozen=True)
class Door:
    """A model as it comes."""

    #: what MODEL is to commands, with --config where that is a file
    model: tuple[Any, ...]
    #: 16-bit pipeline with the same weights
    dense: Path
    denoiser: str
    #: its text encoders are packed, too
    encoders: bool = False


def write_whole_checkpoint(pipeline, path):
    """Write what SDXL's checkpoints hold: UNet, VAE and both text encoders."""
    pipe = plain(pipeline)
    tensors = {f"{checkpoints.INSIDE}{n}": t for n, t in original_state(pipe.unet).items()}
    vae = checkpoints.vae_state(pipe.vae)
    tensors |= {f"first_stage_model.{n}": t for n, t in vae.items()}
    for encoder, prefix, is_open in (
        (pipe.text_encoder, "conditioner.embedders.0.transformer.", False),
        (pipe.text_encoder_2, "conditioner.embedders.1.model.", True),
    ):
        tensors |= checkpoints.encoder_state(encoder, prefix, is_open=is_open)
    save_file({n: t.half().contiguous() for n, t in tensors.items()}, path)


def write_gguf(pipeline, path):
    """Write a transformer as city96's converter does, with the gguf package."""
    state = original_state(plain(pipeline).transformer)
    writer = gguf.GGUFWriter(path, "sd3")
    kinds = gguf.GGMLQuantizationType
    for name, tensor in state.items():
        value, rows = tensor.float().numpy(), tensor.ndim == 2 and tensor.shape[1] % 32 == 0
        kind = kinds.Q8_0 if rows else kinds.F32 if tensor.ndim == 1 else kinds.F16
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _qwen(root):
    folder = tiny_qwen_pipeline(root / "qwen")
    return Door((folder,), folder, "transformer")


def _flux(root):
    folder = pipelines.tiny_flux_pipeline(root / "flux")
    return Door((folder,), folder, "transformer", True)


def _sdxl(root):
    config, file = pipelines.tiny_sdxl_pipeline(root / "sdxl-config"), root / "sdxl.safetensors"
    # A fine-tune, whose encoders and VAE are not its base model's.
    tuned = pipelines.tiny_sdxl_pipeline(root / "sdxl-tuned", seed=1)
    write_whole_checkpoint(tuned, file)
    folder = root / "sdxl"
    said = json.loads(run("import", file, "--config", config, "-o", folder, "--json", "-q"))
    assert (said["layout"], said["component"]) == ("sdxl", "unet")
    pipes = [plain(place, torch_dtype=torch.float32) for place in (folder, tuned, config)]
    ours, theirs, base = (pipelines.draw_to(pipe, root / "drawn" / "0.png") for pipe in pipes)
    assert ours == theirs != base
    return Door((folder,), folder, "unet")


def _sd3(root):
    config, file = pipelines.tiny_transformer_pipeline(root / "sd3-config"), root / "sd3.gguf"
    write_gguf(config, file)
    folder = root / "sd3"
    run("import", file, "--config", config, "-o", folder, "-q")
    return Door((file, "--config", config), folder, "transformer")


DOORS = {"qwen": _qwen, "flux": _flux, "sdxl": _sdxl, "sd3.gguf": _sd3}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("doors")
    with pytest.MonkeyPatch.context() as patch:
        # Of single files alone: that of kernels saves building them again.
        patch.setattr(single_file, "cache_directory", lambda: folder / "cache")
        with pipelines.small_pictures("FluxPipeline", "QwenImagePipeline"):
            yield folder


class Made:
    """What commands wrote, each when it is first asked for."""

    def __init__(self, root):
        self.root, self.doors, self.taken, self.folders = root, {}, {}, {}

    def door(self, name) -> Door:
        if name not in self.doors:
            self.doors[name] = DOORS[name](self.root)
        return self.doors[name]

    def statistics(self, name, recipe):
        """Calibrate by the recipe that asks for most: int4 packs layers that others keep."""
        key = (name, recipe)
        if key not in self.taken:
            how = (
                "-r",
                recipe,
                "--count",
                1,
                "--set",
                "calibration.steps=10",
                "--device",
                "cpu",
                "-q",
            )
            files = self.root / f"{name}-{recipe}.c", self.root / f"{name}-{recipe}.h"
            for what, file in zip(("model", "hessian"), files, strict=True):
                run("calibrate", what, *self.door(name).model, *how, "-o", file)
            self.taken[key] = ("-c", files[0], "--hessians", files[1])
        return self.taken[key]

    def packed(self, name, recipe) -> Path:
        if (name, recipe) not in self.folders:
            door, folder = self.door(name), self.root / f"{name}-{recipe}"
            given: tuple[Any, ...] = ()
            if recipe in {"int8", "int4"}:
                given = self.statistics(name, "int4")
                given += ("--set", f"text_encoders={recipe}") if door.encoders else ()
            else:
                given = self.statistics(name, recipe)[:2] if recipe == "comfyui" else ()
            run("pack", *door.model, "-r", recipe, *given, "-o", folder, "-q")
            self.folders[name, recipe] = folder
        return self.folders[name, recipe]


@pytest.fixture(scope="module")
def made(root):
    return Made(root)


# ---------------------------------------------------------------------------- packed, and drawn


@pytest.mark.parametrize("name", DOORS)
def test_four_bits_draw_the_originals_pictures(name, made, tmp_path):
    door, folder = made.door(name), made.packed(name, "int4")
    assert "ok" in run("verify", folder, "-q")
    parts = {part.name: part for part in open_packed(folder).components}
    encoders = {"text_encoder", "text_encoder_2"} if door.encoders else set()
    assert parts.keys() == {door.denoiser} | encoders
    for part in parts.values():
        assert "int4" in {scheme.weight.name for scheme in part.config.layers.values()}
    model, *config = door.model
    ssim = draw_beside(model, folder, tmp_path / "report", *config)
    # The very same picture would be that of no packed model.
    assert 0.99 < ssim < 1


def ssim_of_folders(original, other):
    options = ("--lpips-weights", "none", "--clip", "none", "--device", "cpu", "--json", "-q")
    told = json.loads(run("eval", "images", original, other, *options))
    return told["metrics"]["ssim"]["summary"]["mean"]


@pytest.mark.parametrize("name", DOORS)
def test_a_lora_does_to_packed_pictures_what_it_does_to_the_originals(name, made, tmp_path):
    door = made.door(name)
    pipe, dense = plain(made.packed(name, "int8")), plain(door.dense, torch_dtype=torch.float32)
    state = branches(pipe.components[door.denoiser], 1)
    lora = {f"{door.denoiser}.{key}": value for key, value in state.items()}
    before = pipelines.draw_to(pipe, tmp_path / "before" / "0.png")
    for one, folder in ((pipe, "packed"), (dense, "dense")):
        one.load_lora_weights(dict(lora))
        pipelines.draw_to(one, tmp_path / folder / "0.png")
    near = ssim_of_folders(tmp_path / "dense", tmp_path / "packed")
    assert near > 0.95
    # Pictures without it are farther off by far: the LoRA is in them.
    assert 1 - ssim_of_folders(tmp_path / "dense", tmp_path / "before") > 5 * (1 - near)
    pipe.unload_lora_weights()
    assert pipelines.draw_to(pipe, tmp_path / "after" / "0.png") == before


# ----------------------------------------------------------------------------------- exports out


def values_of(made, name, recipe):
    """Return what the codes of a packed denoiser stand for, smoothing folded in."""
    model = plain(made.packed(name, recipe)).components[made.door(name).denoiser]
    layers = [layer for _, layer, _ in iterate_packed(model)]
    dense = model.dequantize()
    return {layer: dense.get_submodule(layer).weight.detach() for layer in layers}


def exported(made, name, recipe, to, output, *options):
    run("export", made.packed(name, recipe), "--to", to, "-o", output, "-q", *options)
    return output


def drawn_from_file(made, name, file, folder):
    """Import an exported file, draw it beside the original; return its weights."""
    door = made.door(name)
    run("import", file, "--config", door.dense, "-o", folder / "imported", "-q")
    return load_file(folder / "imported" / door.denoiser / WEIGHTS)


@pytest.mark.parametrize(
    ("name", "recipe", "fmt"),
    [("flux", "comfyui", "float8_e4m3fn"), ("sdxl", "comfyui-int8", "int8_tensorwise")],
)
def test_comfyui_reads_what_was_packed(name, recipe, fmt, made, tmp_path):
    file = exported(made, name, recipe, recipe, tmp_path / "m.safetensors")
    _, layers = comfyui.read(file)
    assert {layer.format for layer in layers.values()} == {fmt}
    wanted = values_of(made, name, recipe)
    found = drawn_from_file(made, name, file, tmp_path)
    assert len(wanted) >= len(layers) >= 10
    for layer, value in wanted.items():
        # In 16 bit: codes times scales, rounded.
        assert torch.equal(found[f"{layer}.weight"], value.half()), layer


def test_gguf_goes_through_block_by_block(made, tmp_path):
    file = exported(made, "sd3.gguf", "gguf", "gguf:Q8_0", tmp_path / "m.gguf")
    before, after = (
        {t.name: t for t in gguf.GGUFReader(f).tensors}
        for f in (made.door("sd3.gguf").model[0], file)
    )
    blocks = {name for name, t in before.items() if t.tensor_type.name == "Q8_0"}
    assert before.keys() == after.keys()
    assert len(blocks) == 24
    assert all(after[name].data.tobytes() == before[name].data.tobytes() for name in blocks)
    drawn_from_file(made, "sd3.gguf", file, tmp_path)


def test_gguf_takes_what_was_packed_otherwise(made, tmp_path):
    file = exported(made, "flux", "int8", "gguf:Q8_0", tmp_path / "m.gguf", "--requantize")
    found = drawn_from_file(made, "flux", file, tmp_path)
    for layer, value in values_of(made, "flux", "int8").items():
        lost = (found[f"{layer}.weight"].float() - value).norm() / value.norm()
        assert lost < 0.01, layer


#: SDNQ changes torch and diffusers where it is imported: a process of its own.
_WITH_SDNQ = """
import sys
from pathlib import Path
import sdnq
import torch
from tests.support.loading import plain
from tests.support.pipelines import draw_to, small_pictures
torch.set_num_threads(2)
with small_pictures("QwenImagePipeline"):
    draw_to(plain(sys.argv[1], torch_dtype=torch.float32), Path(sys.argv[2]))
"""


def test_sdnq_draws_what_was_packed(made, tmp_path):
    folder = exported(made, "qwen", "int8", "sdnq", tmp_path / "out", "--requantize")
    stored = load_file(folder / "transformer" / WEIGHTS)
    for layer, value in values_of(made, "qwen", "int8").items():
        # An int8 layer stays int8: smoothing is folded in, and its codes are rounded again.
        rows = stored[f"{layer}.weight"].float() * stored[f"{layer}.scale"].float()
        assert (rows - value).norm() < 0.01 * value.norm(), layer
    done = subprocess.run(
        [sys.executable, "-c", _WITH_SDNQ, folder, tmp_path / "sdnq" / "0.png"],
        env={**os.environ, "SDNQ_USE_TORCH_COMPILE": "0"},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dense = plain(made.door("qwen").dense, torch_dtype=torch.float32)
    pipelines.draw_to(dense, tmp_path / "dense" / "0.png")
    assert ssim_of_folders(tmp_path / "dense", tmp_path / "sdnq") > 0.99
