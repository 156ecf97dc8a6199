"""Shared by the tests of exports: tiny pipelines and what was measured on them."""

import pytest

from quantkit.recipe.load import load_recipe
from quantkit.workflow.calibrate import calibrate
from tests.support import pipelines
from tests.support.denoiser_classes import ROWS
from tests.support.denoisers import tiny_denoiser
from tests.support.tiny_denoisers import tiny_model

PIPELINES = {
    "sd15": pipelines.tiny_sd15_pipeline,
    "sdxl": pipelines.tiny_sdxl_pipeline,
    "sd3": pipelines.tiny_transformer_pipeline,
    "flux": pipelines.tiny_flux_pipeline,
}


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory):
    """Return the directory of a tiny pipeline and its calibration, made when first asked for."""
    made = {}

    def of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(f"calibrated-{name}")
            pipeline = PIPELINES[name](folder / "pipeline")
            path = folder / "calibration.safetensors"
            calibrate(
                pipeline,
                recipe=load_recipe("comfyui", {"calibration.steps": 4}),
                output=path,
                prompts=["a red cube", "two blue balls"],
                device="cpu",
            )
            made[name] = pipeline, path
        return made[name]

    return of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the directory of a tiny denoiser, float32, made when it is first asked for."""
    made = {}

    def directory(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("denoisers") / name
            tiny_denoiser(name).save_pretrained(made[name])
        return made[name]

    return directory


@pytest.fixture(scope="module")
def sana_dir(tmp_path_factory):
    """Return the directory of a tiny Sana, whose original layout no program reads."""
    folder = tmp_path_factory.mktemp("sana")
    tiny_model(next(r for r in ROWS if r.class_name == "SanaTransformer2DModel")).save_pretrained(
        folder
    )
    return folder
