"""Products that end in codes of heads: places, zeros, rounding, and what folding factors gives."""

from dataclasses import dataclass, replace

import pytest
import torch

from quantkit.device import compilers, log
from quantkit.device.archs import HOST_LAYOUTS
from quantkit.device.backends import Backend
from quantkit.device.ops import call as execute
from quantkit.device.ops.op import all_variants
from quantkit.device.ops.table import OPS, name_for
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.attention_factors import e4m3fn_codes, value_codes
from quantkit.numerics.packed_2to4 import pack_two_of_four
from tests.support.kernel_cases import launch, need
from tests.support.sampling import turned

#: pictures, tokens, heads, columns of a head: tails of both tiles, pictures that end within a run
SIZES = (
    (1, 1, 1, 8),
    (2, 77, 3, 40),
    (3, 24, 2, 64),
    (1, 131, 5, 72),
    (2, 8, 1, 128),
    (5, 5, 9, 16),
)


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


@dataclass(frozen=True, eq=False)
class Case:
    """A call whose sums are exact: small integers as codes, scales that are powers of two."""

    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    bias: torch.Tensor | None
    tokens: int
    heads: int

    @classmethod
    def draw(cls, sizes, k=96, *, per_token=True, bias=True):
        generator = torch.Generator().manual_seed(sum(sizes))
        pictures, tokens, heads, d = sizes

        def integers(*shape):
            return torch.randint(-4, 5, shape, generator=generator).float()

        m, n = pictures * tokens, heads * d
        return cls(
            integers(m, k),
            integers(n, k),
            torch.exp2(integers(m if per_token else 1).sign() - 3),
            torch.exp2(integers(n).sign()),
            integers(n) / 4 if bias else None,
            tokens,
            heads,
        )

    def y(self):
        """Return (pictures * heads, tokens, d) float32, exactly."""
        y = (self.x @ self.w.T) * self.x_scale[:, None] * self.w_scale
        y = y if self.bias is None else y + self.bias
        d = len(self.w) // self.heads
        return y.view(-1, self.tokens, self.heads, d).transpose(1, 2).flatten(0, 1)

    def call(self, name, fmt="e4m3fn"):
        """Return what the kernel gives."""
        with log.record() as seen:
            found = execute.call(OPS[name], *self.operands(fmt), *self.options(fmt))
        assert [where for _, _, where in seen.calls] == [Backend.HOST]
        return found

    def operands(self, fmt):
        dtype = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}[fmt]
        x, w = (t.to(dtype).view(torch.uint8) for t in (self.x, self.w))
        return x, self.x_scale, w, self.w_scale, self.bias

    def options(self, fmt):
        return self.tokens, self.heads, fmt, fmt


def widened(codes, rows, columns):
    """Return codes with zeros behind."""
    wanted = torch.zeros(len(codes), rows, columns, dtype=torch.uint8)
    wanted[:, : codes.shape[1], : codes.shape[2]] = codes
    return wanted


def up(number):
    return -(-number // 16) * 16


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "int8"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_codes_are_where_attention_reads_them(sizes, fmt):
    case = Case.draw(sizes, per_token=sizes[1] % 2 == 1, bias=sizes[2] > 1)
    kind, d = "int8" if fmt == "int8" else "fp8", sizes[3]
    codes = e4m3fn_codes(case.y(), None, torch.ones(1))
    found = case.call(f"project_codes_{kind}", fmt)
    assert torch.equal(found, widened(codes, sizes[1], up(d)))
    found = case.call(f"project_values_{kind}", fmt)
    assert torch.equal(found, widened(codes.transpose(1, 2), up(d), up(sizes[1])))


#: Host layout -> the format of codes that it is asked for.
CODES = dict.fromkeys(HOST_LAYOUTS, "e4m3fn") | {"gfx10": "int8"}


def variants_of(op, fmt):
    return [v for v in all_variants(op) if v.words[:2] == (fmt, fmt)]


@pytest.mark.parametrize("case", turned(HOST_LAYOUTS, ["project_codes", "project_values"]))
def test_every_tile_and_layout_writes_all_and_nothing_else(case):
    """Outputs lie between bytes that must not change."""
    layout, name = case
    fmt = CODES[layout]
    op = OPS[name_for(name, fmt, fmt)]
    variants = variants_of(op, fmt)
    for variant in variants:
        for sizes in SIZES:
            case = Case.draw(sizes)
            operands, options = case.operands(fmt), case.options(fmt)
            numbers = op.integers(op.check(op, operands, options).sizes)
            ((shape, dtype),) = op.outputs(operands, options)
            names = [a.name for a in op.args if a.is_pointer]
            tensors = dict(zip(names, (*operands, torch.empty(shape, dtype=dtype)), strict=True))
            found = launch(variant, layout, tensors, numbers)["codes"]
            assert torch.equal(found, op.reference(*operands, *options))


def kept_of(w):
    """Return a mask of two of every four weights, other ones in each group."""
    generator = torch.Generator().manual_seed(len(w))
    scores = torch.rand(len(w), w.shape[1] // 4, 4, generator=generator)
    return (scores.argsort(dim=-1).argsort(dim=-1) < 2).flatten(1)


@pytest.mark.parametrize("case", turned(HOST_LAYOUTS, [False, True]))
def test_three_projections_of_an_input_are_those_of_each(case):
    """In every tile, between bytes that must not change."""
    layout, sparse = case
    fmt = CODES[layout]
    sparse = sparse and fmt != "int8"  # which has no 2:4 here
    op = OPS[name_for("project_heads", fmt, fmt, sparse=sparse)]
    variants = variants_of(op, fmt)
    assert len(variants) == 2
    for variant in variants:
        for sizes in SIZES:
            q, k, v = (Case.draw(sizes) for _ in range(3))
            k, v = replace(k, w=k.w.flip(0), bias=k.bias.flip(0)), replace(v, w=v.w.flip(1))
            masks = [kept_of(case.w) for case in (q, k, v)]
            if sparse:
                cases = zip((q, k, v), masks, strict=True)
                q, k, v = (replace(case, w=case.w * mask) for case, mask in cases)
            of_each = [case.operands(fmt) for case in (q, k, v)]
            x, x_scale = of_each[0][:2]
            scale, bias = (torch.stack([o[i] for o in of_each]) for i in (3, 4))
            weights = [o[2] for o in of_each]
            if sparse:
                packed = map(pack_two_of_four, weights, masks)
                weights = [part for parts in packed for part in parts]
            operands = (x, x_scale, *weights, scale, bias)
            options = q.options(fmt)
            outputs = op.outputs(operands, options)
            tensors = (*operands, *(torch.empty(s, dtype=dtype) for s, dtype in outputs))
            named = dict(zip((a.name for a in op.args if a.is_pointer), tensors, strict=True))
            found = launch(variant, layout, named, op.check(op, operands, options).sizes)
            ends = [name_for(f"project_{end}", fmt, fmt) for end in ("codes", "codes", "values")]
            for part, end, of in zip("qkv", ends, of_each, strict=True):
                assert torch.equal(found[f"{part}_codes"], OPS[end].reference(*of, *options))


@pytest.mark.parametrize(
    ("index", "operand", "text"),
    [
        (3, torch.zeros(40, 96, dtype=torch.uint8), "wk has 40 rows, expected 48 as wq"),
        (5, torch.ones(48), r"w_scale has shape \(48,\), expected \(3, 48\)"),
        (6, torch.zeros(3, 40), r"bias has shape \(3, 40\)"),
        (4, torch.zeros(48, 80, dtype=torch.uint8), "wv"),
    ],
)
def test_three_projections_that_do_not_fit_are_refused(index, operand, text):
    x, x_scale, w, *_ = Case.draw((1, 20, 3, 16)).operands("e4m3fn")
    operands = [x, x_scale, w, w, w, torch.ones(3, 48), torch.zeros(3, 48)]
    operands[index] = operand
    with pytest.raises(ShapeError, match=f"project_heads_fp8: .*{text}"):
        execute.call(OPS["project_heads_fp8"], *operands, 20, 3, "e4m3fn", "e4m3fn")


@pytest.mark.parametrize(
    ("index", "operand", "text"),
    [
        (4, torch.zeros(40, 48, dtype=torch.uint8), "wk has 40 rows, expected 48 as wq"),
        (
            4,
            torch.zeros(48, 96, dtype=torch.uint8),
            r"wk has shape \(48, 96\), expected \(48, 48\)",
        ),
        (
            5,
            torch.zeros(48, 11, dtype=torch.uint8),
            r"wk_meta has shape \(48, 11\), expected \(48, 12\)",
        ),
        (7, torch.zeros(40, 12, dtype=torch.uint8), r"wv_meta has shape \(40, 12\)"),
        (9, torch.zeros(48), r"bias has shape \(48,\), expected \(3, 48\)"),
    ],
)
def test_three_sparse_projections_that_do_not_fit_are_refused(index, operand, text):
    x, x_scale, w, *_ = Case.draw((1, 20, 3, 16)).operands("e4m3fn")
    stored = pack_two_of_four(w, kept_of(w))
    operands = [x, x_scale, *stored * 3, torch.ones(3, 48), torch.zeros(3, 48)]
    operands[index] = operand
    with pytest.raises(ShapeError, match=f"project_heads_fp8_sparse: {text}"):
        execute.call(OPS["project_heads_fp8_sparse"], *operands, 20, 3, "e4m3fn", "e4m3fn")


@pytest.mark.parametrize("name", ["project_heads_fp8", "project_heads_fp8_sparse"])
def test_three_projections_keep_nan_and_saturate(name):
    case = Case.draw((1, 20, 2, 40))
    mask = kept_of(case.w)
    sparse = name.endswith("sparse")
    case = replace(case, w=case.w * mask if sparse else case.w, bias=torch.full((80,), 1e6))
    w_scale = case.w_scale.clone()
    w_scale[3], w_scale[45] = torch.inf, torch.nan
    x, x_scale, w, *_ = replace(case, w_scale=w_scale).operands("e4m3fn")
    stored = pack_two_of_four(w, mask) if sparse else (w,)
    numbers = (torch.stack([w_scale] * 3), torch.stack([case.bias] * 3))
    made = execute.call(OPS[name], x, x_scale, *stored * 3, *numbers, *case.options("e4m3fn"))
    q, k, v = (codes.view(torch.float8_e4m3fn).float() for codes in made)
    wanted = e4m3fn_codes(replace(case, w_scale=w_scale).y(), None, torch.ones(1))
    wanted = wanted.view(torch.float8_e4m3fn).float()
    for found in (q[..., :40], k[..., :40], v[:, :40, :20].transpose(1, 2)):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert wanted[1, :, 5].isnan().all()
    assert (wanted == 448).any()


def test_factors_and_means_fold_into_scales_and_bias():
    case = Case.draw((2, 40, 3, 64))
    generator = torch.Generator().manual_seed(1)
    mean, factor = torch.randn(3, 64, generator=generator), torch.rand(3, generator=generator)
    each = factor.repeat_interleave(64)
    folded = replace(case, w_scale=case.w_scale * each, bias=(case.bias - mean.flatten()) * each)
    wanted = e4m3fn_codes(case.y(), mean, factor)
    found = folded.call("project_codes_fp8")
    # Two roundings stand elsewhere.
    assert float((found != wanted).float().mean()) < 1e-3
    scale = (0.01 + torch.rand(3, 64, generator=generator)).flatten()
    folded = replace(case, w_scale=case.w_scale / scale, bias=(case.bias - mean.flatten()) / scale)
    wanted = value_codes(case.y(), mean, scale.view(3, 64))
    found = folded.call("project_values_fp8")
    assert float((found != wanted).float().mean()) < 1e-3


def test_large_values_saturate_and_nan_stays():
    case = Case.draw((1, 20, 2, 40))
    w_scale = case.w_scale.clone()
    w_scale[3], w_scale[45] = torch.inf, torch.nan
    case = replace(case, w_scale=w_scale, bias=torch.full((80,), 1e6))
    wanted = e4m3fn_codes(case.y(), None, torch.ones(1)).view(torch.float8_e4m3fn).float()
    rows = case.call("project_codes_fp8").view(torch.float8_e4m3fn).float()[..., :40]
    columns = case.call("project_values_fp8").view(torch.float8_e4m3fn).float()
    for found in (rows, columns[:, :40, :20].transpose(1, 2)):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert wanted[1, :, 5].isnan().all()
    assert (wanted == 448).any()


@pytest.mark.parametrize(
    ("new", "error", "text"),
    [
        ({"tokens": 7}, ShapeError, "40 rows in pictures of 7 tokens"),
        ({"tokens": 0}, ShapeError, "40 rows in pictures of 0 tokens"),
        ({"heads": 3}, ShapeError, "3 heads of 32 outputs, expected multiples of 8"),
        ({"heads": 8}, ShapeError, "8 heads of 32 outputs"),
        ({"heads": 0}, ShapeError, "0 heads"),
        ({"w_scale": torch.ones(1)}, ShapeError, "w_scale has shape (1,), expected (32,)"),
        ({"bias": torch.ones(32).half()}, KernelError, "bias is torch.float16"),
        ({"bias": torch.ones(16)}, ShapeError, "bias has shape"),
    ],
)
@pytest.mark.parametrize("name", ["project_codes_fp8", "project_values_fp8"])
def test_operands_that_do_not_fit_are_refused(name, new, error, text):
    case = replace(Case.draw((2, 20, 2, 16)), **new)
    with pytest.raises(error, match=name) as caught:
        execute.call(OPS[name], *case.operands("e4m3fn"), *case.options("e4m3fn"))
    assert text in str(caught.value)
