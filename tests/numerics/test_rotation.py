"""Rotations of groups of columns, against comfy-kitchen's and scipy's matrices."""

import pytest
import scipy.linalg
import torch

from quantkit.numerics.rotation import SIZES, largest_size, rotate, rotate_moment


@pytest.mark.parametrize("size", [4, *SIZES])
def test_groups_are_rotated_as_comfy_kitchen_rotates_them(size):
    from comfy_kitchen.tensor.int8_utils import _build_hadamard, _rotate_activation, _rotate_weight

    matrix = _build_hadamard(size)
    assert torch.equal(rotate(torch.eye(size), size), matrix)
    rows = torch.randn(5, 3 * size, generator=torch.Generator().manual_seed(size))
    for theirs in (_rotate_weight, _rotate_activation):
        torch.testing.assert_close(rotate(rows, size), theirs(rows, matrix, size))


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_is_orthogonal_its_own_inverse_and_keeps_what_is_equal(size):
    matrix = rotate(torch.eye(size), size)
    assert torch.equal(matrix @ matrix.T, torch.eye(size))
    assert torch.equal(matrix, matrix.T)
    # Entries of Hadamard's own matrix, of either sign.
    assert torch.equal(matrix.abs() * size**0.5, torch.tensor(abs(scipy.linalg.hadamard(size))))
    assert torch.equal(rotate(torch.ones(2, 2 * size), size), torch.ones(2, 2 * size))
    rows = torch.randn(7, 2 * size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate(rotate(rows, size), size), rows)


def test_moments_are_those_of_rotated_inputs():
    inputs = torch.randn(200, 48, generator=torch.Generator().manual_seed(0))
    found = rotate_moment(inputs.T @ inputs, 16)
    rotated = rotate(inputs, 16)
    torch.testing.assert_close(found, rotated.T @ rotated, rtol=1e-4, atol=1e-3)


def test_the_largest_group_that_divides_the_columns_is_taken():
    assert [largest_size(columns) for columns in (768, 320, 48, 24, 256)] == [256, 64, 16, 0, 256]
    rows = torch.randn(2, 24)
    assert torch.equal(rotate(rows, 0), rows)
