"""The windows of a convolution: where they lie in pictures with channels last, and their codes."""

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Windows:
    """The geometry of a convolution's windows. Pairs are (along H, along W)."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    #: left, right, top, bottom, as ``functional.pad`` takes them; zeros
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(numbers: tuple[int, ...]) -> "Windows":
        """Return the windows of ``numbers``."""
        kh, kw, sh, sw, dh, dw, left, right, top, bottom = numbers
        return Windows((kh, kw), (sh, sw), (dh, dw), (left, right, top, bottom))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The fields one after the other."""
        return (*self.kernel, *self.stride, *self.dilation, *self.padding)

    @property
    def taps(self) -> int:
        """Pixels of a window."""
        return self.kernel[0] * self.kernel[1]

    @property
    def are_pixels(self) -> bool:
        """Each window is one pixel, and each pixel is a window."""
        return self == Windows((1, 1))

    def outputs(self, height: int, width: int) -> tuple[int, int]:
        """Return how many windows fit into a picture, along H and W."""
        left, right, top, bottom = self.padding
        (kh, kw), (sh, sw), (dh, dw) = self.kernel, self.stride, self.dilation
        tall = (height + top + bottom - dh * (kh - 1) - 1) // sh + 1
        return tall, (width + left + right - dw * (kw - 1) - 1) // sw + 1

    def pad(self, pixels: Tensor) -> Tensor:
        """Return (B, H, W, C) with zeros around it."""
        return functional.pad(pixels, (0, 0, *self.padding)) if any(self.padding) else pixels

    def unfold(self, pixels: Tensor) -> Tensor:
        """Return (B, OH, OW, kh, kw, C) of (B, H, W, C): a view where nothing is padded."""
        (sh, sw), (dh, dw) = self.stride, self.dilation
        tall, wide = dh * (self.kernel[0] - 1) + 1, dw * (self.kernel[1] - 1) + 1
        view = self.pad(pixels).unfold(1, tall, sh).unfold(2, wide, sw)
        return view[..., ::dh, ::dw].permute(0, 1, 2, 4, 5, 3)


@dataclass(frozen=True)
class ConvShape:
    """One convolution of pictures (B, H, W, C)."""

    batch: int
    height: int
    width: int
    channels: int
    #: outputs
    n: int
    windows: Windows

    @property
    def k(self) -> int:
        """Values of a window."""
        return self.windows.taps * self.channels

    @property
    def outputs(self) -> tuple[int, int]:
        """Height and width of the result."""
        return self.windows.outputs(self.height, self.width)
