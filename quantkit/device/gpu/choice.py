"""Which kernel computes a GEMM, gated or not, or a convolution: Hopper's own, or a menu's tile."""

from dataclasses import replace

from quantkit.device.gpu.devices import Device
from quantkit.device.gpu.kernel import Kernel
from quantkit.device.hopper import choice as hopper_choice
from quantkit.device.hopper import conv as hopper_conv
from quantkit.device.hopper import geglu as hopper_gated
from quantkit.device.hopper import gemm as hopper
from quantkit.device.hopper.gemm import Family, HopperKernel, HopperTile
from quantkit.device.ops import windows as pictures
from quantkit.device.ops.table import Variant, find_op
from quantkit.device.tiles import choose_tile
from quantkit.numerics.windows import ConvShape


def choose_gemm(
    device: Device,
    op: str,
    words: tuple[str, ...],
    sizes: dict[str, int],
    *,
    accurate: bool = True,
) -> Kernel:
    """Return the kernel of one GEMM.

    Args:
        words: of the variant, but for the tile's.
        sizes: m, n and k; k a multiple of what the operation takes, which is also what tensor maps
            need of the rows of x and w.
        accurate: sums leave the matrix unit for float32 every 128 products; Hopper alone can do
            without.
    """
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    if not is_hopper(device):
        return _of_menu(device, op, words, m, n)
    sparse = op == "gemm_fp8_sparse"
    best, mode = hopper_choice.choose_sums(
        m, n, k, sparse=sparse, accurate=accurate, multiprocessors=device.units
    )
    return _hopper_kernel(best, words, sparse=sparse, accurate=mode)


def choose_conv(
    device: Device, op: str, words: tuple[str, ...], shape: ConvShape, *, accurate: bool = True
) -> Kernel:
    """Return the kernel of one convolution, which ``why_no_conv`` has nothing against.

    Args:
        words: of the variant, but for the tile's.
        accurate: as in ``choose_gemm``.
    """
    if not is_hopper(device):
        return _of_menu(device, op, words, pictures.integers(shape)["m"], shape.n)
    sparse = op == "conv_fp8_sparse"
    best, mode = hopper_conv.choose_conv_tile(
        shape, sparse=sparse, accurate=accurate, multiprocessors=device.units
    )
    return _hopper_kernel(best, words, Family.CONV, sparse=sparse, accurate=mode)


def choose_geglu(
    device: Device,
    op: str,
    words: tuple[str, ...],
    sizes: dict[str, int],
    *,
    accurate: bool = True,
) -> Kernel:
    """Return the kernel of one gated GEMM.

    Args:
        words: of the kernel, but for the tile's; the format of the result stands last.
        sizes: m, n and k, n the columns of the result.
        accurate: as in ``choose_gemm``.
    """
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    if not is_hopper(device) or n % hopper_gated.COLUMNS:
        return _of_menu(device, op, words, m, 2 * n)
    sparse = op == "geglu_fp8_sparse"
    best, mode = hopper_gated.choose_gated_tile(
        m, n, k, sparse=sparse, accurate=accurate, multiprocessors=device.units
    )
    *shared, y_format = words
    kernel = _hopper_kernel(best, tuple(shared), Family.GEGLU, sparse=sparse, accurate=mode)
    return replace(kernel, y_format=y_format)


def why_no_conv(device: Device, op: str, io: str, shape: ConvShape) -> str:
    """Return why a convolution is unfolded for a GEMM on this device; empty when it is not."""
    sparse = op == "conv_fp8_sparse"
    if is_hopper(device):
        return hopper_conv.why_not(shape, io, sparse=sparse)
    return pictures.why_not(shape, sparse=sparse)


def is_hopper(device: Device) -> bool:
    """Return whether Hopper's own kernels run here."""
    return device.arch.name == hopper.ARCHITECTURE and not why_not_hopper(device)


def why_not_hopper(device: Device) -> str:
    """Return why a Hopper device takes mma.sync for its GEMMs; empty when it takes wgmma."""
    if device.driver.tensors is None:
        return f"driver {device.driver.version} has no tensor maps, 12.0 and later have"
    return ""


def _of_menu(device: Device, op: str, words: tuple[str, ...], m: int, rows: int) -> Variant:
    """Return the tile for m tokens and so many rows of w."""
    tile = choose_tile(m, rows, device.units, dict(device.arch.tile_speed)[op])
    return Variant(find_op(op), (*words, tile))


def _hopper_kernel(
    tile: HopperTile,
    words: tuple[str, ...],
    family: Family = Family.GEMM,
    *,
    sparse: bool,
    accurate: bool,
) -> HopperKernel:
    x_format, w_format, x_scale, w_scale, io = words
    return HopperKernel(
        tile,
        sparse=sparse,
        family=family,
        accurate=accurate,
        x_format=x_format,
        w_format=w_format,
        x_scale=x_scale,
        w_scale=w_scale,
        io=io,
    )
