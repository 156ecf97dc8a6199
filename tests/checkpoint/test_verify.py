"""What verify calls ok, and what loading trusts: every file of a packed pipeline."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.filelist import FILE_LIST, find_file_list
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import find_breaches, verify
from quantkit.errors import CheckpointError, ModelError
from quantkit.models import building, skeleton_cache
from quantkit.models.building import read_skeleton
from quantkit.models.skeleton import Contents, misfits
from quantkit.progress import silent
from quantkit.storage.marker import MARKER
from quantkit.storage.tensorfile import read_header
from tests.support.headers import GOLDEN, golden_keys
from tests.support.packed import digest, relist
from tests.support.packed_folders import (
    UNET,
    VAE,
    WEIGHTS,
    add,
    cut,
    flip,
    model_files,
    of_json,
    packed_to,
    put_nan,
    remove,
    swap,
)
from tests.support.sampling import one_of_each


def scheme_of_stray(folder):
    """A packed layer that the model lacks, consistent in every file."""
    path = folder / "unet" / WEIGHTS
    with safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["quantkit"])
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    twin = next(n for n in sorted(record["layers"]) if n.endswith("to_q"))
    for part in ("weight", "weight_scale"):
        tensors[f"stray.{part}"] = tensors[f"{twin}.{part}"].clone()
    record["layers"]["stray"] = record["layers"][twin]
    record["tensors"] = {n: digest(t) for n, t in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt", "quantkit": json.dumps(record)})
    schemes = of_json(
        "unet/config.json",
        lambda c: c["quantization_config"]["schemes"][0]["layers"].append("stray"),
    )
    schemes(folder)
    relist(folder)


FIRST = "down_blocks.0.resnets.0"
#: Another model of the same size, byte for byte.
EPSILON = swap("unet/config.json", b'"norm_eps": 1e-05', b'"norm_eps": 2e-05')

#: name -> (damage, what verify says)
DAMAGE = {
    "cut-vae": (cut(VAE), r"vae/diff.*: \d+ bytes, quantkit.files.json says"),
    "flipped-vae": (flip(VAE), r"vae/diff.*: damaged: SHA-256"),
    "flipped-encoder": (flip("text_encoder/model.safetensors"), r"model\.safetensors: damaged"),
    "no-encoder": (lambda f: shutil.rmtree(f / "text_encoder"), r"text_encoder/.*: missing"),
    "no-vocabulary": (
        lambda f: min(f.glob("tokenizer/*.json")).unlink(), r"tokenizer/.*: missing, though"
    ),
    "no-weights": (lambda f: (f / VAE).unlink(), r"vae/.*: missing, though"),
    "no-scheduler": (
        lambda f: shutil.rmtree(f / "scheduler"), r"scheduler_config\.json: missing, though"
    ),
    "empty-index": (lambda f: (f / "model_index.json").write_text("{}"), "model_index.json: 2 by"),
    "norm-eps": (of_json("unet/config.json", lambda c: c.update(norm_eps=1e-3)), "unet/config"),
    "same-size": (EPSILON, r"unet/config\.json: damaged: SHA-256"),
    "scheduler": (
        of_json("scheduler/scheduler_config.json", lambda c: c.update(beta_end=0.5)), "scheduler_c"
    ),
    "code": (flip(UNET), r"damaged: SHA-256"),
    "header": (swap(UNET, b'name\\":\\"t', b'name\\":\\"u'), "its header: damaged"),
    "extra-weights": (
        lambda f: shutil.copy(f / VAE, f / "vae" / "diffusion_pytorch_model.fp16.safetensors"),
        r"fp16\.safetensors: not in quantkit\.files\.json",
    ),
    "extra-config": (lambda f: (f / "unet" / "x.json").write_text("{}"), r"x\.json: not in"),
    "list-no-json": (lambda f: (f / FILE_LIST).write_text("{"), r"files\.json: not JSON"),
    "list-newer": (of_json(FILE_LIST, lambda c: c.update(schema_version=2)), "expected 'quantkit"),
    "list-outside": (
        of_json(FILE_LIST, lambda c: c["files"].update({"../x": {"size": 1, "sha256": "0" * 64}})),
        r"'\.\./x' is no path inside",
    ),
    "list-types": (of_json(FILE_LIST, lambda c: c.update(files=[])), "damaged"),
    "list-entry": (of_json(FILE_LIST, lambda c: c["files"].update(a={"size": True})), "damaged"),
    "list-shorter": (
        of_json(FILE_LIST, lambda c: c["files"].pop("vae/config.json")), r"vae/config.json: not in"
    ),
}  # fmt: skip

#: What fits its digests: name -> (damage, what verify says)
CONSISTENT = {
    "nan-bias": (put_nan(UNET, "conv_in.bias"), r"conv_in\.bias\[31\]: found nan"),
    "inf-bias": (put_nan(UNET, f"{FIRST}.conv1.bias", torch.inf), r"conv1\.bias\[31\]: found inf"),
    "minus-inf-bias": (put_nan(UNET, "conv_in.bias", -torch.inf), r"bias\[31\]: found -inf"),
    "nan-norm": (put_nan(UNET, f"{FIRST}.norm1.weight"), r"norm1\.weight\[31\]: found nan"),
    "nan-vae": (put_nan(VAE, "encoder.conv_in.bias"), r"vae.*conv_in\.bias\[\d+\]: found nan"),
    "missing-key": (remove(UNET, "conv_in.bias"), r"unet: lacks conv_in\.bias"),
    "other-shape": (add(UNET, "conv_in.bias", torch.zeros(3).half()), r"conv_in.bias: shape \[3\]"),
    "stray-layer": (scheme_of_stray, "layers that UNet2DConditionModel lacks: stray"),
    "packed-elsewhere": (
        lambda f: (shutil.copy(f / UNET, f / VAE), relist(f)), "packed weights, but config"
    ),
    "empty-index": (
        lambda f: ((f / "model_index.json").write_text("{}"), relist(f)), "names no pipeline"
    ),
    "index-without-unet": (
        lambda f: (of_json("model_index.json", lambda c: c.pop("unet"))(f), relist(f)),
        "does not name it",
    ),
    "index-of-more": (
        lambda f: (
            of_json("model_index.json", lambda c: c.update(x=["diffusers", "Y"]))(f), relist(f)
        ),
        "x: missing, though model_index.json names it",
    ),
    "no-folder": (
        lambda f: (shutil.rmtree(f / "text_encoder"), relist(f)), "text_encoder: missing, though"
    ),
    "no-weights": (lambda f: ((f / VAE).unlink(), relist(f)), "vae: no weights"),
    "unknown-class": (
        lambda f: (
            of_json("unet/config.json", lambda c: c.update(_class_name="Nothing"))(f), relist(f)
        ),
        "packed Nothing|is no model of diffusers",
    ),
    "no-model": (
        lambda f: (
            of_json("unet/config.json", lambda c: c.update(norm_num_groups=7))(f), relist(f)
        ),
        "cannot be built from it",
    ),
    "endless-model": (
        lambda f: (
            of_json("unet/config.json", lambda c: c.update(layers_per_block=10**9))(f), relist(f)
        ),
        "layers_per_block is 1000000000, but its files hold",
    ),
}  # fmt: skip


def test_what_pack_writes_is_whole(whole):
    result = verify(whole, progress=silent)
    assert result.files == len(model_files(whole))
    assert result.opened == 2
    assert result.unchecked == ()


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_refuses_damage(copy, name):
    change, match = DAMAGE[name]
    change(copy)
    with pytest.raises(CheckpointError, match=match) as caught:
        verify(copy, progress=silent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CONSISTENT)
def test_verify_refuses_what_fits_its_digests(copy, name):
    change, match = CONSISTENT[name]
    change(copy)
    breaches = find_breaches(copy, progress=silent).breaches
    assert any(re.search(match, line) for line in breaches), breaches
    assert not any("damaged: SHA-256" in line for line in breaches)


@pytest.mark.parametrize("seed", range(60))
def test_no_flipped_bit_is_ok(copy, seed):
    generator = torch.Generator().manual_seed(seed)
    files = model_files(copy)
    file = files[seed % len(files)]
    data = bytearray(file.read_bytes())
    place = int(torch.randint(8 * len(data), (), generator=generator))
    data[place // 8] ^= 1 << place % 8
    file.write_bytes(data)
    with pytest.raises(CheckpointError):
        verify(copy, progress=silent)


@pytest.mark.parametrize("name", DAMAGE)
def test_loading_refuses_damage(copy, name):
    change, _ = DAMAGE[name]
    change(copy)
    with pytest.raises((CheckpointError, ModelError)) as caught:
        quantkit.load_pipeline(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["flipped-vae", "flipped-encoder", "code"])
def test_loading_without_checksums_takes_what_it_gets(copy, name):
    DAMAGE[name][0](copy)
    quantkit.load_pipeline(copy, checksums=False)


@pytest.mark.parametrize("name", ["code", "norm-eps", "header"])
def test_from_pretrained_hashes_the_packed_component(copy, name, monkeypatch):
    from diffusers import UNet2DConditionModel

    DAMAGE[name][0](copy)
    with pytest.raises(CheckpointError, match=r"damaged: SHA-256|bytes, quantkit\.files"):
        UNet2DConditionModel.from_pretrained(copy, subfolder="unet")
    monkeypatch.setenv("QUANTKIT_CHECKSUMS", "0")
    UNet2DConditionModel.from_pretrained(copy, subfolder="unet")


def test_harmless_files_come_and_go(copy):
    (copy / "README.md").write_text("hello")
    (copy / "vae" / "picture.png").write_bytes(b"1")
    (copy / MARKER).write_text("{}")
    result = verify(copy, progress=silent)
    assert result.unchecked == ("not in quantkit.files.json: vae/picture.png",)
    quantkit.load_pipeline(copy)


def test_a_directory_without_a_list_is_refused_by_all_that_read_it(copy, monkeypatch):
    from diffusers import UNet2DConditionModel

    (copy / FILE_LIST).unlink()
    of_json("unet/config.json", lambda c: c.update(norm_eps=0.5))(copy)
    for read in (
        lambda: verify(copy, progress=silent),
        lambda: verify(copy / "unet", progress=silent),
        lambda: quantkit.load_pipeline(copy),
        lambda: UNet2DConditionModel.from_pretrained(copy, subfolder="unet"),
    ):
        with pytest.raises(CheckpointError, match=r"no quantkit\.files\.json, .* 'quantkit pack"):
            read()
    monkeypatch.setenv("QUANTKIT_CHECKSUMS", "0")
    UNet2DConditionModel.from_pretrained(copy, subfolder="unet")


def test_a_snapshot_of_the_hub_gets_the_list_that_diffusers_left_there(
    whole, tmp_path, monkeypatch
):
    import huggingface_hub
    from diffusers import UNet2DConditionModel

    snapshot = tmp_path / "models--some--one" / "snapshots" / "abc"
    shutil.copytree(whole, snapshot)
    (snapshot / FILE_LIST).unlink()

    def missing(*args, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", missing)
    with pytest.raises(CheckpointError, match=r"no quantkit\.files\.json"):
        UNet2DConditionModel.from_pretrained(snapshot, subfolder="unet")

    def fetch(repository, name, *, revision, cache_dir):
        assert (repository, revision, cache_dir) == ("some/one", "abc", tmp_path)
        shutil.copy(whole / name, snapshot / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    UNet2DConditionModel.from_pretrained(snapshot, subfolder="unet")


def test_a_component_of_a_pipeline_is_checked_by_its_list(copy):
    assert verify(copy / "unet", progress=silent).files == 2
    EPSILON(copy)
    with pytest.raises(CheckpointError, match=r"unet/config\.json: damaged"):
        verify(copy / "unet", progress=silent)


def test_saving_writes_a_list_that_holds(whole, tmp_path):
    pipe = quantkit.load_pipeline(whole)
    pipe.save_pretrained(tmp_path / "saved")
    assert verify(tmp_path / "saved", progress=silent).unchecked == ()
    assert len(list((tmp_path / "saved").rglob(FILE_LIST))) == 1
    pipe.unet.save_pretrained(tmp_path / "alone")
    assert verify(tmp_path / "alone", progress=silent).unchecked == ()
    assert set(find_file_list(tmp_path / "alone").files) == {"config.json", WEIGHTS}


def test_saving_a_component_corrects_the_list_of_its_pipeline(copy):
    pipe = quantkit.load_pipeline(copy)
    (copy / "unet" / "config.json").write_text("{}")
    pipe.unet.save_pretrained(copy / "unet")
    assert verify(copy, progress=silent).unchecked == ()


def test_hub_downloads_are_what_the_list_names(whole, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot(repository, revision, allow_patterns):
        asked.update(repository=repository, revision=revision, patterns=allow_patterns)
        return str(whole)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a: str(whole / FILE_LIST))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    quantkit.load_pipeline("owner/name")
    assert asked["repository"] == "owner/name"
    assert asked["revision"] == whole.name
    files = [file.relative_to(whole).as_posix() for file in model_files(whole)]
    assert sorted(asked["patterns"]) == sorted([FILE_LIST, *files])


@pytest.mark.parametrize("shape", [(64, 64), (64, 64, 3, 3)])
def test_pack_refuses_a_weight_that_the_model_lacks(pipeline_dir, tmp_path, shape):
    source = shutil.copytree(pipeline_dir, tmp_path / "source")
    path = source / "unet" / WEIGHTS
    save_file({**load_file(path), "stray.weight": torch.zeros(shape).half()}, path)
    with pytest.raises(ModelError, match="layers that UNet2DConditionModel lacks: stray"):
        packed_to(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


PUBLISHED = [p.name.split(".")[0].removeprefix("keys_") for p in GOLDEN.glob("keys_*.json.gz")]


@pytest.mark.parametrize(
    "name", one_of_each(sorted(PUBLISHED), lambda name: name[:3] if "sd3" in name else name)
)
def test_published_models_fit_their_files(name, tmp_path):
    keys = golden_keys(name)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"_class_name": keys["class_name"], **keys["config"]}))
    tensors = {name: tuple(shape) for name, shape in keys["tensors"].items()}
    import diffusers  # noqa: F401  built in this process

    assert not list(misfits(Contents(tmp_path, {}, tensors), read_skeleton(config, "", tensors)))


@pytest.mark.slow
def test_a_child_process_builds_the_same_model_once(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = whole / "unet" / "config.json"
    names = ["a"] * 686
    here = read_skeleton(config, "", names)
    assert "diffusers" in sys.modules
    monkeypatch.delitem(sys.modules, "diffusers")
    building._built_by_child.cache_clear()
    seen = []
    real = subprocess.run

    def spy(*args, **kwargs):
        seen.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(subprocess, "run", spy)
    assert read_skeleton(config, "", names) == here
    building._built_by_child.cache_clear()
    assert read_skeleton(config, "", names) == here
    assert len(seen) == 1
    monkeypatch.setattr(skeleton_cache, "version", lambda name: "another")
    building._built_by_child.cache_clear()
    assert read_skeleton(config, "", names) == here
    assert len(seen) == 2
    monkeypatch.setattr(building, "recall", lambda text: None)
    done = subprocess.CompletedProcess([], 0, stdout='{"problem": "no such class"}')
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    building._built_by_child.cache_clear()
    with pytest.raises(CheckpointError, match=r"config\.json: no such class"):
        read_skeleton(config, "", names)


def test_a_model_that_wants_a_library_kept_from_it_is_built_with_all(whole, monkeypatch):
    config = whole / "unet" / "config.json"
    names = ["a"] * 686
    here = read_skeleton(config, "", names)
    monkeypatch.delitem(sys.modules, "diffusers")
    monkeypatch.setattr(building, "recall", lambda text: None)
    monkeypatch.setattr(building, "remember", lambda text, answer: None)
    commands = []

    def run(command, **options):
        del options
        commands.append(command)
        said = {"problem": "it wants peft"} if "peft" in command else asdict(here)
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(said))

    monkeypatch.setattr(subprocess, "run", run)
    building._built_by_child.cache_clear()
    assert read_skeleton(config, "", names) == here
    assert ["peft" in command for command in commands] == [True, False]


def test_open_packed_needs_no_list(whole):
    assert len(open_packed(whole).components) == 1
    assert read_header(whole / UNET).metadata["format"] == "pt"
