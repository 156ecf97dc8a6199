"""Compare what SDNQ quantized in a process of its own: importing it changes torch and diffusers.

python -m tests.support.judge_sdnq PIPELINE FOLDER OTHER...: FOLDER/sdnq is made of PIPELINE by
SDNQ, FOLDER/out by 'eval compare' of it and the others, and FOLDER/plain.npy are the pictures that
diffusers alone draws with it.
"""

import json
import os
import sys
from pathlib import Path

PROMPTS = ("a red ball", "a blue box")
STEPS = 1


def main(pipeline, folder, others):
    import torch

    torch.set_num_threads(2)
    make(pipeline, folder / "sdnq")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    judge(pipeline, folder, others)
    draw(folder)


def make(pipeline, folder):
    """Write the pipeline with a UNet in 8 bit and a text encoder in 4."""
    import diffusers
    import torch
    import transformers
    from sdnq import SDNQConfig

    small = {"minimum_allowed_numel": 0, "minimum_allowed_channel_size": 0}
    unet = diffusers.UNet2DConditionModel.from_pretrained(
        pipeline / "unet", dtype=torch.float16,
        quantization_config=SDNQConfig(weights_dtype="int8", quant_conv=True, **small),
    )  # fmt: skip
    encoder = transformers.CLIPTextModel.from_pretrained(
        pipeline / "text_encoder", dtype=torch.float16,
        quantization_config=SDNQConfig(weights_dtype="uint4", group_size=32, **small),
    )  # fmt: skip
    diffusers.DiffusionPipeline.from_pretrained(
        pipeline, unet=unet, text_encoder=encoder
    ).save_pretrained(folder)


def judge(pipeline, folder, others):
    """Run the command as a user does."""
    from quantkit.cli.evaluate_command import evaluate as command

    line = ["compare", pipeline, folder / "sdnq", *others, "-o", folder / "out"]
    line += ["--prompts", folder / "prompts.txt", "--steps", STEPS, "--lpips-weights", "none"]
    line += ["--clip", "none", "--no-noise-floor", "--quiet", "--gate", "ssim=-1"]
    command([str(word) for word in line], standalone_mode=False)


def draw(folder):
    """Save the pictures of diffusers alone, (prompts, height, width, 3) in [0, 1]."""
    import diffusers
    import numpy as np
    import torch

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder / "sdnq", dtype=torch.float32)
    noise = [torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))]
    pictures = pipe(
        list(PROMPTS), num_inference_steps=STEPS, generator=noise, output_type="np"
    ).images
    np.save(folder / "plain.npy", pictures)
    layers = [n for n, m in pipe.unet.named_modules() if hasattr(m, "sdnq_dequantizer")]
    (folder / "layers.json").write_text(json.dumps(layers))


if __name__ == "__main__":
    os.environ["SDNQ_USE_TORCH_COMPILE"] = "0"
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
