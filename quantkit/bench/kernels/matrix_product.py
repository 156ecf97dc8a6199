"""A product of matrices, whatever computes it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """Products of matrices: ``count`` of M tokens, N outputs and K summands."""

    #: linear, conv or attention
    kind: str
    #: f16 (and bfloat16), f32, fp8 or int8
    precision: str
    m: int
    n: int
    k: int
    count: int = 1
    #: 2:4 weights
    sparse: bool = False
    #: under ``fast_sums``
    fast: bool = False

    @property
    def flops(self) -> float:
        """Multiplications and additions, dropped weights included."""
        return 2.0 * self.count * self.m * self.n * self.k

    @staticmethod
    def attention(  # noqa: PLR0917  the axes of attention, in their order
        rows: int, queries: int, keys: int, head: int, value: int, precision: str = "f16"
    ) -> "Product":
        """Return the two products of attention of so many pictures' heads.

        K is half of what a query and a key multiply: columns of keys, then of values.
        """
        return Product("attention", precision, queries, keys, head + value, rows)
