"""Packed modules and operators: against dense layers, under compile, at odd shapes."""

import copy
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from quantkit.device import log
from quantkit.device.backends import Backend, use
from quantkit.device.ops import call as execute
from quantkit.errors import CheckpointError, InputError, ShapeError
from quantkit.inference.layers import timestep_buckets
from quantkit.inference.layers.codes import Codes
from quantkit.inference.layers.deviation import watch
from quantkit.inference.layers.modules import pack_module
from quantkit.inference.loading.pipeline_loading import packed_layers
from quantkit.numerics.formats import E4M3FN, E5M2, INT4, INT8, Q4_0, Q8_0
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.nibbles import integer_codes
from quantkit.numerics.scales import cast
from quantkit.numerics.scheme import Activation, Schedule, Scheme
from tests.support.packed import packed_module
from tests.support.sampling import turned

ROOT = Path(__file__).parents[2]
TOKEN, STATIC, NONE = Activation.TOKEN, Activation.STATIC, Activation.NONE
SCHEMES = {
    "token": Scheme(E4M3FN, PerChannel(), None, TOKEN),
    "token-smooth": Scheme(E4M3FN, PerTensor(), None, TOKEN, smooth=True),
    "token-sparse": Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, TOKEN),
    "static": Scheme(E4M3FN, PerChannel(), None, STATIC),
    "static-smooth-sparse": Scheme(E4M3FN, PerTensor(), TWO_OF_FOUR, STATIC, smooth=True),
    "static-e5m2": Scheme(E5M2, PerChannel(), None, STATIC),
    "group": Scheme(E4M3FN, PerGroup(16), None, TOKEN),
    "int8-token": Scheme(INT8, PerChannel(), None, TOKEN, smooth=True),
    "int8-static-sparse": Scheme(INT8, PerChannel(), TWO_OF_FOUR, STATIC),
    "int4-token": Scheme(INT4, PerChannel(), None, TOKEN, smooth=True),
    "int4-static": Scheme(INT4, PerChannel(), None, STATIC),
    "int4-none": Scheme(INT4, PerChannel(), None, NONE),
    "q4_0": Scheme(Q4_0, PerGroup(32), None, NONE),
    "q8_0": Scheme(Q8_0, PerGroup(32), None, NONE),
    "none": Scheme(E4M3FN, PerChannel(), None, NONE),
    "none-smooth-sparse": Scheme(E5M2, PerChannel(), TWO_OF_FOUR, NONE, smooth=True),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CONVS: dict[str, dict[str, Any]] = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "3x3-stride": {"kernel_size": 3, "padding": 1, "stride": 2},
    "1x1": {"kernel_size": 1},
    "1x1-stride": {"kernel_size": 1, "stride": (2, 3)},
    "2x3-dilated": {"kernel_size": (2, 3), "padding": (2, 1), "dilation": (2, 3)},
    "same": {"kernel_size": (2, 3), "padding": "same"},
    "valid": {"kernel_size": 3, "padding": "valid"},
}


def rounded(values, scheme, scale, dim):
    """What quantizing makes of float32 values, in float64."""
    if scale is None:
        amax = values.abs().amax(dim, keepdim=True)
        scale = torch.where(amax > 0, amax / scheme.input.max, 1.0)
    return cast(values / scale, scheme.input).double() * scale


def oracle(layer, x):
    """The layer's value by its definition, in float64: quantize x by hand, multiply dense."""
    scheme, wide = layer.scheme, x.float()
    shape = (-1, 1, 1) if layer.kind == "conv2d" else (-1,)
    if layer.kind == "conv2d":
        wide = functional.pad(wide, layer.windows.padding)
    if layer.input_smooth is not None:
        wide = wide * layer.input_smooth.reshape(shape)
    if scheme.activation is STATIC:
        wide = rounded(wide, scheme, layer.input_scale, dim=-1)
    weight, bias = layer.dequantized().double(), layer.bias.double()
    if layer.kind == "linear":
        if scheme.activation is TOKEN:
            wide = rounded(wide, scheme, None, dim=-1)
        return functional.linear(wide.double(), weight, bias)
    padded, kernel = wide.double(), layer.dense_shape[2:]
    stride, dilation = layer.windows.stride, layer.windows.dilation
    columns = functional.unfold(padded, kernel, dilation, stride=stride)
    if scheme.activation is TOKEN:
        columns = rounded(columns.float(), scheme, None, dim=1)
    y = weight.flatten(1) @ columns + bias[:, None]
    empty = torch.empty(*x.shape[:2], *padded.shape[2:], device="meta")
    out = functional.conv2d(empty, weight.to("meta", empty.dtype), None, stride, 0, dilation)
    return y.reshape(x.shape[0], -1, *out.shape[2:])


def rounds_twice(scheme):
    return scheme.activation is NONE


def assert_near(y, wanted, dtype, rounded_twice=False):
    # float32 sums of K <= 1000 fp8 products, then one rounding to dtype; the dequantized path
    # rounds weights and smoothed inputs to dtype first, which adds errors like sqrt(K) rms.
    eps = torch.finfo(dtype).eps
    rms = wanted.square().mean().sqrt()
    bound = wanted.abs() * eps + rms * (1e-5 + (8 * eps if rounded_twice else 0))
    assert y.dtype == dtype
    assert y.shape == wanted.shape
    assert bool(((y.double() - wanted).abs() <= bound).all())


SHAPES = [(48,), (5, 48), (2, 3, 48), (1, 2, 1, 48)]


@pytest.mark.parametrize("case", turned(SCHEMES, DTYPES, SHAPES, times=3))
def test_linear_is_what_its_scheme_says(case):
    name, dtype, shape = case
    scheme = SCHEMES[name]
    torch.manual_seed(0)
    layer = packed_module(
        nn.Linear(64 if scheme.sparsity or scheme.weight in (INT4, Q4_0, Q8_0) else 48, 24), scheme
    ).to(dtype)
    x = torch.randn(*shape[:-1], layer.k).to(dtype)
    assert_near(layer(x), oracle(layer, x), dtype, rounds_twice(scheme))


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(64, 24), lambda: nn.Conv2d(64, 8, 3, padding=1)]
)
@pytest.mark.parametrize("pattern", [None, TWO_OF_FOUR], ids=str)
def test_int4_gives_the_bits_of_the_int8_layer_that_it_is(make, pattern):
    torch.manual_seed(4)
    dense = make()
    layer = packed_module(dense, Scheme(INT4, PerChannel(), pattern, STATIC))
    twin = pack_module("twin", Scheme(INT8, PerChannel(), pattern, STATIC), dense, None)
    codes = integer_codes(layer.codes.flatten(1), layer.weight_group)
    twin.fill("weight", codes.reshape(twin.codes.shape))
    twin.weight_scale, twin.input_scale = layer.weight_scale, layer.input_scale
    twin.weight_meta = layer.weight_meta
    x = torch.randn(3, 64, 9, 7) if dense.weight.ndim == 4 else torch.randn(3, 64)
    assert torch.equal(layer(x), twin(x))
    assert torch.equal(layer.dequantized(), twin.dequantized())


@pytest.mark.parametrize("case", turned(SCHEMES, CONVS, times=2))
def test_conv_is_what_its_scheme_says(case):
    scheme, options = SCHEMES[case[0]], CONVS[case[1]]
    torch.manual_seed(1)
    layer = packed_module(nn.Conv2d(32, 24, **options), scheme)
    x = torch.randn(2, 32, 9, 7)
    assert_near(layer(x), oracle(layer, x), torch.float32, rounds_twice(scheme))


@pytest.mark.parametrize("options", CONVS.values(), ids=CONVS.keys())
def test_conv_agrees_with_torch_on_exact_numbers(options):
    # Small integers are exact in e4m3fn, at scale 1, and in float32 sums: equality, no tolerance.
    torch.manual_seed(2)
    dense = nn.Conv2d(32, 16, **options)
    dense.weight.data = torch.randint(-8, 9, dense.weight.shape).float()
    dense.bias.data = torch.randint(-8, 9, (16,)).float()
    layer = pack_module("conv", Scheme(E4M3FN, PerTensor(), None, STATIC), dense, None)
    layer.fill("weight", dense.weight.detach().permute(0, 2, 3, 1).to(torch.float8_e4m3fn))
    for part in ("weight_scale", "input_scale"):
        layer.fill(part, torch.ones(()))
    x = torch.randint(-8, 9, (2, 32, 8, 9)).float()
    assert torch.equal(layer(x), dense(x))
    assert torch.equal(layer(x[0]), dense(x[0]))


@pytest.mark.parametrize("make", [lambda: nn.Linear(32, 8), lambda: nn.Conv2d(32, 8, 3, padding=1)])
def test_layers_take_any_layout_and_no_rows(make):
    layer = packed_module(make(), SCHEMES["token"])
    shape = (2, 32, 6, 4) if layer.kind == "conv2d" else (2, 6, 4, 32)
    x = torch.randn(shape)
    strided = torch.randn(*(2 * s for s in shape))[tuple([slice(None, None, 2)] * 4)]
    strided.copy_(x)
    assert not strided.is_contiguous()
    assert torch.equal(layer(strided), layer(x))
    if layer.kind == "conv2d":
        last = layer(x.to(memory_format=torch.channels_last))
        assert torch.equal(last, layer(x))
        assert layer(x).is_contiguous()
        assert last.is_contiguous(memory_format=torch.channels_last)
    assert layer(x[:0]).shape == (0, *layer(x).shape[1:])
    assert torch.isfinite(layer(torch.zeros_like(x))).all()


def test_layers_refuse_inputs_that_do_not_fit():
    linear = packed_module(nn.Linear(32, 8), SCHEMES["token"], name="a.to_q")
    with pytest.raises(ShapeError, match=r"a\.to_q: input \[2, 31\], expected \(\.\.\., 32\)"):
        linear(torch.zeros(2, 31))
    conv = packed_module(nn.Conv2d(32, 8, 1), SCHEMES["static"], name="b.conv")
    with pytest.raises(ShapeError, match=r"b\.conv: input \[1, 16, 4, 4\]"):
        conv(torch.zeros(1, 16, 4, 4))


@pytest.mark.parametrize(
    ("dense", "text"),
    [
        (nn.Conv2d(32, 32, 3, padding_mode="reflect"), "c: Conv2d with padding_mode 'reflect'"),
        (nn.Conv2d(32, 32, 3, groups=2), "c: Conv2d with padding_mode 'zeros' and groups 2"),
        (nn.Conv1d(32, 32, 3), "c: the model has a Conv1d here, expected Linear or Conv2d"),
    ],
)
def test_modules_that_cannot_be_packed_are_refused(dense, text):
    with pytest.raises(CheckpointError, match=text):
        pack_module("c", SCHEMES["token"], dense, None)


def same_bytes(a, b):
    a, b = (t.reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.float(),
        lambda m: m.double().to(torch.bfloat16),
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.type(torch.float16),
        lambda m: m.share_memory(),
        lambda m: m.to(torch.float8_e5m2).to(torch.float16),
        lambda m: pickle.loads(pickle.dumps(m)),
        copy.deepcopy,
    ],
)
@pytest.mark.parametrize("name", ["static-smooth-sparse", "static-e5m2"])
def test_codes_and_scales_survive_every_cast(name, change):
    layer = packed_module(nn.Conv2d(32, 8, 3), SCHEMES[name])
    before = {n: t.clone() for n, t in layer.state_dict().items() if n != "bias"}
    changed = change(nn.Sequential(layer))[0]
    after = changed.state_dict()
    assert after.keys() - {"bias"} == before.keys() >= {"weight", "weight_scale", "input_scale"}
    assert all(type(p) is Codes for n, p in changed.named_parameters() if n != "bias")
    for part, tensor in before.items():
        assert after[part].dtype == tensor.dtype
        assert after[part].is_contiguous()
        assert after[part].shape == tensor.shape
        assert same_bytes(after[part], tensor)


class OfEach(nn.ModuleList):
    """What each of several layers gives."""

    def forward(self, x):
        return torch.stack([layer(x) for layer in self])


@pytest.mark.parametrize(("kind", "dynamic"), [("linear", False), ("conv", True)])
def test_layers_compile_without_a_graph_break(kind, dynamic):
    dense = nn.Linear(32, 8) if kind == "linear" else nn.Conv2d(32, 8, 3, 2, 1)
    layers = OfEach(packed_module(dense, scheme) for scheme in SCHEMES.values())
    x = torch.randn(2, 32, 8, 32)
    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(x), layers(x))
    if dynamic:
        wider = torch.randn(3, 32, 12, 32)
        assert torch.equal(compiled(wider), layers(wider))


class Denoiser(nn.Module):
    """A root with a forward like diffusers' and one layer per set of edges."""

    def __init__(self, *edges, token_below=None):
        super().__init__()
        schemes = [
            Scheme(E4M3FN, PerTensor(), None, STATIC, e, token_below=token_below) for e in edges
        ]
        self.shared = timestep_buckets.install(self, {s.schedule for s in schemes})
        self.layers = nn.ModuleList(
            packed_module(nn.Linear(32, 8), s, buckets=self.shared[s.schedule]) for s in schemes
        )

    def forward(self, sample, timestep, scale=1.0):
        return [layer(sample) * scale for layer in self.layers]


EDGES = (250.0, 500.5, 999.0)


@pytest.mark.parametrize(
    ("timestep", "bucket"),
    [(0, 0), (249.99, 0), (250, 1), (500, 1), (500.5, 2), (998, 2), (999, 3), (1e6, 3), (-1.0, 0)],
)
@pytest.mark.parametrize("form", ["number", "keyword", "scalar", "batch", "int64"])
def test_the_root_picks_the_bucket(timestep, bucket, form):
    from quantkit.models.timestep import bucket_of

    model = Denoiser(EDGES, (10.0,)).half()
    x = torch.randn(4, 32)
    value = torch.tensor(timestep)
    if form == "int64":
        timestep, value = int(timestep), value.long()
    if form == "number":
        got = model(x, timestep)
    elif form == "keyword":
        got = model(sample=x, timestep=value)
    else:
        got = model(x, value if form != "batch" else value.expand(4))
    assert form == "int64" or bucket_of(timestep, EDGES) == bucket
    layers: Any = model.layers
    for layer, y in zip(layers, got, strict=True):
        index = bucket_of(timestep, layer.scheme.buckets)
        single = packed_module(nn.Linear(32, 8), Scheme(E4M3FN, PerTensor(), None, STATIC))
        single.load_state_dict(layer.state_dict() | {"input_scale": layer.input_scale[index]})
        assert torch.equal(y, single(x))


def test_buckets_compile_leave_no_state_and_survive_copies():
    model = Denoiser(EDGES)
    assert not [name for name in model.state_dict() if "buckets" in name]
    twin = copy.deepcopy(model)
    x = torch.randn(3, 32)
    low, high = model(x, 0.0)[0], model(x, torch.tensor(999.0))[0]
    assert not torch.equal(low, high)
    assert torch.equal(twin(x, torch.tensor(999))[0], high)
    assert torch.equal(twin.layers[0](x), high)
    child: Any = model.half().get_submodule(timestep_buckets.CHILD)
    assert child[0].edges.dtype == torch.float64
    torch._dynamo.reset()
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for t in (0.0, 400.0, 999.0):
        assert torch.equal(compiled(x, torch.tensor(t))[0], twin(x, torch.tensor(t))[0])


def _draws(model, timesteps):
    """Call a model from a thread per timestep at the same time; return what each thread saw."""
    x, seen = torch.randn(3, 32), {t: [] for t in timesteps}
    expected = {t: model(x, torch.tensor(t))[0] for t in timesteps}
    start = threading.Barrier(len(timesteps))

    def call(timestep):
        start.wait()
        for _ in range(100):
            seen[timestep].append(model(x, torch.tensor(timestep))[0])

    threads = [threading.Thread(target=call, args=(t,)) for t in timesteps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(found) == 100 for found in seen.values())
    return [torch.equal(y, expected[t]) for t, found in seen.items() for y in found]


@pytest.mark.parametrize("compiled", ["not", "whole"])
def test_threads_have_buckets_of_their_own(compiled):
    torch._dynamo.reset()
    model: Any = Denoiser(EDGES, (10.0, 600.0))
    if compiled == "not":
        # Let another thread in between what the root's hook writes and what the layer reads.
        model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(1e-4))
    if compiled == "whole":
        model = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert all(_draws(model, (0.0, 400.0, 999.0)))


def test_compiled_blocks_serve_one_thread_at_a_time():
    torch._dynamo.reset()
    model, x = Denoiser(EDGES, (10.0,)), torch.randn(3, 32)
    wanted = [model(x, torch.tensor(t))[0] for t in (0.0, 400.0, 999.0)]
    model.layers[0].compile(fullgraph=True, backend="aot_eager")
    for t, y in zip((0.0, 400.0, 999.0), wanted, strict=True):
        assert torch.equal(model(x, torch.tensor(t))[0], y)
    inside, done, errors = threading.Event(), threading.Event(), []

    def wait(*_):
        inside.set()
        assert done.wait(30)

    handle = model.layers[1].register_forward_pre_hook(wait)
    other = threading.Thread(target=lambda: errors.append(model(x, torch.tensor(0.0))[0]))
    other.start()
    assert inside.wait(30)
    with pytest.raises(InputError, match="two threads at the same time"):
        model(x, torch.tensor(999.0))
    done.set()
    other.join()
    handle.remove()
    assert torch.equal(errors[0], wanted[0])
    assert torch.equal(model(x, torch.tensor(999.0))[0], wanted[2])


@pytest.mark.parametrize("edges", [EDGES, ()], ids=str)
def test_a_layer_alone_has_no_bucket(edges):
    with pytest.raises(InputError, match="call the denoiser instead"):
        Denoiser(edges, token_below=None if edges else 50.0).layers[0](torch.randn(3, 32))


def test_buckets_need_a_timestep():
    with pytest.raises(CheckpointError, match=r"Linear: .* forward with 'timestep', found input"):
        timestep_buckets.install(nn.Linear(2, 2), {Schedule(EDGES)})


def test_packed_layers_say_what_computes_them():
    model = nn.ModuleDict(
        {name.replace("-", "_"): packed_module(nn.Linear(64, 8), s) for name, s in SCHEMES.items()}
    )
    model["odd"] = packed_module(nn.Linear(20, 8), SCHEMES["token"])
    model["dense"] = nn.Linear(4, 4)
    infos = {info.name: info for info in packed_layers(model)}
    assert infos.keys() == model.keys() - {"dense"}
    assert infos["none"].backend == infos["int4_none"].backend == infos["token"].backend
    assert "more than 64 rows, or in float32" in infos["none"].reason
    assert infos["none_smooth_sparse"].backend == "dequantized"
    assert "no kernel multiplies them by 2:4 weights" in infos["none_smooth_sparse"].reason
    assert infos["odd"].backend == infos["group"].backend == "reference"
    assert "20 is not a multiple of 16" in infos["odd"].reason
    assert "group" in infos["group"].reason
    with use(Backend.REFERENCE):
        assert {i.backend for i in packed_layers(model)} == {"dequantized", "reference"}
    with log.record() as record:
        model["token"](torch.randn(2, 64))
    assert {key[2].value for key in record.calls} == {infos["token"].backend}


def test_watch_measures_against_reference_and_dense():
    torch.manual_seed(3)
    dense = nn.ModuleDict({"a": nn.Linear(64, 32), "b": nn.Conv2d(32, 16, 3)})
    packed = nn.ModuleDict({n: packed_module(m, SCHEMES["token"]) for n, m in dense.items()})
    with watch(packed, dense=dense.half(), sample_every=2) as seen:
        for _ in range(3):
            packed["a"](torch.randn(4, 64))
        packed["b"](torch.randn(1, 32, 8, 8))
    a, b = seen.layers["", "a"], seen.layers["", "b"]
    assert (a.calls, a.watched, b.calls, b.watched) == (3, 2, 1, 1)
    assert a.kernel < 1e-4  # float32 sums in another order
    # e4m3fn with 3 mantissa bits on both sides: about 2**-4 / sqrt(3) * sqrt(2) per product
    assert 0.01 < a.dense < 0.08
    assert 0.01 < b.dense < 0.08
    assert seen.worst_kernel[0] in seen.layers
    packed["a"](torch.randn(4, 64))
    assert a.calls == 3


def test_watch_sees_a_wrong_scale(monkeypatch):

    right = execute.call

    def wrong(op, x, scale, *rest):
        off = 1.01 if op.family == "gemm" and not forced() else 1
        return right(op, x, scale if scale is None else scale * off, *rest)

    monkeypatch.setattr(execute, "call", wrong)
    layer = nn.Sequential(packed_module(nn.Linear(32, 8, bias=False), SCHEMES["token"]))
    with watch(layer) as seen:
        layer(torch.ones(2, 32))
    assert 0.005 < seen.layers["", "0"].kernel < 0.05
    assert seen.layers["", "0"].dense is None


def forced():
    from quantkit.device.choosing import choose

    return choose("gemm_fp8", torch.device("cpu"), k=32).reason == "asked for"


HOOK = """
import sys
from pathlib import Path
{before}
import quantkit
loaded = set(sys.modules)
{after}
from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING as tables
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as text
from diffusers import DiffusionPipeline
print("quantkit" in tables, "quantkit" in text,
      hasattr(DiffusionPipeline.from_pretrained.__func__, "quantkit_original"),
      bool({{"torch", "diffusers", "transformers", "numpy"}} & loaded))
"""
IMPORTS = (
    "import diffusers.quantizers, transformers.quantizers.auto, diffusers.pipelines.pipeline_utils"
)
THREADS = """
import threading
names = ["diffusers.quantizers.auto", "transformers.quantizers.auto", "diffusers.quantizers"] * 3
threads = [threading.Thread(target=__import__, args=(name,)) for name in names]
[t.start() for t in threads]; [t.join() for t in threads]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "heavy"),
    [("", THREADS, False), (IMPORTS, "", True)],
    ids=["before-in-threads", "after"],
)
def test_importing_quantkit_is_enough(before, after, heavy):
    code = HOOK.format(before=before, after=after)
    out = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:quantkit", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.split() == ["True", "True", "True", str(heavy)]


def test_importing_quantkit_loads_only_itself():
    code = (
        "import sys; old = set(sys.modules); import quantkit; "
        "print(*{n.split('.')[0] for n in set(sys.modules) - old})"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert out.stdout.split() == ["quantkit"]
