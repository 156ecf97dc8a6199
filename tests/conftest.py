"""Shared by all tests: no network, few threads, and tiny pipelines built once."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Set before any test module imports a hub client: tests never reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Else importing it compiles for ten seconds.
os.environ["SDNQ_USE_TORCH_COMPILE"] = "0"

# Busy cores miss any deadline; what was red once must be red again. `make nightly` draws others.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.register_profile("repeatable", _PATIENT, derandomize=True)
# hypothesis derandomizes where it sees CI, unless told.
settings.register_profile("drawn", _PATIENT, derandomize=False, max_examples=2000)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    """As many as OMP_NUM_THREADS says: those of several processes wait for each other's."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(2)


@pytest.fixture(scope="session", autouse=True)
def _quickly_compiled():
    """Host kernels with -O1: each is compiled in half the time, rounds alike and runs seldom."""
    from quantkit.device.host import compiling

    compiling._FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in compiling._FLAGS)


@pytest.fixture
def two_threads():
    """Two threads for a test of what our own kernels give to threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread():
    """One thread for a module's tests: small layers wait longer for a second one than they gain."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["compiled", "torch"])
def either_core(request):
    """The compiled core, then a machine without a compiler: one test of both implementations."""
    from tests.support.cores import with_core

    with with_core(request.param):
        yield request.param


@pytest.fixture(scope="module")
def hopper():
    """The GPU as the loader knows it; skipped when it is not Hopper."""
    import torch

    from quantkit.device.gpu.selftest import state_of
    from quantkit.device.hopper.hopper_gemm import ARCHITECTURE

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (compute capability 9.0)")
    state = state_of(torch.cuda.current_device())
    assert not state.problem
    assert state.device.arch.name == ARCHITECTURE
    return state.device


@pytest.fixture(scope="module")
def any_model():
    """Take the files for a model, whatever tensors they hold: no class is built."""
    from tests.support import skeletons

    with pytest.MonkeyPatch.context() as patch:
        skeletons.install(patch)
        yield


@pytest.fixture(scope="session")
def pipeline_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny StableDiffusionPipeline in fp16; read-only for tests (copy it to break it)."""
    from tests.support.pipelines import tiny_pipeline

    return tiny_pipeline(tmp_path_factory.mktemp("tiny") / "pipeline")


@pytest.fixture(scope="session")
def transformer_pipeline_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny StableDiffusion3Pipeline in fp16; read-only for tests."""
    from tests.support.pipelines import tiny_transformer_pipeline

    return tiny_transformer_pipeline(tmp_path_factory.mktemp("tiny") / "transformer")


@pytest.fixture(scope="session")
def transformer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny PixArt transformer alone in fp16; read-only for tests."""
    from tests.support.pipelines import tiny_transformer

    return tiny_transformer(tmp_path_factory.mktemp("tiny") / "pixart")


@pytest.fixture(scope="session")
def model(pipeline_dir: Path):
    """The tiny StableDiffusionPipeline, opened; modules with a model of their own override it."""
    from quantkit.models.source import open_model

    return open_model(str(pipeline_dir))


@pytest.fixture(scope="session")
def masks(model):
    """2:4 by magnitude for every layer of the tiny pipeline that can be sparse."""
    from quantkit.progress import silent
    from quantkit.recipe.load import load_recipe
    from quantkit.recipe.schema import SparsityRecipe
    from quantkit.sparsity.choose import choose_masks

    recipe = load_recipe("fp8").model_copy(update={"sparsity": SparsityRecipe()})
    return choose_masks(model, recipe, None, progress=silent)
