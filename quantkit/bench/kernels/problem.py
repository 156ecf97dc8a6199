"""Operands of an operation on one shape, from its row, and the result that its reference gives."""

import inspect
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.bench.kernels.contender import tensors
from quantkit.bench.kernels.kernel_shapes import AnyShape, AttentionShape, Shape
from quantkit.bench.kernels.matrix_product import Product
from quantkit.bench.kernels.operator_costs import product_of
from quantkit.device.ops.op import Op, Operands, Options, Variant, all_variants
from quantkit.device.ops.products.stored_weights import decode_int4
from quantkit.device.ops.table import OPS, name_for
from quantkit.numerics.attention_factors import AttentionCodes, attention_codes, measured_scales
from quantkit.numerics.attention_limits import LARGEST_HEAD, takes_heads
from quantkit.numerics.attention_scales import AttentionScales
from quantkit.numerics.formats import E4M3FN, INT4, INT8
from quantkit.numerics.packed_2to4 import unpack_two_of_four
from quantkit.numerics.scales import decode

#: Of the words of an axis, the one that is measured; else the first.
_MEASURED = {"f16", "token", "channel", "d64"}
#: Sums in another order, or an activation within its own error, move a value across the boundary
#: between two codes: 0.013 of GEGLU's on an H200, with fast sums 0.04.
_MOVED = 0.03


class Problem:
    """Operands of M x N x K, as the operation's row samples them; made when first asked for.

    Optional biases are absent: libraries differ in which they take.
    """

    kind: ClassVar[type[AnyShape]] = Shape

    def __init__(self, op: Op, shape: AnyShape, device: torch.device) -> None:
        """Remember the operation and the shape; nothing is allocated yet."""
        assert isinstance(shape, self.kind)
        self.op, self.device = op, device
        #: of the problem's kind
        self.shape: Any = shape

    @staticmethod
    def why_not(op: Op, shape: Any) -> str:
        """Return why no contender takes a shape; empty when they may."""
        if shape.k % op.k_multiple:
            return f"K {shape.k} is not a multiple of {op.k_multiple}"
        odd = op.family == "geglu" and shape.n % 2
        return f"N {shape.n} is odd, and outputs have a gate each" if odd else ""

    @cached_property
    def variant(self) -> Variant:
        """The measured variant: float16 results, a scale per token and per channel."""
        return max(all_variants(self.op), key=lambda v: len(_MEASURED.intersection(v.words)))

    @cached_property
    def call(self) -> tuple[Operands, Options]:
        """Operands on the device, and options."""
        shape, generator = self.shape, torch.Generator().manual_seed(0)
        sizes = (shape.m, shape.n // self.op.rows_per_column, shape.k)
        operands, options = self.op.sample(self.variant, sizes, generator)
        named = zip(self.op.args, operands, strict=False)
        given = (None if a.name == "bias" and a.null else t for a, t in named)
        return tuple(t if t is None else t.to(self.device) for t in given), options

    @cached_property
    def expected(self) -> tuple[Tensor, ...]:
        """Results of the reference, its sums in float64 where it can."""
        exact = "precision" in inspect.signature(self.op.reference).parameters
        precision = {"precision": torch.float64} if exact else {}
        operands, options = self.call
        return tensors(self.op.reference(*operands, *options, **precision))

    def forget_expected(self) -> None:
        """Free the expected results."""
        for name in [name for name in self.__dict__ if name.startswith("expected")]:
            del self.__dict__[name]

    @cached_property
    def product(self) -> Product | None:
        """The matrix product; None for an operation without one."""
        operands, options = self.call
        return product_of(f"quantkit.{self.op.name}", (*operands, *options), None)

    @property
    def reduced(self) -> int:
        """Length of the reduction axis, as the kernels are chosen by it."""
        operands, options = self.call
        return self.op.check(self.op, operands, options).k

    @property
    def summed(self) -> int:
        """Terms of a sum."""
        return int(self.shape.summed)

    @property
    def moved(self) -> float:
        """Largest share of codes that may differ: none of those that are only quantized."""
        return 0.0 if self.op.family.startswith("quantize") else _MOVED

    def operand(self, name: str) -> Tensor:
        """Return an operand by its name in the row."""
        index = next(i for i, argument in enumerate(self.op.args) if argument.name == name)
        tensor = self.call[0][index]
        assert tensor is not None
        return tensor

    @cached_property
    def weights(self) -> Tensor:
        """(N, K) uint8 codes of the weights, none packed."""
        w = self.operand("w")
        if self.op.sparse:
            return unpack_two_of_four(w, self.operand("w_meta"))
        if self.variant.word("QK_W_FORMAT") == INT4.name:
            return decode_int4(w, self.operand("w_group"))
        return w

    @cached_property
    def x16(self) -> Tensor:
        """(M, K) float16: what the codes of the inputs mean."""
        return self._meant(self.operand("x"), "x_scale")

    @cached_property
    def w16(self) -> Tensor:
        """(N, K) float16: what the codes of the weights mean."""
        return self._meant(self.weights, "w_scale")

    def _meant(self, codes: Tensor, scale: str) -> Tensor:
        values = decode(codes, self.variant.word("QK_X_FORMAT"), torch.float32)
        return (values * self.operand(scale).reshape(-1, 1)).half()


class LinearProblem(Problem):
    """Operands of a layer: inputs are 16-bit, and quantized before the product."""

    @cached_property
    def x16(self) -> Tensor:
        """(M, K) float16 normal inputs."""
        generator = torch.Generator(self.device).manual_seed(1)
        size = (self.shape.m, self.shape.k)
        return torch.randn(size, generator=generator, device=self.device).half()

    @property
    def x_format(self) -> str:
        """Of the codes that inputs become."""
        return self.variant.word("QK_X_FORMAT")

    @cached_property
    def scale(self) -> Tensor:
        """(1,) float32: of all inputs."""
        largest = decode(torch.arange(256, dtype=torch.uint8), self.x_format, torch.float32)
        top = largest[largest.isfinite()].max()
        return (self.x16.float().abs().amax() / top.to(self.device)).reshape(1)

    @cached_property
    def expected(self) -> tuple[Tensor, ...]:
        """Results of the references, with a scale for every token."""
        quantize = OPS[name_for("quantize_token", self.x_format)].reference
        scale, codes = quantize(self.x16, None, self.x_format)
        return self._multiplied(codes, scale)

    @cached_property
    def expected_static(self) -> tuple[Tensor, ...]:
        """Results of the references, with one scale."""
        quantize = OPS[name_for("quantize_static", self.x_format)].reference
        return self._multiplied(quantize(self.x16, None, self.scale, self.x_format), self.scale)

    def _multiplied(self, codes: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        (_, _, *weights), options = self.call
        return tensors(self.op.reference(codes, scale, *weights, *options, precision=torch.float64))


class AttentionProblem(Problem):
    """Heads of B x H x Q x K x D in 16 bit, and their codes.

    Normal numbers. Every column of keys and values has a mean of its own, as those of trained
    models have: a mistake in the mean of the values, or in what a row of probabilities sums to, is
    as large as the result.
    """

    kind = AttentionShape

    @staticmethod
    def why_not(op: Op, shape: Any) -> str:
        """Return why no contender takes a shape; empty when they may."""
        del op
        if takes_heads(shape.head_size):
            return ""
        return f"heads of {shape.head_size} columns, expected a multiple of 8 up to {LARGEST_HEAD}"

    @cached_property
    def q(self) -> Tensor:
        """(B, H, Q, D) float16; in memory, as those of k and v, heads lie beside each other."""
        return self._normal(1, self.shape.queries).half()

    @cached_property
    def k(self) -> Tensor:
        """(B, H, K, D) float16."""
        return (self._normal(2, self.shape.keys) + self._normal(3, 1)).half()

    @cached_property
    def v(self) -> Tensor:
        """(B, H, K, D) float16."""
        return (self._normal(4, self.shape.keys) + self._normal(5, 1)).half()

    @property
    def qk_format(self) -> str:
        """Of the codes of queries and keys."""
        return self.op.words("QK_X_FORMAT")[0]

    @cached_property
    def scales(self) -> AttentionScales:
        """Of these very numbers, of all (B * H) heads."""
        return measured_scales(*self._rows())

    @cached_property
    def codes(self) -> AttentionCodes:
        """The reference's codes of (B * H) heads."""
        pv = None if self.op.words("QK_PV") == ("f16",) else E4M3FN.name
        return attention_codes(*self._rows(), qk_format=self.qk_format, pv=pv, scales=self.scales)

    @cached_property
    def call(self) -> tuple[Operands, Options]:
        """The codes, and the numbers of heads."""
        codes, shape = self.codes, self.shape
        operands = (
            codes.q, codes.k, codes.v, codes.q_scale, codes.k_scale, codes.v_scale, codes.v_mean,
        )  # fmt: skip
        return operands, (shape.keys, shape.heads, shape.head_size, self.qk_format, torch.float16)

    @cached_property
    def product(self) -> Product:
        """Scores, and means of values; columns that only fill a tile up do not count."""
        shape, precision = self.shape, "int8" if self.qk_format == INT8.name else "fp8"
        rows, d = shape.batch * shape.heads, shape.head_size
        return Product.attention(rows, shape.queries, shape.keys, d, d, precision)

    def _normal(self, seed: int, count: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (self.shape.batch, count, self.shape.heads, self.shape.head_size)
        return torch.randn(size, generator=generator, device=self.device).transpose(1, 2)

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the operands as (B * H, N, D)."""
        return self.q.flatten(0, 1), self.k.flatten(0, 1), self.v.flatten(0, 1)
