"""Attention with dynamic scales: what runs between projections and the result."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from quantkit.device import compilers
from quantkit.device.backends import Backend, use
from quantkit.fusion.trace import trace
from quantkit.inference.attention.attention_call import AttentionSettings, attend
from quantkit.models.attention_modules import AttentionCall, Heads
from quantkit.numerics.attention_factors import score_factor
from tests.support.kernel_cases import need

PICTURES, HEADS = 2, 3
PLAIN = AttentionCall(None, "")
#: the operators of a call, without views, by whether one launch makes all codes
FP8 = ["head_partials", "head_factors_fp8", "stream_codes_fp8", "attention_fp8"]
CROSS = [*FP8[:2], "head_codes_fp8", "head_codes_fp8", "value_codes_fp8", "attention_fp8"]
INT8 = [
    "head_partials", "head_factors_int8", "head_codes_int8", "head_codes_int8",
    "value_codes_fp8", "attention_int8",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


def in_rows(q=37, k=37, d=40):
    """Return heads (B, H, N, D) as processors have them: tokens of (B, N, H * D)."""
    return Heads(*(torch.randn(PICTURES, t, HEADS, d).transpose(1, 2) for t in (q, k, k)))


def by_head(d=40):
    """Return heads that were joined along the tokens, as those of SD 3."""
    return Heads(*(t.contiguous() for t in in_rows(d=d)))


def joined(d=40):
    """Return views of one projection."""
    x = torch.randn(PICTURES, 37, 3 * HEADS * d)
    return Heads(*(t.unflatten(-1, (HEADS, d)).transpose(1, 2) for t in x.chunk(3, dim=-1)))


def calls_between(heads, settings):
    """Return the operators of a call that do more than look at memory in another way."""
    program, _ = trace(lambda: attend(settings, heads, PLAIN), list(heads))
    return [call.operator for call in program.calls if call.fresh]


def names(operators):
    return [op._schema.name.removeprefix("quantkit::") for op in operators]


@pytest.mark.parametrize(
    ("heads", "fmt", "expected"),
    [
        (in_rows, "e4m3fn", FP8),
        (by_head, "e4m3fn", FP8),
        (lambda: in_rows(k=21), "e4m3fn", CROSS),
        (in_rows, "int8", INT8),
    ],
    ids=["rows", "heads", "cross", "int8"],
)
@pytest.mark.parametrize("backend", [Backend.HOST, Backend.REFERENCE])
def test_no_operator_of_torch_stands_before_attention(backend, heads, fmt, expected):
    with use(backend):
        found = calls_between(heads(), AttentionSettings(fmt, 1))
    assert names(found) == expected


def test_views_of_one_projection_are_copied_once():
    found = names(calls_between(joined(), AttentionSettings("e4m3fn", 1)))
    assert found == ["aten::clone"] * 3 + FP8


@pytest.mark.parametrize("fmt", ["e4m3fn", "int8"])
@pytest.mark.parametrize("draw", [in_rows, by_head, joined, lambda: in_rows(q=5, k=70)])
def test_the_answer_is_torchs_however_heads_lie(draw, fmt):
    torch.manual_seed(0)
    heads = draw()
    heads = heads._replace(k=heads.k + 3, v=heads.v - 5)
    found = attend(AttentionSettings(fmt, 1), heads, PLAIN)
    wanted = scaled_dot_product_attention(*heads)
    assert found.shape == wanted.shape
    apart = heads.v - heads.v.mean(2, keepdim=True)
    spread = scaled_dot_product_attention(heads.q, heads.k, apart)
    assert float((found - wanted).norm() / spread.norm()) < 0.09


def test_layouts_give_the_same_bytes():
    torch.manual_seed(0)
    heads, settings = in_rows(), AttentionSettings("e4m3fn", 1)
    rows, pictures = (
        attend(settings, Heads(*given), PLAIN) for given in (heads, [t.contiguous() for t in heads])
    )
    assert torch.equal(rows, pictures)
    # As processors put it: tokens in rows, which they view as (B, N, H * D).
    assert all(y.transpose(1, 2).is_contiguous() for y in (rows, pictures))


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scores_without_a_positive_factor_are_torchs(scale):
    heads = in_rows()
    assert score_factor(40, scale) <= 0
    assert attend(AttentionSettings("e4m3fn", 1), heads, AttentionCall(scale, "")) is None


@pytest.mark.parametrize("draw", [in_rows, by_head])
def test_a_compiled_call_is_one_graph(draw):
    heads, settings = draw(), AttentionSettings("e4m3fn", 1)
    wanted = attend(settings, heads, PLAIN)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False)
    assert torch.equal(compiled(settings, heads, PLAIN), wanted)
