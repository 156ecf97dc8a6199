"""The basis of queries and keys, against numpy and scipy."""

import numpy as np
import pytest
import scipy.linalg
import torch

from quantkit.errors import ShapeError
from quantkit.numerics.attention_basis import (
    basis_of,
    is_rank,
    largest_two_of_four,
    ranks_of,
    turned,
    two_of_four_codes,
    with_rank,
)
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.scales import decode

HEADS, COLUMNS = 3, 8


def draw(seed=0, rows=4000, *, rank=COLUMNS, offset=3.0):
    """Return q and k, (H, N, D) float64, of uneven columns; keys with a mean."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(2, HEADS, rank, COLUMNS)) * 2.0 ** -np.arange(COLUMNS)
    q, k = (rng.normal(size=(HEADS, rows, rank)) @ m for m in mix)
    return q, k + offset * rng.normal(size=(HEADS, 1, COLUMNS))


def basis(q, k):
    q_second, k_second = (
        torch.from_numpy(np.einsum("hnd,hne->hde", t, t) / t.shape[1]) for t in (q, k)
    )
    return basis_of(q_second, k_second, torch.from_numpy(k.mean(1)))


def test_first_columns_are_the_best_of_their_rank():
    """The least of tr(C_q E C_k E') over E of rank r is what svd of the roots' product leaves."""
    q, k = draw()
    found = basis(q, k)
    for head in range(HEADS):
        cq = q[head].T @ q[head] / len(q[head])
        ck = np.cov(k[head].T, bias=True)
        roots = scipy.linalg.sqrtm(cq) @ scipy.linalg.sqrtm(ck)
        wanted = scipy.linalg.svdvals(roots)
        assert np.allclose(found.energy[head].numpy(), wanted, rtol=1e-4, atol=1e-4 * wanted[0])
        for rank in (2, 4, 6):
            kept = (found.query[head, :, :rank] @ found.key[head, :, :rank].T).numpy()
            lost = np.eye(COLUMNS) - kept
            power = np.trace(cq @ lost @ ck @ lost.T)
            assert power == pytest.approx((wanted[rank:] ** 2).sum(), rel=1e-3, abs=1e-9)


def test_columns_of_both_are_equally_large():
    q, k = draw()
    found = basis(q, k)
    turned_q, turned_k = q @ found.query.numpy(), (k - k.mean(1)[:, None]) @ found.key.numpy()
    for t in (turned_q, turned_k):
        power = (t**2).mean(1)
        assert np.allclose(power, found.energy.numpy(), rtol=1e-2, atol=1e-4)
        assert (np.diff(found.energy.numpy(), axis=1) <= 0).all()


CASES = {
    "full rank": draw(),
    "rank deficient": draw(rank=3),
    "fewer rows than columns": draw(rows=5),
    "keys all alike": (draw()[0], np.ones((HEADS, 9, COLUMNS))),
    "zeros": (np.zeros((HEADS, 9, COLUMNS)), np.zeros((HEADS, 9, COLUMNS))),
    "large and small": (draw()[0] * 1e4, draw()[1] * 1e-5),
    "far from zero": draw(offset=1e4),
}


@pytest.mark.parametrize("case", CASES)
def test_the_product_of_all_columns_is_what_it_was(case):
    q, k = CASES[case]
    found = basis(q, k)
    for t in (found.query, found.key):
        assert t.isfinite().all()
    eye = torch.eye(COLUMNS, dtype=torch.float64).expand(HEADS, -1, -1)
    torch.testing.assert_close(found.query @ found.key.mT, eye, rtol=0, atol=1e-8)


@pytest.mark.parametrize("inputs", [0, 5])
def test_weights_give_queries_in_the_basis(inputs):
    found = basis(*draw())
    generator = torch.Generator().manual_seed(1)
    shape = (HEADS * COLUMNS, inputs) if inputs else (HEADS * COLUMNS,)
    weight = torch.randn(shape, generator=generator)
    x = torch.randn(inputs, generator=generator).double() if inputs else None
    q = weight.double() @ x if x is not None else weight.double()
    new = turned(weight, found.query) @ x if x is not None else turned(weight, found.query)
    wanted = torch.einsum("hd,hde->he", q.reshape(HEADS, COLUMNS), found.query)
    torch.testing.assert_close(new.reshape(HEADS, COLUMNS), wanted)


def test_weights_of_other_heads_are_refused():
    with pytest.raises(ShapeError, match="25 rows, wanted 3 heads of 8 columns"):
        turned(torch.ones(25, 4), torch.eye(8).expand(3, 8, 8))


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [(8, ()), (16, ()), (24, (16,)), (32, (16,)), (40, (32,)), (64, (32, 48)), (72, (48, 64)),
     (80, (48, 64)), (128, (64, 96)), (160, (80, 128))],
)  # fmt: skip
def test_ranks_are_multiples_of_what_is_multiplied_at_once(columns, wanted):
    assert ranks_of(columns) == wanted


@pytest.mark.parametrize(
    ("rank", "wanted"), [(-16, False), (0, False), (8, False), (16, True), (17, False), (48, True)]
)
def test_matrix_instructions_have_ranks_of_sixteens(rank, wanted):
    assert is_rank(rank) is wanted


def test_the_largest_two_of_four_stay_by_token():
    """Columns 0, 2, 4, 6 are a group, and 1, 3, 5, 7; of equal ones the first stay."""
    rows = torch.tensor(
        [[3.0, 0.0, -4.0, 0.0, 1.0, -1.0, 2.0, 5.0], [1.0, -7.0, 1.0, -7.0, 1.0, -7.0, 1.0, -7.0]]
    )
    wanted = [[3.0, 0, -4.0, 0, 0, -1.0, 0, 5.0], [1.0, -7.0, 1.0, -7.0, 0, 0, 0, 0]]
    assert largest_two_of_four(rows[None]).tolist() == [wanted]
    for fmt, codes in (
        (E4M3FN, rows.to(torch.float8_e4m3fn).view(torch.uint8)),
        (INT8, rows.to(torch.int8).view(torch.uint8)),
    ):
        padded = torch.nn.functional.pad(codes, (0, 8))
        found = decode(two_of_four_codes(padded, fmt.name, 8), fmt.name, torch.float32)
        assert found.tolist() == [row + [0] * 8 for row in wanted]
    with pytest.raises(ShapeError, match="heads of 6 columns, wanted a multiple of 4"):
        largest_two_of_four(torch.ones(2, 6))


def test_codes_from_the_rank_on_are_zero():
    codes = torch.arange(1, 33, dtype=torch.uint8).reshape(1, 1, 32)
    assert with_rank(codes, 16).tolist() == [[[*range(1, 17), *[0] * 16]]]
    for rank in (None, 32, 48):
        assert torch.equal(with_rank(codes, rank), codes)
