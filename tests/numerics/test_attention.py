"""What queries and keys are multiplied by before they are cast: within the format, and evenly."""

import ml_dtypes
import numpy as np
import pytest
import torch

from quantkit.numerics.attention import attention_codes, score_factor, unit_factors

LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


@pytest.mark.parametrize("tau", [1e-3, 0.18, 1.0, 4.0])
@pytest.mark.parametrize("keys", [1e-3, 1.0, 300.0, 1e4, 1e6])
@pytest.mark.parametrize("queries", [1e-3, 1.0, 300.0, 1e4, 1e6])
def test_factors_stay_within_the_format(queries, keys, tau):
    a, b = (float(f) for f in unit_factors(torch.tensor(queries), torch.tensor(keys), tau))
    room = 1 + 1e-5
    assert a * queries <= LARGEST * room
    assert b * keys <= LARGEST * room
    if tau * queries * keys <= LARGEST**2:
        assert a * b == pytest.approx(tau, rel=1e-5)
    else:
        # Scores beyond 448 * 448 are held to it: both sides spend all of their range.
        assert (a * queries, b * keys) == pytest.approx((LARGEST, LARGEST), rel=1e-5)


def test_keys_of_scores_beyond_the_format_keep_their_order():
    """448 * 448 is 2e5; the largest score here is 4e5, in powers of two."""
    keys = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.25, -0.25]).repeat(16, 1).T[None] * 600.0
    queries = torch.full((1, 2, 16), 600.0)
    assert 600 * 600 * score_factor(16, 0.8) > 2 * LARGEST**2
    codes = attention_codes(queries, keys, keys, scale=0.8)
    found = codes.k.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)[0, :, 0]
    assert found.tolist() == [448, -448, 224, -224, 112, -112]
    assert (codes.q.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32) == 448).all()
