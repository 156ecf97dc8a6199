"""Sums of products of rows, and which rows are drawn."""

import pytest
import torch

from quantkit.calibration.moments.row_products import (
    Products,
    column_sums,
    first_draw,
    first_rows,
    mirror,
    next_draw,
)

CPU = torch.device("cpu")
ON_A_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
)
#: rows and columns: tails of the parts that a matrix unit sums up, and of the panels
SIZES = [(1, 8), (77, 40), (1000, 77), (1300, 1300)]


def error_of(found, x, weight):
    """Return the largest error against float64, of the products of columns of one size."""
    wanted = weight * (x.double().t() @ x.double())
    size = wanted.diagonal().sqrt()
    return float(((found.double() - wanted).abs() / (size.unsqueeze(1) * size)).max())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("parts", [(900,), (300, 1000)], ids=str)
@pytest.mark.parametrize("recorded", [False, True], ids=["number", "tensor"])
def test_products_are_those_of_float64(size, dtype, device, parts, recorded):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(size, generator=generator) + 0.5).to(device, dtype)
    second = torch.zeros(size[1], size[1], device=device)
    calls = x.split(sum(parts))
    for call in calls:
        products = Products(second, torch.tensor(0.5, device=device) if recorded else 0.5)
        for part in call.split(parts[0]):
            products.add(part)
        products.finish()
    mirror(second)
    assert torch.equal(second, second.t())
    assert error_of(second, x, 0.5) < 4e-6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 512, 1300])
def test_columns_are_summed_to_float32_or_nearer(rows, dtype, device):
    x = (torch.randn(rows, 24, generator=torch.Generator().manual_seed(1)) + 0.5).to(device, dtype)
    wanted = x.double().sum(dim=0)
    for values in (x, x.t().contiguous().t()):
        found = column_sums(values)
        assert found.dtype == torch.float64
        assert float(((found - wanted).abs() / x.double().abs().sum(dim=0)).max()) < 2e-7


def test_a_matrix_is_mirrored_from_its_lower_half():
    lower = torch.tensor([[1.0, 9.0], [2.0, 3.0]])
    mirror(lower)
    assert lower.tolist() == [[1, 2], [2, 3]]


def test_draws_are_those_of_one_generator():
    generator, draw = torch.Generator().manual_seed(3), first_draw(3)
    for rows in (10, 7, 300):
        draw = next_draw(draw, rows)
        wanted = torch.randperm(rows, generator=generator)[:5]
        assert torch.equal(first_rows(draw, 5, CPU), wanted)


def test_layers_of_one_shape_share_a_draw():
    assert next_draw(first_draw(1), 9) is next_draw(first_draw(1), 9)
    assert next_draw(first_draw(1), 9) is not next_draw(first_draw(2), 9)
