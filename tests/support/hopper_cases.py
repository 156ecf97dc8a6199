"""What the tests of Hopper's GEMMs, of its convolutions and of GEGLU share."""

import struct

import torch

from quantkit.device.aot.codeobject import read_nvidia_kernels
from quantkit.device.aot.elf import read_sections
from quantkit.device.gpu import nvrtc
from quantkit.device.hopper.hopper_gemm import ARCHITECTURE, Family, HopperKernel, Sums
from quantkit.device.ops.products.stored_weights import decode_int4
from quantkit.numerics.formats import find_format
from quantkit.numerics.nibbles import GROUP, MAX_FACTOR
from quantkit.numerics.packed_2to4 import LEGAL_NIBBLES, unpack_two_of_four
from quantkit.resources import kernel_sources
from tests.support.kernel_cases import need
from tests.support.sampling import one_of_each

#: Low bits of the matrix instruction, dense and sparse alike; agreed with nvdisasm of CUDA 13:
#: QGMMA, and IGMMA with weights in shared memory and in registers.
INSTRUCTIONS = {
    Sums.ACCURATE: 0x9F3,
    Sums.FAST: 0x9F3,
    Sums.INT8: 0x9F1,
    Sums.INT4: 0xDF1,
}
#: Formats of inputs and weights that have these sums.
FORMATS_OF = {
    Sums.ACCURATE: ("e4m3fn", "e4m3fn"),
    Sums.FAST: ("e4m3fn", "e4m3fn"),
    Sums.INT8: ("int8", "int8"),
    Sums.INT4: ("int8", "int4"),
}
#: Largest error of a sum, of the sum of its products' sizes, up to K 2048. FP8's matrix unit aligns
#: products to 14 bits or so; accurate sums do it to 128 of them only: on an H200 1.3e-4 accurate,
#: 8.7e-4 fast. Sums of integers are exact: what is left is float32's rounding of them and of the
#: scales.
UNITS = {
    Sums.ACCURATE: 2.0**-12,
    Sums.FAST: 2.0**-10,
    Sums.INT8: 2.0**-23,
    Sums.INT4: 2.0**-23,
}


def symbol(kernel):
    return kernel.symbol


def kernel_of(tile, sums, *, sparse=False, family=Family.GEMM, **options):
    """Return the kernel of a tile on the formats that have these sums."""
    x_format, w_format = FORMATS_OF[sums]
    accurate = sums is Sums.ACCURATE
    if family in (Family.GEGLU, Family.GELU):
        options = {"y_format": x_format, **options}
    if family is not Family.GEMM:
        options = {"x_scale": "tensor", **options}
    words = {"x_format": x_format, "w_format": w_format, "accurate": accurate, **options}
    return HopperKernel(tile, sparse=sparse, family=family, **words)


def mode_of(sparse, sums):
    """Return the name of a row of the tables of measured times."""
    return f"{'sparse' if sparse else 'dense'} {sums.value}"


def compile_kernel(kernel):
    need(nvrtc.load_nvrtc)
    sources = kernel_sources()
    options = [*nvrtc.nvrtc_options(ARCHITECTURE), f"-I{sources / 'include'}", *kernel.defines]
    text = (sources / kernel.source).read_text(encoding="utf-8")
    return nvrtc.load_nvrtc().compile(text, kernel.source, options)[0]


def compiled(kernels):
    """Return kernels as parameters: of each family, dense and sparse, the largest tile, which has
    the least registers left; the rest is exhaustive."""
    largest = sorted(kernels, key=lambda kernel: -kernel.tile.m * kernel.tile.n)
    return one_of_each(largest, lambda kernel: (kernel.family, kernel.sparse))


def check_machine_code(kernel):
    """It compiles, without spills, to matrix instructions."""
    content = compile_kernel(kernel)
    (resources,) = read_nvidia_kernels(content)
    assert resources.symbol == kernel.symbol
    assert resources.spills == 0
    text = next(s for s in read_sections(content) if s.name == f".text.{kernel.symbol}")
    words = struct.iter_unpack("<IIII", text.content)
    assert any(first & 0xFFF == INSTRUCTIONS[kernel.sums] for first, *_ in words)


def codes(shape, fmt, generator):
    """Return uint8 codes: normal numbers in FP8, any of -127 to 127 in int8."""
    if find_format(fmt).is_integer:
        drawn = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int16)
        return drawn.to(torch.int8).view(torch.uint8)
    values = torch.randn(shape, generator=generator) * 40
    return values.clamp(-440, 440).to(find_format(fmt).torch_dtype).view(torch.uint8)


def weights(kernel, rows, k, generator):
    """Return the weights' operands by name: codes, and what these need."""
    if kernel.sums is Sums.INT4:
        packed = torch.randint(256, (rows, k // 2), generator=generator, dtype=torch.int16)
        group = torch.randint(-MAX_FACTOR, MAX_FACTOR + 1, (rows, k // GROUP), generator=generator)
        # Groups of zeros by their factor, the largest weights and the smallest ones stand in all.
        group[0], group[-1], packed[-1] = 0, MAX_FACTOR, 0
        return {
            "w": packed.to(torch.uint8),
            "w_group": group.to(torch.int8).view(torch.uint8),
        }
    kept = codes((rows, k // 2 if kernel.sparse else k), kernel.w_format, generator)
    if not kernel.sparse:
        return {"w": kept}
    nibbles = torch.tensor(sorted(LEGAL_NIBBLES), dtype=torch.uint8)
    drawn = nibbles[torch.randint(len(nibbles), (rows, k // 4), generator=generator)]
    return {"w": kept, "w_meta": drawn[:, 0::2] | drawn[:, 1::2] << 4}


def dense_weights(kernel, tensors):
    """Return uint8 codes (N, K) of the weights among ``tensors``, and their format."""
    w = tensors["w"]
    if kernel.sums is Sums.INT4:
        return decode_int4(w, tensors["w_group"]), "int8"
    if kernel.sparse:
        whole = unpack_two_of_four(w.cpu(), tensors["w_meta"].cpu()).to(w.device)
        return whole, kernel.w_format
    return w, kernel.w_format
