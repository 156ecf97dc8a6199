"""FP8 formats as data: the bit layout is typed in, everything else is derived from it."""

from dataclasses import dataclass

import torch

from quantkit.errors import CheckpointError, RecipeError


@dataclass(frozen=True)
class FloatFormat:
    """A float format of at most 8 bits with one sign bit and IEEE-like subnormals."""

    #: torch's name without the ``float8_`` prefix
    name: str
    exponent_bits: int
    mantissa_bits: int
    #: True: the top exponent holds infinities and NaNs (IEEE); False: it holds numbers, and only
    #: the all-ones code of each sign is NaN ("fn" in the name)
    has_infinity: bool

    @property
    def bias(self) -> int:
        """Exponent bias."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def max(self) -> float:
        """Largest finite value: 448 for e4m3fn, 57344 for e5m2."""
        top = (1 << self.exponent_bits) - 1
        mantissa = 2.0 - 2.0**-self.mantissa_bits
        if self.has_infinity:
            return mantissa * 2.0 ** (top - 1 - self.bias)
        return (mantissa - 2.0**-self.mantissa_bits) * 2.0 ** (top - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that holds the codes."""
        dtype = getattr(torch, f"float8_{self.name}")
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def safetensors_dtype(self) -> str:
        """The dtype's name in a safetensors header."""
        return f"F8_E{self.exponent_bits}M{self.mantissa_bits}"


# Source: OCP 8-bit Floating Point Specification (OFP8), revision 1.0, 2023.
E4M3FN = FloatFormat("e4m3fn", exponent_bits=4, mantissa_bits=3, has_infinity=False)
E5M2 = FloatFormat("e5m2", exponent_bits=5, mantissa_bits=2, has_infinity=True)

FORMATS: dict[str, FloatFormat] = {f.name: f for f in (E4M3FN, E5M2)}


def find_format(name: str) -> FloatFormat:
    """Return the format called ``name``.

    Raises:
        CheckpointError: a FNUZ format, which RDNA4 does not have (its bytes mean half the value).
        RecipeError: any other unknown name.
    """
    if name.endswith("fnuz"):
        raise CheckpointError(
            f"format {name!r}: FNUZ is the FP8 of MI300 (max 240, another bias), wanted one of "
            f"{', '.join(FORMATS)}; convert the tensor to 16 bit first"
        )
    if name not in FORMATS:
        raise RecipeError(f"format {name!r}: unknown, wanted one of {', '.join(FORMATS)}")
    return FORMATS[name]
