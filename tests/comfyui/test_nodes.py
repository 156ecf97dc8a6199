"""The nodes as ComfyUI sees them: their tables, their lists, what they return."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import InputError, ShapeError
from tests.comfyui.conftest import denoiser_of
from tests.support import pipelines

pytestmark = pytest.mark.usefixtures("comfy_sd")


@pytest.fixture
def models(packed, tmp_path):
    """ComfyUI's model folders with a packed pipeline, a packed denoiser, and others."""
    folder = tmp_path / "models"
    shutil.copytree(packed("sd3"), folder / "diffusers/sd3-fp8")
    shutil.copytree(denoiser_of(packed("flux")), folder / "diffusion_models/flux-int8")
    pipelines.tiny_sd15_pipeline(folder / "diffusers/dense")
    (folder / "diffusers/empty").mkdir()
    (folder / "diffusion_models/model.safetensors").write_bytes(b"")
    (folder / "diffusers/broken").mkdir()
    (folder / "diffusers/broken/config.json").write_text("{")
    return folder


def test_lists_show_packed_folders_alone(models):
    from quantkit.comfyui.nodes import PackedModelLoader, PackedPipelineLoader

    (pipeline,) = PackedPipelineLoader.INPUT_TYPES()["required"]["pipeline"]
    (model,) = PackedModelLoader.INPUT_TYPES()["required"]["model"]
    assert pipeline == ["sd3-fp8"]
    assert model == ["sd3-fp8", "flux-int8"]


def test_a_pipeline_gives_its_three_parts(models):
    from quantkit.comfyui.nodes import PackedModelLoader, PackedPipelineLoader

    model, clip, vae = PackedPipelineLoader().load("sd3-fp8")
    assert "joint_blocks.0.x_block.attn.qkv.weight" in model.state
    assert clip["embedding_directory"] == [str(models / "embeddings")]
    assert vae.state
    (flux,) = PackedModelLoader().load("flux-int8")
    assert "double_blocks.0.img_attn.qkv.weight" in flux.state


def test_every_node_is_what_comfyui_expects():
    from quantkit.comfyui import nodes

    assert nodes.NODE_CLASS_MAPPINGS.keys() == nodes.NODE_DISPLAY_NAME_MAPPINGS.keys()
    for node in nodes.NODE_CLASS_MAPPINGS.values():
        assert callable(getattr(node, node.FUNCTION))
        assert node.CATEGORY == "quantkit"
        assert node.DESCRIPTION.endswith(".")


def test_the_judge_says_what_the_pictures_show():
    from quantkit.comfyui.nodes import JudgePictures

    torch.manual_seed(0)
    original = torch.rand(8, 48, 48, 3)
    near = original + 0.01 * torch.randn_like(original)
    for packed, word in ((near, "pass"), (torch.rand_like(original), "fail")):
        found = JudgePictures().judge(original, packed)
        verdict, ssim = found["result"]
        assert word in verdict
        assert found["ui"]["text"] == [verdict]
        assert (ssim > 0.95) == (word == "pass")
    assert "undecided" in JudgePictures().judge(original[:2], near[:2])["result"][0]


def test_pictures_that_are_no_pairs_are_refused():
    from quantkit.comfyui.nodes import JudgePictures

    pictures = torch.rand(2, 48, 48, 3)
    with pytest.raises(InputError, match="2 pictures of the original and 1 of the packed model"):
        JudgePictures().judge(pictures, pictures[:1])
    with pytest.raises(ShapeError):
        JudgePictures().judge(pictures, pictures[:, :32])


def test_the_nodes_import_without_diffusers(tmp_path):
    """ComfyUI's users have none, and importing it takes seconds."""
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "sys.modules['diffusers'] = sys.modules['transformers'] = None\n"
        "import pytest\n"
        "from tests.support import fake_comfy\n"
        "fake_comfy.install(pytest.MonkeyPatch(), {})\n"
        "import quantkit.comfyui.nodes\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, script], check=True, env={"PYTHONPATH": str(root)})


def test_the_workflow_of_the_guide_names_nodes_and_inputs_that_exist():
    from quantkit.comfyui.nodes import NODE_CLASS_MAPPINGS

    page = (Path(__file__).parents[2] / "docs/guides/comfyui.md").read_text(encoding="utf-8")
    workflow = json.loads(page.split("```json")[1].split("```")[0])
    own = {key: node for key, node in workflow.items() if "Quantkit" in node["class_type"]}
    assert own
    for key, node in own.items():
        made = NODE_CLASS_MAPPINGS[node["class_type"]]
        assert node["inputs"].keys() == made.INPUT_TYPES()["required"].keys()
        links = [v for n in workflow.values() for v in n["inputs"].values() if isinstance(v, list)]
        assert {index for source, index in links if source == key} == {0, 1, 2}
    namespace: dict[str, Any] = {}
    line = next(line for line in page.splitlines() if line.startswith("    from quantkit"))
    exec(line.strip(), namespace)
    assert namespace["NODE_CLASS_MAPPINGS"] is NODE_CLASS_MAPPINGS
    assert namespace["NODE_DISPLAY_NAME_MAPPINGS"]
