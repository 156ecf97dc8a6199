"""Stage 1: CLIP on captioned pictures, contrastively, with near misses in every batch."""

import json
from pathlib import Path
from typing import Any

import torch
from quantkit.eval.world.scenes import Scenes, draw_distinct_scenes, draw_scenes, vary_scenes
from torch import Generator, Tensor
from torch.nn import functional

from docs.training.render import render
from docs.training.scene_layout import lay_out
from docs.training.tokens import CaptionEncoder, write_tokenizer
from docs.training.train_common import (
    HELD_OUT_SEED,
    Options,
    TrainingPlan,
    frozen,
    train,
)
from docs.training.world_models import IMAGE_PROCESSOR, build_clip

PLAN = TrainingPlan(steps=2000, batch=2048, rate=1e-3, warm_up=200, decay=0.1, momentum=(0.9, 0.98))
#: A quarter of a batch differs from another quarter in one word each, or colours would do.
_NEAR_MISSES = 0.25


def train_clip(options: Options) -> dict[str, Any]:
    """Train CLIP and write ``clip/`` and the pipeline's tokenizer and text encoder."""
    from transformers import CLIPTextModel

    plan, device = options.fit_plan(PLAN), options.device
    torch.manual_seed(options.seed)
    model = build_clip().to(device).train()
    generator, paint, words = options.generator(1), options.painter(), CaptionEncoder.of_world()
    near = int(plan.batch * _NEAR_MISSES)

    def draw_loss() -> Tensor:
        fresh = draw_scenes(plan.batch - near, generator)
        scenes = _join(fresh, vary_scenes(fresh[:near], generator))
        found = model(input_ids=words.encode(scenes), pixel_values=paint(scenes, generator))
        scores = found.logits_per_text.float()
        target = torch.arange(plan.batch, device=device)
        return functional.cross_entropy(scores, target) + functional.cross_entropy(scores.T, target)

    train("clip", model, draw_loss, plan, device)
    clip = options.out / "clip"
    _save(model, clip)
    pipeline = options.out / "pipeline"
    write_tokenizer(pipeline / "tokenizer")
    text = CLIPTextModel.from_pretrained(clip).half()
    text.save_pretrained(pipeline / "text_encoder")
    return {"steps": plan.steps, "batch": plan.batch, **retrieval(clip, device)}


def load_clip(directory: Path, device: torch.device) -> Any:
    """Return the saved CLIP model in float32."""
    from transformers import CLIPModel

    return CLIPModel.from_pretrained(directory).float().to(device).eval()


def retrieval(directory: Path, device: torch.device, count: int = 512) -> dict[str, float]:
    """Return the shares of held-out pictures and captions that find each other in ``count``."""
    generator = Generator().manual_seed(HELD_OUT_SEED)
    scenes = draw_distinct_scenes(count, generator)
    pictures = 2 * render(scenes, lay_out(scenes, generator)) - 1
    ids = CaptionEncoder.of_world().encode(scenes)
    with frozen(load_clip(directory, device)) as model:
        found = model(input_ids=ids.to(device), pixel_values=pictures.to(device))
    scores = found.logits_per_image.cpu()
    right = torch.arange(count)
    return {
        f"captions_found_of_{count}": (scores.argmax(1) == right).double().mean().item(),
        f"pictures_found_of_{count}": (scores.argmax(0) == right).double().mean().item(),
    }


def _join(first: Scenes, second: Scenes) -> Scenes:
    return Scenes(
        **{name: torch.cat((value, getattr(second, name))) for name, value in vars(first).items()}
    )


def _save(model: Any, directory: Path) -> None:
    model.half().save_pretrained(directory)
    write_tokenizer(directory)
    (directory / "preprocessor_config.json").write_text(
        json.dumps(IMAGE_PROCESSOR, indent=2) + "\n", encoding="utf-8"
    )
