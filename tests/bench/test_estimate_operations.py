"""What an estimate takes quantkit's own operations to cost: every row of the table has its own."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from quantkit.bench.estimate.cards import CARDS
from quantkit.bench.estimate.estimated_kernels import separate
from quantkit.bench.estimate.groups import PROFILED
from quantkit.bench.estimate.kernel_cost import time_kernels
from quantkit.bench.estimate.tracing import trace
from quantkit.bench.kernels.operator_costs import COSTS
from quantkit.bench.models.profiling import group_of
from quantkit.device.archs import arch_of_device
from quantkit.device.ops.op import all_variants
from quantkit.device.ops.table import OPS
from quantkit.device.torch_operators import OVERLOADS

SIZES = [(24, 32, 64), (7, 48, 96), (1, 16, 32)]


def sample(op, sizes):
    variant = next(iter(all_variants(op)))
    return op.sample(variant, sizes, torch.Generator().manual_seed(1))


def traced(op, operands, options):
    """Return what a call is taken for; only shapes are computed."""
    hollow = [t if t is None else t.to("meta") for t in operands]
    (call,) = trace(lambda: OVERLOADS[op.name](*hollow, *options)).calls
    return call


def test_every_family_of_operations_has_costs_and_no_other():
    assert set(COSTS) == {op.family for op in OPS.values()}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_those_of_the_reference(sizes):
    for op in OPS.values():
        operands, options = sample(op, sizes)
        counter = FlopCounterMode(display=False)
        with counter:
            op.reference(*operands, *options)
        product = traced(op, operands, options).product
        assert (product.flops if product else 0) == counter.get_total_flops(), op.name
        assert product is None or product.sparse == op.sparse, op.name


def test_bytes_are_those_of_operands_and_results():
    for op in OPS.values():
        operands, options = sample(op, SIZES[1])
        made = sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in op.outputs(operands, options)
        )
        read = sum(size_of(t) for t in operands if t is not None)
        assert traced(op, operands, options).nbytes == read + made, op.name


def size_of(t: Tensor) -> int:
    steps = zip(t.shape, t.stride(), strict=True)
    return math.prod(size for size, step in steps if step) * t.element_size()


def test_a_kernel_is_in_one_group_when_it_is_estimated_and_when_it_is_measured():
    groups = {op.name: PROFILED[COSTS[op.family].group] for op in OPS.values()}
    names = ("{}_f16_e4m3fn", "quantkit::{}")
    found = {(op, name): group_of(name.format(op)) for op in groups for name in names}
    assert not {op for (op, _), group in found.items() if group not in groups[op]}


def test_a_call_takes_its_start_at_least_on_every_card():
    for op in OPS.values():
        kernels = separate([traced(op, *sample(op, SIZES[0]))])
        product = kernels[0].product
        attention = product is not None and product.kind == "attention"
        for name, card in CARDS.items():
            if attention and arch_of_device(card.device).why_without("attention"):
                continue
            slow, fast = (time_kernels(kernels, card, side)[0].us for side in (0, 1))
            start = min(card.efficiency.product_us[1], card.efficiency.small_us[1])
            assert start < fast < slow < 100, (op.name, name)
