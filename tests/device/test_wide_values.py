"""Attention with probabilities and values in 16 bit: kernel, reference, torch's own in float64."""

from dataclasses import replace
from math import log

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from quantkit.device import compilers
from quantkit.device.aot.check import check_folder
from quantkit.device.archs import ARCHS
from quantkit.device.backends import Backend, use
from quantkit.device.choosing import choose, supposing
from quantkit.device.log import record
from quantkit.device.ops import call as execute
from quantkit.device.ops.attention.coded_attention import OPS
from quantkit.device.ops.op import all_variants
from quantkit.numerics.attention_factors import KEYS, cut_to_float16, in_float16
from quantkit.numerics.scales import decode
from tests.support.attention_cases import SIZES, Heads
from tests.support.kernel_cases import need
from tests.support.sampling import turned

FORMATS = ("e4m3fn", "int8")
WIDE = tuple(op for op in OPS if op.family == "attention_f16")


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


def rms(t):
    return float(t.double().square().mean().sqrt())


def both(call):
    op, arguments = call
    with record() as seen:
        found = execute.call(op, *arguments)
    assert [where for _, _, where in seen.calls] == [Backend.HOST]
    with use(Backend.REFERENCE):
        return found, execute.call(op, *arguments)


def check_same(found, wanted):
    """Equal, but for single probabilities that another order of sums moves to the next number."""
    assert torch.equal(found.isnan(), wanted.isnan())
    difference = (found.double() - wanted.double()).nan_to_num()
    assert float(difference.abs().max()) < 2e-3 * rms(wanted.nan_to_num())
    assert float((difference != 0).double().mean()) < 2e-2


def exact(heads, codes):
    """Return torch's own attention in float64, of what queries and keys became."""
    q, k = (decode(t, codes.qk_format, torch.float64) for t in (codes.q, codes.k))
    if codes.q_scale is not None:
        q = q * codes.q_scale[..., None]
        k = k * codes.k_scale.repeat_interleave(KEYS, dim=1)[:, : k.shape[1], None]
    y = scaled_dot_product_attention(q, k, heads.v.double(), scale=log(2))
    return y.unflatten(0, (-1, heads.heads)).transpose(1, 2)


@pytest.mark.parametrize("case", turned([16, 40, 64, 72, 128, 144, 160], FORMATS))
def test_the_kernel_rounds_as_the_reference_does(case):
    columns, fmt = case
    for sizes in SIZES:
        heads = Heads.draw(sizes, columns, pictures=2, seed=sum(sizes))
        check_same(*both(heads.call(fmt, pv=None)))


@pytest.mark.parametrize("case", turned([40, 64, 128], FORMATS, [0.1, 1.0, 8.0], times=2))
def test_probabilities_and_values_cost_little(case):
    """What rounding both to 11 bits costs; to the 4 of e4m3fn, more than 64 times that."""
    columns, fmt, sharpness = case
    for sizes in ((37, 101), (64, 4096)):
        heads = Heads.draw(sizes, columns, heads=1, offset=0.0)
        heads = replace(heads, q=sharpness * heads.q)
        wanted = exact(heads, codes := heads.codes(fmt, None))
        op, arguments = heads.call(fmt, codes, dtype=torch.float32, pv=None)
        wide = rms(execute.call(op, *arguments) - wanted)
        op, arguments = heads.call(fmt, dtype=torch.float32)
        coarse = rms(execute.call(op, *arguments) - wanted)
        assert wide < 5e-4 * rms(wanted)
        assert coarse > 64 * wide


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_maximum_that_grows_in_every_tile(fmt):
    heads = Heads.draw((20, 300), 64, heads=1)
    ramp = torch.linspace(6, 0, 300)[:, None] * torch.ones(64)
    heads = replace(heads, q=heads.q.abs(), k=heads.k + ramp)
    check_same(*both(heads.call(fmt, pv=None)))


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_goes_where_it_came_from(part, fmt):
    heads = Heads.draw((37, 101), 64)
    getattr(heads, part)[0, 5, 3] = torch.nan
    codes = heads.codes(fmt, None)
    if part != "q":
        # Ranges of these very numbers are NaN, which is another matter.
        plain = Heads.draw((37, 101), 64).codes(fmt, None)
        codes = replace(plain, **{part: getattr(plain, part).clone()})
        if part == "v":
            codes.v[0, 3, 5] = torch.nan
        elif fmt == "int8":
            codes = replace(codes, k_scale=plain.k_scale.clone())
            codes.k_scale[0, 0] = torch.nan
        else:
            codes.k[0, 5, 3] = 0x7F
    found, wanted = both(heads.call(fmt, codes, pv=None))
    check_same(found, wanted)
    own = found[0, :, 0].isnan()
    assert not found[0, :, 1].isnan().any()
    if part == "v":
        assert own.any(0).nonzero().flatten().tolist() == [3]
    else:
        assert own[5 if part == "q" else slice(None)].all()


def test_values_beyond_float16_are_scaled():
    heads = Heads.draw((9, 70), 48)
    heads = replace(heads, v=heads.v * 1e30)
    codes = heads.codes("int8", None)
    assert codes.v.isfinite().all()
    found, wanted = both(heads.call("int8", codes, dtype=torch.bfloat16, pv=None))
    check_same(found.double() / 1e30, wanted.double() / 1e30)
    assert rms(found.double() - exact(heads, codes)) < 0.003 * rms(exact(heads, codes))


def test_values_beyond_their_scale_saturate():
    heads = Heads.draw((3, 20), 16, heads=1)
    codes = heads.codes("e4m3fn", None)
    codes.v[0, 2, 7] = in_float16(torch.tensor(1e9))
    found, wanted = both(heads.call("e4m3fn", codes, pv=None))
    check_same(found, wanted)
    assert found.isfinite().all()


def test_float16_is_cut_towards_zero():
    every = torch.arange(0x7C00, dtype=torch.int32).short().view(torch.float16)
    low, high = every[:-1].float(), every[1:].float()
    for part in (0.01, 0.5, 0.99):
        between = low + part * (high - low)
        assert torch.equal(cut_to_float16(between).float(), low)
    assert torch.equal(cut_to_float16(every.float()), every)
    assert cut_to_float16(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("name", ["sm_89", "sm_90a", "gfx1100"])
def test_others_have_no_kernel(name):
    cuda = torch.device("cuda")
    with supposing(ARCHS[name]):
        for op in WIDE:
            found = choose(op.name, cuda, k=64)
            assert found.backend is Backend.REFERENCE
            assert found.reason == ARCHS[name].why_without("attention_f16")
            assert "RDNA" in found.reason
        assert choose("value_codes_f16", cuda, k=64).backend is Backend.GPU
    with supposing(ARCHS["gfx1201"]):
        assert all(choose(op.name, cuda, k=64).backend is Backend.GPU for op in WIDE)


#: Words of a variant's head -> least share of the peak, most issue slots per matrix instruction.
BARS = {"d64": (0.61, 5.5), "d128": (0.70, 4.4)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["gfx1201", pytest.param("gfx1200", marks=pytest.mark.exhaustive)]
)
def test_gfx12_code_keeps_its_bars(target, tmp_path):
    from quantkit.device.aot.object_build import build

    need(compilers.clang)
    variants = [
        v
        for op in WIDE
        for v in all_variants(op)
        if v.word("QK_IO") == "f16" and (target == "gfx1201" or v.word("QK_HEAD") in BARS)
    ]
    build(target, tmp_path / "objects", variants)
    for finding in check_folder(tmp_path / "objects").findings:
        assert not finding.problems, finding.kernel.symbol
        assert finding.kernel.spills == 0
        assert finding.kernel.lds_bytes <= 32 * 1024
        choices, loop = finding.kernel.choices, finding.loop
        if choices["x_format"] != "e4m3fn" or choices["head"] not in BARS:
            continue
        share, slots = BARS[choices["head"]]
        assert loop.share >= share
        assert sum(loop.issued.values()) / loop.matrix <= slots
