"""Exports to SDNQ, fp8r and 16-bit single files, read by diffusers and the real packages."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from diffusers import BFLQuantizationConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.reader import open_packed
from quantkit.errors import CheckpointError, InputError, ModelError, OutputError, RecipeError
from quantkit.interchange import tensor_export
from quantkit.workflow.export import export
from quantkit.workflow.pack import pack
from tests.support.denoisers import (
    INPUTS,
    let_diffusers_read_narrow,
    output_of,
    tiny_denoiser,
)


def recipe(**changed):
    from quantkit.recipe.schema import Recipe

    return Recipe.model_validate({"name": "t", **changed})


MIXED = recipe(
    overrides=[
        {"layers": ["*.to_q", "*conv1"], "weight": {"format": "int8", "granularity": "tensor"}},
        {"layers": ["*.to_v"], "weight": {"format": "int4"}},
        {"layers": ["*.ff.net.2"], "sparse": True},
    ],
    sparsity={"layers": []},
    data_free=True,
)


@pytest.fixture(scope="module")
def packed(saved, tmp_path_factory):
    """Return a tiny denoiser packed by a recipe."""
    made = {}

    def directory(name, how="fp8"):
        key = (name, how if isinstance(how, str) else how.model_dump_json())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("packed") / name
            pack(saved(name), output=made[key], recipe=how)
        return made[key]

    return directory


def values_of(folder):
    """The dense weights of all packed layers."""
    component = open_packed(folder).components[0]
    return {layer: component.dequantized(layer) for layer in component.config.layers}


def with_values(name, values):
    """A tiny denoiser that has these weights."""
    model = tiny_denoiser(name)
    for layer, value in values.items():
        model.get_submodule(layer).weight.data.copy_(value)
    return model


@pytest.fixture(scope="module")
def read_by_sdnq(packed, saved, tmp_path_factory):
    """What SDNQ makes of exports, read in one process of its own: importing it takes 10 s."""
    folder = tmp_path_factory.mktemp("sdnq")
    sources = {
        "fp8/sd15": packed("sd15"),
        "fp8/flux": packed("flux"),
        "mixed/sd15": packed("sd15", MIXED),
        "dense/sd3": saved("sd3"),
    }
    for name, source in sources.items():
        (folder / name).mkdir(parents=True)
        export(source, to="sdnq", output=folder / name / "component")
    command = [sys.executable, "-m", "tests.support.read_sdnq", *(str(folder / n) for n in sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder, sources


@pytest.mark.parametrize("case", ["fp8/sd15", "fp8/flux", "mixed/sd15"])
@pytest.mark.slow
def test_sdnq_reads_packed_weights_bit_for_bit(case, read_by_sdnq):
    folder, sources = read_by_sdnq
    wanted = values_of(sources[case])
    with safe_open(folder / case / "read.safetensors", framework="pt") as file:
        assert set(file.metadata()["layers"].split()) == set(wanted)
        wrong = [n for n, v in wanted.items() if not torch.equal(file.get_tensor(n + ".weight"), v)]
        assert not wrong
        answer = file.get_tensor("answer")
    name = case.partition("/")[2]
    computed = output_of(name, with_values(name, wanted))
    assert float((answer - computed).norm() / computed.norm()) < 1e-5


@pytest.mark.slow
def test_sdnq_reads_what_is_quantized_on_the_way(read_by_sdnq):
    folder, _ = read_by_sdnq
    wanted = output_of("sd3", tiny_denoiser("sd3"))
    with safe_open(folder / "dense/sd3/read.safetensors", framework="pt") as file:
        found = file.get_tensor("answer")
    error = float((found - wanted).norm() / wanted.norm())
    assert 0.001 < error < 0.1


def test_a_pipeline_becomes_a_pipeline_for_sdnq(pipeline_dir, tmp_path):
    result = export(pipeline_dir, to="sdnq", output=tmp_path / "out")
    assert (tmp_path / "out" / "vae").is_dir()
    assert not list((tmp_path / "out").glob("*.packed*"))
    config = json.loads((tmp_path / "out/unet/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "sdnq"
    assert "conv_in.weight" in config["modules_to_not_convert"]
    assert 0.02 < result.mean < 0.03
    vae = "vae/diffusion_pytorch_model.safetensors"
    assert (pipeline_dir / vae).read_bytes() == (tmp_path / "out" / vae).read_bytes()
    # Beside the pipeline nothing is left of packing it on the way.
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", INPUTS)
def test_diffusers_reads_fp8r_rows_bit_for_bit(name, packed, saved, tmp_path):
    folder = packed(name, recipe(convolutions=False))
    result = export(folder, to="fp8r", output=tmp_path / "m.safetensors")
    assert result.worst[0] == 0
    again = type(tiny_denoiser(name)).from_single_file(
        str(tmp_path / "m.safetensors"),
        config=str(saved(name)),
        quantization_config=BFLQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )
    wanted = values_of(folder)
    modules = {n: m for n, m in again.named_modules() if type(m).__name__ == "BFLFP8RLinear"}
    assert set(modules) == set(wanted)
    for layer, module in modules.items():
        rows = module.weight.float() * module.weight_scale.reshape(-1, 1)
        assert torch.equal(rows, wanted[layer]), layer


@pytest.mark.parametrize(("how", "dtype"), [(None, torch.float32), ("fp8", torch.float8_e4m3fn)])
def test_modulation_stays_unless_a_recipe_says_otherwise(how, dtype, saved, tmp_path):
    export(saved("sd3"), to="fp8r", recipe=how, output=tmp_path / "m.safetensors")
    found = {n: t.dtype for n, t in load_file(tmp_path / "m.safetensors").items()}
    modulation = {kind for name, kind in found.items() if name.endswith(".norm1.linear.weight")}
    assert modulation == {dtype}
    assert found["transformer_blocks.0.attn.to_q.weight"] is torch.float8_e4m3fn


@pytest.fixture
def _narrow_flux(monkeypatch):
    let_diffusers_read_narrow(monkeypatch, "FluxTransformer2DModel")


@pytest.mark.usefixtures("_narrow_flux")
@pytest.mark.parametrize("source", ["dense", "packed"])
@pytest.mark.parametrize("name", INPUTS)
def test_diffusers_reads_a_single_file(name, source, saved, packed, tmp_path):
    folder = saved(name) if source == "dense" else packed(name)
    values = {} if source == "dense" else values_of(folder)
    wanted = with_values(name, values)
    export(folder, to="single-file", output=tmp_path / "m.safetensors")
    again = type(wanted).from_single_file(
        str(tmp_path / "m.safetensors"), config=str(saved(name)), torch_dtype=torch.float32
    )
    state, expected = again.state_dict(), wanted.state_dict()
    assert not [key for key in expected if not torch.equal(state[key], expected[key])]


def test_a_single_file_has_the_dtype_of_the_model(tmp_path):
    model = tiny_denoiser("sd3").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    pack(tmp_path / "m", output=tmp_path / "p")
    result = export(tmp_path / "p", to="single-file", output=tmp_path / "m.safetensors")
    assert set(result.types) == {"BF16"}
    # Codes of three bits times a scale, rounded to eight.
    assert 0 < result.worst[0] < 2**-8


def test_the_header_says_where_the_file_came_from(packed, tmp_path):
    export(packed("sd3"), to="fp8r", output=tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        told = json.loads(file.metadata()["quantkit"])
        assert told["recipe"]["name"] == "fp8"
        assert set(told["tensors"]) == set(file.keys())
    component = open_packed(packed("sd3")).components[0]
    assert told["sources"] == {n: r.source_sha256 for n, r in component.records.items()}


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "convolution": (
        "sd15",
        {},
        "fp8r",
        r"down_blocks.0.attentions.0.proj_in: a quantized convolution, which fp8r does not hold",
    ),
    "format": ("sd3", {"weight": {"format": "e5m2"}}, "sdnq", "format e5m2, which SDNQ does"),
    "groups": (
        "sd3",
        {"weight": {"granularity": "group:32"}},
        "sdnq",
        r"scales of groups \(e4m3fn\), which SDNQ does not hold",
    ),
    "blocks": (
        "sd3",
        {
            "weight": {"format": "q8_0", "granularity": "group:32"},
            "activation": {"mode": "none"},
        },
        "fp8r",
        r"scales of groups \(q8_0\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_target_does_not_hold_is_refused_or_converted(case, packed, tmp_path):
    name, changed, to, said = REFUSED[case]
    folder, output = packed(name, recipe(**changed)), tmp_path / "out"
    with pytest.raises(CheckpointError, match=said) as caught:
        export(folder, to=to, output=output)
    assert "requantize" in caught.value.fields
    assert not list(tmp_path.iterdir())
    result = export(folder, to=to, output=output, requantize=True)
    assert result.errors
    # Steps of e5m2 are those of e4m3 under another scale.
    exact = {"convolution", "format"}
    assert result.worst[0] < 1e-6 if case in exact else 0.005 < result.worst[0] < 0.06
    assert result.notes


def test_converted_layers_keep_a_format_that_the_target_has(calibrated, tmp_path):
    """Of two int8 codes one step apart; as FP8, weights would lose .02 and more."""
    pipeline, calibration = calibrated("sd3")
    how = recipe(weight={"format": "int8"}, smooth=0.5)
    pack(pipeline, output=tmp_path / "p", recipe=how, calibration=calibration)
    result = export(tmp_path / "p", to="sdnq", output=tmp_path / "out", requantize=True)
    assert set(result.types) & {"I8", "F8_E4M3"} == {"I8"}
    assert 0 < result.worst[0] < 0.01


def test_inputs_that_weights_alone_do_not_say_are_named(saved, tmp_path):
    from tests.support.packing import calibration_of

    static = recipe(activation={"mode": "static", "observer": "amax"}, convolutions=False)
    pack(saved("sd3"), output=tmp_path / "p", recipe=static,
         calibration=calibration_of(saved("sd3")))  # fmt: skip
    result = export(tmp_path / "p", to="fp8r", output=tmp_path / "m.safetensors", dry_run=True)
    assert any("static input scales of 21 weights are left out" in note for note in result.notes)


def test_expanded_masks_are_told(packed, tmp_path):
    how = recipe(sparsity={"pattern": "2:4"}, convolutions=False)
    result = export(packed("sd3", how), to="fp8r", output=tmp_path / "m.safetensors")
    assert any(note.startswith("2:4 of") for note in result.notes)
    assert result.worst[0] == 0


def test_gguf_rounds_again_only_when_asked(packed, tmp_path):
    result = export(packed("sd3"), to="gguf:Q8_0", output=tmp_path / "m.gguf", requantize=True)
    assert 0 < result.mean < 0.01
    assert not result.copied


@pytest.mark.parametrize("to", ["sdnq", "fp8r", "single-file", "comfyui-int8"])
def test_a_dry_run_says_the_same_and_writes_nothing(to, saved, tmp_path):
    planned = export(saved("sd3"), to=to, output=tmp_path / "out", dry_run=True)
    assert not list(tmp_path.iterdir())
    written = export(saved("sd3"), to=to, output=tmp_path / "out")
    assert (planned.types, planned.nbytes, planned.copied) == (
        written.types, written.nbytes, written.copied,
    )  # fmt: skip
    assert planned.nbytes > 0


def test_a_file_that_reads_otherwise_gets_no_name(packed, tmp_path, monkeypatch):
    output = tmp_path / "m.safetensors"
    read = tensor_export._read
    with monkeypatch.context() as patch:
        patch.setattr(tensor_export, "_read", lambda *args: read(*args) * 1.001)
        with pytest.raises(OutputError, match=r"not read back as written|other values than"):
            export(packed("sd3"), to="fp8r", output=output)
    assert not list(tmp_path.iterdir())
    output.write_bytes(b"mine")
    with pytest.raises(OutputError, match="exists"):
        export(packed("sd3"), to="fp8r", output=output)
    assert output.read_bytes() == b"mine"


def test_arguments_that_mean_nothing_are_refused(packed, saved, tmp_path):
    output = tmp_path / "out"
    with pytest.raises(InputError, match="the model is packed; drop it"):
        export(packed("sd3"), to="sdnq", recipe="fp8", output=output)
    with pytest.raises(InputError, match="gguf:Q8_0 does not quantize by one"):
        export(saved("sd3"), to="gguf:Q8_0", recipe="fp8", output=output)
    with pytest.raises(InputError, match="convolutions with sdnq"):
        export(saved("sd3"), to="sdnq", convolutions=True, output=output)
    with pytest.raises(RecipeError, match="text_encoders: sdnq holds one kind of component"):
        export(saved("sd3"), to="sdnq", recipe=recipe(text_encoders={}), output=output)
    with pytest.raises(InputError, match="no packed text encoder, only "):
        export(packed("sd3"), to="compressed-tensors", output=output)
    with pytest.raises(InputError, match="to 'sdnq:x': unknown, expected one of comfyui, "):
        export(saved("sd3"), to="sdnq:x", output=output)


def test_a_layout_that_is_not_known_is_refused(sana_dir, tmp_path):
    with pytest.raises(ModelError, match="original layout is not known"):
        export(sana_dir, to="single-file", output=tmp_path / "m.safetensors")


@pytest.mark.parametrize("how", [None, "fp8"], ids=["dense", "packed"])
def test_joined_rows_of_several_dtypes_lose_nothing(how, tmp_path):
    """K has numbers that float16 has not; it stays as it is, whatever Q and V are."""
    tiny_denoiser("sd3").to(torch.float16).save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "diffusion_pytorch_model.safetensors"
    tensors, attention = load_file(file), "transformer_blocks.0.attn"
    tensors[f"{attention}.to_k.weight"] = tensors[f"{attention}.to_k.weight"].float() * 1e-6
    save_file(tensors, file)
    source = tmp_path / "m"
    if how is not None:
        pack(source, output=tmp_path / "p", recipe=recipe(keep=[f"{attention}.to_k"]))
        source = tmp_path / "p"
    export(source, to="single-file", output=tmp_path / "one.safetensors")
    found = load_file(tmp_path / "one.safetensors")["joint_blocks.0.x_block.attn.qkv.weight"]
    assert found.dtype == torch.float32
    assert torch.equal(found[64:128], tensors[f"{attention}.to_k.weight"])
    if how is None:
        assert torch.equal(found[:64], tensors[f"{attention}.to_q.weight"].float())
