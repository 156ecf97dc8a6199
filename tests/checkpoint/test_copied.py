"""Components that pack copies are held against the models of their configs, as packed ones are."""

import json
import re
import shutil
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.copied import misfits_of_copies
from quantkit.checkpoint.directory import broken_index, broken_pipeline
from quantkit.checkpoint.verification import verify
from quantkit.errors import CheckpointError, ModelError
from quantkit.models import building
from quantkit.progress import silent
from tests.support.encoders import ENCODERS, make_encoder
from tests.support.packed import relist
from tests.support.packed_folders import VAE, edit_json, edit_tensors, packed_to

ENCODER = "text_encoder/model.safetensors"
CONV, BIAS = "decoder.conv_in.weight", "decoder.conv_in.bias"
NORM = "encoder.layers.0.layer_norm1.weight"


def full(tensors, name):
    """The name in a file: transformers writes a prefix or none, by its version."""
    return next(n for n in tensors if n.endswith(name))


def renamed(file, name):
    def change(tensors):
        tensors["new\u00e9"] = tensors.pop(full(tensors, name))

    return lambda folder: edit_tensors(folder, file, change)


def shorter(file, name):
    def change(tensors):
        found = full(tensors, name)
        tensors[found] = tensors[found][:-1]

    return lambda folder: edit_tensors(folder, file, change)


def in_shards(change):
    """Damage the VAE, in two shards then, whose index tells the names that are there."""

    def both(folder):
        change(folder)
        to_shards(folder / "vae")
        relist(folder)

    return both


def to_shards(folder):
    """Write the weights of a component as two shards."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    names = sorted(tensors)
    table = {}
    for i, part in enumerate((names[::2], names[1::2])):
        shard = f"{file.stem}-0000{i + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / shard, metadata={"format": "pt"})
        table |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": table}
    (folder / f"{file.name}.index.json").write_text(json.dumps(index))
    file.unlink()


def as_variant(change):
    """Damage a variant of the VAE that lies beside the plain one."""

    def variant(folder):
        plain, other = folder / VAE, (folder / VAE).with_suffix(".fp16.safetensors")
        shutil.copy(plain, other)
        change(folder)
        middle = other.read_bytes()
        shutil.copy(plain, other)
        plain.write_bytes(middle)
        relist(folder)

    return variant


CURE = "config.json, weights and model class do not belong together; download it or pack the model"
#: name -> (damage, what is said of it)
MISFITS = {
    "vae-name": (
        renamed(VAE, CONV),
        rf"vae/diff\S+\.safetensors: lacks {CONV} \[\d+, 4, 3, 3\], holds 'newé', .*{CURE}",
    ),
    "vae-shape": (
        shorter(VAE, BIAS), rf"vae/diff\S+: {BIAS}: shape \[\d+\], the model has \[\d+\]; {CURE}"
    ),
    "encoder-name": (
        renamed(ENCODER, NORM),
        rf"text_encoder/model\.safetensors: lacks \S*{NORM} \[\d+\], .*{CURE}",
    ),
    "encoder-shape": (shorter(ENCODER, NORM), rf"{NORM}: shape \[\d+\], the model has .*{CURE}"),
    "shards": (in_shards(renamed(VAE, CONV)), rf"index\.json: lacks {CONV} .*{CURE}"),
    "variant": (as_variant(renamed(VAE, CONV)), rf"fp16\.safetensors: lacks {CONV} .*{CURE}"),
    "other-config": (
        lambda f: (edit_json(f / "vae/config.json", lambda c: c.update(layers_per_block=3)),
                   relist(f)),
        rf"lacks decoder\..*{CURE}",
    ),
    "unknown-class": (
        lambda f: (edit_json(f / "model_index.json", lambda c: c.update(
            text_encoder=["transformers", "NoModel"])), relist(f)),
        r"text_encoder/config\.json: .*'NoModel' is no model of transformers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_copied_component_that_does_not_fit_its_model_is_refused(copy, name):
    change, match = MISFITS[name]
    change(copy)
    for read in (lambda: verify(copy, progress=silent), lambda: quantkit.load_pipeline(copy)):
        with pytest.raises(CheckpointError, match=match) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_pack_refuses_to_copy_it(pipeline_dir, tmp_path):
    source = shutil.copytree(pipeline_dir, tmp_path / "source")
    tensors = load_file(source / VAE)
    tensors["x"] = tensors.pop(CONV)
    save_file(tensors, source / VAE)
    with pytest.raises(ModelError, match=rf"lacks {CONV} \["):
        packed_to(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def with_old_names(folder):
    """Call the attention's projections as uploads of before 2023 do."""
    new = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    old = {}
    for name, tensor in tensors.items():
        part = next((p for p in new if f".attentions.0.{p}." in name), None)
        old[name if part is None else name.replace(part, new[part])] = tensor
    assert len(old.keys() - tensors.keys()) == 16
    save_file(old, folder / "vae" / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize(
    "change", [lambda f: to_shards(f / "vae"), with_old_names], ids=["shards", "old-names"]
)
def test_what_a_loader_takes_is_taken(copy, change):
    change(copy)
    relist(copy)
    verify(copy, progress=silent)
    pipe = quantkit.load_pipeline(copy)
    assert not any(tensor.is_meta for tensor in pipe.vae.state_dict().values())


def pipeline_of(folder, models):
    """Write a directory whose components are these models: name -> (library, model)."""
    index: dict[str, str | list[str]] = {"_class_name": "DiffusionPipeline"}
    for name, (library, model) in models.items():
        model.save_pretrained(folder / name)
        index[name] = [library, type(model).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("class_name", ENCODERS)
def test_encoders_as_transformers_saves_them_fit(class_name, tmp_path):
    model = make_encoder(class_name)
    folder = pipeline_of(tmp_path, {"encoder": ("transformers", model)})
    assert list(misfits_of_copies(folder, ())) == []
    file = folder / "encoder" / "model.safetensors"
    tensors = load_file(file)
    lost = max(n for n in tensors if re.search(r"(layers?|block)\.\d+\..*weight$", n))
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    (line,) = misfits_of_copies(folder, ())
    # Its name in the model, which may have another prefix than that in the file.
    assert re.search(rf"lacks \S*{lost.split('.')[-2]}\.weight \[", line)


def make_safety_checker():
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2}  # fmt: skip
    vision = {**small, "image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config=small, vision_config=vision, projection_dim=8)
    return StableDiffusionSafetyChecker(config)


def make_projection():
    from diffusers.pipelines.audioldm2 import AudioLDM2ProjectionModel

    return AudioLDM2ProjectionModel(4, 4, 4)


@pytest.mark.parametrize(
    ("library", "make"),
    [("stable_diffusion", make_safety_checker), ("audioldm2", make_projection)],
)
def test_classes_of_a_pipelines_own_folder_are_built(library, make, tmp_path):
    folder = pipeline_of(tmp_path, {"part": (library, make())})
    assert list(misfits_of_copies(folder, ())) == []
    (file,) = (folder / "part").glob("*.safetensors")
    tensors = load_file(file)
    lost = min(tensors)
    save_file({n: t for n, t in tensors.items() if n != lost}, file, metadata={"format": "pt"})
    assert f"lacks {lost} [" in "".join(misfits_of_copies(folder, ()))


def test_a_class_of_another_library_is_named_as_not_compared(copy):
    folder = copy / "extra"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    edit_json(copy / "model_index.json", lambda c: c.update(extra=["somebodys", "Net"]))
    relist(copy)
    assert verify(copy, progress=silent).unchecked == (
        "not compared with a model: extra (Net of somebodys)",
    )


def test_one_child_process_builds_all_that_is_copied(whole, monkeypatch):
    said = []

    def child(texts, hidden=()):
        assert not hidden
        said.append(len(texts))
        return [json.dumps(asdict(building._build(text))) for text in texts]

    monkeypatch.setattr(building, "_is_built_here", lambda text: False)
    monkeypatch.setattr(building, "recall", lambda text: None)
    monkeypatch.setattr(building, "remember", lambda text, answer: None)
    monkeypatch.setattr(building, "_said_by_child", child)
    building._built_by_child.cache_clear()
    assert list(misfits_of_copies(whole, {"unet"})) == []
    assert said == [2]


INDEX = "diffusion_pytorch_model.safetensors.index.json"


@pytest.mark.parametrize("damage", ["shard", "index", "no shard"])
def test_an_index_that_cannot_be_followed_is_told(tmp_path, damage):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert not list(broken_index(tmp_path / INDEX))
    if damage == "no shard":
        (tmp_path / "x.safetensors").unlink()
    else:
        (tmp_path / ("x.safetensors" if damage == "shard" else INDEX)).write_bytes(b"{")
    (told,) = broken_index(tmp_path / INDEX)
    assert told.startswith(str(tmp_path))


@pytest.mark.parametrize("damage", [b"{", b"[]", None], ids=str)
def test_a_pipeline_without_a_sound_index_is_told(tmp_path, damage):
    if damage is not None:
        (tmp_path / "model_index.json").write_bytes(damage)
    (told,) = broken_pipeline(tmp_path, {})
    assert told.startswith(f"{tmp_path / 'model_index.json'}: ")
