"""Attention on codes: kernel against reference, reference against torch's own in float64."""

from dataclasses import replace

import pytest
import torch

from quantkit.device import compilers, log
from quantkit.device.aot.check import check_folder
from quantkit.device.archs import ARCHS
from quantkit.device.backends import Backend, use
from quantkit.device.ops import call as execute
from quantkit.device.ops.attention.coded_attention import OPS
from quantkit.device.ops.op import all_variants
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.attention_limits import LARGEST_HEAD
from tests.support.attention_cases import SIZES, Heads
from tests.support.kernel_cases import need
from tests.support.sampling import turned

FORMATS = ("e4m3fn", "int8")
#: What an output may differ by, in rms of the outputs, keys and values with means among them.
ERRORS = {"e4m3fn": 0.025, "int8": 0.012}


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


def rms(t):
    return float(t.double().square().mean().sqrt())


def both(call):
    """Return what the kernel and the reference make of the same codes."""
    op, arguments = call
    with log.record() as seen:
        found = execute.call(op, *arguments)
    assert [where for _, _, where in seen.calls] == [Backend.HOST]
    with use(Backend.REFERENCE):
        return found, execute.call(op, *arguments)


def check_same(found, wanted):
    """Equal, but for single probabilities that another order of sums moves to the next code."""
    assert torch.equal(found.isnan(), wanted.isnan())
    difference = (found.double() - wanted.double()).nan_to_num()
    assert float(difference.abs().max()) < 2e-2 * rms(wanted.nan_to_num())
    assert float((difference != 0).double().mean()) < 2e-3


@pytest.mark.parametrize("case", turned([16, 40, 64, 72, 128, 160], FORMATS))
def test_the_kernel_rounds_as_the_reference_does(case):
    columns, fmt = case
    for sizes in SIZES:
        heads = Heads.draw(sizes, columns, pictures=2, seed=sum(sizes))
        check_same(*both(heads.call(fmt)))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("columns", [40, 64, 128])
def test_codes_cost_what_their_format_does(columns, fmt):
    for sizes in ((37, 101), (64, 512)):
        heads = Heads.draw(sizes, columns)
        op, arguments = heads.call(fmt, dtype=torch.float32)
        found = op.reference(*arguments)
        assert rms(found - heads.exact()) < ERRORS[fmt] * rms(heads.exact())


@pytest.mark.parametrize("columns", [64, 128])
def test_many_keys_with_an_offset_of_the_values(columns):
    """Sums of thousands of terms of one sign are where narrow accumulators fail."""
    heads = Heads.draw((40, 4096), columns, heads=1, offset=4.0)
    found, wanted = both(heads.call("e4m3fn", dtype=torch.float32))
    assert rms(found - wanted) < 1e-5 * rms(wanted)
    assert rms(found - heads.exact()) < 0.004 * rms(heads.exact())


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_maximum_that_grows_in_every_tile(fmt):
    """The last tile, which comes first, has the least scores; those after it outgrow each other."""
    heads = Heads.draw((20, 300), 64, heads=1)
    ramp = torch.linspace(6, 0, 300)[:, None] * torch.ones(64)
    heads = replace(heads, q=heads.q.abs(), k=heads.k + ramp)
    found, wanted = both(heads.call(fmt))
    check_same(found, wanted)
    assert rms(wanted.double() - heads.exact()) < 0.2 * rms(heads.exact())


def test_scores_far_below_zero_keep_their_order():
    heads = Heads.draw((19, 130), 64, heads=1, offset=0.0)
    # A column in which all products are -1e4: no shift of the keys takes it away.
    codes = heads.codes("e4m3fn")
    codes.q[:, :, 0] = torch.tensor(100.0).to(torch.float8_e4m3fn).view(torch.uint8)
    codes.k[:, :, 0] = torch.tensor(-104.0).to(torch.float8_e4m3fn).view(torch.uint8)
    found, wanted = both(heads.call("e4m3fn", codes, dtype=torch.float32))
    assert rms(found - wanted) < 1e-2 * rms(wanted)
    plain = replace(codes, q=codes.q.clone(), k=codes.k.clone())
    plain.q[:, :, 0], plain.k[:, :, 0] = 0, 0
    op, arguments = heads.call("e4m3fn", plain, dtype=torch.float32)
    shifted = op.reference(*arguments)
    # Of scores around 1e4, float32 keeps 1e-3.
    assert rms(found - shifted) < 2e-2 * rms(shifted)


def test_nan_goes_where_it_came_from():
    heads = Heads.draw((37, 101), 64)
    for part, place in (("q", (0, 5)), ("k", (1, 100)), ("v", (1, 7))):
        codes = heads.codes("e4m3fn")
        head, row = place
        getattr(codes, part)[head, row, 3] = 0x7F
        found, wanted = both(heads.call("e4m3fn", codes))
        check_same(found, wanted)
        assert found.isnan().any()
        other = found[0, :, 1 - place[0]]
        assert not other.isnan().any(), "the other head has none"
        if part == "q":
            assert found[0, :, 0].isnan().any(1).nonzero().flatten().tolist() == [5]
        if part == "v":
            assert found[0, :, 1].isnan().any(0).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_nan_of_an_input_reaches_the_result(part, fmt):
    """int8 has no code for it: the scale of its rows has to be one."""
    heads = Heads.draw((9, 40), 32)
    getattr(heads, part)[0, 5, 3] = torch.nan
    found, wanted = both(heads.call(fmt))
    check_same(found, wanted)
    assert found[0, :, 0].isnan().any()
    assert not found[0, :, 1].isnan().any()


def test_values_beyond_the_format_are_scaled():
    heads = Heads.draw((9, 70), 48)
    heads = replace(heads, v=heads.v * 3e4)
    found, wanted = both(heads.call("e4m3fn", dtype=torch.bfloat16))
    check_same(found.half(), wanted.half())
    assert rms(found.double() - heads.exact()) < 0.03 * rms(heads.exact())


def test_factors_of_all_pictures_or_of_every_row():
    heads = Heads.draw((5, 33), 32, pictures=3)
    codes = heads.codes("e4m3fn")
    one = replace(codes, v_scale=codes.v_scale[:2], v_mean=codes.v_mean[:2])
    all_alike = replace(codes, v_scale=one.v_scale.repeat(3, 1), v_mean=one.v_mean.repeat(3, 1))
    op, arguments = heads.call("e4m3fn", one)
    assert torch.equal(
        execute.call(op, *arguments),
        execute.call(op, *heads.call("e4m3fn", all_alike)[1]),
    )
    bare = (*arguments[:6], None, *arguments[7:])
    found, wanted = both((op, bare))
    check_same(found, wanted)


def changed(arguments, **new):
    names = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "v_mean", "keys", "heads",
             "columns", "fmt", "dtype")  # fmt: skip
    return tuple(new.get(name, value) for name, value in zip(names, arguments, strict=True))


@pytest.mark.parametrize(
    ("new", "error", "text"),
    [
        ({"fmt": "e5m2"}, KernelError, "format 'e5m2', expected e4m3fn"),
        ({"keys": 0}, ShapeError, "0 keys, expected 1 or more"),
        ({"heads": 3}, ShapeError, "2 rows of 3 heads, expected whole pictures"),
        ({"columns": 47}, ShapeError, "head_size 47"),
        ({"columns": 32}, ShapeError, "head_size 32"),
        ({"k": torch.zeros(2, 70, 64, dtype=torch.uint8)}, ShapeError, "k has"),
        ({"v": torch.zeros(2, 48, 70, dtype=torch.uint8)}, ShapeError, "v has"),
        ({"v_scale": torch.ones(3, 48)}, ShapeError, "v_scale has 3 rows"),
        ({"q_scale": torch.ones(2, 9)}, KernelError, "q_scale belongs to int8 codes"),
        ({"q": torch.zeros(2, 9, 47, dtype=torch.uint8)}, ShapeError, "heads of 47 columns"),
        ({"q": torch.zeros(2, 9, 48)}, ShapeError, "expected uint8 codes"),
    ],
)
def test_operands_that_do_not_fit_are_refused(new, error, text):
    heads = Heads.draw((9, 70), 48)
    op, arguments = heads.call("e4m3fn")
    with pytest.raises(error, match="attention_fp8") as caught:
        execute.call(op, *changed(arguments, **new))
    assert text in str(caught.value)


def test_heads_beyond_the_largest_are_refused():
    columns = LARGEST_HEAD + 16
    op, arguments = Heads.draw((2, 3), columns).call("e4m3fn")
    with pytest.raises(ShapeError, match=f"heads of {columns} columns"):
        execute.call(op, *arguments)


def test_the_reference_in_double_precision_is_near():
    _, arguments = Heads.draw((37, 101), 64).call("e4m3fn", dtype=torch.float32)
    single = OPS[0].reference(*arguments)
    double = OPS[0].reference(*arguments, precision=torch.float64)
    assert rms(single - double) < 2e-3 * rms(double)


def test_cards_without_fp8_keep_torchs():
    without = {name for name, a in ARCHS.items() if a.why_without("attention")}
    assert without == {name for name in ARCHS if name.startswith(("gfx10", "gfx11", "sm_80"))}
    assert not ARCHS["gfx1100"].why_without("gemm")


#: Words of a variant's head -> least share of the peak, most issue slots per matrix instruction.
BARS = {"d64": (0.53, 5.5), "d128": (0.64, 4.0)}


@pytest.mark.parametrize(
    ("target", "heads"),
    [
        ("gfx1201", {*BARS}),
        *(pytest.param(t, set(), marks=pytest.mark.exhaustive) for t in ("gfx1200", "gfx1201")),
    ],
    ids=["gfx1201", "gfx1200-all", "gfx1201-all"],
)
def test_gfx12_code_keeps_its_bars(target, heads, tmp_path):
    """``heads``: those that are looked at; none: all of them."""
    from quantkit.device.aot.object_build import build

    need(compilers.clang)
    fp8, int8, *_ = OPS
    variants = [
        *(v for v in all_variants(fp8) if v.word("QK_IO") == "f16"),
        *(v for v in all_variants(int8) if v.words[0] == "bf16" and v.words[2] in BARS),
    ]
    variants = [v for v in variants if not heads or v.words[2] in heads]
    build(target, tmp_path / "objects", variants)
    for finding in check_folder(tmp_path / "objects").findings:
        assert not finding.problems, finding.kernel.symbol
        assert finding.kernel.spills == 0
        assert finding.kernel.lds_bytes <= 32 * 1024
        assert finding.loop is not None
        head = finding.kernel.choices["head"]
        if finding.kernel.op != fp8.name or head not in BARS:
            continue
        share, slots = BARS[head]
        assert finding.loop.share >= share
        assert sum(finding.loop.issued.values()) / finding.loop.matrix <= slots
