"""Packed tiny pipelines, and Python that can import ComfyUI's modules."""

import shutil

import pytest

from quantkit.numerics.formats import E4M3FN, INT4, INT8
from quantkit.numerics.granularity import PerChannel, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.support import fake_comfy, pipelines
from tests.support.loading import packable
from tests.support.packed import pack_component

TOKEN, STATIC = Activation.TOKEN, Activation.STATIC
INT8_TOKEN = Scheme(INT8, PerChannel(), None, TOKEN)
#: (pipeline, scheme of its denoiser's layers), by the pipeline's name
PACKED = {
    "sd15": (pipelines.tiny_sd15_pipeline, Scheme(INT4, PerChannel(), None, TOKEN, smooth=True)),
    "sd3": (pipelines.tiny_transformer_pipeline, Scheme(E4M3FN, PerTensor(), None, TOKEN)),
    "flux": (pipelines.tiny_flux_pipeline, Scheme(INT8, PerChannel(), TWO_OF_FOUR, TOKEN)),
    "sd3-buckets": (
        pipelines.tiny_transformer_pipeline,
        Scheme(E4M3FN, PerChannel(), None, STATIC, (300.5, 600.5)),
    ),
}


def denoiser_of(pipeline):
    return next(pipeline / name for name in ("unet", "transformer") if (pipeline / name).is_dir())


def pack_here(pipeline, scheme_of):
    """Pack a pipeline's denoiser in place, each layer by ``scheme_of`` its name."""
    folder = denoiser_of(pipeline)
    pack_component(folder, {layer: scheme_of(layer) for layer in packable(folder)})
    return pipeline


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """Return the directory of a packed tiny pipeline, made when it is first asked for."""
    made = {}

    def of(name):
        if name not in made:
            build, scheme = PACKED[name]
            pipeline = build(tmp_path_factory.mktemp("comfyui") / name)
            made[name] = pack_here(pipeline, lambda layer: scheme)
        return made[name]

    return of


@pytest.fixture
def copied(packed, tmp_path):
    """Return a copy of a packed pipeline to change."""

    def of(name):
        return shutil.copytree(packed(name), tmp_path / name)

    return of


@pytest.fixture
def comfy_sd(monkeypatch, tmp_path):
    """ComfyUI's modules; its model folders lie in ``models``."""
    fake_comfy.skip_without_kitchen()
    kinds = ("diffusers", "diffusion_models", "embeddings")
    folders = {kind: [tmp_path / "models" / kind] for kind in kinds}
    for paths in folders.values():
        paths[0].mkdir(parents=True)
    return fake_comfy.install(monkeypatch, folders)
