"""Operands, guarded buffers and the error measure of the kernel tests."""

import ctypes
import os
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch

from quantkit.device.archs import ARCHS, HOST_LAYOUTS
from quantkit.device.geometry import tiles
from quantkit.device.host import library as host
from quantkit.device.ops import call as execute
from quantkit.device.ops.op import Variant, all_variants
from quantkit.device.ops.table import OPS
from quantkit.device.tile_choice import variants_for
from quantkit.errors import CompilerMissingError
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.packed_2to4 import LEGAL_NIBBLES
from quantkit.numerics.scales import decode
from tests.support.sampling import cover

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
SENTINEL = 0xA5
#: Around what is read: a NaN in every type, so that a value read there is in no result unseen.
POISON = 0xFF
GUARD = 256


def need(find):
    """Return what ``find`` finds; skip when it is missing, fail where CI demands it."""
    try:
        return find()
    except CompilerMissingError as error:
        if os.environ.get("QUANTKIT_REQUIRE_COMPILER") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


class Guarded:
    """A tensor with sentinels on both sides, and a record of what inputs held."""

    def __init__(self, value, *, written=False):
        size = value.numel() * value.element_size()
        self.sentinel = SENTINEL if written else POISON
        self.bytes = torch.full((size + 2 * GUARD + 64,), self.sentinel, dtype=torch.uint8)
        # 16-byte aligned and no more, so that a kernel that assumes more is caught on 32.
        start = GUARD + (16 - self.bytes.data_ptr() - GUARD) % 32
        self.inside = slice(start, start + size)
        self.view = self.bytes[self.inside].view(value.dtype).view(value.shape)
        if not written:
            self.view.copy_(value)
        self.before = None if written else self.bytes.clone()

    @property
    def outside(self):
        """Addresses and lengths of what no kernel may touch."""
        start, count = self.bytes.data_ptr(), self.bytes.numel()
        yield start, self.inside.start
        yield start + self.inside.stop, count - self.inside.stop

    def check(self, name):
        outside = torch.cat((self.bytes[: self.inside.start], self.bytes[self.inside.stop :]))
        assert bool((outside == self.sentinel).all()), f"{name}: written outside its buffer"
        if self.before is not None:
            assert torch.equal(self.bytes, self.before), f"{name}: an input was changed"


@contextmanager
def _forbidden(areas):
    """Let AddressSanitizer, where it is loaded (tests/device/sanitize.py), stop access to these."""
    process = ctypes.CDLL(None)
    sanitized = hasattr(process, "__asan_poison_memory_region")
    for address, length in areas if sanitized else ():
        process.__asan_poison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(length))
    yield
    for address, length in areas if sanitized else ():
        process.__asan_unpoison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(length))


def launch(variant, layout, tensors, sizes, *, threads=2):
    """Run a variant on guarded copies; return the written tensors by name.

    tensors: argument name -> tensor (None is a null pointer); a written one gives dtype and shape.
    """
    kernel = host.load(variant, layout)
    guarded = {
        a.name: None if tensors[a.name] is None else Guarded(tensors[a.name], written=a.written)
        for a in variant.op.args
        if a.is_pointer
    }
    values: list[Any] = [
        sizes[a.name] if not a.is_pointer else g and g.view.data_ptr()
        for a in variant.op.args
        for g in [guarded.get(a.name)]
    ]
    with _forbidden([area for g in guarded.values() if g for area in g.outside]):
        kernel.launch(values, sizes["m"], sizes.get("n", 0), sizes["k"], threads)
    for name, buffer in guarded.items():
        if buffer is not None:
            buffer.check(f"{variant.symbol} ({layout}): {name}")
    return {a.name: guarded[a.name].view for a in variant.op.args if a.written}


def operate(name, *arguments):
    """Run an operation: operands in launch order, then options."""
    return execute.call(OPS[name], *arguments)


def codes(shape, fmt, generator):
    """Return uniform random codes without NaN and infinity: every sign, exponent and subnormal."""
    legal = torch.arange(256, dtype=torch.uint8)
    legal = legal[decode(legal, fmt).isfinite()]
    return legal[torch.randint(len(legal), shape, generator=generator)]


def sparse_weight(n, k, fmt, generator):
    """Return kept codes and metadata: 0, 1 or 2 non-zeros per group at random legal positions."""
    w = codes((n, k // 2), fmt, generator)
    kept = torch.randint(4, (n, k // 4), generator=generator)  # bit i: is the i-th code non-zero
    keep = torch.stack((kept & 1, kept >> 1), dim=-1).reshape(n, k // 2).bool()
    nibbles = torch.tensor(LEGAL_NIBBLES, dtype=torch.uint8)[
        torch.randint(6, (n, k // 4), generator=generator)
    ]
    return w * keep, nibbles[:, ::2] | nibbles[:, 1::2] << 4


def of_family(family):
    """Return a family's operations on weights of the inputs' formats."""
    both = ("QK_X_FORMAT", "QK_W_FORMAT")
    return [op for op in OPS.values() if op.family == family and len({*map(op.words, both)}) == 1]


def formats_of(op):
    """Return the first format that an operation takes of inputs, and of weights."""
    return tuple(op.words(f"QK_{of}_FORMAT")[0] for of in "XW")


def encode(values, fmt):
    """Return the codes of numbers that a format holds."""
    return values.to(FORMATS[fmt].torch_dtype).view(torch.uint8)


def magnitudes(variant, tensors):
    """Return operands of a product without their signs."""
    plain = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    absolute = {name: t.abs() for name, t in plain.items() if t.is_floating_point()}
    for name in ("x", "w"):
        fmt = variant.word(f"QK_{name.upper()}_FORMAT")
        # int8's -128 has no twin; what these are for is no finer than one part in 128.
        absolute[name] = encode(decode(plain[name], fmt).abs().clamp(max=FORMATS[fmt].max), fmt)
    return {**tensors, **absolute}


def referred(variant, tensors, *how):
    """Return what the reference of a product's variant gives in float64, unrounded."""
    names = ("x", "x_scale", "w", "w_meta", "w_scale", "bias")
    operands = [tensors[name] for name in names if name in tensors]
    formats = (variant.word("QK_X_FORMAT"), variant.word("QK_W_FORMAT"))
    double = torch.float64
    return variant.op.reference(*operands, *how, *formats, double, precision=double)


@dataclass(frozen=True)
class GemmCase:
    """Operands of one GEMM call."""

    variant: Variant
    m: int
    n: int
    k: int
    #: argument name -> operand, y aside
    tensors: dict

    @property
    def dtype(self):
        return DTYPES[self.variant.word("QK_IO")]

    def changed(self, **tensors):
        return GemmCase(self.variant, self.m, self.n, self.k, {**self.tensors, **tensors})

    def run(self, layout):
        y = torch.empty(self.m, self.n, dtype=self.dtype)
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        return launch(self.variant, layout, {**self.tensors, "y": y}, sizes)["y"]

    def exact(self):
        """Return the result in float64, unrounded."""
        return self._reference(self.tensors)

    def sizes(self):
        """Return the sum of the magnitudes of all terms: what float32 rounding is relative to."""
        return self._reference(magnitudes(self.variant, self.tensors))

    def _reference(self, tensors):
        return referred(self.variant, tensors)


def inputs_of(case):
    """Return what the kernel of a case reads, in launch order."""
    return [case.tensors[a.name] for a in case.variant.op.args if a.is_pointer and not a.written]


def gemm_case(variant, m, n, k, generator, *, bias=True):
    """Return random operands of a GEMM variant."""
    x_format, w_format = variant.word("QK_X_FORMAT"), variant.word("QK_W_FORMAT")
    rows = m if variant.word("QK_X_SCALE") == "token" else 1
    channels = n if variant.word("QK_W_SCALE") == "channel" else 1
    # Codes reach 448 or 57344; these scales bring sums into the range of float16.
    size = 0.5 / (FORMATS[x_format].max * FORMATS[w_format].max) ** 0.5
    tensors = {
        "x": codes((m, k), x_format, generator),
        "x_scale": size * (0.5 + torch.rand(rows, generator=generator)),
        "w": codes((n, k), w_format, generator),
        "w_scale": size * (0.5 + torch.rand(channels, generator=generator)),
        "bias": None,
    }
    if variant.op.sparse:
        tensors["w"], tensors["w_meta"] = sparse_weight(n, k, w_format, generator)
    if bias:
        noise = torch.randn(n, generator=generator)
        tensors["bias"] = noise.to(DTYPES[variant.word("QK_IO")])
    return GemmCase(variant, m, n, k, tensors)


@dataclass(frozen=True)
class Deviation:
    """How far a result is from the exact one, in the units of ``Budget``."""

    nmse: float
    ulp: float

    def within(self, budget):
        return self.nmse <= budget.nmse and self.ulp <= budget.ulp


def deviation(case, y):
    """Measure a result of ``case``. NaN and infinity must stand where rounding puts them."""
    exact, sizes = case.exact(), case.sizes()
    rounded, found = exact.to(y.dtype).double(), y.double()
    assert torch.equal(found.isnan(), rounded.isnan()), "NaN in other places"
    finite = rounded.isfinite()
    assert torch.equal(found[~finite].nan_to_num(), rounded[~finite].nan_to_num()), "infinities"
    error = (found - exact)[finite].abs()
    constant, factor = case.variant.op.budget.float32
    granted = (constant + factor * case.k**0.5) * spacing(sizes[finite], torch.float32)
    ulps = (error - granted) / spacing(exact[finite], y.dtype)
    energy = exact[finite].square().sum().clamp(min=1e-300)
    nmse = float(error.square().sum() / energy) - torch.finfo(y.dtype).eps ** 2
    return Deviation(nmse, float(ulps.max()) if error.numel() else 0.0)


def spacing(value, dtype):
    """Return the distance between neighbours of ``dtype`` around each value, in float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.abs().clamp(min=info.smallest_normal))[1] - 1
    return torch.ldexp(torch.full_like(value, info.eps), exponent)


#: host layout -> a target that has its tiles
TARGET_OF = {"gfx12": "gfx1201", "gfx11": "gfx1100", "sm89": "sm_89", "gfx10": "gfx1030"}


def layouts_of(name):
    """Return the host's layouts whose targets have an operation."""
    op = OPS[name]
    return [
        layout
        for layout in HOST_LAYOUTS
        if not ARCHS[TARGET_OF[layout]].why_without(op.family, name)
    ]


def covering_variants(op, *, pairs, layout="gfx12"):
    """Return few variants in which every word of every axis stands; with ``pairs``, every pair."""

    def goals(variant):
        places = enumerate(variant.words)
        return set(combinations(places, 2) if pairs else places)

    return cover(variants_for(ARCHS[TARGET_OF[layout]], list(all_variants(op))), goals)


def variants_of(ops):
    """Yield variants and layouts as parameters: every word of every axis of the first operation in
    gfx12's layout, else one variant, of the other operations in a layout that takes turns; the
    rest is exhaustive."""
    for turn, op in enumerate(ops):
        for at, layout in enumerate(HOST_LAYOUTS):
            whole, late = turn + at == 0, turn and (turn + at) % len(HOST_LAYOUTS)
            for index, variant in enumerate(covering_variants(op, pairs=False, layout=layout)):
                marks = pytest.mark.exhaustive if late or (index and not whole) else ()
                name = f"{variant.symbol}-{layout}"
                yield pytest.param(variant, layout, marks=marks, id=name)


def paired_variants(op):
    """Yield variants as parameters: every word stands in one, every pair in the exhaustive ones."""
    few = covering_variants(op, pairs=False)
    more = [v for v in covering_variants(op, pairs=True) if v not in few]
    for variant in (*few, *more):
        marks = pytest.mark.exhaustive if variant in more else ()
        yield pytest.param(variant, marks=marks, id=variant.symbol)


def shapes_of(variant):
    """Return (m, n, k) around every edge of the variant's tile, and past one raster group."""
    tile, step = tiles()[int(variant.word("QK_TILE")[1:])], variant.op.k_multiple
    m, n = tile.m, tile.n
    return (
        (1, 1, step),
        (1, n + 1, 3 * step),
        (m - 1, n - 1, 5 * step),
        (m, n, 128),
        (m + 1, 3, 128 + step),
        (2 * m + 5, 2 * n + 7, 288),
        (8 * m + 3, n + 5, 2 * step),
        (m // 2, n + 1, 2 * tile.k + 3 * step),
    )


def points_and_midpoints(fmt):
    """Return the finite values of a format, and the float32 numbers halfway between them."""
    points = decode(torch.arange(256, dtype=torch.uint8), fmt)
    points = points[points.isfinite()].sort().values.unique()
    return points, (points[1:] + points[:-1]) / 2


def interesting_values(fmt):
    """Return float32 values at which the cast to ``fmt`` decides, and random ones."""
    near = torch.cat(points_and_midpoints(fmt))
    inf = torch.tensor(torch.inf)
    top = FORMATS[fmt].max
    extreme = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-38, 3e38, -3e38, inf, -inf, torch.nan, top * 1.04]
    )
    bits = torch.randint(-(2**31), 2**31, (40000,), generator=torch.Generator().manual_seed(3))
    wild = bits.to(torch.int32).view(torch.float32)
    return torch.cat((near, near.nextafter(inf), near.nextafter(-inf), extreme, wild))


def every_value(io, fmt):
    """Return all 65536 values of a 16-bit type; of float32 the interesting ones."""
    if io == "f32":
        values = interesting_values(fmt)
        # Rows so small that their scale underflows have a test of their own.
        return values[(values == 0) | (values.abs() > 1e-37) | values.isnan()]
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[io])


def same_codes(found, expected, fmt):
    """Compare bytes; NaN may have any sign and payload."""
    nan = decode(expected, fmt).isnan()
    assert torch.equal(decode(found, fmt).isnan(), nan)
    assert torch.equal(found[~nan], expected[~nan])
