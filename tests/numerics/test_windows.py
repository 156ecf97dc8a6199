"""Windows of convolutions against torch's own convolution and unfold."""

from itertools import product

import pytest
import torch
from torch.nn import functional

from quantkit.numerics.conv_windows import ConvShape, Windows
from quantkit.numerics.threads import one_torch_thread, surgery_threads

#: kernel, stride, dilation, padding (left, right, top, bottom)
CASES = [
    ((1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    ((3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    ((3, 3), (2, 2), (1, 1), (0, 1, 0, 1)),
    ((3, 2), (1, 2), (1, 1), (0, 1, 2, 3)),
    ((2, 5), (3, 1), (2, 1), (4, 0, 1, 0)),
    ((2, 3), (2, 3), (3, 2), (1, 2, 3, 4)),
    ((1, 4), (1, 1), (1, 3), (5, 6, 0, 0)),
]
SIZES = [(9, 13), (12, 17)]


def picture(height, width):
    generator = torch.Generator().manual_seed(height * width)
    return torch.randn(2, height, width, 3, generator=generator)


@pytest.mark.parametrize(("case", "size"), product(CASES, SIZES), ids=str)
def test_windows_times_weights_are_torchs_convolution(case, size):
    kernel, stride, dilation, padding = case
    windows, x = Windows(kernel, stride, dilation, padding), picture(*size)
    weight = torch.randn(5, 3, *kernel, generator=torch.Generator().manual_seed(1))
    pixels = functional.pad(x.permute(0, 3, 1, 2), padding)
    wanted = functional.conv2d(pixels, weight, stride=stride, dilation=dilation)
    height, width = size
    shape = ConvShape(2, height, width, 3, 5, windows)
    assert shape.outputs == tuple(wanted.shape[2:])
    assert windows.outputs(*size) == tuple(wanted.shape[2:])
    rows = windows.unfold(x).reshape(-1, shape.k)
    assert shape.k == windows.taps * 3 == weight[0].numel()
    found = rows @ weight.permute(0, 2, 3, 1).reshape(5, -1).T
    wanted = wanted.permute(0, 2, 3, 1).reshape(-1, 5)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_windows_survive_their_numbers(case):
    windows = Windows(*case)
    assert windows.numbers == sum(case, ())
    assert Windows.of(windows.numbers) == windows
    assert windows.are_pixels == (windows == Windows((1, 1)))


def test_nothing_is_copied_where_nothing_is_padded():
    x = picture(9, 13)
    plain = Windows((3, 3), (2, 1))
    assert plain.pad(x) is x
    assert plain.unfold(x).data_ptr() == x.data_ptr()
    assert Windows((3, 3), padding=(0, 0, 0, 1)).pad(x).shape == (2, 10, 13, 3)


def test_threads_are_taken_and_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for columns, inside in ((1, 1), (4095, 1), (4096, 2), (1 << 20, 2)):
            with surgery_threads(columns):
                assert torch.get_num_threads() == inside
            assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), one_torch_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
