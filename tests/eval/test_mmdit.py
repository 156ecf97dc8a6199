"""The MMDiT of docs/training, with the other models of the bundled pipeline."""

from pathlib import Path

import pytest
import torch

from docs.training import train_mmdit, train_samples
from docs.training.train_common import Options
from quantkit.resources import demo_assets

TRANSFORMER = Path(train_mmdit.__file__).parent / "mmdit" / "transformer"


@pytest.mark.slow
def test_the_mmdit_paints_its_captions(tmp_path):
    from diffusers import StableDiffusion3Pipeline

    assets = Path(demo_assets())
    train_mmdit.assemble(assets, TRANSFORMER, tmp_path / "mmdit")
    pipe = StableDiffusion3Pipeline.from_pretrained(tmp_path / "mmdit").to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    texts = (assets / "prompts.txt").read_text(encoding="utf-8").splitlines()[:6]
    pictures = train_samples.generate(pipe, texts, steps=20, guidance=train_samples.GUIDANCE)
    options = Options(assets, torch.device("cpu"), 1.0, 1.0, compiled=False, seed=0)
    assert train_samples.matched(options, pictures, texts) == 1.0
