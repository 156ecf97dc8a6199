"""The kernels on the GPU of this machine: every operation, and how calls meet torch's streams."""

import threading

import pytest
import torch
from torch import nn

import quantkit
from quantkit.device import log
from quantkit.device.backends import Backend, use
from quantkit.device.cache import read_whole
from quantkit.device.choosing import choose
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.gpu.launcher import prepare_launch
from quantkit.device.gpu.objects import read_object
from quantkit.device.gpu.selftest import state_of
from quantkit.device.ops.axes import FP8
from quantkit.device.ops.norms.quantize import quantize_static, quantize_token
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS, name_for
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.conv_cases import conv_case, conv_shapes
from tests.support.gated_cases import gated_case
from tests.support.kernel_cases import (
    DTYPES,
    GUARD,
    SENTINEL,
    covering_variants,
    deviation,
    every_value,
    formats_of,
    gemm_case,
    inputs_of,
    of_family,
    operate,
    points_and_midpoints,
    same_codes,
    shapes_of,
)
from tests.support.packed import pack_component, packed_module
from tests.support.threads import run_in_threads

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu")]

GEMMS = of_family("gemm")
QUANTIZE = [op for op in OPS.values() if op.family in ("quantize_static", "quantize_token")]
VARIANTS = [v for op in GEMMS for v in covering_variants(op, pairs=False)]
GEGLU = of_family("geglu")
CONVS = of_family("conv")
CONV_VARIANTS = [v for op in CONVS for v in covering_variants(op, pairs=False)]
GEGLU_VARIANTS = [v for op in GEGLU for v in covering_variants(op, pairs=False)]


@pytest.fixture(scope="module")
def device():
    """The GPU; skipped without one, and failed when it is one of ours and broken."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    state = state_of(torch.cuda.current_device())
    if state.device is None:
        pytest.skip(state.problem)
    assert not state.problem
    return state.device


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(30)


class GuardedOutput:
    """A tensor of the device with sentinels on both sides."""

    def __init__(self, shape, dtype):
        size = torch.Size(shape).numel() * dtype.itemsize
        self.bytes = torch.full((size + 2 * GUARD,), SENTINEL, dtype=torch.uint8, device="cuda")
        self.inside = slice(GUARD, GUARD + size)
        self.view = self.bytes[self.inside].view(dtype).view(shape)

    def check(self):
        outside = torch.cat((self.bytes[: self.inside.start], self.bytes[self.inside.stop :]))
        assert bool((outside == SENTINEL).all()), "written outside its buffer"


def launch(device, variant, sizes, tensors, outputs):
    """Launch on copies of ``tensors``; return the outputs, (shape, dtype) each, on the CPU."""
    made = [GuardedOutput(*output) for output in outputs]
    nulls = [i for i, tensor in enumerate(tensors) if tensor is None]
    call = Call(device, variant, sizes, outputs, nulls)
    call.launch(*(t if t is None else t.cuda() for t in tensors), *(g.view for g in made))
    for guarded in made:
        guarded.check()
    return [guarded.view.cpu() for guarded in made]


def need_tile(device, variant):
    """Skip where the device's menu ends before the variant's tile."""
    if not device.arch.has_tile(variant.op.name, variant.word("QK_TILE")):
        menu = len(dict(device.arch.tile_speed)[variant.op.name])
        pytest.skip(f"{device.arch.name} has {menu} tiles")


# ------------------------------------------------------------------------------- every operation


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.symbol)
def test_gemm_is_exact_up_to_one_rounding_at_every_tail(device, variant, generator):
    need_tile(device, variant)
    for index, (m, n, k) in enumerate(shapes_of(variant)):
        case = gemm_case(variant, m, n, k, generator, bias=index % 2 == 0)
        sizes, output = {"m": m, "n": n, "k": k}, ((m, n), case.dtype)
        (y,) = launch(device, variant, sizes, inputs_of(case), [output])
        found = deviation(case, y)
        assert found.within(variant.op.budget), f"{(m, n, k)}: {found}"


@pytest.mark.parametrize("words", ["t0", "t1", "t2"])
@pytest.mark.parametrize("op", GEMMS, ids=lambda op: op.name)
def test_long_sums_keep_their_budget(device, op, words, generator):
    # sm_89 and sm_90 keep fewer bits than float32 inside their FP8 matrix unit.
    variant = Variant(op, (*formats_of(op), "token", "channel", "f16", words))
    case = gemm_case(variant, 33, 40, 5120, generator)
    names = [a.name for a in op.args if a.is_pointer and not a.written]
    sizes, output = {"m": 33, "n": 40, "k": 5120}, ((33, 40), torch.float16)
    (y,) = launch(device, variant, sizes, [case.tensors[n] for n in names], [output])
    assert deviation(case, y).within(op.budget)


@pytest.mark.parametrize("variant", GEGLU_VARIANTS, ids=lambda v: v.symbol)
def test_gated_codes_are_the_nearest_at_every_tail(device, variant, generator):
    need_tile(device, variant)
    for index, (m, n, k) in enumerate(shapes_of(variant)):
        case = gated_case(variant, m, n, k, generator, bias=index % 2 == 0)
        (y,) = launch(device, variant, case.sizes, inputs_of(case), [(case.shape, torch.uint8)])
        case.check(y)


@pytest.mark.parametrize("variant", CONV_VARIANTS, ids=lambda v: v.symbol)
def test_convolutions_are_exact_up_to_one_rounding_at_every_tail(device, variant, generator):
    need_tile(device, variant)
    for index, shape in enumerate(conv_shapes(variant)):
        case = conv_case(variant, shape, generator, bias=index % 2 == 0)
        (y,) = launch(device, variant, shape, inputs_of(case), [(case.result, case.dtype)])
        found = deviation(case, y)
        assert found.within(variant.op.budget), f"{shape}: {found}"


@pytest.mark.usefixtures("device")
def test_columns_that_no_tensor_map_has_are_gated_too(generator):
    variant = Variant(
        OPS["geglu_fp8"], ("e4m3fn",) * 2 + ("token", "channel", "f16", "e4m3fn", "t1")
    )
    case = gated_case(variant, 70, 45, 96, generator)
    names = ("x", "x_scale", "w", "w_scale", "bias", "y_scale")
    with log.record() as seen:
        y = operate(
            "geglu_fp8", *(case.tensors[n].cuda() for n in names), *("e4m3fn",) * 3, torch.float16
        )
    assert [(op, where) for op, _, where in seen.calls] == [("geglu_fp8", Backend.GPU)]
    case.check(y.cpu())


def check_quantize(x, scale, smooth, fmt):
    """Compare both operations on the GPU with the reference on the CPU, byte for byte."""
    given = torch.tensor([scale])
    with log.record() as seen:
        changed = (x.cuda(), None if smooth is None else smooth.cuda())
        s, q = operate(name_for("quantize_token", fmt), *changed, fmt)
        static = operate(name_for("quantize_static", fmt), *changed, given.cuda(), fmt)
    right_scale, right = quantize_token(x, smooth, fmt)
    same_codes(q.cpu(), right, fmt)
    assert torch.equal(s.cpu().nan_to_num(-1), right_scale.nan_to_num(-1))
    same_codes(static.cpu(), quantize_static(x, smooth, given, fmt), fmt)
    assert {backend for _, _, backend in seen.calls} == {Backend.GPU}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("io", DTYPES)
@pytest.mark.parametrize("smoothed", [False, True], ids=["plain", "smooth"])
def test_quantize_gives_the_references_bytes(fmt, io, smoothed, generator):
    shapes = (1, 1), (3, 16), (7, 515), (9, 1280), (65, 77), (17, 5120), (5, 15368), (2, 40000)
    for m, k in shapes:
        x = (torch.randn(m, k, generator=generator) * 3).to(DTYPES[io])
        x[0, 0] = float("nan")
        x[m // 2] = 0 if m > 1 else x[0]
        smooth = torch.rand(k, generator=generator) + 0.5 if smoothed else None
        check_quantize(x, 0.01, smooth, fmt)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("io", DTYPES)
def test_quantize_gives_torchs_bytes_for_every_value(fmt, io):
    values = every_value(io, fmt)
    for k, scale in ((64, 1.0), (250, 0.37), (33, 1e-30), (16, 1e30), (1, 2.0**-130), (8, 3e-3)):
        check_quantize(values[: values.numel() // k * k].reshape(-1, k), scale, None, fmt)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("io", DTYPES)
def test_quotients_at_and_around_ties_are_rounded_as_torch_does(fmt, io, generator):
    # Every midpoint times a scale, and its neighbours, in rows whose largest value has that scale.
    _, middles = points_and_midpoints(fmt)
    scales = torch.rand(300, 1, generator=generator) * 0.01 + 1e-3
    exact = torch.cat((middles, torch.tensor([FORMATS[fmt].max]))) * scales
    for x in (exact, exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.zeros(1))):
        check_quantize(x.to(DTYPES[io]), float(scales[0]), None, fmt)


# ------------------------------------------------------------------------------------ execution


def operands(m, n, k, *, sparse=False, dtype=torch.float16, seed=0):
    """Return the arguments of a GEMM, dense or sparse, on the GPU."""
    g = torch.Generator().manual_seed(seed)
    x_scale, x = quantize_token(torch.randn(m, k, generator=g), None, "e4m3fn")
    kept = torch.randn(n, k // 2 if sparse else k, generator=g)
    w_scale, w = quantize_token(kept, None, "e4m3fn")
    meta = (torch.full((n, k // 8), 0x9C, dtype=torch.uint8),) if sparse else ()
    tensors = (x, x_scale, w, *meta, w_scale, torch.randn(n, generator=g).to(dtype))
    return (*(t.cuda() for t in tensors), "e4m3fn", "e4m3fn", dtype)


def multiply(given):
    return operate("gemm_fp8_sparse" if len(given) == 9 else "gemm_fp8", *given)


def expected(given):
    return OPS["gemm_fp8_sparse" if len(given) == 9 else "gemm_fp8"].reference(*given)


def close(found, right):
    # Hopper's FP8 unit aligns products to some 14 bits: of sums of 20, errors up to 0.02 were seen.
    return torch.allclose(found.float(), right.float(), rtol=1e-2, atol=4e-2)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("m", [1, 16, 40, 300, 4096])
def test_gemm_agrees_with_the_reference(m, dtype, sparse):
    given = operands(m, 328, 320, sparse=sparse, dtype=dtype)
    with log.record() as seen:
        found = [multiply(given) for _ in range(2)]  # prepared, then found
    assert close(found[0], expected(given))
    assert torch.equal(*found)
    ((_, variant, backend),) = seen.calls
    assert backend is Backend.GPU
    assert sum(seen.calls.values()) == 2
    assert variant.endswith(("t2", "x16")) or m > 16


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_operands_that_are_not_plain_memory_are_not_misread(sparse):
    given = operands(50, 72, 64, sparse=sparse)
    right = multiply(given)

    def strided(t):
        return torch.stack((t, t.flip(0)), dim=-1)[..., 0]

    def misaligned(t):
        return torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape)

    def transposed(t):
        return t.T.contiguous().T if t.ndim == 2 else t

    for change in (strided, misaligned, transposed):
        changed = [change(a) if isinstance(a, torch.Tensor) else a for a in given]
        assert torch.equal(multiply(changed), right), change.__name__


@pytest.mark.usefixtures("device")
def test_what_no_kernel_computes_runs_on_the_reference():
    x, x_scale, w, _, bias, *rest = operands(4, 8, 64)
    groups = torch.rand(8, 4, device="cuda")
    with log.record() as seen:
        operate("gemm_fp8", x, x_scale, w, groups, bias, *rest)
        short, ones = (x[:, :40].contiguous(), w[:, :40].contiguous()), x_scale.new_ones(8)
        operate("gemm_fp8", short[0], x_scale, short[1], ones, bias, *rest)
    assert {backend for _, _, backend in seen.calls} == {Backend.REFERENCE}
    assert operate("gemm_fp8", x[:0], x_scale[:1], w, x_scale.new_ones(8), bias, *rest).shape == (
        0,
        8,
    )


@pytest.mark.usefixtures("device")
def test_a_forced_back_end_is_obeyed():
    given = operands(5, 16, 64)
    multiply(given)
    with log.record() as seen, use(Backend.REFERENCE):
        multiply(given)
    assert {backend for _, _, backend in seen.calls} == {Backend.REFERENCE}
    assert choose("gemm_fp8", torch.device("cuda"), k=64).backend is Backend.GPU


@pytest.mark.usefixtures("device")
def test_fast_sums_are_another_call_and_end_with_their_block():
    given = operands(2048, 1280, 1280)  # small ones are no faster with them
    with log.record() as seen:
        before = multiply(given)
        with quantkit.fast_sums():
            fast = multiply(given)
        assert torch.equal(multiply(given), before)
    hopper = torch.cuda.get_device_capability()[0] == 9
    counts = {("_fast_" in name): count for (_, name, _), count in seen.calls.items()}
    assert counts == ({False: 2, True: 1} if hopper else {False: 3})
    error = (fast.double() - before.double()).abs().max() / before.double().square().mean().sqrt()
    assert float(error) < 0.05


SCHEMES = [
    pytest.param(Scheme(FORMATS["e4m3fn"], PerChannel(), sparsity, activation), id=name)
    for name, sparsity, activation in (
        ("dense-static", None, Activation.STATIC),
        ("dense-token", None, Activation.TOKEN),
        ("sparse-static", TWO_OF_FOUR, Activation.STATIC),
        ("sparse-token", TWO_OF_FOUR, Activation.TOKEN),
    )
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_packed_layers_agree_with_the_reference(kind, scheme):
    dense = nn.Linear(64, 40) if kind == "linear" else nn.Conv2d(32, 24, 3, 2, 1)
    layer = packed_module(dense, scheme).cuda().half()
    x = torch.randn(2, 32, 16, 64, device="cuda").half()
    with log.record() as seen, torch.no_grad():
        found = layer(x)
        with use(Backend.REFERENCE):
            right = layer(x)
    assert close(found, right)
    assert Backend.GPU in {backend for _, _, backend in seen.calls}


# -------------------------------------------------------------------- streams, graphs and threads


@pytest.mark.usefixtures("device")
def test_kernels_run_on_the_current_stream():
    given = operands(64, 64, 256)
    right = multiply(given)
    late, side = torch.zeros_like(given[0]), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second: any other stream would be first
        late.copy_(given[0])
        found = multiply((late, *given[1:]))
    side.synchronize()
    assert torch.equal(found, right)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_captured_graph_replays_with_new_values(sparse):
    x = torch.randn(32, 64, device="cuda").half()
    _, _, *weights = operands(32, 48, 64, sparse=sparse)

    def step():
        scale, codes = operate("quantize_fp8_token", x, None, "e4m3fn")
        return multiply((codes, scale, *weights))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for seed in range(3):
        x.copy_(torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(y, step())


def test_a_kernel_that_is_not_loaded_cannot_be_captured(device):
    fresh = Variant(OPS["quantize_fp8_static"], ("f32", "e5m2", "smooth"))
    device._functions.pop(fresh, None)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(Exception, match="run the model once before capturing"),
        torch.cuda.graph(graph),
    ):
        prepare_launch(device, fresh, {"m": 1, "k": 16})
    torch.cuda.synchronize()


@pytest.mark.usefixtures("device")
def test_threads_that_torch_has_not_used_may_call():
    given = [operands(60 + i, 64, 128, seed=i) for i in range(6)]
    right, wrong = [multiply(g) for g in given], []
    torch.cuda.synchronize()

    def work(i):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                found = multiply(given[i])
                stream.synchronize()
                if not torch.equal(found, right[i]):
                    wrong.append(i)

    run_in_threads(work)
    assert not wrong


def test_a_launch_is_a_new_threads_first_use_of_the_gpu(device):
    given = operands(20, 64, 128)
    variant = Variant(OPS["gemm_fp8"], ("e4m3fn", "e4m3fn", "token", "channel", "f16", "t2"))
    call = Call(device, variant, {"m": 20, "n": 64, "k": 128}, [((20, 64), torch.float16)])
    y, errors = torch.empty(20, 64, dtype=torch.float16, device="cuda"), []

    def work():
        try:
            call.launch(*given[:5], y)
        except Exception as error:  # noqa: BLE001  told to the main thread
            errors.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    torch.cuda.synchronize()
    assert not errors
    assert close(y, expected(given))


@pytest.mark.usefixtures("device")
def test_the_second_gpu_runs_what_lies_on_it():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    given = operands(40, 64, 128)
    other = [a.to("cuda:1") if isinstance(a, torch.Tensor) else a for a in given]
    with log.record() as seen:
        found = multiply(other)  # the current device is still the first
    assert found.device == torch.device("cuda:1")
    assert torch.equal(found.cpu(), multiply(given).cpu())
    assert {backend for _, _, backend in seen.calls} == {Backend.GPU}


# -------------------------------------------------------------------------------- torch.compile


@pytest.mark.slow
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_packed_unet_compiles_without_a_graph_break(pipeline_dir, tmp_path, mode):
    import shutil

    from diffusers import UNet2DConditionModel

    shutil.copytree(pipeline_dir / "unet", tmp_path / "unet")
    dense = UNet2DConditionModel.from_pretrained(tmp_path / "unet")
    scheme = Scheme(FORMATS["e4m3fn"], PerChannel(), None, Activation.TOKEN)
    layers = {
        name: scheme
        for name, module in dense.named_modules()
        if isinstance(module, nn.Linear) and module.in_features % 16 == 0
    }
    pack_component(tmp_path / "unet", layers)
    model = UNet2DConditionModel.from_pretrained(tmp_path / "unet", torch_dtype=torch.float16)
    model.cuda()
    x = torch.randn(1, 4, 8, 8, device="cuda").half()
    text = torch.randn(1, 16, 32, device="cuda").half()
    t = torch.tensor(500, device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad(), log.record() as seen:
        wanted = model(x, t, text).sample
        seen.calls.clear()
        found = compiled(x, t, text).sample.clone()  # replays write over it
        assert {backend for _, _, backend in seen.calls} == {Backend.GPU}
        products = sum(count for (op, _, _), count in seen.calls.items() if "gemm" in op)
        assert products == len(layers)
        # torch.compile quantizes itself where it can convert to FP8.
        assert seen.calls.total() == products * (2 if torch.version.hip else 1)
        for _ in range(3):  # the second call is captured, the third one replayed
            replayed = compiled(x, t, text).sample.clone()
    # The layers between ours are fused and round elsewhere.
    for output in (found, replayed):
        error = (output - wanted).float().square().mean() / wanted.float().square().mean()
        assert float(error) < 1e-3


# --------------------------------------------------------------------------------------- objects


def test_objects_come_from_the_cache(device):
    variant = VARIANTS[0]
    prepare_launch(device, variant, {"m": 1, "n": 1, "k": 32})
    found = read_object(device.driver, device.target, variant)
    assert found.path.exists()
    assert found.content == read_whole(found.path)
