"""Products of int4 weights: what they give is what their int8 twins give, bit for bit."""

import pytest
import torch

from quantkit.device import compilers
from quantkit.device.ops.op import Variant
from quantkit.device.ops.products.stored_weights import decode_int4
from quantkit.device.ops.table import OPS
from tests.support.conv_cases import conv_case, conv_shapes
from tests.support.gated_cases import gated_case
from tests.support.int4_cases import decoded_by_numpy, int4_weights, twin_of, with_int4
from tests.support.kernel_cases import (
    gemm_case,
    launch,
    need,
    shapes_of,
    variants_of,
)
from tests.support.projection_cases import projection_case

#: Products that end in an activation's codes are held to plain ones by tests of their own.
W4A8 = [op for op in OPS.values() if op.name.endswith("w4a8") and op.family != "project_gelu"]


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(24)


def cases_of(variant, generator):
    """Yield cases of the int8 twin."""
    twin, family = twin_of(variant), variant.op.family
    if family == "conv":
        for shape in conv_shapes(variant):
            yield conv_case(twin, shape, generator)
        return
    for index, (m, n, k) in enumerate(shapes_of(variant)):
        if family == "gemm":
            yield gemm_case(twin, m, n, k, generator, bias=index % 2 == 0)
        elif family == "project_codes":
            yield projection_case(twin, (m, n, k), generator, bias=index % 2 == 0)
        else:
            yield gated_case(twin, m, n, k, generator, bias=index % 2 == 0)


@pytest.mark.parametrize(("variant", "layout"), variants_of(W4A8))
def test_int4_weights_give_what_their_int8_twins_give(variant, layout, generator):
    for case in cases_of(variant, generator):
        twin, int4 = with_int4(variant, case, generator)
        assert torch.equal(int4.run(layout), twin.run(layout)), case.tensors["w"].shape


def test_decoding_is_the_formats(generator):
    w, group = int4_weights(7, 160, generator)
    assert torch.equal(decode_int4(w, group), decoded_by_numpy(w, group))


def test_every_code_times_every_scale_fits_int8():
    group = torch.arange(-15, 16).to(torch.int8).view(torch.uint8).reshape(-1, 1)
    codes = torch.arange(16, dtype=torch.uint8)
    w = (codes | codes.flip(0) << 4).expand(31, 16)
    values = decode_int4(w, group).view(torch.int8)
    wanted = (torch.arange(16) - 8) * torch.arange(-15, 16).reshape(-1, 1)
    assert torch.equal(values[:, :16].int(), wanted.int())
    assert torch.equal(values[:, 16:].int(), wanted.flip(1).int())


def test_a_wrong_scale_of_one_group_shows(generator):
    op = OPS["gemm_w4a8"]
    variant = Variant(op, ("int8", "int4", "token", "channel", "f16", "t1"))
    case = gemm_case(twin_of(variant), 5, 40, 96, generator)
    w, group = int4_weights(40, 96, generator)
    wrong = group.clone()
    wrong[7, 2] ^= 1
    sizes, y = {"m": 5, "n": 40, "k": 96}, torch.empty(5, 40, dtype=torch.float16)
    right, other = (
        launch(variant, "gfx12", {**case.tensors, "w": w, "w_group": g, "y": y}, sizes)["y"]
        for g in (group, wrong)
    )
    assert [
        column for column in range(40) if not torch.equal(right[:, column], other[:, column])
    ] == [7]
