"""What the tests of Hopper's GEMMs and of its convolutions share."""

import struct

from quantkit.device.aot.codeobject import read_nvidia_kernels
from quantkit.device.aot.elf import read_sections
from quantkit.device.gpu import nvrtc
from quantkit.device.hopper.gemm import ARCHITECTURE
from quantkit.resources import kernel_sources
from tests.support.kernel_cases import need

#: Low bits of a QGMMA, dense and sparse; agreed with nvdisasm of CUDA 13.
QGMMA = 0x9F3


def symbol(kernel):
    return kernel.symbol


def compile_kernel(kernel):
    need(nvrtc.load_nvrtc)
    sources = kernel_sources()
    options = [*nvrtc.nvrtc_options(ARCHITECTURE), f"-I{sources / 'include'}", *kernel.defines]
    text = (sources / kernel.source).read_text(encoding="utf-8")
    return nvrtc.load_nvrtc().compile(text, kernel.source, options)[0]


def check_machine_code(kernel):
    """It compiles, without spills, to matrix instructions."""
    content = compile_kernel(kernel)
    (resources,) = read_nvidia_kernels(content)
    assert resources.symbol == kernel.symbol
    assert resources.spills == 0
    text = next(s for s in read_sections(content) if s.name == f".text.{kernel.symbol}")
    words = struct.iter_unpack("<IIII", text.content)
    assert any(first & 0xFFF == QGMMA for first, *_ in words)
