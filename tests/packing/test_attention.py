"""Static scales of attention, from a calibration into a packed model and out of it again."""

import json
import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

import quantkit
from quantkit.calibration.statistics.layer_statistics import load_calibration
from quantkit.checkpoint.packed_attention import CHILD
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import contents_of, verify
from quantkit.device import compilers, log
from quantkit.device.backends import Backend, use
from quantkit.errors import CheckpointError, RecipeError
from quantkit.inference.attention.attention_choices import attention_choices
from quantkit.inference.layers.head_scales import HeadScales
from quantkit.numerics.attention_scales import SHAPES
from quantkit.packing.attention_plan import static_scales
from quantkit.progress import silent
from quantkit.recipe.load import parse_recipe
from quantkit.workflow.pack import Forecast, pack
from tests.support.artefacts import attention_statistics
from tests.support.kernel_cases import need
from tests.support.packed_edit import Edit

CHOICES = "quantkit.inference.attention.attention_choices"
pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE: dict[str, Any] = {
    "name": "static",
    "attention": {"scales": "static", "min_keys": 1, "exclude": ["mid_block.*"]},
    "calibration": {"prompts": 1, "steps": 2, "batch": 1, "buckets": 2},
}


def recipe(**attention):
    section = {**RECIPE["attention"], **attention}
    return parse_recipe(json.dumps({**RECIPE, "attention": section}), where="recipe")


@pytest.fixture(scope="module")
def made(pipeline_dir, tmp_path_factory):
    """A calibration, and the pipeline packed with it."""
    folder = tmp_path_factory.mktemp("static")
    prompts = folder / "prompts.txt"
    prompts.write_text("a cat\n")
    quantkit.calibrate(
        pipeline_dir, recipe=recipe(), output=folder / "c.safetensors", prompts=prompts
    )
    quantkit.pack(
        pipeline_dir,
        recipe=recipe(),
        calibration=folder / "c.safetensors",
        output=folder / "packed",
    )
    return folder


@pytest.fixture(scope="module")
def calibration(made):
    return load_calibration(made / "c.safetensors")


@pytest.fixture
def edit(made, tmp_path):
    shutil.copytree(made / "packed" / "unet", tmp_path / "unet")
    return Edit(tmp_path / "unet")


def entry(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]["attention"]


def test_stored_scales_are_those_of_the_calibration(made, calibration):
    (component,) = open_packed(made / "packed" / "unet").components
    static = component.config.attention.static
    seen = calibration.attention["unet"]
    assert set(static) == {name for name in seen if not name.startswith("mid_block.")}
    assert 0 < len(static) < len(seen)
    for name, shape in static.items():
        wanted = static_scales(seen[name], 2.0)
        assert (shape.heads, shape.head_size) == tuple(wanted.key_mean.shape)
        for part in SHAPES:
            assert torch.equal(component.read(f"{name}.{CHILD}.{part}"), getattr(wanted, part))


def test_what_it_holds_for_the_model_are_the_models_tensors(made):
    (component,) = open_packed(made / "packed" / "unet").components
    model = UNet2DConditionModel.from_config(component.path / "config.json").state_dict()
    assert contents_of(component).tensors == {n: tuple(t.shape) for n, t in model.items()}


def test_ranges_are_those_of_all_buckets_times_the_margin(calibration):
    for seen in calibration.attention["unet"].values():
        scales = static_scales(seen, 3.0)
        weight = seen.keys.double().reshape(-1, 1, 1)
        mean = (seen.k_mean * weight).sum(0) / weight.sum()
        assert torch.allclose(scales.key_mean, mean.float(), atol=1e-6)
        assert torch.equal(scales.query_range, 3 * seen.q_amax.amax(0))
        low, high = seen.k_low.amin(0), seen.k_high.amax(0)
        farthest = torch.maximum(high - mean, mean - low).amax(dim=1)
        assert torch.allclose(scales.key_range, 3 * farthest.float(), rtol=1e-5)
        spread = torch.maximum(seen.v_high.amax(0), -seen.v_low.amin(0))
        assert (scales.value_scale * 448 / 3 < spread * 2 + 1e-6).all()


def test_zeros_get_scales_that_are_positive():
    nothing = attention_statistics()
    scales = static_scales(nothing, 1.0)
    assert all((getattr(scales, part) > 0).all() for part in ("query_range", "key_range"))
    # All ones: nothing is left of them but the mean.
    assert torch.equal(scales.key_range, torch.ones(3))
    assert torch.equal(scales.value_scale, torch.ones(3, 8))


@torch.no_grad()
def test_a_loaded_model_reads_them(made, tmp_path):
    need(compilers.host_compiler)
    pipe = quantkit.load_pipeline(made / "packed", torch_dtype=torch.float32)
    static = [m for m in pipe.unet.modules() if isinstance(m, HeadScales)]
    assert len(static) == len(entry(made / "packed" / "unet")["static"][0]["modules"])
    options = {"num_inference_steps": 1, "output_type": "np", "height": 16, "width": 16}

    def draw():
        return torch.from_numpy(
            pipe("a cat", generator=torch.Generator().manual_seed(0), **options).images
        )

    before = draw()
    pipe.unet.save_pretrained(tmp_path / "again")
    assert not verify(tmp_path / "again", progress=silent).breaches
    scales: Any = static[0]
    scales.fill("value_scale", scales.value_scale * 3)
    assert not torch.equal(draw(), before)
    with pytest.raises(CheckpointError, match="value_scale"):
        pipe.unet.save_pretrained(tmp_path / "changed")
    pipe.unet.dequantize()
    assert not any(isinstance(m, HeadScales) for m in pipe.unet.modules())


@torch.no_grad()
def test_projections_end_in_the_codes(made, monkeypatch):
    need(compilers.host_compiler)
    unet = quantkit.load_pipeline(made / "packed", torch_dtype=torch.float32).unet
    inputs = sample_of(unet, 8)

    def ask():
        with log.record() as seen:
            y = unet(*inputs).sample
        return y, {name for name, _, _ in seen.calls}

    jointly, calls = ask()
    assert {"project_heads_fp8", "attention_fp8"} <= calls
    for child in (m for m in unet.modules() if isinstance(m, HeadScales)):
        child.keep(None)
    found, calls = ask()
    assert {"project_codes_fp8", "project_values_fp8", "attention_fp8"} <= calls
    assert "project_heads_fp8" not in calls
    assert torch.equal(found, jointly)
    monkeypatch.setattr(
        "quantkit.inference.attention.attention_heads._ends_in_codes", lambda *_: False
    )
    wanted, calls = ask()
    assert not any(name.startswith("project") for name in calls)
    assert "value_codes_fp8" in calls
    assert float((found - wanted).norm() / wanted.norm()) < 1e-3


@torch.no_grad()
def test_sparse_projections_end_in_the_codes(pipeline_dir, made, tmp_path, monkeypatch):
    need(compilers.host_compiler)
    section = {**RECIPE, "sparsity": {"method": "magnitude"}}
    quantkit.pack(
        pipeline_dir,
        recipe=parse_recipe(json.dumps(section), where="recipe"),
        calibration=made / "c.safetensors",
        output=tmp_path / "sparse",
    )
    unet = quantkit.load_pipeline(tmp_path / "sparse", torch_dtype=torch.float32).unet
    inputs = sample_of(unet, 8)

    def ask():
        with log.record() as seen:
            y = unet(*inputs).sample
        calls = Counter()
        for (name, _, _), count in seen.calls.items():
            calls[name] += count
        return y, calls

    jointly, calls = ask()
    joint = calls["project_heads_fp8_sparse"]
    assert joint == sum(name.endswith("attn1") for name in static_modules(tmp_path / "sparse"))
    assert not {"project_heads_fp8", "project_values_fp8"} & set(calls)
    for child in (m for m in unet.modules() if isinstance(m, HeadScales)):
        child.keep(None)
    apart, calls = ask()
    # Queries and keys of this attention and of the text's.
    assert calls["project_codes_fp8_sparse"] == 4 * joint
    # Values are rounded to the model's type before their codes are made.
    assert float((jointly - apart).norm() / apart.norm()) < 1e-3
    monkeypatch.setattr(f"{CHOICES}.why_on_request", lambda op, device: "slower")
    monkeypatch.setattr(f"{CHOICES}.least_keys", lambda device, launch, columns: 1)
    told = attention_choices(open_packed(tmp_path / "sparse" / "unet"), torch.device("cpu"))
    on_kernel = [c.module for c in told if c.runs_on_kernel]
    assert len(on_kernel) == joint
    assert all(module.endswith("attn1") for module in on_kernel)


def static_modules(packed):
    return [module for row in entry(packed / "unet")["static"] for module in row["modules"]]


@torch.no_grad()
@pytest.mark.slow
def test_a_compiled_model_projects_in_one_launch(made):
    need(compilers.host_compiler)
    unet = quantkit.load_pipeline(made / "packed", torch_dtype=torch.float32).unet
    inputs = sample_of(unet, 8)
    wanted = unet(*inputs).sample
    torch._dynamo.reset()
    compiled = torch.compile(unet, fullgraph=True, backend="eager")
    with log.record() as seen:
        assert torch.equal(compiled(*inputs).sample, wanted)
    assert "project_heads_fp8" in {name for name, _, _ in seen.calls}


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_projections_end_in_the_codes_of_many_keys(made):
    """4096 keys in the first attention: enough on every device that has the kernel."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    unet = quantkit.load_pipeline(made / "packed", torch_dtype=torch.float16).unet.cuda()
    inputs = [t.to("cuda", torch.float16) for t in sample_of(unet, 128)]

    def ask():
        with log.record() as seen:
            y = unet(*inputs).sample
        return y, {name for name, _, where in seen.calls if where is Backend.GPU}

    found, calls = ask()
    assert {"project_heads_fp8", "attention_fp8"} <= calls
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = unet(*inputs).sample
    graph.replay()
    assert torch.equal(again, found)
    with use(Backend.GPU):
        forced, _ = ask()
        for child in (m for m in unet.modules() if isinstance(m, HeadScales)):
            child.keep(None)
        apart, calls = ask()
    assert "project_heads_fp8" not in calls
    assert torch.equal(apart, forced)
    quantkit.attention(unet, qk=None)
    wanted, calls = ask()
    assert "attention_fp8" not in calls
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.1


def sample_of(unet, side):
    """Return a UNet's inputs: latents of two pictures, a step and their texts."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, side, side, generator=generator)
    text = torch.randn(2, 77, unet.config.cross_attention_dim, generator=generator)
    return x, torch.tensor(500), text


def test_doctor_says_from_how_many_keys_projections_end_in_codes(made, monkeypatch):
    """Where a kernel runs on request alone, but for modules whose projections are one launch."""
    monkeypatch.setattr(f"{CHOICES}.why_on_request", lambda op, device: "slower")
    monkeypatch.setattr(f"{CHOICES}.least_keys", lambda device, launch, columns: 1000 + columns)
    choices = attention_choices(open_packed(made / "packed" / "unet"), torch.device("cpu"))
    found = {c.module: (c.backend, c.reason) for c in choices if c.format}
    columns = {
        module: row["head_size"]
        for row in entry(made / "packed" / "unet")["static"]
        for module in row["modules"]
    }
    assert columns
    for module, told in found.items():
        few = f"torch's with fewer than {1000 + columns[module]} keys"
        assert told == (("host", few) if module.endswith("attn1") else ("torch", "slower"))


@torch.no_grad()
def test_values_in_16_bit_are_projected_first(pipeline_dir, made, tmp_path):
    need(compilers.host_compiler)
    for name, asked in (("wide", {"pv": "none"}), ("wide8", {"pv": "none", "qk": "int8"})):
        quantkit.pack(
            pipeline_dir,
            recipe=recipe(**asked),
            calibration=made / "c.safetensors",
            output=tmp_path / name,
        )
        assert entry(tmp_path / name / "unet")["static"] == entry(made / "packed/unet")["static"]
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    calls = {}
    for folder in (made / "packed", tmp_path / "wide", tmp_path / "wide8"):
        unet = quantkit.load_pipeline(folder, torch_dtype=torch.float32).unet
        text = torch.ones(2, 77, unet.config.cross_attention_dim)
        with log.record() as seen:
            y = unet(x, torch.tensor(500), text).sample
        quantkit.attention(unet, qk=None)
        exact = unet(x, torch.tensor(500), text).sample
        # Small differences flip codes in the layers behind.
        assert 0 < float((y - exact).norm() / exact.norm()) < 0.15
        calls[folder.name] = {name for name, _, _ in seen.calls}
    fp8, int8 = (calls[name] for name in ("wide", "wide8"))
    assert {"project_codes_fp8", "value_codes_f16", "attention_fp8_f16"} <= fp8
    assert {"head_codes_int8", "value_codes_f16", "attention_int8_f16"} <= int8
    assert not {"project_values_fp8", "attention_fp8", "attention_int8"} & (fp8 | int8)


def test_few_keys_get_none(pipeline_dir, made, tmp_path):
    quantkit.pack(
        pipeline_dir,
        recipe=recipe(min_keys=10_000),
        calibration=made / "c.safetensors",
        output=tmp_path / "packed",
    )
    found = entry(tmp_path / "packed" / "unet")
    assert found == {"qk": "e4m3fn", "min_keys": 10_000, "exclude": ["mid_block.*"]}


def test_a_calibration_without_attention_is_refused(pipeline_dir, calibration, tmp_path):
    from dataclasses import replace

    older = replace(calibration, attention={})
    with pytest.raises(RecipeError, match="has no attention; run 'quantkit calibrate"):
        quantkit.pack(pipeline_dir, recipe=recipe(), calibration=older, output=tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_without_a_calibration_it_says_that_one_is_missing(pipeline_dir, tmp_path):
    forecast = pack(pipeline_dir, recipe=recipe(), output=tmp_path / "p", dry_run=True)
    assert isinstance(forecast, Forecast)
    assert forecast.missing == ("calibration",)


def of_entry(change):
    return lambda edit: change(edit.config["quantization_config"]["attention"])


def first(edit):
    """Return the first module with static scales."""
    return edit.config["quantization_config"]["attention"]["static"][0]["modules"][0]


def of_tensor(part, change):
    def apply(edit):
        name = f"{first(edit)}.{CHILD}.{part}"
        edit.replace(name, change(edit.tensor(name)))

    return apply


def drop(edit):
    name = f"{first(edit)}.{CHILD}.key_mean"
    del edit.tensors[edit.home(name)][name]


BROKEN = {
    "missing": (drop, r"key_mean: missing, expected F32"),
    "shape": (of_tensor("key_mean", lambda t: t[:, :4].contiguous()), r"key_mean: found F32"),
    "dtype": (of_tensor("key_range", torch.Tensor.half), r"key_range: found F16"),
    "negative": (of_tensor("query_range", torch.neg), "expected finite and positive"),
    "zero": (of_tensor("value_scale", torch.zeros_like), "expected finite and positive"),
    "nan": (of_tensor("value_mean", lambda t: t * torch.nan), "found nan, expected finite"),
    "unnamed": (
        of_entry(lambda e: e["static"][0]["modules"].pop()), "the config does not name"
    ),
    "heads": (of_entry(lambda e: e["static"][0].update(heads=0)), "0 heads of"),
    "text": (of_entry(lambda e: e["static"][0].update(head_size="8")), "expected 1 or more"),
    "no-modules": (of_entry(lambda e: e["static"][0].update(modules=[])), "expected paths"),
    "twice": (of_entry(lambda e: e["static"].append(e["static"][0])), "each once"),
    "empty": (of_entry(lambda e: e.update(static=[])), "expected a list of heads"),
    "no-list": (of_entry(lambda e: e.update(static=[3])), "3, expected an object"),
    "unknown-key": (of_entry(lambda e: e["static"][0].update(rank=3)), "unknown key 'rank'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_scales_are_refused(edit, name):
    change, match = BROKEN[name]
    change(edit)
    edit.save()
    with pytest.raises(CheckpointError, match=match):
        open_packed(edit.folder)
