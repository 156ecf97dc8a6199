"""The device layer around the kernels: tables, choice of back end, execution, cache, log."""

import json
import re
import threading

import pytest
import torch

from quantkit.device import compilers, log
from quantkit.device.archs import ARCHS, HOST_LAYOUTS
from quantkit.device.backends import Backend, use
from quantkit.device.choosing import Choice, choose
from quantkit.device.geometry import ceil_div, compile_expression, tiles
from quantkit.device.host import host_calls
from quantkit.device.ops.norms.quantize import quantize_token
from quantkit.device.ops.op import WeightKind, all_variants
from quantkit.device.ops.table import OPS, default_variants, find_op
from quantkit.device.tile_choice import choose_tile, variants_for
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.attention_factors import COLUMNS
from quantkit.numerics.scales import decode
from quantkit.resources import kernel_sources
from tests.support.kernel_cases import need, operate

CPU = torch.device("cpu")
E4M3 = ("e4m3fn", "e4m3fn")
GEMM_T4 = "e4m3fn_e4m3fn_token_channel_f16_t4"


@pytest.fixture(scope="module")
def _host():
    need(compilers.host_compiler)


def launch_file():
    return json.loads((kernel_sources() / "launch.json").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------ the tables


def macros():
    headers = (kernel_sources() / "include" / name for name in ("config.h", "weights_axis.h"))
    text = "".join(header.read_text(encoding="utf-8") for header in headers)
    return {name: int(value) for name, value in re.findall(r"#define QK_(\w+) (\d+)", text)}


def test_words_have_the_numbers_of_the_header():
    words = {
        (axis.macro, word): axis.value(word)
        for op in OPS.values()
        for axis in op.axes
        for word in axis.words
    }
    numbers = macros()
    named = {(macro, word): number for (macro, word), number in words.items() if macro != "QK_TILE"}
    for (macro, word), number in named.items():
        if macro == "QK_HEAD":
            assert f"d{COLUMNS * number}" == word
        elif macro == "QK_PV":
            assert numbers[f"PV_{word.upper() or 'E4M3FN'}"] == number
        elif macro == "QK_RESIDUAL":
            assert number == 1
        elif macro not in {"QK_SMOOTH", "QK_MOMENTS"}:
            assert (numbers[word.upper()] if word else 0) == number, (macro, word)
    assert [numbers[layout.upper()] for layout in HOST_LAYOUTS] == [0, 1, 2, 3]
    for kind in WeightKind:
        assert f"-DQK_WEIGHTS={numbers[f'WEIGHTS_{kind.value.upper()}']}" == kind.define


def test_tables_agree_with_the_launch_file():
    content = launch_file()
    sources = {op.source for op in OPS.values()}
    assert sources == {f"{name}.hip" for name in content if name not in ("about", "tiles")}
    for op in OPS.values():
        assert (kernel_sources() / op.source).is_file()
        for word in op.words("QK_TILE"):
            assert content["tiles"][int(word[1:])]["lds"][op.weights.value] > 0
    assert len(host_calls._TILE_SPEED) <= len(content["tiles"])


def test_sources_get_the_numbers_of_the_launch_file():
    (variant,) = (v for v in all_variants(OPS["gemm_fp8"]) if v.name == GEMM_T4)
    found = {name: int(value) for name, value in (d[2:].split("=") for d in variant.defines[1:])}
    tile = {"QK_TILE_M": 16, "QK_TILE_N": 32, "QK_TILE_K": 512, "QK_THREADS": 256}
    assert tile.items() <= found.items()
    assert [found[f"QK_WAVES_{of}"] for of in "MNK"] == [1, 1, 8]
    assert found["QK_LDS_BYTES"] == launch_file()["tiles"][4]["lds"]["dense"]


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_arguments_are_the_kernels(op):
    source = (kernel_sources() / op.source).read_text(encoding="utf-8")
    for macro, axis in (("RESIDUAL", "QK_RESIDUAL"), ("CODES", "QK_Y_FORMAT")):
        some = r"\1" if op.words(axis) else ""
        source = re.sub(rf"QK_IF_{macro}\(([^)]*)\)", some, source)
    behind = {WeightKind.SPARSE: "_meta", WeightKind.INT4: "_group"}.get(op.weights)
    some = rf"const qk::u8* \1{behind}," if behind else ""
    source = re.sub(r"QK_META_PARAMETER\((\w+)\)", some, source)
    parameters = re.search(r"QK_SYMBOL\(([^)]*)\)", source).group(1).split(",")
    assert [re.search(r"(\w+)\s*$", text).group(1) for text in parameters] == [
        argument.name for argument in op.args
    ]
    for text, argument in zip(parameters, op.args, strict=True):
        assert ("*" in text) == argument.is_pointer
        # What is written is what is not const.
        assert argument.written == (argument.is_pointer and "const" not in text)


def test_symbols_follow_the_naming_rule_and_are_unique():
    symbols = [variant.symbol for op in OPS.values() for variant in all_variants(op)]
    fp8, int8 = 3 * 12 + 2 * (240 + 480 + 96), 3 * 6 + 2 * (60 + 60 + 24)
    attention, norms = 6 * 30 + 4 * 9 + 6 + 10 + 5, 3 + 6 + 36
    others = 48 + 48 + 24 + 24 + 40 + 6
    added = 2 * (240 + 96) + 2 * (60 + 24) + 48 + 24
    activated = 2 * 48 + 2 * 6 + 6
    assert len(symbols) == len(set(symbols))
    assert len(symbols) == fp8 + int8 + attention + norms + others + added + activated
    assert "quantize_fp8_token_bf16_e5m2_smooth" in symbols
    assert "gemm_fp8_sparse_e4m3fn_e5m2_token_channel_f16_t2" in symbols
    found = {name: len(variants_for(ARCHS[name], default_variants())) for name in ARCHS}
    assert found["gfx1201"] == 2 * 200 + 80 + 20 + 3 * 40 + 28 + 20 + 2 + 16 + 4 + 4 + 272 + 28 + 4
    assert found["gfx1100"] == 2 * 128 + 60 + 20 + 28 + 20 + 2 + 16 + 4 + 4 + 180 + 28 + 4


def test_unknown_names_are_refused():
    with pytest.raises(KernelError, match=r"operation 'conv'.*expected one of quantize_fp8_static"):
        find_op("conv")


@pytest.mark.parametrize(
    ("registers", "waves"),
    # Measured: clang 19 -Rpass-analysis=kernel-resource-usage, gfx1201.
    [(1, 16), (96, 16), (97, 12), (120, 12), (144, 10), (168, 9), (192, 8), (216, 7), (240, 6)],
)
def test_occupancy_agrees_with_clang(registers, waves):
    assert ARCHS["gfx1201"].register_file.occupancy(registers, 0, 32) == waves


def test_occupancy_is_limited_by_lds():
    # 40 KB of 64 KB: one block of 4 waves on 2 SIMDs.
    assert ARCHS["gfx1201"].register_file.occupancy(96, 40 * 1024, 128) == 2


# ---------------------------------------------------------------------------------- the geometry


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("ceil_div(n, 64)", 3), ("ceil_div(m * k, 8192)", 2), ("m - 1 + 2 * k // 3", 109)],
)
def test_grid_expressions(text, value):
    assert compile_expression(text)({"m": 100, "n": 129, "k": 15 if "//" in text else 100}) == value


@pytest.mark.parametrize(
    "text", ["m ** 2", "__import__('os')", "max(m, n)", "m.real", "1.5", "[m]", "ceil_div(m)"]
)
def test_other_expressions_are_refused(text):
    with pytest.raises(ValueError, match="expected integers, names"):
        compile_expression(text)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_geometry_of_every_variant_covers_the_output(op):
    for variant in all_variants(op):
        geometry = variant.geometry
        names = {"m": 1000, "n": 300, "k": 64}
        blocks = [compile_expression(text)(names) for text in geometry.grid]
        assert geometry.block % 32 == 0
        assert min(blocks) >= 1
        if word := variant.word("QK_TILE"):
            tile = tiles()[int(word[1:])]
            across, down = 2 * 300 if op.name.startswith("geglu") else 300, 1000
            if op.family == "project_values":  # its operands are exchanged
                across, down = down, across
            parts = 3 if op.family == "project_heads" else 1
            assert blocks[:2] == [ceil_div(across, tile.n), ceil_div(down, tile.m) * parts]


@pytest.mark.parametrize(
    ("m", "n", "threads", "tile"),
    [
        (1, 512, 1, "t2"),
        (16, 64, 2, "t2"),
        (64, 64, 1, "t1"),
        (4096, 320, 2, "t0"),
        (128, 128, 1, "t0"),
    ],
)
def test_tile_suits_the_shape(m, n, threads, tile):
    assert choose_tile(m, n, threads, host_calls._TILE_SPEED) == tile


@pytest.mark.parametrize(
    ("target", "units", "m", "n", "tile"),
    [
        # A row of 16 tokens: K is shared by waves, whatever the number of compute units.
        ("gfx1200", 32, 16, 1280, "t4"),
        ("gfx1201", 64, 1, 10240, "t4"),
        # 160 tiles of 128x128 take 5 rounds on 32 units and 3 on 56 and 64; 640 of 64x64 take
        # 20, 12 and 10: the last is faster.
        ("gfx1200", 32, 2048, 1280, "t0"),
        ("gfx1201", 56, 2048, 1280, "t0"),
        ("gfx1201", 64, 2048, 1280, "t1"),
        # 256x128 in rounds that are whole or nearly so.
        ("gfx1200", 32, 8192, 8192, "t3"),
        ("gfx1201", 56, 4608, 12288, "t3"),
        ("gfx1201", 64, 2048, 10240, "t3"),
        # RDNA3 has three tiles.
        ("gfx1100", 96, 16, 1280, "t2"),
        ("gfx1100", 96, 8192, 8192, "t0"),
    ],
)
def test_tile_suits_the_compute_units(target, units, m, n, tile):
    assert choose_tile(m, n, units, dict(ARCHS[target].tile_speed)["gemm_fp8"]) == tile


# ------------------------------------------------------------------------------------- back ends


@pytest.mark.usefixtures("_host")
@pytest.mark.parametrize("op", OPS)
def test_the_cpu_runs_kernels(op):
    assert choose(op, CPU, k=64) == Choice(Backend.HOST, "")


@pytest.mark.parametrize(
    ("op", "device", "k", "grouped", "reason"),
    [
        ("gemm_fp8", "cpu", 24, False, "K 24 is not a multiple of 16"),
        ("gemm_fp8_sparse", "cpu", 48, False, "K 48 is not a multiple of 32"),
        ("gemm_fp8", "cpu", 64, True, "not per group"),
        ("gemm_fp8", "meta", 64, False, "the tensors are on meta"),
        ("gemm_fp8", "cuda:99", 64, False, "cuda:99: torch sees"),
        ("gemm_fp8", "cpu", 0, False, "K 0"),
    ],
)
def test_the_reference_runs_the_rest_and_says_why(op, device, k, grouped, reason):
    choice = choose(op, torch.device(device), k=k, group_scales=grouped)
    assert choice.backend is Backend.REFERENCE
    assert reason in choice.reason


def test_a_forced_back_end_is_kept_to_its_block():
    with use(Backend.REFERENCE):
        assert choose("gemm_fp8", CPU, k=64).backend is Backend.REFERENCE
        with use(None):
            assert choose("gemm_fp8", CPU, k=20).reason.startswith("K 20")
        assert choose("gemm_fp8", CPU, k=20).reason == "asked for"
    assert choose("gemm_fp8", CPU, k=20).reason != "asked for"


def test_a_forced_kernel_that_cannot_run_is_an_error():
    with (
        use(Backend.HOST),
        pytest.raises(KernelError, match=r"gemm_fp8: the host kernel was asked for.*K 20"),
    ):
        choose("gemm_fp8", CPU, k=20)
    with (
        use(Backend.GPU),
        pytest.raises(KernelError, match=r"the gpu kernel was asked for.*tensors are on cpu"),
    ):
        choose("gemm_fp8", CPU, k=64)


# ------------------------------------------------------------------------------------- execution


def operands(m, n, k, *, sparse=False, seed=0):
    torch.manual_seed(seed)
    x_scale, x = quantize_token(torch.randn(m, k), None, "e4m3fn")
    rows = torch.randn(n, k // 2 if sparse else k)
    w_scale, w = quantize_token(rows, None, "e4m3fn")
    meta = (torch.full((n, k // 8), 0x9C, dtype=torch.uint8),) if sparse else ()
    return x, x_scale, (w, *meta), w_scale, torch.randn(n)


def run(x, x_scale, w, w_scale, bias, dtype=torch.float32):  # noqa: PLR0917
    name = "gemm_fp8_sparse" if len(w) == 2 else "gemm_fp8"
    return operate(name, x, x_scale, *w, w_scale, bias, *E4M3, dtype)


def expected(x, x_scale, w, w_scale, bias, dtype=torch.float32):  # noqa: PLR0917
    function = OPS["gemm_fp8_sparse" if len(w) == 2 else "gemm_fp8"].reference
    return function(x, x_scale, *w, w_scale, bias, *E4M3, dtype)


@pytest.mark.usefixtures("_host")
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("m", [1, 2, 40])
def test_operands_that_are_not_plain_memory_are_not_misread(m, sparse):
    x, x_scale, w, w_scale, bias = operands(m, 48, 64, sparse=sparse)
    right = expected(x, x_scale, w, w_scale, bias)

    def strided(t):
        return torch.stack((t, 255 - t if t.dtype == torch.uint8 else -t), dim=-1)[..., 0]

    def misaligned(t):
        padded = torch.cat((t.flatten()[:1], t.flatten()))
        return padded[1:].view(t.shape)

    def transposed(t):
        return t.T.contiguous().T

    for change in (strided, misaligned, transposed):
        changed = [change(t) if t.ndim == 2 or change is not transposed else t for t in w]
        found = run(change(x), strided(x_scale), tuple(changed), strided(w_scale), strided(bias))
        assert torch.allclose(found, right, rtol=1e-5, atol=1e-5), change.__name__
    for change in (strided, misaligned):
        values = torch.randn(m, 64)
        s, q = operate("quantize_fp8_token", change(values), strided(torch.ones(64)), "e4m3fn")
        s_right, q_right = quantize_token(values, None, "e4m3fn")
        assert torch.equal(q, q_right)
        assert torch.equal(s, s_right)


@pytest.mark.usefixtures("_host")
@pytest.mark.parametrize("x_shape", [(), (1,), (9,)])
@pytest.mark.parametrize("w_shape", [(), (1,), (33,)])
def test_scale_shapes_choose_the_variant(x_shape, w_shape):
    x, _, w, _, bias = operands(9, 33, 32)
    x_scale, w_scale = torch.rand(x_shape), torch.rand(w_shape)
    with log.record() as seen:
        found = run(x, x_scale, w, w_scale, bias.bfloat16(), torch.bfloat16)
    assert torch.allclose(
        found.float(), expected(x, x_scale, w, w_scale, bias.bfloat16()), rtol=1e-2, atol=1e-2
    )
    ((_, variant, backend),) = seen.calls
    words = ("token" if x_shape == (9,) else "tensor", "channel" if w_shape == (33,) else "tensor")
    assert "_".join(words) in variant
    assert backend is Backend.HOST


@pytest.mark.parametrize(("m", "n"), [(0, 8), (8, 0), (0, 0)])
def test_nothing_to_do_gives_nothing(m, n):
    x, x_scale, w, w_scale, _ = operands(max(m, 1), max(n, 1), 32)
    y = run(x[:m], x_scale[:m] if m else torch.ones(1), (w[0][:n],), w_scale[:n], None)
    assert y.shape == (m, n)
    scale, q = operate("quantize_fp8_token", torch.empty(0, 32), None, "e5m2")
    assert (q.shape, scale.shape) == ((0, 32), (0,))


def test_group_scales_and_odd_k_run_on_the_reference():
    x, x_scale, w, _, _ = operands(4, 6, 24)
    groups = torch.rand(6, 3)
    dense = decode(w[0], "e4m3fn") * groups.repeat_interleave(8, dim=1)
    right = (decode(x, "e4m3fn") * x_scale.reshape(-1, 1)) @ dense.T
    with log.record() as seen:
        found = run(x, x_scale, w, groups, None)
    assert torch.allclose(found, right, rtol=1e-4, atol=1e-5)
    assert list(seen.calls) == [("gemm_fp8", "e4m3fn_e4m3fn_token_group_f32", Backend.REFERENCE)]


REFUSED = [
    (ShapeError, "x is torch.float32 of shape", lambda t: {"x": t["x"].float()}),
    (
        ShapeError,
        r"w has shape \(6, 16\), expected \(6, 32\)",
        lambda t: {"w": (t["w"][0][:, :16],)},
    ),
    (KernelError, "w is torch.int8", lambda t: {"w": (t["w"][0].to(torch.int8),)}),
    (
        ShapeError,
        r"x_scale has shape \(3,\), expected one element or \(4,\)",
        lambda t: {"x_scale": torch.ones(3)},
    ),
    (
        KernelError,
        "w_scale is torch.float16.*never cast",
        lambda t: {"w_scale": torch.ones(6).half()},
    ),
    (
        ShapeError,
        r"w_scale has shape \(6, 5\).*dividing K 32",
        lambda t: {"w_scale": torch.ones(6, 5)},
    ),
    (
        KernelError,
        "bias is torch.float16, expected torch.float32",
        lambda t: {"bias": torch.ones(6).half()},
    ),
    (ShapeError, r"bias has shape \(7,\)", lambda t: {"bias": torch.ones(7)}),
    (KernelError, "dtype torch.float64", lambda t: {"dtype": torch.float64}),
]


@pytest.mark.parametrize(
    ("error", "text", "change"), REFUSED, ids=lambda v: v if isinstance(v, str) else ""
)
def test_operands_that_do_not_fit_are_refused(error, text, change):
    names = ("x", "x_scale", "w", "w_scale", "bias")
    tensors = dict(zip(names, operands(4, 6, 32), strict=True))
    with pytest.raises(error, match=text):
        run(**{**tensors, **change(tensors)})


def test_quantize_refuses_what_it_cannot_read():
    with pytest.raises(ShapeError, match=r"x has shape \(2, 3, 4\), expected \(M, K\)"):
        operate("quantize_fp8_token", torch.ones(2, 3, 4), None, "e4m3fn")
    with pytest.raises(ShapeError, match=r"smooth has shape \(3,\), expected \(4,\)"):
        operate("quantize_fp8_token", torch.ones(2, 4), torch.ones(3), "e4m3fn")
    with pytest.raises(ShapeError, match=r"scale has shape \(2,\), expected one element"):
        operate("quantize_fp8_static", torch.ones(2, 4), None, torch.ones(2), "e4m3fn")
    with pytest.raises(KernelError, match=r"torch\.int32, expected float16"):
        operate("quantize_fp8_token", torch.ones(2, 4, dtype=torch.int32), None, "e4m3fn")


@pytest.mark.usefixtures("_host")
def test_several_threads_may_call_at_once():
    x, x_scale, w, w_scale, bias = operands(130, 70, 96)
    right = run(x, x_scale, w, w_scale, bias)
    results = []

    def work():
        results.extend(run(x, x_scale, w, w_scale, bias) for _ in range(20))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 80
    assert all(torch.equal(result, right) for result in results)


# --------------------------------------------------------------------------------------- the log


def test_records_nest_and_see_every_thread():
    with log.record() as outer:
        log.note("a", "v", Backend.HOST)
        with log.record() as inner:
            worker = threading.Thread(target=log.note, args=("b", "v", Backend.REFERENCE))
            worker.start()
            worker.join()
        log.note("a", "v", Backend.HOST)
    log.note("c", "v", Backend.HOST)
    assert dict(inner.calls) == {("b", "v", Backend.REFERENCE): 1}
    assert dict(outer.calls) == {("a", "v", Backend.HOST): 2, ("b", "v", Backend.REFERENCE): 1}
