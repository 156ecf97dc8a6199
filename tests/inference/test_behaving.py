"""A packed model does what a model does: it offloads, counts, copies, pickles, dequantizes."""

import copy
import multiprocessing
import pickle
import shutil
from functools import partial
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from diffusers.models.modeling_utils import get_parameter_dtype
from torch import nn

import quantkit
from quantkit.checkpoint.filelist import CARD, FILE_LIST
from quantkit.errors import InputError
from quantkit.inference.layers.codes import Codes
from quantkit.inference.layers.layer_summary import iterate_packed
from quantkit.inference.layers.packed_layer import CODES, PackedLayer
from tests.inference.test_inference import SCHEMES
from tests.support.answers import answer, step
from tests.support.loading import (
    DTYPES,
    assert_bit_exact,
    draw,
    plain,
    tensors_on_disk,
    unet_class,
    weight_files,
)
from tests.support.packed import packed_module

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # accelerate's and diffusers', of their own calls
]


@pytest.fixture
def unet(packed_dir):
    return unet_class().from_pretrained(packed_dir / "unet")


@pytest.fixture
def uniform(uniform_dir):
    return unet_class().from_pretrained(uniform_dir / "unet")


# ---------------------------------------------------------------------------------- parameters


def test_codes_are_frozen_parameters_and_no_dtype_of_the_model(unet):
    for _, _, layer in iterate_packed(unet):
        own = dict(layer.named_parameters(recurse=False))
        assert {name for name in CODES if getattr(layer, name) is not None} | (
            {"bias"} if layer.bias is not None else set()
        ) == own.keys()
        assert not any(p.requires_grad for p in own.values())
    # A block whose first tensors are codes has the dtype of what is not.
    block = next(m for m in unet.modules() if isinstance(m, PackedLayer) and m.bias is not None)
    assert get_parameter_dtype(nn.Sequential(block)) == torch.float32


def test_as_many_parameters_as_the_dense_model(unet, pipeline_dir):
    dense = unet_class().from_pretrained(pipeline_dir / "unet")
    assert unet.num_parameters() == dense.num_parameters()
    assert unet.num_parameters(exclude_embeddings=True) == dense.num_parameters(
        exclude_embeddings=True
    )
    assert 0 < unet.num_parameters(only_trainable=True) < dense.num_parameters() / 2
    unet.requires_grad_(False)
    assert unet.num_parameters(only_trainable=True) == 0


def test_sequential_offload_leaves_no_codes_on_the_device(unet):
    wanted = [step(unet, t) for t in (100, 900)]
    state = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
    accelerate.cpu_offload(unet, torch.device("cpu"), offload_buffers=len(unet._parameters) > 0)
    whole = sum(t.nbytes for t in state.values())
    left = sum(t.nbytes for t in unet.state_dict().values() if not t.is_meta)
    assert left < whole / 50
    for t, right in zip((100, 900), wanted, strict=True):
        assert torch.equal(step(unet, t), right)
        assert all(layer.codes.is_meta for _, _, layer in iterate_packed(unet))
    accelerate.hooks.remove_hook_from_module(unet, recurse=True)
    for name, tensor in unet.state_dict().items():
        assert tensor.dtype == state[name].dtype
    assert all(type(layer.codes) is Codes for _, _, layer in iterate_packed(unet))


@pytest.mark.parametrize("module", [accelerate.hooks, accelerate.utils.modeling])
def test_accelerate_moves_codes_by_the_name_of_the_weight(module):
    layer = packed_module(nn.Linear(64, 8), SCHEMES["int4-none"])
    codes, model = layer.codes.detach().clone(), nn.ModuleDict({"a": layer})
    move = module.set_module_tensor_to_device
    move(model, "a.weight", "meta")
    assert layer.codes.is_meta
    assert layer.weight.is_meta
    assert layer.weight.shape == (8, 64)
    move(model, "a.weight", "cpu", codes)
    assert torch.equal(layer.codes, codes)
    assert type(layer.codes) is Codes


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload_keeps_the_bits(packed_dir, unet, kind):
    wanted = step(unet)
    cpu = torch.device("cpu")
    options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    unet.enable_group_offload(cpu, cpu, offload_type=kind, **options)
    assert torch.equal(step(unet), wanted)
    assert_bit_exact(unet, packed_dir / "unet")


def test_layerwise_casting_casts_no_codes_and_no_biases(packed_dir, unet):
    wanted = step(unet)
    unet.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn,
        compute_dtype=torch.float32,
        skip_modules_classes=(nn.GroupNorm,),
    )
    layers = [layer for _, _, layer in iterate_packed(unet)]
    assert {layer.bias.dtype for layer in layers if layer.bias is not None} == {torch.float32}
    assert {layer.compute_dtype for layer in layers} == {torch.float32}
    assert torch.isfinite(step(unet)).all()
    assert (step(unet) - wanted).norm() < 0.2 * wanted.norm()
    assert_bit_exact(unet, packed_dir / "unet")


def test_a_device_map_places_a_model(packed_dir):
    model = unet_class().from_pretrained(packed_dir / "unet", device_map={"": "cpu"})
    assert torch.equal(step(model), step(plain(packed_dir).unet))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_change_the_dtype_and_no_bits(packed_dir, unet, dtype):
    unet.to(dtype)
    assert unet.dtype == dtype
    assert_bit_exact(unet, packed_dir / "unet")
    assert torch.isfinite(step(unet)).all()


def test_a_state_dict_loads_into_another_packed_model(packed_dir, unet):
    other = copy.deepcopy(unet)
    with torch.no_grad():
        for _, _, layer in iterate_packed(other):
            layer.codes.view(torch.uint8).zero_()
    other.load_state_dict(unet.state_dict())
    assert_bit_exact(other, packed_dir / "unet")
    assert torch.equal(step(other), step(unet))


def test_pipelines_of_other_kinds_take_the_same_denoiser(packed_dir):
    pipe = plain(packed_dir)
    other = diffusers.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    assert other.unet is pipe.unet
    pipe.enable_attention_slicing()
    pipe.vae.enable_tiling()
    pipe.unet.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    assert torch.isfinite(draw(pipe)).all()


# -------------------------------------------------------------------------------------- pickles


def test_pickles_hold_the_bits_and_the_methods(packed_dir, unet, tmp_path):
    twin = pickle.loads(pickle.dumps(unet))
    assert_bit_exact(twin, packed_dir / "unet")
    for time in (100, 900):
        # The second bucket is found as the first is: by the copy's own forward.
        assert torch.equal(step(twin, time), step(unet, time))
    assert twin.quantkit_buckets[0].index.tolist() == [2]
    twin.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(packed_dir / "unet")
    assert twin.num_parameters() == unet.num_parameters()


def test_fused_models_are_saved_and_copied(uniform, tmp_path):
    wanted = step(uniform)
    uniform.fuse_qkv_projections()
    torch.save(uniform, tmp_path / "model.pt")
    for model in (
        torch.load(tmp_path / "model.pt", weights_only=False),
        copy.deepcopy(uniform),
    ):
        joined: Any = next(
            layer for _, name, layer in iterate_packed(model) if name.endswith("to_qkv")
        )
        # Its own attention's, not those of the model that it is a copy of.
        assert joined.layers[0] in list(model.modules())
        assert torch.allclose(step(model), wanted, rtol=1e-4, atol=1e-5)
        assert model.num_parameters() == uniform.num_parameters()
    count = uniform.num_parameters()
    uniform.unfuse_qkv_projections()
    assert uniform.num_parameters() == count


@pytest.mark.slow
def test_another_process_computes_the_same(unet):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=answer, args=(pickle.dumps(unet), queue))
    process.start()
    answered = queue.get(timeout=300)
    process.join()
    assert torch.allclose(torch.tensor(answered), step(unet), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------- dequantize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dequantized_models_are_dense_and_save_in_16_bit(packed_dir, tmp_path, dtype):
    model = unet_class().from_pretrained(packed_dir / "unet", torch_dtype=dtype)
    wanted = {name: (layer.dense_weight(), layer.bias) for _, name, layer in iterate_packed(model)}
    smoothed = {name: layer.dequantized() for _, name, layer in iterate_packed(model)
                if layer.input_smooth is None}  # fmt: skip
    assert model.dequantize() is model
    assert not list(iterate_packed(model))
    assert {p.dtype for p in model.parameters()} == {dtype}
    for name, (weight, bias) in wanted.items():
        layer = model.get_submodule(name)
        assert type(layer) in {nn.Linear, nn.Conv2d}
        assert torch.equal(layer.weight, weight)
        assert layer.bias is bias is None or torch.equal(layer.bias, bias)
    for name, weight in smoothed.items():
        assert torch.equal(model.get_submodule(name).weight, weight.to(dtype))
    model.save_pretrained(tmp_path / "dense")
    again = unet_class().from_pretrained(tmp_path / "dense", torch_dtype=dtype)
    assert "quantization_config" not in again.config
    mine, theirs = model.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert {t.dtype for t in tensors_on_disk(tmp_path / "dense").values()} == {dtype}
    with pytest.raises(ValueError, match="first quantize"):
        model.dequantize()


def test_dequantized_and_packed_models_answer_alike(unet):
    packed = step(unet)
    dense = step(unet.dequantize())
    # Inputs are rounded to 8 bits in one of the two, some by scales that nobody calibrated.
    assert (packed - dense).norm() < 0.3 * dense.norm()


def test_fused_models_dequantize(uniform):
    other = copy.deepcopy(uniform)
    wanted = step(other.dequantize())
    uniform.fuse_qkv_projections()
    assert torch.allclose(step(uniform.dequantize()), wanted, rtol=1e-4, atol=1e-5)
    assert not list(iterate_packed(uniform))
    uniform.unfuse_qkv_projections()
    assert uniform.state_dict().keys() == other.state_dict().keys()
    assert torch.allclose(step(uniform), wanted, rtol=1e-4, atol=1e-5)


def test_offloaded_models_refuse_to_dequantize(unet):
    accelerate.cpu_offload(unet, torch.device("cpu"))
    with pytest.raises(InputError, match=r"dequantize: .*offloaded; call remove_all_hooks"):
        unet.dequantize()


def test_a_dequantized_pipeline_saves_as_any_other(packed_dir, tmp_path):
    pipe = plain(packed_dir, torch_dtype=torch.float16)
    pipe.unet.dequantize()
    pipe.save_pretrained(tmp_path / "dense")
    again = plain(tmp_path / "dense", torch_dtype=torch.float16)
    assert torch.equal(again.unet.conv_in.weight, pipe.unet.conv_in.weight)
    assert not list(iterate_packed(again))
    draw(again.to(torch.float32))


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("make", [
    diffusers.ControlNetModel.from_unet, diffusers.ControlNetUnionModel.from_unet,
    diffusers.SparseControlNetModel.from_unet, diffusers.ControlNetXSAdapter.from_unet,
    diffusers.UNetControlNetXSModel.from_unet,
    partial(diffusers.UNetMotionModel.from_unet2d, load_weights=True),
    diffusers.SD3ControlNetModel.from_transformer, diffusers.FluxControlNetModel.from_transformer,
    diffusers.HunyuanDiT2DControlNetModel.from_transformer,
    diffusers.QwenImageControlNetModel.from_transformer,
], ids=range(10))  # fmt: skip
def test_nothing_is_made_from_codes(unet, make):
    with pytest.raises(InputError, match=r"UNet2DConditionModel is packed.*pass the 16-bit model"):
        make(unet)


def test_controlnets_are_made_from_16_bit_and_from_dequantized_models(unet, pipeline_dir):
    dense = unet_class().from_pretrained(pipeline_dir / "unet")
    assert diffusers.ControlNetModel.from_unet(dense)
    made = diffusers.ControlNetModel.from_unet(unet.dequantize())
    assert torch.equal(made.conv_in.weight, unet.conv_in.weight)


# ------------------------------------------------------------------------------------------ hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that keeps copies of what it is sent."""
    from diffusers.utils import hub_utils

    class Made:
        repo_id = "someone/packed"

    def upload(self, working_dir, repo_id, **options):
        assert repo_id == Made.repo_id
        shutil.copytree(working_dir, tmp_path / "hub")

    monkeypatch.setattr(hub_utils.PushToHubMixin, "_upload_folder", upload)
    monkeypatch.setattr(hub_utils, "create_repo", lambda *_, **__: Made)
    monkeypatch.setattr(hub_utils, "load_or_create_model_card", lambda *_, **__: Card())
    monkeypatch.setattr(hub_utils, "populate_model_card", lambda card, **_: card)
    return tmp_path / "hub"


class Card:
    def save(self, path):
        path.write_text("a card") if hasattr(path, "write_text") else None


def test_models_and_pipelines_are_pushed_as_they_are_saved(packed_dir, hub, tmp_path):
    packed_dir = shutil.copytree(packed_dir, tmp_path / "packed")
    (packed_dir / CARD).write_text("---\nlicense: mit\n---\n")
    pipe = plain(packed_dir)
    pipe.unet.push_to_hub("packed")
    assert weight_files(hub) == weight_files(packed_dir / "unet")
    shutil.rmtree(hub)
    pipe.push_to_hub("packed")
    assert weight_files(hub) == weight_files(packed_dir)
    assert (hub / FILE_LIST).is_file()
    assert (hub / CARD).read_bytes() == (packed_dir / CARD).read_bytes()
    assert_bit_exact(quantkit.load_pipeline(hub).unet, packed_dir / "unet")


def test_saving_does_not_push(packed_dir, hub, tmp_path):
    pipe = plain(packed_dir)
    for saved in (pipe, pipe.unet):
        with pytest.raises(InputError, match="call push_to_hub"):
            saved.save_pretrained(tmp_path / "copy", push_to_hub=True)
    assert not (tmp_path / "copy").exists()
    assert not hub.exists()
