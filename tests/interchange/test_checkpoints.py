"""Whole checkpoints: VAE and text encoders are the file's, as diffusers' converters read them."""

import json
import shutil

import diffusers
import pytest
import torch
import transformers
from click.testing import CliRunner
from diffusers.loaders.single_file_utils import (
    create_diffusers_clip_model_from_ldm,
    create_diffusers_t5_model_from_checkpoint,
)
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.cli import quantkit as command
from quantkit.errors import ModelError
from tests.support.checkpoints import INSIDE, KINDS, checkpoint, write_config

#: What such files have besides, and nobody reads.
IGNORED = {
    "model_ema.decay": torch.zeros(()),
    "betas": torch.zeros(3),
    "sqrt_recipm1_alphas_cumprod": torch.zeros(3),
    "posterior_log_variance_clipped": torch.zeros(3),
    "denoiser.sigmas": torch.zeros(3),
    "first_stage_model.loss.discriminator.main.0.bias": torch.zeros(3),
    "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(3)[None],
    "conditioner.embedders.0.logit_scale": torch.zeros(()),
    "text_encoders.clip_l.transformer.text_projection.weight": torch.ones(32, 32),
    "text_encoders.t5xxl.logit_scale": torch.zeros(()),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a pipeline's config, a checkpoint's path, tensors and components."""
    kept = {}

    def of(name):
        if name not in kept:
            folder = tmp_path_factory.mktemp(name)
            tensors, parts = checkpoint(name)
            here = {key: value for key, value in IGNORED.items() if _belongs(key, tensors)}
            save_file(tensors | here, folder / "m.safetensors")
            config = write_config(name, folder / "config")
            kept[name] = config, folder / "m.safetensors", tensors, parts
        return kept[name]

    return of


def _belongs(name, tensors):
    """A part's leftovers, in a file with the part."""
    first = name.partition(".")[0]
    parts = ("first_stage_model", "cond_stage_model", "conditioner", "text_encoders")
    return first not in parts or any(key.startswith(f"{first}.") for key in tensors)


def read_by_diffusers(name, component, config, tensors):
    kind = KINDS[name]
    if component == "vae":
        return diffusers.AutoencoderKL.from_single_file(dict(tensors), config=str(config / "vae"))
    cls = type(kind.encoders[component][0]())
    is_t5 = cls is transformers.T5EncoderModel
    convert = (
        create_diffusers_t5_model_from_checkpoint if is_t5 else create_diffusers_clip_model_from_ldm
    )
    found = convert(
        cls, dict(tensors), subfolder=component, config=str(config), torch_dtype=torch.float16
    )
    found.tie_weights()  # which diffusers leaves to whoever draws
    return found


def _states(name, output, config, tensors):
    """Yield each component's tensors, as imported and as diffusers reads the checkpoint."""
    for component in ("vae", *KINDS[name].encoders):
        theirs = read_by_diffusers(name, component, config, tensors)
        ours = type(theirs).from_pretrained(output / component, dtype=torch.float16)
        yield component, ours.state_dict(), theirs.state_dict()


@pytest.mark.parametrize("name", KINDS)
def test_vae_and_text_encoders_are_what_diffusers_reads_of_the_file(name, files, tmp_path):
    config, path, tensors, parts = files(name)
    result = quantkit.import_file(path, config=config, output=tmp_path / "out")
    assert set(result.others) == parts.keys() - {KINDS[name].component}
    for component, ours, theirs in _states(name, tmp_path / "out", config, tensors):
        assert ours.keys() == theirs.keys()
        differing = [k for k in ours if not torch.equal(ours[k], theirs[k].to(ours[k].dtype))]
        assert not differing, component
        # And the tensors that the checkpoint was made of, where SD3 does not replace them.
        dense = parts[component].state_dict()
        replaced = (
            {"text_projection.weight"} if (name, component) == ("sd3", "text_encoder") else {}
        )
        assert all(torch.equal(ours[k], dense[k].half()) for k in ours.keys() - replaced)


def test_notes_say_what_is_whose(files, tmp_path):
    config, path, *_ = files("sdxl")
    (config / "image_encoder").mkdir(exist_ok=True)
    (config / "image_encoder" / "model.safetensors").touch()
    notes = quantkit.import_file(path, config=config, output=tmp_path, dry_run=True, force=True)
    assert notes.notes == (
        "from the file besides: vae, text_encoder, text_encoder_2",
        "from config: image_encoder",
        "left out, for no pipeline reads it: "
        + ", ".join(f"{x} (1 tensors)" for x in ("betas", "conditioner", "denoiser"))
        + ", first_stage_model (1 tensors) and 3 others",
    )


def test_a_checkpoint_without_a_vae_takes_that_of_config(files, tmp_path):
    config, _, tensors, _ = files("flux")
    (config / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"the base model's")
    path = tmp_path / "m.safetensors"
    save_file({k: v for k, v in tensors.items() if not k.startswith("vae.")}, path)
    result = quantkit.import_file(path, config=config, output=tmp_path / "out")
    assert result.others == ("text_encoder", "text_encoder_2")
    assert "from config: vae" in result.notes
    weights = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "out" / "vae" / weights).read_bytes() == b"the base model's"
    (config / "vae" / weights).unlink()


def test_codes_of_encoders_are_dequantized(files, tmp_path):
    """Comfy-Org's FLUX checkpoint has plain FP8 for denoiser and T5."""
    config, _, tensors, _ = files("flux")
    path, e4m3 = tmp_path / "m.safetensors", torch.float8_e4m3fn
    coded = {k: v.to(e4m3) if k.startswith((INSIDE, "text_enc")) else v for k, v in tensors.items()}
    save_file(coded, path)
    quantkit.import_file(path, config=config, output=tmp_path / "out")
    found = load_file(tmp_path / "out" / "text_encoder_2" / "model.safetensors")
    for key, value in found.items():
        assert torch.equal(value, coded[f"text_encoders.t5xxl.transformer.{key}"].bfloat16()), key


def test_names_of_clip_without_text_model_are_read(files, tmp_path):
    config, _, tensors, parts = files("sd15")
    path, prefix = tmp_path / "m.safetensors", "cond_stage_model.transformer."
    save_file({k.replace(f"{prefix}text_model.", prefix): v for k, v in tensors.items()}, path)
    quantkit.import_file(path, config=config, output=tmp_path / "out")
    encoder = type(parts["text_encoder"]).from_pretrained(tmp_path / "out" / "text_encoder")
    wanted = parts["text_encoder"].state_dict()
    assert all(torch.equal(v, wanted[k].half()) for k, v in encoder.state_dict().items())


def test_a_vae_in_diffusers_names_is_read(files, tmp_path):
    config, _, tensors, parts = files("flux")
    path, dense = tmp_path / "m.safetensors", parts["vae"].half().state_dict()
    kept = {k: v for k, v in tensors.items() if not k.startswith("vae.")}
    save_file(kept | {f"vae.{k}": v for k, v in dense.items()}, path)
    quantkit.import_file(path, config=config, output=tmp_path / "out")
    found = load_file(tmp_path / "out" / "vae" / "diffusion_pytorch_model.safetensors")
    assert found.keys() == dense.keys()
    assert all(torch.equal(found[key], dense[key]) for key in dense)


# What is refused.


def _without(start):
    return lambda tensors: {k: v for k, v in tensors.items() if not k.startswith(start)}


def _with(name, *shape):
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


_BIAS = "cond_stage_model.transformer.text_model.final_layer_norm.bias"
#: kind -> (change of the file, what the error says)
BREACHES = {
    "half a VAE": ("sd15", _without("first_stage_model.enc"), "lacks first_stage_model.encoder"),
    "an encoder without a tensor": ("sd15", _without(_BIAS), f"lacks {_BIAS} for the model of"),
    "a layer more": (
        "sd15",
        _with("cond_stage_model.transformer.text_model.encoder.layers.2.mlp.fc1.bias", 48),
        "has besides cond_stage_model.transformer.text_model.encoder.layers.2.mlp.fc1.bias for",
    ),
    "two layers more": (
        "sd2",
        _with("cond_stage_model.model.transformer.resblocks.24.ln_1.bias", 16),
        "has besides cond_stage_model.model.transformer.resblocks.24.ln_1.bias for",
    ),
    "another width": ("sd15", _with(_BIAS, 31), r"final_layer_norm.bias: shape \[31\], the model"),
    "bytes": (
        "sd15", lambda t: {**t, _BIAS: torch.zeros(32, dtype=torch.uint8)}, "U8 without a marker",
    ),
    "an encoder that config lacks": (
        "flux", _with("text_encoders.clip_g.transformer.text_model.x", 3),
        r"holds text_encoders.clip_g.transformer.\*, but the pipeline of .* has no text_encoder_2",
    ),
    "an encoder that is not known": (
        "flux", _with("text_encoders.qwen.transformer.model.norm.weight", 3),
        "has besides text_encoders.qwen.transformer.model.norm.weight, of which nothing is known",
    ),
    "two that are not known": (
        "flux", lambda t: {**t, **{f"text_encoders.qwen.{x}": torch.zeros(3) for x in "ab"}},
        "has besides text_encoders.qwen.a and 1 more, of which nothing is known",
    ),
    "a schedule of its own": ("sdxl", _with("edm_vpred.sigma_max"), "has besides edm_vpred"),
    "a VAE twice": ("sd15", lambda t: t | {
        k.replace("first_stage_model.", "vae."): v for k, v in t.items()
    }, "has vae twice"),
}  # fmt: skip


@pytest.mark.parametrize("breach", BREACHES)
def test_what_cannot_be_converted_is_refused_unless_configs_is_asked_for(breach, files, tmp_path):
    name, change, match = BREACHES[breach]
    config, _, tensors, _ = files(name)
    path = tmp_path / "m.safetensors"
    save_file({k: v.clone() for k, v in change(tensors).items()}, path)
    if "clip_g" in match:
        config = shutil.copytree(config, tmp_path / "config")
        index = json.loads((config / "model_index.json").read_text())
        index["text_encoder_2"] = [None, None]
        (config / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=match) as caught:
        quantkit.import_file(path, config=config, output=tmp_path / "refused")
    assert f"import {path} --config {config} --encoders config -o model16" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "refused").exists()
    taken = quantkit.import_file(
        path, config=config, output=tmp_path / "o", encoders="config", dry_run=True
    )
    assert taken.others == ()
    assert "left out: " in " ".join(taken.notes)


def test_the_options_values(files, tmp_path):
    config, path, *_ = files("sd15")
    with pytest.raises(ModelError, match="encoders 'base': expected file or config"):
        quantkit.import_file(
            path,
            config=config,
            output=tmp_path / "o",
            encoders="base",  # type: ignore[arg-type]  # what a user may pass
        )
    arguments = ["import", path, "--config", config, "-o", tmp_path / "o", "-n", "--json"]
    done = CliRunner().invoke(command, [*map(str, arguments), "--encoders", "config"])
    assert json.loads(done.stdout)["others"] == []
    done = CliRunner().invoke(command, list(map(str, arguments)))
    assert json.loads(done.stdout)["others"] == ["vae", "text_encoder"]
