"""Samples of the rows that a layer reads: each row as likely as every other."""

import numpy as np
import pytest
import scipy.signal
import scipy.stats
import torch

from quantkit.calibration.statistics.sampling import (
    SAMPLE_ROWS,
    Candidates,
    draw_candidates,
    row_count,
    rows_of_input,
)
from quantkit.numerics.packed_2to4 import to_rows
from tests.support.observed import observe


def test_candidates_are_the_largest_of_so_many_uniform_numbers():
    # As many as are kept of 50 rows, and of fewer: the k-th largest has a Beta distribution.
    for rows in (50, 9):
        drawn = [draw_candidates(range(seed, seed + 1), 0, 1, rows) for seed in range(400)]
        assert all((np.diff(d.priority) < 0).all() and len({*d.row.tolist()}) for d in drawn)
        count = min(rows, SAMPLE_ROWS)
        assert {len(d.row) for d in drawn} == {count}
        for k in (1, count // 2, count):
            kth = [d.priority[k - 1] for d in drawn]
            assert scipy.stats.kstest(kth, scipy.stats.beta(rows - k + 1, k).cdf).pvalue > 1e-3
        where = np.bincount([d.row[0] for d in drawn], minlength=rows)
        assert scipy.stats.chisquare(where).pvalue > 1e-3


def test_candidates_of_a_batch_are_those_of_its_images():
    whole = draw_candidates(range(5, 8), 2, 6, 40)
    alone = [draw_candidates(range(5 + i, 6 + i), 2, 2, 40) for i in range(3)]
    table = sorted(
        (-priority, part * 3 + i, row)
        for i, drawn in enumerate(alone)
        for priority, part, row in zip(drawn.priority, drawn.image, drawn.row, strict=True)
    )
    found = zip(-whole.priority, whole.image, whole.row, strict=True)
    assert [*found] == table[:SAMPLE_ROWS]
    # Another call, and another prompt, draw others.
    assert draw_candidates(range(5, 8), 3, 6, 40).priority[0] != whole.priority[0]
    assert alone[0].priority[0] != alone[1].priority[0]


@pytest.mark.parametrize(("seeds", "images"), [(range(3), 4), (range(1), 9), (range(2), 1)])
def test_input_that_is_no_batch_is_drawn_as_one_image(seeds, images):
    drawn, whole = draw_candidates(seeds, 0, images, 7), draw_candidates(range(1), 0, 1, images * 7)
    assert (drawn.image * 7 + drawn.row).tolist() == whole.row.tolist()
    assert drawn.image.max() < images


CONVOLUTIONS = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "downsampler": {"kernel_size": 3, "stride": 2},
    "uneven": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)},
    "same": {"kernel_size": 4, "padding": "same"},
    "1x1": {"kernel_size": 1},
}


def drawn_at(image, row):
    return Candidates(np.zeros(len(row)), image, row)


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_rows_of_a_convolution_times_its_weight_are_its_output(options):
    torch.manual_seed(0)
    conv, x = torch.nn.Conv2d(4, 6, bias=False, **options), torch.randn(3, 4, 7, 9)
    wanted = conv(x).movedim(1, -1).reshape(3, -1, 6)
    count = row_count(x, conv)
    assert count == wanted.shape[1]
    image, row = np.divmod(np.arange(3 * count), count)
    rows = rows_of_input(x, conv, drawn_at(image, row))
    found = rows @ to_rows(conv.weight).T
    torch.testing.assert_close(found.reshape(3, -1, 6), wanted, rtol=1e-4, atol=1e-5)


def test_rows_of_a_linear_layer_are_its_tokens():
    linear, x = torch.nn.Linear(5, 2), torch.randn(2, 3, 4, 5)
    assert row_count(x, linear) == 12
    found = rows_of_input(x, linear, drawn_at(np.array([1, 0]), np.array([7, 11])))
    assert torch.equal(found, torch.stack((x[1, 1, 3], x[0, 2, 3])))
    assert row_count(torch.randn(4, 5), linear) == 1


def test_sample_holds_the_rows_of_the_largest_priorities():
    inputs = [(torch.randn(2, 4, 5, 6), float(t)) for t in (9, 7, 5, 3, 1)]
    found = observe(inputs).statistics()["early"]
    conv = torch.nn.Conv2d(4, 8, 3, padding=1)
    image, row = np.divmod(np.arange(60), 30)
    table = []
    for call, (x, _) in enumerate(inputs[3:], 3):
        rows = rows_of_input(x, conv, drawn_at(image, row))
        drawn = draw_candidates(range(1), call, 2, 30)
        for priority, i, r in zip(drawn.priority, drawn.image, drawn.row, strict=True):
            table.append((priority, rows[i * 30 + r]))
    table.sort(key=lambda entry: -entry[0])
    assert found.sample_priority[0].tolist() == [p for p, _ in table[:SAMPLE_ROWS]]
    assert torch.equal(found.samples[0], torch.stack([x for _, x in table[:32]]).bfloat16())
    assert found.sample_count.tolist() == [SAMPLE_ROWS] * 2


def test_few_rows_are_all_kept():
    inputs = [(torch.randn(1, 4, 2, 2), float(t)) for t in (4, 3)]
    found = observe(inputs).statistics()["early"]
    assert found.sample_count.tolist() == [4, 4]
    windows = torch.nn.functional.unfold(inputs[1][0], 3, padding=1)[0].T.bfloat16()
    wanted = windows.reshape(4, 4, 9).movedim(1, 2).reshape(4, 36)
    assert {*map(tuple, found.samples[0, :4].tolist())} == {*map(tuple, wanted.tolist())}
    assert not found.samples[0, 4:].any()
