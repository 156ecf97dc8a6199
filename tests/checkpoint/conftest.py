"""A packed pipeline, as pack writes it, and a copy of it to damage."""

import shutil

import pytest

from tests.support.packed_folders import packed_to


@pytest.fixture(scope="session")
def whole(pipeline_dir, tmp_path_factory):
    """A packed pipeline, as pack writes it; read-only."""
    import diffusers  # noqa: F401  models are then built in this process

    return packed_to(pipeline_dir, tmp_path_factory.mktemp("verify") / "packed")


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")
