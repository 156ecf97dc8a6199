"""Codes of heads: kernel against reference, reference against diffusers and attention's codes."""

from dataclasses import dataclass, replace

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from torch.nn.functional import scaled_dot_product_attention

from quantkit.device import compilers, log
from quantkit.device.backends import Backend, use
from quantkit.device.ops import call as execute
from quantkit.device.ops.attention.streams import ROTATIONS
from quantkit.device.ops.table import OPS
from quantkit.errors import KernelError, QuantkitError, ShapeError
from quantkit.numerics.attention_factors import attention_codes, padded, score_factor, unit_factors
from tests.support.kernel_cases import need

HEAD_SIZES = (8, 16, 24, 40, 64, 72, 104, 128, 160)
#: tokens of the first and of the second stream
TOKENS = ((1, 0), (15, 2), (1, 16), (37, 101), (16, 48), (0, 21))


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


@dataclass(frozen=True, eq=False)
class Case:
    """Operands of head_codes but for the last option of int8, by name in their order."""

    first: torch.Tensor
    second: torch.Tensor | None
    first_weight: torch.Tensor | None
    second_weight: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    mean: torch.Tensor | None
    factor: torch.Tensor
    first_column: int = 0
    second_column: int = 0
    heads: int = 2
    head_size: int = 64
    eps: float = 1e-6
    rotary: str = "none"

    @classmethod
    def draw(cls, d=64, tokens=(37, 5), *, dtype=torch.float16, rotary="none", norm=True, seed=0):
        generator = torch.Generator().manual_seed(seed)
        heads, pictures, (t1, t2) = 2, 2, tokens

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        angle = normal(t1 + t2, d)
        turned = rotary != "none"
        return cls(
            (2 * normal(pictures, t1, heads * d + 24) + 0.5).to(dtype),
            normal(pictures, t2, 8 + heads * d).to(dtype) if t2 else None,
            normal(d) if norm else None,
            normal(d) if norm and t2 else None,
            angle.cos() if turned else None,
            angle.sin() if turned else None,
            0.3 * normal(heads, padded(d)),
            30 * (1 + normal(heads).abs()),
            16,
            8 if t2 else 0,
            heads,
            d,
            rotary=rotary,
        )

    @property
    def arguments(self):
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    @property
    def values(self):
        """Arguments of value_codes on the same streams."""
        scale = (self.factor[:, None] / 900).repeat(1, padded(self.head_size))
        where = (self.first_column, self.second_column, self.heads, self.head_size)
        return (self.first, self.second, self.mean, scale, *where)

    def streams(self):
        """Return (B, T, heads, d) of each stream, in its own dtype."""
        both = ((self.first, self.first_column), (self.second, self.second_column))
        width = self.heads * self.head_size
        return [
            x[..., at : at + width].unflatten(-1, (self.heads, self.head_size))
            for x, at in both
            if x is not None
        ]


def both(name, *arguments):
    """Return what the kernel and the reference make of the same operands, as tuples."""
    with log.record() as seen:
        found = execute.call(OPS[name], *arguments)
    assert [where for _, _, where in seen.calls] == [Backend.HOST]
    with use(Backend.REFERENCE):
        wanted = execute.call(OPS[name], *arguments)
    return tuple(t if isinstance(t, tuple) else (t,) for t in (found, wanted))


def check_same(name, *arguments):
    found, wanted = both(name, *arguments)
    for mine, right in zip(found, wanted, strict=True):
        assert mine.shape == right.shape
        if mine.dtype is torch.uint8:
            assert torch.equal(mine, right)
        else:
            assert torch.equal(mine.isnan(), right.isnan())
            assert torch.equal(mine.nan_to_num(), right.nan_to_num())
    return found


@pytest.mark.parametrize(
    ("d", "rotary"),
    [(d, how) for d in HEAD_SIZES for how in ROTATIONS if how != "halves" or d % 16 == 0],
)
def test_kernels_give_the_references_bytes(d, rotary):
    for place, tokens in enumerate(TOKENS):
        dtype = (torch.float16, torch.bfloat16, torch.float32)[(place + d // 8) % 3]
        case = Case.draw(d, tokens, dtype=dtype, rotary=rotary, norm=place % 2 == 0, seed=d)
        check_same("head_codes_fp8", *case.arguments)
        for group in (1, 16):
            check_same("head_codes_int8", *case.arguments, group)
        if rotary == "none":
            check_same("value_codes_fp8", *case.values)
            check_same("value_codes_f16", *case.values)


@pytest.mark.parametrize("norms", [(True, False), (False, True)], ids=["first", "second"])
def test_a_norm_of_one_stream_leaves_the_other(norms):
    case = Case.draw(40, (19, 30))
    weights = zip((case.first_weight, case.second_weight), norms, strict=True)
    first, second = (w if on else None for w, on in weights)
    one = replace(case, first_weight=first, second_weight=second, mean=None)
    (codes,) = check_same("head_codes_fp8", *one.arguments)
    plain = replace(one, first_weight=None, second_weight=None)
    (unnormed,) = check_same("head_codes_fp8", *plain.arguments)
    kept = slice(19, None) if norms[0] else slice(0, 19)
    assert torch.equal(codes[:, kept], unnormed[:, kept])
    assert not torch.equal(codes, unnormed)


@pytest.mark.parametrize(("rotary", "unbind"), [("pairs", -1), ("halves", -2)])
def test_rotations_are_diffusers(rotary, unbind):
    case = Case.draw(64, (21, 4), dtype=torch.float32, rotary=rotary, norm=False)
    case = replace(case, mean=None, factor=torch.full((1,), 64.0))
    x = torch.cat(case.streams(), dim=1)
    turned = apply_rotary_emb(x, (case.cos, case.sin), use_real_unbind_dim=unbind, sequence_dim=1)
    wanted = (64 * turned).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    (found,) = check_same("head_codes_fp8", *case.arguments)
    assert torch.equal(found, wanted.transpose(1, 2).flatten(0, 1))


def test_norms_are_diffusers():
    case = Case.draw(128, (33, 0), dtype=torch.float32)
    norm = RMSNorm(128, eps=case.eps)
    norm.load_state_dict({"weight": case.first_weight})
    (x,) = case.streams()
    wanted = norm(x).detach().transpose(1, 2).flatten(0, 1)
    rows = replace(case, mean=None, factor=torch.ones(1))
    codes, scale = check_same("head_codes_int8", *rows.arguments, 1)
    amax = wanted.abs().amax(2)
    assert torch.allclose(scale * 127, amax, rtol=1e-6)
    assert (
        float((codes.view(torch.int8) * scale[..., None] - wanted).abs().max()) < amax.max() / 250
    )


@pytest.mark.parametrize("fmt", ["fp8", "int8"])
def test_operations_make_the_codes_of_attention(fmt):
    """Given the factors and means of a call's own numbers."""
    heads, d, n = 3, 40, 53
    q, k, v = (torch.randn(2, n, heads * d, generator=torch.Generator().manual_seed(i)) + i
               for i in range(3))  # fmt: skip
    rows = [t.unflatten(2, (heads, d)).transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    wanted = attention_codes(*rows, qk_format={"fp8": "e4m3fn", "int8": "int8"}[fmt])
    where, none = (0, 0, heads, d), (None,) * 5
    mean = torch.nn.functional.pad(rows[1].mean(dim=1), (0, 8))
    values = execute.call(OPS["value_codes_fp8"], v, None, wanted.v_mean, wanted.v_scale, *where)
    assert torch.equal(values, wanted.v)
    tau = score_factor(d)
    if fmt == "int8":
        a, b = torch.full((6,), tau), torch.ones(1).repeat(6)
    else:
        centred = rows[1] - rows[1].mean(dim=1, keepdim=True)
        a, b = unit_factors(rows[0].abs().amax((1, 2)), centred.abs().amax((1, 2)), tau)
    op = OPS[f"head_codes_{fmt}"]
    groups = ((1,), (16,)) if fmt == "int8" else ((), ())
    queries = execute.call(op, q, None, *none, a, *where, 0.0, "none", *groups[0])
    keys = execute.call(op, k, None, *none[:4], mean, b, *where, 0.0, "none", *groups[1])
    if fmt == "fp8":
        queries, keys = (queries,), (keys,)
    else:
        assert torch.equal(queries[1], wanted.q_scale)
        assert torch.equal(keys[1], wanted.k_scale)
    assert torch.equal(queries[0], wanted.q)
    assert torch.equal(keys[0], wanted.k)


def test_joint_attention_on_codes_is_near_the_exact_one():
    """Two streams with norms and a rotation, as FLUX has them."""
    case = Case.draw(64, (77, 300), rotary="pairs", seed=3)
    scale = torch.full((2, 64), 0.01)
    joined = torch.cat(case.streams(), dim=1).double()

    def normed(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + case.eps).sqrt() * weight

    parts = zip(case.streams(), (case.first_weight, case.second_weight), strict=True)
    x = torch.cat([normed(p.double(), w) for p, w in parts], dim=1)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-odd, even), -1).flatten(-2)
    x = x * case.cos[:, None] + turned * case.sin[:, None]
    x, joined = x.transpose(1, 2), joined.transpose(1, 2)
    root = score_factor(64) ** 0.5
    alike = replace(case, mean=None, factor=torch.tensor([root]))
    codes = execute.call(OPS["head_codes_fp8"], *alike.arguments)
    first, second, _, _, *where = case.values
    values = execute.call(OPS["value_codes_fp8"], first, second, None, scale, *where)
    found = execute.call(
        OPS["attention_fp8"], codes, codes, values, None, None, scale, None, 377, 2, 64,
        "e4m3fn", torch.float32,
    )  # fmt: skip
    wanted = scaled_dot_product_attention(x, x, joined).transpose(1, 2)
    error = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    # Queries are keys here, so that rows are peaked: what e4m3 is worst at.
    assert float(error) < 0.08


def test_nan_stays_nan_and_large_values_saturate():
    case = Case.draw(40, (20, 0), dtype=torch.float32, norm=False)
    x = case.first.clone()
    x[0, 3, 16 + 5], x[0, 4, 16 + 6], x[0, 4, 16 + 7] = torch.nan, torch.inf, -1e30
    case = replace(case, first=x, mean=None)
    (codes,) = check_same("head_codes_fp8", *case.arguments)
    values = codes.view(torch.float8_e4m3fn).float()
    assert values.isnan().nonzero().tolist() == [[0, 3, 5]]
    assert values[0, 4, 6:8].tolist() == [448, -448]
    (codes,) = check_same("value_codes_fp8", *case.values)
    values = codes.view(torch.float8_e4m3fn).float()
    assert values.isnan().nonzero().tolist() == [[0, 5, 3]]
    assert values[0, 6:8, 4].tolist() == [448, -448]
    (values,) = check_same("value_codes_f16", *case.values)
    assert values.isnan().nonzero().tolist() == [[0, 5, 3]]
    assert values[0, 6:8, 4].tolist() == [65504, -65504]
    codes, scale = check_same("head_codes_int8", *case.arguments, 16)
    assert scale.isnan().nonzero().tolist() == [[0, 0]]
    assert bool((codes[0, :16, :40] == 0x80).all())


def test_a_row_of_zeros_has_a_scale_of_one():
    case = Case.draw(24, (20, 0))
    case = replace(case, first=torch.zeros_like(case.first), mean=None)
    codes, scale = check_same("head_codes_int8", *case.arguments, 1)
    assert not codes.any()
    assert bool((scale == 1).all())


def test_what_no_token_has_is_zero():
    case = Case.draw(40, (18, 3))
    (codes,) = check_same("head_codes_fp8", *case.arguments)
    assert codes.shape == (4, 21, 48)
    assert not codes[..., 40:].any()
    (codes,) = check_same("value_codes_fp8", *case.values)
    assert codes.shape == (4, 48, 32)
    assert not codes[:, 40:].any()
    assert not codes[:, :, 21:].any()


def test_tiny_scales_of_values_give_no_nan():
    case = Case.draw(16, (5, 0), dtype=torch.float32)
    first, second, mean, scale, *where = case.values
    tiny = torch.full_like(scale, 1e-42)
    (codes,) = check_same("value_codes_fp8", 0 * first, second, 0 * mean, tiny, *where)
    assert not codes.view(torch.float8_e4m3fn).float().isnan().any()


X = torch.zeros(2, 5, 64)


@pytest.mark.parametrize(
    ("new", "error", "text"),
    [
        ({"first": X.double()}, KernelError, "dtype torch.float64"),
        ({"first": X[0]}, ShapeError, "first is torch.float32 of shape"),
        ({"second": torch.zeros(1, 5, 64)}, ShapeError, "second is"),
        ({"second": X.half()}, ShapeError, "second is torch.float16"),
        ({"second": X, "second_column": 8}, ShapeError, "columns 8 to 72 of the 64 of second"),
        ({"first_column": 4}, ShapeError, "columns 4 to 68"),
        ({"first_column": -8}, ShapeError, "columns -8 to 56"),
        ({"head_size": 12}, ShapeError, "head_size 12, expected a multiple of 8 up to 160"),
        ({"head_size": 168}, ShapeError, "head_size 168"),
        ({"heads": 0}, ShapeError, "0 heads"),
        ({"mean": torch.zeros(2, 16)}, ShapeError, "mean has shape"),
        ({"factor": torch.ones(3)}, ShapeError, "numbers of 3 heads, expected a divisor of 4"),
        ({"factor": torch.ones(2, dtype=torch.half)}, KernelError, "factor is torch.float16"),
        ({"first_weight": torch.ones(64)}, ShapeError, "first_weight has shape"),
        ({"rotary": "thirds"}, KernelError, "rotary 'thirds', expected one of none, pairs"),
        ({"rotary": "pairs"}, KernelError, "cos belongs to a rotation"),
        ({"cos": X[0]}, KernelError, "cos belongs to a rotation"),
        (
            {"rotary": "pairs", "cos": torch.ones(4, 32), "sin": torch.ones(5, 32)},
            ShapeError,
            "cos has shape",
        ),
        (
            {"rotary": "halves", "heads": 1, "head_size": 24, "cos": torch.ones(5, 24),
             "sin": torch.ones(5, 24)},
            ShapeError,
            "halves of 24 columns, expected a multiple of 16",
        ),
        ({"eps": -1.0}, KernelError, "eps -1.0"),
        ({"eps": float("nan")}, KernelError, "eps nan"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_refused(new, error, text):
    none = dict.fromkeys(("second", "first_weight", "second_weight", "cos", "sin", "mean"))
    case = Case(X, factor=torch.ones(2), head_size=32, **none)
    with pytest.raises(error, match="head_codes_fp8") as caught:
        execute.call(OPS["head_codes_fp8"], *replace(case, **new).arguments)
    assert text in str(caught.value)


def test_other_groups_are_refused():
    with pytest.raises(KernelError, match="groups of 8 tokens, expected 1 or 16"):
        execute.call(OPS["head_codes_int8"], *Case.draw().arguments, 8)


def test_scales_of_values_are_checked():
    first, second, _, scale, *where = Case.draw().values
    with pytest.raises(QuantkitError, match="value_codes_fp8: scale has shape"):
        execute.call(OPS["value_codes_fp8"], first, second, None, scale[:, :48], *where)
