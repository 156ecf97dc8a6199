"""Shared by the tests of loading: a tiny packed pipeline, in one file and in several."""

import shutil

import pytest

from tests.support.loading import TOKEN, mixed, packable
from tests.support.packed import pack_component


@pytest.fixture(scope="session")
def packed_dir(pipeline_dir, tmp_path_factory):
    """A packed pipeline with every kind of scheme."""
    path = tmp_path_factory.mktemp("loading") / "packed"
    shutil.copytree(pipeline_dir, path)
    pack_component(path / "unet", mixed(path / "unet"))
    return path


@pytest.fixture(scope="session")
def uniform_dir(pipeline_dir, tmp_path_factory):
    """A pipeline whose projections can be fused: all of the UNet's layers are packed alike."""
    path = tmp_path_factory.mktemp("loading") / "uniform"
    shutil.copytree(pipeline_dir, path)
    pack_component(path / "unet", dict.fromkeys(packable(path / "unet"), TOKEN))
    return path


@pytest.fixture(scope="session")
def sharded_dir(pipeline_dir, tmp_path_factory):
    """The same UNet in three shards."""
    path = tmp_path_factory.mktemp("loading") / "sharded"
    shutil.copytree(pipeline_dir, path)
    pack_component(path / "unet", mixed(path / "unet"), shards=3)
    return path


@pytest.fixture
def broken(packed_dir, tmp_path):
    """A copy to break."""
    shutil.copytree(packed_dir, tmp_path / "broken")
    return tmp_path / "broken"
