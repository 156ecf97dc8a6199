"""The first line of ``doctor``: which GPU runs quantkit's kernels, or why none does."""

import json
import re
from dataclasses import dataclass

import pytest
import torch
from click.testing import CliRunner

from quantkit.cli.doctor_command import doctor
from quantkit.device import headline as module
from quantkit.device.headline import headline
from quantkit.errors import ModelError
from quantkit.pipelines.running import choose_device


@dataclass(frozen=True)
class Gpu:
    problem: str
    device: str = "cuda:0"
    name: str = "AMD Radeon RX 9070 XT"
    kernels: str = ""


@pytest.fixture
def torch_for(monkeypatch):
    """Make torch one that is built for something else."""

    def build(cuda=None, hip=None):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch, "__version__", "2.15.0")

    return build


@pytest.fixture
def cards(monkeypatch, tmp_path):
    """Make Linux know cards of these vendors."""
    monkeypatch.setattr(module, "_CARDS", tmp_path)

    def plug(*vendors):
        for index, vendor in enumerate(vendors):
            folder = tmp_path / f"card{index}" / "device"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")

    return plug


@pytest.mark.parametrize(
    ("built", "vendors", "text"),
    [
        ({}, (), "no GPU: torch 2.15.0 is built for CPUs alone; kernels run on the CPU"),
        ({"cuda": "13.2"}, (), "no GPU: torch 2.15.0 is built for CUDA 13.2 and sees no card"),
        ({"hip": "7.2"}, ("0x1002",), "no GPU: torch 2.15.0 is built for ROCm 7.2 and sees no"),
        ({}, ("0x1002",), "there is an AMD card, and torch 2.15.0 is built for CPUs alone; inst"),
        ({"cuda": "13.2"}, ("0x8086", "0x1002"), "there is an AMD card, and .* built for CUDA 13"),
        ({"cuda": "13.2"}, ("0x10de",), "is built for CUDA 13.2 and sees no card"),
    ],
)
def test_without_a_gpu_it_says_why(torch_for, cards, built, vendors, text):
    torch_for(**built)
    cards(*vendors)
    found = headline(())
    assert not found.fine
    assert re.search(text, found.text), found.text


def test_one_gpu_that_runs_kernels_is_enough():
    old = Gpu("gfx1030: no row of ARCHS; kernels run on the CPU")
    assert headline((old,)).text == (
        "cuda:0: AMD Radeon RX 9070 XT runs no kernels: gfx1030: no row of ARCHS; kernels run on "
        "the CPU"
    )
    assert not headline((old,)).fine
    both = headline((old, Gpu("", "cuda:1")))
    assert both.fine
    assert both.text == "cuda:1: AMD Radeon RX 9070 XT runs quantkit's kernels"


@pytest.mark.parametrize(("strict", "code"), [([], 0), (["--strict"], 1)])
def test_doctor_begins_with_it(monkeypatch, strict, code):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = CliRunner().invoke(doctor, strict)
    assert done.exit_code == code
    assert done.stdout.splitlines()[0].startswith("no GPU: ")
    values = json.loads(CliRunner().invoke(doctor, ["--json", *strict]).stdout)
    assert values["fine"] is False
    assert values["headline"] == done.stdout.splitlines()[0]


def test_hip_is_a_card_of_amd(torch_for, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    torch_for(hip="7.2")
    assert choose_device("hip") == torch.device("cuda")
    assert choose_device("hip:1") == torch.device("cuda:1")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ModelError, match="torch sees 2 GPUs"):
        choose_device("hip:2")
    torch_for(cuda="13.2")
    with pytest.raises(ModelError, match=r"'hip:1': torch 2\.15\.0 is not built for ROCm; install"):
        choose_device("hip:1")
    with pytest.raises(ModelError, match="expected auto, cpu, cuda"):
        choose_device("hip:x")
