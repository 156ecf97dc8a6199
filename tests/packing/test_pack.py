"""Packing: the directory, memory, threads, refusals, and being killed."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint import weight_reader as rows_module
from quantkit.checkpoint.filelist import MADE
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.verification import verify
from quantkit.errors import ArtefactError, NonFiniteError, OutputError, RecipeError
from quantkit.models.source import open_model
from quantkit.packing.pack_model import pack, plan_pack, summarize
from quantkit.packing.plan import recipe_for_header
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from quantkit.sparsity.choose import choose_masks
from quantkit.storage.copying import copy_file
from quantkit.storage.digest import sha256_of
from quantkit.storage.sizes import tell_sizes
from quantkit.storage.tensorfile import read_header
from tests.support.headers import write_header
from tests.support.packing import WEIGHTS, bits, calibration_of, component, run, small_tensors

pytestmark = pytest.mark.usefixtures("any_model")


def test_bytes_do_not_depend_on_the_number_of_threads(pipeline_dir, tmp_path):
    recipe = {"sparsity": {}}
    for threads in (1, 2, 7):
        run(pipeline_dir, tmp_path / str(threads), recipe, threads=threads)
    files = [p.relative_to(tmp_path / "1") for p in (tmp_path / "1").rglob("*") if p.is_file()]
    for file in files:
        data = {(tmp_path / str(threads) / file).read_bytes() for threads in (1, 2, 7)}
        assert len(data) == 1, file


@pytest.mark.parametrize("fixture", ["pipeline_dir", "transformer_pipeline_dir"])
def test_a_pipeline_is_copied_but_for_its_denoiser(request, fixture, tmp_path):
    folder = request.getfixturevalue(fixture)
    summary = run(folder, tmp_path / "packed")
    name = summary.components[0].name
    for path in folder.rglob("*"):
        file = path.relative_to(folder)
        if path.is_file() and file.parts[0] != name:
            copy = tmp_path / "packed" / file
            assert copy.read_bytes() == path.read_bytes()
            assert copy.stat().st_ino != path.stat().st_ino
    before = json.loads((folder / name / "config.json").read_text())
    after = json.loads((tmp_path / "packed" / name / "config.json").read_text())
    config = after.pop("quantization_config")
    assert list(after.items()) == list(before.items())
    assert config["quant_method"] == "quantkit"
    assert (tmp_path / "packed" / "model_index.json").stat().st_mode & 0o044 == 0o044
    verify(tmp_path / "packed", progress=silent)


def test_the_summary_counts_the_layers_of_each_scheme(source, tmp_path):
    summary = run(source, tmp_path / "packed")
    (config,) = (c.config for c in open_packed(tmp_path / "packed").components)
    assert max(summary.by_scheme().values()) > 2
    assert summary.by_scheme() == Counter(config.layers.values())
    assert summary.masked == sum(s.sparsity is not None for s in config.layers.values())
    assert tell_sizes(summary.bytes_before, summary.bytes_after) in str(summary)


def test_the_header_tells_of_a_recipe_what_was_asked_for():
    plain = {"name": "t", "data_free": True}
    told = recipe_for_header(Recipe.model_validate({**plain, "unmatched": "ignore"}))
    assert not told.keys() & {"unmatched", "attention", "text_encoders"}
    asked = recipe_for_header(Recipe.model_validate({**plain, "text_encoders": {}}))
    assert asked.keys() - told.keys() == {"text_encoders"}


def test_config_keeps_an_unsorted_order(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    (folder / "config.json").write_text('{"z": 1, "_class_name": "UNet2DConditionModel", "é": 2}')
    run(folder, tmp_path / "packed")
    found = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert list(found) == ["z", "_class_name", "é", "quantization_config"]


def test_links_are_resolved_and_other_weights_left_out(tmp_path):
    # The hub's cache: files are links to blobs beside the snapshots.
    blobs = tmp_path / "models--owner--name" / "blobs"
    real = component(tmp_path / "real", small_tensors())
    blobs.mkdir(parents=True)
    source = blobs.parent / "snapshots" / "1234"
    source.mkdir(parents=True)
    for index, file in enumerate(("config.json", WEIGHTS)):
        (blobs / str(index)).write_bytes((real / file).read_bytes())
        (source / file).symlink_to(blobs / str(index))
    (blobs / "notes").write_text("hello")
    (source / "NOTES.md").symlink_to(blobs / "notes")
    (source / "diffusion_pytorch_model.bin").write_text("pickle")
    (source / "diffusion_pytorch_model.fp16.safetensors").write_text("other")
    summary = run(source, tmp_path / "packed")
    names = {path.name for path in (tmp_path / "packed").iterdir()}
    assert names == {"config.json", WEIGHTS, "NOTES.md", *MADE}
    assert not any(path.is_symlink() for path in (tmp_path / "packed").iterdir())
    assert (tmp_path / "packed" / "NOTES.md").read_text() == "hello"
    assert [str(file) for file in summary.left_out] == [
        "diffusion_pytorch_model.bin",
        "diffusion_pytorch_model.fp16.safetensors",
    ]


@pytest.mark.parametrize("size", [0, 1, 3 << 20])
def test_copies_without_the_systems_help_are_the_same(tmp_path, monkeypatch, size):
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    copy_file(tmp_path / "a", tmp_path / "b")

    def refuse(*args):
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    copy_file(tmp_path / "a", tmp_path / "c")
    monkeypatch.delattr(os, "copy_file_range")  # Windows and macOS have none
    copy_file(tmp_path / "a", tmp_path / "d")
    assert all((tmp_path / name).read_bytes() == data for name in "bcd")


def test_sharded_sources_stay_cut_where_they_were(pipeline_dir, tmp_path):
    import diffusers

    unet = diffusers.UNet2DConditionModel.from_pretrained(pipeline_dir / "unet")
    unet.half().save_pretrained(tmp_path / "source", max_shard_size="400KB")
    index = "diffusion_pytorch_model.safetensors.index.json"
    before = json.loads((tmp_path / "source" / index).read_text())["weight_map"]
    assert len(set(before.values())) > 2
    run(tmp_path / "source", tmp_path / "packed", threads=2)
    after = json.loads((tmp_path / "packed" / index).read_text())["weight_map"]
    assert {name: after[name] for name in before} == before
    verify(tmp_path / "packed", progress=silent)
    run(pipeline_dir / "unet", tmp_path / "whole")
    cut, whole = (open_packed(tmp_path / n).components[0] for n in ("packed", "whole"))
    assert cut.config.layers == whole.config.layers
    for layer in whole.config.layers:
        for part, tensor in whole.parts(layer).items():
            assert torch.equal(bits(tensor), bits(cut.parts(layer)[part]))


def test_a_plan_knows_every_size_before_writing(pipeline_dir, tmp_path):
    model, recipe = open_model(str(pipeline_dir)), Recipe(name="t")
    plan = plan_pack(model, recipe, calibration=None, masks=None, progress=silent)
    summary = summarize(plan, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    assert summary == run(pipeline_dir, tmp_path / "packed")
    file = tmp_path / "packed" / "unet" / WEIGHTS
    assert summary.components[0].bytes_after == file.stat().st_size
    values = json.loads(json.dumps(summary.to_json()))
    assert values["bytes_after"] == summary.bytes_after < summary.bytes_before
    assert {"conv_in", "conv_out"} <= {n for names in summary.kept().values() for n in names}
    packed = open_packed(tmp_path / "packed").components[0]
    for layer in summary.layers:
        if layer.scheme:
            assert packed.layer_bytes(layer.name) == (layer.bytes_before, layer.bytes_after)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name", ["a.conv.weight", "a.fc.weight", "a.norm.weight", "conv_in.weight"]
)
def test_numbers_that_are_not_finite_are_named(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(rows_module, "BLOCK_ELEMENTS", 700)
    tensors = small_tensors()
    index = tuple(size - 2 for size in tensors[name].shape)
    index = tuple(max(i, 0) for i in index)
    tensors[name][index] = value
    folder = component(tmp_path / "source", tensors)
    text = f"{name}[{', '.join(map(str, index))}]".replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(NonFiniteError, match=rf"{text}: found {value}, expected a finite number"):
        run(folder, tmp_path / "packed", threads=2)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("who", ["calibration", "masks"])
def test_artefacts_of_another_model_are_refused(tmp_path, who):
    folder = component(tmp_path / "source", small_tensors())
    other = small_tensors()
    other["a.fc.weight"][0, 0] += 1
    stranger = component(tmp_path / "other", other)
    parsed = Recipe.model_validate({"name": "t", "sparsity": {}})
    given = (
        {"calibration": calibration_of(stranger)}
        if who == "calibration"
        else {"masks": choose_masks(open_model(str(stranger)), parsed, None, progress=silent)}
    )
    theirs, ours = (
        sha256_of(f / WEIGHTS, read_header(f / WEIGHTS).tensors["a.fc.weight"])
        for f in (stranger, folder)
    )
    match = (
        rf"{who}: layer a\.fc: made from a weight with SHA-256 {theirs}, but the model's has {ours}"
    )
    with pytest.raises(ArtefactError, match=match):
        run(folder, tmp_path / "packed", **given)
    assert not (tmp_path / "packed").exists()


def test_masks_that_do_not_fit_are_refused_before_any_work(tmp_path):
    folder = component(tmp_path / "source", small_tensors())
    parsed = Recipe.model_validate({"name": "t", "sparsity": {}})
    masks = choose_masks(open_model(str(folder)), parsed, None, progress=silent)
    tensors = small_tensors()
    tensors["b.fc.weight"] = tensors.pop("a.fc.weight")
    renamed = component(tmp_path / "renamed", tensors)
    with pytest.raises(ArtefactError, match=r"masks: layer a\.fc: not in this model"):
        run(renamed, tmp_path / "packed", masks=masks)
    tensors["a.fc.weight"] = tensors.pop("b.fc.weight")[:, :64].contiguous()
    narrow = component(tmp_path / "narrow", tensors)
    with pytest.raises(
        ArtefactError, match=r"masks: layer a\.fc: shape \(40, 12\), expected \(40, 8\)"
    ):
        run(narrow, tmp_path / "packed", masks=masks)


def test_a_recipe_that_packs_nothing_is_refused(source, tmp_path):
    with pytest.raises(RecipeError, match=r"packs no layer of .*kept by the recipe"):
        run(source, tmp_path / "packed", {"keep": ["*"]})


@pytest.mark.parametrize("where", ["", "inside", ".."])
def test_an_output_that_overlaps_the_model_is_refused(tmp_path, where):
    folder = component(tmp_path / "dir" / "source", small_tensors())
    with pytest.raises(OutputError, match="overlaps the input"):
        run(folder, folder / where, force=True)
    assert (folder / WEIGHTS).is_file()


def test_an_existing_output_is_replaced_only_by_force(source, tmp_path):
    run(source, tmp_path / "packed")
    (tmp_path / "packed" / "note").write_text("mine")
    with pytest.raises(OutputError, match="packed: exists already; set force to replace it"):
        run(source, tmp_path / "packed")
    assert (tmp_path / "packed" / "note").exists()
    with pytest.raises(OutputError, match="packed: holds note, which quantkit did not write"):
        run(source, tmp_path / "packed", force=True)
    (tmp_path / "packed" / "note").unlink()
    (tmp_path / "packed" / WEIGHTS).write_text("")
    run(source, tmp_path / "packed", force=True)
    verify(tmp_path / "packed", progress=silent)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "packed"}


def test_a_full_disk_leaves_nothing(source, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match="packed: no space left on the device; free some"):
        run(source, tmp_path / "packed", threads=2)
    assert list(tmp_path.iterdir()) == [source]


def test_partial_writes_are_continued(source, tmp_path, monkeypatch):
    run(source, tmp_path / "whole")
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:1000], at))
    run(source, tmp_path / "parts")
    assert (tmp_path / "whole" / WEIGHTS).read_bytes() == (
        tmp_path / "parts" / WEIGHTS
    ).read_bytes()


def hollow(folder, layers):
    """A component whose weights are a hole in the file: zeros, without disk space."""
    folder.mkdir()
    (folder / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    write_header(folder / WEIGHTS, {f"l{i}.weight": [2048, 2048] for i in range(layers)})
    return folder


ROOT = str(Path(__file__).parents[2])

SCRIPT = """
import resource, sys
import pytest
sys.path.insert(0, sys.argv[3])
from tests.support import skeletons
from pathlib import Path
from quantkit.models.source import open_model
from quantkit.packing.pack_model import pack
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
skeletons.install(pytest.MonkeyPatch())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
recipe = Recipe.model_validate({"name": "t", "sparsity": {}})
print("ready", flush=True)
pack(open_model(sys.argv[1]), recipe, Path(sys.argv[2]), calibration=None, masks=None, threads=2,
     force=False, progress=silent)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_hold_the_model(tmp_path):
    source = hollow(tmp_path / "source", 48)
    assert (source / WEIGHTS).stat().st_size > 380 << 20
    command = [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "packed"), ROOT]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kilobytes = int(out.split()[-1])
    # The promise is 300 MB beyond torch for any size; the buffers of two threads take about 40.
    assert kilobytes < 100 << 10


def test_a_killed_run_leaves_no_output_and_the_next_one_works(tmp_path):
    source = hollow(tmp_path / "source", 48)
    command = [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "packed"), ROOT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(f".packed.*/*/{WEIGHTS}")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "packed").exists()
    left = list(tmp_path.glob(".packed.*"))
    assert len(left) == 1
    small = component(tmp_path / "small", small_tensors())
    run(small, tmp_path / "packed")
    verify(tmp_path / "packed", progress=silent)
    assert not list(tmp_path.glob(".packed.*")), "what the killed run left is still there"


def test_torch_threads_are_given_back(source, tmp_path):
    before = torch.get_num_threads()
    run(source, tmp_path / "packed")
    assert torch.get_num_threads() == before


def test_progress_reaches_its_total(source, tmp_path):
    seen = []
    pack(
        open_model(str(source)),
        Recipe(name="t"),
        tmp_path / "packed",
        calibration=None,
        masks=None,
        threads=2,
        force=False,
        progress=lambda step, done, total: seen.append((step, done, total)),
    )
    assert seen[0] == ("pack UNet2DConditionModel", 0, 8)
    assert seen[-1] == ("pack UNet2DConditionModel", 8, 8)
