"""Choosing the kernel of an operation: Hopper's own, or a tile of the menu."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from quantkit.device.gpu.devices import Device
from quantkit.device.gpu.kernel import Kernel
from quantkit.device.hopper import hopper_choice, hopper_conv, hopper_geglu, hopper_projections
from quantkit.device.hopper import hopper_gemm as hopper
from quantkit.device.hopper.hopper_attention import HopperAttention, has_maps
from quantkit.device.hopper.hopper_gemm import Family, HopperKernel, HopperTile, Sums
from quantkit.device.hopper.tensormap import ITEM_BYTES
from quantkit.device.ops.op import Op, Sizes, Variant, WeightKind
from quantkit.device.ops.products.project_gelu import ACTIVATIONS
from quantkit.device.ops.products.residual import SUFFIX
from quantkit.device.tile_choice import choose_tile
from quantkit.numerics.conv_windows import ConvShape


def choose_kernel(
    device: Device, op: Op, words: tuple[str, ...], sizes: Sizes, *, accurate: bool = True
) -> Kernel:
    """Return the kernel of one call.

    Args:
        device: where the operands lie.
        op: what is computed; ``why_detour`` has nothing against it.
        words: of the variant, but for the tile's.
        sizes: k is a multiple of what the operation takes, which is also what tensor maps need of
            the rows of x and w.
        accurate: sums leave the matrix unit for float32 every 128 products; Hopper alone can do
            without.
    """
    choose = _own_choice(op) if _has_own(device, op) else None
    required = _Requirements(accurate, device.units, maps=is_hopper(device))
    own = choose(op, words, sizes, required) if choose else None
    return own or _of_menu(device, op, words, op.integers(sizes))


def why_detour(device: Device | None, op: Op, words: tuple[str, ...], sizes: Sizes) -> str:
    """Return why the kernels of a device do not take these sizes; empty when they do.

    Args:
        device: None for the host.
        op: what is to be computed.
        words: of the variant, but for the tile's.
        sizes: of the call.
    """
    if device and is_hopper(device) and isinstance(sizes, ConvShape):
        return hopper_conv.why_not(sizes, words[-1], op.k_multiple)
    return op.why_not(op, sizes) if op.why_not else ""


def _has_own(device: Device, op: Op) -> bool:
    """Return whether Hopper's own kernels run an operation here: attention needs no tensor maps."""
    if op.family in {"attention", "attention_codes"}:
        return device.arch.name == hopper.ARCHITECTURE
    return is_hopper(device)


def is_hopper(device: Device) -> bool:
    """Return whether Hopper's own kernels run here."""
    return device.arch.name == hopper.ARCHITECTURE and not why_not_hopper(device)


def why_not_hopper(device: Device) -> str:
    """Return why a Hopper device takes mma.sync for its GEMMs; empty when it takes wgmma."""
    if device.driver.tensors is None:
        return f"driver {device.driver.version} has no tensor maps, 12.0 and later have"
    return ""


@dataclass(frozen=True)
class _Requirements:
    """Requirements on a kernel: exactness of sums, multiprocessors, and tensor maps."""

    accurate: bool
    units: int
    maps: bool

    def sums(self, words: tuple[str, ...]) -> tuple[Sums, ...]:
        """Return those that will do for a variant's formats."""
        x_format, w_format, *_ = words
        return hopper_choice.sums_for(x_format, w_format, accurate=self.accurate)


def _gemm(
    op: Op, words: tuple[str, ...], sizes: Sizes, required: _Requirements
) -> HopperKernel | None:
    """Return Hopper's kernel; None where the copy engine cannot bring what is added."""
    assert isinstance(sizes, dict)
    m, n, k = (sizes[name] for name in ("m", "n", "k"))
    if op.name.endswith(SUFFIX) and n * ITEM_BYTES[words[-1]] % 16:
        return None
    best, mode = hopper_choice.choose_sums(
        m,
        n,
        k,
        sparse=op.sparse,
        sums=required.sums(words),
        multiprocessors=required.units,
    )
    return _hopper_kernel(best, words, Family.GEMM, sparse=op.sparse, sums=mode)


def _conv(op: Op, words: tuple[str, ...], sizes: Sizes, required: _Requirements) -> HopperKernel:
    assert isinstance(sizes, ConvShape)
    best, mode = hopper_conv.choose_conv_tile(
        sizes, sparse=op.sparse, sums=required.sums(words), multiprocessors=required.units
    )
    return _hopper_kernel(best, words, Family.CONV, sparse=op.sparse, sums=mode)


def _geglu(
    op: Op, words: tuple[str, ...], sizes: Sizes, required: _Requirements
) -> HopperKernel | None:
    """Return Hopper's kernel; None where a row of the result is not made of its pieces."""
    assert isinstance(sizes, dict)
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    if n % hopper_geglu.COLUMNS:
        return None
    best, mode = hopper_geglu.choose_gated_tile(
        m, n, k, sparse=op.sparse, sums=required.sums(words), multiprocessors=required.units
    )
    *shared, y_format = words
    kernel = _hopper_kernel(best, tuple(shared), Family.GEGLU, sparse=op.sparse, sums=mode)
    return replace(kernel, y_format=y_format)


def _gelu(op: Op, words: tuple[str, ...], sizes: Sizes, required: _Requirements) -> HopperKernel:
    assert isinstance(sizes, dict)
    x_format, w_format, io, y_format = words
    best, mode = hopper_choice.choose_sums(
        *(sizes[name] for name in ("m", "n", "k")),
        sparse=op.sparse,
        sums=required.sums(words),
        multiprocessors=required.units,
    )
    x_scale = "token" if sizes["per_token"] else "tensor"
    w_scale = "channel" if sizes["per_channel"] else "tensor"
    shared = (x_format, w_format, x_scale, w_scale, io)
    kernel = _hopper_kernel(best, shared, Family.GELU, sparse=op.sparse, sums=mode)
    activation = list(ACTIVATIONS)[sizes["act"] - 1]
    changes = bool(sizes["changes"])
    return replace(kernel, y_format=y_format, activation=activation, changes=changes)


def _projection(
    op: Op, words: tuple[str, ...], sizes: Sizes, required: _Requirements
) -> HopperKernel:
    assert isinstance(sizes, dict)
    family, kinds = Family(op.family), words[:2]
    best, mode = hopper_projections.choose_projection_tile(
        *(sizes[name] for name in ("m", "n", "k")),
        parts=hopper_projections.parts_of(family),
        sums=hopper_choice.sums_for(*kinds, accurate=required.accurate),
        multiprocessors=required.units,
        sparse=op.sparse,
    )
    scale, sparse = "token" if sizes["per_token"] else "tensor", op.sparse
    return _hopper_kernel(best, (*kinds, scale, "channel", "f32"), family, sparse=sparse, sums=mode)


def _attention(
    op: Op, words: tuple[str, ...], sizes: Sizes, required: _Requirements
) -> HopperAttention:
    assert isinstance(sizes, dict)
    io, qk_format, head, _, *codes = words
    maps = required.maps and has_maps(qk_format, sizes["keys"])
    return HopperAttention(op, io, qk_format, int(head[1:]), maps, *codes)


_Choose = Callable[
    [Op, tuple[str, ...], Sizes, _Requirements], HopperKernel | HopperAttention | None
]

#: Families of operations that Hopper has kernels of its own for.
_HOPPER: dict[str, _Choose] = {
    "gemm": _gemm,
    f"gemm{SUFFIX}": _gemm,
    "conv": _conv,
    f"conv{SUFFIX}": _conv,
    "geglu": _geglu,
    "project_gelu": _gelu,
    "project_codes": _projection,
    "project_values": _projection,
    "project_heads": _projection,
    "attention": _attention,
    "attention_codes": _attention,
}


def _own_choice(op: Op) -> _Choose | None:
    """Return how Hopper's kernel of an operation is chosen; None where it has none."""
    if op.family == "project_codes" and op.weights is not WeightKind.DENSE:
        return None
    return _HOPPER.get(op.family)


def _of_menu(device: Device, op: Op, words: tuple[str, ...], numbers: dict[str, int]) -> Variant:
    """Return the variant, with the best tile of the menu where there are several."""
    if not op.tiled:
        return Variant(op, words)
    rows, speed = op.rows_per_column * numbers["n"], dict(device.arch.tile_speed)[op.name]
    return Variant(op, (*words, choose_tile(numbers["m"], rows, device.units, speed)))


def _hopper_kernel(
    tile: HopperTile, words: tuple[str, ...], family: Family, *, sparse: bool, sums: Sums
) -> HopperKernel:
    x_format, w_format, x_scale, w_scale, *added, io = words
    return HopperKernel(
        tile,
        sparse=sparse,
        family=family,
        accurate=sums is Sums.ACCURATE,
        x_format=x_format,
        w_format=w_format,
        x_scale=x_scale,
        w_scale=w_scale,
        io=io,
        adds=bool(added),
    )
