"""Print GB before and after, by component, of published pipelines: headers over sparse files.

``python docs/measure_text_encoders.py`` builds every component on the meta device from what its
authors published, writes pipelines whose weights are holes, and asks ``pack --dry-run``. Nothing is
run and nothing is downloaded.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import diffusers
import torch
import transformers

from quantkit.recipe.load import load_recipe
from quantkit.workflow.pack import pack

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.headers import write_header, write_pipeline

_CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
           "num_attention_heads": 12, "projection_dim": 768}  # fmt: skip
_CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
           "num_attention_heads": 20, "projection_dim": 1280}  # fmt: skip
_T5_XXL = {"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24,
           "num_heads": 64, "feed_forward_proj": "gated-gelu"}  # fmt: skip
_QWEN_7B = {
    "text_config": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420,
                      "num_heads": 16, "out_hidden_size": 3584},
}  # fmt: skip
_VAE = {
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip

#: pipeline -> key list of its denoiser (None: its class), config of that, the other components by
#: name: class and config
PIPELINES: dict[str, tuple[str | None, str, dict[str, tuple[str, dict[str, Any]]]]] = {
    "FLUX.1-dev": ("flux1_dev", "FluxPipeline", {
        "text_encoder": ("CLIPTextModel", _CLIP_L),
        "text_encoder_2": ("T5EncoderModel", _T5_XXL),
        "vae": ("AutoencoderKL", _VAE),
    }),
    "Stable Diffusion 3.5 Large": ("sd35_large", "StableDiffusion3Pipeline", {
        "text_encoder": ("CLIPTextModelWithProjection", _CLIP_L),
        "text_encoder_2": ("CLIPTextModelWithProjection", _CLIP_G),
        "text_encoder_3": ("T5EncoderModel", _T5_XXL),
        "vae": ("AutoencoderKL", _VAE),
    }),
    "Qwen-Image": (None, "QwenImagePipeline", {
        "transformer": ("QwenImageTransformer2DModel", {}),
        "text_encoder": ("Qwen2_5_VLForConditionalGeneration", _QWEN_7B),
        "vae": ("AutoencoderKLQwenImage", {}),
    }),
}  # fmt: skip

#: recipe of the denoiser, and of the text encoders
TREATMENTS = (("int8", None), ("int8", "int8"), ("int8", "int4"), ("int4", "int4"))


def build(class_name: str, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a model on the meta device and its config."""
    with torch.device("meta"):
        if hasattr(transformers, class_name):
            cls = getattr(transformers, class_name)
            config = cls.config_class(**values, tie_word_embeddings=False)
            return cls(config), {**config.to_dict(), "architectures": [class_name]}
        model = getattr(diffusers, class_name).from_config({"_class_name": class_name, **values})
        return model, {"_class_name": class_name, **dict(model.config)}


def write(path: Path, name: str) -> Path:
    """Write a pipeline of holes."""
    keys, pipeline, others = PIPELINES[name]
    if keys is None:
        path.mkdir(parents=True)
        (path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    else:
        write_pipeline(path, keys, pipeline)
    index = json.loads((path / "model_index.json").read_text())
    for component, (class_name, values) in others.items():
        model, config = build(class_name, values)
        of_transformers = hasattr(transformers, class_name)
        index[component] = ["transformers" if of_transformers else "diffusers", class_name]
        stem = "model" if of_transformers else "diffusion_pytorch_model"
        (path / component).mkdir()
        (path / component / "config.json").write_text(json.dumps(config, default=str))
        tied = getattr(model, "all_tied_weights_keys", {}) if "T5" in class_name else {}
        shapes = {n: list(t.shape) for n, t in model.state_dict().items() if n not in tied}
        write_header(path / component / f"{stem}.safetensors", shapes, "BF16")
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def main() -> None:
    """Print a table for every pipeline."""
    for name in PIPELINES:
        with TemporaryDirectory() as folder:
            path = write(Path(folder) / "model", name)
            click.echo(f"\n{name}")
            for denoiser, encoders in TREATMENTS:
                recipe = load_recipe(denoiser, {"text_encoders": encoders})
                found: Any = pack(path, output=Path(folder) / "out", recipe=recipe, dry_run=True)
                summary = getattr(found, "summary", found)
                parts = [
                    f"{c.name} {c.bytes_before / 1e9:.2f} -> {c.bytes_after / 1e9:.2f}"
                    for c in summary.components
                ]
                total = f"{summary.bytes_before / 1e9:.2f} -> {summary.bytes_after / 1e9:.2f} GB"
                click.echo(f"  {denoiser}, text encoders {encoders}: {total} ({', '.join(parts)})")


if __name__ == "__main__":
    main()
