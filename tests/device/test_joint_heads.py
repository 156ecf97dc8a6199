"""Heads in 16 bit in one pass: kernel against reference, reference against diffusers."""

from dataclasses import dataclass, replace

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch.nn.functional import rms_norm

from quantkit.device import compilers, log
from quantkit.device.backends import Backend, use
from quantkit.device.ops import call as execute
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.attention_factors import padded
from tests.support.kernel_cases import need

OP = OPS["joint_heads"]
#: tokens of the first and of the second stream
TOKENS = ((1, 0), (15, 2), (37, 101), (16, 48), (0, 21))


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


@dataclass(frozen=True, eq=False)
class Case:
    """Operands of joint_heads: q, k, v of each stream, their weights, and the rotation."""

    first: tuple
    second: tuple = (None,) * 3
    weights: tuple = (None,) * 4
    turn: tuple = (None, None)
    columns: tuple = (0,) * 6
    heads: int = 2
    d: int = 32
    eps: float = 1e-6
    rotary: str = "none"

    @classmethod
    def draw(cls, d=64, tokens=(37, 5), *, dtype=torch.float32, rotary="none", norm=True):
        generator = torch.Generator().manual_seed(d + sum(tokens))
        heads, (t1, t2), width = 3, tokens, 3 * d

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        # The first stream's are joined, those of the second apart.
        first = (normal(2, t1, 3 * width + 8),) * 3
        second = tuple(normal(2, t2, width + 8) if t2 else None for _ in range(3))
        weights = tuple(normal(d) if norm and (i < 2 or t2) else None for i in range(4))
        angle = torch.randn(t1 + t2, d, generator=generator)
        turn = (None, None) if rotary == "none" else (angle.cos(), angle.sin())
        columns = (8, 8 + width, 8 + 2 * width, 8, 0, 8) if t2 else (8, 8 + width, 0, 0, 0, 0)
        first = first if t2 else (*first[:2], None)
        return cls(first, second, weights, turn, columns, heads, d, rotary=rotary)

    @property
    def arguments(self):
        options = (self.columns, self.heads, self.d, self.eps, self.rotary)
        return (*self.first, *self.second, *self.weights, *self.turn, *options)

    def wanted(self):
        """Return what diffusers computes, in float32."""
        made = []
        for part in range(3 if self.first[2] is not None else 2):
            streams = []
            for place, stream in enumerate((self.first, self.second)):
                if stream[part] is None:
                    continue
                at, shape = self.columns[part + 3 * place], (self.heads, self.d)
                x = stream[part][..., at : at + self.heads * self.d].unflatten(-1, shape).float()
                weight = self.weights[2 * place + part] if part < 2 else None
                normed = x if weight is None else rms_norm(x, (self.d,), weight.float(), self.eps)
                streams.append(normed)
            x = torch.cat(streams, dim=1)
            if part < 2 and self.rotary != "none":
                unbind = {"pairs": -1, "halves": -2}[self.rotary]
                x = apply_rotary_emb(x, self.turn, use_real_unbind_dim=unbind, sequence_dim=1)
            made.append(x)
        return torch.stack(made)


def made(case):
    """Return what the kernel makes, which are the reference's bits."""
    with log.record() as seen:
        found = execute.call(OP, *case.arguments)
    assert [where for _, _, where in seen.calls] == [Backend.HOST]
    with use(Backend.REFERENCE):
        wanted = execute.call(OP, *case.arguments)
    assert found.shape == wanted.shape
    assert found.dtype is wanted.dtype
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("d", "rotary"),
    [(d, how) for d in (8, 24, 40, 64, 128, 160) for how in ("none", "pairs", "halves")
     if how != "halves" or d % 16 == 0],
)  # fmt: skip
def test_heads_are_diffusers_rounded_once(d, rotary, dtype):
    for place, tokens in enumerate(TOKENS):
        case = Case.draw(d, tokens, dtype=dtype, rotary=rotary, norm=place % 3 != 2)
        found, wanted = made(case), case.wanted()
        # Where two numbers cancel in a rotation, the spacing is that of what it adds up.
        eps = torch.finfo(dtype).eps
        assert torch.allclose(found.float(), wanted, rtol=0.51 * eps + 2e-7, atol=2e-6)


def test_norms_may_be_some_streams_and_sides_alone():
    case = Case.draw(40, (19, 30))
    for left_out in range(4):
        weights = tuple(None if i == left_out else w for i, w in enumerate(case.weights))
        one = replace(case, weights=weights)
        assert torch.allclose(made(one), one.wanted(), rtol=1e-5, atol=2e-6)


def test_nan_and_infinity_stay_in_their_row():
    case = Case.draw(64, (20, 0), rotary="pairs")
    x = case.first[0].clone()
    x[0, 3, 8 + 64 + 5], x[1, 4, 8 + 6] = torch.nan, torch.inf
    found = made(replace(case, first=(x, *case.first[1:])))
    assert found.isnan().any(-1).nonzero().tolist() == [[0, 0, 3, 1], [0, 1, 4, 0]]


def codes_of(case, **new):
    """Return what stream_codes_fp8 is called with for the streams of a case."""
    width = padded(case.d)
    normal = torch.randn(2, case.heads, width, generator=torch.Generator().manual_seed(1))
    numbers = {
        "k_mean": normal[0] / 4, "q_factor": torch.full((case.heads,), 20.0),
        "k_factor": 9 + torch.arange(case.heads) / 4, "v_mean": normal[1] / 4,
        "v_scale": 0.01 + normal[0].abs() / 64, **new,
    }  # fmt: skip
    where = len(case.arguments) - 5
    return (*case.arguments[:where], *numbers.values(), *case.arguments[where:])


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize(("d", "rotary"), [(8, "pairs"), (40, "none"), (72, "pairs"),
                                           (128, "halves"), (160, "none")])  # fmt: skip
def test_all_codes_are_those_of_the_operations_for_one_side(d, rotary, tokens):
    case = Case.draw(d, tokens, dtype=torch.bfloat16, rotary=rotary)
    first = case.first if tokens[1] else (case.first[0],) * 3
    arguments = codes_of(replace(case, first=first))
    with log.record() as seen:
        found = execute.call(OPS["stream_codes_fp8"], *arguments)
    assert [where for _, _, where in seen.calls] == [Backend.HOST]
    with use(Backend.REFERENCE):
        wanted = execute.call(OPS["stream_codes_fp8"], *arguments)
    assert [t.shape for t in found] == [t.shape for t in wanted]
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("new", "error", "text"),
    [
        ({"q_factor": torch.ones(3)}, ShapeError, "numbers of 3 heads, expected a divisor of 4"),
        ({"k_factor": torch.ones(1)}, ShapeError, "k_factor has shape (1,), expected (2,)"),
        ({"k_mean": torch.ones(2, 16)}, ShapeError, "k_mean has shape (2, 16), expected (2, 32)"),
        ({"v_scale": torch.ones(2, 32).half()}, KernelError, "v_scale is torch.float16"),
        ({"v_mean": torch.ones(2, 32).to("meta")}, KernelError, "v_mean is on meta"),
    ],
)
def test_numbers_of_codes_that_do_not_fit_are_refused(new, error, text):
    with pytest.raises(error, match="stream_codes_fp8") as caught:
        execute.call(OPS["stream_codes_fp8"], *codes_of(Case((X, X, X)), **new))
    assert text in str(caught.value)


def test_codes_are_of_values_too():
    with pytest.raises(ShapeError, match="stream_codes_fp8: first_v is missing"):
        execute.call(OPS["stream_codes_fp8"], *codes_of(Case((X, X, None))))


X = torch.zeros(2, 5, 64)


@pytest.mark.parametrize(
    ("new", "error", "text"),
    [
        ({"first": (X.double(), X, X)}, KernelError, "dtype torch.float64"),
        ({"first": (X[0], X, X)}, ShapeError, "first_q has shape"),
        ({"first": (X, X[:, :4], X)}, ShapeError, "first_k has shape (2, 4, 64)"),
        ({"first": (X, X.half(), X)}, KernelError, "first_k is torch.float16"),
        ({"first": (X, None, X)}, ShapeError, "first_k is missing, expected a projection"),
        ({"second": (X, X, None)}, ShapeError, "second_v is missing"),
        ({"second": (None, X, None)}, ShapeError, "second_k is given, expected none"),
        ({"first": (X, X, None), "second": (X, X, X)}, ShapeError, "second_v is given"),
        ({"columns": (0, 8, 0, 0, 0, 0)}, ShapeError, "columns 8 to 72 of the 64 of first_k"),
        ({"columns": (0, 0, 4, 0, 0, 0)}, ShapeError, "columns 4 to 68"),
        ({"columns": (0,) * 5}, ShapeError, "from 6 columns on"),
        ({"d": 12}, ShapeError, "2 heads of 12"),
        ({"d": 168}, ShapeError, "expected heads of a multiple of 8 up to 160"),
        ({"heads": 0}, ShapeError, "0 heads"),
        ({"weights": (torch.ones(16), None, None, None)}, ShapeError, "first_q_weight has shape"),
        ({"weights": (None, torch.ones(32).half(), None, None)}, KernelError, "first_k_weight is"),
        ({"rotary": "pairs"}, KernelError, "cos belongs to a rotation"),
        ({"rotary": "pairs", "turn": (X[0], X[0])}, ShapeError, "cos has shape"),
        ({"eps": -1.0}, KernelError, "eps -1.0"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_refused(new, error, text):
    with pytest.raises(error, match="joint_heads") as caught:
        execute.call(OP, *replace(Case((X, X, X)), **new).arguments)
    assert text in str(caught.value)
