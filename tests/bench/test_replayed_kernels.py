"""Kernels of replayed steps: those of a program that a run records, without its numbers."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from quantkit.bench.estimate.replayed_kernels import replayed
from quantkit.bench.estimate.shape_models import trace_contender
from quantkit.bench.estimate.tracing import trace
from quantkit.bench.kernels.operator_costs import PRODUCTS, SMALL
from quantkit.bench.models.denoiser_inputs import make_inputs
from quantkit.bench.models.denoisers import Denoiser, build_denoiser
from quantkit.bench.models.model_contenders import MODEL_CONTENDERS
from quantkit.bench.models.model_result import ModelBenchSettings
from quantkit.device.archs import arch_of_device
from quantkit.device.torch_operators import OVERLOADS
from quantkit.fusion import trace as recorded
from quantkit.fusion.fuse import with_patterns
from quantkit.fusion.rows.row_groups import RowGroup, with_row_kernels
from quantkit.fusion.simplify import simplify
from tests.support.denoisers import tiny_denoiser


def half(*shape):
    return torch.empty(shape, dtype=torch.float16, device="meta")


def kernels_of(step, *inputs):
    """Return the kernels of a step on tensors without numbers."""
    found = trace(lambda: step(*inputs), inputs)
    assert not found.reason
    return replayed(simplify(found.program))


def calls_of(program):
    """Return how often a program calls what; attention's operator depends on the device."""
    names = (
        "rows" if isinstance(call.operator, RowGroup) else call.operator.overloadpacket.__name__
        for call in with_row_kernels(program, lambda group: group).calls
    )
    return Counter("attention" if "attention" in name else name for name in names)


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_kernels_are_those_of_a_run(name):
    model = tiny_denoiser(name)
    denoiser = Denoiser(name, type(model).__name__, dict(model.config), name)
    settings = ModelBenchSettings(batch=1, size=8)
    contender, arch = MODEL_CONTENDERS["f16-replayed"], arch_of_device("gfx1201")
    program = trace_contender(denoiser, contender, settings, arch).program
    real = build_denoiser(denoiser, torch.device("cpu")).half().eval()
    inputs = make_inputs(real, settings.batch, settings.size, torch.device("cpu"))
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    run, _ = recorded.trace(lambda: real(**inputs), tensors)
    assert program is not None
    found = calls_of(program)
    assert found == calls_of(with_patterns(simplify(run)))
    assert found["rows"] > 10


def test_a_chain_reads_and_writes_what_its_outputs_need():
    x, gate, w = half(4, 16), half(1, 16), half(16, 16)

    def step(x, gate):
        y = x @ w
        return functional.silu(y) * gate + x

    product, chain = kernels_of(step, x, gate)
    assert (product.group, chain.group) == (PRODUCTS, SMALL)
    assert chain.names == ("aten.silu", "aten.mul", "aten.add")
    # y, x and the gate of all rows; the sum.
    assert chain.nbytes == 2 * (4 * 16 + 4 * 16 + 16 + 4 * 16)
    # silu's 16 instructions for an element, and two for each of the others.
    assert chain.instructions == 4 * 16 * (16 + 2 + 2)
    assert not chain.summed


def test_a_norm_up_to_its_codes_is_one_kernel_that_sums():
    x, scale, w = half(4, 64), half(1).float(), half(64)
    quantize = OVERLOADS["quantize_int8_static"]

    def step(x):
        y = functional.layer_norm(x + 1, (64,), w)
        return quantize(y.reshape(4, 64), None, scale, "int8")

    (kernel,) = kernels_of(step, x)
    assert kernel.summed
    assert kernel.nbytes == 2 * 4 * 64 + 2 * 64 + 4 + 4 * 64


def test_calls_outside_of_chains_are_kernels_of_their_own_and_views_none():
    x = half(2, 8, 4, 4)

    def step(x):
        return functional.group_norm(x, 2).flatten(2).transpose(1, 2).contiguous()

    names = [kernel.names for kernel in kernels_of(step, x)]
    assert names == [("group_norm statistics",), ("group_norm applied",), ("aten.clone",)]


@pytest.mark.parametrize(("given", "kernels"), [(("int8", "int8"), 1), (("int8", "e4m3fn"), 2)])
def test_layers_that_read_one_input_in_one_format_quantize_it_once(given, kernels):
    scales = [half(1).float() for _ in given]
    operators = {
        "int8": OVERLOADS["quantize_int8_static"],
        "e4m3fn": OVERLOADS["quantize_fp8_static"],
    }

    def step(x):
        return [
            operators[fmt](x.reshape(4, 64), None, scale, fmt)
            for fmt, scale in zip(given, scales, strict=True)
        ]

    names = [name for kernel in kernels_of(step, half(2, 2, 64)) for name in kernel.names]
    assert len(names) == kernels


def test_layers_that_read_other_inputs_quantize_each():
    scales = [half(1).float() for _ in range(2)]
    quantize = OVERLOADS["quantize_int8_static"]

    def step(x):
        return [quantize(part, None, s, "int8") for part, s in zip(x, scales, strict=True)]

    assert len(kernels_of(step, half(2, 4, 64))) == 2


def test_a_step_that_draws_numbers_keeps_its_calls():
    x = half(4, 8)
    found = trace(lambda: x + torch.rand_like(x), [x])
    assert "draws random numbers" in found.reason
    assert [call.name for call in found.calls] == ["aten.rand_like", "aten.add"]
