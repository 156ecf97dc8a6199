"""Print the peak GPU memory of each step of a FLUX.1-dev pipeline, in 16 bit and packed.

``python docs/measure_vram.py``: the published shapes with random weights, 1024x1024, one picture,
BF16. Needs a GPU of 40 GB and 70 GB of disk under TMPDIR; takes some 15 minutes.
"""

import gc
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import diffusers
import torch
import transformers

import quantkit
from quantkit.recipe.schema import Recipe

sys.path.insert(0, str(Path(__file__).parents[1]))
from docs.measure_text_encoders import PIPELINES

COMPONENTS: dict[str, tuple[str, dict[str, Any]]] = {
    **PIPELINES["FLUX.1-dev"][2],
    "transformer": ("FluxTransformer2DModel", {"guidance_embeds": True}),
}
#: what is printed -> format of the transformer, and of the text encoders; None: 16 bit
TREATMENTS: dict[str, tuple[str, str] | None] = {
    "16 bit": None,
    "transformer INT8, encoders INT4": ("int8", "int4"),
    "both INT4": ("int4", "int4"),
}


def library(class_name: str) -> Any:
    """Return the library that has a class."""
    return transformers if hasattr(transformers, class_name) else diffusers


def make(folder: Path) -> None:
    """Write the pipeline with random weights, without tokenizers."""
    index: dict[str, Any] = {"_class_name": "FluxPipeline"}
    torch.set_default_dtype(torch.bfloat16)
    for name, (class_name, values) in COMPONENTS.items():
        owner = library(class_name)
        cls = getattr(owner, class_name)
        with torch.device("cuda"):
            model = cls(cls.config_class(**values)) if owner is transformers else cls(**values)
        model.to(torch.bfloat16).save_pretrained(folder / name)
        index[name] = [owner.__name__, class_name]
    torch.set_default_dtype(torch.float32)
    (folder / "model_index.json").write_text(json.dumps(index))


def pack(source: Path, folder: Path, transformer: str, encoders: str) -> Path:
    """Pack without calibration: memory does not depend on the values."""
    weight: Any = {"format": transformer}
    chosen: Any = {"weight": weight, "kept": weight, "text_encoders": encoders}
    recipe = Recipe.model_validate({"name": "vram", "data_free": True, **chosen})
    quantkit.pack(source, output=folder, recipe=recipe, force=True)
    return folder


def load(folder: Path) -> dict[str, Any]:
    """Return the components in BF16, by plain from_pretrained."""
    return {
        name: getattr(library(class_name), class_name)
        .from_pretrained(folder / name, torch_dtype=torch.bfloat16)
        .eval()
        for name, (class_name, _) in COMPONENTS.items()
    }


def peaks(parts: dict[str, Any], *, offload: bool) -> dict[str, float]:
    """Return the GB that were allocated at most while encoding, denoising and decoding."""
    pipe: Any = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        tokenizer=None,
        tokenizer_2=None,
        **parts,
    )
    if offload:
        pipe.enable_model_cpu_offload()
    else:
        pipe.to("cuda")
    ids = torch.randint(3, 30000, (1, 512), device="cuda")
    latents = torch.zeros(1, 16, 128, 128, dtype=torch.bfloat16, device="cuda")
    embeds: list[torch.Tensor] = []

    def encode() -> None:
        embeds[:] = [pipe.text_encoder(ids[:, :77]).pooler_output, pipe.text_encoder_2(ids)[0]]

    def denoise() -> None:
        pooled, prompt = embeds
        pipe(
            prompt_embeds=prompt, pooled_prompt_embeds=pooled, height=1024, width=1024,
            num_inference_steps=2, output_type="latent",
        )  # fmt: skip

    def decode() -> None:
        pipe.vae.decode(latents)

    steps = {"encode": encode, "denoise": denoise, "decode": decode}
    found = {}
    for name, step in steps.items():
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            step()
        found[name] = torch.cuda.max_memory_allocated() / 1e9
    return found


def main() -> None:
    """Print a line for every treatment, all on the GPU and by component."""
    with TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        make(source)
        for title, formats in TREATMENTS.items():
            path = pack(source, Path(folder) / "packed", *formats) if formats else source
            for offload in (False, True):
                gc.collect()
                torch.cuda.empty_cache()
                row = peaks(load(path), offload=offload)
                text = ", ".join(f"{step} {found:.2f} GB" for step, found in row.items())
                click.echo(f"{title}{', model offload' if offload else ''}: {text}")


if __name__ == "__main__":
    main()
