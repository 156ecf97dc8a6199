"""Estimates of a step: counts against torch's and by hand, fusing, cards, and what was measured."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from quantkit.bench.estimate.cards import CARDS, find_card
from quantkit.bench.estimate.estimate_step import estimate_step, kernels_of
from quantkit.bench.estimate.estimated_kernels import Kernel, fused, separate, with_layout_copies
from quantkit.bench.estimate.groups import PROFILED
from quantkit.bench.estimate.kernel_cost import BOUNDS, time_kernels
from quantkit.bench.estimate.shape_models import as_compiled, trace_contender
from quantkit.bench.estimate.tracing import View, trace
from quantkit.bench.kernels.matrix_product import Product
from quantkit.bench.kernels.operator_costs import ATTENTION, NORMS, PRODUCTS, SMALL
from quantkit.bench.models.denoiser_inputs import make_inputs
from quantkit.bench.models.denoisers import DENOISERS, Denoiser, build_denoiser, find_denoiser
from quantkit.bench.models.model_contenders import MODEL_CONTENDERS
from quantkit.bench.models.model_result import ModelBenchSettings
from quantkit.bench.models.profiling import group_of
from quantkit.cli.bench_model_command import model_command
from quantkit.device.archs import OneLaunch, arch_of_device
from quantkit.device.backends import Backend
from quantkit.device.choosing import choose, least_keys, supposing, why_on_request
from quantkit.device.torch_operators import OPERATORS
from quantkit.errors import InputError, ModelError
from quantkit.inference.layers.fused_op import has_kernel
from quantkit.numerics.conv_windows import Windows
from quantkit.progress import silent
from tests.support.pipelines import tiny_flux_pipeline, tiny_unet
from tests.support.sampling import turned

RESULTS = Path(__file__).parents[2] / "docs" / "notes" / "results"
TINY = ModelBenchSettings(batch=1, size=8)
RDNA4 = arch_of_device("gfx1201")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("estimate") / "unet"
    unet: Any = tiny_unet()
    unet.save_config(folder)
    return find_denoiser(str(folder))


@pytest.fixture(scope="module")
def tiny_flux(tmp_path_factory):
    return find_denoiser(str(tiny_flux_pipeline(tmp_path_factory.mktemp("estimate") / "flux")))


def half(*shape):
    return torch.empty(shape, dtype=torch.float16, device="meta")


def names(kernels):
    return [kernel.names for kernel in kernels]


def count_products(model, inputs):
    """Return what torch counts: attention in two products, as it counts none in one of a CPU."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(**inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize(("batch", "size"), [(1, 8), (3, 16)])
def test_products_are_those_that_torch_counts(tiny, batch, size):
    settings = replace(TINY, batch=batch, size=size)
    model = build_denoiser(tiny, torch.device("cpu")).float()
    inputs = make_inputs(model, settings.batch, settings.size, torch.device("cpu"))
    counted = count_products(model, inputs)
    found = trace_contender(tiny, MODEL_CONTENDERS["f16"], settings, RDNA4)
    assert found.trace.flops == counted > 0


def test_joint_attention_is_counted_as_torch_counts_it(tiny_flux):
    model = build_denoiser(tiny_flux, torch.device("cpu")).float()
    inputs = make_inputs(model, 1, 8, torch.device("cpu"))
    counted = count_products(model, inputs)
    found = trace_contender(tiny_flux, MODEL_CONTENDERS["f16"], TINY, RDNA4)
    assert found.trace.flops == counted > 0


@pytest.mark.parametrize("name", ["fp8", "sparse-static", "w4a8-static"])
def test_packed_layers_multiply_what_they_stand_for(tiny, name):
    # Compiled, so that nothing is kept of the prompt.
    dense = trace_contender(tiny, MODEL_CONTENDERS["f16-compiled"], TINY, RDNA4)
    packed = trace_contender(tiny, MODEL_CONTENDERS[f"{name}-compiled"], TINY, RDNA4)
    assert packed.trace.flops == dense.trace.flops
    assert packed.weight_bytes < dense.weight_bytes
    own = [c.product for c in packed.trace.calls if c.product and c.name.startswith("quantkit.")]
    assert own
    assert {p.sparse for p in own} <= {"sparse" in name, False}


def test_bytes_of_a_linear_layer_are_those_by_hand():
    layer = nn.Linear(8, 16, device="meta", dtype=torch.float16)
    x = half(4, 8)
    (product, gelu) = trace(lambda: functional.gelu(layer(x))).calls
    assert product.name == "aten.addmm"
    assert product.nbytes == 2 * (4 * 8 + 16 * 8 + 16 + 4 * 16)
    assert product.product == Product("linear", "f16", 4, 16, 8)
    assert gelu.nbytes == 2 * (4 * 16 + 4 * 16)


def test_what_is_repeated_counts_once_and_views_count_nothing():
    x, row = half(4, 8), half(1, 8)
    found = trace(lambda: (x.reshape(2, 2, 8).transpose(0, 1), x + row.expand(4, 8)))
    (add,) = found.calls
    assert add.nbytes == 2 * (4 * 8 + 8 + 4 * 8)


def test_a_residual_is_read_by_its_product():
    x, one = half(1, 4, 6, 64).to(torch.uint8), half(1).float()
    w, meta = half(16, 288).to(torch.uint8), half(16, 72).to(torch.uint8)
    add, residual = OPERATORS["conv_fp8_sparse_residual"], half(1, 4, 6, 16)
    how = (Windows((3, 3), padding=(1, 1, 1, 1)).numbers, "e4m3fn", "e4m3fn", torch.float16)
    (call,) = trace(lambda: add(x, one, w, meta, one, None, residual, *how)).calls
    assert call.product == Product("conv", "fp8", 24, 16, 576, sparse=True)
    weights = 16 * (288 + 72)
    assert call.nbytes == 24 * 64 + weights + 4 + 2 * (2 * 24 * 16)


def test_what_is_changed_in_place_is_written():
    x, y = half(4, 8), half(4, 8)
    (add,) = trace(lambda: x.add_(y)).calls
    assert add.writes[0].storage == add.reads[0].storage
    # x is read and written, y read: a memory that is both counts once in a call's own sum.
    assert [view.nbytes for view in add.reads] == [64, 64]


@pytest.mark.parametrize(
    ("queries", "keys", "head"), [(64, 64, 64), (37, 77, 40), (1, 1, 8)], ids=str
)
def test_attention_is_one_call_without_its_scores(queries, keys, head):
    q, k = half(2, 3, queries, head), half(2, 3, keys, head)
    (call,) = trace(lambda: functional.scaled_dot_product_attention(q, k, k)).calls
    assert call.product.flops == 4 * 2 * 3 * queries * keys * head
    # The values are the keys here.
    assert call.nbytes == 2 * 2 * 3 * head * (2 * queries + keys)


def test_a_chain_between_products_is_one_kernel():
    x, w = half(4, 16), half(16, 16)

    def step():
        y = x @ w
        return functional.layer_norm(functional.silu(y) * 2 + x, (16,)) @ w

    first, chain, last = fused(trace(step).calls)
    assert (first.group, chain.group, last.group) == (PRODUCTS, NORMS, PRODUCTS)
    # Reads y and x, writes what is multiplied: what stands between them stays in registers.
    assert chain.nbytes == 3 * 2 * 4 * 16


def test_no_kernel_waits_for_itself():
    x, w = half(4, 16), half(16, 16)

    def step():
        before = x * 2
        return (before @ w) + before

    assert names(fused(trace(step).calls)) == [
        ("aten.mul",), ("aten.mm",), ("aten.add",)
    ]  # fmt: skip


def test_a_group_norm_reads_its_picture_twice():
    x = half(2, 8, 4, 4)
    (call,) = trace(lambda: functional.group_norm(x, 2)).calls
    kernels = separate([call])
    assert [kernel.group for kernel in kernels] == [NORMS, NORMS]
    assert sum(kernel.nbytes for kernel in kernels) > 3 * x.numel() * 2
    assert len(fused([call])) == 2


def test_fused_kernels_are_fewer_and_move_less(tiny):
    calls = trace_contender(tiny, MODEL_CONTENDERS["fp8-static"], TINY, RDNA4).trace.calls
    one_by_one, compiled = separate(calls), fused(calls)
    assert len(one_by_one) > len(compiled)
    moved = [sum(kernel.nbytes for kernel in found) for found in (one_by_one, compiled)]
    assert moved[0] > moved[1]
    flops = {sum(k.product.flops for k in found if k.product) for found in (one_by_one, compiled)}
    assert len(flops) == 1


def names_of(denoiser, contender, arch, settings=TINY):
    if isinstance(contender, str):
        contender = MODEL_CONTENDERS[contender]
    return [call.name for call in trace_contender(denoiser, contender, settings, arch).trace.calls]


def replayed_names(denoiser, contender):
    traced = trace_contender(denoiser, MODEL_CONTENDERS[contender], TINY, RDNA4)
    return names(kernels_of(traced, TINY, find_card("gfx1201")))


def test_norms_and_residuals_of_loaded_models_are_in_the_trace(tiny):
    kernels = replayed_names(tiny, "fp8-static-replayed")
    norms = kernels.count(("quantkit.group_norm_codes_fp8",))
    # The norm before the last convolution, which is in 16 bit, writes no codes.
    assert norms == kernels.count(("quantkit.group_partials",)) - 1 > 0
    assert ("quantkit.geglu_fp8",) in kernels
    ends = {found[-2:] for found in kernels}
    assert ("aten.native_layer_norm", "quantkit.quantize_fp8_static") in ends


def test_streams_of_loaded_models_are_joined_in_one_pass(tiny_flux):
    kernels = replayed_names(tiny_flux, "fp8-static-replayed")
    assert {("quantkit.joint_heads",), ("quantkit.project_gelu_fp8",)} <= {*kernels}
    assert not any("rms_norm" in name for found in kernels for name in found)


@pytest.mark.parametrize(("device", "fuses"), [("gfx1201", False), ("sm_90", True)])
def test_what_compile_fuses_depends_on_the_card(tiny, device, fuses):
    calls = names_of(tiny, "fp8-static-compiled", arch_of_device(device))
    assert ("quantkit.quantize_fp8_static" in calls) is not fuses
    # The compiler's own norms and sums.
    assert "aten.native_group_norm" in calls
    assert not any("residual" in name for name in calls)


@pytest.mark.parametrize("case", turned(["fp8-static", "sparse-static", "int8"], ["", "-replayed"]))
def test_steps_leave_out_the_prompts_keys_and_values_that_layers_keep(tiny, case):
    kind, how = case
    plain, replayed = (
        trace_contender(tiny, MODEL_CONTENDERS[f"{kind}{how}"], TINY, RDNA4).trace
        for how in ("-compiled", how)
    )
    prompt = (tiny.config["cross_attention_dim"],)
    kept = [c.product for c in plain.calls if c.product and (c.product.k,) == prompt]
    assert plain.flops - replayed.flops == sum(
        p.flops for p in kept if p.m == 77 * TINY.batch and p.kind == "linear"
    )
    assert plain.flops > replayed.flops


def test_prompts_that_a_model_projects_are_computed_at_every_step():
    pixart = DENOISERS["pixart"]
    pixart = replace(pixart, config={**pixart.config, "num_layers": 1})
    plain, replayed = (
        trace_contender(pixart, MODEL_CONTENDERS[name], TINY, RDNA4).trace
        for name in ("fp8-static-compiled", "fp8-static-replayed")
    )
    assert plain.flops == replayed.flops


def test_cudnn_copies_pictures_with_channels_first(tiny):
    calls = trace_contender(tiny, MODEL_CONTENDERS["f16"], TINY, RDNA4).trace.calls
    plain = separate(calls)
    convolutions = names(plain).count(("aten.convolution",))
    assert len(with_layout_copies(plain)) == len(plain) + 2 * convolutions


def product_ms(card, product, side=1):
    (timed,) = time_kernels([Kernel(PRODUCTS, ("p",), (), (), product)], card, side)
    return timed.us


@pytest.mark.parametrize(
    ("precision", "sparse"),
    [("f16", False), ("fp8", False), ("int8", False), ("fp8", True), ("int8", True)],
)
def test_products_take_longer_the_larger_they_are(precision, sparse):
    for card, kind in itertools.product(CARDS.values(), ("linear", "conv")):
        check_growth(card, Product(kind, precision, 1000, 1000, 1000, 1, sparse))


def check_growth(card, product):
    base = product_ms(card, product)
    assert 0 < base <= product_ms(card, product, side=0) < math.inf
    for axis in ("m", "n", "k", "count"):
        more = product_ms(card, replace(product, **{axis: 9 * getattr(product, axis)}))
        assert more > base, (card, axis)
    # Nothing is faster than the peak.
    flops = card.tflops[product.precision] * (card.sparse if product.sparse else 1)
    assert base > product.flops / flops / 1e6


@pytest.mark.parametrize("shape", [(0, 16, 16), (1, 1, 1), (1, 1280, 1280), (17, 33, 31)], ids=str)
def test_odd_and_empty_products_take_a_start_at_least(shape):
    for card, side in itertools.product(CARDS.values(), (0, 1)):
        us = product_ms(card, Product("linear", "fp8", *shape), side)
        assert card.efficiency.product_us[side] <= us < 1e3


@pytest.mark.parametrize("name", CARDS)
def test_copies_take_their_bytes(name):
    card, view = CARDS[name], View(1, 2**28, 2, (2**28,))
    copy = Kernel(SMALL, ("copy",), (view,), (replace(view, storage=2),))
    slow, fast = (time_kernels([copy], card, side)[0] for side in (0, 1))
    assert fast.bound == "bandwidth"
    assert 2**30 / card.gbs / 1e3 < fast.us < slow.us < 2 * 2**30 / card.gbs / 1e3


@pytest.mark.parametrize("name", CARDS)
def test_ranges_are_in_order(name):
    efficiency = CARDS[name].efficiency
    shares = [*efficiency.products.values(), *efficiency.attention.values(), efficiency.memory]
    assert all(0 < low <= high < 1 for low, high in shares)
    times = (efficiency.product_us, efficiency.small_us, efficiency.summed_us, efficiency.gap_us)
    assert all(high >= low > 0 for high, low in times)


@pytest.mark.parametrize("name", CARDS)
def test_attention_has_a_share_where_it_has_a_kernel(name):
    has_kernel = not arch_of_device(CARDS[name].device).why_without("attention")
    formats = {precision for precision, _ in CARDS[name].efficiency.attention}
    assert formats == ({"f16", "fp8", "int8"} if has_kernel else {"f16"})


def test_what_was_just_written_is_read_from_the_cache():
    card = CARDS["RX 9070 XT"]
    view = View(1, 2**22, 2, (2**22,))
    write = Kernel(SMALL, ("w",), (), (view,))
    read = Kernel(SMALL, ("r",), (view,), ())
    large = Kernel(SMALL, ("l",), (), (View(2, 2**26, 2, (2**26,)),))
    near = time_kernels([write, read], card, 1)[-1]
    far = time_kernels([write, large, read], card, 1)[-1]
    assert near.us < far.us


@pytest.mark.parametrize("text", ["gfx1201", "rx 9070 xt", " RX 9070 XT "])
def test_cards_have_names_and_architectures(text):
    assert find_card(text) is CARDS["RX 9070 XT"]


@pytest.mark.parametrize("text", ["", "gfx12", "gfx1201,", "sm_90a", "x" * 500, "\0", "cpu"])
def test_unknown_cards_are_refused_with_the_list(text):
    with pytest.raises(InputError, match="expected one of RX 9070 XT, RX 9070, R9700, ") as error:
        find_card(text)
    assert len(str(error.value)) < 450


def test_kernels_are_supposed_inside_the_block_alone():
    cuda = torch.device("cuda")
    with supposing(RDNA4):
        assert choose("attention_fp8", cuda, k=64).backend is Backend.GPU
    with supposing(arch_of_device("gfx1100")):
        assert "RDNA3" in choose("attention_fp8", cuda, k=64).reason
    if not torch.cuda.is_available():
        assert choose("attention_fp8", cuda, k=64).backend is Backend.REFERENCE


@pytest.mark.parametrize(("device", "asked"), [("gfx1201", False), ("sm_90", True)])
def test_what_a_device_decides_is_decided_for_the_supposed_one(device, asked):
    cuda = torch.device("cuda")
    with supposing(arch_of_device(device)):
        assert bool(why_on_request("attention_fp8", cuda)) is asked
        least = least_keys(cuda, OneLaunch.PROJECTIONS, 64)
        assert (least is not None) is asked
        assert has_kernel("geglu_fp8", "cuda", 64)
    if not torch.cuda.is_available():
        assert not has_kernel("geglu_fp8", "cuda", 64)


def test_modules_are_compiled_inside_the_block_alone():
    usual = torch.compiler.is_compiling
    with pytest.raises(InputError), as_compiled():
        assert torch.compiler.is_compiling()
        raise InputError("no step")
    assert torch.compiler.is_compiling is usual
    assert not torch.compiler.is_compiling()


def rows(denoiser, *contenders, card="gfx1201", settings=TINY):
    chosen = [MODEL_CONTENDERS[name] for name in contenders]
    result = estimate_step(denoiser, chosen, settings, find_card(card), silent)
    return {row.contender: row for row in result.rows}


def test_replayed_steps_are_their_kernels_and_gaps(tiny):
    found = rows(tiny, "f16", "f16-replayed")
    assert found["f16-replayed"].host_ms is None
    for group, whole in zip(found["f16-replayed"].groups, found["f16"].groups, strict=True):
        if group.group in {PRODUCTS, ATTENTION}:
            assert group == whole
        else:
            assert group.kernels < whole.kernels
            assert group.nbytes < whole.nbytes or not whole.nbytes
    assert found["f16-replayed"].ms.high < found["f16"].ms.low


@pytest.mark.slow
def test_fast_sums_are_faster_on_hopper_alone(tiny):
    names = ("fp8-static-replayed", "fp8-static-fast-replayed")
    for card, faster in (("H200", True), ("gfx1201", False)):
        accurate, fast = rows(tiny, *names, card=card, settings=replace(TINY, size=64)).values()
        assert (fast.ms.low < accurate.ms.low) is faster


def test_attention_is_torchs_where_hopper_does_not_pay(tiny_flux):
    packed = MODEL_CONTENDERS["fp8-static-replayed"].with_attention("e4m3fn")
    dense = MODEL_CONTENDERS["f16-replayed"].with_attention("e4m3fn")
    settings = replace(TINY, min_keys=1)
    found = estimate_step(tiny_flux, [packed, dense], settings, find_card("H100"), silent).rows
    assert [row.ms for row in found] == [None, None]
    assert "no processor" in found[0].reason
    assert "on Hopper" in found[1].reason


def test_estimates_have_groups_that_sum_to_the_step(tiny):
    row = rows(tiny, "fp8-static-compiled")["fp8-static-compiled"]
    assert row.host_ms is None
    assert math.isclose(sum(group.ms.middle for group in row.groups), row.ms.middle)
    for group in row.groups[:-1]:
        assert set(group.bounds) <= set(BOUNDS)
        assert math.isclose(sum(group.bounds.values()), group.ms.middle, abs_tol=1e-12)


def test_the_host_bounds_what_is_called_module_by_module(tiny):
    found = rows(tiny, "f16", "f16-compiled")
    assert found["f16"].ms == found["f16"].host_ms
    assert found["f16-compiled"].ms.high < found["f16"].ms.low


def test_larger_pictures_and_batches_take_longer(tiny):
    names = ("f16-compiled", "fp8-compiled")
    small = rows(tiny, *names)
    for settings in (replace(TINY, batch=64), replace(TINY, size=64)):
        large = rows(tiny, *names, settings=settings)
        assert all(large[name].ms.low > small[name].ms.low for name in names)


def test_contenders_without_an_estimate_say_why(tiny):
    quantized = MODEL_CONTENDERS["f16"].with_attention("int8")
    chosen = [MODEL_CONTENDERS["torchao-compiled"], quantized]
    found = estimate_step(tiny, chosen, TINY, find_card("gfx1100"), silent).rows
    assert [row.ms for row in found] == [None, None]
    assert "torchao" in found[0].reason
    assert "attention is torch's" in found[1].reason


@pytest.mark.parametrize("size", [2, 3, 13])
def test_odd_sizes_are_estimated(tiny, size):
    (row,) = rows(tiny, "fp8-static-compiled", settings=replace(TINY, size=size)).values()
    assert 0 < row.ms.low < row.ms.high < 100


def test_sizes_that_a_model_does_not_take_are_one_line(tiny_flux):
    config = {**tiny_flux.config, "patch_size": 1, "axes_dims_rope": [4, 4, 4]}
    with pytest.raises(ModelError, match="no step runs at --batch 1 and --size 8") as refused:
        rows(replace(tiny_flux, config=config), "f16")
    assert "\n" not in str(refused.value)


def test_attention_on_codes_is_made_of_the_operators(tiny):
    settings = replace(TINY, min_keys=1)
    contender = MODEL_CONTENDERS["fp8-static"].with_attention("e4m3fn")
    plain = trace_contender(tiny, MODEL_CONTENDERS["fp8-static"], settings, RDNA4).trace
    found = trace_contender(tiny, contender, settings, RDNA4).trace
    own = {call.name for call in found.calls}
    assert {"quantkit.attention_fp8_codes", "quantkit.project_codes_fp8"} <= own
    assert not any("scaled_dot_product" in name for name in own)
    # Heads are padded to multiples of 16 columns.
    assert found.flops >= plain.flops


def test_what_follows_from_static_scales_is_made_once_and_not_in_a_step(tiny):
    settings = replace(TINY, min_keys=1)
    replayed, compiled = (
        names_of(tiny, MODEL_CONTENDERS[name].with_attention("e4m3fn"), RDNA4, settings)
        for name in ("fp8-static-replayed", "fp8-static-compiled")
    )
    assert "quantkit.attention_fp8_codes" in replayed
    # A bound of the factors.
    assert "aten.minimum" not in replayed
    assert "aten.minimum" in compiled


@pytest.mark.parametrize("name", ["sd3", "pixart", "sana", "zimage", "wan", "ltx"])
def test_every_denoiser_is_traced(name):
    settings, whole = ModelBenchSettings(batch=1, size=32), DENOISERS[name]
    layers = ("n_layers", "n_refiner_layers") if name == "zimage" else ("num_layers",)
    shallow = replace(whole, config={**whole.config, **dict.fromkeys(layers, 1)})
    found = trace_contender(shallow, MODEL_CONTENDERS["f16"], settings, RDNA4)
    assert found.trace.flops > 1e9


def measured(name):
    run = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    found = {row["contender"]: row for row in run["rows"]}
    config = {**run["model"], "config": dict(run["model"]["config"])}
    return Denoiser(**config), found


#: By file, whose name begins with the card.
CASES = {
    "h100-step-sdxl": ("fp8-static-replayed",),
    "h200-step-flux-quarter": ("f16-compiled", "fp8-static-replayed", "sparse-static-replayed"),
}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, name, marks=pytest.mark.slow if "sdxl" in file else ())
        for file, names in CASES.items()
        for name in names
    ],
)
def test_estimates_are_within_a_fifth_of_what_was_measured(file, name):
    denoiser, run = measured(file)
    card = file.partition("-")[0].upper()
    (row,) = rows(denoiser, name, card=card, settings=ModelBenchSettings(2, 128)).values()
    assert row.ms.middle == pytest.approx(run[name]["in_a_row"]["p50_us"] / 1e3, rel=0.2)
    products = next(group for group in row.groups if group.group == PRODUCTS)
    profile = run[name]["profile"]
    ms = sum(profile.get(group, 0.0) for group in PROFILED[PRODUCTS])
    assert products.ms.middle == pytest.approx(ms, rel=0.2)


@pytest.mark.slow
def test_a_trace_has_the_weights_and_products_of_a_run_on_a_card():
    denoiser, run = measured("h100-step-sdxl")
    contender = MODEL_CONTENDERS["fp8-static-replayed"].with_attention("e4m3fn")
    settings, expected = ModelBenchSettings(2, 128), run[contender.name]
    found = trace_contender(denoiser, contender, settings, arch_of_device("sm_90"))
    assert found.weight_bytes == expected["weight_bytes"]
    own = {"quantkit products", "attention"}
    launches = sum(k["calls"] for k in expected["kernels"] if group_of(k["name"]) in own)
    products = sum(call.product is not None for call in found.trace.calls)
    # A profile names the longest kernels, and what torch multiplies is in other groups.
    assert products == pytest.approx(launches, rel=0.1)


def test_the_command_prints_saves_and_refuses(tiny, tmp_path):
    given = ["--config", tiny.name, "--estimate", "gfx1200", "--size", "8", "-q"]
    saved = tmp_path / "estimate.json"
    printed = CliRunner().invoke(model_command, [*given, "--contenders", "f16", "--save", saved])
    assert printed.exit_code == 0, printed.output
    assert "RX 9060 XT" in printed.output
    asked = CliRunner().invoke(model_command, [*given, "--contenders", "f16", "--json"])
    assert json.loads(asked.output) == json.loads(saved.read_text(encoding="utf-8"))
    assert json.loads(asked.output)["schema"] == "quantkit.model.estimate"
    unknown = CliRunner().invoke(model_command, ["--estimate", "gfx9"])
    assert isinstance(unknown.exception, InputError)
