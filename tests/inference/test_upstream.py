"""The patch for diffusers: packed models load without ``import quantkit``, to the same bits."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from quantkit.recipe.schema import Recipe
from quantkit.workflow.pack import pack
from tests.support.loading import draw, plain, weight_files

PATCH = Path(__file__).parents[2] / "docs/upstream/diffusers-quantkit.patch"
VERSION = "0.42.1"

#: Loads with a patched diffusers: PACKED OUTPUT.
LOADER = """
import sys
from pathlib import Path
import torch, diffusers
from safetensors.torch import save_file

torch.set_num_threads(1)
packed, output = map(Path, sys.argv[1:])
assert "quantkit" not in sys.modules
pipe = diffusers.DiffusionPipeline.from_pretrained(packed, torch_dtype=torch.float32)
noise = torch.Generator().manual_seed(0)
images = pipe("a red square", num_inference_steps=1, output_type="pt", generator=noise).images
save_file({"images": images}, output / "drawn.safetensors")
pipe.save_pretrained(output / "saved")
print(type(pipe.unet.hf_quantizer).__module__, Path(diffusers.__file__).parent)
"""


@pytest.fixture
def patched(tmp_path):
    """A copy of diffusers with the part of the patch that is of the library."""
    shutil.copytree(Path(diffusers.__file__).parent, tmp_path / "patched/diffusers")
    files = re.split(r"(?m)^(?=diff --git )", PATCH.read_text(encoding="utf-8"))
    library = "".join(text for text in files if text.startswith("diff --git a/src/"))
    line = ["patch", "-p1", "--fuzz=0", "--batch", "-d", str(tmp_path / "patched")]
    text = re.sub(r"(?m)^((?:diff --git|---|\+\+\+) .*)$", _without_src, library)
    subprocess.run(line, input=text, text=True, check=True, capture_output=True)
    return tmp_path / "patched"


def _without_src(line):
    return re.sub(r"\b([ab])/src/", r"\1/", line[1])


@pytest.mark.slow
@pytest.mark.skipif(version("diffusers") != VERSION, reason=f"the patch is of {VERSION}")
@pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed")
@pytest.mark.usefixtures("one_thread")
def test_patched_diffusers_draws_the_same(patched, pipeline_dir, tmp_path):
    packed, recipe = (
        tmp_path / "packed",
        Recipe.model_validate({"name": "t", "text_encoders": "int8"}),
    )
    pack(pipeline_dir, output=packed, recipe=recipe)
    environment = os.environ | {"PYTHONPATH": str(patched)}
    line = [sys.executable, "-c", LOADER, str(packed), str(tmp_path)]
    done = subprocess.run(
        line, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "quantkit.inference.loading.diffusers_loading", str(patched / "diffusers"),
    ]  # fmt: skip
    found = load_file(tmp_path / "drawn.safetensors")["images"]
    assert torch.equal(found, draw(plain(packed, torch_dtype=torch.float32)))
    for component in ("unet", "text_encoder"):
        assert weight_files(tmp_path / "saved" / component) == weight_files(packed / component)
