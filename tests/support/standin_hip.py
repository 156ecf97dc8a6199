"""The stand-in HIP runtime of tests/standin/hip.c: built once, and devices that use it."""

import contextlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.archs import find_arch
from quantkit.device.gpu import driver_hip
from quantkit.device.gpu.devices import Device
from quantkit.device.host import library as host
from tests.support.kernel_cases import need
from tests.support.standin_memory import Keeper

SOURCE = Path(__file__).parents[1] / "standin" / "hip.c"
STREAM = 0x57A40
VARIABLES = ("LOG", "KERNELS", "FAIL", "TARGET", "CORRUPT")


def build_standin(folder):
    """Compile both libraries into ``folder``/lib, as a ROCm installation has them."""
    compiler = need(compilers.host_compiler)
    lib = folder / "lib"
    lib.mkdir(parents=True)
    for role, name in (("RUNTIME", "libamdhip64.so"), ("COMPILER", "libhiprtc.so")):
        command = [*compiler.command, "-x", "c", "-std=gnu11", "-Wall", "-Werror", f"-D{role}"]
        command += ["-shared", "-fPIC", "-O2", str(SOURCE), "-o", str(lib / name), "-ldl"]
        subprocess.run(command, check=True)
    return folder


@dataclass
class Standin:
    """The libraries in use, and what was recorded of them."""

    root: Path
    log: Path
    kernels: Path
    monkeypatch: pytest.MonkeyPatch

    def set(self, **variables):
        for name, value in variables.items():
            self.monkeypatch.setenv(f"STANDIN_{name}", str(value))

    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    def names(self):
        return [line.partition(" ")[0] for line in self.calls()]

    def launches(self):
        """Return the recorded launches as dicts of text."""
        found = [line for line in self.calls() if line.startswith("hipModuleLaunchKernel")]
        return [
            {**dict(re.findall(r"(\w+)=(\S+)", line)), "args": line.partition("args=")[2]}
            for line in found
        ]

    def forget_calls(self):
        self.log.unlink(missing_ok=True)

    def provide(self, *variants):
        """Build the host kernels that launches are to run."""
        host.prebuild(variants)
        for variant in variants:
            link = self.kernels / f"{variant.symbol}.so"
            if not link.exists():
                link.symlink_to(host._library(variant, "gfx12"))

    def device(self, name="gfx1201", *, index=0, **changes):
        """Return a device whose memory is the CPU's."""
        arch = find_arch(name)
        fields = {
            "index": index,
            "name": name,
            "arch": arch,
            "driver": driver_hip.load_hip(),
            "units": 64,
            "torch_device": torch.device("cpu"),
            "current": lambda: index,
            "stream": lambda _: STREAM,
            "capturing": lambda: False,
            "guard": contextlib.nullcontext,
            "memory": Keeper().memory(),
        }
        return Device(**{**fields, **changes})
