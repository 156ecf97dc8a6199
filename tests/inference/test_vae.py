"""Packed VAEs: their pictures and latents, what is refused, and what they are called in files."""

import shutil
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

import quantkit
from docs.training.render import draw_pictures
from quantkit import load_recipe, pack, verify
from quantkit.errors import InputError, ModelError, RecipeError
from quantkit.inference.layers.layer_summary import packed_layers
from quantkit.recipe.load import parse_recipe
from quantkit.recipe.schema import Recipe
from quantkit.resources import demo_assets

pytestmark = pytest.mark.usefixtures("one_thread")

#: Configs of SD's and SDXL's VAE, of SD 3's and FLUX.1's, and of FLUX.2's, with a quarter of the
#: channels and two levels of four.
_NARROW = {
    "block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "layers_per_block": 2, "norm_num_groups": 32,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd": ("AutoencoderKL", {**_NARROW, "latent_channels": 4}),
    "flux": ("AutoencoderKL", {
        **_NARROW, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False,
    }),
    "flux2": ("AutoencoderKLFlux2", {**_NARROW, "latent_channels": 16}),
}  # fmt: skip
VAE = Recipe.model_validate({"name": "t", "vae": "int8"})


def made(kind):
    """Return a random VAE and latents."""
    class_name, config = KINDS[kind]
    torch.manual_seed(0)
    vae = getattr(diffusers, class_name)(**config).eval()
    return vae, torch.randn(2, config["latent_channels"], 12, 10)


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def as_pixels(pictures):
    return (pictures.clamp(-1, 1) / 2 + 0.5).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_and_latents_are_those_of_the_16_bit_vae(kind, tmp_path):
    vae, latents = made(kind)
    vae.save_pretrained(tmp_path / "vae")
    pack(tmp_path / "vae", output=tmp_path / "packed", recipe=VAE)
    packed = type(vae).from_pretrained(tmp_path / "packed")
    kept = {"conv_in", "conv_out", "quant_conv", "post_quant_conv"}
    layers = (torch.nn.Conv2d, torch.nn.Linear)
    expected = {n for n, m in vae.named_modules() if isinstance(m, layers)}
    expected = {name for name in expected if name.rpartition(".")[2] not in kept}
    assert {layer.name for layer in packed_layers(packed)} == expected
    with torch.no_grad():
        theirs, ours = (model.decode(latents).sample for model in (vae, packed))
        wanted, found = (model.encode(theirs).latent_dist.mean for model in (vae, packed))
    # Nothing of random networks is smooth: what 20 layers in a row round to 8 bits adds up.
    assert 0 < error(ours, theirs) < 0.08
    assert 0 < error(found, wanted) < 0.08


def test_bundled_pictures_and_latents_are_those_of_the_16_bit_vae(tmp_path):
    source = demo_assets() / "pipeline" / "vae"
    pack(source, output=tmp_path / "packed", recipe=VAE)
    models = [diffusers.AutoencoderKL.from_pretrained(f, torch_dtype=torch.float32)
              for f in (source, tmp_path / "packed")]  # fmt: skip
    pictures = 2 * draw_pictures(2, torch.Generator().manual_seed(99))[1] - 1
    with torch.no_grad():
        wanted, found = (model.encode(pictures).latent_dist.mean for model in models)
        theirs, ours = (as_pixels(model.decode(wanted).sample) for model in models)
    assert error(found, wanted) < 0.01
    assert peak_signal_noise_ratio(theirs, ours, data_range=1) >= 45
    for one, other in zip(theirs, ours, strict=True):
        assert structural_similarity(one, other, channel_axis=-1, data_range=1) >= 0.999


def test_one_recipe_packs_denoiser_and_vae(pipeline_dir, tmp_path):
    recipe = load_recipe("fp8", {"vae": "int8"})
    planned = pack(pipeline_dir, output=tmp_path / "packed", recipe=recipe, dry_run=True)
    summary = pack(pipeline_dir, output=tmp_path / "packed", recipe=recipe)
    assert planned.to_json() == summary.to_json()
    assert {c.name for c in summary.components} == {"unet", "vae"}
    formats = {x.component: x.scheme.weight.name for x in summary.layers if x.scheme}
    assert formats == {"unet": "e4m3fn", "vae": "int8"}
    assert verify(tmp_path / "packed").components == ("unet", "vae")
    pipe = quantkit.load_pipeline(tmp_path / "packed")
    assert {x.component for x in packed_layers(pipe)} == {"unet", "vae"}
    picture = pipe("abc", num_inference_steps=1, output_type="pt").images
    assert torch.isfinite(picture).all()
    pipe.save_pretrained(tmp_path / "again")
    assert not verify(tmp_path / "again").breaches
    with torch.no_grad():
        same = quantkit.load_pipeline(tmp_path / "again").vae.encode(picture).latent_dist.mean
        assert torch.equal(same, pipe.vae.encode(picture).latent_dist.mean)


def test_a_recipe_that_keeps_all_of_a_vae_copies_it(pipeline_dir, tmp_path):
    recipe = load_recipe("fp8", {"vae": {"keep": ["*"]}})
    summary = pack(pipeline_dir, output=tmp_path / "packed", recipe=recipe)
    assert {c.name for c in summary.components} == {"unet"}


def test_attention_of_old_files_is_packed_by_its_present_name(tmp_path):
    """SD 1.5's VAE has names of before 2023, which diffusers changes while it loads."""
    vae, latents = made("sd")
    vae.save_pretrained(tmp_path / "vae")
    (file,) = (tmp_path / "vae").glob("*.safetensors")
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = load_file(file)
    for name, was in old.items():
        tensors = {key.replace(f".{name}.", f".{was}."): t for key, t in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    pack(tmp_path / "vae", output=tmp_path / "packed", recipe=VAE)
    packed = diffusers.AutoencoderKL.from_pretrained(tmp_path / "packed")
    assert "decoder.mid_block.attentions.0.to_q" in {x.name for x in packed_layers(packed)}
    with torch.no_grad():
        assert error(packed.decode(latents).sample, vae.decode(latents).sample) < 0.08


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ("int4", r"vae 'int4': expected int8, or a section"),
        ({"weight": {"rounding": "gptq"}}, "vae: weight.rounding gptq needs second moments"),
        ({"activation": {"mode": "static"}}, "vae: activation.mode static needs statistics"),
        ({"overrides": [{"encoders": ["vae"], "layers": ["*"]}]}, "unknown key .*encoders"),
        ({"layer": []}, "unknown key 'vae.layer'"),
    ],
)
def test_sections_that_cannot_be_are_refused(section, match):
    with pytest.raises(RecipeError, match=match):
        load_recipe("fp8", {"vae": section})


def test_integers_without_statistics_are_refused(pipeline_dir, tmp_path):
    recipe = load_recipe("fp8", {"vae": {"weight": {"format": "int8"},
                                         "activation": {"mode": "token"}}})  # fmt: skip
    with pytest.raises(RecipeError, match=r"int8 without statistics.*set data_free: true"):
        pack(pipeline_dir, output=tmp_path / "packed", recipe=recipe)


def test_a_glob_on_no_layer_is_refused(pipeline_dir, tmp_path):
    recipe = Recipe.model_validate({"name": "t", "vae": {"keep": ["decoder.up_block.*"]}})
    with pytest.raises(RecipeError, match=r"vae.keep: 'decoder.up_block.\*' matches none of the"):
        pack(pipeline_dir, output=tmp_path / "packed", recipe=recipe)


def test_video_vaes_are_refused(pipeline_dir, tmp_path):
    folder = tmp_path / "pipeline"
    shutil.copytree(pipeline_dir, folder)
    shutil.rmtree(folder / "vae")
    video = diffusers.AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False]
    )
    video.save_pretrained(folder / "vae")
    index = (folder / "model_index.json").read_text()
    (folder / "model_index.json").write_text(index.replace("AutoencoderKL", "AutoencoderKLWan"))
    recipe = load_recipe("fp8", {"vae": "int8"})
    with pytest.raises(RecipeError, match=r"vae: AutoencoderKLWan stays in 16 bit.*; drop it"):
        pack(folder, output=tmp_path / "packed", recipe=recipe)
    with pytest.raises(ModelError, match="AutoencoderKLWan is no denoiser"):
        pack(folder / "vae", output=tmp_path / "alone", recipe=VAE)


def test_a_vae_alone_needs_the_section(pipeline_dir, tmp_path):
    with pytest.raises(RecipeError, match="says nothing of VAEs; add vae: int8"):
        pack(pipeline_dir / "vae", output=tmp_path / "packed", recipe="fp8")


def test_packed_vaes_are_not_exported(pipeline_dir, tmp_path):
    with pytest.raises(RecipeError, match="vae: comfyui holds no VAE; drop it"):
        quantkit.export(
            pipeline_dir, to="comfyui", output=tmp_path / "x.safetensors",
            recipe=load_recipe("fp8", {"vae": "int8"}),
        )  # fmt: skip
    pack(pipeline_dir / "vae", output=tmp_path / "packed", recipe=VAE)
    with pytest.raises(InputError, match="no packed denoiser, only AutoencoderKL"):
        quantkit.export(tmp_path / "packed", to="comfyui", output=tmp_path / "x.safetensors")


def test_headers_without_the_section_do_not_name_it():
    assert parse_recipe("{name: t}", where="t").vae is None
