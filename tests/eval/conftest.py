"""Shared by the tests of eval: small networks in files."""

import pytest
import torch


@pytest.fixture(scope="module")
def alexnet_file(tmp_path_factory):
    from torchvision.models import alexnet

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("alexnet") / "alexnet.pth"
    torch.save(alexnet(weights=None).state_dict(), path)
    return path


@pytest.fixture(scope="session")
def clip_dir(tmp_path_factory):
    from tests.support.tiny_clip import tiny_clip

    return tiny_clip(tmp_path_factory.mktemp("clip") / "tiny-clip")
