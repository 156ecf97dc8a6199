"""Which files of a repository are fetched; the hub itself is not asked."""

from fnmatch import fnmatch

import pytest

from quantkit.models import hub

PARTS = {
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
}


def repository(**variants):
    """Names of files: of each part, the weights of these variants; None: the plain ones."""
    files = ["model_index.json", "README.md", "sd.safetensors", "tokenizer/vocab.txt"]
    for part, stem in PARTS.items():
        files += [f"{part}/config.json", f"{part}/{stem}.bin", f"{part}/{stem}.fp16.bin"]
        for variant in variants.get(part, (None,)):
            dot = "" if variant is None else f".{variant}"
            if variant == "sharded":
                files += [f"{part}/{stem}-0000{i}-of-00002.safetensors" for i in (1, 2)]
                files.append(f"{part}/{stem}.safetensors.index.json")
            else:
                files.append(f"{part}/{stem}{dot}.safetensors")
    return files


@pytest.fixture
def root(tmp_path):
    entries = ", ".join(
        f'"{part}": ["diffusers", "AutoencoderKL"]' for part in PARTS if part != "unet"
    )
    unet = '"unet": ["diffusers", "UNet2DConditionModel"], "tokenizer": ["transformers", "T"]'
    (tmp_path / "model_index.json").write_text("{" + f"{unet}, {entries}" + "}")
    return tmp_path


def weights(patterns, files):
    found = {f for f in files if any(fnmatch(f, p) for p in patterns)}
    assert "tokenizer/vocab.txt" in found
    assert not {f for f in found if f.endswith(".bin")}
    return {
        f.partition("/")[0]: f.split("model", 1)[1] for f in found if f.endswith(".safetensors")
    }


@pytest.mark.parametrize(
    ("there", "variant", "fetched"),
    [
        ({}, None, [".safetensors"] * 3),
        ({"unet": (None, "fp16")}, None, [".safetensors"] * 3),
        ({"unet": (None, "fp16")}, "fp16", [".fp16.safetensors", ".safetensors", ".safetensors"]),
        ({"unet": ("fp16",)}, None, [".fp16.safetensors", ".safetensors", ".safetensors"]),
    ],
    ids=["plain", "plain of two", "asked for", "the only one"],
)
def test_one_set_of_weights_is_fetched(there, variant, fetched, root):
    files = repository(**there)
    found = weights(hub._patterns("owner/name", variant, root, files), files)
    assert [found[part] for part in PARTS] == fetched


def test_all_shards_are_fetched(root):
    files = repository(unet=("sharded",))
    patterns = hub._patterns("owner/name", None, root, files)
    assert sum("unet" in p and "-of-" in p for p in patterns) == 2


def test_a_config_comes_without_the_denoisers_weights(root):
    files = repository()
    found = weights(hub._patterns_of_config("owner/name", root, files), files)
    assert sorted(found) == ["text_encoder", "vae"]
