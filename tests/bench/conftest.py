"""Shared by the tests of benchmarks: what takes long and is not under test is left out."""

from typing import Any

import pytest

from quantkit.bench.kernels import kernel_benchmark, timing
from quantkit.device import compilers
from tests.support.ceilings import CEILINGS
from tests.support.kernel_cases import need
from tests.support.pipelines import tiny_unet


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Leave out large products and large flushes."""
    monkeypatch.setattr(kernel_benchmark, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(timing, "_flush_bytes", lambda device: 1024)


@pytest.fixture
def _host():
    need(compilers.host_compiler)


@pytest.fixture(scope="module")
def unet_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "unet"
    unet: Any = tiny_unet()
    unet.save_config(folder)
    return folder
