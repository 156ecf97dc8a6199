"""The dtypes that a packed pipeline computes in."""

import shutil
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import quantkit
from quantkit.checkpoint.reader import open_packed
from quantkit.device.backends import Backend, use
from quantkit.inference.layers.layer_summary import iterate_packed
from quantkit.inference.loading.pipeline_dtype import _cast
from quantkit.inference.loading.pipeline_loading import stored_dtypes
from quantkit.pipelines import compute_dtype
from quantkit.pipelines.running import choose_dtype
from quantkit.recipe.load import parse_recipe
from quantkit.workflow.pack import pack
from tests.inference.test_inference import SCHEMES
from tests.support.denoiser_classes import ROWS
from tests.support.loading import assert_bit_exact, draw, plain
from tests.support.packed import packed_module
from tests.support.tiny_denoisers import answer, tiny_model


def compute_dtypes(pipe):
    """dtype of every float parameter outside packed layers' own buffers."""
    modules = [m for m in pipe.components.values() if isinstance(m, nn.Module)]
    return {p.dtype for m in modules for p in m.parameters() if p.is_floating_point()}


DICT = {"unet": torch.bfloat16, "vae": torch.float32, "default": torch.float16}


@pytest.mark.parametrize(
    ("load", "dtype"),
    [
        (quantkit.load_pipeline, torch.float32),
        (lambda d: quantkit.load_pipeline(str(d), torch_dtype=torch.bfloat16), torch.bfloat16),
        (lambda d: quantkit.load_pipeline(d, checksums=True, device="cpu"), torch.float32),
        (plain, torch.float32),
        (lambda d: plain(d, torch_dtype=torch.float16), torch.float16),
        (lambda d: plain(d, torch_dtype=torch.bfloat16), torch.bfloat16),
        (lambda d: plain(d, torch_dtype=DICT), torch.bfloat16),
        (lambda d: plain(d, torch_dtype={"default": torch.float16}), torch.float16),
        (lambda d: plain(d, torch_dtype={"vae": torch.float16}), torch.float32),
        (lambda d: plain(d, torch_dtype=torch.float16).to(torch.float32), torch.float32),
        (lambda d: quantkit.load_pipeline(d).to(torch.bfloat16), torch.bfloat16),
        (lambda d: plain(d).to("cpu", torch.float16), torch.float16),
    ],
    ids=range(12),
)
def test_all_components_compute_in_one_dtype(packed_dir, load, dtype):
    pipe = load(packed_dir)
    assert compute_dtypes(pipe) == {dtype}
    assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {dtype}
    assert_bit_exact(pipe.unet, packed_dir / "unet")
    with use(Backend.REFERENCE):  # kernels in every dtype are tested, and built, elsewhere
        draw(pipe)


def test_a_mixed_request_is_overruled_aloud(packed_dir, caplog):
    plain(packed_dir, torch_dtype=DICT)
    loud = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [m for m in loud if m.startswith("vae: cast from torch.float32 to torch.bfloat16")]


def test_components_that_were_handed_in_stay_as_they_are(packed_dir):
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(packed_dir / "vae", torch_dtype=torch.float32)
    pipe = plain(packed_dir, vae=vae, torch_dtype=torch.float16)
    assert pipe.vae is vae
    assert vae.dtype == torch.float32
    assert pipe.text_encoder.dtype == torch.float16


def test_unpacked_pipelines_are_left_alone(pipeline_dir):
    pipe = plain(pipeline_dir)
    assert pipe.text_encoder.dtype == torch.float16
    assert pipe.unet.dtype == torch.float32


class Kept(nn.Module):
    _keep_in_fp32_modules = ("wo",)

    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))


def test_parts_kept_in_float32_stay_so():
    model = Kept()
    _cast(model, torch.float16)
    assert (model.wi.weight.dtype, model.wo.weight.dtype) == (torch.float16, torch.float32)
    assert model.count.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["Kandinsky5Transformer3DModel", "WanTransformer3DModel"])
def test_packed_layers_that_a_class_keeps_in_float32_dequantize_to_it(name, dtype, tmp_path):
    (row,) = [row for row in ROWS if row.class_name == name]
    tiny_model(row).save_pretrained(tmp_path / "model")
    text = "{name: t, weight: {format: int8}, data_free: true, kept: {format: int8}}"
    pack(tmp_path / "model", output=tmp_path / "packed", recipe=parse_recipe(text, where="test"))
    cls: Any = getattr(diffusers, name)
    dense = cls.from_pretrained(tmp_path / "model", torch_dtype=dtype)
    model = cls.from_pretrained(tmp_path / "packed", torch_dtype=dtype).eval()
    layers = [path for _, path, _ in iterate_packed(model)]
    read = {path: model.get_submodule(path).weight.dtype for path in layers}
    before = answer(model)
    model.dequantize()
    wanted = {path: dense.get_submodule(path).weight.dtype for path in layers}
    assert torch.float32 in wanted.values()
    assert read == wanted == {path: model.get_submodule(path).weight.dtype for path in layers}
    assert (answer(model) - before).norm() < 0.05 * before.norm()


def test_packed_layers_of_a_component_follow_its_cast():
    model = Kept()
    for name in ("wi", "wo"):
        model.set_submodule(name, packed_module(nn.Linear(32, 32), SCHEMES["token"], name=name))
    _cast(model, torch.float16)
    assert (model.wi.weight.dtype, model.wo.weight.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize(
    ("stored", "device", "able", "wanted"),
    [
        ({"BF16", "F32"}, "cuda", True, torch.bfloat16),
        ({"BF16"}, "cuda", False, torch.float16),
        ({"F16"}, "cuda", True, torch.float16),
        ({"F32"}, "cuda", True, torch.float16),
        ({"BF16"}, "cpu", True, torch.float32),
    ],
)
def test_a_model_computes_in_its_own_16_bit_dtype(stored, device, able, wanted, monkeypatch):
    monkeypatch.setattr(compute_dtype, "has_bfloat16", lambda _: able)
    assert compute_dtype.usual_dtype(stored, torch.device(device)) == wanted


def test_a_gpu_without_bfloat16_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(compute_dtype, "has_bfloat16", lambda _: False)
    compute_dtype.usual_dtype({"BF16"}, torch.device("cuda:1"))
    assert [r.getMessage() for r in caplog.records] == [
        "cuda:1: no bfloat16, the model's type; computes in float16, may overflow"
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_packed_pipeline_and_its_original_choose_one_dtype(
    dtype, pipeline_dir, tmp_path, monkeypatch
):
    """Scales are float32, and codes say nothing: what is left in 16 bit decides, as before."""
    source, packed = tmp_path / "source", tmp_path / "packed"
    shutil.copytree(pipeline_dir, source)
    unet = diffusers.UNet2DConditionModel.from_pretrained(source / "unet", torch_dtype=dtype)
    unet.save_pretrained(source / "unet")
    quantkit.pack(source, output=packed)
    monkeypatch.setattr(compute_dtype, "has_bfloat16", lambda _: True)
    gpu = torch.device("cuda")
    assert compute_dtype.usual_dtype(stored_dtypes(open_packed(packed)), gpu) == dtype
    assert choose_dtype(quantkit.open_model(source), gpu) == dtype
