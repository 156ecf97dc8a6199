"""Single .safetensors files: what is read of each format, compared with diffusers and by hand."""

import json
import os
import shutil
from itertools import product

import diffusers
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.cli import quantkit as command
from quantkit.errors import ModelError, NonFiniteError
from quantkit.interchange import safetensors_import
from quantkit.interchange.joining import join
from quantkit.interchange.layout_names import layout_of_model, original_tensors
from quantkit.models.source import SingleFile
from quantkit.workflow.single_file import open_single_file
from tests.support.checkpoints import vae_state
from tests.support.denoisers import (
    DENOISERS,
    RENAMED,
    let_diffusers_read_narrow,
    original_state,
    tiny_denoiser,
    tiny_renamed,
)
from tests.support.sampling import turned

WEIGHTS = "diffusion_pytorch_model.safetensors"
INSIDE = "model.diffusion_model."


@pytest.fixture
def config(tmp_path):
    """Return a component's directory without weights."""

    def directory(name):
        folder = tmp_path / f"config-{name}"
        if not folder.exists():
            tiny_denoiser(name).save_config(folder)
        return folder

    return directory


def write(path, tensors, prefix="", metadata=None):
    tensors = {prefix + name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, path, metadata)
    return path


def in_16_bit(name, dtype=torch.bfloat16):
    return {key: value.to(dtype) for key, value in original_state(tiny_denoiser(name)).items()}


def imported(path, folder, output=None, **wishes):
    output = output or path.parent / f"imported-{path.stem}"
    result = quantkit.import_file(path, config=folder, output=output, **wishes)
    return result, load_file(output / WEIGHTS)


def back_in_original(name, tensors):
    """The original layout of imported tensors, which diffusers' class must take as they are."""
    model = tiny_denoiser(name)
    model.load_state_dict({key: value.float() for key, value in tensors.items()})
    return original_state(model)


@pytest.mark.parametrize("prefix", ["", INSIDE], ids=["bare", "prefixed"])
@pytest.mark.parametrize("name", DENOISERS)
def test_16_bit_files_give_the_tensors_that_diffusers_reads(
    name, prefix, config, tmp_path, monkeypatch
):
    dtype = torch.float16 if prefix else torch.bfloat16
    path = write(tmp_path / "m.safetensors", in_16_bit(name, dtype), prefix)
    result, found = imported(path, config(name))
    let_diffusers_read_narrow(monkeypatch, "FluxTransformer2DModel")
    wanted = {key: value.to(dtype) for key, value in tiny_denoiser(name).state_dict().items()}
    if prefix or name in {"sd3", "sd35", "flux"}:  # diffusers wants UNets prefixed
        again = type(tiny_denoiser(name)).from_single_file(
            str(path), config=str(config(name)), torch_dtype=dtype
        )
        wanted = again.state_dict()
    assert found.keys() == wanted.keys()
    assert not [key for key in wanted if not torch.equal(found[key], wanted[key])]
    assert {value.dtype for value in found.values()} == {dtype}
    assert (result.layout, result.notes) == (DENOISERS[name][1], ())
    again = type(tiny_denoiser(name)).from_pretrained(tmp_path / "imported-m")
    assert again.state_dict().keys() == found.keys()


@pytest.mark.parametrize("prefix", ["", INSIDE, "transformer."])
@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_files_in_diffusers_names_are_read(name, prefix, config, tmp_path):
    state = {key: value.half() for key, value in tiny_denoiser(name).state_dict().items()}
    result, found = imported(write(tmp_path / "m.safetensors", state, prefix), config(name))
    assert result.layout == "diffusers"
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_other_models_of_a_checkpoint_are_left_out_of_a_denoiser_in_words(config, tmp_path):
    other = {
        "first_stage_model.decoder.conv_in.weight": torch.zeros(2),
        "first_stage_model.decoder.conv_in.bias": torch.zeros(2),
        "cond_stage_model.transformer.text_model.position_ids": torch.zeros(3, dtype=torch.int64),
        "model_ema.decay": torch.zeros(()),
        "betas": torch.zeros(3),
        "alphas_cumprod": torch.zeros(3),
    }
    state = {INSIDE + key: value for key, value in in_16_bit("sd15").items()}
    result, found = imported(write(tmp_path / "m.safetensors", state | other), config("sd15"))
    assert len(found) == len(state)
    assert result.notes == (
        "left out: first_stage_model (2 tensors)",
        "left out, for no pipeline reads it: "
        + ", ".join(
            f"{x} (1 tensors)" for x in ("alphas_cumprod", "betas", "cond_stage_model", "model_ema")
        ),
    )


# Codes.


def _codes(weight, dtype, per_row):
    """Codes and scales of a weight, by hand: amax over the largest code."""
    largest = 127 if dtype is torch.int8 else torch.finfo(dtype).max
    amax = weight.abs().flatten(1).amax(1) if per_row else weight.abs().amax()
    scale = amax / largest
    scaled = weight / scale.reshape(-1, *[1] * (weight.ndim - 1))
    codes = scaled.round().to(dtype) if dtype is torch.int8 else scaled.to(dtype)
    return codes, scale


def _marker(name):
    return torch.tensor(list(json.dumps({"format": name}).encode()), dtype=torch.uint8)


def comfy(fmt, dtype, *, per_row=False, column=False):
    def lay_out(layer, weight):
        codes, scale = _codes(weight, dtype, per_row)
        scale = scale[:, None] if column else scale
        tensors = {f"{layer}.weight": codes, f"{layer}.weight_scale": scale}
        tensors |= {f"{layer}.comfy_quant": _marker(fmt), f"{layer}.input_scale": torch.ones(())}
        return tensors, codes, scale.reshape(-1)

    return lay_out


def named(scale_name, *, per_row, dtype=torch.float8_e4m3fn):
    def lay_out(layer, weight):
        codes, scale = _codes(weight, dtype, per_row)
        return {f"{layer}.weight": codes, f"{layer}.{scale_name}": scale}, codes, scale.reshape(-1)

    return lay_out


def plain(layer, weight):
    codes = weight.to(torch.float8_e4m3fn)
    return {f"{layer}.weight": codes}, codes, torch.ones(1)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: how layers are laid out, tensors of the file alone, what the format is called
CODINGS = {
    "comfy": (comfy("float8_e4m3fn", E4M3), {}, "ComfyUI's scaled FP8"),
    "comfy-e5m2": (comfy("float8_e5m2", E5M2), {}, "ComfyUI's scaled FP8"),
    "comfy-int8": (
        comfy("int8_tensorwise", torch.int8, per_row=True, column=True), {}, "ComfyUI's int8",
    ),
    "comfy-int8-tensor": (comfy("int8_tensorwise", torch.int8), {}, "ComfyUI's int8"),
    "comfy-metadata": (named("weight_scale", per_row=False), {}, "ComfyUI's scaled FP8"),
    "former": (
        named("scale_weight", per_row=False),
        {"scaled_fp8": torch.zeros(0, dtype=E4M3)},
        "ComfyUI's former scaled FP8",
    ),
    "fp8r": (named("weight_scale", per_row=True), {}, "FP8 with scales (fp8r)"),
    "plain": (plain, {}, "plain FP8"),
}  # fmt: skip


def coded(path, name, coding, *, prefix="", rest=torch.float16):
    """Write a file whose Linear weights are codes; return what its tensors stand for."""
    lay_out, more, _ = CODINGS[coding]
    tensors, values, layers = dict(more), {}, {}
    for key, value in original_state(tiny_denoiser(name)).items():
        if value.ndim == 2 and key.endswith(".weight"):
            made, codes, scale = lay_out(key.removesuffix(".weight"), value)
            tensors |= made
            layers[prefix + key.removesuffix(".weight")] = {"format": "float8_e4m3fn"}
            values[key] = (codes.float() * scale.reshape(-1, 1)).to(rest)
        else:
            tensors[key] = values[key] = value.to(rest)
    metadata = None
    if coding == "comfy-metadata":
        told = {"format_version": "1.0", "layers": layers}
        metadata = {"_quantization_metadata": json.dumps(told)}
    write(path, tensors, prefix, metadata)
    return values


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("name", ["sdxl", "sd3", "flux"])
def test_codes_times_scales_in_the_dtype_of_the_rest(name, coding, config, tmp_path, monkeypatch):
    # An odd length of chunks: rows, and what is swapped, are cut by them.
    monkeypatch.setattr(safetensors_import, "CHUNK_VALUES", 1001)
    path = tmp_path / "m.safetensors"
    values = coded(path, name, coding, prefix=INSIDE if name == "sdxl" else "")
    result, found = imported(path, config(name))
    assert {value.dtype for value in found.values()} == {torch.float16}
    for key, value in back_in_original(name, found).items():
        assert torch.equal(value, values[key].float()), key
    assert result.format == CODINGS[coding][2]
    assert "were quantized before" in result.notes[0]
    assert "dequantized to F16" in result.notes[0]
    assert ("input scales of" in "".join(result.notes)) == ("_scale" in "".join(load_file(path))
        and coding.startswith("comfy") and coding != "comfy-metadata")  # fmt: skip


def test_codes_alone_become_bf16(config, tmp_path):
    state = {k: v.to(E4M3) for k, v in original_state(tiny_denoiser("flux")).items()}
    result, found = imported(write(tmp_path / "m.safetensors", state), config("flux"))
    assert result.types == {"BF16": len(found)}
    for key, value in back_in_original("flux", found).items():
        assert torch.equal(value, state[key].float()), key


@pytest.mark.parametrize(
    "case",
    [
        *turned(["sd15", "sdxl", "sd3", "flux"], ["single-file", "comfyui-int8", "fp8r"]),
        *product(RENAMED, ["single-file", "comfyui-int8"]),
    ],
)
def test_exports_come_back(case, tmp_path):
    name, target = case
    source = tmp_path / "source"
    made = tiny_renamed(name) if name in RENAMED else tiny_denoiser(name)
    made.bfloat16().save_pretrained(source)
    path = tmp_path / "m.safetensors"
    quantkit.export(source, to=target, output=path, force=True)
    _, found = imported(path, source)
    wanted = load_file(source / WEIGHTS)
    assert found.keys() == wanted.keys()
    # int8 per row: half a step of amax / 127; e4m3 within 2**-4; both of numbers that are normal.
    bound = {"single-file": 0.0, "comfyui-int8": 0.02, "fp8r": 0.04}[target]
    for key, value in wanted.items():
        lost = (found[key].float() - value.float()).norm() / value.float().norm()
        assert lost <= bound, key
    assert all(value.dtype == torch.bfloat16 for value in found.values())


def test_auraflow_files_have_a_prefix_of_their_own(tmp_path):
    """That of fal's checkpoints, which diffusers' script of AuraFlow takes off."""
    model = tiny_renamed("AuraFlowTransformer2DModel").bfloat16()
    model.save_config(tmp_path / "config")
    path = write(tmp_path / "m.safetensors", original_state(model), "model.")
    result, found = imported(path, tmp_path / "config")
    assert (result.layout, result.notes) == ("aura", ())
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


#: class -> a tensor that published files have and diffusers leaves out
UNUSED = {
    "Lumina2Transformer2DModel": "norm_final.weight",
    "PixArtTransformer2DModel": "y_embedder.y_embedding",
    "ZImageTransformer2DModel": "norm_final.weight",
}


@pytest.mark.parametrize("prefix", ["", INSIDE], ids=["bare", "prefixed"])
@pytest.mark.parametrize("name", UNUSED)
def test_tensors_that_no_program_reads_are_left_out_in_words(name, prefix, tmp_path):
    model = tiny_renamed(name).bfloat16()
    model.save_config(tmp_path / "config")
    state = {**original_state(model), UNUSED[name]: torch.ones(32, dtype=torch.bfloat16)}
    path = write(tmp_path / "m.safetensors", state, prefix)
    result, found = imported(path, tmp_path / "config")
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert result.notes == (f"left out, for no pipeline reads it: {UNUSED[name]} (1 tensors)",)
    write(path, {**state, "norm_first.weight": torch.ones(32)}, prefix)
    refused(path, tmp_path / "config", "has besides .*norm_first.weight")


# What is refused.


def refused(path, folder, match, error=ModelError):
    with pytest.raises(error, match=match) as caught:
        quantkit.import_file(path, config=folder, output=path.parent / "refused")
    assert "\n" not in str(caught.value)
    assert not (path.parent / "refused").exists()


LAYER = "joint_blocks.0.x_block.mlp.fc1"


def _changed(**tensors):
    return lambda state: {**state, **{f"{LAYER}.{name}": t for name, t in tensors.items()}}


CODES = torch.zeros(256, 64).to(E4M3)
#: name -> (change of a 16-bit file of SD3, what the error says)
BREACHES = {
    "convrot_w4a4": (
        _changed(comfy_quant=_marker("convrot_w4a4")),
        "format convrot_w4a4 is not read, expected one of float8_e4m3fn",
    ),
    "nvfp4 without a marker": (
        _changed(weight=torch.zeros(256, 32, dtype=torch.uint8), weight_scale_2=torch.ones(())),
        "quantized in nvfp4, which is not read",
    ),
    "no JSON": (_changed(comfy_quant=torch.zeros(3, dtype=torch.uint8)), "damaged"),
    "a list": (
        _changed(comfy_quant=torch.tensor([91, 93], dtype=torch.uint8)), "expected a JSON object",
    ),
    "a rotation": (
        _changed(
            weight=torch.zeros(256, 64, dtype=torch.int8),
            weight_scale=torch.ones(256, 1),
            comfy_quant=torch.tensor(
                list(b'{"format":"int8_tensorwise","rotate":true}'), dtype=torch.uint8
            ),
        ),
        "its marker says 'rotate'",
    ),
    "no scale": (
        _changed(weight=CODES, comfy_quant=_marker("float8_e4m3fn")),
        "weight_scale'?: missing, though marked",
    ),
    "not marked codes": (
        _changed(comfy_quant=_marker("float8_e4m3fn"), weight_scale=torch.ones(())),
        r"BF16 \[256, 64\], expected codes in F8_E4M3",
    ),
    "another dtype": (
        _changed(
            weight=torch.zeros(256, 64).to(E5M2),
            comfy_quant=_marker("float8_e4m3fn"),
            weight_scale=torch.ones(()),
        ),
        "expected codes in F8_E4M3",
    ),
    "scales of blocks": (
        _changed(weight=CODES, weight_scale=torch.ones(256, 2)),
        r"shape \[256, 2\], expected \[\] or \[1\] .* or \[256, 1\]; take another file",
    ),
    "int8 alone": (_changed(weight=torch.zeros(256, 64, dtype=torch.int8)), "I8 without a marker"),
    "codes as bytes": (_changed(weight=torch.zeros(256, 64, dtype=torch.uint8)), "U8 without a"),
    "bitsandbytes": (
        _changed(**{"weight.absmax": torch.ones(4)}), "quantized in bitsandbytes, which is not",
    ),
    "smoothing": (
        _changed(
            weight=CODES,
            weight_scale=torch.ones(()),
            comfy_quant=_marker("float8_e4m3fn"),
            pre_quant_scale=torch.ones(64),
        ),
        "has besides .*pre_quant_scale",
    ),
    "a tensor less": (lambda s: {k: v for k, v in s.items() if "mlp.fc2" not in k}, "lacks joint"),
    "a block more": (
        lambda s: {**s, "joint_blocks.9.x_block.mlp.fc1.weight": torch.zeros(4)}, "has besides",
    ),
    "another width": (
        _changed(bias=torch.zeros(255)), r"shape \[255\], the model of .* has \[256\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("breach", BREACHES)
def test_files_that_are_not_understood_are_refused(breach, config, tmp_path):
    change, match = BREACHES[breach]
    refused(write(tmp_path / "m.safetensors", change(in_16_bit("sd3"))), config("sd3"), match)


def test_a_scale_without_a_marker_beside_marked_ones_is_refused(config, tmp_path):
    state = in_16_bit("sd3")
    for layer in (LAYER, "joint_blocks.0.x_block.mlp.fc2"):
        codes, scale = _codes(state[f"{layer}.weight"].float(), E4M3, per_row=False)
        state |= {f"{layer}.weight": codes, f"{layer}.weight_scale": scale}
    state[f"{LAYER}.comfy_quant"] = _marker("float8_e4m3fn")
    refused(write(tmp_path / "m.safetensors", state), config("sd3"), "a scale without a marker")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0])
def test_scales_that_are_no_scales_are_refused(bad, config, tmp_path):
    state = _changed(weight=CODES, weight_scale=torch.tensor(bad))(in_16_bit("sd3"))
    path = write(tmp_path / "m.safetensors", state)
    refused(path, config("sd3"), "weight_scale'?: a scale that is", NonFiniteError)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (E4M3, torch.nan),
        *product((torch.bfloat16, torch.float16, E5M2), (torch.nan, torch.inf, -torch.inf)),
    ],
)
def test_numbers_that_are_none_are_refused(dtype, value, config, tmp_path):
    weight = torch.zeros(256, 64)
    weight[200, 3] = value
    path = write(tmp_path / "m.safetensors", _changed(weight=weight.to(dtype))(in_16_bit("sd3")))
    refused(path, config("sd3"), f"{LAYER}.weight: NaN or infinity", NonFiniteError)


def test_a_scale_of_zero_makes_a_row_of_zeros(config, tmp_path):
    """What amax over the largest code is where a whole row is zero."""
    scale = torch.ones(256, 1)
    scale[7] = 0.0
    state = _changed(weight=torch.ones(256, 64).to(E4M3), weight_scale=scale)(in_16_bit("sd3"))
    _, found = imported(write(tmp_path / "m.safetensors", state), config("sd3"))
    weight = back_in_original("sd3", found)[f"{LAYER}.weight"]
    assert torch.equal(weight, scale.expand(256, 64))


def test_scales_of_a_convolution_may_have_its_rank(config, tmp_path):
    state = in_16_bit("sd15")
    name = next(key for key, value in state.items() if value.shape[2:] == (3, 3))
    shape = state[name].shape
    scale = torch.arange(1.0, shape[0] + 1).reshape(-1, 1, 1, 1)
    marked = {name: torch.ones(shape).to(E4M3), f"{name}_scale": scale}
    path = write(tmp_path / "m.safetensors", {**state, **marked})
    _, found = imported(path, config("sd15"))
    assert torch.equal(back_in_original("sd15", found)[name].float(), scale.expand(shape))


def test_products_beyond_float16_are_refused(config, tmp_path):
    state = _changed(weight=torch.full((256, 64), 448.0).to(E4M3), weight_scale=torch.tensor(1e3))(
        in_16_bit("sd3", torch.float16)
    )
    path = write(tmp_path / "m.safetensors", state)
    refused(path, config("sd3"), "a number beyond F16", NonFiniteError)


OTHERS = {
    "a LoRA": "lora_unet_down_blocks_0.lora_down.weight",
    "a ControlNet": "control_model.input_hint_block.0.weight",
    "a VAE": "decoder.conv_in.weight",
    "a text encoder": "text_model.encoder.layers.0.mlp.fc1.weight",
    "a model, whose layout is not known": "blocks.0.weight",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_files_without_a_denoiser_are_named(kind, config, tmp_path):
    path = write(tmp_path / "m.safetensors", {OTHERS[kind]: torch.zeros(2, 2)})
    refused(path, config("sdxl"), f"m.safetensors: {kind}")


@pytest.mark.parametrize("name", ["m.ckpt", "m.pt", "m.safetensors"])
def test_pickles_are_refused_whatever_their_name(name, config, tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / name)
    refused(tmp_path / name, config("sdxl"), r"pickled, .* take the .safetensors file")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_files_are_refused(share, config, tmp_path):
    path = write(tmp_path / "m.safetensors", in_16_bit("sd15"), INSIDE)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    refused(path, config("sd15"), "truncated")


def test_files_of_another_model_are_refused(config, tmp_path):
    path = write(tmp_path / "m.safetensors", in_16_bit("sdxl"), INSIDE)
    refused(path, config("flux"), r"holds sdxl \(UNet2DConditionModel\), but .* is a Flux")
    refused(path, config("sd15"), "holds sdxl, but .* is of another architecture")
    refused(path, tmp_path / "nowhere", "not a diffusers directory")
    refused(tmp_path / "none.safetensors", config("sdxl"), "no file, and config goes with one")


def test_v_prediction_wants_its_scheduler(pipeline_dir, tmp_path):
    folder = shutil.copytree(pipeline_dir, tmp_path / "pipeline")
    scheduler = folder / "scheduler" / "scheduler_config.json"
    told = json.loads(scheduler.read_text()) | {"prediction_type": "epsilon"}
    scheduler.write_text(json.dumps(told))
    state = load_file(pipeline_dir / "unet" / WEIGHTS) | {"v_pred": torch.zeros(0)}
    path = write(tmp_path / "m.safetensors", state)
    refused(path, folder, "a v-prediction model, but the scheduler .* epsilon; write")
    scheduler.write_text(json.dumps(told | {"prediction_type": "v_prediction"}))
    quantkit.import_file(path, config=folder, output=tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()


# As MODEL.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantkit" / "single-files"


@pytest.fixture
def checkpoint(pipeline_dir, tmp_path):
    """A file in the layout of Stable Diffusion 1.x, with its VAE."""
    state = load_file(pipeline_dir / "unet" / WEIGHTS)
    layout = layout_of_model("UNet2DConditionModel", state)
    tensors = {
        INSIDE + original.name: join(original, [state[name] for name in original.parts])
        for original in original_tensors(layout, state)
    }
    vae = diffusers.AutoencoderKL.from_pretrained(pipeline_dir / "vae", torch_dtype=torch.float16)
    tensors |= {f"first_stage_model.{key}": value for key, value in vae_state(vae).items()}
    return write(tmp_path / "sd.safetensors", tensors)


def cli(*arguments, code=0):
    done = CliRunner().invoke(command, [*map(str, arguments), "-q"], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


@pytest.mark.slow
def test_a_single_file_is_a_model_to_every_command(checkpoint, pipeline_dir, cache, tmp_path):
    config, packed = ("--config", pipeline_dir), tmp_path / "packed"
    cli("pack", checkpoint, *config, "-o", packed)
    assert not quantkit.verify(packed).breaches
    cli(
        "eval", "report", checkpoint, packed, *config, "-o", tmp_path / "report", "--count", 1,
        "--steps", 1, "--lpips-weights", "none", "--clip", "none", "--no-noise-floor",
        code=3,
    )  # fmt: skip
    told = json.loads((tmp_path / "report" / "report.json").read_text())
    assert str(cache) in json.dumps(told)
    # One picture decides no gate.
    assert told["verdict"]["state"] == "undecided"
    again = tmp_path / "again.safetensors"
    cli("export", checkpoint, *config, "--to", "single-file", "-o", again)
    wanted = {k: v for k, v in load_file(checkpoint).items() if k.startswith(INSIDE)}
    found = load_file(again)
    assert len(found) == len(wanted)
    assert all(torch.equal(wanted[INSIDE + k.removeprefix(INSIDE)], v) for k, v in found.items())
    cli("calibrate", "model", checkpoint, *config, "-o", tmp_path / "c", "--count", 1, "-n")
    assert len(list(cache.iterdir())) == 1


def test_opening_says_when_a_file_was_used_last(checkpoint, pipeline_dir, cache):
    source = SingleFile(checkpoint, pipeline_dir)
    open_single_file(source)
    (folder,) = cache.iterdir()
    os.utime(folder, (1, 1))
    open_single_file(source)
    assert folder.stat().st_mtime > 1


def test_import_makes_a_pipeline_that_diffusers_loads(checkpoint, pipeline_dir, tmp_path):
    out = tmp_path / "out"
    told = json.loads(cli("import", checkpoint, "--config", pipeline_dir, "-o", out, "--json"))
    assert (told["written"], told["component"], told["layout"]) == (True, "unet", "sd1")
    assert type(diffusers.DiffusionPipeline.from_pretrained(out)).__name__ == (
        "StableDiffusionPipeline"
    )
    wanted = load_file(pipeline_dir / "unet" / WEIGHTS)
    found = load_file(out / "unet" / WEIGHTS)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    # A copy: what is done to it is not done to the config's.
    assert not (out / "vae" / WEIGHTS).samefile(pipeline_dir / "vae" / WEIGHTS)


def test_a_file_without_config_says_what_is_missing(checkpoint):
    with pytest.raises(ModelError, match="a single file has no config; give the dir") as caught:
        quantkit.open_model(checkpoint)
    assert caught.value.fields == ("config",)
