"""Denoisers of many classes as programs: fused steps answer as eager ones, by how many calls."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantkit.bench.models.denoiser_inputs import first_tensor, make_inputs
from quantkit.device import compilers
from quantkit.fusion.fuse import fuse
from quantkit.fusion.rows.row_kernel import RowKernel
from quantkit.fusion.simplify import simplify
from quantkit.fusion.trace import UntraceableError, trace
from tests.support.denoiser_classes import ROWS
from tests.support.kernel_cases import need
from tests.support.tiny_denoisers import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ROW = {row.class_name: row for row in ROWS}
#: Class -> row kernels at least, and other calls that have memory of their own at most, of a tiny
#: model: products, attention, convolutions, norms of groups, and single calls between them.
CALLS = {
    "ChromaTransformer2DModel": (19, 70),
    "ErnieImageTransformer2DModel": (9, 34),  # joins rows to none
    "Flux2Transformer2DModel": (21, 109),
    "FluxTransformer2DModel": (18, 71),
    "HunyuanVideoTransformer3DModel": (19, 95),
    "LTXVideoTransformer3DModel": (9, 32),
    "PixArtTransformer2DModel": (4, 32),
    "QwenImageTransformer2DModel": (10, 33),
    "SD3Transformer2DModel": (9, 58),
    "SanaTransformer2DModel": (6, 39),
    "UNet2DConditionModel": (12, 172),
    "WanTransformer3DModel": (8, 35),
    "ZImageTransformer2DModel": (19, 61),
}


@pytest.fixture(scope="module", autouse=True)
def compiler():
    need(compilers.host_compiler)


def step_of(name: str) -> tuple[Any, list[Tensor]]:
    """Return a call of a tiny model, and its tensors."""
    model = tiny_model(ROW[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        inputs = make_inputs(model, 1, 8, torch.device("cpu"))
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return lambda: first_tensor(model(**inputs)), tensors


@pytest.mark.parametrize("name", CALLS)
def test_a_fused_step_answers_as_an_eager_one(name):
    step, inputs = step_of(name)
    program, expected = trace(step, inputs)
    fused = fuse(simplify(program))
    with torch.no_grad():
        fused.check(inputs)
        found = fused.program.run(inputs)
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    made = [call for call in fused.program.calls if call.fresh]
    rows = sum(isinstance(call.operator, RowKernel) for call in made)
    least, most = CALLS[name]
    assert rows >= least
    assert len(made) - rows <= most


@pytest.mark.parametrize("name", ["HunyuanVideo15Transformer3DModel", "OmniGenTransformer2DModel"])
def test_a_step_whose_calls_depend_on_numbers_is_not_recorded(name):
    step, inputs = step_of(name)
    expected = r"reads a number off a tensor that depends on its inputs \(transformer_\w+\.py:\d+\)"
    with pytest.raises(UntraceableError, match=expected):
        trace(step, inputs)
