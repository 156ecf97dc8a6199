"""Reading a weight in blocks of rows, in the kernels' layout, through small reused buffers."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, prod
from typing import TYPE_CHECKING, Protocol

from quantkit.device.host import checker
from quantkit.errors import ModelError, NonFiniteError
from quantkit.numerics.formats import FORMATS
from quantkit.storage.system import read_into

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from quantkit.storage.tensorfile import TensorInfo

#: Elements of a block. 2**17 makes 512 KiB in float32, which stays in the cache of a core with what
#: is computed from it; at 2**18 the allocator returns its memory each time, and page faults cost a
#: tenth more; at 2**15 the calls of torch do. Measured on a 1.7 GB UNet with two threads.
BLOCK_ELEMENTS = 1 << 17

#: What is checked for NaN and infinity, by its names in a safetensors header.
NUMBERS = frozenset(
    {"F16", "BF16", "F32", "F64"}
    | {fmt.safetensors_dtype for fmt in FORMATS.values() if not fmt.is_integer}
)


class Digest(Protocol):
    """The part of hashlib's interface that is used here."""

    def update(self, data: memoryview, /) -> None:
        """Take the next bytes."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor in an open file."""

    path: Path
    descriptor: int
    info: TensorInfo

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yield the bytes in chunks of ``size``; a chunk is valid until the next one.

        Raises:
            ModelError: the file ended early.
        """
        buffer = memoryview(bytearray(min(size, self.info.nbytes)))
        for start in range(self.info.start, self.info.stop, max(size, 1)):
            chunk = buffer[: min(size, self.info.stop - start)]
            self._fill(chunk, start)
            yield chunk

    def blocks(
        self, digest: Digest | None = None, *, elements: int = BLOCK_ELEMENTS
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) until the weight ends; rows are valid until the next ones.

        Args:
            digest: takes the raw bytes in order.
            elements: of a block; a row is never cut.

        Yields:
            rows (R, K) float32, K = kh * kw * C channels last for convolutions.

        Raises:
            NonFiniteError: NaN or Inf, with the index in the source's shape.
        """
        import torch

        from quantkit.checkpoint.torch_dtypes import FLOAT_DTYPES

        shape = self.info.shape
        n, k = shape[0], prod(shape[1:])
        count = max(1, min(n, elements // k))
        resident = torch.empty(count, k, dtype=torch.float32)
        dtype = FLOAT_DTYPES[self.info.dtype]
        for index, chunk in enumerate(self.chunks(count * k * dtype.itemsize)):
            if digest is not None:
                digest.update(chunk)
            block = torch.frombuffer(chunk, dtype=dtype).view(-1, *shape[1:])
            rows = resident[: block.shape[0]]
            _copy_rows(block, rows)
            if not _is_finite(rows):
                raise self._non_finite_in(block, index * count)
            yield index * count, rows

    def check_finite(self, chunk: memoryview, first: int) -> None:
        """Refuse NaN and Inf in a chunk of a float tensor that starts at element ``first``.

        Raises:
            NonFiniteError: naming the element.
        """
        bad = first_broken(chunk, self.info.dtype)
        if bad is not None:
            raise self.non_finite(first + bad, value_of(chunk, self.info.dtype, bad))

    def non_finite(self, element: int, value: float) -> NonFiniteError:
        """Return the error that names an element, counted as it is stored, and its value."""
        index = []
        for size in reversed(self.info.shape):
            element, position = divmod(element, size)
            index.append(position)
        where = f"{self.info.name}{index[::-1]}"
        return NonFiniteError(f"{self.path}: {where}: found {value}, expected a finite number")

    def _fill(self, chunk: memoryview, start: int) -> None:
        while chunk:
            count = read_into(self.descriptor, chunk, start)
            if count == 0:
                raise ModelError(
                    f"{self.path}: {self.info.name}: the file ends at byte {start}, expected "
                    f"{self.info.stop}; download or write it again"
                )
            chunk, start = chunk[count:], start + count

    def _non_finite_in(self, block: Tensor, first_row: int) -> NonFiniteError:
        import torch

        flat = block.flatten()
        offset = int((~torch.isfinite(flat)).nonzero()[0])
        return self.non_finite(first_row * block[0].numel() + offset, float(flat[offset]))


def value_of(chunk: memoryview | bytearray, dtype: str, index: int) -> float:
    """Return a number of a chunk, of a dtype in ``NUMBERS``, for a message."""
    import torch

    from quantkit.checkpoint.torch_dtypes import NUMBER_DTYPES

    return float(torch.frombuffer(chunk, dtype=NUMBER_DTYPES[dtype])[index])


def first_broken(
    chunk: memoryview | bytearray, dtype: str, *, positive: bool = False
) -> int | None:
    """Return the index of the first number that is NaN or infinite; None when there is none.

    Args:
        chunk: numbers, as they are stored.
        dtype: of them, in ``NUMBERS``.
        positive: what is not above zero is broken, too.
    """
    if not checker.why_unavailable():
        return checker.first_broken(chunk, dtype, positive=positive)
    import torch

    from quantkit.checkpoint.torch_dtypes import NUMBER_DTYPES

    values = torch.frombuffer(chunk, dtype=NUMBER_DTYPES[dtype])
    wide = values if values.dtype == torch.float64 else values.float()
    if _is_finite(wide) and not (positive and bool(wide.amin() <= 0)):
        return None
    bad = ~torch.isfinite(wide) | ((wide <= 0) & positive)
    return int(bad.nonzero()[0])


def _copy_rows(block: Tensor, rows: Tensor) -> None:
    """Copy source weights (R, K) or (R, C, kh, kw) to float32 rows, channels last."""
    if block.ndim == 4:
        n, c, kh, kw = block.shape
        rows.view(n, kh * kw, c).copy_(block.view(n, c, kh * kw).transpose(1, 2))
    else:
        rows.copy_(block)


def _is_finite(values: Tensor) -> bool:
    # Two vectorised reductions, which pass NaN on; isfinite().all() makes and reads a mask.
    return isfinite(float(values.amin())) and isfinite(float(values.amax()))
