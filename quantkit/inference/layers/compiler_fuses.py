"""The choice of letting torch.compile fuse the quantization of inputs.

An operator is opaque to it: the norm or activation before it would write 16 bit that the operator
reads again. Written in plain PyTorch, quantizing becomes a part of that kernel. Codes can then
differ from the operator's where the compiler's division is a last place off.
"""

import torch
from torch import Tensor

from quantkit.device.archs import Toolchain
from quantkit.device.choosing import supposed
from quantkit.inference.layers.quantized_input import QuantizedInput

#: NVIDIA's first compute capability with instructions that convert to FP8.
_FIRST_FP8 = (8, 9)


def compiler_quantizes(x: Tensor | QuantizedInput) -> bool:
    """Tell whether torch.compile generates the quantization of an input like ``x``.

    Only on NVIDIA GPUs that convert to FP8 themselves: no Radeon card was at hand to see what
    Triton makes of it there, and on the CPU quantkit's own kernel is what is to be validated.
    """
    return torch.compiler.is_compiling() and x.is_cuda and _converts(x.device.index or 0)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _converts(index: int) -> bool:
    if (arch := supposed()) is not None:
        return arch.toolchain is Toolchain.NVRTC and not arch.why_without("gemm", "gemm_fp8")
    return torch.version.cuda is not None and (
        torch.cuda.get_device_capability(index) >= _FIRST_FP8
    )
