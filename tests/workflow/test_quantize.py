"""A pipeline packed in memory: the same bits as pack and load_pipeline, or a refusal."""

import pytest
import torch

import quantkit
from quantkit.errors import ArtefactError, InputError, ModelError, NonFiniteError, RecipeError
from quantkit.inference.layers.layer_summary import packed_layers
from tests.support.loading import draw, plain, same_bytes


@pytest.fixture(scope="module")
def packed(pipeline_dir, tmp_path_factory):
    """The tiny pipeline, packed to a directory and loaded."""
    folder = tmp_path_factory.mktemp("quantize") / "packed"
    quantkit.pack(pipeline_dir, recipe="fp8", output=folder)
    return quantkit.load_pipeline(folder)


@pytest.fixture
def pipe(pipeline_dir):
    return plain(pipeline_dir, torch_dtype=torch.float32)


def assert_same(one, other):
    state, expected = one.unet.state_dict(), other.unet.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert tensor.dtype == expected[name].dtype, name
        assert same_bytes(tensor, expected[name]), name


def test_bits_are_those_of_pack_and_load_pipeline(pipe, packed):
    assert quantkit.quantize(pipe, "fp8") is pipe
    assert_same(pipe, packed)
    assert [i.scheme for i in packed_layers(pipe)] == [i.scheme for i in packed_layers(packed)]
    assert torch.equal(draw(pipe), draw(packed))
    assert pipe.unet.config.quantization_config.to_dict() == (
        packed.unet.config.quantization_config.to_dict()
    )


def test_static_scales_and_smoothing_of_a_calibration(pipeline_dir, tmp_path, pipe):
    recipe = quantkit.load_recipe("int8", {"calibration.steps": 5})
    calibration = tmp_path / "calibration.safetensors"
    quantkit.calibrate(pipeline_dir, recipe=recipe, count=1, output=calibration)
    quantkit.pack(pipeline_dir, recipe=recipe, calibration=calibration, output=tmp_path / "packed")
    with pytest.raises(ArtefactError, match="load the pipeline in the dtype of its files"):
        quantkit.quantize(pipe, recipe, calibration=calibration)
    pipe = plain(pipeline_dir, torch_dtype=torch.float16)
    quantkit.quantize(pipe, recipe, calibration=calibration)
    loaded = quantkit.load_pipeline(tmp_path / "packed", torch_dtype=torch.float16)
    assert_same(pipe, loaded)


def test_a_recipe_that_needs_more_names_the_command(pipe, pipeline_dir):
    before = pipe.unet.state_dict()
    with pytest.raises(RecipeError, match=r"int8: needs calibration; run 'quantkit calibrate"):
        quantkit.quantize(pipe, "int8")
    with pytest.raises(RecipeError, match=r"needs hessians; run 'quantkit calibrate hessian"):
        quantkit.quantize(pipe, "fp8-token-gptq")
    with pytest.raises(RecipeError, match="neither a bundled recipe nor"):
        quantkit.quantize(pipe, "int7")
    encoders = quantkit.load_recipe("fp8", {"text_encoders": "int8"})
    with pytest.raises(RecipeError, match="only denoisers are quantized in memory"):
        quantkit.quantize(pipe, encoders)
    assert pipe.unet.state_dict().keys() == before.keys()


def test_a_second_call_is_refused(pipe):
    quantkit.quantize(pipe)
    with pytest.raises(InputError, match="unet is packed already; load the 16-bit pipeline again"):
        quantkit.quantize(pipe)


def test_a_pipeline_without_a_denoiser(pipe):
    del pipe.unet
    with pytest.raises(ModelError, match=r"has no unet or transformer \(found text_encoder, vae\)"):
        quantkit.quantize(pipe)
    with pytest.raises(ModelError, match=r"Linear has no unet or transformer \(found no models\)"):
        quantkit.quantize(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(pipe, value):
    name = "down_blocks.0.resnets.0.conv1.weight"
    pipe.unet.get_parameter(name).data[1, 2, 0, 1] = value
    where = rf"^unet/diffusion_pytorch_model.safetensors: {name}\[1, 2, 0, 1\]: found {value}"
    with pytest.raises(NonFiniteError, match=where):
        quantkit.quantize(pipe)
    assert not packed_layers(pipe)


def test_models_that_are_not_plain(pipe):
    with pytest.raises(InputError, match=r"quantize: unet: torch_dtype torch.float64, expected"):
        quantkit.quantize(_with(pipe, pipe.unet.to(torch.float64)))
    pipe.unet.to(torch.float32)
    pipe.enable_sequential_cpu_offload(device="meta")
    with pytest.raises(InputError, match="unet is offloaded; quantize first"):
        quantkit.quantize(pipe)


def test_a_compiled_model(pipe):
    compiled = torch.nn.Module()  # as torch.compile's own, whose import takes seconds
    compiled._orig_mod = pipe.unet
    with pytest.raises(InputError, match="unet is compiled; quantize first, then compile"):
        quantkit.quantize(_with(pipe, compiled))


def test_adapters(pipe):
    pipe.unet.peft_config = {"default": None}
    with pytest.raises(InputError, match=r"unet is with adapters; call pipe\.unload_lora_weights"):
        quantkit.quantize(pipe)


def _with(pipe, unet):
    pipe.unet = unet
    return pipe


def test_what_packed_models_do(pipe, pipeline_dir, tmp_path):
    quantkit.quantize(pipe)
    with pytest.raises(InputError, match="was packed in memory, which leaves no files"):
        pipe.unet.save_pretrained(tmp_path / "unet")
    with pytest.raises(InputError, match="adapters cannot be fused into codes"):
        pipe.unet.fuse_lora()
    pipe.unet.dequantize()
    assert not packed_layers(pipe)
    assert draw(pipe).isfinite().all()
