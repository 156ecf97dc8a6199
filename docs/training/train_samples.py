"""Stage 5: sample the finished pipeline, let CLIP name the pictures, and show them to people."""

from typing import Any

import torch
from quantkit.eval.world.scenes import captions, draw_distinct_scenes
from torch import Generator, Tensor

from docs.training.sheet import save_sheet
from docs.training.tokens import MAX_LENGTH
from docs.training.train_clip import load_clip
from docs.training.train_common import HELD_OUT_SEED, PROMPT_SEED, Options, frozen

#: Prompts of ``prompts.txt``, and pictures of the larger sample that makes the share precise.
PROMPTS, MANY = 64, 512
#: The pipeline's default of 20 steps; guidance 4 unless another of these is better.
STEPS, GUIDANCE, OTHERS = 20, 4.0, (2.0, 3.0, 5.0, 6.0)
_SHOWN = 24


def sample_pipeline(options: Options) -> dict[str, Any]:
    """Write ``prompts.txt`` and ``contact_sheet.png`` and return how many pictures CLIP names."""
    texts = captions(draw_distinct_scenes(PROMPTS, Generator().manual_seed(PROMPT_SEED)))
    (options.out / "prompts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    pipeline = _load_pipeline(options)
    steps = max(2, round(STEPS * min(1.0, 10 * options.scale)))
    shares = {}
    best: tuple[float, float, Tensor] | None = None
    for guidance in (GUIDANCE, *OTHERS):
        pictures = generate(pipeline, texts, steps=steps, guidance=guidance)
        shares[guidance] = matched(options, pictures, texts)
        if best is None or shares[guidance] > best[1]:
            best = (guidance, shares[guidance], pictures)
    assert best is not None
    guidance, share, pictures = best
    save_sheet(pictures[:_SHOWN], texts[:_SHOWN], options.out / "contact_sheet.png")
    many = captions(
        draw_distinct_scenes(
            max(8, round(MANY * min(1.0, options.scale))), Generator().manual_seed(HELD_OUT_SEED)
        )
    )
    more = generate(pipeline, many, steps=steps, guidance=guidance)
    return {
        "sampler_steps": steps,
        "guidance": guidance,
        f"matched_of_{PROMPTS}": share,
        "matched_by_guidance": {str(key): value for key, value in sorted(shares.items())},
        f"matched_of_{len(many)}": matched(options, more, many),
    }


def generate(pipeline: Any, texts: list[str], *, steps: int, guidance: float) -> Tensor:
    """Return (n, 3, 64, 64) float32 pictures in [0, 1]; picture i begins from noise of seed i."""
    found = []
    for begin in range(0, len(texts), PROMPTS):
        part = texts[begin : begin + PROMPTS]
        seeds = [Generator().manual_seed(begin + index) for index in range(len(part))]
        pictures = pipeline(
            part,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=seeds,
            output_type="pt",
        ).images
        found.append(pictures.float().cpu())
    return torch.cat(found)


def matched(options: Options, pictures: Tensor, texts: list[str]) -> float:
    """Return the share of pictures whose own caption CLIP scores highest among all captions."""
    from transformers import CLIPTokenizer

    clip = options.out / "clip"
    tokenizer = CLIPTokenizer.from_pretrained(clip)
    ids = tokenizer(texts, padding="max_length", max_length=MAX_LENGTH, return_tensors="pt")
    with frozen(load_clip(clip, options.device)) as model:
        found = model(
            input_ids=ids.input_ids.to(options.device),
            pixel_values=(2 * pictures - 1).to(options.device),
        )
    best = found.logits_per_image.argmax(1).cpu()
    return float((best == torch.arange(len(texts))).double().mean())


def _load_pipeline(options: Options) -> Any:
    from diffusers import StableDiffusionPipeline

    # The components load in different dtypes, so one is chosen for all of them here.
    pipeline = StableDiffusionPipeline.from_pretrained(options.out / "pipeline")
    pipeline = pipeline.to(options.device, torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
