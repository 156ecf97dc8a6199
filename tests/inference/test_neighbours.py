"""Two streams as one tensor: torch's concatenation, without a copy where they are neighbours."""

import pytest
import torch

from quantkit.inference.blocks.joined_streams import joined


def tensor(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).half()


def cut(x, tokens):
    return x[:, :tokens], x[:, tokens:]


X = tensor(2, 7, 8)
NEIGHBOURS = {
    "many pictures": cut(X, 3),
    "one picture": cut(tensor(1, 7, 8), 6),
    "behind an offset": cut(tensor(3, 7, 8)[1:], 1),
}
OTHERS = {
    "the other way round": (X[:, 3:], X[:, :3]),
    "a gap": (X[:, :3], X[:, 4:]),
    "an overlap": (X[:, :3], X[:, 2:]),
    "less than all": (X[:, :3], X[:, 3:6]),
    "not from the first": (X[:, 1:3], X[:, 3:]),
    "the same": (X, X),
    "two tensors": (X[:, :3], X.clone()[:, 3:]),
    "columns": (X[:, :3, :4], X[:, 3:, :4]),
    "every other token": (X[:, ::2], X[:, 1::2]),
    "turned": cut(tensor(8, 7, 2).transpose(0, 2), 3),
    "other pictures": (X[:1, :3], X[1:, 3:]),
    "no tokens": (X[:, :0], X),
    "another dtype": (X[:, :3], X.view(torch.bfloat16)[:, 3:]),
    "two dimensions": (X[0], X[1]),
}


@pytest.mark.parametrize("pair", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbours_are_not_copied(pair):
    first, second = pair
    y = joined(first, second)
    assert y.data_ptr() == first.data_ptr()
    wanted = torch.cat([first, second], dim=1)
    assert torch.equal(y, wanted)
    assert y.stride() == wanted.stride()
    with torch.inference_mode():
        assert joined(first, second).data_ptr() == first.data_ptr()


@pytest.mark.parametrize("pair", OTHERS.values(), ids=OTHERS)
def test_others_are_copied(pair):
    first, second = pair
    y, wanted = joined(first, second), torch.cat([first, second], dim=1)
    assert y.dtype is wanted.dtype
    assert torch.equal(y, wanted)
    assert y.data_ptr() not in {first.data_ptr(), second.data_ptr()}


def test_gradients_are_torchs():
    x = X.float().requires_grad_()
    y = joined(*cut(x, 3))
    assert y.data_ptr() != x.data_ptr()
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    with torch.no_grad():
        assert joined(*cut(x, 3)).data_ptr() == x.data_ptr()


def test_subclasses_are_torchs():
    class Own(torch.Tensor):
        pass

    y = joined(*cut(X.as_subclass(Own), 3))
    assert type(y) is Own
    assert y.data_ptr() != X.data_ptr()


def test_tensors_without_memory_are_torchs():
    first, second = (torch.empty(2, 3, 8, device="meta") for _ in range(2))
    assert joined(first, second).shape == (2, 6, 8)


def test_a_compiled_graph_holds_a_concatenation():
    compiled = torch.compile(joined, fullgraph=True, backend="eager")
    y = compiled(*cut(X, 3))
    assert torch.equal(y, X)
    assert y.data_ptr() != X.data_ptr()
