"""The stand-in HIP runtime that the loader's tests share, and a GPU."""

import pytest
import torch

from quantkit.device import cache
from quantkit.device.gpu import driver_hip, objects
from quantkit.device.host import compiling
from tests.support.standin_hip import VARIABLES, Standin, build_standin


@pytest.fixture(scope="session")
def standin_root(tmp_path_factory):
    compiling._folder()  # the host kernels stay in the cache that all tests share
    return build_standin(tmp_path_factory.mktemp("rocm"))


@pytest.fixture
def gpu():
    """Skip where torch sees no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")


@pytest.fixture
def hip(standin_root, tmp_path, monkeypatch):
    """The stand-in, with an empty cache and an empty log."""
    for name in VARIABLES:
        monkeypatch.delenv(f"STANDIN_{name}", raising=False)
    monkeypatch.setenv("ROCM_PATH", str(standin_root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("QUANTKIT_OBJECTS", raising=False)
    (tmp_path / "kernels").mkdir()
    standin = Standin(standin_root, tmp_path / "calls", tmp_path / "kernels", monkeypatch)
    standin.set(LOG=standin.log, KERNELS=standin.kernels)
    forgotten = (driver_hip.load_hip, objects._folder, objects._read_folder, cache._prune_once)
    for function in forgotten:
        function.cache_clear()
    monkeypatch.setattr(objects, "_refused", {})
    yield standin
    for function in forgotten:
        function.cache_clear()
