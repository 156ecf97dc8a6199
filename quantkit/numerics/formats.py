"""Number formats as data: layouts of codes, from which limits, rounding and storage are derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import CheckpointError, RecipeError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NumberFormat:
    """Codes of at most 8 bits with one sign bit: a float with IEEE-like subnormals, or an integer.

    Every value is a code times a scale; zero is the code 0, so no format needs a zero point.
    """

    name: str
    #: 0: an integer
    exponent_bits: int
    #: all bits of an integer but the sign's
    mantissa_bits: int
    #: True: the top exponent holds infinities and NaNs (IEEE); False: it holds numbers, and only
    #: the all-ones code of each sign is NaN ("fn" in the name)
    has_infinity: bool = False
    #: columns that follow one another along K and share a factor, an integer to 15 times the
    #: channel's scale (FORMAT.md); 0: none
    subscale_group: int = 0
    #: an integer whose lowest code is minus its largest
    symmetric: bool = True
    #: codes along K that share a float16 scale, as GGML's blocks do; 0: scales are float32, of the
    #: scheme's granularity. Weights alone: no kernel multiplies codes of such a format by codes.
    block: int = 0

    @property
    def is_integer(self) -> bool:
        """True when a code is its value."""
        return self.exponent_bits == 0

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def byte_format(self) -> NumberFormat:
        """Of codes that have a byte each, and of the inputs that kernels multiply by them.

        int8 for every integer: narrower ones times their factors are int8.
        """
        return INT8 if self.is_integer else self

    @property
    def codes_per_byte(self) -> int:
        """The number of codes in a byte."""
        return 8 // self.bits

    @property
    def bias(self) -> int:
        """Exponent bias of a float."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def max(self) -> float:
        """Largest finite value: 448 for e4m3fn, 57344 for e5m2, 127 for int8."""
        if self.is_integer:
            return float((1 << self.mantissa_bits) - 1)
        top = (1 << self.exponent_bits) - 1
        mantissa = 2.0 - 2.0**-self.mantissa_bits
        if self.has_infinity:
            return mantissa * 2.0 ** (top - 1 - self.bias)
        return (mantissa - 2.0**-self.mantissa_bits) * 2.0 ** (top - self.bias)

    @property
    def min(self) -> float:
        """Smallest finite value: minus the largest, or one less."""
        return -self.max if self.symmetric else -self.max - 1

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value."""
        return 1.0 if self.is_integer else 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that holds the codes, one each, before they are packed into bytes."""
        import torch

        dtype = torch.int8 if self.is_integer else getattr(torch, f"float8_{self.name}")
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def scale_dtype(self) -> str:
        """The name in a safetensors header of the dtype of a weight's scales."""
        return "F16" if self.block else "F32"

    @property
    def safetensors_dtype(self) -> str:
        """The name in a safetensors header of the dtype that stores the codes."""
        if self.is_integer:
            return "I8" if self.codes_per_byte == 1 else "U8"
        return f"F8_E{self.exponent_bits}M{self.mantissa_bits}"


# Source: OCP 8-bit Floating Point Specification (OFP8), revision 1.0, 2023.
E4M3FN = NumberFormat("e4m3fn", exponent_bits=4, mantissa_bits=3)
E5M2 = NumberFormat("e5m2", exponent_bits=5, mantissa_bits=2, has_infinity=True)
INT8 = NumberFormat("int8", exponent_bits=0, mantissa_bits=7)
INT4 = NumberFormat("int4", exponent_bits=0, mantissa_bits=3, subscale_group=32, symmetric=False)
# Source: ggml-common.h of github.com/ggml-org/ggml, block_q4_0 and block_q8_0.
Q4_0 = NumberFormat("q4_0", exponent_bits=0, mantissa_bits=3, symmetric=False, block=32)
Q8_0 = NumberFormat("q8_0", exponent_bits=0, mantissa_bits=7, block=32)

FORMATS: dict[str, NumberFormat] = {f.name: f for f in (E4M3FN, E5M2, INT8, INT4, Q4_0, Q8_0)}


def find_format(name: str) -> NumberFormat:
    """Return the format called ``name``.

    Raises:
        CheckpointError: a FNUZ format, which RDNA4 does not have (its bytes mean half the value).
        RecipeError: any other unknown name.
    """
    if name.endswith("fnuz"):
        raise CheckpointError(
            f"format {name!r:.80}: FNUZ is the FP8 of MI300 (max 240, another bias), expected one "
            f"of {', '.join(FORMATS)}; convert the tensor to 16 bit first"
        )
    if name not in FORMATS:
        raise RecipeError(f"format {name!r:.80}: unknown, expected one of {', '.join(FORMATS)}")
    return FORMATS[name]
