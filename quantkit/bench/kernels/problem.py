"""The operands of one shape, in 16 bit, as codes and 2:4, and the exact results in float64."""

from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.bench.kernels.kernel_shapes import Shape
from quantkit.device.ops.products import decode_int4
from quantkit.device.ops.quantize import quantize_static, quantize_token
from quantkit.numerics.formats import INT4, INT8
from quantkit.numerics.masks import TWO_OF_FOUR, choose_mask
from quantkit.numerics.nibbles import GROUP, amax_factors, pack_nibbles
from quantkit.numerics.packed_2to4 import pack_two_of_four
from quantkit.numerics.scales import decode

#: Of weights, inputs and products in all contenders.
FORMAT = "e4m3fn"
#: Rows that are multiplied in float64 at once: 2048 x 8192 of them are 128 MB.
_ROWS = 2048


class BenchProblem:
    """Random operands of one shape; each is made when it is first asked for.

    Inputs are normal, weights normal over sqrt(K), so that outputs are about 1. No bias: libraries
    differ in which they take.
    """

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        """Remember the shape; nothing is allocated yet."""
        self.shape = shape
        self.device = device
        self._seed = seed

    @cached_property
    def x16(self) -> Tensor:
        """(M, K) float16 inputs."""
        return self._normal(self.shape.m, self.shape.k, 1.0)

    @cached_property
    def w16(self) -> Tensor:
        """(N, K) float16 weights."""
        return self._normal(self.shape.n, self.shape.k, self.shape.k**-0.5)

    @cached_property
    def mask(self) -> Tensor:
        """(N, K) bool, the larger two of every four weights."""
        return choose_mask(self.w16.float().abs(), TWO_OF_FOUR)

    @cached_property
    def w16_sparse(self) -> Tensor:
        """(N, K) float16 weights, half of them zero."""
        return self.w16 * self.mask

    @cached_property
    def x(self) -> tuple[Tensor, Tensor]:
        """(M, K) uint8 codes and (M,) float32 scales of the inputs."""
        return _coded(self.x16)

    @cached_property
    def static_scale(self) -> Tensor:
        """(1,) float32, of all inputs."""
        return (self.x16.float().abs().amax() / 448).reshape(1)

    @cached_property
    def x_static(self) -> tuple[Tensor, Tensor]:
        """(M, K) uint8 codes of the inputs with one scale, and that."""
        scale = self.static_scale
        return quantize_static(self.x16, None, scale, FORMAT), scale

    @cached_property
    def w(self) -> tuple[Tensor, Tensor]:
        """(N, K) uint8 codes and (N,) float32 scales of the weights."""
        return _coded(self.w16)

    @cached_property
    def w_sparse(self) -> tuple[Tensor, Tensor]:
        """(N, K) uint8 codes, half of them zero, and (N,) float32 scales."""
        return _coded(self.w16_sparse)

    @cached_property
    def w_packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """(N, K / 2) uint8 kept codes, (N, K / 8) uint8 positions, (N,) float32 scales."""
        codes, scale = self.w_sparse
        return (*pack_two_of_four(codes, self.mask), scale)

    @cached_property
    def x_int8(self) -> tuple[Tensor, Tensor]:
        """(M, K) uint8, the bytes of int8 codes, and (M,) float32 scales of the inputs."""
        return _coded(self.x16, INT8.name)

    @cached_property
    def static_scale_int8(self) -> Tensor:
        """(1,) float32, of all inputs."""
        return (self.x16.float().abs().amax() / INT8.max).reshape(1)

    @cached_property
    def w_int8(self) -> tuple[Tensor, Tensor]:
        """(N, K) uint8, the bytes of int8 codes, and (N,) float32 scales of the weights."""
        return _coded(self.w16, INT8.name)

    @cached_property
    def w_int4(self) -> tuple[Tensor, Tensor, Tensor]:
        """(N, K / 2) uint8 nibbles, (N, K / 32) uint8 factors, and (N,) float32 scales."""
        rows = self.w16.float()
        scale, factors = amax_factors(rows)
        steps = (factors.float() * scale.unsqueeze(1)).repeat_interleave(GROUP, dim=1)
        codes = (rows / steps).round().clamp(INT4.min, INT4.max)
        return pack_nibbles(codes), factors.view(torch.uint8), scale

    @cached_property
    def exact_int8(self) -> Tensor:
        """(M, N) float64: the product of int8 codes, scales included."""
        x, w = (self._decoded(coded, INT8.name) for coded in (self.x_int8, self.w_int8))
        return self._product(x, w)

    @cached_property
    def exact_static_int8(self) -> Tensor:
        """(M, N) float64: the same with one input scale."""
        scale = self.static_scale_int8
        coded = quantize_static(self.x16, None, scale, INT8.name), scale
        x, w = (self._decoded(given, INT8.name) for given in (coded, self.w_int8))
        return self._product(x, w)

    @cached_property
    def exact_w4a8(self) -> Tensor:
        """(M, N) float64: the product of int8 codes and int4 weights."""
        packed, factors, scale = self.w_int4
        w = decode_int4(packed, factors), scale
        return self._product(*(self._decoded(coded, INT8.name) for coded in (self.x_int8, w)))

    @cached_property
    def exact_codes(self) -> Tensor:
        """(M, N) float64: the product of the codes, scales included."""
        return self._product(self._decoded(self.x), self._decoded(self.w))

    @cached_property
    def exact_codes_sparse(self) -> Tensor:
        """(M, N) float64: the same with 2:4 weights."""
        return self._product(self._decoded(self.x), self._decoded(self.w_sparse))

    @cached_property
    def exact_static(self) -> Tensor:
        """(M, N) float64: the product of the codes with one input scale."""
        return self._product(self._decoded(self.x_static), self._decoded(self.w))

    @cached_property
    def exact(self) -> Tensor:
        """(M, N) float64: the product of the 16-bit operands."""
        return self._product(self.x16.double(), self.w16.double())

    @cached_property
    def exact_sparse(self) -> Tensor:
        """(M, N) float64: the same with 2:4 weights."""
        return self._product(self.x16.double(), self.w16_sparse.double())

    @cached_property
    def exact_gated(self) -> Tensor:
        """(M, N / 2) float64: the first half of ``exact_static`` gated by GELU of the second."""
        return gated(self.exact_static)

    @cached_property
    def exact_gated_sparse(self) -> Tensor:
        """(M, N / 2) float64: the same with 2:4 weights."""
        return gated(self._product(self._decoded(self.x_static), self._decoded(self.w_sparse)))

    @cached_property
    def exact_gated_f16(self) -> Tensor:
        """(M, N / 2) float64: that of the 16-bit operands' product."""
        return gated(self.exact)

    @cached_property
    def exact_gated_f16_sparse(self) -> Tensor:
        """(M, N / 2) float64: the same with 2:4 weights."""
        return gated(self.exact_sparse)

    @cached_property
    def gated_scale(self) -> Tensor:
        """(1,) float32, of all gated values."""
        return (self.exact_gated.abs().amax() / 448).float().reshape(1)

    @cached_property
    def gated_scale_sparse(self) -> Tensor:
        """(1,) float32, the same with 2:4 weights."""
        return (self.exact_gated_sparse.abs().amax() / 448).float().reshape(1)

    def forget_exact(self) -> None:
        """Free the float64 results."""
        for name in [name for name in self.__dict__ if name.startswith("exact")]:
            del self.__dict__[name]

    def _normal(self, rows: int, columns: int, std: float) -> Tensor:
        self._seed += 1
        generator = torch.Generator(self.device).manual_seed(self._seed)
        made = torch.randn(rows, columns, generator=generator, device=self.device)
        return (made * std).half()

    @staticmethod
    def _decoded(coded: tuple[Tensor, Tensor], fmt: str = FORMAT) -> Tensor:
        codes, scale = coded
        return decode(codes, fmt, torch.float64) * scale.double().unsqueeze(1)

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        y = torch.empty(self.shape.m, self.shape.n, dtype=torch.float64, device=self.device)
        for start in range(0, self.shape.m, _ROWS):
            torch.mm(x[start : start + _ROWS], w.T, out=y[start : start + _ROWS])
        return y


def _coded(rows: Tensor, fmt: str = FORMAT) -> tuple[Tensor, Tensor]:
    """Return uint8 codes and a float32 scale per row."""
    scale, codes = quantize_token(rows, None, fmt)
    return codes, scale


def gated(y: Tensor) -> Tensor:
    """Return h * gelu(g), h and g the halves of (M, N): (M, N / 2)."""
    h, g = y.chunk(2, dim=1)
    return h * functional.gelu(g)
