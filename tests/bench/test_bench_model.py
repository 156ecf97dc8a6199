"""The model benchmark: configs, inputs, packing and loading on the way, judging, the profile."""

import gc
import gzip
import json
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
from click.testing import CliRunner
from diffusers.configuration_utils import FrozenDict
from torch import nn

from quantkit.bench.kernels import compiled_blocks, timing
from quantkit.bench.kernels.compiled_blocks import outside_blocks, with_shared_weights
from quantkit.bench.kernels.figures import Verdict
from quantkit.bench.kernels.timing import TimingPlan
from quantkit.bench.kernels.torchao_dynamic import short_layers
from quantkit.bench.models import judging
from quantkit.bench.models import model_benchmark as bench_model
from quantkit.bench.models.denoiser_inputs import first_tensor, make_inputs
from quantkit.bench.models.denoisers import DENOISERS, build_denoiser, find_denoiser
from quantkit.bench.models.model_benchmark import run_model_bench
from quantkit.bench.models.model_contenders import MODEL_CONTENDERS
from quantkit.bench.models.model_result import ModelBenchSettings
from quantkit.bench.models.packed_copies import PackedVariant, convolutions
from quantkit.bench.models.profiling import GROUPS, IDLE, group_of, own_shares, profile_step
from quantkit.cli.bench_model_command import model_command
from quantkit.device import backends
from quantkit.device.ops import call as execute
from quantkit.device.ops.op import all_variants
from quantkit.device.ops.table import OPS
from quantkit.errors import InputError, ModelError
from tests.support.denoiser_classes import ROWS
from tests.support.pipelines import tiny_flux_pipeline, tiny_unet

CPU = torch.device("cpu")
#: Name -> keys_*.json.gz, whose config was checked against the published number of parameters.
PUBLISHED = {
    "sdxl": "sdxl",
    "flux": "flux1_dev",
    "sd15": "sd15",
    "sd3": "sd3_medium",
    "pixart": "pixart_sigma",
    "sana": "sana_1600m",
    "flux2": "flux2_dev",
    "chroma": "chroma1_hd",
    "qwenimage": "qwen_image",
    "zimage": "z_image",
    "wan": "wan22_t2v_14b",
    "ltx": "ltx_video",
}


@pytest.fixture(autouse=True)
def _once(monkeypatch):
    """Measure one round: times are not under test."""
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 1)


def quiet(step, done, total):
    pass


@pytest.fixture(scope="module")
def flux_dir(tmp_path_factory):
    return tiny_flux_pipeline(tmp_path_factory.mktemp("bench") / "flux")


def run(folder, *names, size=4, **options):
    settings = ModelBenchSettings(batch=1, size=size, **options)
    contenders = [MODEL_CONTENDERS[name] for name in names]
    plan = TimingPlan(0, 5, 0)
    return run_model_bench(
        find_denoiser(str(folder)), contenders, settings, CPU, plan, threads=1, progress=quiet
    )


@pytest.mark.parametrize("name", DENOISERS)
def test_configs_are_the_published_ones(name):
    path = Path(__file__).parents[1] / "golden" / f"keys_{PUBLISHED[name]}.json.gz"
    published = json.loads(gzip.decompress(path.read_bytes()))
    assert DENOISERS[name].config == published["config"]
    assert DENOISERS[name].class_name == published["class_name"]


@pytest.mark.parametrize("name", DENOISERS)
def test_blocks_hold_nearly_all_weights(name):
    with torch.device("meta"):
        model = getattr(diffusers, DENOISERS[name].class_name)(**DENOISERS[name].config)
    outside = outside_blocks(model)
    weights = {n: p.numel() for n, p in model.named_parameters()}
    left = sum(size for n, size in weights.items() if n.rpartition(".")[0] in outside)
    assert left < 0.04 * sum(weights.values())


def test_models_without_blocks_are_not_called_compiled():
    with pytest.raises(ModelError, match="Linear: no list of blocks; `--compile whole`"):
        compiled_blocks.compile_blocks(nn.Linear(2, 2))


@pytest.mark.usefixtures("_host")
def test_packed_models_are_right_and_smaller(unet_dir):
    result = run(unet_dir, "f16", "fp8", "sparse", "fp8-linear", "fp8-static")
    rows = {row.contender: row for row in result.rows}
    assert not result.wrong
    assert all(row.timing.p50_us > 0 for row in rows.values())
    size = {name: row.of_f16 for name, row in rows.items()}
    assert size["f16"] == 1
    assert size["sparse"] < size["fp8"] < size["fp8-linear"] < 1
    linear, everything = (rows[name].calls["gemm_fp8 host"] for name in ("fp8-linear", "fp8"))
    assert 0 < linear < everything
    assert set(rows["sparse"].calls) == {"gemm_fp8_sparse host", "quantize_fp8_token host"}
    static, products = rows["fp8-static"].calls, {"gemm_fp8 host", "conv_fp8 host"}
    assert set(static) == {*products, "quantize_fp8_static host"}
    # Per token, 3x3 convolutions keep 16-bit inputs.
    assert everything < sum(static[name] for name in products)
    assert rows["f16"].calls == {}


@pytest.mark.usefixtures("_host")
def test_integers_are_packed_without_statistics(unet_dir):
    result = run(unet_dir, "int8", "w4a8")
    assert all(row.timing for row in result.rows), result.rows


@pytest.mark.usefixtures("_host")
def test_fused_projections_are_one_product(unet_dir):
    (apart,) = run(unet_dir, "fp8-static").rows
    dense, joined = (result := run(unet_dir, "f16", "fp8-static", fuse_projections=True)).rows
    assert not result.wrong
    # Three products become one in self-attention, two in cross-attention; memory stays.
    products = "gemm_fp8 host"
    blocks = sum(n.endswith("attn1") for n, _ in tiny_unet().named_modules())
    assert joined.calls[products] == apart.calls[products] - 3 * blocks
    assert joined.weight_bytes == pytest.approx(apart.weight_bytes, rel=0.02)
    # diffusers keeps what it joined, too.
    assert dense.of_f16 > 1


def test_models_without_convolutions_say_so(flux_dir):
    result = run(flux_dir, "f16", "fp8-linear")
    dense, packed = result.rows
    assert dense.timing
    assert packed.verdict is Verdict.CANNOT
    assert packed.reason == "no convolutions in this model: the same as fp8"


def test_missing_libraries_say_so(unet_dir, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    (row,) = run(unet_dir, "torchao-compiled").rows
    assert row.verdict is Verdict.CANNOT
    assert "torchao" in row.reason


def test_steps_that_cannot_be_captured_say_so(unet_dir, monkeypatch):
    def refuse(*_):
        raise RuntimeError("operation failed during capture")

    monkeypatch.setattr(bench_model, "_called", lambda model, *_: model)
    monkeypatch.setattr(bench_model, "captured", refuse)
    first, second = run(unet_dir, "f16-compiled", "f16", graph=True).rows
    assert first.verdict is Verdict.CANNOT
    assert first.reason == "in a CUDA graph: RuntimeError: operation failed during capture"
    assert second.timing


def test_captured_steps_keep_what_they_read(monkeypatch):
    made = weakref.ref(module := nn.Linear(4, 4))
    recording = SimpleNamespace(launch=lambda: None, output=torch.ones(2))
    monkeypatch.setattr(compiled_blocks, "run_aside", lambda *_: None)
    monkeypatch.setattr(compiled_blocks, "capture", lambda *_: recording)
    step = compiled_blocks.captured(partial(module, torch.ones(2, 4)), torch.device("cuda"))
    del module
    gc.collect()
    assert made() is not None
    assert step() is recording.output


def test_layers_of_few_rows_are_left_to_torchao_in_16_bit():
    wide, short, unused = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
    model = nn.ModuleDict({"wide": wide, "short": short, "unused": unused})
    found = short_layers(model, lambda: (wide(torch.ones(1, 17, 8)), short(torch.ones(2, 8, 8))))
    assert found == {"short"}
    assert not any(m._forward_pre_hooks for m in model.values())


def test_layers_outside_blocks_are_those_that_stay_uncompiled(flux_dir):
    model = build_denoiser(find_denoiser(str(flux_dir)), CPU)
    inside = {n for n, _ in model.named_modules()} - outside_blocks(model)
    assert inside
    assert all(n.startswith(("transformer_blocks.", "single_transformer_blocks.")) for n in inside)
    assert "x_embedder" in outside_blocks(model)


@pytest.mark.parametrize("spoil", [torch.zeros_like, lambda y: y * torch.nan])
def test_wrong_models_are_not_timed(unet_dir, monkeypatch, spoil):
    original = bench_model._called
    monkeypatch.setattr(
        bench_model,
        "_called",
        lambda model, *rest: lambda **kw: (spoil(original(model, *rest)(**kw)[0]),),
    )
    (row,) = (result := run(unet_dir, "f16")).rows
    assert row.verdict is Verdict.WRONG
    assert row.timing is None
    assert result.wrong == (row,)


@pytest.mark.usefixtures("_host")
def test_fast_contenders_run_under_fast_sums(unet_dir, monkeypatch):
    seen = []

    def uncompiled(model, *_):
        def call(**inputs):
            seen.append(backends.sums_are_fast())
            return model(**inputs)

        return call

    monkeypatch.setattr(bench_model, "_called", uncompiled)
    fast, usual = run(unet_dir, "fp8-static-fast-compiled", "fp8-static-compiled").rows
    assert fast.timing
    assert usual.timing
    assert set(seen) == {True, False}
    assert seen[0]
    assert not backends.sums_are_fast()


def test_interrupts_leave_what_is_ready(unet_dir, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_model, "quantize", interrupt)
    first, second, third = run(unet_dir, "f16", "torchao-compiled", "fp8").rows
    assert first.timing
    assert (second.reason, third.reason) == ("interrupted before it was ready",) * 2


def test_copies_share_their_weights(unet_dir):
    model = build_denoiser(find_denoiser(str(unet_dir)), CPU)
    copied = with_shared_weights(model)
    assert copied is not model
    assert {p.data_ptr() for p in copied.parameters()} == {p.data_ptr() for p in model.parameters()}


def test_recipes_keep_convolutions_where_asked(unet_dir):
    from quantkit.bench.models.packed_copies import Source

    model = build_denoiser(find_denoiser(str(unet_dir)), CPU)
    source = Source(unet_dir, model, lambda: None, quiet)
    recipe = source.recipe(PackedVariant(sparse=True, linear_only=True))
    assert set(convolutions(model)) <= set(recipe.keep)
    assert recipe.sparsity.method == "magnitude"


def test_weights_and_inputs_are_the_same_every_time(unet_dir):
    first, second = (build_denoiser(find_denoiser(str(unet_dir)), CPU) for _ in range(2))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert {p.dtype for p in first.parameters()} == {torch.float16}
    a, b = (make_inputs(first, 1, 8, CPU) for _ in range(2))
    assert torch.equal(a["sample"], b["sample"])
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "no config.json"),
        ("{", "not JSON"),
        (
            '{"_class_name": "AutoencoderKL"}',
            "AutoencoderKL, expected a denoiser of the installed diffusers",
        ),
        ('{"_class_name": "DDIMScheduler"}', "class DDIMScheduler, expected a denoiser"),
        ('{"_class_name": "os.path"}', "class os.path, expected a denoiser"),
        ("{}", "class None"),
        ('{"_class_name": "UNet2DConditionModel", "down_block_types": ["No"]}', "config.json"),
    ],
)
def test_damaged_configs_are_named(tmp_path, content, match):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=match):
        build_denoiser(find_denoiser(str(tmp_path)), CPU)


def test_unknown_configs_are_refused():
    expected = (
        r"sd4: unknown, expected sdxl, .*, ltx, a directory, .* or a denoiser class of diffusers"
    )
    with pytest.raises(ModelError, match=expected):
        find_denoiser("sd4")


def test_classes_are_built_by_default():
    found = find_denoiser("AuraFlowTransformer2DModel")
    assert (found.class_name, found.config) == ("AuraFlowTransformer2DModel", {})


def test_hub_ids_are_looked_for_in_the_cache(unet_dir, monkeypatch):
    places = {"owner/unet": unet_dir}
    monkeypatch.setattr("quantkit.bench.models.denoisers.cached", places.get)
    assert find_denoiser("owner/unet").class_name == "UNet2DConditionModel"
    with pytest.raises(ModelError, match="owner/other: unknown"):
        find_denoiser("owner/other")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.class_name)
def test_every_class_runs_with_its_inputs(row, tmp_path):
    model = build_denoiser(written(tmp_path, row.class_name, row.config), CPU)
    with torch.no_grad():
        found = first_tensor(model(**make_inputs(model, 2, 8, CPU)))
    assert len(found) == 2
    assert found.isfinite().all()
    assert found.any()


def written(folder, class_name, config):
    """A denoiser as a config.json describes it."""
    (folder / "config.json").write_text(json.dumps({"_class_name": class_name, **config}))
    return find_denoiser(str(folder))


@pytest.mark.usefixtures("_host")
@pytest.mark.parametrize(
    "class_name",
    # Tokens, a video, a sound, experts, no return_dict, weights kept in float32.
    [
        "AuraFlowTransformer2DModel",
        "CogVideoXTransformer3DModel",
        "Kandinsky5Transformer3DModel",
        "NucleusMoEImageTransformer2DModel",
        "QwenImageTransformer2DModel",
        "StableAudioDiTModel",
        "UVit2DModel",
        "ZImageTransformer2DModel",
    ],
)
def test_classes_without_a_row_are_measured(class_name, tmp_path):
    (row,) = (row for row in ROWS if row.class_name == class_name)
    written(tmp_path, class_name, row.config)
    result = run(tmp_path, "f16", "fp8", "int8", size=8)
    assert all(row.timing for row in result.rows), result.rows
    products = [{"gemm_fp8 host"} <= set(row.calls) for row in result.rows]
    assert products == [False, True, False]
    assert "gemm_int8 host" in result.rows[2].calls


def test_a_vector_that_its_class_leaves_unwritten_is_filled(tmp_path):
    (row,) = (row for row in ROWS if row.class_name == "LuminaNextDiT2DModel")
    model = build_denoiser(written(tmp_path, row.class_name, row.config), CPU)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


#: config -> what no input is known for
UNKNOWN = {
    "Ideogram4Transformer2DModel": "no inputs are known for indicator, position_ids, segment_ids",
    "LongCatAudioDiTTransformer": "config has none of in_channels",
}


@pytest.mark.parametrize("class_name", UNKNOWN)
def test_classes_without_inputs_name_what_is_missing(class_name):
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, class_name)()
    with pytest.raises(ModelError, match=UNKNOWN[class_name]) as refused:
        make_inputs(model, 1, 8, CPU)
    assert "\n" not in str(refused.value)


class _OpenEnded(torch.nn.Module):
    config = FrozenDict(in_channels=4)
    dtype = torch.float32

    def forward(self, hidden_states, timestep, *args, **kwargs):
        """Of diffusers' classes HiDream's ended so until 0.40."""


def test_arguments_without_a_name_need_no_inputs():
    assert set(make_inputs(_OpenEnded(), 1, 8, CPU)) == {"hidden_states", "timestep"}


def test_inputs_that_a_config_does_not_take_are_one_line(tmp_path):
    (row,) = (row for row in ROWS if row.class_name == "Lumina2Transformer2DModel")
    # Places of fewer tokens than a prompt has.
    written(tmp_path, row.class_name, {**row.config, "axes_lens": (32, 32, 32)})
    with pytest.raises(ModelError, match="no step runs at --batch 1 and --size 4") as refused:
        run(tmp_path, "f16")
    assert "\n" not in str(refused.value)


# ------------------------------------------------------------------------------------ the profile


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("gemm_fp8_e4m3fn_e4m3fn_token_channel_f16_t0", "quantkit products"),
        ("gemm_fp8_sparse_sm90_e4m3fn_e4m3fn_token_channel_f16_fast_c128x192", "quantkit products"),
        ("quantkit::gemm_fp8_sparse", "quantkit products"),
        ("conv_fp8_sm90_e4m3fn_e4m3fn_tensor_channel_f16_accurate_c128x160", "quantkit products"),
        (
            "geglu_fp8_sm90_e4m3fn_e4m3fn_tensor_channel_f16_e4m3fn_fast_p128x160",
            "quantkit products",
        ),
        ("quantkit::conv_fp8", "quantkit products"),
        ("quantize_fp8_token_f16_e4m3fn", "quantize"),
        ("quantkit::quantize_fp8_static", "quantize"),
        ("sm90_xmma_fprop_implicit_gemm_f16f16_f16f32", "convolutions"),
        ("void cudnn::ops::nchwToNhwcKernel<__half>", "convolutions"),
        ("aten::mkldnn_convolution", "convolutions"),
        ("triton_poi_fused_convolution_silu_3", "elementwise and copies"),
        ("triton_red_fused_native_group_norm_0", "norms"),
        ("void at::native::RowwiseMomentsCUDAKernel<c10::Half>", "norms"),
        ("void at::native::vectorized_layer_norm_kernel", "norms"),
        ("void at::native::GroupNormKernelImpl<c10::Half>", "norms"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", "attention"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "library products"),
        ("aten::addmm", "library products"),
        ("Memcpy DtoD (Device -> Device)", "elementwise and copies"),
        ("void at::native::elementwise_kernel<128, 4>", "elementwise and copies"),
        ("aten::copy_", "elementwise and copies"),
    ],
)
def test_kernels_are_put_in_their_group(kernel, group):
    assert group_of(kernel) == group
    assert group in {name for name, _ in GROUPS}


#: Group -> families of operations whose time is sought there.
_FAMILIES = {
    "quantkit products": (
        *("gemm", "gemm_residual", "gemm_w16", "conv", "conv_residual", "geglu"),
        *("project_codes", "project_values", "project_heads", "project_gelu"),
    ),
    "quantize": ("quantize_static", "quantize_token", "quantize_windows"),
    "norms": ("group_partials", "group_norm", "group_norm_codes"),
    "attention": (
        *("attention", "attention_f16", "attention_codes"),
        *("head_codes", "stream_codes", "joint_heads", "head_partials", "head_factors"),
        *("value_codes", "value_codes_f16"),
    ),
    # Observers are no part of a step.
    "elementwise and copies": ("observe_columns", "observe_pictures"),
}


def test_kernels_and_operators_of_ours_are_in_the_group_of_their_family():
    for op in OPS.values():
        (expected,) = (group for group, families in _FAMILIES.items() if op.family in families)
        symbols = {variant.symbol for variant in all_variants(op)}
        others = {f"{op.name}_sm90_e4m3fn", f"quantkit::{op.name}"}
        assert {group_of(name) for name in symbols | others} == {expected}, op.name


def test_profiles_add_up_and_find_products():
    x = torch.randn(512, 512)
    profile = profile_step(lambda: x @ x, CPU)
    found = profile.groups
    assert next(iter(found)) == "library products"
    assert all(ms >= 0 for ms in found.values())
    assert "mm" in profile.kernels[0].name
    assert sum(kernel.ms for kernel in profile.kernels) == pytest.approx(
        sum(found.values()) - found[IDLE]
    )


@pytest.mark.parametrize(
    ("spans", "shares"),
    [
        ([], []),
        ([(2, 5)], [3]),
        ([(0, 3), (4, 6)], [3, 2]),
        # The second one waits for the first, the third one for both.
        ([(0, 10), (4, 12), (5, 15)], [10, 2, 3]),
        ([(4, 12), (0, 10)], [2, 10]),
        ([(0, 10), (2, 3), (10, 11)], [10, 0, 1]),
    ],
    ids=["none", "one", "apart", "waiting", "in any order", "inside"],
)
def test_kernels_that_wait_for_others_count_from_their_end(spans, shares):
    assert own_shares(spans) == shares


# ---------------------------------------------------------------------------------- the command


@pytest.mark.usefixtures("_host")
def test_the_command_writes_its_figures(unet_dir, tmp_path):
    saved = tmp_path / "m.json"
    arguments = [
        "--config",
        str(unet_dir),
        "--size",
        "4",
        "--device",
        "cpu",
    ]
    arguments += ["--seconds", "0", "--contenders", "f16", "--contenders", "fp8-linear"]
    arguments += ["--batch", "1", "--profile", "--channels-last", "--in-a-row", "3"]
    done = CliRunner().invoke(model_command, [*arguments, "--save", str(saved)])
    assert done.exit_code == 0, done.output
    assert "milliseconds of one step" in done.output
    values = json.loads(saved.read_text())
    assert (values["schema"], values["schema_version"]) == ("quantkit.model.bench", 1)
    assert [row["contender"] for row in values["rows"]] == ["f16", "fp8-linear"]
    assert values["settings"] == {
        "batch": 1,
        "size": 4,
        "compile_blocks": False,
        "graph": False,
        "profile": True,
        "channels_last": True,
        "fuse_projections": False,
        "attention": [],
        "min_keys": 512,
        "static_scales": False,
        "in_a_row": 3,
    }
    assert "3 steps in a row, waited for once: ms per step" in done.output
    for row in values["rows"]:
        assert 0 < row["in_a_row"]["host_us"] <= row["in_a_row"]["p50_us"]
    dense, packed = (row["profile"] for row in values["rows"])
    assert {"name", "calls", "ms"} == set(values["rows"][0]["kernels"][0])
    assert packed["quantkit products"] > 0
    assert "quantkit products" not in dense
    assert dense["library products"] > 0


def test_unknown_contenders_are_refused():
    done = CliRunner().invoke(model_command, ["--contenders", "int4"])
    assert isinstance(done.exception, InputError)
    assert "expected one of f16" in str(done.exception)


# ---------------------------------------------------------------------------------------- judging


def eager(output, worst=0.0):
    return judging.Eager(torch.tensor(output), worst)


@pytest.mark.parametrize(
    ("output", "worst", "right"),
    [
        ([1.0, 0.1], 0.01, True),
        # FP8 is 0.1 away from float16: as far again is noise, further is not.
        ([1.0, 0.2], 0.01, True),
        ([1.0, 0.3], 0.01, False),
        ([1.0, 0.1], 0.06, False),
        ([1.0, 0.1], float("nan"), False),
        ([1.0, float("nan")], 0.01, False),
        ([float("inf"), 0.1], 0.01, False),
        ([1.0, 0.1, 0.0], 0.01, False),
    ],
)
def test_packed_models_are_judged_by_layer_and_by_noise(output, worst, right):
    found = judging.judge_packed(torch.tensor(output), eager([1.0, 0.1], worst), eager([1.0, 0.0]))
    assert found.right is right


@pytest.mark.usefixtures("_host")
def test_a_wrong_layer_is_found_in_a_whole_model(unet_dir, monkeypatch):
    original = execute.call

    def off(op, *arguments):
        y = original(op, *arguments)
        wide = op.family == "gemm" and y.shape[1] == 64
        return y * 1.03 if wide and backends.is_free() else y

    monkeypatch.setattr(execute, "call", off)
    (row,) = run(unet_dir, "fp8-linear").rows
    assert row.verdict is Verdict.WRONG
    assert "allowed 0.05" in row.reason
