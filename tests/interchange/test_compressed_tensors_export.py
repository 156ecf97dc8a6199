"""Text encoders for compressed-tensors, read by transformers with the real package."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.metadata import LayerRecord, ShardMetadata
from quantkit.checkpoint.spec import make_config
from quantkit.checkpoint.validate import Shard
from quantkit.errors import CheckpointError, InputError, ModelError
from quantkit.interchange.component_export import ComponentFile, DirectoryPlan
from quantkit.interchange.compressed_tensors_export import (
    compressed_tensors_config,
    plan_compressed_tensors,
)
from quantkit.interchange.denoiser import packed_denoiser
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.granularity import PerChannel, PerTensor
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.progress import silent
from quantkit.recipe.load import change_recipe, load_recipe
from quantkit.storage.tensorfile import read_header
from quantkit.workflow.export import export
from quantkit.workflow.pack import pack
from tests.support.pipelines import t5_encoder, text_encoder

ENCODERS = {"t5": t5_encoder, "clip": text_encoder}
TREATMENTS = {
    "fp8-token": (E4M3FN, PerChannel(), Activation.TOKEN),
    "fp8-none": (E4M3FN, PerChannel(), Activation.NONE),
    "fp8-static": (E4M3FN, PerTensor(), Activation.STATIC),
    "int8-token": (INT8, PerChannel(), Activation.TOKEN),
}


def encoder(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return ENCODERS[name]().eval()


def packed_by_hand(name, folder, treatment, layers=None):
    """A text encoder whose Linear layers are packed: what a packer of them would write."""
    fmt, granularity, activation = treatment
    model = encoder(name)
    model.save_pretrained(folder / "dense")
    tensors = {k: v.clone().contiguous() for k, v in model.state_dict().items()}
    if name == "t5":
        tensors.pop("encoder.embed_tokens.weight")
    chosen = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)][:layers]
    scheme, records = Scheme(fmt, granularity, None, activation), {}
    for layer in chosen:
        rows = tensors[f"{layer}.weight"].float()
        amax = rows.abs().amax(dim=1) if granularity == PerChannel() else rows.abs().amax()
        scale = amax / fmt.max
        codes = rows / (scale.reshape(-1, 1) if scale.ndim else scale)
        codes = codes.round() if fmt.is_integer else codes
        tensors[f"{layer}.weight"] = codes.to(fmt.torch_dtype)
        tensors[f"{layer}.weight_scale"] = scale
        if activation is Activation.STATIC:
            tensors[f"{layer}.input_scale"] = torch.tensor(0.02)
        records[layer] = LayerRecord(tuple(rows.shape), "0" * 64)
    path = folder / "packed"
    path.mkdir()
    (path / "config.json").write_text((folder / "dense" / "config.json").read_text())
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    metadata = ShardMetadata({"name": "t"}, records, {})
    shard = Shard(read_header(path / "model.safetensors"), metadata)
    config = make_config(dict.fromkeys(chosen, scheme))
    return PackedComponent("", path, type(model).__name__, config, (shard,), None)


def exported(component, output, *, requantize=False):
    plan = plan_compressed_tensors(packed_denoiser(component), requantize=requantize)
    config = compressed_tensors_config(plan)
    file = ComponentFile("", plan, "model.safetensors", config)
    directory = DirectoryPlan(component.path, (file,))
    return config, directory.write(output, force=False, progress=silent)


def embeddings(model):
    ids = torch.arange(3, 14).reshape(1, -1)
    with torch.inference_mode():
        return model(input_ids=ids).last_hidden_state.float()


@pytest.mark.filterwarnings("ignore")  # of the package, about itself
@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("name", ENCODERS)
def test_transformers_reads_the_same_weights_and_answers(name, treatment, tmp_path):
    component = packed_by_hand(name, tmp_path, TREATMENTS[treatment])
    config, result = exported(component, tmp_path / "out")
    assert result.worst[0] == 0
    assert config["quantization_status"] == "compressed"
    model = encoder(name)
    for layer in component.config.layers:
        model.get_submodule(layer).weight.data.copy_(component.dequantized(layer))
    again = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert sum(hasattr(m, "quantization_scheme") for m in again.modules()) == len(
        component.config.layers
    )
    wanted, found = embeddings(model), embeddings(again)
    assert found.isfinite().all()
    # Inputs are quantized besides the weights, but for "none".
    error = float((found - wanted).norm() / wanted.norm())
    assert error < (1e-6 if treatment == "fp8-none" else 0.15)
    dense = embeddings(encoder(name))
    assert float((found - dense).norm() / dense.norm()) < 0.2


@pytest.mark.filterwarnings("ignore")
def test_layers_of_several_formats_are_groups_of_their_own(tmp_path):
    component = packed_by_hand("t5", tmp_path, TREATMENTS["fp8-token"], layers=3)
    config, _ = exported(component, tmp_path / "out")
    (group,) = config["config_groups"].values()
    assert set(group["targets"]) == set(component.config.layers)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["quantization_config"] == config
    again = transformers.T5EncoderModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert sum(hasattr(m, "quantization_scheme") for m in again.modules()) == 3


def test_a_denoiser_is_refused(tmp_path):
    component = packed_by_hand("t5", tmp_path, TREATMENTS["fp8-token"])
    (component.path / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    with pytest.raises(ModelError, match="compressed-tensors is for text encoders"):
        exported(component, tmp_path / "out")


def test_buckets_are_refused_or_one_scale(tmp_path):
    component = packed_by_hand("t5", tmp_path, TREATMENTS["fp8-static"])
    scheme = Scheme(E4M3FN, PerTensor(), None, Activation.STATIC, buckets=(500.0,))
    config = make_config(dict.fromkeys(component.config.layers, scheme))
    bucketed = PackedComponent("", component.path, "T5EncoderModel", config, component.shards, None)
    with pytest.raises(CheckpointError, match="input scales by timestep"):
        exported(bucketed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text_encoders", ["fp8", "int8", "int4"])
def test_packed_text_encoders_are_taken_over(text_encoders, transformer_pipeline_dir, tmp_path):
    recipe = load_recipe("fp8", {"text_encoders": text_encoders})
    pack(transformer_pipeline_dir, output=tmp_path / "p", recipe=recipe)
    source = tmp_path / "p" / "text_encoder_3"
    result = export(source, to="compressed-tensors", output=tmp_path / "out")
    assert result.worst[0] == 0
    again = transformers.T5EncoderModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    dense = transformers.T5EncoderModel.from_pretrained(
        transformer_pipeline_dir / "text_encoder_3", dtype=torch.float32
    )
    wanted, found = embeddings(dense), embeddings(again)
    assert float((found - wanted).norm() / wanted.norm()) < (
        0.2 if text_encoders == "int4" else 0.1
    )
    # The denoiser beside it is packed, too: a directory of encoders does not hold it.
    with pytest.raises(InputError, match=r"transformer: packed, too, and the target does not hold"):
        export(tmp_path / "p", to="compressed-tensors", output=tmp_path / "other")
    with pytest.raises(InputError, match=r"text_encoder.*: packed, too"):
        export(tmp_path / "p", to="sdnq", output=tmp_path / "other")


@pytest.mark.filterwarnings("ignore")
def test_a_text_encoder_is_quantized_on_the_way(transformer_pipeline_dir, tmp_path):
    source = transformer_pipeline_dir / "text_encoder_3"
    result = export(source, to="compressed-tensors", output=tmp_path / "out")
    assert 0.02 < result.mean < 0.03
    transformers.T5EncoderModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    how = change_recipe(load_recipe("fp8"), {"text_encoders": "int8"})
    result = export(source, to="compressed-tensors", output=tmp_path / "int8", recipe=how)
    assert result.types["I8"] == len(result.copied)
    with pytest.raises(ModelError, match="compressed-tensors is for text encoders"):
        export(transformer_pipeline_dir, to="compressed-tensors", output=tmp_path / "other")


@pytest.fixture(scope="module")
def encoder_folders(transformer_pipeline_dir, tmp_path_factory):
    """A T5 in 16 bit, and packed."""
    packed = tmp_path_factory.mktemp("encoders") / "packed"
    recipe = load_recipe("fp8", {"text_encoders": "fp8"})
    pack(transformer_pipeline_dir, output=packed, recipe=recipe)
    return {
        "16 bit": transformer_pipeline_dir / "text_encoder_3",
        "packed": packed / "text_encoder_3",
    }


@pytest.mark.parametrize("kind", ["16 bit", "packed"])
@pytest.mark.parametrize("to", ["comfyui-int8", "sdnq", "fp8r", "single-file", "gguf:Q8_0"])
def test_targets_of_denoisers_say_where_a_text_encoder_goes(to, kind, encoder_folders, tmp_path):
    match = "a text encoder, and the target takes denoisers; export it to compressed-tensors, or"
    with pytest.raises(InputError, match=match):
        export(encoder_folders[kind], to=to, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
