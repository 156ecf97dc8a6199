"""Shared by the tests of packing: a small component."""

import pytest

from tests.support.packing import component, small_tensors


@pytest.fixture
def source(tmp_path):
    return component(tmp_path / "source", small_tensors())
