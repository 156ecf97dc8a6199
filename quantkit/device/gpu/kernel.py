"""Kernels of three kinds for the loader, and each one's launch without addresses."""

from dataclasses import dataclass, replace

from quantkit.device.geometry import compile_expression
from quantkit.device.hopper.hopper_attention import HopperAttention, plan_attention
from quantkit.device.hopper.hopper_conv import plan_conv
from quantkit.device.hopper.hopper_geglu import plan_gated
from quantkit.device.hopper.hopper_gemm import (
    Family,
    HopperKernel,
    HopperLaunch,
    arguments,
    plan_launch,
)
from quantkit.device.hopper.hopper_projections import plan_projection
from quantkit.device.hopper.tensormap import TensorMap
from quantkit.device.ops.op import Op, Sizes, Variant
from quantkit.device.ops.products.conv import why_refused
from quantkit.errors import KernelError
from quantkit.numerics.conv_windows import ConvShape

_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Plan:
    """One launch but for its addresses and stream."""

    grid: tuple[int, int, int]
    #: threads of a block, all along x
    block: int
    #: dynamic
    shared_bytes: int
    #: device addresses, in the order of the operands
    pointers: int
    #: 32-bit integers
    numbers: tuple[int, ...]
    #: operand and description of each tensor map; None: the kernel does not read it
    maps: tuple[tuple[int, TensorMap | None], ...]
    #: the kernel's arguments in order, as places in (*pointers, *numbers, *maps)
    order: tuple[int, ...]


@dataclass(frozen=True)
class GeneratedKernel:
    """A kernel whose text was written for the shapes of its operands, and that takes no numbers."""

    symbol: str
    text: str
    blocks: int
    threads: int
    #: addresses that it takes
    pointers: int
    operation: str = "rows"

    @property
    def name(self) -> str:
        """The name of its variant: its symbol."""
        return self.symbol

    @property
    def source(self) -> str:
        """The name of its text for the compiler."""
        return f"{self.symbol}.hip"

    @property
    def defines(self) -> tuple[str, ...]:
        """None: its text has all of them."""
        return ()

    @property
    def plan(self) -> Plan:
        """Its launch."""
        order = tuple(range(self.pointers))
        return Plan((self.blocks, 1, 1), self.threads, 0, self.pointers, (), (), order)


#: One compile of one source: symbol, source, defines, operation and name say which.
Kernel = Variant | HopperKernel | HopperAttention | GeneratedKernel


def plan_of(kernel: Kernel, sizes: Sizes, units: int) -> Plan:
    """Return how ``kernel`` computes ``sizes``.

    Args:
        units: compute units of the device.

    Raises:
        KernelError: a size that a kernel's 32-bit integers do not hold, or a convolution that the
            kernel does not take.
    """
    if isinstance(kernel, GeneratedKernel):
        plan = kernel.plan
    elif isinstance(kernel, HopperKernel):
        plan = _plan_hopper(kernel, _launch_of(kernel, sizes, units))
    elif isinstance(kernel, HopperAttention):
        assert isinstance(sizes, dict)
        plan = _plan_attention(kernel, sizes, units)
    else:
        plan = _plan_variant(kernel, _integers(kernel, sizes))
    # Of the numbers, a convolution's padding may be 0.
    if min(plan.grid) < 1 or not all(0 <= n <= _INT_MAX for n in (*plan.numbers, *plan.grid)):
        raise KernelError(f"{kernel.symbol}: sizes {sizes} do not fit 32-bit integers")
    return plan


def _integers(kernel: Variant, sizes: Sizes) -> dict[str, int]:
    if isinstance(sizes, ConvShape) and (reason := why_refused(kernel.op, sizes)):
        raise KernelError(f"{kernel.symbol}: {reason}; unfold its windows for a GEMM")
    return kernel.op.integers(sizes)


def _plan_variant(kernel: Variant, sizes: dict[str, int]) -> Plan:
    geometry = kernel.geometry
    x, y, z = (compile_expression(text)(sizes) for text in geometry.grid)
    return _plan_arguments(kernel.op, sizes, (x, y, z), geometry.block, 0)


def _plan_arguments(
    op: Op, sizes: dict[str, int], grid: tuple[int, int, int], block: int, shared_bytes: int
) -> Plan:
    """Return the plan of a kernel that takes the operation's arguments as they are."""
    pointers = sum(a.is_pointer for a in op.args)
    # The launcher packs all addresses at once: numbers stand behind them in every kernel.
    assert all(a.is_pointer for a in op.args[:pointers])
    numbers = tuple(sizes[a.name] for a in op.args[pointers:])
    order = tuple(range(len(op.args)))
    return Plan(grid, block, shared_bytes, pointers, numbers, (), order)


def _plan_attention(kernel: HopperAttention, sizes: dict[str, int], units: int) -> Plan:
    launch = plan_attention(kernel, sizes, units)
    plan = _plan_arguments(kernel.op, sizes, launch.grid, launch.block, launch.shared_bytes)
    # Maps of the first operands stand behind everything else.
    order = tuple(range(len(plan.order) + len(launch.maps)))
    return replace(plan, maps=tuple(enumerate(launch.maps)), order=order)


def _launch_of(kernel: HopperKernel, sizes: Sizes, units: int) -> HopperLaunch:
    if isinstance(sizes, ConvShape):
        assert kernel.family is Family.CONV
        return plan_conv(kernel, sizes, units)
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    if kernel.projects:
        return plan_projection(kernel, sizes, units)
    if kernel.gated:
        return plan_gated(kernel, m, n, k, units)
    return plan_launch(kernel, m, n, k, units, prefix_columns=sizes.get("prefix_columns", 0))


def _plan_hopper(kernel: HopperKernel, launch: HopperLaunch) -> Plan:
    names = arguments(kernel)
    maps = [name for name in names if name.endswith("_map")]
    numbers = names[-len(launch.numbers) :]
    # x and weights are arguments only as maps, y also as one.
    before = names[: -len(numbers)]
    operands = list(dict.fromkeys(name.removesuffix("_map") for name in before))
    slots = [*operands, *numbers, *maps]
    specs = zip(maps, launch.maps, strict=True)
    return Plan(
        launch.grid,
        launch.block,
        launch.shared_bytes,
        len(operands),
        launch.numbers,
        tuple((operands.index(name.removesuffix("_map")), spec) for name, spec in specs),
        tuple(slots.index(name) for name in names),
    )
